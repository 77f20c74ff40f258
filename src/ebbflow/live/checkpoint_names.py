"""Which checkpoints a job has, by the names of their folders. Needs no torch, so that the launcher can ask.

The name of a checkpoint is `step-<committed steps>-<lineage>-<random>`: replicas that save the same state at the same
time, because one of them seemed to be gone, do not write into one folder.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Self

from ebbflow.core.storage import COMPLETE, Storage

__all__ = ["CheckpointName", "list_checkpoints", "outdated_checkpoints"]

_NAME = re.compile(r"step-(\d{9})-([0-9a-f]{12})-([0-9a-f]{8})")


@dataclass(frozen=True, order=True, slots=True)
class CheckpointName:
    """The name of a checkpoint's folder; of two, the greater one is further."""

    step: int
    """Number of committed steps."""
    lineage: int
    writer: str = ""

    @classmethod
    def new(cls, step: int, lineage: int) -> Self:
        """A name that no other checkpoint has."""
        return cls(step, lineage, secrets.token_hex(4))

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The name that a text is; None if it is not one.

        >>> CheckpointName.parse("step-000000100-00000000002a-00c0ffee")
        CheckpointName(step=100, lineage=42, writer='00c0ffee')
        """
        found = _NAME.fullmatch(text)
        return cls(int(found[1]), int(found[2], 16), found[3]) if found else None

    def __str__(self) -> str:
        return f"step-{self.step:09d}-{self.lineage:012x}-{self.writer}"


def list_checkpoints(storage: Storage) -> tuple[list[CheckpointName], list[CheckpointName]]:
    """The complete checkpoints in a folder, furthest first, and those that were not written to their end."""
    names = sorted((name for text in storage.names() if (name := CheckpointName.parse(text))), reverse=True)
    complete = [name for name in names if storage.exists(str(name), COMPLETE)]
    return complete, [name for name in names if name not in complete]


def outdated_checkpoints(
    saved: CheckpointName, complete: list[CheckpointName], incomplete: list[CheckpointName], *, keep: int
) -> list[CheckpointName]:
    """What is to be removed after a checkpoint was saved: of those up to this one, all but the furthest `keep`.

    Those that claim to be further are left alone, and do not count: they are damaged, or of a fleet that this one does
    not continue. What was not written to its end, by a replica that was killed, goes when a later one is complete.

    >>> one, two, three, four = (CheckpointName(step, 0) for step in (1, 2, 3, 4))
    >>> [name.step for name in outdated_checkpoints(three, [four, three, two], [one], keep=1)]
    [2, 1]
    """
    reached = [name for name in complete if name <= saved]
    return reached[keep:] + [name for name in incomplete if name.step < saved.step]
