"""Growing policies at work: asked before each step, limited by what the workers can do, saved with the run.

growth = Growth(policy, ref_batch=128, epoch_samples=50_000)
size = growth.allow(size)         # what the workers can do -> what the step takes; the smaller wins
...
growth.observe(batch=size.samples, loss=..., norm_sq=...)     # a committed step; the next wish is made of it
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ebbflow.core.units import Seconds
from ebbflow.errors import CheckpointError
from ebbflow.plan.epochs import cut_step
from ebbflow.plan.fitting import longest_step
from ebbflow.plan.growing import Geo, Growing, Observation, PolicyState
from ebbflow.plan.plan import BatchPlan, StepSize
from ebbflow.plan.steptime import StepTimeLike
from ebbflow.traces import Trace

__all__ = ["Growth", "GrowingPlan", "allow", "fit_growing", "foresee", "plan_growing", "workers_for"]

_BEGINNING = Seconds(0.0)


def workers_for(batch: int, local_batch: int) -> int:
    """Workers that share a batch, none with more than `local_batch` samples.

    >>> workers_for(128, 32), workers_for(129, 32)
    (4, 5)
    """
    return -(-batch // local_batch)


def allow(size: StepSize, requested: int, max_batch: int | None = None) -> StepSize:
    """The step: the smaller of what is requested and of what can be done. Workers that it leaves without work idle.

    `size` is what the workers can do. The result says what was requested where that was more.

    >>> four = StepSize(workers=4, samples=128, time_s=0.0, duration_s=1.0)
    >>> small, large = allow(four, 40), allow(four, 512)
    >>> (small.workers, small.samples, small.shortfall), (large.workers, large.samples, large.shortfall)
    ((2, 40, 1.0), (4, 128, 0.25))
    """
    batch = min(requested, size.samples, max_batch if max_batch is not None else requested)
    workers = min(size.workers, max(1, batch // 2), workers_for(batch * size.workers, size.samples))
    return replace(size, workers=workers, samples=batch, requested=requested if requested > batch else None)


class Growth:
    """A growing policy and its state in one run: `requested` is the wish for the next step.

    The policy is asked once for each committed step, so that a step that was lost and is repeated wants what it
    requested before, and a run that goes on from `state_dict` wants what an undisturbed one does."""

    def __init__(self, policy: Growing, *, ref_batch: int, epoch_samples: int) -> None:
        self.policy = policy
        self._start = Observation(step=0, samples=0, ref_batch=ref_batch, epoch_samples=epoch_samples)
        self._seen = self._start
        self._state: PolicyState = policy.init()
        self.requested, self._state = policy.requested(self._seen, self._state)

    @property
    def useful(self) -> int:
        """Samples that the next step could use, if the workers were there."""
        return min(self.requested, self.policy.max_batch or self.requested)

    def allow(self, size: StepSize) -> StepSize:
        """What the next step takes, when the workers can do `size`."""
        return allow(size, self.requested, self.policy.max_batch)

    def observe(
        self,
        *,
        batch: int,
        loss: float | None = None,
        norm_sq: float | None = None,
        noise: float | None = None,
        signal: float | None = None,
    ) -> None:
        """A step of `batch` samples was committed, and this is what it showed."""
        self._seen = replace(
            self._start,
            step=self._seen.step + 1,
            samples=self._seen.samples + batch,
            batch=batch,
            loss=loss,
            norm_sq=norm_sq,
            noise=noise,
            signal=signal,
        )
        self.requested, self._state = self.policy.requested(self._seen, self._state)

    def state_dict(self) -> dict[str, Any]:
        """The wish, the policy's state and the position, as JSON."""
        return {
            "policy": str(self.policy),
            "requested": self.requested,
            "state": json.dumps(self._state),
            "step": self._seen.step,
            "samples": self._seen.samples,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; the state of another policy is refused."""
        if state.get("policy") != str(self.policy):
            raise CheckpointError(f"the saved batch policy is {state.get('policy')!r}, this run's is {self.policy}")
        try:
            self.requested, self._state = int(state["requested"]), json.loads(state["state"])
            self._seen = replace(self._start, step=int(state["step"]), samples=int(state["samples"]))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the saved state of the batch policy {self.policy} is damaged: {error!r}") from None


def _steps(
    policy: Growing, plan: BatchPlan, *, samples: int, epochs: int, ref_batch: int
) -> Iterator[tuple[StepSize, int]]:
    """The steps of a policy that is shown nothing but its position, until the epochs are done or the plan is.

    Each with the number of equal ones in a row, so that a long run is not walked step by step.
    """
    seen = Observation(step=0, samples=0, epoch_samples=samples, ref_batch=ref_batch)
    state = policy.init()
    remaining, left = samples, epochs
    for run in plan.runs():
        here = StepSize(workers=run.workers, samples=run.samples, time_s=run.start_s, duration_s=run.step_s)
        while run.stop is None or seen.step < run.stop:
            requested, state = policy.requested(seen, state)
            size = allow(here, requested, policy.max_batch)
            # As planned are the steps that leave two samples or more of the epoch; see `cut_step`.
            equal = min(policy.steady(seen, size.samples), (remaining - 2) // size.samples)
            equal = max(1, equal if run.stop is None else min(equal, run.stop - seen.step))
            taken = cut_step(size.samples, remaining) if equal == 1 else size.samples
            yield replace(size, time_s=run.start_s + (seen.step - run.first) * run.step_s), equal
            seen = replace(seen, step=seen.step + equal, samples=seen.samples + equal * taken, batch=taken)
            remaining -= equal * taken
            if not remaining:
                remaining, left = samples, left - 1
            if not left:
                return


def foresee(policy: Growing, plan: BatchPlan, *, samples: int, epochs: int, ref_batch: int) -> BatchPlan:
    """The steps that a policy will take, when `plan` is what the workers can do; of passive policies the exact ones.

    Nobody knows what an adaptive policy will see. Its plan is that of a batch that never grows: the longest it can be.
    Where `plan` is too short for the epochs, so is the answer.
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


def _continues(begin: StepSize, size: StepSize, *, after: int) -> bool:
    """Whether a step belongs to the run of equal steps that began so many steps before it."""
    if (begin.workers, begin.samples, begin.duration_s) != (size.workers, size.samples, size.duration_s):
        return False
    return abs(begin.time_s + after * begin.duration_s - size.time_s) <= 1e-6 * size.duration_s


@dataclass(frozen=True, kw_only=True)
class GrowingPlan:
    """The plans of a training whose batch grows."""

    capacity: BatchPlan
    """What the workers can do in each step: what an engine follows."""
    foreseen: BatchPlan
    """The steps themselves, as far as they can be told beforehand (`foresee`)."""


def plan_growing(
    trace: Trace,
    policy: Growing,
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

    A step takes as long as the step time says for all workers that are there, whether it needs them or not.
    """
    times = int(offset // trace.end) + 2 if repeat else 1
    while True:
        whole = trace.repeat(times) if repeat else trace
        capacity = BatchPlan.from_trace(whole, policy, step_time, offset=offset, on_change=on_change)
        foreseen = foresee(policy, capacity, samples=samples, epochs=epochs, ref_batch=ref_batch)
        if not repeat:
            foreseen.for_epochs(samples, epochs)  # too short is an error
        reached = foreseen.epochs_reached(samples, epochs)
        if reached >= epochs:
            return GrowingPlan(capacity=capacity, foreseen=foreseen)
        times = max(times + 1, int(times * epochs / max(reached, 1e-6)))


def fit_growing(
    trace: Trace,
    policy: Growing,
    *,
    samples: int,
    epochs: int,
    ref_batch: int,
    offset: Seconds = _BEGINNING,
    on_change: str = "finish",
) -> Seconds:
    """The longest constant step time with which the epochs fit into the trace, as `fit_step_time` finds it.

    Of an adaptive policy: with which they fit even if the batch never grows.
    """

    def enough(capacity: BatchPlan) -> bool:
        steps = foresee(policy, capacity, samples=samples, epochs=epochs, ref_batch=ref_batch)
        return steps.epochs_reached(samples, epochs) >= epochs

    return longest_step(trace, policy, enough, offset=offset, on_change=on_change)
