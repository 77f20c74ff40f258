"""Rules that look at noise and signal of the gradient: adascale, noise, lena and surge. All are built on the *gain*."""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass
from typing import Literal

from ebbflow.core.spec import param
from ebbflow.errors import SpecError
from ebbflow.moments.estimate import Moments
from ebbflow.rules.rule import Rule, Scaling, State, StepContext, register_rule

__all__ = ["AdaScale", "Lena", "Noise", "Surge", "gain", "noise_stats", "unmeasured", "whole_gain"]


def gain(noise: float, signal: float, ratio: float) -> float:
    """How many reference steps a step is worth: (noise + signal)/(noise/ratio + signal).

    `noise` is that of the mean gradient of a reference batch, V/B0. The gain lies between 1 and the ratio, also for a
    ratio below 1, and is exactly 1 at the reference batch. Without signal it is the ratio (linear), without noise it is
    1 (constant).

    Averages of unbiased estimates may be negative; they count as zero. Johnson et al. keep the noise above an absolute
    1e-6 instead, which turns a model of small gradients into the linear rule; a limit of zero does not depend on the
    scale of the loss. If both are zero nothing is known, and the result is that of `unmeasured`.

    >>> gain(2.0, 3.0, 2.0), gain(2.0, 3.0, 0.5), gain(2.0, -1.0, 8.0), gain(0.0, 3.0, 8.0)
    (1.25, 0.7142857142857143, 8.0, 1.0)
    """
    # Comparisons instead of min and max, since this runs once per layer in every step.
    noise = noise if noise > 0 else 0.0
    signal = signal if signal > 0 else 0.0
    if signal == 0:
        return ratio if noise > 0 else unmeasured(ratio)
    value = (noise + signal) / (noise / ratio + signal)
    low, high = (1.0, ratio) if ratio > 1 else (ratio, 1.0)
    return low if value < low else high if value > high else value  # rounding may exceed the limits by the last digit


def unmeasured(ratio: float) -> float:
    """The gain while nothing is known, the smaller bound: 1 above the reference batch, the ratio below it."""
    return min(1.0, ratio)


def whole_gain(context: StepContext) -> float:
    """The gain of the step for the whole model."""
    if context.moments is None:
        return unmeasured(context.ratio)
    return gain(context.moments.noise / context.ref_batch, context.moments.signal, context.ratio)


def noise_stats(moments: Moments | None) -> dict[str, float]:
    """Values for the record: noise and signal of the whole model, and the noise scale if it is finite."""
    if moments is None:
        return {}
    stats = {"noise": moments.noise, "signal": moments.signal}
    if math.isfinite(moments.noise_scale):
        stats["noise_scale"] = moments.noise_scale
    return stats


@register_rule("adascale", cite="Johnson et al. 2020, arXiv 2007.05105", needs={"moments"})
@dataclass(frozen=True)
class AdaScale(Rule):
    """m = r = (s2 + mu2)/(s2/S + mu2): the reference steps that a step of S = B/B0 is worth.

    s2 = V/B0 is the variance of the mean gradient of a reference batch, mu2 the squared norm of the true gradient. Both
    are averages over about 1000 reference steps, and the ratio is taken of the averages. If noise dominates, r = S as
    in the linear rule; if signal dominates, r = 1. V and mu2 are properties of the model and not of the fleet, so that
    the gain is right at once when the workers change. S may be any positive number, also below 1.

    Progress: by default the schedule follows the samples, and the run has as many as the reference run. With
    progress=gain it follows the sum of the gains, as in the paper: a step counts as r reference steps, and the run ends
    when their sum reaches the length of the reference run. Since r <= S, that takes more samples than the reference
    run.

    Before anything was measured, r is 1 (the paper's r_0), or S below the reference batch. A measurement needs two
    gradient micro-batches. The measurement of a step is used for the same step, so that with two micro-batches the
    first step already has a gain.

    Suits: SGD with momentum, if the noise of the model is not known: like linear while noise dominates, without further
    growth where more samples no longer help. Needs two gradient micro-batches in most steps.
    """

    progress: Literal["samples", "gain"] = param(
        "samples", doc="what the schedule follows: samples, or gain (as in the paper; takes more samples)"
    )

    def scale(self, context: StepContext, state: State) -> tuple[Scaling, State]:
        """The gain of the whole model."""
        r = whole_gain(context)
        progress = r if self.progress == "gain" else None
        return Scaling(lr=r, progress=progress, stats={"gain": r, **noise_stats(context.moments)}), state


@register_rule("noise", cite="McCandlish et al. 2018, arXiv 1812.06162", needs={"moments"})
@dataclass(frozen=True)
class Noise(Rule):
    """m = ((1 + phi)/(1 + phi B0/B))^a, with phi = noise scale/B0.

    This is the law of the best rate, lr(B) = lr_max/(1 + Bn/B)^a, relative to the reference batch. The noise scale Bn =
    V/mu2 is the batch at which noise and signal are equal. If noise dominates, it is linear (a = 1) or sqrt (a = 1/2);
    if signal dominates, it is constant. With a = 1 it is AdaScale: divide numerator and denominator of the gain by mu2.
    Before anything was measured it is 1, or (B/B0)^a below the reference batch.

    Suits: a = 1 for SGD, a from 0.5 to 1 for Adam and similar optimizers, which normalise the gradient; a workload
    whose noise scale is near the batches of the fleet.
    """

    a: float = param(1.0, doc="the exponent, 0 to 1: 1 for SGD, 0.5 to 1 for Adam")

    def __post_init__(self) -> None:
        if not 0 <= self.a <= 1:
            raise SpecError(f"noise: a is {self.a:g}; expected 0 (constant) to 1 (the law for SGD)")

    def scale(self, context: StepContext, state: State) -> tuple[Scaling, State]:
        """The gain to the power a."""
        r = whole_gain(context)
        return Scaling(lr=r**self.a, stats={"gain": r, **noise_stats(context.moments)}), state


