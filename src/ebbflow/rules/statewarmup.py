"""LENA's warm-up: it ends for each layer when the layer has come far enough."""

from __future__ import annotations

from dataclasses import dataclass

from ebbflow.core.spec import param
from ebbflow.errors import ConfigError, SpecError
from ebbflow.rules.base import Modifier, Scaling, State, StepContext, spread
from ebbflow.rules.registry import register_modifier

__all__ = ["StateWarmup"]


@register_modifier(
    "statewarmup",
    cite="Ko et al. 2022, WWW, doi 10.1145/3485447.3511989",
    exempt={
        "identity": "warms up from nothing at the reference batch too",
        "no less than the base rate": "warms up from nothing",
    },
)
@dataclass(frozen=True)
class StateWarmup(Modifier):
    """m_l is multiplied by p_l/theta until p_l, the sum of the multipliers so far, reaches theta.

    theta = alpha T1, with T1 = samples of the run/B0, the steps of the reference run. As in Algorithm 1 of the paper
    the step's own multiplier is added before the test. With a layer-wise rule every layer has its own sum, so layers
    with much noise end their warm-up sooner; with any other rule there is one for the model, which adds up what the
    rule gave: the gain of AdaScale, S for linear, sqrt(S) for sqrt. A sum only grows: a warm-up that has ended never
    starts again. The record says how many layers are still warming (warming; 1 for a model that is scaled as one).

    Suits: large batches from the first step on, in place of a warm-up whose length must be tuned. The run must have an
    end. With rules far below linear the sum grows slowly and the warm-up takes longer.
    """

    alpha: float = param(0.05, doc="the part of the reference run's steps that the warm-up takes, 0 to 1")

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise SpecError(f"statewarmup: alpha is {self.alpha:g}; expected 0 (none) to 1; the paper advises 0.05")

    def init(self) -> State:
        """The sum of multipliers, of the model or of each layer."""
        return [0.0]

    def modify(self, context: StepContext, scaling: Scaling, state: State) -> tuple[Scaling, State]:
        """Add, then test: lines 17 to 21 of Algorithm 1."""
        if context.total_samples <= 0:
            raise ConfigError(
                "statewarmup lasts for a part of the run, but the run has no end; "
                "give the optimizer its number of epochs, or use a warm-up of a given length: warmup(5ep)"
            )
        theta = self.alpha * context.total_samples / context.ref_batch
        count = max(len(state), len(scaling.layers))
        layers = spread(scaling.layers, count)
        sums = [before + m for before, m in zip(spread(state, count), layers, strict=True)]
        warmed = [m * p / theta if p < theta else m for m, p in zip(layers, sums, strict=True)]
        return scaling.with_lr(warmed).with_stats(warming=float(sum(p < theta for p in sums))), sums
