"""`ElasticSampler`: the plan's step sizes and the epoch's order, dealt out to a torch DataLoader micro-batch by
micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from operator import index
from typing import Any, SupportsIndex

from torch.utils.data import Sampler

from ebbflow.data.ledger import Assignment, Ledger, MicroBatch, largest_micro_batch, micro_batch_sizes, split_step
from ebbflow.data.permutation import Permutation
from ebbflow.errors import CheckpointError, ConfigError, PlanError
from ebbflow.plan.batch_plan import BatchPlan, StepSize

__all__ = ["ElasticSampler", "MicroBatchInfo"]

STATE_VERSION = 1
# Indices computed at once: a call for each small micro-batch would cost hundreds of times more an index. Blocks of 2^15
# would save another tenth, and double the time to the first micro-batch, which is 0.3 ms.
_BLOCK = 1 << 14


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchInfo:
    """One local batch of one (virtual) worker, as this rank trains on it."""

    step: int
    size: int
    """Samples in this micro-batch."""
    batch: int
    """Samples in the whole step, of all ranks."""
    workers: int
    """Workers that the plan gives the step."""
    index: int
    """Number of this micro-batch among this rank's micro-batches of the step."""
    count: int
    """This rank's micro-batches in the step."""
    epoch: int
    start: int
    """Position of its first sample in the epoch's order."""
    time_s: float
    """When the step begins on the plan's clock."""
    next_size: int | None
    """Size of this rank's next micro-batch in the same step; None after the last."""

    @property
    def first(self) -> bool:
        """Whether it opens the step on this rank."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether it completes the step on this rank."""
        return self.index == self.count - 1


