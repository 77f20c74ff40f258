"""Every sample exactly once per epoch: the ledger of committed samples, and the micro-batches of a step.

With the policy `drop` it is at most once: a step then also drops samples, which the ledger counts.

An epoch is an order of samples; a `Ledger` says how much of it was trained on. A step *assigns* the next range of the
order, trains on it, and *commits* it. An assignment changes nothing, so that a step that fails is simply not committed,
and the next assignment covers the same samples again. This holds for any history of workers, kills and resumed runs,
since the ledger knows nothing about them.

    ledger = Ledger(samples=10)
    step = ledger.assign(4)           # Assignment(epoch=0, start=0, stop=4)
    ...                               # a worker dies: drop the assignment
    step = ledger.assign(3)           # Assignment(epoch=0, start=0, stop=3)
    ledger = ledger.commit(step)      # now these three samples are counted, once
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ebbflow.errors import CheckpointError, DataError, LedgerError
from ebbflow.plan.batch_plan import StepSize, cut_step

__all__ = [
    "Assignment", "Ledger", "MicroBatch", "largest_micro_batch", "micro_batch_sizes", "micro_batches_of", "split_step",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Assignment:
    """The samples of one step: positions start to stop - 1 in the order of an epoch."""

    epoch: int
    start: int
    stop: int
    dropped: int = field(default=0, repr=False)
    """Samples from `stop` on that no step trains on."""

    @property
    def batch(self) -> int:
        """Samples in the step."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The position of training: an immutable value of a few integers.

    The end of an epoch and the start of the next one are the same ledger, (epoch + 1, 0).
    """

    samples: int
    """Samples in an epoch."""
    epoch: int = 0
    """Number of completed epochs."""
    position: int = 0
    """Committed samples of the current epoch, with those that were dropped; always below `samples`."""
    dropped: int = 0
    """Samples of the current epoch that were dropped."""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise DataError(f"an epoch has {self.samples} samples; expected at least one: is the data set empty?")
        if self.epoch < 0 or not 0 <= self.position < self.samples:
            raise LedgerError(
                f"epoch {self.epoch}, position {self.position} is not a position in epochs of {self.samples} samples"
            )
        if not 0 <= self.dropped <= self.position:
            raise LedgerError(f"{self.dropped} of the first {self.position} samples cannot have been dropped")

    @property
    def total(self) -> int:
        """Samples committed since the start of training, with those that were dropped."""
        return self.epoch * self.samples + self.position

    @property
    def remaining(self) -> int:
        """Samples of the current epoch that are not yet committed; at least one."""
        return self.samples - self.position

    def assign(self, requested: int, dropped: int = 0) -> Assignment:
        """The next range of the epoch's order, with about `requested` samples. Changes nothing.

        A step does not extend beyond the end of its epoch. It may have one sample less or more than requested, if the
        last step of the epoch would otherwise have a single sample (see `cut_step`). The `dropped` samples that follow
        are dropped; the end of the epoch makes both smaller in proportion, but every step has two samples if it can.

        >>> Ledger(samples=10, position=8).assign(4)
        Assignment(epoch=0, start=8, stop=10)
        >>> Ledger(samples=10, position=5).assign(4)        # 4 samples would leave a single one
        Assignment(epoch=0, start=5, stop=8)
        >>> step = Ledger(samples=10, position=4).assign(6, dropped=2)
        >>> step.batch, step.dropped                        # six samples are left: three of four are trained on
        (4, 2)
        """
        if requested < 1:
            raise LedgerError(f"a step of {requested} samples was requested; expected at least one")
        if dropped < 0:
            raise LedgerError(f"a step cannot drop {dropped} samples; expected none or more")
        covered = cut_step(requested + dropped, self.remaining)
        trained = max(covered * requested // (requested + dropped), min(covered, requested, 2))
        return Assignment(self.epoch, self.position, self.position + trained, covered - trained)

    def commit(self, assignment: Assignment) -> Ledger:
        """The ledger after the step.

        Raises LedgerError unless the assignment begins exactly at the position of this ledger, which excludes gaps,
        steps that are committed twice, and assignments that were made before the run was resumed.

        >>> step = Ledger(samples=10).assign(4)
        >>> after = Ledger(samples=10).commit(step)
        >>> after.position, after.total
        (4, 4)
        >>> after.commit(step)
        Traceback (most recent call last):
        ...
        ebbflow.errors.LedgerError: samples 0 to 4 of epoch 0 cannot be committed at position 4 of epoch 0: a step \
