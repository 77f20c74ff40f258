"""The noisy quadratic model, whose expected loss is known exactly (Zhang et al. 2019, arXiv 1907.04164).

    loss(w) = 1/2 sum_i h_i w_i^2          gradient of one sample = h_i w_i + noise of variance c_i, independent

SGD with momentum in PyTorch's form, coupled weight decay l and the multiplier m inside the momentum,

    u <- mu u + m (g + l w)                w <- w - lr u

is linear in (w, u), so that their second moments follow an exact recursion. With a = m (h + l) and n = m^2 c/B, a step
of B samples turns  ww = E[w^2], wu = E[wu], uu = E[u^2]  in every coordinate into

    uu' = mu^2 uu + 2 mu a wu + a^2 ww + n
    wu' = (mu wu + a ww) - lr uu'
    ww' = ww - 2 lr (mu wu + a ww) + lr^2 uu'

for all batches and rates that do not depend on the noise. The workload `quadratic` samples the same model through the
whole flow. This module is not in `workloads`, which imports torch, since the recursion needs numpy alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ebbflow.errors import ConfigError
from ebbflow.moments.estimate import Averages, Measurement, Moments
from ebbflow.optim.schedules import Schedule, TrainingProgress, factor_of, make_schedule
from ebbflow.rules.rule import Rule, Scaling, StepContext, make_rule

__all__ = ["NoisyQuadratic", "SecondMoments", "Trajectory", "best_rate", "expected_run"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class NoisyQuadratic:
    """Curvature and noise of each coordinate, and the division of the coordinates into layers."""

    curvature: Array
    """h_i of each coordinate."""
    noise: Array
    """c_i of each coordinate: variance of the gradient of one sample."""
    layers: tuple[int, ...]
    """Number of coordinates in each layer, in order; their sum is the dimension."""

    @classmethod
    def power_law(cls, *, dim: int = 64, alpha: float = 1.0, noise: float = 1.0, layers: int = 1) -> NoisyQuadratic:
        """A model with h_i = i^-alpha for i from 1 to dim and c_i = noise h_i, in layers of (nearly) equal size.

        >>> model = NoisyQuadratic.power_law(dim=4, noise=2.0, layers=2)
        >>> model.curvature[:2], model.total_noise, model.layers
        (array([1. , 0.5]), 4.166666666666666, (2, 2))
        """
        if dim < 1 or not 1 <= layers <= dim:
            raise ConfigError(f"quadratic: dim is {dim} and layers is {layers}; expected 1 <= layers <= dim")
        if not (math.isfinite(alpha) and alpha >= 0 and math.isfinite(noise) and noise >= 0):
            raise ConfigError(f"quadratic: alpha is {alpha} and noise is {noise}; expected finite numbers, 0 or more")
        curvature = np.arange(1, dim + 1, dtype=np.float64) ** -alpha
        sizes = tuple(dim // layers + (layer < dim % layers) for layer in range(layers))
        return cls(curvature, noise * curvature, sizes)

    @property
    def total_noise(self) -> float:
        """V = sum c_i: the trace of the covariance of one sample's gradient, which does not depend on the weights."""
        return float(self.noise.sum())

    def loss(self, squares: Array) -> float:
        """1/2 sum h_i w_i^2, from the squared weights or their expected values."""
        return float(self.curvature @ squares) / 2

    def signal(self, squares: Array) -> float:
        """S = sum h_i^2 w_i^2: the squared norm of the true gradient."""
        return float(self.curvature**2 @ squares)

    def moments(self, squares: Array) -> Moments:
        """The exact noise and signal of the whole model and of each layer."""
        noise, signal = self._by_layer(self.noise), self._by_layer(self.curvature**2 * squares)
        several = len(self.layers) > 1
        return Moments(
            noise=math.fsum(noise),
            signal=math.fsum(signal),
            layer_noise=noise if several else (),
            layer_signal=signal if several else (),
        )

    def _by_layer(self, values: Array) -> tuple[float, ...]:
        starts = np.cumsum((0, *self.layers[:-1]))
        return tuple(np.add.reduceat(values, starts).tolist())


@dataclass(frozen=True, slots=True)
class SecondMoments:
    """E[w^2], E[wu] and E[u^2] of every coordinate, which determine the expected loss."""

    ww: Array
    wu: Array
    uu: Array

    @classmethod
    def at(cls, weights: float | Array, dim: int) -> SecondMoments:
        """The second moments before the first step, at the given weights."""
        return cls(np.full(dim, weights, dtype=np.float64) ** 2, np.zeros(dim), np.zeros(dim))

    def stepped(
        self,
        model: NoisyQuadratic,
        *,
        batch: float,
        lr: float | Array,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        gradient: float | Array = 1.0,
    ) -> SecondMoments:
        """The second moments after one step; `gradient` multiplies gradient and weight decay inside the momentum.

        For one coordinate with h = c = 1 at w = 1, and a step of 4 samples at rate 0.5, the gradient is 1 with variance
        1/4, so that E[u^2] = 1.25 and E[w^2] = 1 - 2(0.5) + 0.25(1.25) = 0.3125.

        >>> model = NoisyQuadratic.power_law(dim=1)
        >>> SecondMoments.at(1.0, 1).stepped(model, batch=4, lr=0.5).ww
        array([0.3125])
        """
        slope = gradient * (model.curvature + weight_decay)
        pull = momentum * self.wu + slope * self.ww  # E[w u'] with the weights before the step
        uu = momentum**2 * self.uu + 2 * momentum * slope * self.wu + slope**2 * self.ww
        uu = uu + gradient**2 * model.noise / batch
        return SecondMoments(self.ww - 2 * lr * pull + lr**2 * uu, pull - lr * uu, uu)


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """The expected course of a training."""

    loss: Array
    """Expected loss before each step and after the last one: one value more than there are steps."""
    scalings: tuple[Scaling, ...]
    """What the rule returned for each step."""
    end: SecondMoments
    """The second moments after the last step."""


