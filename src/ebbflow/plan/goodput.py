"""What a batch is worth: progress per sample, per second and per dollar, and what one further worker adds.

*Progress* is counted in reference samples: a step of the reference batch B0 makes B0 of them. A step of B samples makes
B times the statistical efficiency of Pollux (Qiao et al. 2021), which is AdaScale's gain divided by the batch ratio:

    efficiency(B) = (V/B0 + S)/(V/B0 + S B/B0) = (phi + B0)/(phi + B)        phi = V/S, the noise scale in samples

Up to the reference batch the efficiency is 1. *Goodput* is progress per second: samples per second times efficiency.
The policy `goodput`, `ebbflow whatif`, the simulator and the status of a fleet all ask the functions of this module.
They use basic arithmetic only, so that replicas on different machines come to the same result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ebbflow.errors import PlanError

__all__ = [
    "BatchValue", "FurtherWorker", "StepTimes", "TimedStep", "batch_candidates", "efficiencies", "efficiency",
    "fit_times", "further_worker", "value_of",
]  # fmt: skip

_HOUR = 3600.0


def efficiency(batch: float, *, noise_scale: float, ref_batch: int) -> float:
    """Progress per sample of a step, in (0, 1]: 1 up to the reference batch, and 1 for an infinite noise scale.

    >>> efficiency(800, noise_scale=300, ref_batch=100)  # (300 + 100)/(300 + 800)
    0.36363636363636365
    """
    if not noise_scale >= 0 or ref_batch < 1 or not batch > 0:
        raise PlanError(
            f"a batch of {batch:g} samples with a noise scale of {noise_scale:g} and a reference batch of {ref_batch} "
            f"has no efficiency; expected a batch and a reference batch of at least 1 and a noise scale of at least 0"
        )
    if batch <= ref_batch or noise_scale == math.inf:
        return 1.0
    return (noise_scale + ref_batch) / (noise_scale + batch)


def efficiencies(batches: npt.NDArray[np.float64], *, noise_scale: float, ref_batch: int) -> npt.NDArray[np.float64]:
    """`efficiency` for each of several batches, which may be 0."""
    if noise_scale == math.inf:
        return np.ones_like(batches)
    return np.minimum((noise_scale + ref_batch) / (noise_scale + np.maximum(batches, 1.0)), 1.0)


# -- what a batch and a further worker are worth -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchValue:
    """What steps of one batch are worth; the field names are keys of `--json`."""

    workers: int
    batch: int
    efficiency: float
    """Progress per sample."""
    samples_per_progress: float
    """Samples that it takes to make the progress of one reference sample: 1/efficiency."""
    goodput: float
    """Progress per second, in reference samples."""
    usd_per_million: float | None
    """USD for the progress of a million reference samples; None without a price."""


def value_of(
    workers: int, batch: int, seconds: float, *, noise_scale: float, ref_batch: int, price: float | None = None
) -> BatchValue:
    """What a step of `batch` samples on this many workers is worth if it takes `seconds`.

    `price`: USD per hour of one worker.

    >>> value_of(8, 800, 2.0, noise_scale=700, ref_batch=100, price=0.9).goodput  # 800/2 x (700 + 100)/(700 + 800)
    213.33333333333334
    """
    if workers < 1:
        raise PlanError(f"{workers} workers make no progress; expected at least 1")
    if not 0 < seconds < math.inf:
        raise PlanError(f"a step takes {seconds:g} s; expected a finite time above 0")
    progress = efficiency(batch, noise_scale=noise_scale, ref_batch=ref_batch)
    goodput = batch * progress / seconds
    return BatchValue(
        workers=workers,
        batch=batch,
        efficiency=progress,
        samples_per_progress=1 / progress,
        goodput=goodput,
        usd_per_million=None if price is None else 1e6 * price * workers / _HOUR / goodput,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class FurtherWorker:
    """What one further worker is worth: the steps now, and those with one worker more; keys of `--json`."""

    now: BatchValue
    more: BatchValue
    gain: float
    """By which part the goodput grows; 0.1: by a tenth. It may be negative."""
    share: float
    """Goodput that the worker adds, divided by the mean goodput of the present workers; 1: as good as they are."""


def further_worker(now: BatchValue, more: BatchValue) -> FurtherWorker:
    """Compare the steps now with those of one worker more."""
    gain = more.goodput / now.goodput - 1
    return FurtherWorker(now=now, more=more, gain=gain, share=gain * now.workers)


# -- how long steps take -----------------------------------------------------------------------------------------------


class TimedStep(NamedTuple):
    """The mean time of the steps of one kind."""

    workers: int
    samples: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """step + sample x share + exchange x (W - 1) seconds, where share is the largest worker batch of W workers.

    >>> StepTimes(step=0.5, sample=0.25, exchange=0.125).seconds(4, 78)  # 0.5 + 20 x 0.25 + 3 x 0.125
    5.875
    """

    step: float = 0.0
    sample: float = 0.0
    exchange: float = 0.0

    def seconds(self, workers: int, samples: int) -> float:
        """How long a step of this many workers and samples takes."""
        one, share, others = _terms(workers, samples)
        return self.step * one + self.sample * share + self.exchange * others


def _terms(workers: int, samples: int) -> tuple[float, float, float]:
    return 1.0, float(-(-samples // workers)), float(workers - 1)


def fit_times(measured: Sequence[TimedStep]) -> StepTimes | None:
    """The step times that fit best, by relative error, with no part below 0; None if nothing was measured.

    Of fits that are equally good the one with the fewest parts is taken, `step` first, then `exchange`: what was not
    observed costs nothing. So a policy tries larger steps, and then learns what they cost.
    """
    rows = [([x / seconds for x in _terms(workers, samples)], 1.0) for workers, samples, seconds in measured]
    best, least = [0.0, 0.0, 0.0], math.inf
    for count in (1, 2, 3):
        for subset in itertools.combinations((0, 2, 1), count):
            solution = _solve([[sum(x[i] * x[j] for x, _ in rows) for j in subset] for i in subset],
                              [sum(x[i] * y for x, y in rows) for i in subset])  # fmt: skip
            if subset == (2,) or solution is None or min(solution) <= 0:
                continue  # with `exchange` alone one worker would take no time
            errors = (y - sum(part * x[i] for part, i in zip(solution, subset, strict=True)) for x, y in rows)
            error = sum(e * e for e in errors) / len(rows)
            if error < 0.999 * least - 1e-12:
                best, least = [0.0, 0.0, 0.0], error
                for i, part in zip(subset, solution, strict=True):
                    best[i] = part
    return StepTimes(step=best[0], sample=best[1], exchange=best[2]) if rows else None


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """The solution of normal equations by elimination; None if the terms cannot be told apart."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    scale = [row[i] for i, row in enumerate(rows)]
    for i, row in enumerate(rows):
        if not row[i] > 1e-9 * scale[i]:
            return None
        for below in rows[i + 1 :]:
            factor = below[i] / row[i]
            below[:] = [x - factor * y for x, y in zip(below, row, strict=True)]
    solution: list[float] = []
    for i in reversed(range(len(rows))):
        known = sum(x * y for x, y in zip(rows[i][i + 1 : -1], solution, strict=True))
        solution.insert(0, (rows[i][-1] - known) / rows[i][i])
    return solution


def batch_candidates(first: int, *, local_batch: int, most: int) -> list[int]:
    """The batches among which the best one is sought, from `first` to `most`.

    They are `first`, its doublings up to one local batch, and all multiples of the local batch.

    >>> batch_candidates(24, local_batch=64, most=256), batch_candidates(100, local_batch=64, most=256)
    ([24, 48, 64, 128, 192, 256], [100, 128, 192, 256])
    """
    found, batch = [first], 2 * first
    while batch < local_batch:
        found.append(batch)
        batch *= 2
    found += range(local_batch * (first // local_batch + 1), most + 1, local_batch)
    return [batch for batch in found if batch <= max(most, first)]
