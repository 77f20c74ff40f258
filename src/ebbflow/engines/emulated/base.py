"""What the emulated engines share: whose samples, which seed, who is lost, what is measured.

They differ in how the virtual workers of a step are computed: one after another (`loop.py`) or many at once
(`fused.py`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ebbflow.core.spec import nearest
from ebbflow.data.ledger import Assignment, Ledger, MicroBatch, largest_micro_batch, split_step
from ebbflow.data.permutation import Permutation
from ebbflow.engines.base import Engine, Faults, Gradients
from ebbflow.engines.emulated.ranks import Ranks, StepSum
from ebbflow.engines.emulated.step import Step
from ebbflow.engines.micro_batches import Fetch, Loss, Precision, autocast, generators, micro_batch_seed
from ebbflow.errors import ConfigError, PlanError
from ebbflow.moments.meters import Meter, meter_for
from ebbflow.plan.batch_plan import BatchPlan, StepSize

__all__ = ["BatchNorm", "EmulatedEngine"]


class BatchNorm(Protocol):
    """The running statistics of a model's batch norm, which move once a step."""

    def begin(self) -> None:
        """A step begins, perhaps again."""

    def commit(self) -> None:
        """The step counts: one update with the mean over its workers."""

    def rollback(self) -> None:
        """The step does not count: the statistics are what they were."""

    @property
    def sums(self) -> Sequence[torch.Tensor]:
        """What `commit` takes for the mean over the workers: weighted sums over the samples of the step so far."""


def same_step(one: tuple[Assignment, StepSize], other: tuple[Assignment, StepSize]) -> bool:
    """Whether two steps are computed alike: what growing policies and clocks note beside does not matter."""
    return one[0] == other[0] and (one[1].workers, one[1].samples) == (other[1].workers, other[1].samples)


