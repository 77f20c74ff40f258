"""Any number of virtual workers in one process, or shared by the ranks of torchrun.

`EmulatedEngine` is what both emulated engines have in common: which samples, which seed, who is lost, what is measured.
`LoopEngine` computes the virtual workers one after another; it is the reference that every faster or distributed engine
is compared with. `FusedEngine` (`fused.py`) computes many at a time.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ebbflow.core.spec import nearest
from ebbflow.data.ledger import Assignment, Ledger, MicroBatch, micro_batches_of
from ebbflow.data.permutation import Permutation
from ebbflow.engines.allreduce import StepAllReduce, StepPart, check_dense
from ebbflow.engines.base import Engine, Faults, Gradients
from ebbflow.engines.kept_buffers import KeptBuffers, differing_buffers
from ebbflow.engines.loss_sum import LossSum, normalise
from ebbflow.engines.replica_step import (
    Fetch,
    LoadedMicroBatch,
    Loss,
    Precision,
    ReplicaStep,
    autocast,
    generators,
    micro_batch_seed,
)
from ebbflow.errors import ConfigError, PlanError
from ebbflow.moments.meters import Meter
from ebbflow.plan.batch_plan import BatchPlan, StepSize

__all__ = ["EmulatedEngine", "EmulatedStep", "LoopEngine", "Ranks", "same_step"]

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among `world` processes that emulate one fleet together.

    >>> [Ranks(rank, 3).own("abcd", [0, 1, 2, 3]) for rank in range(3)]
    [['a', 'd'], ['b'], ['c']]
    """

    rank: int
    world: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ConfigError(f"this is rank {self.rank} of {self.world}; expected a rank from 0 to {self.world - 1}")

    def own(self, parts: Sequence[Part], workers: Iterable[int]) -> list[Part]:
        """The parts of a step that this rank computes: virtual worker v belongs to rank v mod world."""
        return [part for part, worker in zip(parts, workers, strict=True) if worker % self.world == self.rank]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EmulatedStep:
    """A step as one process computes it."""

    number: int
    """Counted from 0 at the start of the run."""
    assignment: Assignment
    """The samples of all ranks."""
    size: StepSize
    """What the fleet gave it."""
    indices: npt.NDArray[np.int64]
    """Numbers of the samples of the whole step."""
    parts: Sequence[Sequence[MicroBatch]]
    """The micro-batches of this process, in parts that are computed together; each part is a contiguous range."""
    batch: int = field(init=False)
    """Samples that this process computes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch", sum(part[-1].stop - part[0].start for part in self.parts))

    def samples(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Numbers of the samples at positions of the epoch's order."""
        return self.indices[start - self.assignment.start : stop - self.assignment.start]


class BatchNormStatistics(Protocol):
    """The running statistics of a model's batch norm, which move once per step."""

    def begin(self) -> None:
        """A step begins, perhaps again."""

    def commit(self) -> None:
        """The step counts: one update with the mean over its workers."""

    def rollback(self) -> None:
        """The step does not count: the statistics are what they were."""

    @property
    def sums(self) -> Sequence[torch.Tensor]:
        """Statistics summed over this process's micro-batches, weighted with their part of the step's samples."""


def same_step(one: tuple[Assignment, StepSize], other: tuple[Assignment, StepSize]) -> bool:
    """Whether two steps are computed alike: the same samples, shared by the same number of workers."""
    return one[0] == other[0] and (one[1].workers, one[1].samples) == (other[1].workers, other[1].samples)


