"""Noise and signal of the gradient, from the micro-batches it is made of. Arithmetic only, no torch.

A step's gradient is the mean of K >= 2 micro-batches of n_i samples each, B in all. With

    A = sum (n_i/B) |g_i|^2      the sample-weighted mean of the micro-batches' squared norms
    N = |sum (n_i/B) g_i|^2      the squared norm of the whole step's mean gradient

E[A] = S + K V/B and E[N] = S + V/B, whatever the sizes of the micro-batches, where V is the *noise* (the trace of the
covariance of one sample's gradient) and S the *signal* (the squared norm of the true gradient). Hence

    V = B (A - N)/(K - 1)        S = N - V/B

both unbiased. With equal micro-batches of the reference batch these are AdaScale's estimators (Johnson et al. 2020,
B.3). Noise and signal belong to the model, not to the fleet: they need no correction when the workers change.

Measuring costs a read of every micro-batch's gradient. Averages that remember many steps lose little if some of them
are not measured: `Averages.due` says which."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ebbflow.errors import CheckpointError, ConfigError

__all__ = ["Averages", "Measurement", "Moments", "decay"]

_GROWN = 1 - math.exp(-1)  # weight of averages that have seen as many samples as they remember
_OBSERVATIONS = 32  # measured steps within the memory, at least: their mean scatters by a sixth of one step's scatter


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What an engine measured in one step; one entry a layer, or a single one for the whole model."""

    batch: int
    """Samples in the step."""
    micro_batches: int
    """Gradient micro-batches: backward passes of different samples."""
    mean_sq: tuple[float, ...]
    """A: sample-weighted mean of the micro-batches' squared norms."""
    sq_mean: tuple[float, ...]
    """N: squared norm of the mean gradient."""

    @property
    def finite(self) -> bool:
        """Whether all numbers are; a step with an infinite gradient says nothing about noise and signal."""
        return math.isfinite(sum(self.mean_sq) + sum(self.sq_mean))

    def estimate(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(noise, signal) of each layer: unbiased, so either may come out below zero in a single step.

        Two micro-batches of one sample with the gradients 3 and 1: A = 5, N = 4, so V = 2(5 - 4)/1 = 2 and S = 4 - 2/2
        = 3.

        >>> Measurement(batch=2, micro_batches=2, mean_sq=(5.0,), sq_mean=(4.0,)).estimate()
        ((2.0,), (3.0,))
        """
        if self.micro_batches < 2:
            raise ConfigError(
                f"noise cannot be told from signal with {self.micro_batches} gradient micro-batch; at least two are "
                "needed: "
                f"more workers, or a smaller micro-batch"
            )
        scale = self.batch / (self.micro_batches - 1)
        noise = [scale * (a - n) for a, n in zip(self.mean_sq, self.sq_mean, strict=True)]
        signal = [n - v / self.batch for n, v in zip(self.sq_mean, noise, strict=True)]
        return tuple(noise), tuple(signal)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Averaged noise and signal, of the whole model and of each layer, as rules see them."""

    noise: float
    """V: trace of the per-sample gradient covariance."""
    signal: float
    """S: squared norm of the true gradient."""
    layer_noise: tuple[float, ...] = ()
    """By layer, in the order of the parameters; empty unless a rule asked for layers."""
    layer_signal: tuple[float, ...] = ()

    @property
    def noise_scale(self) -> float:
        """V/S, in samples: the batch at which noise and signal are equal (McCandlish et al. 2018, B_simple)."""
        return max(self.noise, 0.0) / self.signal if self.signal > 0 else math.inf


def decay(batch: float, memory: float) -> float:
    """What an average keeps of its past in a step: exp(-batch/memory).

    The memory is counted in samples, so an average means the same for every history of workers: two steps of half the
    batch keep as much as one whole step. With a memory of 1000 reference steps this is AdaScale's 1 - S/1000, to first
    order, and never negative.
    """
    if not memory > 0:
        raise ConfigError(f"an average cannot remember {memory} samples; expected a positive number")
    return math.exp(-batch / memory)


@dataclass(frozen=True, slots=True)
class Averages:
    """Bias-corrected moving averages of noise and signal: immutable; `updated` gives the next ones.

    Numerators and denominators are averaged separately and a ratio is taken last, since the ratio of single steps is
    useless. A step with fewer than two micro-batches says nothing: the averages are held, as they are when the workers
    change. Estimates are averaged as they are and not clipped one by one, which would bias a small signal upwards;
    whoever takes a ratio clips the averages.

    Steps that were not measured count as time: the next observation stands for them, too, so that the memory in
    samples is the same however many steps are measured. But it stands for each of them with no more samples than it
    has itself. The last step of an epoch may have two, and in their estimate of a small signal the noise drowns it;
    with the weight of the large steps before it, it would spoil the averages.
    """

    weight: float = 0.0
    """Of all observations, decayed; the averages are the sums over it."""
    noise: tuple[float, ...] = ()
    signal: tuple[float, ...] = ()
    passed_samples: int = 0
    """In the steps since the last observation, none of which was measured."""
    passed_steps: int = 0

    def due(self, batch: int, *, memory: float, every: int) -> bool:
        """Whether a step of so many samples should be measured; if not, tell `passed` when it has been made.

        Every step is, until the averages are as old as their memory. Then one in `every`, more where that would leave
        fewer than 32 observations in the memory. A function of what all replicas have in common, so all agree.

        >>> old = Averages(weight=0.9)
        >>> [old.passed(8).due(8, memory=1000, every=4), old.passed(8).passed(8).passed(8).due(8, memory=1000, every=4)]
        [False, True]
        """
        if self.weight < _GROWN or self.passed_steps + 1 >= every:
            return True
        return self.passed_samples + 2 * batch > memory / _OBSERVATIONS  # else the one after it would come too late

    def passed(self, batch: int) -> Averages:
        """The averages after a step that was not measured."""
        return replace(self, passed_samples=self.passed_samples + batch, passed_steps=self.passed_steps + 1)

    def updated(self, measured: Measurement, *, memory: float) -> Averages:
        """The averages after one more step, remembering about `memory` samples."""
        if measured.micro_batches < 2 or not measured.finite:
            return self
        noise, signal = measured.estimate()
        keep = decay(self.passed_samples + measured.batch, memory)
        credit = min(self.passed_samples + measured.batch, (self.passed_steps + 1) * measured.batch)
        share = 1 - decay(credit, memory)
        return Averages(
            keep * self.weight + share,
            _blend(self.noise, noise, keep, share),
            _blend(self.signal, signal, keep, share),
        )

    def moments(self) -> Moments | None:
        """The averages as rules see them; None before the first observation."""
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
        """As JSON, for a checkpoint."""
        return {
            "weight": self.weight,
            "noise": list(self.noise),
            "signal": list(self.signal),
            "passed": [self.passed_samples, self.passed_steps],
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> Averages:
        """What `state` described."""
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
            f"noise and signal were averaged over {len(old)} layers, but {len(new)} were measured; averages go on "
            f"only with the same parameters and the same kind of rule: start new ones"
        )
    return tuple(keep * before + share * value for before, value in zip(old, new, strict=True))
