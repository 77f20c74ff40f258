"""LEGW: the square root with a warm-up that grows with the batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ebbflow.core.spec import param
from ebbflow.core.units import Span
from ebbflow.rules.base import Rule, Scaling, State, StepContext
from ebbflow.rules.registry import register

__all__ = ["Legw"]


@register(
    "legw",
    cite="You et al. 2019, arXiv 1901.08256",
    exempt={
        "identity": "warms up from nothing at the reference batch too",
        "no less than the base rate": "warms up from nothing",
    },
)
@dataclass(frozen=True)
class Legw(Rule):
    """m = sqrt(S) min(1, s/(S W)): sqrt, warmed up over S times the epochs, S = B/B0.

    W is the warm-up of the reference batch and s the samples in the middle of the step. In epochs the warm-up of a
    batch S times as large is S times as long; in steps it always takes the same number. When the batch changes inside
    the warm-up, so does the point at which it ends; once it has ended it stays ended, however large a later batch is.

    Suits: LSTMs, transformers and others trained with a warm-up tuned at the reference batch; with LARS or LAMB.

    Example: legw(1ep)
    """

    warmup: Span = param(doc="warm-up of the reference batch: 1ep (epochs), 200steps or 64000samples")

    def init(self) -> State:
        """Whether the warm-up has ended."""
        return False

    def scale(self, context: StepContext, state: State) -> tuple[Scaling, State]:
        """The square root of the batch ratio, times the part of the warm-up that is done."""
        length = self.warmup.samples(epoch_samples=context.epoch_samples, ref_batch=context.ref_batch) * context.ratio
        # The middle of the step, as in `warmup`: the first step moves, and a step stands for all its samples.
        middle = context.samples + context.batch / 2
        over = state or middle >= length
        return Scaling(lr=math.sqrt(context.ratio) * (1.0 if over else middle / length)), over
