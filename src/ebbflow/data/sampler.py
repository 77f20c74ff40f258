"""`ElasticSampler`: gives a torch DataLoader the micro-batches of each step of a plan."""

from __future__ import annotations

import gc
import hashlib
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex

import numpy as np
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from ebbflow.core.units import whole_number
from ebbflow.data.ledger import Assignment, Ledger, MicroBatch, largest_micro_batch, micro_batch_sizes, split_step
from ebbflow.data.permutation import Permutation
from ebbflow.errors import CheckpointError, ConfigError, DataError, PlanError, SpecError
from ebbflow.plan.batch_plan import BatchPlan, StepSize
from ebbflow.plan.policies import GrowingPolicy, Policy, make_policy, sizes_of

__all__ = ["ElasticSampler", "MicroBatchInfo"]

STATE_VERSION = 1
# Indices computed at once: a call per small micro-batch would cost hundreds of times more per index. Blocks of 2^15
# would save another tenth, and double the time to the first micro-batch, which is 0.3 ms.
_BLOCK = 1 << 14


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchInfo:
    """A micro-batch of this rank, and the step that it belongs to."""

    step: int
    """Number of the step in the plan."""
    size: int
    """Samples in the micro-batch that count; 0 for a repeated micro-batch, which must not train anything."""
    batch: int
    """Samples in the whole step, over all ranks."""
    workers: int
    """Workers of the step in the plan."""
    index: int
    """Number of the micro-batch among those of this rank in the step."""
    count: int
    """Number of micro-batches of this rank in the step."""
    epoch: int
    start: int
    """Position of its first sample in the order of the epoch."""
    time_s: float
    """When the step begins in the plan."""

    @property
    def first(self) -> bool:
        """Whether it is the first one of this rank in the step."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether it is the last one of this rank in the step."""
        return self.index == self.count - 1


@dataclass(frozen=True, slots=True)
class _Position:
    """A position between two steps: the committed samples and the number of the next step."""

    ledger: Ledger
    step: int


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of the plan, within its epoch."""

    position: _Position
    size: StepSize
    assignment: Assignment
    largest: int
    """Largest number of samples in a micro-batch."""

    @property
    def after(self) -> _Position:
        return _Position(self.position.ledger.commit(self.assignment), self.position.step + 1)


@dataclass(slots=True)
class _Cursor:
    """How far one consumer has got: an optimizer, or whoever calls `consume`."""

    position: _Position
    done: int = 0
    """Consumed micro-batches of the next step."""
    upcoming: tuple[_Step, tuple[MicroBatch, ...]] | None = None
    """That step and this rank's micro-batches of it, once they were looked up."""
    consumed: int = 0
    """Micro-batches consumed since the latest iteration began."""
    lead: int | None = None
    """Micro-batches that had been asked for when the iteration's first one was consumed."""
    replaced: bool = False
    """Whether a later consumer may have taken the place of this one, which has consumed nothing since."""

    @property
    def order(self) -> tuple[int, int]:
        """By this, the slowest cursor is found."""
        return self.position.ledger.total, self.done


@dataclass(slots=True)
class _Iteration(Iterator[list[int]]):
    """An iteration over a sampler, which counts how often it was asked for a micro-batch."""

    micro_batches: Iterator[list[int]]
    epoch: int
    count: Callable[[], int]
    """Counts the micro-batches that it gives out in all."""
    prefetched: int | None
    """Micro-batches for which the DataLoader asks before its loop asks for the first; None without a DataLoader."""
    asked: int = 0
    """Also counts what was asked for in vain, after the end: a DataLoader asks once for each that it hands over."""
    counted: int = -1

    @property
    def length(self) -> int:
        """Micro-batches that it gives out in all; counted when it is first asked for, so that starting is fast."""
        if self.counted < 0:
            self.counted = self.count()
        return self.counted

    def __next__(self) -> list[int]:
        self.asked += 1
        return next(self.micro_batches)