@dataclass(frozen=True, slots=True)
class _Place:
    """Between two steps: what is committed, and the number of the step that comes next."""

    ledger: Ledger
    step: int


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of the plan, cut to the epoch."""

    place: _Place
    size: StepSize
    assignment: Assignment
    largest: int
    """Most samples in a micro-batch."""

    @property
    def after(self) -> _Place:
        return _Place(self.place.ledger.commit(self.assignment), self.place.step + 1)


class ElasticSampler(Sampler[list[int]]):
    """Batches for a DataLoader whose sizes follow a plan; every sample exactly once an epoch.

        sampler = ElasticSampler(len(data), plan, local_batch=32)
        loader = DataLoader(data, batch_sampler=sampler, num_workers=4)

    Each item is the list of indices of one *micro-batch*: the local batch of one virtual worker. A step of the plan is
    cut into even micro-batches, each at most what the plan gives a worker and at most `local_batch`; the last step of
    an epoch is smaller; no micro-batch is one lone sample, unless `local_batch` is 1. One iteration runs from the
    sampler's position to the end of the epoch; the plan's steps run on across epochs.

    *The position* is where training has come, not where reading has: a DataLoader's worker processes read ahead. Only
    `consume()`, called once for each micro-batch trained on (`ElasticOptimizer` does it), and `set_epoch()` move it;
    iterating is looking, and a new iteration starts at the position again. `state_dict()` is the position after the
    last *complete* step, so a resumed run repeats nothing and loses nothing, whatever had been read ahead. Where nobody
    calls `consume()`, the position stays at the start of the epoch that was set: a resumed run repeats the epoch it was
    in, and without `set_epoch()` the same epoch comes again, as with torch's DistributedSampler.

    *Ranks.* Micro-batch i of a step belongs to rank i mod `world_size`, so each step uses the same samples for any
    number of ranks. A rank without a micro-batch in a step skips it; one that has none left in an epoch gets one empty
    iteration at most, and then the next epoch. Rank 0 has a micro-batch in every step: save its state, and load that on
    all ranks, as many as there are then.

    The order depends on seed and epoch only, never on the workers. Start and resume take constant time and memory.

    >>> sampler = ElasticSampler(10, 2, local_batch=2, shuffle=False)         # 2 workers x 2 samples a step
    >>> list(sampler)
    [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    >>> for _ in range(3):
    ...     micro_batch = sampler.consume()
    >>> micro_batch.step, micro_batch.batch, micro_batch.last
    (1, 4, False)
    >>> list(sampler), sampler.state_dict()["position"]                 # the state: one whole step, of 4 samples
    ([[6, 7], [8, 9]], 4)
    """

    def __init__(
        self,
        samples: SupportsIndex | Sized,
        plan: BatchPlan | int,
        *,
        local_batch: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Deal out `samples` (a number, or a data set with a length) by a plan, or to a constant number of workers."""
        if local_batch is not None and local_batch < 1:
            raise ConfigError(f"local_batch is {local_batch}; expected at least one sample")
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} of world_size {world_size}: expected 0 <= rank < world_size")
        if isinstance(plan, int):
            if local_batch is None:
                raise ConfigError(f"the plan is {plan} workers but not what each takes; pass local_batch")
            plan = BatchPlan.constant(plan, plan * local_batch)
        self.samples = len(samples) if isinstance(samples, Sized) else index(samples)
        self.plan = plan
        self.local_batch = local_batch
        self.seed = seed
        self.shuffle = shuffle
        self.rank = rank
        self.world_size = world_size
        self._start = _Place(Ledger(samples=self.samples), 0)
        self._move(self._start)
        self._looked_at = -1  # epoch of the latest iteration
        self._order(0)  # a bad seed fails here and not in a DataLoader

    # Reading ----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[list[int]]:
        if self._looked_at == self.epoch and not self._left(self._place):
            # What remains of this epoch is for other ranks, and the iteration that ends here has been.
            self.set_epoch(self.epoch + 1)
        self._looked_at = self.epoch
        return self._deal(self._place, self._done)

    def _deal(self, place: _Place, done: int) -> Iterator[list[int]]:
        """The micro-batches of this rank from a place to the end of its epoch, without the first `done`."""
        order = self._order(place.ledger.epoch)
        base, block = 0, order.indices(0, 0)
        for step in self._rest(place):
            mine = self._mine(step)
            for share in mine[done:]:
                if share.stop > base + len(block):
                    base = share.start
                    block = order.indices(base, min(self.samples, max(share.stop, base + _BLOCK)))
                yield block[share.start - base : share.stop - base].tolist()
            if mine:
                done = 0

    def __len__(self) -> int:
        """Micro-batches that an iteration would yield now; costs as much as the plan has runs, not steps."""
        return self._left(self._place) - self._done

    def _order(self, epoch: int) -> Permutation:
        return Permutation(self.samples, self.seed, epoch, shuffle=self.shuffle)

    def _rest(self, place: _Place) -> Iterator[_Step]:
        """The steps from a place to the end of its epoch."""
        epoch = place.ledger.epoch
        while place.ledger.epoch == epoch:
            step = self._step_at(place)
            yield step
            place = step.after

    def _left(self, place: _Place) -> int:
        """This rank's micro-batches from a place to the end of its epoch."""
        tail = self._tail(place)
        whole = (
            steps * self._count(samples, self._most(workers, samples))
            for workers, samples, steps in self.plan.distinct_steps(place.step, tail.step)
        )
        return sum(whole) + sum(self._count(step.assignment.batch, step.largest) for step in self._rest(tail))

    def _tail(self, place: _Place) -> _Place:
        """The place before the last steps of an epoch, which its end may cut; all before them are as planned."""
        step = self.plan.whole_steps_until(place.step, place.ledger.remaining)
        passed = self.plan.samples_before(step) - self.plan.samples_before(place.step)
        return _Place(replace(place.ledger, position=place.ledger.position + passed), step)

    def _step_at(self, place: _Place) -> _Step:
        try:
            size = self.plan.at(place.step)
        except PlanError as error:
            raise PlanError(
                f"the plan reaches {place.ledger.total / self.samples:.2f} epochs: it ends in epoch "
                f"{place.ledger.epoch}, after {place.ledger.position} of {self.samples} samples ({error}); lengthen or "
                f"repeat the trace, or train fewer epochs"
            ) from error
        assignment = place.ledger.assign(size.samples)
        return _Step(place, size, assignment, self._most(size.workers, size.samples))

    def _most(self, workers: int, samples: int) -> int:
        """Samples in a micro-batch, at most."""
        return largest_micro_batch(workers=workers, samples=samples, limit=self.local_batch)

    def _mine(self, step: _Step) -> tuple[MicroBatch, ...]:
        """This rank's micro-batches of a step; none where the step has fewer micro-batches than there are ranks."""
        every = split_step(step.assignment, workers=self.world_size, largest=step.largest)
        return every[self.rank :: self.world_size]

    def _count(self, batch: int, largest: int) -> int:
        """How many micro-batches of a step are this rank's."""
        return len(range(self.rank, len(micro_batch_sizes(batch, largest=largest)), self.world_size))

    # The position -----------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that training is in; the one after it as soon as its last micro-batch is consumed."""
        return self._place.ledger.epoch

    def _move(self, place: _Place) -> None:
        self._place = place
        self._done = 0  # consumed micro-batches of the step that comes next on this rank
        self._ahead: tuple[_Step, tuple[MicroBatch, ...]] | None = None  # that step, once looked up

    def peek(self) -> MicroBatchInfo:
        """The next micro-batch to be consumed; at the end of an epoch, the first one of the next. Changes nothing."""
        step, mine = self._upcoming()
        last = self._done == len(mine) - 1
        return MicroBatchInfo(
            step=step.place.step,
            size=mine[self._done].size,
            batch=step.assignment.batch,
            workers=step.size.workers,
            index=self._done,
            count=len(mine),
            epoch=step.assignment.epoch,
            start=mine[self._done].start,
            time_s=step.size.time_s,
            next_size=None if last else mine[self._done + 1].size,
        )

    def _upcoming(self) -> tuple[_Step, tuple[MicroBatch, ...]]:
        """The next step in which this rank has micro-batches, and these."""
        self._ahead = self._ahead or self._look_ahead()
        return self._ahead

    def _look_ahead(self) -> tuple[_Step, tuple[MicroBatch, ...]]:
        place = self._place
        for _ in range(2):  # the rest of this epoch, then the next one
            for step in self._rest(place):
                if mine := self._mine(step):
                    return step, mine
                place = step.after
        raise ConfigError(
            f"rank {self.rank} of {self.world_size} has no micro-batch up to the end of epoch "
            f"{place.ledger.epoch - 1}: {self.samples} samples give the plan's steps fewer micro-batches than "
            f"there are ranks; use fewer ranks or a smaller local_batch"
        )

    def consume(self) -> MicroBatchInfo:
        """Move the position past one micro-batch, which has been trained on, and return it.

        The step is committed with this rank's last micro-batch of it.
        """
        micro_batch = self.peek()
        if micro_batch.last:
            step, _ = self._upcoming()
            self._move(step.after)
        else:
            self._done += 1
        return micro_batch

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next, as with DistributedSampler.

        The current epoch: nothing happens, so that a resumed run keeps its position. Another one: the position is its
        beginning, and the step is the one at which the plan gets there; what is left of the current epoch is left out.
        """
        if epoch < 0:
            raise ConfigError(f"epoch is {epoch}; expected a whole number from 0 up")
        if epoch == self.epoch:
            return
        place = self._place if epoch > self.epoch else self._start
        while place.ledger.epoch < epoch:
            place = self._step_at(self._tail(place)).after
        self._move(place)

    def state_dict(self) -> dict[str, int]:
        """The position after the last complete step, as plain integers."""
        return {
            "version": STATE_VERSION,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
            "step": self._place.step,
            **self._place.ledger.state(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to a saved position; a state of other data or another order is refused, and nothing changes then.

        Plan, ranks and local batch may be others than when it was saved.
        """
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
        self._move(_Place(Ledger.restore(state_dict), step))
        self._looked_at = -1
