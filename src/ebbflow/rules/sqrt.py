"""The square-root rule."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ebbflow.rules.base import Rule, Scaling, State, StepContext
from ebbflow.rules.registry import register

__all__ = ["Sqrt"]


@register("sqrt", cite="Krizhevsky 2014, arXiv 1404.5997")
@dataclass(frozen=True)
class Sqrt(Rule):
    """m = sqrt(B/B0): keeps the variance of the update.

    Suits: Adam and its kin; SGD at batches for which linear is too bold. Below the reference batch linear is safer.
    """

    def scale(self, context: StepContext, state: State) -> tuple[Scaling, State]:
        """The square root of the batch ratio."""
        return Scaling(lr=math.sqrt(context.ratio)), state