def _sample_count(samples: SupportsIndex | Sized) -> int:
    if isinstance(samples, IterableDataset | str):
        raise ConfigError(
            f"the data is {type(samples).__name__}; expected a map-style data set, with __len__ and __getitem__, whose "
            f"samples can be read in any order, or its number of samples; ebbflow.data.streams.StreamDataset makes one "
            f"of an IterableDataset whose order can be restarted"
        )
    return whole_number(
        len(samples) if isinstance(samples, Sized) else samples, "the number of samples", error=DataError
    )


def _ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and number of ranks: as given, or those of `torch.distributed`, or one process."""
    if rank is not None:
        whole_number(rank, "rank", least=0)
    if (rank is None) != (world_size is None):
        raise ConfigError(f"rank is {rank} and world_size is {world_size}; give both or neither of them")
    if rank is not None and world_size is not None:
        whole_number(rank, "rank", least=0, most=whole_number(world_size, "world_size") - 1)
        return rank, world_size
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"this process is one of {os.environ['WORLD_SIZE']} (WORLD_SIZE), but torch.distributed is not "
            f"initialised, so that each of them would train on all samples; call init_process_group() before the "
            f"sampler is made, or give rank= and world_size="
        )
    return 0, 1


def _expected_plan(plan: object) -> str:
    return (
        f"the plan is {plan!r}; expected a BatchPlan, such as BatchPlan.from_trace('spot.csv', 'follow(32)', '0.6s') "
        f"or BatchPlan.read('batches.csv', local_batch=32), a policy for the ranks that there are, such as "
        f"'fixed(256)', or a number of workers"
    )


def _is_growing(policy: str) -> bool:
    """Whether the text of a plan's policy is that of one that looks at the progress of training."""
    try:
        return isinstance(make_policy(policy, local_batch=1), GrowingPolicy)
    except SpecError:  # a policy that is not registered, or a plan without one
        return False


def _grows(policy: object) -> ConfigError:
    return ConfigError(
        f"the policy {policy} looks at the progress of training, and an ElasticSampler knows its steps beforehand; "
        f"train with ebbflow.Session, or use follow, fixed or capped"
    )


def _plan_of(plan: BatchPlan | Policy | str | int, *, local_batch: int | None, world_size: int) -> BatchPlan:
    if isinstance(plan, int):
        if local_batch is None:
            raise ConfigError(f"the plan is {plan} workers, without their local batch; pass local_batch")
        return BatchPlan.constant(plan, plan * local_batch)
    if isinstance(plan, str | Policy):
        try:
            policy = make_policy(plan, local_batch)
        except SpecError as error:
            raise ConfigError(f"{_expected_plan(plan)} ({error})") from error
        if isinstance(policy, GrowingPolicy):
            raise _grows(policy)
        workers, samples = (int(sizes[0]) for sizes in sizes_of(policy, np.array([world_size], np.int64)))
        constant = BatchPlan.constant(workers, samples)
        plan = replace(constant, source={**constant.source, "policy": str(policy)})
    if not isinstance(plan, BatchPlan):
        raise ConfigError(_expected_plan(plan))
    followed = str(plan.source.get("policy", ""))
    if _is_growing(followed):
        raise _grows(followed)
    if followed.startswith("drop("):
        raise ConfigError(
            f"the plan follows {plan.source['policy']}, whose steps drop samples, and an ElasticSampler gives out "
            f"every sample; train with ebbflow.Session, which drops and counts them, or use follow or fixed"
        )
    return plan