counts once, in order
        """
        here, end = (self.epoch, self.position), assignment.stop + assignment.dropped
        if (assignment.epoch, assignment.start) != here or not self.position < assignment.stop <= end <= self.samples:
            raise LedgerError(
                f"samples {assignment.start} to {assignment.stop} of epoch {assignment.epoch} cannot be committed at "
                f"position {self.position} of epoch {self.epoch}: a step counts once, in order"
            )
        if end == self.samples:
            return Ledger(samples=self.samples, epoch=self.epoch + 1)
        dropped = self.dropped + assignment.dropped
        return Ledger(samples=self.samples, epoch=self.epoch, position=end, dropped=dropped)

    def state(self) -> dict[str, int]:
        """The ledger as a dictionary of integers, for a checkpoint; `dropped` is in it if it is not 0."""
        state = {"samples": self.samples, "epoch": self.epoch, "position": self.position}
        return {**state, "dropped": self.dropped} if self.dropped else state

    @classmethod
    def restore(cls, state: Mapping[str, object], *, samples: int | None = None) -> Ledger:
        """The ledger that `state` returned; a damaged state is a CheckpointError.

        So is a state of a data set with another number of samples than `samples`, if that is given, since its positions
        have no meaning in another order.
        """
        values = {}
        for key in ("samples", "epoch", "position", "dropped"):
            value = state.get(key, 0 if key == "dropped" else None)
            if not isinstance(value, int) or isinstance(value, bool):
                raise CheckpointError(f"the saved position has {key} {value!r}; expected a whole number")
            values[key] = value
        if samples is not None and values["samples"] != samples:
            raise CheckpointError(
                f"the saved position belongs to epochs of {values['samples']} samples, but the data has {samples}; "
                f"give the data that the run began with, or choose another folder"
            )
        try:
            return cls(**values)
        except (DataError, LedgerError) as error:
            raise CheckpointError(f"the saved position is damaged: {error}") from None


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The samples of one backward pass of one worker: positions start to stop - 1 in the order of the epoch."""

    worker: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Samples in the micro-batch."""
        return self.stop - self.start


def largest_micro_batch(*, workers: int, samples: int, limit: int | None = None) -> int:
    """The largest micro-batch of a step: a worker batch, but no more than `limit`.

    >>> largest_micro_batch(workers=3, samples=100), largest_micro_batch(workers=3, samples=100, limit=16)
    (34, 16)
    """
    worker_batch = -(-samples // workers)
    return worker_batch if limit is None else min(worker_batch, limit)


def micro_batch_sizes(batch: int, *, largest: int) -> tuple[int, ...]:
    """Sizes of the micro-batches of a step: ceil(batch / largest) of them, as even as possible, larger ones first.

    Unless `largest` is 1, no micro-batch has a single sample, on which batch norm cannot train; if there is no other
    way, they are one sample larger than `largest`.

    >>> micro_batch_sizes(64, largest=32), micro_batch_sizes(33, largest=32), micro_batch_sizes(5, largest=2)
    ((32, 32), (17, 16), (3, 2))
    """
    if batch < 1 or largest < 1:
        raise LedgerError(f"{batch} samples cannot be cut into micro-batches of {largest}; expected at least 1 of each")
    count = -(-batch // largest)
    if largest > 1 and batch // count < 2:
        count = max(1, batch // 2)
    size, larger = divmod(batch, count)
    return (size + 1,) * larger + (size,) * (count - larger)


def split_step(assignment: Assignment, *, workers: int, largest: int) -> tuple[MicroBatch, ...]:
    """Consecutive micro-batches that cover the assignment; number i is computed by worker i mod `workers`.

    A worker has several of them if its worker batch exceeds `largest`, and may have none at the end of an epoch, if
    there are fewer micro-batches than workers.

    >>> [(m.worker, m.size) for m in split_step(Assignment(0, 100, 165), workers=2, largest=32)]
    [(0, 22), (1, 22), (0, 21)]
    """
    if workers < 1:
        raise LedgerError(f"a step cannot be shared by {workers} workers; expected at least one")
    result, start = [], assignment.start
    for i, size in enumerate(micro_batch_sizes(assignment.batch, largest=largest)):
        result.append(MicroBatch(i % workers, start, start + size))
        start += size
    return tuple(result)


def micro_batches_of(assignment: Assignment, size: StepSize, *, limit: int | None = None) -> tuple[MicroBatch, ...]:
    """The micro-batches of a step of the planned `size`, of which the assignment may have less at the end of an epoch.

    `limit` is the largest number of samples in a micro-batch, if it is less than a worker batch.
    """
    largest = largest_micro_batch(workers=size.workers, samples=size.samples, limit=limit)
    return split_step(assignment, workers=size.workers, largest=largest)