@register_rule(
    "surge",
    cite="Li et al. 2024, arXiv 2405.14578",
    needs={"moments"},
    exempt={"no less than the base rate": "above the noise scale the best rate of a sign-like optimizer falls"},
)
@dataclass(frozen=True)
class Surge(Rule):
    """m = (sqrt(phi) + 1/sqrt(phi))/(sqrt(phi/S) + sqrt(S/phi)), with S = B/B0 and phi = noise scale/B0.

    It rises as sqrt(S), has its maximum where the batch equals the noise scale, and falls above it, so that there a
    smaller batch gets a larger rate. It equals the gain of AdaScale divided by sqrt(S), which needs no division by
    zero: sqrt(S) without signal, 1/sqrt(S) without noise. The record holds past_peak, which is 1 where the batch is
    above the noise scale. Before anything was measured m is 1, or sqrt(S) below the reference batch.

    Suits: Adam, AdamW, Lion and other optimizers whose update hardly depends on the size of the gradient, on fleets
    that can grow beyond the noise scale of the model.
    """

    def scale(self, context: StepContext, state: State) -> tuple[Scaling, State]:
        """The gain divided by the square root of the batch ratio."""
        root = math.sqrt(context.ratio)
        if context.moments is None or max(context.moments.noise, context.moments.signal) <= 0:
            return Scaling(lr=unmeasured(root), stats=noise_stats(context.moments)), state
        r = whole_gain(context)
        past_peak = float(context.batch > context.moments.noise_scale)
        return Scaling(lr=r / root, stats={"gain": r, "past_peak": past_peak, **noise_stats(context.moments)}), state


@functools.cache
def _chosen(layers: int, fraction: float, seed: int) -> frozenset[int]:
    """`fraction` of the layers, rounded, chosen at random; the same ones for the same seed."""
    return frozenset(random.Random(seed).sample(range(layers), round(fraction * layers)))


@register_rule("lena", cite="Ko et al. 2022, WWW, doi 10.1145/3485447.3511989", needs={"moments", "layers"})
@dataclass(frozen=True)
class Lena(Rule):
    """m_l = (top_l + eps)/(bot_l + eps), at most B/B0: the gain of each layer, from its own gradients.

    A layer is a parameter tensor; top_l = mu2_l + V_l/B0 and bot_l = mu2_l + V_l/B are the expected squared norms of
    its mean gradient over a reference batch and over the whole step. In a step of K equal micro-batches V = B(A - N)/(K
    - 1) and mu2 = N - V/B, with A = mean |g_i|^2 and N = |mean g_i|^2, so that bot = N, and top = N + V(1/B0 - 1/B). If
    the micro-batches are reference batches, K = B/B0, then top = A, and since a moving average is a weighted sum,
    top_l/bot_l is the ratio of the paper (its eq. 4 and 8). With another K the expected values are the same, but not
    the numbers: the fewer micro-batches V is measured from, the more it scatters from step to step. The loop engine
    measures one or more per worker; the fused engine measures its fused passes, two or more per step, of 2,048 samples
    each on a GPU unless `fused_batch` says otherwise.

    When the batch changes, the paper's average of bot would have to be converted, since it is made of N of the old
    batch. Here V_l and mu2_l are averaged, which do not depend on the batch, and bot_l is computed for the batch of the
    step, so that no conversion is needed.

    eps is absolute, 1e-6 as in the authors' code: a layer whose squared gradient norm is far below it keeps the base
    rate. Where an average of mu2 is negative, the ratio exceeds its bound, and the bound is used. Before anything was
    measured, and for a model of a single tensor, there is one multiplier for the whole model. The method of the paper
    is this rule with its own warm-up: lena+statewarmup(0.05).

    With a fraction below 1 only so many layers, chosen at random by the seed, have a gain of their own, and the others
    that of the whole model: Figure 4 of the paper compares 1/2 of the layers with all of them and with none (AdaScale).

    Suits: SGD with momentum at very large batches, on deep networks whose layers differ in noise.
    """

    eps: float = param(1e-6, doc="added to both norms; small compared with the squared gradient norms of the layers")
    fraction: float = param(1.0, doc="fraction of the layers with a gain of their own, 0 to 1")
    seed: int = param(0, doc="which layers these are, where they are a fraction")

    def __post_init__(self) -> None:
        if self.eps < 0:
            raise SpecError(f"lena: eps is {self.eps:g}; expected 0 or a small positive number")
        if not 0 <= self.fraction <= 1:
            raise SpecError(f"lena: fraction is {self.fraction:g}; expected 0 (no layer) to 1 (all layers)")

    def scale(self, context: StepContext, state: State) -> tuple[Scaling, State]:
        """The gain of each layer."""
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
        if self.fraction < 1:
            own = _chosen(len(layers), self.fraction, self.seed)
            layers = tuple(r if i in own else whole for i, r in enumerate(layers))
        stats = {"gain": whole, "gain_min": min(layers), "gain_max": max(layers), **noise_stats(moments)}
        return Scaling().with_lr(layers).with_stats(**stats), state
