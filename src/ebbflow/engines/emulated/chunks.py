"""How the workers of a step are cut into chunks, each computed in one forward and backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

__all__ = ["Chunk", "cut"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Groups of equal size that are computed together."""

    groups: int
    size: int
    """Samples of each group."""

    @property
    def samples(self) -> int:
        """Samples of the chunk."""
        return self.groups * self.size


def cut(sizes: Sequence[int], *, samples: int, at_least: int = 1) -> list[Chunk]:
    """Cut a step's groups, in their order, into chunks of about `samples` samples at most.

    A chunk holds whole groups of one size, one at least. The chunks of a step are as even as can be, so that they need
    few shapes. There are `at_least` of them where the step has as many groups.

    >>> cut([32] * 70, samples=1024)
    [Chunk(groups=24, size=32), Chunk(groups=23, size=32), Chunk(groups=23, size=32)]
    >>> cut([5, 5, 4], samples=1024)            # the tail of an epoch
    [Chunk(groups=2, size=5), Chunk(groups=1, size=4)]
    >>> cut([8, 8, 8], samples=1024, at_least=2)
    [Chunk(groups=2, size=8), Chunk(groups=1, size=8)]
    """
    runs = [(size, len(list(same))) for size, same in groupby(sizes)]
    parts = [-(-count // max(1, samples // size)) for size, count in runs]
    while sum(parts) < min(at_least, len(sizes)):
        widest = max(range(len(runs)), key=lambda i: runs[i][1] / parts[i])
        parts[widest] += 1
    return [Chunk(groups, size) for (size, count), k in zip(runs, parts, strict=True) for groups in _even(count, k)]


def _even(count: int, parts: int) -> list[int]:
    each, more = divmod(count, parts)
    return [each + 1] * more + [each] * (parts - more)
