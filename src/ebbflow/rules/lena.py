"""LENA: a rate for each layer, from the layer's own gain."""

from __future__ import annotations

from dataclasses import dataclass

from ebbflow.core.spec import param
from ebbflow.errors import SpecError
from ebbflow.rules.base import Rule, Scaling, State, StepContext
from ebbflow.rules.gain import gain, noise_stats, whole_gain
from ebbflow.rules.registry import register

__all__ = ["Lena"]


@register("lena", cite="Ko et al. 2022, WWW, doi 10.1145/3485447.3511989", needs={"moments", "layers"})
@dataclass(frozen=True)
class Lena(Rule):
    """m_l = (top_l + eps)/(bot_l + eps), at most B/B0: the gain of each layer, from its own gradients.

    A layer is a parameter tensor; top_l = mu2_l + V_l/B0 and bot_l = mu2_l + V_l/B are the squared norms to expect of
    its gradient over a reference batch and over the whole step. With K = B/B0 equal micro-batches of the reference
    batch they are the paper's averages, exactly: in each step V = B(A - N)/(K - 1) and mu2 = N - V/B, with A = mean
    |g_i|^2 and N = |mean g_i|^2, so bot = N and top = N + V(1/B0 - 1/B) = N + V(K - 1)/B = A. A moving average is a
    weighted sum, so the same holds for the averages, and top_l/bot_l is the paper's ratio (its eq. 4 and 8).

    When the batch changes, the paper's average of bot would have to be converted, because it holds N of the old batch.
    Here V_l and mu2_l are averaged, which belong to the layer, and bot_l is formed for the batch of the step: the
    conversion is in the formula.

    eps is absolute, 1e-6 as in the authors' code: a layer whose squared gradient norm is far below it counts as quiet
    and keeps the base rate. Where an average of mu2 is below zero, the ratio is past its bound and the bound holds.
    Before anything was measured, and for a model of a single tensor, there is one multiplier for the whole model. The
    paper's method is this rule with its own warm-up: lena+statewarmup(0.05).

    Suits: SGD with momentum at very large batches, on deep networks whose layers differ in noise.
    """

    eps: float = param(1e-6, doc="added to both norms; small against the squared gradient norms of the layers")

    def __post_init__(self) -> None:
        if self.eps < 0:
            raise SpecError(f"lena: eps is {self.eps:g}; expected 0 or a small positive number")

    def scale(self, context: StepContext, state: State) -> tuple[Scaling, State]:
        """One gain a layer."""
        whole, moments = whole_gain(context), context.moments
        if moments is None:
            return Scaling(lr=whole, stats={"gain": whole}), state
        # (top + eps)/(bot + eps) is the gain of a layer whose signal is mu2 + eps.
        layers = tuple(
            gain(noise / context.ref_batch, signal + self.eps, context.ratio)
            for noise, signal in zip(
                moments.layer_noise or (moments.noise,), moments.layer_signal or (moments.signal,), strict=True
            )
        )
        stats = {"gain": whole, "gain_min": min(layers), "gain_max": max(layers), **noise_stats(moments)}
        return Scaling().with_lr(layers).with_stats(**stats), state
