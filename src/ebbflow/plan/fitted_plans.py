"""Plans that are long enough for the epochs of a training.

`plan_for` is for fleet policies, and `plan_by_epochs` for those on fleets that change after so many epochs.
`plan_growing` and `fit_growing` are for growing policies, whose steps `foresee` computes before training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from ebbflow.core.units import Seconds, whole_number
from ebbflow.errors import PlanError
from ebbflow.plan.batch_plan import (
    BatchPlan,
    StepRuns,
    StepSize,
    cut_step,
    fleet_segments,
    longest_step_time,
    trace_from,
)
from ebbflow.plan.growing import Geo, allow
from ebbflow.plan.policies import GrowingPolicy, Observation, Policy, make_policy
from ebbflow.plan.steptime import ConstantStepTime, StepTimeLike
from ebbflow.traces import Trace

__all__ = ["GrowingPlan", "fit_growing", "foresee", "plan_by_epochs", "plan_for", "plan_growing"]

Made = TypeVar("Made")
_BEGINNING = Seconds(0.0)


def plan_for(
    trace: Trace,
    policy: Policy | str,
    step_time: StepTimeLike,
    *,
    samples: int,
    epochs: int,
    offset: Seconds = _BEGINNING,
    repeat: bool = False,
    on_change: str = "finish",
) -> BatchPlan:
    """A plan that is long enough for the epochs.

    With `repeat` the trace is repeated as often as necessary; without, a trace that is too short is a PlanError that
    says how many epochs it reaches.
    """

    def make(trace: Trace) -> tuple[BatchPlan, BatchPlan]:
        plan = BatchPlan.from_trace(trace, policy, step_time, offset=offset, on_change=on_change)
        return plan, plan

    return _long_enough(trace, make, samples=samples, epochs=epochs, offset=offset, repeat=repeat)


def plan_by_epochs(
    trace: Trace,
    policy: Policy | str,
    epoch_time: Seconds,
    *,
    samples: int,
    epochs: int,
    offset: Seconds = _BEGINNING,
    repeat: bool = False,
) -> BatchPlan:
    """A plan in which every epoch takes `epoch_time`, whatever the workers: the clock of the trace counts epochs.

    So a trace says after how many epochs the workers change, for any number of samples and any batch, and a change at
    the end of an epoch takes effect exactly there. A step takes the part of the epoch that its samples are. As in
    `plan_for`, a step begins with the workers that there are, and a trace that is too short is a PlanError unless it is
    repeated. Time without workers is a PlanError: it would never pass.

    >>> plan = plan_by_epochs(Trace.parse("0h:1 2h:3 4h"), "follow(8)", Seconds(3600.0), samples=20, epochs=4)
    >>> plan.batches().tolist()  # an epoch takes 3 steps of 8, 8 and 4 samples, or one of 20 where 24 are planned
    [8, 8, 8, 8, 8, 8, 24, 24]
    """
    part = trace_from(trace.repeat(int(offset // trace.end) + 1) if repeat else trace, offset)
    needed = epochs * epoch_time
    if repeat and part.end < needed:
        part = trace_from(trace.repeat(math.ceil((offset + needed) / trace.end)), offset)
    if part.end < needed * (1 - 1e-9):
        raise PlanError(
            f"the trace {trace.name} is too short: at {epoch_time:g} s per epoch it covers {part.end / epoch_time:.4g} "
            f"of {epochs} epochs; use a longer trace, or repeat it"
        )
    segments = fleet_segments(part, make_policy(policy), ConstantStepTime(epoch_time))
    # The number of samples before each segment; 1e-6 of a sample is rounding in the times.
    begins = np.ceil(segments.times / epoch_time * samples - 1e-6).astype(np.int64)
    at, position, rows = 0, 0, []
    while position < epochs * samples:
        while at + 1 < len(begins) and begins[at + 1] <= position:
            at += 1
        workers, batch = int(segments.workers[at]), int(segments.samples[at])
        if not batch:
            raise PlanError(
                f"the trace {trace.name} has no workers at {position / samples:.4g} epochs, and with a time per epoch "
                f"none passes without them; use a trace that always has workers, or a time per step"
            )
        remaining = samples - position % samples
        until_change = int(begins[at + 1]) - position if at + 1 < len(begins) else remaining
        # Steps that leave two samples or more of the epoch take what was planned; see `cut_step`.
        equal = max(1, min((remaining - 2) // batch, math.ceil(until_change / batch)))
        taken = cut_step(batch, remaining) if equal == 1 else batch
        rows.append((equal, workers, batch, position / samples * epoch_time, taken / samples * epoch_time))
        position += equal * taken
    counts, fleet, batches, starts, seconds = (np.array(column) for column in zip(*rows, strict=True))
    runs = StepRuns(counts=counts, workers=fleet, samples=batches, start_s=starts, seconds=seconds)
    source = {"trace": trace.name, "policy": str(policy), "epoch_time_s": float(epoch_time), "offset_s": float(offset)}
    return BatchPlan.from_runs(runs, source=source)


def _long_enough(
    trace: Trace,
    make: Callable[[Trace], tuple[Made, BatchPlan]],
    *,
    samples: int,
    epochs: int,
    offset: Seconds,
    repeat: bool,
) -> Made:
    """What `make` makes of the trace, or of as many repetitions as the plan of its steps needs for the epochs."""
    if not repeat:
        made, plan = make(trace)
        plan.for_epochs(samples, epochs)  # raises if it is too short
        return made
    times = int(offset // trace.end) + 2  # so that at least one complete repetition follows the offset
    while True:
        made, plan = make(trace.repeat(times))
        reached = plan.epochs_reached(samples, epochs)
        if reached >= epochs:
            return made
        times = max(times + 1, int(times * epochs / max(reached, 1e-6)))


# -- growing policies --------------------------------------------------------------------------------------------------


def foresee(policy: GrowingPolicy, plan: BatchPlan, *, samples: int, epochs: int, ref_batch: int) -> BatchPlan:
    """The steps that a growing policy will take if `plan` says what the workers can do.

    For passive policies they are exact. For an adaptive policy, whose observations are not known before training, they
    are the steps of a batch that never grows, which is the largest possible number of steps. If `plan` is too short for
    the epochs, so is the result.
    """
    if not policy.passive:
        policy = Geo(factor=1.0, initial=policy.initial, max_batch=policy.max_batch, local_batch=policy.local_batch)
    first: list[int] = []
    rows: list[StepSize] = []
    steps = 0
    for size, equal in _steps(policy, plan, samples=samples, epochs=epochs, ref_batch=ref_batch):
        if not rows or not _continues(rows[-1], size, after=steps - first[-1]):
            first.append(steps)
            rows.append(size)
        steps += equal
    return BatchPlan(
        first=np.array(first, np.int64),
        workers=np.array([row.workers for row in rows], np.int64),
        samples=np.array([row.samples for row in rows], np.int64),
        start_s=np.array([row.time_s for row in rows], np.float64),
        step_s=np.array([row.duration_s for row in rows], np.float64),
        steps=steps,
        source=plan.source,
    )


def _steps(
    policy: GrowingPolicy, plan: BatchPlan, *, samples: int, epochs: int, ref_batch: int
) -> Iterator[tuple[StepSize, int]]:
    """(step, number of consecutive equal steps) of a passive policy, until the epochs or the plan end.

    Equal steps are counted at once, so that a long run does not take one iteration per step.
    """
    seen = Observation(step=0, samples=0, epoch_samples=samples, ref_batch=ref_batch)
    state = policy.init()
    remaining, left = samples, epochs
    for run in plan.runs():
        here = StepSize(workers=run.workers, samples=run.samples, time_s=run.start_s, duration_s=run.step_s)
        while run.stop is None or seen.step < run.stop:
            requested, state = policy.ask(seen, state)
            size = allow(here, requested, policy.max_batch)
            # Steps that leave two samples or more of the epoch take what was planned; see `cut_step`.
            unchanged: Any = policy.unchanged_steps(seen, size.samples)
            if type(unchanged) is not int or unchanged < 1:
                what = f"{policy}: the number of steps that unchanged_steps() returned"
                unchanged = whole_number(unchanged, what, most=None, error=PlanError)
            equal = min(unchanged, (remaining - 2) // size.samples)
            equal = max(1, equal if run.stop is None else min(equal, run.stop - seen.step))
            taken = cut_step(size.samples, remaining) if equal == 1 else size.samples
            yield replace(size, time_s=run.start_s + (seen.step - run.first) * run.step_s), equal
            seen = replace(seen, step=seen.step + equal, samples=seen.samples + equal * taken, batch=taken)
            remaining -= equal * taken
            if not remaining:
                remaining, left = samples, left - 1
            if not left:
                return


def _continues(begin: StepSize, size: StepSize, *, after: int) -> bool:
    """Whether a step belongs to the run of equal steps that began `after` steps before it."""
    if (begin.workers, begin.samples, begin.duration_s) != (size.workers, size.samples, size.duration_s):
        return False
    return abs(begin.time_s + after * begin.duration_s - size.time_s) <= 1e-6 * size.duration_s


@dataclass(frozen=True, kw_only=True)
class GrowingPlan:
    """The two plans of a training whose batch grows."""

    capacity: BatchPlan
    """What the workers can do in each step; engines follow this plan."""
    foreseen: BatchPlan
    """The steps that are taken, as far as they are known before training (`foresee`)."""


def plan_growing(
    trace: Trace,
    policy: GrowingPolicy,
    step_time: StepTimeLike,
    *,
    samples: int,
    epochs: int,
    ref_batch: int,
    offset: Seconds = _BEGINNING,
    repeat: bool = False,
    on_change: str = "finish",
) -> GrowingPlan:
    """Plans that are long enough for the epochs, as `plan_for` makes them for policies that do not grow.

    A step takes the step time of all available workers, whether it uses all of them or not.
    """

    def make(trace: Trace) -> tuple[GrowingPlan, BatchPlan]:
        capacity = BatchPlan.from_trace(trace, policy, step_time, offset=offset, on_change=on_change)
        foreseen = foresee(policy, capacity, samples=samples, epochs=epochs, ref_batch=ref_batch)
        return GrowingPlan(capacity=capacity, foreseen=foreseen), foreseen

    return _long_enough(trace, make, samples=samples, epochs=epochs, offset=offset, repeat=repeat)


def fit_growing(
    trace: Trace,
    policy: GrowingPolicy,
    *,
    samples: int,
    epochs: int,
    ref_batch: int,
    offset: Seconds = _BEGINNING,
    on_change: str = "finish",
) -> Seconds:
    """The longest constant step time with which the epochs fit into the trace, as in `fit_step_time`.

    For an adaptive policy it is the one with which they fit even if the batch never grows.
    """

    def enough(capacity: BatchPlan) -> bool:
        steps = foresee(policy, capacity, samples=samples, epochs=epochs, ref_batch=ref_batch)
        return steps.epochs_reached(samples, epochs) >= epochs

    return longest_step_time(trace, policy, enough, offset=offset, on_change=on_change)
