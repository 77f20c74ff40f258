"""From stretches of constant fleet to runs of equal steps: the arithmetic of `BatchPlan.from_trace`.

A *stretch* is a time in which fleet and batch stay the same; a *run* is a number of equal steps in a row. Times that a
user writes in decimals (0.6 s, 630 s) are not exact in binary; a step that begins within a millionth of a step of a
change therefore begins at the change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

__all__ = ["Runs", "Stretches", "steps_finished", "steps_kept", "steps_on_grid"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_SNAP = 1e-6


@dataclass(frozen=True, kw_only=True)
class Stretches:
    """Constant fleet and batch, back to back from 0 s to the end; `samples` is 0 where nobody is there."""

    times: Floats
    end: float
    workers: Ints
    samples: Ints
    seconds: Floats
    """Duration of a step; not looked at where `samples` is 0."""

    @property
    def stops(self) -> Floats:
        """When each stretch ends."""
        return np.append(self.times[1:], self.end)


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Equal steps in a row, `counts` of them in each run."""

    counts: Ints
    workers: Ints
    samples: Ints
    start_s: Floats
    seconds: Floats

    def take(self, index: Ints) -> Runs:
        """The runs with these numbers."""
        return Runs(
            counts=self.counts.take(index),
            workers=self.workers.take(index),
            samples=self.samples.take(index),
            start_s=self.start_s.take(index),
            seconds=self.seconds.take(index),
        )


def steps_on_grid(stretches: Stretches) -> Runs:
    """Constant step time dt: step positions are i dt, whatever happens; a position without workers gives no step."""
    step = float(stretches.seconds[0])
    begins = np.ceil(np.append(stretches.times, stretches.end) / step - _SNAP)
    return _runs(stretches, np.diff(begins).astype(np.int64), begins[:-1] * step)


def steps_finished(stretches: Stretches) -> Runs:
    """A step that is under way when the fleet changes ends as it began; the next one starts after it.

    Where a step starts depends on all steps before it, so this is a loop over the stretches.
    """
    counts = [0] * len(stretches.times)
    starts = [0.0] * len(stretches.times)
    ceil, now = math.ceil, 0.0
    rows = zip(stretches.stops.tolist(), stretches.samples.tolist(), stretches.seconds.tolist(), strict=True)
    for i, (stop, samples, step) in enumerate(rows):
        if now >= stop:  # a step from before is still under way
            continue
        if samples:
            starts[i] = now
            counts[i] = count = ceil((stop - now) / step - _SNAP)
            now += count * step
        else:
            now = stop
    return _runs(stretches, np.array(counts, np.int64), np.array(starts))


def steps_kept(stretches: Stretches) -> Runs:
    """A step that is under way when the fleet changes is lost; a new one starts at the change."""
    counts = np.floor((stretches.stops - stretches.times) / stretches.seconds + _SNAP).astype(np.int64)
    return _runs(stretches, counts, stretches.times)


def _runs(stretches: Stretches, counts: Ints, starts: Floats) -> Runs:
    """The steps in each stretch as runs: empty ones dropped, equal ones that follow each other in time made one."""
    kept = np.flatnonzero((counts > 0) & (stretches.samples > 0))
    runs = Runs(
        counts=counts, workers=stretches.workers, samples=stretches.samples, start_s=starts, seconds=stretches.seconds
    ).take(kept)
    joined = (runs.workers[1:] == runs.workers[:-1]) & (runs.samples[1:] == runs.samples[:-1])
    if joined.any():
        gaps = np.abs(runs.start_s[1:] - (runs.start_s + runs.counts * runs.seconds)[:-1])
        first = np.flatnonzero(np.append(True, ~joined | (gaps > _SNAP * runs.seconds[1:])))
        runs = replace(runs.take(first), counts=np.add.reduceat(runs.counts, first))
    return runs
