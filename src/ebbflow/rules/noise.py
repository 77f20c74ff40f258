"""The noise-scale law."""

from __future__ import annotations

from dataclasses import dataclass

from ebbflow.core.spec import param
from ebbflow.errors import SpecError
from ebbflow.rules.base import Rule, Scaling, State, StepContext
from ebbflow.rules.gain import noise_stats, whole_gain
from ebbflow.rules.registry import register

__all__ = ["Noise"]


@register("noise", cite="McCandlish et al. 2018, arXiv 1812.06162", needs={"moments"})
@dataclass(frozen=True)
class Noise(Rule):
    """m = ((1 + phi)/(1 + phi B0/B))^a, with phi = noise scale/B0.

    The law of the best rate, lr(B) = lr_max/(1 + Bn/B)^a, written relative to the reference batch; the noise scale
    Bn = V/mu2 is the batch at which noise and signal are equal. One family of four: much noise gives linear (a = 1) or
    sqrt (a = 1/2), much signal gives constant. With a = 1 it is AdaScale, multiplied out: divide the gain's numerator
    and denominator by mu2. Before anything was measured it is 1, and (B/B0)^a below the reference batch.

    Suits: a = 1 for SGD, a from 0.5 to 1 for Adam and its kin, which normalise the gradient; a workload whose noise
    scale lies near the batches of the fleet.
    """

    a: float = param(1.0, doc="the exponent, 0 to 1: 1 for SGD, 0.5 to 1 for Adam")

    def __post_init__(self) -> None:
        if not 0 <= self.a <= 1:
            raise SpecError(f"noise: a is {self.a:g}; expected 0 (constant) to 1 (the law for SGD)")

    def scale(self, context: StepContext, state: State) -> tuple[Scaling, State]:
        """The gain to the power a."""
        r = whole_gain(context)
        return Scaling(lr=r**self.a, stats={"gain": r, **noise_stats(context.moments)}), state
