"""`BatchPlan`: workers, samples and time of every step of a training.

A plan is made from a trace in two parts. `fleet_segments` asks the policy and the step-time model what each segment of
the trace means for a step; `cut_into_steps` counts the steps that fit into the segments, and gives *runs* of equal
steps. Times that people write in decimals (0.6 s, 630 s) are not exact in binary. A step that begins within a millionth
of its duration of a change is therefore taken to begin at the change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ebbflow.core.columns import Columns
from ebbflow.core.files import read_text
from ebbflow.core.units import MOST_SAMPLES, Seconds, format_seconds, parse_seconds, whole_number
from ebbflow.core.wording import called
from ebbflow.errors import PlanError
from ebbflow.plan.policies import Policy, make_policy, sizes_of
from ebbflow.plan.steptime import ConstantStepTime, StepTime, StepTimeLike, make_step_time
from ebbflow.traces import TextFile, Trace, load

__all__ = [
    "BatchPlan", "FleetSegments", "PlanRun", "PlanSummary", "StepRuns", "StepSize", "cut_into_steps", "cut_step",
    "fit_step_time", "fleet_segments", "longest_step_time", "trace_from",
]  # fmt: skip

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_BEGINNING = Seconds(0.0)
_BATCH_FILE_HEADER = "step,batchsize"
_SNAP = 1e-6
"""Part of a step's duration within which its beginning and a change of the fleet count as the same time."""
_MANY_STEPS, _MANY_CHANGES = 10_000_000, 1_000_000
_MOST_FOLLOWED_EPOCHS = 1_000_000
"""Each epoch ends with a smaller step, so that they are followed one by one, which takes 20 microseconds for each."""
_ALMOST = 1 - 1e-9
"""Largest part of an epoch that an unfinished epoch counts as."""


def cut_step(requested: int, remaining: int) -> int:
    """Samples that a step takes if it requests `requested` and the epoch has `remaining` samples left.

    This is the smaller of the two, except where one single sample would be left for the last step: batch norm cannot
    train on a single sample, since it has no variance. A step of three or more then takes one sample less, and a step
    of two takes all three. Steps that request one sample get one sample.

    >>> [cut_step(8, n) for n in (20, 8, 5, 9)], cut_step(2, 3), cut_step(1, 2)
    ([8, 8, 5, 7], 3, 1)
    """
    if requested == 1 or remaining - requested != 1:
        return min(requested, remaining)
    return requested - 1 if requested >= 3 else remaining


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSize:
    """One step of a plan."""

    workers: int
    """Workers that take part in the step."""
    samples: int
    """Samples in the step, over all workers."""
    time_s: float
    """When the step begins; training begins at 0 s."""
    duration_s: float
    """How long the step takes."""
    requested: int | None = field(default=None, repr=False)
    """The batch that a growing policy requested, where that was more than `samples`."""
    dropped: int = field(default=0, repr=False)
    """Samples that the step drops, in addition to those it has; set where a run follows `drop`."""

    @property
    def shortfall(self) -> float:
        """Samples of the step divided by the requested batch; below 1, the learning rate is reduced."""
        return 1.0 if self.requested is None else self.samples / self.requested


