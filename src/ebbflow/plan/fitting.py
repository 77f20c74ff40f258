"""Plans that fit: long enough for the epochs, or with the step time that makes a run span its trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ebbflow.core.units import Seconds
from ebbflow.errors import PlanError
from ebbflow.plan.plan import BatchPlan
from ebbflow.plan.policies import Policy, make_policy
from ebbflow.plan.steptime import ConstantStepTime, StepTimeLike
from ebbflow.plan.stretches import begun, steps_of, stretches_of
from ebbflow.traces import Trace

__all__ = ["fit_step_time", "longest_step", "plan_for"]

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
    """A plan that is long enough for the epochs; with `repeat` the trace is repeated as often as that takes.

    Without, a trace that is too short is a PlanError that says how far it reaches.
    """
    if not repeat:
        plan = BatchPlan.from_trace(trace, policy, step_time, offset=offset, on_change=on_change)
        plan.for_epochs(samples, epochs)
        return plan
    times = int(offset // trace.end) + 2  # so that at least one whole repetition lies behind the offset
    while True:
        plan = BatchPlan.from_trace(trace.repeat(times), policy, step_time, offset=offset, on_change=on_change)
        reached = plan.epochs_reached(samples, epochs)
        if reached >= epochs:
            return plan
        times = max(times + 1, int(times * epochs / max(reached, 1e-6)))


def fit_step_time(
    trace: Trace,
    policy: Policy | str,
    *,
    samples: int,
    epochs: int,
    offset: Seconds = _BEGINNING,
    on_change: str = "finish",
) -> Seconds:
    """The longest constant step time with which the epochs fit into the trace, so that the run spans all of it.

    Found by bisection, to a millionth of itself. As in every plan, epoch ends cut steps and the last step need only
    begin (`finish`) before the trace ends.
    """
    return longest_step(
        trace,
        make_policy(policy),
        lambda plan: plan.epochs_reached(samples, epochs) >= epochs,
        offset=offset,
        on_change=on_change,
    )


def longest_step(
    trace: Trace, policy: Policy, enough: Callable[[BatchPlan], bool], *, offset: Seconds, on_change: str
) -> Seconds:
    """The longest constant step time whose plan is `enough`, at most the trace's length; to a millionth of itself.

    A plan of sufficiently short steps must be enough, or this does not end.
    """
    whole = stretches_of(begun(trace, offset), policy, ConstantStepTime(Seconds(1.0)))
    if not whole.samples.any():
        raise PlanError(f"the trace {trace.name} has no workers from {offset:g} s on; no step time fits")

    def fits(step: float) -> bool:
        runs = steps_of(replace(whole, seconds=np.full(len(whole.times), step)), on_change, grid=True)
        return len(runs.counts) > 0 and enough(BatchPlan.from_runs(runs, source={}))

    short = long = whole.end
    while not fits(short):
        short, long = short / 2, short
    while long - short > 1e-6 * short:
        middle = (short + long) / 2
        short, long = (middle, long) if fits(middle) else (short, middle)
    return Seconds(short)