class EmulatedEngine(Engine):
    """Emulates the workers of a plan in this process; a subclass decides how they are computed.

    The gradient is the sample-weighted mean over the workers. Torch's global generators are seeded before every
    backward pass, by the position of its first sample. Batch norm sees the samples of one worker at a time, unless a
    subclass offers more; running statistics move once per step. Several ranks share the parts of every step; one
    all-reduce then gives every rank the gradient, statistics, loss and batch-norm sums of the whole step, so that all
    ranks apply the same step and the model is never sent."""

    precisions: tuple[Precision, ...] = ("fp32", "bf16")

    def __init__(
        self,
        model: torch.nn.Module,
        fetch: Fetch,
        loss: Loss | None,
        plan: BatchPlan,
        *,
        samples: int,
        seed: int = 0,
        micro_batch: int | None = None,
        faults: Faults | None = None,
        precision: Precision = "fp32",
        ranks: Ranks | None = None,
        on_event: Callable[[str, str], None] = lambda what, text: None,
    ) -> None:
        """`samples`: size of an epoch. `micro_batch`: most samples of one worker in one backward pass; default: all.

        `ranks`: the processes that share the work; all of them make the same engine and take every step together.
        `on_event(what, text)`: writes an event into the record.
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
        self.faults = faults
        self.precision = precision
        self.ranks = ranks
        self.on_event = on_event
        self.single_process = ranks is None
        self.meter: Meter | None
        self._batch_norm: BatchNormStatistics
        self._buffers: KeptBuffers
        self._compared_buffers = ranks is None
        self._generators = generators(model)
        self._device_type = next((p.device.type for p in model.parameters()), "cpu")
        self._order = lru_cache(maxsize=2)(lambda epoch: Permutation(samples, seed, epoch))  # this one and the next
        self._all_reduce: StepAllReduce | None = None
        self._should_stop: Callable[[], bool] = lambda: False
        self._number = 0
        self._previous: EmulatedStep | None = None
        self._current: EmulatedStep | None = None
        self._expected: EmulatedStep | None = None
        """The step that should come next, if something was done for it already."""
        self._always_measures = False
        self._fetched: tuple[EmulatedStep, int] | None = None
        """The latest fetch: its step and its first position there."""

    def _share_with_ranks(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Called by subclasses when meter and batch norm are there."""
        if self.ranks is not None:
            check_dense(self.model)
            self._all_reduce = StepAllReduce(parameters, meter=self.meter, sums=self._batch_norm.sums, flags=("stop",))

    # What a subclass decides --------------------------------------------------------------------------------------

    @abstractmethod
    def _parts(self, micro_batches: Sequence[MicroBatch]) -> tuple[list[Sequence[MicroBatch]], list[int]]:
        """The micro-batches of a whole step in parts that are computed together, and the worker that each part is for.

        Must not depend on the rank.
        """

    @abstractmethod
    def _fetches(self, step: EmulatedStep) -> list[tuple[int, int]]:
        """Start and stop of each fetch of a step, in order."""

    @abstractmethod
    def _begin(self) -> None:
        """Begin a step, or begin it again: nothing of an earlier attempt is left."""

    @abstractmethod
    def _backward(self, step: EmulatedStep) -> tuple[torch.Tensor | float, int, torch.Tensor | float]:
        """Leave the mean gradient in `.grad` and its statistics in the meter; (mean loss, backward passes, count)."""

    # The contract -------------------------------------------------------------------------------------------------

    def participants(self, step: int) -> StepSize:
        """What the plan says, less the workers that the scripted faults took away."""
        self._number = step
        size = self.plan.at(step)
        return size if self.faults is None else self.faults.present(step, size)

    def measure(self, on: bool) -> None:
        """Measure the coming steps or not, where anything is measured at all."""
        if self.meter is not None:
            self.meter.on = on or self._always_measures

    def gradients(self, assignment: Assignment, size: StepSize) -> Gradients:
        """Forward and backward passes over the step's samples."""
        step = self._enter_step(assignment, size)
        self._begin()
        return self._combined(step, *(self._backward(step) if step.batch else (0.0, 0, 0)))

    def _enter_step(self, assignment: Assignment, size: StepSize) -> EmulatedStep:
        step = self._expected
        if step is None or not same_step((step.assignment, step.size), (assignment, size)):
            step = self._make_step(self._number, assignment, size)
        self._previous, self._current = self._current, step
        return step

    def _combined(
        self, step: EmulatedStep, loss: torch.Tensor | float, passes: int, count: torch.Tensor | float
    ) -> Gradients:
        """The gradients of the whole step, from those that this process has computed."""
        batch = step.assignment.batch
        if self._all_reduce is not None:
            stop = float(self._should_stop())
            part = StepPart(loss=loss, micro_batches=passes, samples=step.batch, count=count, batch=batch)
            return self._all_reduce(part, stop=stop)
        measurement = self.meter.finish(step.batch) if self.meter is not None and self.meter.on else None
        gradients = Gradients(loss=float(loss), micro_batches=passes, measurement=measurement)
        return normalise(gradients, self.model.parameters(), count=count, batch=batch)

    def commit(self) -> bool:
        """True, unless the scripted faults let a worker die in this attempt."""
        if self.faults is not None and self.faults.strike(self._number):
            self.abandon()
            return False
        if not self._compared_buffers:
            self._compared_buffers = True
            if names := self._buffers.changed():
                self.on_event("buffers differ", differing_buffers(names, "rank"))
        self._batch_norm.commit()
        self._buffers.commit()
        return True

    def abandon(self) -> None:
        """Give up the step: the model is what it was before it."""
        self._batch_norm.rollback()
        self._buffers.rollback()
        self.model.zero_grad(set_to_none=True)

    @property
    def writes_files(self) -> bool:
        """Whether this is rank 0."""
        return self.ranks is None or self.ranks.rank == 0

    def autocast(self) -> AbstractContextManager[object]:
        """The model computes in the engine's precision inside."""
        return autocast(self.precision, self._device_type)

    def agree_to_stop(self, should_stop: Callable[[], bool]) -> Callable[[], bool]:
        """Ranks stop after the same step, although a signal reaches each of them at its own time."""
        all_reduce = self._all_reduce
        if all_reduce is None:
            return should_stop
        self._should_stop = should_stop
        return lambda: all_reduce.flags["stop"] > 0

    def idle_processes(self) -> str:
        """Which ranks never have anything to compute, and what to do about it."""
        if self.ranks is None:
            return ""
        sizes = {(run.workers, run.samples) for run in self.plan.runs()}
        most = max(len({*self._parts(self._planned(*size))[1]}) for size in sizes)
        if most >= self.ranks.world:
            return ""
        return (
            f"no step has more than {most} parts to share, so {self.ranks.world - most} of {self.ranks.world} ranks "
            f"never compute; use fewer ranks{self._more_parts}"
        )

    _more_parts = ""
    """What else gives a step more parts, for the message above."""

    def describe(self) -> dict[str, Any]:
        """How workers are emulated, as JSON values: for the header of a record."""
        return {
            "engine": type(self).__name__,
            "precision": self.precision,
            "ranks": self.ranks.world if self.ranks is not None else 1,
        }

    def close(self) -> None:
        """Remove the hooks of the meter, which would keep the model from being pickled."""
        close = getattr(self.meter, "close", None)
        if close is not None:
            close()

    # Steps --------------------------------------------------------------------------------------------------------

    def _make_step(self, number: int, assignment: Assignment, size: StepSize) -> EmulatedStep:
        parts, workers = self._parts(micro_batches_of(assignment, size, limit=self.micro_batch))
        if self.ranks is not None:
            parts = self.ranks.own(parts, workers)
        indices = self._order(assignment.epoch).indices(assignment.start, assignment.stop)
        return EmulatedStep(number=number, assignment=assignment, size=size, indices=indices, parts=parts)

    def _planned(self, workers: int, samples: int) -> tuple[MicroBatch, ...]:
        """The micro-batches of a step as the plan has it, which no epoch cuts short."""
        size = StepSize(workers=workers, samples=samples, time_s=0.0, duration_s=0.0)
        return micro_batches_of(Assignment(0, 0, samples), size, limit=self.micro_batch)

    def _expected_after(self, step: EmulatedStep) -> tuple[Assignment, StepSize] | None:
        """What should come after a step: a guess, which a lost worker or a growing policy may prove wrong.

        Where a step was smaller than the plan has it, the next one is expected to be so, too. None where the plan ends.
        """
        done = step.assignment
        ledger = Ledger(samples=self.samples, epoch=done.epoch, position=done.start).commit(done)
        try:
            size = self.plan.at(step.number + 1)
        except PlanError:
            return None
        if step.size.samples < self.plan.at(step.number).samples:
            workers, samples = min(size.workers, step.size.workers), min(size.samples, step.size.samples)
            dropped = size.samples - samples if step.size.dropped else 0
            size = replace(size, workers=workers, samples=samples, dropped=dropped)
        return ledger.assign(size.samples, size.dropped), size

    @property
    def _as_expected(self) -> bool:
        """Whether the current step was the expected one after the previous, so that guessing further makes sense."""
        if self._previous is None or self._current is None:
            return True
        expected = self._expected_after(self._previous)
        return expected is not None and same_step(expected, (self._current.assignment, self._current.size))

    def upcoming(self) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """The fetches from the latest one on: the seed before each, and its samples.

        Ends where the plan does, where the current step was not as expected, and before a step in which other ranks
        compute everything.
        """
        if self._fetched is None:
            return
        step, begin = self._fetched
        while step.batch:
            for start, stop in self._fetches(step):
                if start >= begin:
                    yield micro_batch_seed(self.seed, step.assignment.epoch, start), step.samples(start, stop)
            expected = self._expected_after(step)
            if expected is None or not self._as_expected:
                return
            step, begin = self._make_step(step.number + 1, *expected), 0