class PlanRun(NamedTuple):
    """Consecutive equal steps: `first` is the first step, `stop` the one after the last (None: the run has no end)."""

    first: int
    stop: int | None
    workers: int
    samples: int
    start_s: float
    step_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSummary:
    """The steps that a number of epochs takes; the field names are the keys of `ebbflow plan --json`."""

    steps: int
    time_s: float
    """From the start of training to the end of the last step, including the time without workers."""
    samples: int
    """Epochs times the samples of an epoch."""
    batch_min: int
    """Smallest batch; like the next two fields with the smaller steps at the ends of epochs."""
    batch_mean: float
    batch_max: int
    changes: int
    """Number of steps that have other workers or another planned batch than the previous step; without the smaller
    steps at the ends of epochs."""


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class BatchPlan:
    """Workers, samples and time of every step; immutable, and stored as runs of equal steps, so that 10^7 steps are small.

    Plans are made by `from_trace`, `read` and `constant`. A plan knows nothing about epochs; whoever follows it takes
    a smaller step at the end of an epoch (`cut_step`, `for_epochs`).

    >>> plan = BatchPlan.from_trace(Trace.parse("0s:4 60s:0 90s:6 120s"), "follow(32)", "10s")
    >>> plan.steps, plan.at(5), plan.at(6)
    (9, StepSize(workers=4, samples=128, time_s=50.0, duration_s=10.0), StepSize(workers=6, samples=192, time_s=90.0, duration_s=10.0))
    """  # noqa: E501

    first: Ints
    """Number of the first step of each run."""
    workers: Ints
    """Workers of each run."""
    samples: Ints
    """Samples per step of each run."""
    start_s: Floats
    """When the first step of each run begins."""
    step_s: Floats
    """Duration of a step of each run."""
    steps: int | None
    """Number of steps in the plan; None if the last run has no end."""
    goes_on: bool = False
    """Whether `at` answers for steps beyond the end of the plan, too, with the fleet of its last run."""
    source: Mapping[str, Any] = field(default_factory=dict)
    """What the plan was made from, as JSON values for the header of a record."""

    def __post_init__(self) -> None:
        for array in (self.first, self.workers, self.samples, self.start_s, self.step_s):
            array.flags.writeable = False

    # -- construction ----------------------------------------------------------------------------------------------

    @classmethod
    def from_trace(
        cls,
        trace: Trace | str | Path,
        policy: Policy | str,
        step_time: StepTimeLike,
        *,
        offset: Seconds | str = _BEGINNING,
        repeat: bool = False,
        on_change: str = "finish",
    ) -> BatchPlan:
        """Follow a trace g (or anything that `load` reads: a file, a generator); training begins at its time `offset`.

        With a constant step time dt and `finish` this is the formula of Andre, Strati and Klimovic (2022): the step at
        position i has the batch of g(i dt + offset). Steps begin at multiples of dt. A position without workers gives
        no step, and training continues at the next position.

        With a step time that depends on the workers, a step begins when the previous one ends, or as soon as there are
        workers again. If the fleet changes during a step, `finish` lets the step end as it began; `lose` discards the
        step and its time, and a new step starts at the change (with a constant step time, too, which then leaves its
        grid). A change that the policy does not pass on, such as one above a cap, has no effect. The last step begins
        (`finish`) or ends (`lose`) before the trace ends.

        With `repeat` the trace is repeated until the plan has ten million steps, or a million changes.
        """
        trace = trace if isinstance(trace, Trace) else load(trace)
        policy, model = make_policy(policy), make_step_time(step_time)
        offset = parse_seconds(offset) if isinstance(offset, str) else offset
        if repeat:
            times = int(offset // trace.end) + 2  # so that at least one complete repetition follows the offset
            short = cls.from_trace(trace.repeat(times), policy, model, offset=offset, on_change=on_change)
            more = min(_MANY_STEPS / (short.steps or 1), _MANY_CHANGES / (times * len(trace.times)))
            trace = trace.repeat(times * math.ceil(more))
        segments = fleet_segments(trace_from(trace, offset), policy, model)
        runs = cut_into_steps(segments, on_change, grid=isinstance(model, ConstantStepTime))
        if not len(runs.counts):
            raise PlanError(f"the trace {trace.name} gives no step from {offset:g} s on: it is too short, or has no "
                            f"workers (at most {segments.workers.max()})")  # fmt: skip
        return cls.from_runs(
            runs,
            source={
                "trace": trace.name,
                "policy": str(policy),
                "step_time": str(model),
                "offset_s": float(offset),
                "on_change": on_change,
            },
        )

    @classmethod
    def read(cls, path: Path | str, local_batch: int, step_time: StepTimeLike = 1.0) -> BatchPlan:
        """Read a CSV file `step,batchsize` with one row per step; the rows are in order, the step column is not used.

        Each batch must be a multiple of the local batch, and is computed by batch / local_batch workers. The file says
        nothing about time; by default a step takes one second.
        """
        path = Path(path)
        sizes = _read_batches(path, local_batch=local_batch)
        model = make_step_time(step_time)
        begins = np.flatnonzero(np.append(True, np.diff(sizes) != 0))
        samples, counts = sizes[begins], np.diff(begins, append=len(sizes))
        seconds = model.seconds(samples // local_batch)
        stops = np.cumsum(counts * seconds)
        runs = StepRuns(
            counts=counts, workers=samples // local_batch, samples=samples,
            start_s=np.append(0.0, stops[:-1]), seconds=seconds,
        )  # fmt: skip
        return cls.from_runs(runs, source={"file": path.name, "local_batch": local_batch, "step_time": str(model)})

    @classmethod
    def constant(
        cls, workers: int, samples: int, *, step_time: StepTimeLike = 1.0, steps: int | None = None
    ) -> BatchPlan:
        """The same step `steps` times, or without end: a fleet that never changes."""
        whole_number(workers, "workers", error=PlanError)
        whole_number(samples, "samples", least=workers, error=PlanError)
        if steps is not None:
            whole_number(steps, "steps", error=PlanError)
        model = make_step_time(step_time)
        fleet = np.array([workers], np.int64)
        return cls(
            first=np.zeros(1, np.int64),
            workers=fleet,
            samples=np.array([samples], np.int64),
            start_s=np.zeros(1),
            step_s=model.seconds(fleet),
            steps=steps,
            source={"workers": workers, "samples": samples, "step_time": str(model)},
        )

    @classmethod
    def from_runs(cls, runs: StepRuns, source: Mapping[str, Any]) -> BatchPlan:
        """The plan of at least one run of equal steps."""
        stops = np.cumsum(runs.counts)
        return cls(
            first=stops - runs.counts,
            workers=runs.workers,
            samples=runs.samples,
            start_s=runs.start_s,
            step_s=runs.seconds,
            steps=int(stops[-1]),
            source=source,
        )

    # -- steps -----------------------------------------------------------------------------------------------------

    def at(self, step: int) -> StepSize:
        """The step with this number, counted from 0, in O(log runs); a PlanError beyond the end, unless it goes on."""
        run = self._run(step)
        return StepSize(
            workers=int(self.workers[run]),
            samples=int(self.samples[run]),
            time_s=float(self.start_s[run] + (step - self.first[run]) * self.step_s[run]),
            duration_s=float(self.step_s[run]),
        )

    def going_on(self) -> BatchPlan:
        """The same plan for a run that may give steps back, and then needs more of them than its epochs have.

        >>> plan = BatchPlan.from_trace(Trace.parse("0s:4 10s:2 20s"), "follow(32)", "10s").going_on()
        >>> plan.steps, plan.at(2)
        (2, StepSize(workers=2, samples=64, time_s=20.0, duration_s=10.0))
        """
        return replace(self, goes_on=True)

    def batches(self, start: int = 0, stop: int | None = None) -> Ints:
        """The samples of each step from `start` to `stop` - 1 (without `stop`: to the end of the plan), as an array."""
        stop = self.steps if stop is None else stop
        if stop is None or not 0 <= start <= stop or (self.steps is not None and stop > self.steps):
            raise PlanError(f"steps {start} to {stop} are not all in the plan, which has {self._length}")
        if start == stop:
            return np.zeros(0, np.int64)
        low, high = self._run(start), self._run(stop - 1) + 1
        edges = np.clip(np.append(self.first[low:high], stop), start, stop)
        return np.repeat(self.samples[low:high], np.diff(edges))

    def runs(self) -> Iterator[PlanRun]:
        """The runs of equal steps, in order."""
        stops: list[int | None] = [*self.first[1:].tolist(), self.steps]
        columns = (self.workers, self.samples, self.start_s, self.step_s)
        rows = zip(self.first.tolist(), stops, *(column.tolist() for column in columns), strict=True)
        return (PlanRun(*row) for row in rows)

    def distinct_steps(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(workers, samples, number of such steps) of the different steps from `start` to `stop` - 1.

        >>> BatchPlan.from_trace(Trace.parse("0s:4 60s:2 90s:4 120s"), "follow(32)", "10s").distinct_steps(1, 11)
        [(2, 64, 3), (4, 128, 7)]
        """
        if stop <= start:
            return []
        low, high = self._run(start), self._run(stop - 1) + 1
        counts = np.diff(np.clip(np.append(self.first[low:high], stop), start, stop))
        sizes, of = np.unique(np.stack([self.workers[low:high], self.samples[low:high]]), axis=1, return_inverse=True)
        totals = np.bincount(of.reshape(-1), weights=counts).astype(np.int64)
        return [*zip(*sizes.tolist(), totals.tolist(), strict=True)]

    def describe(self) -> dict[str, Any]:
        """What the plan was made from and its main figures, as JSON values."""
        return {
            **self.source,
            "steps": self.steps,
            "runs": len(self.first),
            "duration_s": None if self.steps is None else self._end_of(self.steps),
            "batch_min": int(self.samples.min()),
            "batch_max": int(self.samples.max()),
        }

    @property
    def _length(self) -> str:
        return "no end" if self.steps is None else f"{self.steps:,} steps"

    def _run(self, step: int) -> int:
        if step < 0 or (self.steps is not None and step >= self.steps and not self.goes_on):
            raise PlanError(f"step {step} is not in the plan, which has {self._length}; repeat the trace to go on")
        return int(np.searchsorted(self.first, step, side="right")) - 1

    def _end_of(self, steps: int) -> float:
        last = self.at(steps - 1)
        return last.time_s + last.duration_s

    # -- epochs ----------------------------------------------------------------------------------------------------

    def for_epochs(self, samples: int, epochs: int, *, cut: bool = True) -> PlanSummary:
        """The steps that training takes for `epochs` epochs of `samples` samples; a PlanError if the plan is too short.

        With `cut`, as in training, each epoch ends with a smaller step (`cut_step`); without, steps continue across the
        ends of epochs.
        """
        _check_training(samples, epochs, cut=cut)
        reached, steps, batches = self._follow(samples, epochs, cut=cut)
        if reached < epochs:
            longer = "give a file with more rows"
            if "file" not in self.source:
                longer = f"repeat the trace ({called('repeat', True)}), start it earlier"
            raise PlanError(
                f"the plan is too short: its {steps:,} steps ({format_seconds(self._end_of(steps))}) reach "
                f"{math.floor(reached * 100) / 100:g} of {epochs} epochs; {longer} or ask for fewer epochs"
            )
        last = self._run(steps - 1) + 1
        workers, sizes = self.workers[:last], self.samples[:last]
        return PlanSummary(
            steps=steps,
            time_s=self._end_of(steps),
            samples=samples * epochs,
            batch_min=batches[0],
            batch_mean=(samples * epochs if cut else self.samples_before(steps)) / steps,
            batch_max=batches[1],
            changes=int(np.count_nonzero((np.diff(workers) != 0) | (np.diff(sizes) != 0))),
        )

    def epochs_reached(self, samples: int, epochs: int) -> float:
        """Number of epochs of `samples` samples that the plan is long enough for; at most `epochs`."""
        _check_training(samples, epochs)
        return self._follow(samples, epochs, cut=True)[0]

    def samples_before(self, step: int) -> int:
        """Planned samples of all steps before this one. Beyond the end of the plan its last run is continued."""
        run = int(np.searchsorted(self.first, step, side="right")) - 1
        return int(self._samples_before_runs[run]) + (step - int(self.first[run])) * int(self.samples[run])

    def whole_steps_until(self, step: int, samples: int) -> int:
        """The first step, counted from `step`, that the end of an epoch with `samples` samples left may make smaller.

        All steps before it take what is planned. The result is not beyond the end of the plan.
        """
        last = self._first_cut(step, samples)
        return last if self.steps is None else max(step, min(last, self.steps))

    @cached_property
    def _samples_before_runs(self) -> Ints:
        return np.append(0, np.cumsum(self.samples[:-1] * np.diff(self.first)))

    def _steps_until(self, samples: int) -> int:
        """The number of steps after which at least `samples` samples are planned."""
        run = max(int(np.searchsorted(self._samples_before_runs, samples, side="left")) - 1, 0)
        missing = samples - int(self._samples_before_runs[run])
        return int(self.first[run]) + -(-missing // int(self.samples[run]))

    def _first_cut(self, step: int, samples: int) -> int:
        """As `whole_steps_until`, with the last run continued beyond the end of the plan.

        Only the last two steps can be smaller: each step before them leaves at least two samples.
        """
        return max(step, self._steps_until(self.samples_before(step) + samples) - 2)

    def _epoch_end(self, step: int, samples: int) -> tuple[int, list[int]]:
        """The step after the last one of an epoch that begins with `step`, and the batches of its last steps."""
        target = self.samples_before(step) + samples
        step = self._first_cut(step, samples)
        remaining = target - self.samples_before(step)
        batches = []
        while remaining:
            batches.append(cut_step(self.samples_before(step + 1) - self.samples_before(step), remaining))
            remaining -= batches[-1]
            step += 1
        return step, batches

    def _follow(self, samples: int, epochs: int, *, cut: bool) -> tuple[float, int, tuple[int, int]]:
        """(epochs reached, steps taken, smallest and largest batch).

        If the plan is too short, these are fewer than `epochs`, and all of its steps.
        """
        if not cut:
            steps = self._steps_until(samples * epochs)
            if self.steps is None or steps <= self.steps:
                return epochs, steps, self._extremes(0, steps)
            reached = min(self.samples_before(self.steps) / (samples * epochs), _ALMOST) * epochs
            return reached, self.steps, self._extremes(0, self.steps)
        done = step = 0
        least, most = np.iinfo(np.int64).max, 0
        while done < epochs:
            end, last = self._epoch_end(step, samples)
            if self.steps is not None and end > self.steps:
                part = (self.samples_before(self.steps) - self.samples_before(step)) / samples
                return done + min(part, _ALMOST), self.steps, (least, most)
            whole = self._extremes(step, end - len(last)) if end - len(last) > step else ()
            least, most = min(least, *whole, *last), max(most, *whole, *last)
            done, step = done + 1, end
        return done, step, (least, most)

    def _extremes(self, start: int, stop: int) -> tuple[int, int]:
        """The smallest and the largest planned batch of the steps from `start` to `stop` - 1."""
        sizes = self.samples[self._run(start) : self._run(stop - 1) + 1]
        return int(sizes.min()), int(sizes.max())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BatchPlan):
            return NotImplemented
        return list(self.runs()) == list(other.runs())

    def __hash__(self) -> int:
        return hash((self.first.tobytes(), self.samples.tobytes(), self.steps))

    def __repr__(self) -> str:
        sizes = f"{self.samples.min()} to {self.samples.max()} samples"
        return f"BatchPlan({self._length}, {sizes}, {len(self.first)} runs)"


def _check_training(samples: int, epochs: int, *, cut: bool = True) -> None:
    """`cut`: whether the epochs are followed one by one."""
    whole_number(samples, "samples", error=PlanError)
    most = MOST_SAMPLES // samples << 20  # 2^60 samples in all
    whole_number(epochs, "epochs", most=min(most, _MOST_FOLLOWED_EPOCHS) if cut else most, error=PlanError)


# -- from a trace to runs of equal steps -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FleetSegments:
    """Times with the same workers and the same batch, one after the other from 0 s to the end."""

    times: Floats
    """When each segment begins."""
    end: float
    workers: Ints
    samples: Ints
    """Samples per step; 0 where there are no workers."""
    seconds: Floats
    """Duration of a step; without meaning where `samples` is 0."""

    @property
    def stops(self) -> Floats:
        """When each segment ends."""
        return np.append(self.times[1:], self.end)


@dataclass(frozen=True, kw_only=True)
class StepRuns(Columns):
    """Runs of equal steps."""

    counts: Ints
    """Number of steps in each run."""
    workers: Ints
    samples: Ints
    """Samples per step."""
    start_s: Floats
    """When the first step of each run begins."""
    seconds: Floats
    """Duration of a step."""


def trace_from(trace: Trace, offset: Seconds) -> Trace:
    """The trace without its first `offset` seconds; a PlanError if that leaves nothing."""
    if not 0 <= offset < trace.end:
        raise PlanError(f"the offset of {offset:g} s lies outside of the trace, which covers 0 to {trace.end:g} s")
    return trace.shift(offset)


def fleet_segments(trace: Trace, policy: Policy, step_time: StepTime) -> FleetSegments:
    """The segments of a trace with the steps that the policy makes of them; neighbours with equal steps are joined."""
    workers, samples = sizes_of(policy, trace.workers)
    begins = np.flatnonzero(np.append(True, (workers[1:] != workers[:-1]) | (samples[1:] != samples[:-1])))
    workers, samples = workers[begins], samples[begins]
    seconds = step_time.seconds(np.maximum(workers, 1))
    return FleetSegments(times=trace.times[begins], end=trace.end, workers=workers, samples=samples, seconds=seconds)


def cut_into_steps(segments: FleetSegments, on_change: str, *, grid: bool) -> StepRuns:
    """The steps that fit into the segments; `grid`: the step time is constant, so that steps begin at its multiples."""
    if on_change == "finish":
        return _steps_on_grid(segments) if grid else _finished_steps(segments)
    if on_change == "lose":  # a step that a change interrupts is lost, and a new one starts at the change
        counts = np.floor((segments.stops - segments.times) / segments.seconds + _SNAP).astype(np.int64)
        return _joined(segments, counts, segments.times)
    raise PlanError(f"on_change is {on_change!r}; expected 'finish' or 'lose'")


def _steps_on_grid(segments: FleetSegments) -> StepRuns:
    """Steps that begin at multiples of a constant step time; a multiple at which there are no workers gives no step."""
    step = float(segments.seconds[0])
    begins = np.ceil(np.append(segments.times, segments.end) / step - _SNAP)
    return _joined(segments, np.diff(begins).astype(np.int64), begins[:-1] * step)


def _finished_steps(segments: FleetSegments) -> StepRuns:
    """Steps of varying duration; a step during which the fleet changes ends as it began, and the next one follows it.

    Where a step starts depends on all steps before it, hence the loop over the segments.
    """
    counts = [0] * len(segments.times)
    starts = [0.0] * len(segments.times)
    ceil, now = math.ceil, 0.0
    rows = zip(segments.stops.tolist(), segments.samples.tolist(), segments.seconds.tolist(), strict=True)
    for i, (stop, samples, step) in enumerate(rows):
        if now >= stop:  # an earlier step is still running
            continue
        if samples:
            starts[i] = now
            counts[i] = count = ceil((stop - now) / step - _SNAP)
            now += count * step
        else:
            now = stop
    return _joined(segments, np.array(counts, np.int64), np.array(starts))


def _joined(segments: FleetSegments, counts: Ints, starts: Floats) -> StepRuns:
    """The steps of each segment as runs; empty runs are dropped, and equal runs without a gap between them joined."""
    runs = StepRuns(
        counts=counts, workers=segments.workers, samples=segments.samples, start_s=starts, seconds=segments.seconds
    )
    kept = (counts > 0) & (segments.samples > 0)
    if not kept.all():
        runs = runs.take(np.flatnonzero(kept))
    equal = (runs.workers[1:] == runs.workers[:-1]) & (runs.samples[1:] == runs.samples[:-1])
    if equal.any():
        gaps = np.abs(runs.start_s[1:] - (runs.start_s + runs.counts * runs.seconds)[:-1])
        first = np.flatnonzero(np.append(True, ~equal | (gaps > _SNAP * runs.seconds[1:])))
        runs = replace(runs.take(first), counts=np.add.reduceat(runs.counts, first))
    return runs


def fit_step_time(
    trace: Trace,
    policy: Policy | str,
    *,
    samples: int,
    epochs: int,
    offset: Seconds = _BEGINNING,
    on_change: str = "finish",
) -> Seconds:
    """The longest constant step time with which the epochs fit into the trace, so that the run lasts as long as it.

    Found by bisection, to a relative accuracy of 1e-6. As in every plan, the end of an epoch makes steps smaller, and
    with `finish` the last step only has to begin before the trace ends.
    """
    _check_training(samples, epochs)
    return longest_step_time(
        trace,
        make_policy(policy),
        lambda plan: plan._follow(samples, epochs, cut=True)[0] >= epochs,
        offset=offset,
        on_change=on_change,
    )


def longest_step_time(
    trace: Trace, policy: Policy, enough: Callable[[BatchPlan], bool], *, offset: Seconds, on_change: str
) -> Seconds:
    """The longest constant step time, at most the length of the trace, whose plan satisfies `enough`.

    A plan of sufficiently short steps must satisfy it, or the search does not end.
    """
    segments = fleet_segments(trace_from(trace, offset), policy, ConstantStepTime(Seconds(1.0)))
    if not segments.samples.any():
        raise PlanError(f"the trace {trace.name} has no workers from {offset:g} s on; no step time fits")

    def fits(step: float) -> bool:
        runs = cut_into_steps(replace(segments, seconds=np.full(len(segments.times), step)), on_change, grid=True)
        return len(runs.counts) > 0 and enough(BatchPlan.from_runs(runs, source={}))

    short = long = segments.end
    while not fits(short):
        short, long = short / 2, short
    while long - short > 1e-6 * short:
        middle = (short + long) / 2
        short, long = (middle, long) if fits(middle) else (short, middle)
    return Seconds(short)


# -- from a file of batches --------------------------------------------------------------------------------------------


def _read_batches(path: Path, *, local_batch: int) -> Ints:
    """The batch of each row of a `step,batchsize` file."""
    if local_batch < 1:
        raise PlanError(f"the local batch is {local_batch}; expected at least 1")
    file = TextFile(path=path, text=read_text(path, error=PlanError), kind=PlanError)
    if file.first_line != _BATCH_FILE_HEADER:
        raise file.error(
            f"begins with {file.beginning[:40]!r}; expected the header {_BATCH_FILE_HEADER!r}. If it is an "
            f"availability trace, make the plan from it with BatchPlan.from_trace",
            line=1,
        )
    rows = list(file.rows(columns=_BATCH_FILE_HEADER, header=True))
    if not rows:
        raise file.error("has no rows after its header. Is the file cut short?")
    batches = [file.count(text, "batch size", line=line) for line, (_, text) in rows]
    for (line, _), batch in zip(rows, batches, strict=True):
        if batch == 0:
            raise file.error("the batch size is 0; expected at least one sample", line=line)
        if batch % local_batch:
            raise file.error(
                f"a batch of {batch} is not a multiple of the local batch {local_batch}; "
                f"try a local batch of {math.gcd(local_batch, *batches)}, which divides every batch of the file",
                line=line,
            )
    return np.array(batches, np.int64)
