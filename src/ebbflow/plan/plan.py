"""`BatchPlan`: how big each step is, and when it happens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ebbflow.core.units import Seconds, format_seconds
from ebbflow.errors import PlanError
from ebbflow.plan import timeline
from ebbflow.plan.batchfile import read_batches
from ebbflow.plan.epochs import SampleCount, cut_step
from ebbflow.plan.policies import Policy, make_policy
from ebbflow.plan.steptime import ConstantStepTime, StepTimeLike, make_step_time
from ebbflow.plan.stretches import begun, steps_of, stretches_of
from ebbflow.traces import Trace, load

__all__ = ["BatchPlan", "PlanRun", "PlanSummary", "StepSize", "cut_step"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_BEGINNING = Seconds(0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSize:
    """One step of a plan."""

    workers: int
    samples: int
    """The whole step's batch, over all workers."""
    time_s: float
    """When the step begins; training begins at 0 s."""
    duration_s: float
    requested: int | None = field(default=None, repr=False)
    """What a growing policy requested, where that was more than `samples`."""

    @property
    def shortfall(self) -> float:
        """The part of the requested batch that the step has; the learning rate pays for the rest."""
        return 1.0 if self.requested is None else self.samples / self.requested


class PlanRun(NamedTuple):
    """Equal steps in a row, from `first` up to but without `stop` (None: without end)."""

    first: int
    stop: int | None
    workers: int
    samples: int
    start_s: float
    step_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSummary:
    """How far a plan has to be followed; the field names are the keys of `ebbflow plan --json`."""

    steps: int
    time_s: float
    """From the start of training to the end of the last step, waiting included."""
    samples: int
    """What training takes: epochs times the samples of an epoch."""
    batch_min: int
    """Of the planned batches, as are the next two: a step that an epoch's end cuts counts with what it requested."""
    batch_mean: float
    batch_max: int
    changes: int
    """Steps that have other workers or another planned batch than the step before."""


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class BatchPlan:
    """Workers, samples and time of each step; run-length encoded and immutable, so that 10^7 steps are small.

    Made by `from_trace`, `read` or `constant`. A plan says what a step wants; that an epoch ends inside a step is the
    business of whoever follows the plan (`cut_step`, `for_epochs`).

    >>> plan = BatchPlan.from_trace(Trace.parse("0s:4 60s:0 90s:6 120s"), "follow(32)", "10s")
    >>> plan.steps, plan.at(5), plan.at(6)
    (9, StepSize(workers=4, samples=128, time_s=50.0, duration_s=10.0), StepSize(workers=6, samples=192, time_s=90.0, duration_s=10.0))
    """  # noqa: E501

    first: Ints
    """Number of each run's first step."""
    workers: Ints
    samples: Ints
    start_s: Floats
    """When each run's first step begins."""
    step_s: Floats
    """Duration of each of the run's steps."""
    steps: int | None
    """How many steps the plan has; None: its last run has no end."""
    source: Mapping[str, Any] = field(default_factory=dict)
    """What the plan was made from, as JSON values, for the header of a run."""

    def __post_init__(self) -> None:
        for array in (self.first, self.workers, self.samples, self.start_s, self.step_s):
            array.flags.writeable = False

    # -- making one ------------------------------------------------------------------------------------------------

    @classmethod
    def from_trace(
        cls,
        trace: Trace | str | Path,
        policy: Policy | str,
        step_time: StepTimeLike,
        *,
        offset: Seconds = _BEGINNING,
        on_change: str = "finish",
    ) -> BatchPlan:
        """Follow a trace g (or what `load` reads: a file, a generator) from its time `offset` on, as training's 0 s.

        With a constant step time dt and `finish` this is the formula of Andre, Strati and Klimovic (2022): the step at
        position i has the batch of g(i dt + offset). Steps sit on the grid of multiples of dt; a position at which
        nobody is there gives no step, and training goes on at the next position.

        With a step time that depends on the workers, a step begins when the one before it ends, or when somebody is
        there again. A change inside a step: `finish` lets it end as it began; `lose` throws it away with the time it
        took, and a new one starts at the change (also for a constant step time, which leaves the grid then). A change
        that the policy does not pass on, such as one above a cap, is none. The last step begins (`finish`) or ends
        (`lose`) before the trace does.
        """
        trace = trace if isinstance(trace, Trace) else load(trace)
        policy, model = make_policy(policy), make_step_time(step_time)
        stretches = stretches_of(begun(trace, offset), policy, model)
        runs = steps_of(stretches, on_change, grid=isinstance(model, ConstantStepTime))
        if not len(runs.counts):
            raise PlanError(f"the trace {trace.name} from {offset:g} s on leaves no room for a single step; "
                            f"it has {stretches.workers.max()} workers at most")  # fmt: skip
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
        """From a CSV file `step,batchsize`, one row a step; the order of the rows counts, not the step column.

        Each batch must be a multiple of the local batch: so many workers share it. The file says nothing about time,
        so it is given here; with the default a second is a step.
        """
        path = Path(path)
        sizes = read_batches(path, local_batch=local_batch)
        model = make_step_time(step_time)
        begins = np.flatnonzero(np.append(True, np.diff(sizes) != 0))
        samples, counts = sizes[begins], np.diff(begins, append=len(sizes))
        seconds = model.seconds(samples // local_batch)
        stops = np.cumsum(counts * seconds)
        runs = timeline.Runs(
            counts=counts, workers=samples // local_batch, samples=samples,
            start_s=np.append(0.0, stops[:-1]), seconds=seconds,
        )  # fmt: skip
        return cls.from_runs(runs, source={"file": path.name, "local_batch": local_batch, "step_time": str(model)})

    @classmethod
    def constant(
        cls, workers: int, samples: int, *, step_time: StepTimeLike = 1.0, steps: int | None = None
    ) -> BatchPlan:
        """The same step again and again, without end or `steps` times: a fleet that nobody takes away."""
        if workers < 1 or samples < workers or (steps is not None and steps < 1):
            raise PlanError(f"{samples} samples on {workers} workers, {steps} steps, is no plan; expected at least one "
                            f"of each, and a sample for each worker")  # fmt: skip
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
    def from_runs(cls, runs: timeline.Runs, source: Mapping[str, Any]) -> BatchPlan:
        """Of runs of equal steps, one at least."""
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

    # -- asking ----------------------------------------------------------------------------------------------------

    def at(self, step: int) -> StepSize:
        """The step with this number, counted from 0, in O(log runs)."""
        run = self._run(step)
        return StepSize(
            workers=int(self.workers[run]),
            samples=int(self.samples[run]),
            time_s=float(self.start_s[run] + (step - self.first[run]) * self.step_s[run]),
            duration_s=float(self.step_s[run]),
        )

    def batches(self, start: int = 0, stop: int | None = None) -> Ints:
        """The samples of each step from `start` up to but without `stop` (or the plan's end), as an array."""
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

    def kinds(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(workers, samples, how many) of the different steps from `start` up to but without `stop`.

        >>> BatchPlan.from_trace(Trace.parse("0s:4 60s:2 90s:4 120s"), "follow(32)", "10s").kinds(1, 11)
        [(2, 64, 3), (4, 128, 7)]
        """
        if stop <= start:
            return []
        low, high = self._run(start), self._run(stop - 1) + 1
        counts = np.diff(np.clip(np.append(self.first[low:high], stop), start, stop))
        sizes, of = np.unique(np.stack([self.workers[low:high], self.samples[low:high]]), axis=1, return_inverse=True)
        totals = np.bincount(of.reshape(-1), weights=counts).astype(np.int64)
        return [*zip(*sizes.tolist(), totals.tolist(), strict=True)]

    def samples_before(self, step: int) -> int:
        """Planned samples of all steps before this one."""
        return self._count.before(step)

    def whole_until(self, step: int, samples: int) -> int:
        """The first step from `step` on that may not take what is planned, when an epoch has so many samples left.

        Before it every step does; not beyond the plan's end.
        """
        last = self._count.first_cut(step, samples)
        return last if self.steps is None else max(step, min(last, self.steps))

    def for_epochs(self, samples: int, epochs: int, *, cut: bool = True) -> PlanSummary:
        """How far training of so many epochs over so many samples goes, or a PlanError if the plan is too short.

        `cut`: each epoch ends with a smaller step (`cut_step`), as training does it; else steps run across epoch ends.
        """
        reached, steps = self._count.epochs(samples, epochs, cut=cut, limit=self.steps)
        if reached < epochs:
            raise PlanError(
                f"the plan is too short: its {steps:,} steps ({format_seconds(self._end_of(steps))}) reach "
                f"{math.floor(reached * 100) / 100:g} of {epochs} epochs; repeat the trace (repeat=True, --repeat), "
                f"start it earlier or ask for fewer epochs"
            )
        last = self._run(steps - 1) + 1
        workers, sizes = self.workers[:last], self.samples[:last]
        return PlanSummary(
            steps=steps,
            time_s=self._end_of(steps),
            samples=samples * epochs,
            batch_min=int(sizes.min()),
            batch_mean=self._count.before(steps) / steps,
            batch_max=int(sizes.max()),
            changes=int(np.count_nonzero((np.diff(workers) != 0) | (np.diff(sizes) != 0))),
        )

    def epochs_reached(self, samples: int, epochs: int) -> float:
        """Epochs over so many samples that the plan is long enough for, at most `epochs`; epoch ends cut steps."""
        return self._count.epochs(samples, epochs, cut=True, limit=self.steps)[0]

    def describe(self) -> dict[str, Any]:
        """What the plan was made from and what it is, as JSON values."""
        return {
            **self.source,
            "steps": self.steps,
            "runs": len(self.first),
            "duration_s": None if self.steps is None else self._end_of(self.steps),
            "batch_min": int(self.samples.min()),
            "batch_max": int(self.samples.max()),
        }

    # -- inside ----------------------------------------------------------------------------------------------------

    @property
    def _length(self) -> str:
        return "no end" if self.steps is None else f"{self.steps:,} steps"

    @cached_property
    def _count(self) -> SampleCount:
        return SampleCount(self.first, self.samples)

    def _run(self, step: int) -> int:
        if step < 0 or (self.steps is not None and step >= self.steps):
            raise PlanError(f"step {step} is not in the plan, which has {self._length}; repeat the trace to go on")
        return int(np.searchsorted(self.first, step, side="right")) - 1

    def _end_of(self, steps: int) -> float:
        last = self.at(steps - 1)
        return last.time_s + last.duration_s

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BatchPlan):
            return NotImplemented
        return list(self.runs()) == list(other.runs())

    def __hash__(self) -> int:
        return hash((self.first.tobytes(), self.samples.tobytes(), self.steps))

    def __repr__(self) -> str:
        sizes = f"{self.samples.min()} to {self.samples.max()} samples"
        return f"BatchPlan({self._length}, {sizes}, {len(self.first)} runs)"
