"""The linear rule."""

from __future__ import annotations

from dataclasses import dataclass

from ebbflow.rules.base import Rule, Scaling, State, StepContext
from ebbflow.rules.registry import register

__all__ = ["Linear"]


@register("linear", cite="Goyal et al. 2017, arXiv 1706.02677")
@dataclass(frozen=True)
class Linear(Rule):
    """m = B/B0: k times the batch, k times the rate.

    Suits: SGD with momentum while noise rules the gradient: batches below the noise scale of the model.
    """

    def scale(self, context: StepContext, state: State) -> tuple[Scaling, State]:
        """The batch ratio itself."""
        return Scaling(lr=context.ratio), state
