"""The multiplier goes into the momentum instead of onto it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ebbflow.rules.base import Modifier, Scaling, State, StepContext, spread
from ebbflow.rules.registry import register_modifier

__all__ = ["Inside"]


@register_modifier("inside", cite="Lin et al. 2019, arXiv 1904.12043, eq. 13")
@dataclass(frozen=True)
class Inside(Modifier):
    """m multiplies the gradient before it enters the momentum; the learning rate stays.

    In the paper v <- mu v + eta sum(gradients), w <- w - v: the sum over the batch, with a step size that does not know
    the batch. That is the mean gradient times B/B0 in the buffer of u <- mu u + g. Old gradients keep the multiplier
    they were taken with, so a change needs no ramp in either direction and no hyper-parameter. Coupled weight decay is
    multiplied with the gradient, or it would be lost. Modifiers further right see a rate that is left alone: write it
    last, as in linear+warmup(5ep)+inside.

    Suits: SGD with momentum on fleets that change often. Adam and its kin, LARS and LAMB divide by the size of the
    gradient, which undoes it: their rate then does not follow the batch.
    """

    def modify(self, context: StepContext, scaling: Scaling, state: State) -> tuple[Scaling, State]:
        """From `lr` to `gradient`."""
        if not isinstance(scaling.lr, tuple) and not isinstance(scaling.gradient, tuple):
            return replace(scaling, lr=1.0, gradient=scaling.gradient * scaling.lr), state
        inner = scaling.gradient if isinstance(scaling.gradient, tuple) else (scaling.gradient,)
        count = max(len(inner), len(scaling.layers))
        pairs = zip(spread(inner, count), spread(scaling.layers, count), strict=True)
        return replace(scaling, lr=1.0, gradient=tuple(gradient * m for gradient, m in pairs)), state
