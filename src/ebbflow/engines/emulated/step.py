"""A step as one process computes it: its samples, and the groups and parts that they are computed in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ebbflow.data.ledger import Assignment, MicroBatch
from ebbflow.plan.batch_plan import StepSize

__all__ = ["Step"]


class Step:
    """The samples of a step that this process computes, in groups of one worker's samples each.

    Its positions count on from `start` without gaps, though other ranks may compute what lies between.
    """

    def __init__(
        self,
        assignment: Assignment,
        indices: npt.NDArray[np.int64],
        parts: Sequence[Sequence[MicroBatch]],
        *,
        number: int,
        size: StepSize,
    ) -> None:
        """`indices`: of all samples of the assignment. `parts`: groups, as many together as are computed at once."""
        self.number = number
        """Counted from 0 at the start of the run."""
        self.size = size
        """What the fleet gave it."""
        self.whole = assignment
        """The samples of all ranks."""
        self.epoch = assignment.epoch
        self.start = assignment.start
        self.batch = sum(part[-1].stop - part[0].start for part in parts)
        self.parts = parts
        self.indices = indices
        self._places: dict[int, int] | None = None
        if self.batch < assignment.batch:
            ranges = [slice(part[0].start - self.start, part[-1].stop - self.start) for part in parts]
            self.indices = np.concatenate([indices[:0], *(indices[r] for r in ranges)])
            self.parts, self._places = _without_gaps(parts, self.start)

    @property
    def groups(self) -> list[MicroBatch]:
        """All groups, in order."""
        return [group for part in self.parts for group in part]

    def samples(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The samples at positions of the step."""
        return self.indices[start - self.start : stop - self.start]

    def place(self, start: int) -> int:
        """The position in the epoch's order of the group that starts at a position of the step."""
        return start if self._places is None else self._places[start]


def _without_gaps(
    parts: Sequence[Sequence[MicroBatch]], position: int
) -> tuple[list[list[MicroBatch]], dict[int, int]]:
    """The groups moved together, from a position on, and where each came from."""
    moved, places = [], {}
    for part in parts:
        here = []
        for group in part:
            places[position] = group.start
            here.append(MicroBatch(group.worker, position, position + group.size))
            position += group.size
        moved.append(here)
    return moved, places