class EmulatedEngine(Engine):
    """Emulates the workers of a plan in this process; how they are computed is the subclass's part.

    The gradient is the sample-weighted mean over the workers. Seeds torch's global generators before every backward
    pass, by the position of its first sample. Batch norm sees one worker's samples at a time, or what a subclass
    offers besides; running statistics move once a step.
    """

    precisions: tuple[Precision, ...] = ("fp32", "bf16")

    def __init__(
        self,
        model: torch.nn.Module,
        fetch: Fetch,
        loss: Loss,
        plan: BatchPlan,
        *,
        samples: int,
        seed: int = 0,
        micro_batch: int | None = None,
        faults: Faults | None = None,
        needs: Collection[str] = (),
        parameters: Iterable[torch.nn.Parameter] | None = None,
        precision: Precision = "fp32",
        ranks: Ranks | None = None,
    ) -> None:
        """`samples`: size of an epoch. `micro_batch`: at most so many samples of a worker together; default: its share.

        `needs`: what the rule needs, "moments" or "layers"; without either nothing is measured and nothing paid.
        `parameters`: what to measure, in the optimizer's order; default: all of the model that require a gradient.
        `ranks`: the processes that share the work; all of them make the same engine and take every step together.
        """
        if precision not in self.precisions:
            raise ConfigError(f"precision is {precision!r}; {nearest(precision, list(self.precisions))}")
        self.model = model
        self.fetch = fetch
        self.loss = loss
        self.plan = plan
        self.samples = samples
        self.seed = seed
        self.micro_batch = micro_batch
        self.faults = faults or Faults()
        self.precision = precision
        self.meter: Meter | None = None
        trained = [*(parameters if parameters is not None else (p for p in model.parameters() if p.requires_grad))]
        if not {"moments", "layers"}.isdisjoint(needs):
            self.meter = meter_for(trained, layers="layers" in needs)
        self._batch_norm = self._make_batch_norm()
        self.ranks = ranks
        self.alone = ranks is None
        self.step_sum = None
        if ranks is not None:
            self.step_sum = StepSum(trained, meter=self.meter, sums=self._batch_norm.sums)
        self._generators = generators(model)
        self._device_type = next((p.device.type for p in model.parameters()), "cpu")
        self._modules, self._parameters = [*model.modules()], [*model.parameters()]
        self._training: list[bool] = []  # of each module, after model.train(), which a model may have of its own
        self._order = lru_cache(maxsize=2)(lambda epoch: Permutation(samples, seed, epoch))  # this one and the next
        self._step = 0
        self._before: Step | None = None
        self._latest: Step | None = None
        """The step that is computed; `_before`: the one before it."""
        self._fetched: tuple[Step, int] | None = None
        """The micro-batch that was fetched last: its step and its first position there."""

    @abstractmethod
    def _make_batch_norm(self) -> BatchNorm:
        """How this engine keeps the running statistics."""

    @abstractmethod
    def _parts(self, groups: Sequence[MicroBatch]) -> tuple[list[Sequence[MicroBatch]], list[int]]:
        """The groups of a whole step, as many together as are computed at once, and the worker that each part is for.

        Must not depend on the rank.
        """

    @abstractmethod
    def _micro_batches(self, step: Step) -> list[int]:
        """Samples of each micro-batch that is fetched for a step, in order."""

    @abstractmethod
    def _backward(self, step: Step) -> tuple[torch.Tensor | float, int]:
        """Leave the mean gradient in `.grad`, the micro-batches in the meter; (mean loss, backward passes)."""

    def members(self, step: int) -> StepSize:
        """What the plan says, less the workers that the script of faults took away."""
        self._step = step
        return self.faults.present(step, self.plan.at(step))

    def measure(self, on: bool) -> None:
        """Measure the upcoming steps or not, where anything is measured at all."""
        if self.meter is not None:
            self.meter.on = on

    def gradients(self, assignment: Assignment, size: StepSize) -> Gradients:
        """Forward and backward passes over the step's samples."""
        step = self._make_step(assignment, size)
        self._begin()
        total, passes = self._backward(step) if step.batch else (0.0, 0)
        if self.step_sum is not None:
            return self.step_sum(total, passes, samples=step.batch, batch=assignment.batch)
        measurement = self.meter.finish(step.batch) if self.meter is not None and self.meter.on else None
        return Gradients(loss=float(total), micro_batches=passes, measurement=measurement)

    def _make_step(self, assignment: Assignment, size: StepSize) -> Step:
        """The step that is computed now."""
        step = self._build_step(self._step, assignment, size)
        self._before, self._latest = self._latest, step
        return step

    def _build_step(self, number: int, assignment: Assignment, size: StepSize) -> Step:
        parts, workers = self._parts(self._groups(assignment, size.workers, size.samples))
        if self.ranks is not None:
            parts = self.ranks.own(parts, workers)
        indices = self._order(assignment.epoch).indices(assignment.start, assignment.stop)
        return Step(assignment, indices, parts, number=number, size=size)

    def _expected_after(self, step: Step) -> tuple[Assignment, StepSize] | None:
        """What should come after a step: a guess, which a lost worker or a growing policy may prove wrong.

        Where a step was smaller than the plan has it, so will be the next. None where the plan ends.
        """
        whole = step.whole
        ledger = Ledger(samples=self.samples, epoch=whole.epoch, position=whole.start).commit(whole)
        try:
            size = self.plan.at(step.number + 1)
        except PlanError:
            return None
        if step.size.samples < self.plan.at(step.number).samples:
            workers, samples = min(size.workers, step.size.workers), min(size.samples, step.size.samples)
            size = replace(size, workers=workers, samples=samples)
        return ledger.assign(size.samples), size

    @property
    def _foreseen(self) -> bool:
        """Whether the latest step was to be expected after the one before, so that guessing on makes sense."""
        if self._before is None or self._latest is None:
            return True
        expected = self._expected_after(self._before)
        return expected is not None and same_step(expected, (self._latest.whole, self._latest.size))

    def upcoming(self) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """The micro-batches from the one on that was fetched last: the seed before each, and its samples.

        As far as can be told: where the latest step was not to be expected, neither is what comes after it. Ends where
        the plan does, and before a step in which other ranks compute everything.
        """
        if self._fetched is None:
            return
        step, begin = self._fetched
        while step.batch:
            stops = [*accumulate(self._micro_batches(step), initial=step.start)]
            for start, stop in pairwise(stops):
                if start >= begin:
                    yield self._seed_of(step, start), step.samples(start, stop)
            expected = self._expected_after(step)
            if expected is None or not self._foreseen:
                return
            step, begin = self._build_step(step.number + 1, *expected), 0

    def _groups(self, assignment: Assignment, workers: int, samples: int) -> tuple[MicroBatch, ...]:
        largest = largest_micro_batch(workers=workers, samples=samples, limit=self.micro_batch)
        return split_step(assignment, workers=workers, largest=largest)

    def most_parts(self) -> int:
        """Of all steps of the plan, the most parts that ranks can share."""
        sizes = {(run.workers, run.samples) for run in self.plan.runs()}
        parts = (self._parts(self._groups(Assignment(0, 0, n), workers, n))[1] for workers, n in sizes)
        return max(len(set(workers)) for workers in parts)

    def _begin(self) -> None:
        """Begin a step, or begin it again: nothing of an earlier attempt is left."""
        # Not model.train() and model.zero_grad(), which walk the tree of modules: 1.3 ms a step for a ResNet-18.
        if [module.training for module in self._modules] != self._training:
            self.model.train()
            self._training = [module.training for module in self._modules]
        for parameter in self._parameters:
            parameter.grad = None
        self._batch_norm.begin()
        if self.meter is not None:
            self.meter.discard()  # of a step that an exception cut short

    def _seed_of(self, step: Step, start: int) -> int:
        return micro_batch_seed(self.seed, step.epoch, step.place(start))

    def _fetch(self, step: Step, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        seed = self._seed_of(step, start)
        for generator in self._generators:
            generator.manual_seed(seed)
        self._fetched = (step, start)
        return self.fetch(step.samples(start, stop))

    def autocast(self) -> AbstractContextManager[object]:
        """The model computes in the engine's precision inside."""
        return autocast(self.precision, self._device_type)

    def describe(self) -> dict[str, Any]:
        """How workers are emulated, as JSON: what a record's header keeps."""
        return {
            "engine": type(self).__name__,
            "precision": self.precision,
            "ranks": self.ranks.world if self.ranks is not None else 1,
        }

    def state(self) -> dict[str, float]:
        """What the steps so far have left in the engine and the upcoming ones depend on, for a checkpoint."""
        return {}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on where `state` was taken."""

    def commit(self) -> bool:
        """True, unless the script of faults has a worker die in this attempt."""
        if self.faults.strike(self._step):
            self._batch_norm.rollback()
            self.model.zero_grad(set_to_none=True)
            return False
        self._batch_norm.commit()
        return True
