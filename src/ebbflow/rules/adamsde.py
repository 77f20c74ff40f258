"""The square-root rule for Adam, with everything that belongs to it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ebbflow.core.spec import param
from ebbflow.rules.base import Rule, Scaling, State, StepContext
from ebbflow.rules.registry import register

__all__ = ["AdamSde"]


@register("adamsde", cite="Malladi et al. 2022, arXiv 2205.10287; Marek et al. 2025, arXiv 2507.07101")
@dataclass(frozen=True)
class AdamSde(Rule):
    """m = sqrt(S), betas -> beta^S, eps -> eps/sqrt(S), with S = B/B0: Adam as the same process in samples.

    The published rule is 1 - beta' = S(1 - beta), which is below zero at S > 10 for beta = 0.9. The half-life form
    beta' = beta^S is equal to it to first order, keeps the averages' memory constant in samples, and is good for every
    S. The optimizer corrects the bias of its averages with the product of the betas that were in force.

    Suits: Adam, AdamW, RMSprop and their kin, while noise rules the gradient. Not SGD.
    """

    beta1: bool = param(True, doc="whether beta1 follows the batch too; much practice keeps it: false")

    def scale(self, context: StepContext, state: State) -> tuple[Scaling, State]:
        """Rate, betas and eps."""
        ratio = context.ratio
        betas = ratio if self.beta1 else (1.0, ratio)
        return Scaling(lr=math.sqrt(ratio), betas=betas, eps=1 / math.sqrt(ratio)), state
