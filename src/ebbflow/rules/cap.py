"""An upper bound of the multiplier."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ebbflow.core.spec import param
from ebbflow.errors import SpecError
from ebbflow.rules.base import Modifier, Scaling, State, StepContext
from ebbflow.rules.registry import register_modifier

__all__ = ["Cap"]


@register_modifier("cap", cite="a safeguard, not a published method")
@dataclass(frozen=True)
class Cap(Modifier):
    """m = min(m, x): no more than x times the base rate.

    Where the schedule follows the gain, a step is worth no more than x reference steps: it went no further.

    Suits: a fleet that may grow beyond the largest batch at which the rule was seen to work.

    Example: linear+cap(8)
    """

    x: float = param(doc="the largest multiplier, at least 1")

    def __post_init__(self) -> None:
        if self.x < 1:
            raise SpecError(f"cap: x is {self.x:g}; expected at least 1: the reference batch keeps the base rate")

    def modify(self, context: StepContext, scaling: Scaling, state: State) -> tuple[Scaling, State]:
        """The smaller of the two."""
        progress = None if scaling.progress is None else min(scaling.progress, self.x)
        return replace(scaling.map_lr(lambda m: min(m, self.x)), progress=progress), state