class ElasticSampler(Sampler[list[int]]):
    """A batch sampler for a DataLoader, with batch sizes that follow a plan; every sample exactly once per epoch.

        sampler = ElasticSampler(len(data), plan, local_batch=32)
        loader = DataLoader(data, batch_sampler=sampler, num_workers=4)

    Each item is the list of indices of one *micro-batch*: the samples of one virtual worker. A step of the plan is
    split into micro-batches of nearly equal size, each at most a worker batch of the plan and at most `local_batch`.
    The last step of an epoch is smaller. No micro-batch has a single sample, unless `local_batch` is 1. One iteration
    leads from the position of the sampler to the end of the epoch; the steps of the plan continue across epochs.

    *The position* is that of training and not that of reading, since the worker processes of a DataLoader prefetch.
    Only `consume()`, called once per micro-batch after it was trained on (`ElasticOptimizer` does it), and
    `set_epoch()` move it. Iterating does not move it, and a new iteration starts at the position again. `state_dict()`
    is the position after the last *complete* step, so that a resumed run repeats nothing and loses nothing, whatever
    was prefetched. With several optimizers the position is that of the slowest. If nobody calls `consume()`, the
    position stays at the start of the epoch that was set, and a second iteration over it warns.

    *What is checked.* A loop that takes micro-batches without consuming them, or consumes more than it took, is a
    ConfigError at the next `consume()`, with any number of worker processes in the DataLoader; if there is no next one
    in the epoch, it is a warning when the next loop over a DataLoader begins. `sampler=` instead of `batch_sampler=` is
    refused, and so are loaders that skip batches to resume, since the sampler resumes by itself.

    *Ranks.* By default those of `torch.distributed`, if it is initialised, else one. Micro-batch i of a step belongs to
    rank i mod `world_size`, so that each step has the same samples, in the same micro-batches, for any number of ranks
    (if `local_batch` or the plan says how large they are). All ranks get the same number of micro-batches in every
    step, so that whatever they do together in a pass finds all of them: where the last round of a step has fewer
    micro-batches than there are ranks, the other ranks get a *repeated* one, whose `MicroBatchInfo.size` is 0.
    `ElasticOptimizer` gives it no weight; loops that combine gradients themselves must do the same. After each step the
    state is the same on all ranks, and their number may be another one when it is loaded.

    *A policy* instead of a plan is asked for the batch of as many workers as there are ranks: `fixed(256)` keeps the
    batch whatever the number of ranks, `follow(32)` lets it follow.

    The order depends on seed and epoch only, never on the workers. Starting and resuming take constant time and memory.

    >>> sampler = ElasticSampler(10, 2, local_batch=2, shuffle=False)   # steps of 2 workers with 2 samples each
    >>> list(sampler)
    [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    >>> for _ in range(3):
    ...     micro_batch = sampler.consume()
    >>> micro_batch.step, micro_batch.batch, micro_batch.last
    (1, 4, False)
    >>> list(sampler), sampler.state_dict()["position"]                 # the state is after one complete step
    ([[6, 7], [8, 9]], 4)
    """

    def __init__(
        self,
        samples: SupportsIndex | Sized,
        plan: BatchPlan | Policy | str | int,
        *,
        local_batch: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """`samples` is a number, or a data set with a length; `plan` a plan, a policy, or a number of workers."""
        if local_batch is not None:
            whole_number(local_batch, "local_batch")
        self.rank, self.world_size = _ranks(rank, world_size)
        if shuffle and getattr(samples, "in_order", False):
            raise ConfigError(f"{type(samples).__name__} is read in its own order; give shuffle=False")
        self.samples = _sample_count(samples)
        self.plan = _plan_of(plan, local_batch=local_batch, world_size=self.world_size)
        self.local_batch = local_batch
        self.seed = seed
        self.shuffle = shuffle
        self._start = _Position(Ledger(samples=self.samples), 0)
        self._own = _Cursor(self._start)  # of whoever calls consume(), if no optimizer is attached
        self._attached: weakref.WeakKeyDictionary[Any, _Cursor] = weakref.WeakKeyDictionary()
        self._iteration: _Iteration | None = None
        self._restored = False  # at a position of a saved run, from which nothing was read yet
        self._order(0)  # a wrong seed fails here and not in a DataLoader

    # Reading ----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[list[int]]:
        caller = sys._getframe(1).f_locals
        self._check_caller(caller.get("self"))
        loader = caller.get("loader")
        self._check_samples(loader)
        prefetched = loader.num_workers * (loader.prefetch_factor or 0) if isinstance(loader, DataLoader) else None
        last = self._iteration
        if (
            last is not None
            and last.prefetched is not None
            and last.epoch == self.epoch
            and last.asked - last.prefetched >= last.length
        ):
            self._check_consumed(last)
        cursor = self._cursor
        micro_batches = self._micro_batches(cursor.position, cursor.done)
        start = replace(cursor)
        self._iteration = _Iteration(micro_batches, self.epoch, lambda: self._left(start), prefetched)
        self._restored = False
        for each in self._cursors:
            each.consumed, each.lead = 0, None
        return self._iteration

    def _check_caller(self, caller: object) -> None:
        """Refuse to be read by a torch BatchSampler, which would take a micro-batch for the index of a sample."""
        if getattr(caller, "skip_batches", 0):
            raise ConfigError(
                f"{type(caller).__name__} skips {caller.skip_batches} batches to resume, but the sampler itself starts "  # type: ignore[attr-defined]
                f"where the saved run stopped, so that they would be lost; turn the skipping off (transformers: "
                f"ignore_data_skip=True)"
            )
        if isinstance(caller, BatchSampler) and getattr(caller, "sampler", None) is self:
            raise ConfigError(
                "an ElasticSampler was passed to a DataLoader as sampler=, but it yields whole micro-batches; pass it "
                "as batch_sampler=, without batch_size, shuffle and drop_last"
            )

    def _check_samples(self, loader: object) -> None:
        """Refuse a DataLoader whose data set has another number of samples, if that can be asked."""
        dataset = getattr(loader, "dataset", None)
        if isinstance(loader, DataLoader) and isinstance(dataset, Sized) and len(dataset) != self.samples:
            raise ConfigError(
                f"the sampler gives out indices of {self.samples:,} samples, but the data set of the DataLoader has "
                f"{len(dataset):,}; make the sampler with len(dataset), and for a part of the data give both a "
                f"torch.utils.data.Subset"
            )

    def _check_consumed(self, last: _Iteration) -> None:
        """Warn if a loop ran to the end of an iteration and did not train on all of its micro-batches."""
        consumed = min(cursor.consumed for cursor in self._cursors)
        if last.length > consumed:
            self._warn(
                f"the latest iteration over epoch {last.epoch} gave out {last.length} micro-batches, of which "
                f"{consumed} were trained on; the rest is given out again. Pass sampler= to ElasticOptimizer and call "
                f"its step() (or skip()) once for every micro-batch, or call sampler.consume(), or set_epoch() if the "
                f"same samples are to be left out"
            )

    @staticmethod
    def _warn(text: str) -> None:
        warnings.warn(text, stacklevel=4)

    def _micro_batches(self, position: _Position, done: int) -> Iterator[list[int]]:
        """The micro-batches of this rank from a position to the end of its epoch, without the first `done`."""
        order = self._order(position.ledger.epoch)
        base, block = 0, order.indices(0, 0)
        for step in self._rest(position):
            for micro_batch in self._mine(step)[done:]:
                if micro_batch.stop > base + len(block):
                    base = micro_batch.start
                    block = order.indices(base, min(self.samples, max(micro_batch.stop, base + _BLOCK)))
                yield block[micro_batch.start - base : micro_batch.stop - base].tolist()
            done = 0

    def __len__(self) -> int:
        """Micro-batches of the iteration over the current epoch; constant while it is iterated over.

        The cost grows with the runs of the plan, not its steps.
        """
        if self._iteration is not None and self._iteration.epoch == self.epoch:
            return self._iteration.length
        return self._left(self._cursor)

    def total_updates(self, epochs: int) -> int:
        """Steps of the plan in the first `epochs` epochs, for schedulers that count updates, such as OneCycleLR."""
        position = self._start
        for _ in range(epochs):
            position = self._step_at(self._tail(position)).after
            while position.ledger.position:
                position = self._step_at(position).after
        return position.step

    def _order(self, epoch: int) -> Permutation:
        return Permutation(self.samples, self.seed, epoch, shuffle=self.shuffle)

    def _rest(self, position: _Position) -> Iterator[_Step]:
        """The steps from a position to the end of its epoch."""
        epoch = position.ledger.epoch
        while position.ledger.epoch == epoch:
            step = self._step_at(position)
            yield step
            position = step.after

    def _left(self, cursor: _Cursor) -> int:
        """The number of this rank's micro-batches from a cursor to the end of its epoch."""
        position = cursor.position
        tail = self._tail(position)
        whole = (
            steps * self._count(samples, self._largest(workers, samples))
            for workers, samples, steps in self.plan.distinct_steps(position.step, tail.step)
        )
        rest = sum(self._count(step.assignment.batch, step.largest) for step in self._rest(tail))
        return sum(whole) + rest - cursor.done

    def _tail(self, position: _Position) -> _Position:
        """The position before the last steps of an epoch; all steps before them take what is planned."""
        step = self.plan.whole_steps_until(position.step, position.ledger.remaining)
        passed = self.plan.samples_before(step) - self.plan.samples_before(position.step)
        return _Position(replace(position.ledger, position=position.ledger.position + passed), step)

    def _step_at(self, position: _Position) -> _Step:
        ledger = position.ledger
        try:
            size = self.plan.at(position.step)
        except PlanError as error:
            raise PlanError(
                f"the plan reaches {ledger.total / self.samples:.2f} epochs: it ends in epoch {ledger.epoch}, after "
                f"{ledger.position} of {self.samples} samples ({error}); lengthen or repeat the trace, or train fewer "
                f"epochs"
            ) from error
        return _Step(position, size, ledger.assign(size.samples), self._largest(size.workers, size.samples))

    def _largest(self, workers: int, samples: int) -> int:
        """Largest number of samples in a micro-batch."""
        return largest_micro_batch(workers=workers, samples=samples, limit=self.local_batch)

    def _mine(self, step: _Step) -> tuple[MicroBatch, ...]:
        """This rank's micro-batches of a step; if there are not enough for all ranks, the last one is repeated."""
        every = split_step(step.assignment, workers=self.world_size, largest=step.largest)
        missing = -len(every) % self.world_size
        return (*every, *every[-1:] * missing)[self.rank :: self.world_size]

    def _repeated(self, step: _Step, index: int) -> bool:
        """Whether this rank's micro-batch number `index` of a step is a repeated one."""
        every = micro_batch_sizes(step.assignment.batch, largest=step.largest)
        return index * self.world_size + self.rank >= len(every)

    def _count(self, batch: int, largest: int) -> int:
        """The number of each rank's micro-batches of a step."""
        return -(-len(micro_batch_sizes(batch, largest=largest)) // self.world_size)

    # The position -----------------------------------------------------------------------------------------------

    @property
    def several_micro_batches(self) -> bool:
        """Whether any step of the plan has two micro-batches, of which noise and signal are measured."""
        return any(
            len(micro_batch_sizes(run.samples, largest=self._largest(run.workers, run.samples))) > 1
            for run in self.plan.runs()
        )

    @property
    def epoch(self) -> int:
        """The current epoch of training; the next one as soon as the last micro-batch is consumed."""
        return self._cursor.position.ledger.epoch

    @property
    def position(self) -> int:
        """Samples of all complete steps since the start of training."""
        return self._cursor.position.ledger.total

    @property
    def _cursors(self) -> list[_Cursor]:
        """Those that hold the position."""
        attached = [*self._attached.values()]
        return [cursor for cursor in attached if not cursor.replaced] or attached or [self._own]

    @property
    def _cursor(self) -> _Cursor:
        """The cursor of the slowest consumer, which is the position of the sampler."""
        return min(self._cursors, key=lambda cursor: cursor.order)

    def _move(self, position: _Position) -> None:
        for cursor in (self._own, *self._attached.values()):
            cursor.position, cursor.done, cursor.upcoming = position, 0, None

    def attach(self, consumer: object, *, replaces: Callable[[Any], bool] = lambda other: False) -> None:
        """Let an optimizer consume the micro-batches; with several of them, each consumes every micro-batch.

        Those that it `replaces` hold the position no longer, unless they are stepped with it: most likely nobody steps
        them any more.
        """
        cursor = self._cursor
        for other, replaced in self._attached.items():
            replaced.replaced = replaced.replaced or replaces(other)
        self._attached[consumer] = _Cursor(cursor.position, cursor.done)

    def _cursor_of(self, consumer: object | None) -> _Cursor:
        if consumer is not None:
            if consumer not in self._attached:
                raise ConfigError(
                    "a later optimizer of the same parameters took the place of this one, which was not stepped with "
                    "it; step the later one only, or both of them for every micro-batch"
                )
            return self._attached[consumer]
        if self._attached:
            raise ConfigError("an optimizer consumes the micro-batches of this sampler; leave consume() to its step()")
        return self._own

    def peek(self, consumer: object | None = None) -> MicroBatchInfo:
        """The next micro-batch to be consumed; at the end of an epoch, the first one of the next epoch."""
        cursor = self._cursor_of(consumer)
        (step, mine), done = self._upcoming(cursor), cursor.done
        return MicroBatchInfo(
            step=step.position.step,
            size=0 if self._repeated(step, done) else mine[done].size,
            batch=step.assignment.batch,
            workers=step.size.workers,
            index=done,
            count=len(mine),
            epoch=step.assignment.epoch,
            start=mine[done].start,
            time_s=step.size.time_s,
        )

    def _upcoming(self, cursor: _Cursor) -> tuple[_Step, tuple[MicroBatch, ...]]:
        """The next step, with this rank's micro-batches of it."""
        if cursor.upcoming is None:
            step = self._step_at(cursor.position)
            cursor.upcoming = step, self._mine(step)
        return cursor.upcoming

    def consume(self, consumer: object | None = None) -> MicroBatchInfo:
        """Move the position past one micro-batch, which was trained on, and return it.

        The last micro-batch of this rank in a step commits the step.
        """
        cursor = self._cursor_of(consumer)
        micro_batch = self.peek(consumer)
        self._check_taken(cursor)
        if micro_batch.first:
            self._check_others(cursor)
        if micro_batch.last:
            step, _ = self._upcoming(cursor)
            cursor.position, cursor.done, cursor.upcoming = step.after, 0, None
        else:
            cursor.done += 1
        cursor.consumed += 1
        cursor.replaced = False
        return micro_batch

    def _check_taken(self, cursor: _Cursor) -> None:
        """Compare what the loop took with what it consumes.

        A DataLoader asks for a fixed number of micro-batches in advance, and for one more whenever it hands one over.
        So the lead of what was asked for over what was consumed stays the same, if one is consumed for each.
        """
        iteration = self._iteration
        if iteration is None or cursor.consumed == iteration.length:
            return
        lead = iteration.asked - cursor.consumed
        if cursor.lead is None:
            cursor.lead = lead
        if lead > cursor.lead:
            raise ConfigError(
                f"the loop took {lead - cursor.lead + 1} micro-batches since the last step(), which counts one: call "
                f"step() after every micro-batch, or skip() where one is left out. For gradient accumulation of your "
                f"own give accumulation= to ElasticOptimizer; for an optimizer that is not stepped with the others, do "
                f"not give it the sampler"
            )
        if lead < 1:
            raise ConfigError(
                f"step() was called {cursor.consumed + 1} times in this iteration, but only {iteration.asked} "
                f"micro-batches were given out: call it once for every micro-batch that the loader yields"
            )

    def _check_others(self, cursor: _Cursor) -> None:
        """Refuse to begin a step while another optimizer has not ended the one before: it would hold the position.

        One that was replaced, and is still not stepped, consumes no longer.
        """
        here = cursor.position.ledger.total
        for other in [other for other, its in self._attached.items() if its.replaced and its is not cursor]:
            if self._attached[other].position.ledger.total < here:
                del self._attached[other]
        if not self._any_behind(cursor):
            return
        gc.collect()  # one that nobody has any more may refer to itself
        if self._any_behind(cursor):
            raise ConfigError(
                f"{len(self._attached)} optimizers share the sampler, and not all of them were stepped in the step "
                f"before this one: call step() or skip() of each of them for every micro-batch. For an optimizer that "
                f"is not stepped with the others, do not give it the sampler; of one that is no longer used, keep "
                f"nothing"
            )

    def _any_behind(self, cursor: _Cursor) -> bool:
        here = cursor.position.ledger.total
        return any(other.position.ledger.total < here for other in self._cursors)

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch, as with DistributedSampler.

        For the current epoch nothing happens, so that a resumed run keeps its position. For another one, the position
        becomes its beginning, at the step at which the plan gets there; the rest of the current epoch is left out, with
        a warning if its training had begun. Leaving the epoch of a restored state before it was read, or going back
        with an optimizer, is refused.
        """
        if epoch < 0:
            raise ConfigError(f"epoch is {epoch}; expected a whole number from 0 up")
        if epoch == self.epoch:
            return
        if self._restored or (self._attached and epoch < self.epoch):
            raise ConfigError(
                f"set_epoch({epoch}) would leave epoch {self.epoch}, where the saved state or the training has got to. "
                f"The sampler counts the epochs by itself: leave set_epoch() out, or call it with sampler.epoch, which "
                f"tells accelerate's loaders, too, where to continue (loader.set_epoch(sampler.epoch)); to start anew, "
                f"create a new sampler and a new optimizer"
            )
        cursor = self._cursor
        position = cursor.position if epoch > self.epoch else self._start
        left = cursor.position.ledger.remaining
        if left < self.samples and self._left(cursor):
            self._warn(
                f"set_epoch({epoch}) in the middle of epoch {self.epoch} leaves out {left} of its {self.samples} "
                f"samples; to train on them, iterate again before set_epoch()"
            )
        while position.ledger.epoch < epoch:
            position = self._step_at(self._tail(position)).after
        self._move(position)

    def state_dict(self) -> dict[str, int]:
        """The position after the last complete step, as a dictionary of integers."""
        return {
            "version": STATE_VERSION,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
            "step": self._cursor.position.step,
            **self._cursor.position.ledger.state(),
        }

    def described(self) -> dict[str, str]:
        """What must be the same on all ranks."""
        plan = self.plan
        steps = hashlib.sha256(b"".join(array.tobytes() for array in (plan.first, plan.workers, plan.samples)))
        said = {
            "samples": self.samples, "seed": self.seed, "shuffle": self.shuffle, "local_batch": self.local_batch,
            "the plan": f"{plan.source.get('policy', 'a plan')} ({steps.hexdigest()[:8]})",
        }  # fmt: skip
        return {name: str(value) for name, value in said.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a saved position; a state of other data or of another order is refused, and then nothing changes.

        Plan, ranks and local batch may differ from those when it was saved.
        """
        self._move(self._saved_position(state_dict))
        self._iteration, self._restored = None, self._own.position.ledger.total > 0

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Raise the CheckpointError with which `load_state_dict` would refuse a state; change nothing."""
        self._saved_position(state_dict)

    def _saved_position(self, state_dict: Mapping[str, Any]) -> _Position:
        own = self.state_dict()
        for key in ("version", "seed", "shuffle", "samples"):
            if state_dict.get(key) != own[key]:
                raise CheckpointError(
                    f"the sampler state was saved with {key} {state_dict.get(key)!r}, this sampler has {own[key]!r}; "
                    f"create the sampler with the saved one, or start anew"
                )
        step = state_dict.get("step")
        if not isinstance(step, int) or step < 0:
            raise CheckpointError(f"the sampler state has step {step!r}; expected a whole number from 0 up")
        return _Position(Ledger.restore(state_dict), step)
