"""A trace as a policy sees it, cut into steps: what `BatchPlan.from_trace` is made of."""

from __future__ import annotations

import numpy as np

from ebbflow.core.units import Seconds
from ebbflow.errors import PlanError
from ebbflow.plan import timeline
from ebbflow.plan.policies import Policy
from ebbflow.plan.steptime import StepTime
from ebbflow.traces import Trace

__all__ = ["begun", "steps_of", "stretches_of"]


def begun(trace: Trace, offset: Seconds) -> Trace:
    """The trace from a time on, which is then 0 s."""
    if not 0 <= offset < trace.end:
        raise PlanError(f"the offset of {offset:g} s lies outside of the trace, which covers 0 to {trace.end:g} s")
    return trace.shift(offset)


def stretches_of(trace: Trace, policy: Policy, step_time: StepTime) -> timeline.Stretches:
    """The trace as the policy sees it: neighbours that mean the same step are one."""
    workers, samples = policy.sizes(trace.workers)
    begins = np.flatnonzero(np.append(True, (workers[1:] != workers[:-1]) | (samples[1:] != samples[:-1])))
    workers, samples = workers[begins], samples[begins]
    seconds = step_time.seconds(np.maximum(workers, 1))
    return timeline.Stretches(
        times=trace.times[begins], end=trace.end, workers=workers, samples=samples, seconds=seconds
    )


def steps_of(stretches: timeline.Stretches, on_change: str, *, grid: bool) -> timeline.Runs:
    """The steps of the stretches; `grid`: their time is constant, so that they sit on its multiples."""
    if on_change == "finish":
        return timeline.steps_on_grid(stretches) if grid else timeline.steps_finished(stretches)
    if on_change == "lose":
        return timeline.steps_kept(stretches)
    raise PlanError(f"on_change is {on_change!r}; expected 'finish' or 'lose'")
