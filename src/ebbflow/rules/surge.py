"""The rule of sign-like optimizers, whose best rate falls again beyond the noise scale."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ebbflow.rules.base import Rule, Scaling, State, StepContext
from ebbflow.rules.gain import noise_stats, unmeasured, whole_gain
from ebbflow.rules.registry import register

__all__ = ["Surge"]


@register(
    "surge",
    cite="Li et al. 2024, arXiv 2405.14578",
    needs={"moments"},
    exempt={"no less than the base rate": "beyond the noise scale the best rate of a sign-like optimizer falls"},
)
@dataclass(frozen=True)
class Surge(Rule):
    """m = (sqrt(phi) + 1/sqrt(phi))/(sqrt(phi/S) + sqrt(S/phi)), with S = B/B0 and phi = noise scale/B0.

    Rises as sqrt(S), peaks where the batch equals the noise scale, and falls beyond it. Multiplied out it is the gain
    of AdaScale over sqrt(S), which has no division by zero: sqrt(S) for pure noise, 1/sqrt(S) for pure signal. Past the
    peak a smaller batch gets a larger rate. The record says when: past_peak is 1 where the batch is beyond the noise
    scale. Before anything was measured it is 1, and sqrt(S) below the reference batch.

    Suits: Adam, AdamW, Lion and other optimizers whose update hardly depends on the size of the gradient, on fleets
    that can grow beyond the noise scale of the model.
    """

    def scale(self, context: StepContext, state: State) -> tuple[Scaling, State]:
        """The gain over the square root of the batch ratio."""
        root = math.sqrt(context.ratio)
        if context.moments is None or max(context.moments.noise, context.moments.signal) <= 0:
            return Scaling(lr=unmeasured(root), stats=noise_stats(context.moments)), state
        r = whole_gain(context)
        past_peak = float(context.batch > context.moments.noise_scale)
        return Scaling(lr=r / root, stats={"gain": r, "past_peak": past_peak, **noise_stats(context.moments)}), state
