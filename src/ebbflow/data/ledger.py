"""The exactly-once invariant, as a value.

An epoch is an order of samples; a `Ledger` says how far it has been trained on. A step *assigns* the next range of the
order, trains, and *commits* it. Nothing is handed out, so nothing has to come back: a step that fails is simply not
committed, and the next assignment covers the same samples again. This holds for any history of workers, kills and
resumes, because the ledger knows nothing about them.

    ledger = Ledger(samples=10)
    step = ledger.assign(4)           # Assignment(epoch=0, start=0, stop=4)
    ...                               # a worker dies: forget the assignment
    step = ledger.assign(3)           # Assignment(epoch=0, start=0, stop=3)
    ledger = ledger.commit(step)      # now these three count, once
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ebbflow.errors import CheckpointError, DataError, LedgerError
from ebbflow.plan.plan import cut_step

__all__ = ["Assignment", "Ledger", "Share", "pieces", "shares"]


@dataclass(frozen=True, slots=True)
class Assignment:
    """The samples of one step: positions start to stop - 1 of an epoch's order."""

    epoch: int
    start: int
    stop: int

    @property
    def batch(self) -> int:
        """Samples in the step."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """How far training has come: immutable, a few integers.

    The end of an epoch and the start of the next are the same ledger, (epoch + 1, 0), so equal positions are equal
    values.
    """

    samples: int
    """Samples in an epoch."""
    epoch: int = 0
    position: int = 0
    """Samples of this epoch that are committed; always below `samples`."""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise DataError(f"an epoch has {self.samples} samples; expected at least one: is the data set empty?")
        if self.epoch < 0 or not 0 <= self.position < self.samples:
            raise LedgerError(
                f"epoch {self.epoch}, position {self.position} is not a place in epochs of {self.samples} samples"
            )

    @property
    def total(self) -> int:
        """Samples committed since the start of training."""
        return self.epoch * self.samples + self.position

    @property
    def remaining(self) -> int:
        """Samples of this epoch that are not yet committed; at least one."""
        return self.samples - self.position

    def assign(self, wanted: int) -> Assignment:
        """The next range of the epoch's order, about `wanted` samples long; asking changes nothing.

        A step ends where its epoch ends. It may be one sample shorter or longer than wanted, where the epoch's last
        step would otherwise hold one lone sample (see `cut_step`).

        >>> Ledger(samples=10, position=8).assign(4)
        Assignment(epoch=0, start=8, stop=10)
        >>> Ledger(samples=10, position=5).assign(4)        # not 4, which would leave one
        Assignment(epoch=0, start=5, stop=8)
        """
        if wanted < 1:
            raise LedgerError(f"a step of {wanted} samples was asked for; expected at least one")
        return Assignment(self.epoch, self.position, self.position + cut_step(wanted, self.remaining))

    def commit(self, assignment: Assignment) -> Ledger:
        """The ledger after the step.

        Raises LedgerError unless the assignment begins exactly at this ledger's position, so that a step committed
        twice, a gap, and an assignment from before a resume are impossible.

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
        here = (self.epoch, self.position)
        if (assignment.epoch, assignment.start) != here or not self.position < assignment.stop <= self.samples:
            raise LedgerError(
                f"samples {assignment.start} to {assignment.stop} of epoch {assignment.epoch} cannot be committed at "
                f"position {self.position} of epoch {self.epoch}: a step counts once, in order"
            )
        if assignment.stop == self.samples:
            return Ledger(samples=self.samples, epoch=self.epoch + 1)
        return Ledger(samples=self.samples, epoch=self.epoch, position=assignment.stop)

    def state(self) -> dict[str, int]:
        """The ledger as plain integers, for a checkpoint."""
        return {"samples": self.samples, "epoch": self.epoch, "position": self.position}

    @classmethod
    def restore(cls, state: Mapping[str, object], *, samples: int | None = None) -> Ledger:
        """The ledger that `state` described; a damaged state is a CheckpointError.

        So is one of a data set with another number of samples than `samples`, where that is given: positions in its
        order mean nothing in another.
        """
        values = {}
        for key in ("samples", "epoch", "position"):
            value = state.get(key)
            if not isinstance(value, int) or isinstance(value, bool):
                raise CheckpointError(f"the saved position has {key} {value!r}; expected a whole number")
            values[key] = value
        if samples is not None and values["samples"] != samples:
            raise CheckpointError(
                f"the saved position is one in epochs of {values['samples']} samples, but the data has {samples}; give "
                f"the data that the run began with, or choose another folder"
            )
        try:
            return cls(**values)
        except (DataError, LedgerError) as error:
            raise CheckpointError(f"the saved position is damaged: {error}") from None


@dataclass(frozen=True, slots=True)
class Share:
    """One piece of a step: positions start to stop - 1, computed by one worker in one backward pass."""

    worker: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Samples in the piece."""
        return self.stop - self.start


def pieces(batch: int, *, piece: int) -> tuple[int, ...]:
    """Sizes of the pieces that a step is cut into: ceil(batch / piece) of them, as even as can be, larger ones first.

    Unless pieces of one are asked for, no piece is one lone sample (batch norm cannot train on it); where that leaves
    no other way, pieces are one larger than `piece`.

    >>> pieces(64, piece=32), pieces(33, piece=32), pieces(5, piece=2)
    ((32, 32), (17, 16), (3, 2))
    """
    if batch < 1 or piece < 1:
        raise LedgerError(f"{batch} samples cannot be cut into pieces of {piece}; expected at least one of each")
    count = -(-batch // piece)
    if piece > 1 and batch // count < 2:
        count = max(1, batch // 2)
    size, larger = divmod(batch, count)
    return (size + 1,) * larger + (size,) * (count - larger)


def shares(assignment: Assignment, *, workers: int, piece: int) -> tuple[Share, ...]:
    """Who computes what: contiguous pieces that cover the assignment, piece i for worker i mod workers.

    A worker gets several pieces where its part of the step exceeds `piece`, and none at the tail of an epoch where
    there are fewer pieces than workers.

    >>> [(s.worker, s.size) for s in shares(Assignment(0, 100, 165), workers=2, piece=32)]
    [(0, 22), (1, 22), (0, 21)]
    """
    if workers < 1:
        raise LedgerError(f"a step cannot be shared by {workers} workers; expected at least one")
    result, start = [], assignment.start
    for i, size in enumerate(pieces(assignment.batch, piece=piece)):
        result.append(Share(i % workers, start, start + size))
        start += size
    return tuple(result)
