"""The gain: how many reference steps a step is worth, from noise and signal; for the rules that listen to them."""

from __future__ import annotations

import math

from ebbflow.moments.estimate import Moments
from ebbflow.rules.base import StepContext

__all__ = ["gain", "noise_stats", "unmeasured", "whole_gain"]


def gain(noise: float, signal: float, ratio: float) -> float:
    """(noise + signal)/(noise/ratio + signal), with the noise that a reference batch leaves in its mean gradient.

    It lies between 1 and the ratio on either side of the reference batch, and is exactly 1 at it: all noise gives the
    ratio (linear), all signal gives 1 (constant).

    Averages of unbiased estimates may come out below zero; they count as zero. Johnson et al. keep the noise above an
    absolute 1e-6 instead, which turns a model of small gradients into the linear rule; a limit at zero does not depend
    on the scale of the loss. If both are zero nothing is known, and the answer is that of `unmeasured`.

    >>> gain(2.0, 3.0, 2.0), gain(2.0, 3.0, 0.5), gain(2.0, -1.0, 8.0), gain(0.0, 3.0, 8.0)
    (1.25, 0.7142857142857143, 8.0, 1.0)
    """
    # Comparisons instead of min and max: this runs once a layer in every step.
    noise = noise if noise > 0 else 0.0
    signal = signal if signal > 0 else 0.0
    if noise + signal == 0:
        return unmeasured(ratio)
    value = (noise + signal) / (noise / ratio + signal)
    low, high = (1.0, ratio) if ratio > 1 else (ratio, 1.0)
    return low if value < low else high if value > high else value  # rounding may step over by the last digit


def unmeasured(ratio: float) -> float:
    """The gain while nothing is known: the cautious bound, 1 above the reference batch and the ratio below it."""
    return min(1.0, ratio)


def whole_gain(context: StepContext) -> float:
    """The gain of the whole model in this step."""
    if context.moments is None:
        return unmeasured(context.ratio)
    return gain(context.moments.noise / context.ref_batch, context.moments.signal, context.ratio)


def noise_stats(moments: Moments | None) -> dict[str, float]:
    """What the record keeps: noise and signal of the whole model, and their ratio in samples where there is one."""
    if moments is None:
        return {}
    stats = {"noise": moments.noise, "signal": moments.signal}
    if math.isfinite(moments.noise_scale):
        stats["noise_scale"] = moments.noise_scale
    return stats
