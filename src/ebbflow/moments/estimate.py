"""Noise and signal of the gradient, estimated from the micro-batches of a step. Arithmetic only, no torch.

The gradient of a step is the mean over K >= 2 micro-batches of n_i samples each, B in all. With

    A = sum (n_i/B) |g_i|^2      the sample-weighted mean of the micro-batches' squared norms
    N = |sum (n_i/B) g_i|^2      the squared norm of the mean gradient of the step

E[A] = S + K V/B and E[N] = S + V/B, whatever the sizes of the micro-batches, where V is the *noise* (the trace of the
covariance of one sample's gradient) and S the *signal* (the squared norm of the true gradient). Hence

    V = B (A - N)/(K - 1)        S = N - V/B

are both unbiased. With K = B/B0 equal micro-batches of the reference batch these are AdaScale's estimators (Johnson
et al. 2020, B.3); with fewer and larger ones they are the same on average and scatter more. Noise and signal are
properties of the model, not of the fleet: they need no correction when the workers change.

A measurement reads the gradient of every micro-batch. Averages over many steps lose little if some of the steps are not
measured; `Averages.due` decides which.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ebbflow.errors import CheckpointError, ConfigError

__all__ = ["Averages", "Measurement", "Moments", "decay"]

_FULL_WEIGHT = 1 - math.exp(-1)
"""Weight of averages over as many samples as their memory."""
_OBSERVATIONS = 32
"""Fewest measured steps within the memory; the deviation of their mean is a sixth of that of one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What was measured in one step; one entry per layer, or a single one for the whole model."""

    batch: float
    """Samples in the step."""
    micro_batches: int
    """Number of micro-batches, whose gradients are over different samples."""
    mean_sq: tuple[float, ...]
    """A: sample-weighted mean of the micro-batches' squared norms."""
    sq_mean: tuple[float, ...]
    """N: squared norm of the mean gradient."""

    @property
    def finite(self) -> bool:
        """Whether all numbers are finite; otherwise noise and signal cannot be estimated from the step."""
        return math.isfinite(sum(self.mean_sq) + sum(self.sq_mean))

    @property
    def norm(self) -> float:
        """Norm of the mean gradient of the whole model; NaN if the measurement is not finite."""
        return math.sqrt(math.fsum(self.sq_mean)) if self.finite else math.nan

    def estimate(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(noise, signal) of each layer. Both are unbiased, so that the signal of a single step may be negative.

        Two micro-batches of one sample each with the gradients 3 and 1 have A = 5 and N = 4, so that V = 2(5 - 4)/1 = 2
        and S = 4 - 2/2 = 3.

        >>> Measurement(batch=2, micro_batches=2, mean_sq=(5.0,), sq_mean=(4.0,)).estimate()
        ((2.0,), (3.0,))
        """
        if self.micro_batches < 2:
            raise ConfigError(
                f"noise and signal cannot be estimated from {self.micro_batches} gradient micro-batch; at least two "
                f"are needed: use more workers, or a smaller micro-batch"
            )
        scale = self.batch / (self.micro_batches - 1)
        noise = [scale * (a - n) for a, n in zip(self.mean_sq, self.sq_mean, strict=True)]
        signal = [n - v / self.batch for n, v in zip(self.sq_mean, noise, strict=True)]
        return tuple(noise), tuple(signal)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Averaged noise and signal of the whole model and of each layer."""

    noise: float
    """V: trace of the covariance of one sample's gradient."""
    signal: float
    """S: squared norm of the true gradient."""
    layer_noise: tuple[float, ...] = ()
    """V of each layer, in the order of the parameters; empty unless a rule needs layers."""
    layer_signal: tuple[float, ...] = ()
    """S of each layer."""

    @property
    def noise_scale(self) -> float:
        """V/S in samples: the batch at which noise and signal are equal (McCandlish et al. 2018, B_simple)."""
        return max(self.noise, 0.0) / self.signal if self.signal > 0 else math.inf


def decay(batch: float, memory: float) -> float:
    """The factor by which an average is multiplied in a step: exp(-batch/memory).

    The memory is counted in samples, so that an average does not depend on the history of workers: two steps of half
    the batch have the same effect as one step. With a memory of 1000 reference steps this equals AdaScale's 1 - S/1000
    to first order, and it is never negative.
    """
    if not memory > 0:
        raise ConfigError(f"an average cannot remember {memory} samples; expected a positive number")
    return math.exp(-batch / memory)


@dataclass(frozen=True, slots=True)
class Averages:
    """Bias-corrected moving averages of noise and signal; immutable, `updated` returns the next ones.

    Noise and signal are averaged separately, and ratios are taken of the averages, since the ratio of a single step is
    useless. A step with fewer than two micro-batches leaves the averages unchanged, and so does a change of the
    workers. Estimates are not clipped before averaging, since that would bias a small signal upwards; rules clip the
    averages.

    The memory in samples is the same however many steps are measured: the next observation also stands for the steps
    before it that were not measured. It stands for each of them with at most as many samples as it has itself. The last
    step of an epoch may have only two samples, whose estimate of a small signal is mostly noise; with the weight of the
    large steps before it, it would spoil the averages.
    """

    weight: float = 0.0
    """Sum of the decayed weights of all observations."""
    noise: tuple[float, ...] = ()
    """Weighted sums of the noise, by layer; the average is the sum divided by `weight`."""
    signal: tuple[float, ...] = ()
    """Weighted sums of the signal, by layer."""
    passed_samples: int = 0
    """Samples in the steps since the last observation."""
    passed_steps: int = 0
    """Steps since the last observation."""

    def due(self, batch: int, *, memory: float, every: int) -> bool:
        """Whether an upcoming step of `batch` samples should be measured; if not, call `passed` after it.

        Every step is measured until the averages cover their memory. Then one step in `every` is, and more if there
        would otherwise be fewer than 32 observations within the memory. The result depends only on values that all
        replicas share, so that they agree.

        >>> old = Averages(weight=0.9)
        >>> [old.passed(8).due(8, memory=1000, every=4), old.passed(8).passed(8).passed(8).due(8, memory=1000, every=4)]
        [False, True]
        """
        if self.weight < _FULL_WEIGHT or self.passed_steps + 1 >= every:
            return True
        return self.passed_samples + 2 * batch > memory / _OBSERVATIONS  # the next one would be too late

    def passed(self, batch: int) -> Averages:
        """The averages after a step that was not measured."""
        return replace(self, passed_samples=self.passed_samples + batch, passed_steps=self.passed_steps + 1)

    def updated(self, measured: Measurement, *, memory: float) -> Averages:
        """The averages after a measured step, with a memory of `memory` samples."""
        if measured.micro_batches < 2 or not measured.finite:
            return self
        noise, signal = measured.estimate()
        keep = decay(self.passed_samples + measured.batch, memory)
        credit = min(self.passed_samples + measured.batch, (self.passed_steps + 1) * measured.batch)
        share = 1 - decay(credit, memory)
        return Averages(
            keep * self.weight + share, _blend(self.noise, noise, keep, share), _blend(self.signal, signal, keep, share)
        )

    def moments(self) -> Moments | None:
        """The averages for rules; None before the first observation."""
        if self.weight <= 0:
            return None
        noise = tuple(v / self.weight for v in self.noise)
        signal = tuple(s / self.weight for s in self.signal)
        layers = len(noise) > 1
        return Moments(
            noise=math.fsum(noise),
            signal=math.fsum(signal),
            layer_noise=noise if layers else (),
            layer_signal=signal if layers else (),
        )

    def state(self) -> dict[str, Any]:
        """The averages as JSON values, for a checkpoint."""
        return {
            "weight": self.weight,
            "noise": list(self.noise),
            "signal": list(self.signal),
            "passed": [self.passed_samples, self.passed_steps],
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> Averages:
        """The averages that `state` returned; a damaged state is a CheckpointError."""
        try:
            weight, noise, signal = float(state["weight"]), *(tuple(map(float, state[k])) for k in ("noise", "signal"))
            samples, steps = map(int, state["passed"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the saved averages of noise and signal are damaged: {error!r}") from None
        if (
            len(noise) != len(signal)
            or not all(map(math.isfinite, (weight, *noise, *signal)))
            or min(weight, samples, steps) < 0
        ):
            raise CheckpointError(
                f"the saved averages of noise and signal are damaged: weight {weight}, {len(noise)} noises, "
                f"{len(signal)} signals; expected a finite weight and as many of one as of the other"
            )
        return cls(weight, noise, signal, samples, steps)


def _blend(old: Sequence[float], new: Sequence[float], keep: float, share: float) -> tuple[float, ...]:
    if not old:
        return tuple(share * value for value in new)
    if len(old) != len(new):
        raise ConfigError(
            f"noise and signal were averaged over {len(old)} layers, but {len(new)} were measured; averages can only "
            f"be continued with the same parameters and the same kind of rule: start new ones"
        )
    return tuple(keep * before + share * value for before, value in zip(old, new, strict=True))
