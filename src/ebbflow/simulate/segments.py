"""From a scenario to segments of constant fleet and batch: the size and duration of their steps, and what ends them.

`fleet_segments` and `GrowingSegments` make the `Segments` that are simulated; `SimulatedSteps` collects the result.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ebbflow.core.columns import Columns
from ebbflow.core.units import Seconds
from ebbflow.errors import ConfigError
from ebbflow.plan.policies import computed_samples, sizes_of
from ebbflow.plan.steptime import ConstantStepTime
from ebbflow.simulate.recovery import Ideal, Reaction
from ebbflow.simulate.scenario import LARGEST_EXACT, Scenario
from ebbflow.simulate.step_models import StepBreakdown, Stragglers, WholeStep
from ebbflow.traces import Trace

__all__ = [
    "SNAP", "GrowingSegments", "SegmentSteps", "Segments", "SimulatedSteps", "SimulatedRuns", "fleet_segments",
    "limit_batches", "provisioned_trace",
]  # fmt: skip

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SNAP = 1e-6
"""Times that a user writes in decimals are not exact in binary: an event within this fraction of a step from the end of
a step counts as being there."""


@dataclass(frozen=True, kw_only=True)
class SegmentSteps(Columns):
    """The steps of each segment, in arrays of one entry per segment."""

    workers: Ints
    """Workers that take part."""
    samples: Ints
    """Samples of a whole step; 0 where there are no workers."""
    whole: StepBreakdown
    """The time of a whole step."""
    empty: StepBreakdown
    """The time of a step without samples: what a step that is cut pays anyway."""

    @cached_property
    def seconds(self) -> Floats:
        """Seconds of a whole step. Where there are no workers a step may take no time; there it is any number."""
        return np.where(self.samples > 0, self.whole.total, 1.0)

    @cached_property
    def empty_seconds(self) -> Floats:
        """Seconds of a step without samples."""
        return self.empty.total


@dataclass(frozen=True, kw_only=True)
class Segments(Columns):
    """Segments of constant fleet and batch, back to back from 0 s on."""

    stops: Floats
    """When each segment ends."""
    steps: SegmentSteps
    reaction: Reaction
    grid: float = 0.0
    """Above 0: steps begin at multiples of this many seconds, as in a plan of constant step time."""


# -- the segments of a scenario ----------------------------------------------------------------------------------------


def fleet_segments(scenario: Scenario, paid: Trace, rng: np.random.Generator | None) -> Segments:
    """The segments over the paid workers; for a growing batch, the largest steps that the workers can do."""
    ready = provisioned_trace(paid, scenario.provisioning)
    return _segments(scenario, ready.workers, ready.times, ready.end, rng)


class GrowingSegments:
    """The segments of a batch that grows, made for one part of the trace and one requested batch at a time.

    Neighbours with the same step are not joined, since that depends on the requested batch.
    """

    def __init__(self, scenario: Scenario, paid: Trace, rng: np.random.Generator | None) -> None:
        self.scenario, self.rng = scenario, rng
        self.ready = provisioned_trace(paid, scenario.provisioning)
        self.count = len(self.ready.times)

    def part(self, requested: int, first: int, stop: int) -> Segments:
        """The segments from `first` up to but not including `stop`, in steps of at most `requested` samples."""
        low, high = max(first - 1, 0), min(stop + 1, self.count)  # the cost of a change depends on both sides of it
        end = self.ready.end if high == self.count else float(self.ready.times[high])
        counts, times = self.ready.workers[low:high], self.ready.times[low:high]
        segments = _segments(self.scenario, counts, times, end, self.rng, requested=requested)
        return segments.take(slice(first - low, stop - low))


def limit_batches(workers: Ints, samples: Ints, requested: int) -> tuple[Ints, Ints]:
    """(workers, samples) of steps with at most `requested` samples, where the workers could do `samples`.

    It is `ebbflow.plan`'s `allow` for many steps at once.

    >>> limit_batches(np.array([0, 1, 4, 16]), np.array([0, 32, 128, 512]), 100)
    (array([0, 1, 4, 4]), array([  0,  32, 100, 100]))
    """
    batch = np.minimum(samples, requested)
    needed = -(-batch * workers // np.maximum(samples, 1))
    return np.minimum(np.minimum(workers, np.maximum(batch // 2, 1)), needed), batch


def _segments(
    scenario: Scenario, counts: Ints, times: Floats, end: float, rng: np.random.Generator | None, *,
    requested: int | None = None,
) -> Segments:  # fmt: skip
    """The segments of a fleet with `counts[i]` workers from `times[i]` on.

    With `requested`, no step has more samples, and neighbours with the same step are not joined.
    """
    levels, level = _distinct(counts)  # a step is computed once for each size of the fleet
    workers, samples = sizes_of(scenario.fleet_policy, levels)
    if requested is not None:
        workers, samples = limit_batches(workers, samples, requested)
    if int(samples.max()) > LARGEST_EXACT:
        raise ConfigError("a step has more than 2^53 samples; check the local batch and the number of workers")
    someone = np.maximum(workers, 1)
    computed = computed_samples(scenario.policy, workers, samples)
    whole, empty = (scenario.model.breakdown(someone, sizes) for sizes in (computed, np.zeros_like(samples)))
    if not (np.isfinite(whole.total).all() and (whole.total[samples > 0] > 0).all()):
        raise ConfigError("the step model gives a time that is zero or not finite; check its times")
    if requested is None:
        same = (workers[level][1:] == workers[level][:-1]) & (samples[level][1:] == samples[level][:-1])
        kept = np.append(True, ~same)
        times, level = times[kept], level[kept]
    stops = np.append(times[1:], end)
    workers, samples, whole, empty = workers[level], samples[level], whole.take(level), empty.take(level)
    if scenario.stragglers is not None:
        factor = _slowdown(scenario.stragglers, np.maximum(workers, 1), whole.total, stops - times, rng)
        whole, empty = (replace(one, waiting=one.waiting + one.compute * (factor - 1.0)) for one in (whole, empty))
    steps = SegmentSteps(workers=workers, samples=samples, whole=whole, empty=empty)
    constant = isinstance(scenario.model, WholeStep) and isinstance(scenario.model.step_time, ConstantStepTime)
    plan_like = constant and scenario.stragglers is None and scenario.recovery == Ideal()
    return Segments(
        stops=stops,
        steps=steps,
        reaction=scenario.recovery.react(workers, steps.seconds),
        grid=float(whole.total[0]) if plan_like else 0.0,
    )


def _slowdown(
    stragglers: Stragglers, workers: Ints, seconds: Floats, lengths: Floats, rng: np.random.Generator | None
) -> Floats:
    """The factor by which stragglers slow the computing of each segment down: the mean, or drawn with a generator."""
    mean, variance = stragglers.slowest(workers)
    if rng is None:
        return mean
    steps = np.maximum(lengths / np.maximum(seconds * mean, 1e-12), 1.0)
    return _draw_factors(mean, variance / steps, steps, rng)


def _draw_factors(mean: Floats, variance: Floats, steps: Floats, rng: np.random.Generator) -> Floats:
    """Factors by which segments of this many steps are slower, such that whole trainings are right on average.

    A slow segment of length L has fewer steps, not a longer time, so the number of steps n must have the right mean.
    The last step ends somewhere within one step after the segment: a factor f gives (L - step E[f] / 2) / (step f) +
    1/2 steps. With ln f normal, of variance ln(1 + v) where v is the relative variance, `drift` makes the mean of that
    number n. A factor may then be below 1 where steps are few; cutting factors off at 1 would make trainings too slow.
    In a segment no longer than one step each step is drawn by itself, with the mean and the variance of one step.
    """
    relative = np.log1p(variance / mean**2)
    drift = relative / 2 - np.log1p(np.expm1(relative) / (2 * steps))
    several = mean * np.exp(np.sqrt(relative) * rng.standard_normal(len(mean)) + drift)
    above = mean - 1.0
    some = (above > 0) & (variance > 0)
    scale = np.divide(variance, above, out=np.ones_like(mean), where=some)
    single = 1.0 + np.where(some, rng.gamma(np.where(some, above / scale, 1.0), scale), above)
    return np.where(steps > 1, several, single)


def _distinct(workers: Ints) -> tuple[Ints, Ints]:
    """The distinct numbers of workers in increasing order, and the index of each entry among them.

    >>> _distinct(np.array([4, 0, 4, 6]))
    (array([0, 4, 6]), array([1, 0, 1, 2]))
    """
    highest = int(workers.max())
    if highest > 10 * len(workers):  # a table by number of workers would be long and mostly empty
        return np.unique(workers, return_inverse=True)
    present = np.bincount(workers, minlength=highest + 1) > 0
    return np.flatnonzero(present), (np.cumsum(present) - 1)[workers]


def provisioned_trace(trace: Trace, delay: Seconds) -> Trace:
    """The workers that can compute, when each needs `delay` after its arrival: to boot, for its image and environment.

    The newest leave first, so the workers that are ready are the fewest of the last `delay` seconds; before 0 s there
    were none.

    >>> provisioned_trace(Trace.parse("0s:4 60s:6 100s:5 200s"), Seconds(30))
    Trace('0s:0 30s:4 90s:6 100s:5 200s')
    """
    if delay < 0:
        raise ConfigError(f"the provisioning delay is {delay:g} s; expected a time that is not negative")
    if not delay:
        return trace
    edges = np.unique(np.concatenate([[0.0], trace.times, trace.times + delay]))
    edges = edges[edges < trace.end]
    low = np.searchsorted(trace.times, edges - delay, side="right") - 1  # the workers where the window begins
    high = np.searchsorted(trace.times, edges, side="right") - 1
    fewest = _range_minimum(trace.workers, np.maximum(low, 0), high)
    return replace(trace, times=edges, workers=np.where(low < 0, 0, fewest), final=None)


def _range_minimum(values: Ints, low: Ints, high: Ints) -> Ints:
    """The minimum of values[low..high], both included, for each pair: from minima over blocks of powers of two."""
    span = high - low + 1
    levels = np.floor(np.log2(span)).astype(np.int64)
    result = np.empty(len(low), np.int64)
    block, size = values, 1
    for level in range(int(levels.max()) + 1):
        if level:
            block, size = np.minimum(block[:-size], block[size:]), 2 * size
        at = np.flatnonzero(levels == level)
        result[at] = np.minimum(block[low[at]], block[high[at] - size + 1])
    return result


# -- what comes out ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SimulatedRuns(Columns):
    """Sequences of equal steps, in arrays of one entry per sequence."""

    segments: Ints
    """The index of the segment in which the sequence began."""
    counts: Ints
    """The number of steps."""
    sizes: Ints
    """Samples per step."""
    starts: Floats
    """When the first step begins."""
    seconds: Floats
    """Seconds per step."""


@dataclass(kw_only=True)
class SimulatedSteps:
    """The steps of a simulation, and the seconds in which no step was made or a step was lost."""

    done: bool = False
    """Whether all of the training was done."""
    time: float = 0.0
    """When the last step ended, or the trace."""
    reference: float = 0.0
    """Reference samples that the steps are worth."""
    waiting: float = 0.0
    """Seconds without workers."""
    lost: float = 0.0
    """Seconds spent on steps that did not count."""
    restart: float = 0.0
    checkpoint: float = 0.0
    rows: list[tuple[int, int, int, float, float]] = field(default_factory=list)
    """The latest entries of the runs: (segment, steps, samples per step, start, seconds per step)."""
    blocks: list[SimulatedRuns] = field(default_factory=list)
    """The entries before them."""

    def undo(self, steps: int) -> list[tuple[int, int]]:
        """Remove the last steps, whose time is lost; returns (number of steps, samples per step) of them."""
        undone = []
        while steps:
            segment, count, size, start, seconds = self.rows.pop()
            last = min(steps, count)
            self.lost += last * seconds
            undone.append((last, size))
            steps -= last
            if last < count:
                self.rows.append((segment, count - last, size, start, seconds))
        return undone

    def append(self, block: SimulatedRuns) -> None:
        """Add many entries at once."""
        self._flush()
        self.blocks.append(block)

    def _flush(self) -> None:
        """Move the latest entries to the blocks."""
        if self.rows:
            segments, counts, sizes, starts, seconds = zip(*self.rows, strict=True)
            self.blocks.append(
                SimulatedRuns(
                    segments=np.array(segments, np.int64), counts=np.array(counts, np.int64),
                    sizes=np.array(sizes, np.int64), starts=np.array(starts), seconds=np.array(seconds),
                )
            )  # fmt: skip
            self.rows = []

    def runs(self) -> SimulatedRuns:
        """All steps, in order."""
        self._flush()
        return self.blocks[0] if len(self.blocks) == 1 else SimulatedRuns.joined(self.blocks)
