"""The rate does not follow the batch."""

from __future__ import annotations

from dataclasses import dataclass

from ebbflow.rules.base import Rule, Scaling, State, StepContext
from ebbflow.rules.registry import register

__all__ = ["Constant"]


@register("constant", cite="the baseline of every study")
@dataclass(frozen=True)
class Constant(Rule):
    """m = 1: the base rate, whatever the batch.

    Suits: optimizers and batches for which the rate hardly matters; the baseline of a comparison.
    """

    def scale(self, context: StepContext, state: State) -> tuple[Scaling, State]:
        """Nothing changes."""
        return Scaling(), state
