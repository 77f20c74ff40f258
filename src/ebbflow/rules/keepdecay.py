"""Weight decay that takes the same part of the weights for each sample, whatever the rule does to the rate."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ebbflow.rules.base import Modifier, Scaling, State, StepContext
from ebbflow.rules.registry import register_modifier

__all__ = ["KeepDecay"]


@register_modifier("keepdecay", cite="Bergsma et al. 2025, arXiv 2505.13738 (the timescale of weight decay)")
@dataclass(frozen=True)
class KeepDecay(Modifier):
    """lambda is multiplied by S/m, S = B/B0: the decay over a number of samples stays what it was.

    A step shrinks the weights by lr lambda, coupled or decoupled, and steps are S times fewer; with a rate of m times
    the base rate, lr lambda/B is kept by lambda S/m. Linear: unchanged. Square root: lambda sqrt(S). A multiplier that
    went inside the momentum counts as part of m. Optimizers have one decay for all layers: with a layer-wise rule m is
    the mean over the layers.

    Suits: rules far from linear, above all sqrt with AdamW; also warm-ups and ramps of SGD that should not weaken the
    regularisation.

    Example: sqrt+keepdecay
    """

    def modify(self, context: StepContext, scaling: Scaling, state: State) -> tuple[Scaling, State]:
        """S over the multiplier."""
        factor = context.ratio / scaling.multiplier
        return replace(scaling, weight_decay=scaling.weight_decay * factor), state