class LoopEngine(EmulatedEngine):
    """Emulates the workers of a plan one after another, one small backward pass each.

    Slow on a GPU, and simple enough to be believed. With a single micro-batch in a step (one worker, and no smaller
    `micro_batch`) noise and signal cannot be told apart: the measurement says so. Also drives a user's own loop.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        fetch: Fetch,
        loss: Loss | None,
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
        on_event: Callable[[str, str], None] = lambda what, text: None,
    ) -> None:
        """`needs`: what the rule needs, "moments" or "layers"; without either nothing is measured and nothing paid.

        `parameters`: what to measure, in the optimizer's order; default: all of the model that require a gradient.
        """
        super().__init__(
            model, fetch, loss, plan, samples=samples, seed=seed, micro_batch=micro_batch, faults=faults,
            precision=precision, ranks=ranks, on_event=on_event,
        )  # fmt: skip
        self._replica = ReplicaStep(
            model, self._fetch_next, loss, samples=samples, seed=seed, precision=precision, needs=needs,
            parameters=parameters,
        )  # fmt: skip
        self.meter, self._batch_norm = self._replica.meter, self._replica.batch_norm
        self._buffers = self._replica.buffers
        self._starts: Iterator[int] = iter(())
        self._share_with_ranks(self._replica.parameters)

    def _parts(self, micro_batches: Sequence[MicroBatch]) -> tuple[list[Sequence[MicroBatch]], list[int]]:
        return [[micro_batch] for micro_batch in micro_batches], [micro_batch.worker for micro_batch in micro_batches]

    def _fetches(self, step: EmulatedStep) -> list[tuple[int, int]]:
        return [(micro_batch.start, micro_batch.stop) for (micro_batch,) in step.parts]

    def _fetch_next(self, indices: npt.NDArray[np.int64]) -> Any:
        assert self._current is not None
        self._fetched = (self._current, next(self._starts))
        return self.fetch(indices)

    def _begin(self) -> None:
        self._replica.begin()

    def _own(self, step: EmulatedStep) -> list[MicroBatch]:
        own = [micro_batch for (micro_batch,) in step.parts]
        self._starts = iter([micro_batch.start for micro_batch in own])
        return own

    def _backward(self, step: EmulatedStep) -> tuple[torch.Tensor | float, int, torch.Tensor | float]:
        self._replica.compute(self._own(step), epoch=step.assignment.epoch, batch=step.assignment.batch)
        return self._replica.loss, len(step.parts), self._replica.count

    # A training loop of the user's own ----------------------------------------------------------------------------

    def open(self, assignment: Assignment, size: StepSize) -> None:
        """Begin a step whose backward passes the user does."""
        self._enter_step(assignment, size)
        self._begin()

    def micro_batches(self) -> Iterator[LoadedMicroBatch]:
        """The micro-batches that this process computes in the open step; one backward pass each."""
        assert self._current is not None, "micro_batches follows open"
        done = self._current.assignment
        return self._replica.load(self._own(self._current), epoch=done.epoch, batch=done.batch)

    def backward(self, loss: torch.Tensor | LossSum, micro_batch: LoadedMicroBatch) -> None:
        """Add the gradient of a micro-batch; `loss` is the mean over its samples, or a sum with its count."""
        self._replica.backward(loss, micro_batch)

    def combine(self) -> Gradients:
        """The gradients of the whole step, after the backward passes of this process."""
        assert self._current is not None, "combine follows open"
        self._replica.check_complete(self._current.batch)
        return self._combined(self._current, self._replica.loss, len(self._current.parts), self._replica.count)
