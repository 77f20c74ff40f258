"""The power family, of which constant, sqrt and linear are members."""

from __future__ import annotations

from dataclasses import dataclass

from ebbflow.core.spec import param
from ebbflow.errors import SpecError
from ebbflow.rules.base import Rule, Scaling, State, StepContext
from ebbflow.rules.registry import register

__all__ = ["Power"]


@register("power", cite="Shallue et al. 2019, arXiv 1811.03600 (no single exponent fits all workloads)")
@dataclass(frozen=True)
class Power(Rule):
    """m = (B/B0)^p: constant, sqrt and linear are p = 0, 1/2 and 1.

    Suits: a workload of which two batch sizes were tuned: p = log(rate ratio)/log(batch ratio).
    """

    p: float = param(0.75, doc="the exponent, 0 to 1")

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise SpecError(f"power: p is {self.p:g}; expected a number from 0 (constant) to 1 (linear)")

    def scale(self, context: StepContext, state: State) -> tuple[Scaling, State]:
        """The batch ratio to the power p."""
        return Scaling(lr=context.ratio**self.p), state