def expected_run(
    model: NoisyQuadratic,
    rule: str | Rule,
    batches: Iterable[int],
    *,
    lr: float,
    ref_batch: int,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    schedule: str | Schedule | None = None,
    epoch_samples: int = 0,
    start: float | Array = 1.0,
    memory: float | None = None,
) -> Trajectory:
    """The expected loss of SGD with a rule, over steps of the given batches.

    It is exact for rules that look at the batch alone. A rule that looks at noise and signal gets their true expected
    values, or with `memory` (in samples) their moving averages as in the optimizer; this is the limit of many
    coordinates, in which measurements have no noise.

    >>> model = NoisyQuadratic.power_law(dim=8)
    >>> run = expected_run(model, "linear", [8] * 50 + [32] * 10, lr=0.1, ref_batch=8)
    >>> run.loss.size, run.scalings[-1].lr, bool(run.loss[-1] < run.loss[0] / 2)
    (61, 4.0, True)
    """
    sizes = list(batches)
    made, base = make_rule(rule), make_schedule(schedule)
    state, averages = made.init(), Averages()
    second = SecondMoments.at(start, model.curvature.size)
    losses, scalings = [model.loss(second.ww)], []
    samples, progress = 0, 0.0
    with np.errstate(over="ignore", invalid="ignore"):  # too large a rate gives an infinite loss
        for step, batch in enumerate(sizes):
            moments = model.moments(second.ww)
            if memory is not None:
                averages = averages.updated(_measured(moments, batch), memory=memory)
                moments = averages.moments() or moments
            context = StepContext(
                step=step, batch=batch, ref_batch=ref_batch, samples=samples, workers=max(1, batch // ref_batch),
                epoch_samples=epoch_samples, total_samples=sum(sizes), moments=moments,
            )  # fmt: skip
            scaling, state = made.scale(context, state)
            position = TrainingProgress(
                samples=progress, epoch_samples=epoch_samples, total_samples=sum(sizes), ref_batch=ref_batch
            )
            second = second.stepped(
                model,
                batch=batch,
                lr=lr * factor_of(base, position) * _by_coordinate(scaling.lr, model.layers),
                momentum=momentum,
                weight_decay=weight_decay * scaling.weight_decay,
                gradient=_by_coordinate(scaling.gradient, model.layers),
            )
            samples += batch
            progress += batch if scaling.progress is None else scaling.progress * ref_batch
            losses.append(model.loss(second.ww))
            scalings.append(scaling)
    return Trajectory(loss=np.array(losses), scalings=tuple(scalings), end=second)


def _measured(moments: Moments, batch: int) -> Measurement:
    """The expected measurement of a step of two micro-batches: A = S + 2V/B, N = S + V/B."""
    noise, signal = (moments.layer_noise or (moments.noise,)), (moments.layer_signal or (moments.signal,))
    return Measurement(
        batch=batch,
        micro_batches=2,
        mean_sq=tuple(s + 2 * v / batch for v, s in zip(noise, signal, strict=True)),
        sq_mean=tuple(s + v / batch for v, s in zip(noise, signal, strict=True)),
    )


def _by_coordinate(multiplier: float | tuple[float, ...], layers: tuple[int, ...]) -> Array:
    return np.repeat(multiplier, layers) if isinstance(multiplier, tuple) else np.asarray(multiplier)


def best_rate(
    model: NoisyQuadratic,
    *,
    ref_batch: int,
    samples: int,
    momentum: float = 0.9,
    schedule: str | Schedule | None = None,
    rates: Sequence[float] | Array | None = None,
) -> float:
    """The rate with the lowest expected loss after `samples` samples at the reference batch.

    The default candidates are 60 rates from 10^-4 to 2, each 1.18 times the previous one.

    >>> round(best_rate(NoisyQuadratic.power_law(dim=8), ref_batch=8, samples=800, momentum=0.0), 3)
    0.161
    """
    candidates = np.geomspace(1e-4, 2.0, 60) if rates is None else np.asarray(rates, dtype=np.float64)
    steps = [ref_batch] * (samples // ref_batch)
    options = {"ref_batch": ref_batch, "momentum": momentum}
    ends = [
        expected_run(model, "constant", steps, lr=float(rate), schedule=schedule, **options).loss[-1]  # type: ignore[arg-type]
        for rate in candidates
    ]
    return float(candidates[int(np.nanargmin(np.where(np.isfinite(ends), ends, np.nan)))])
