"""Checkpoints of a fleet on a disk: written whole, checked when read, the last few kept.

They are for the day when the whole fleet is lost; a single replica gets its state from its peers. A file begins with
one line of text that says how long the rest is and what its SHA-256 is.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
from collections.abc import Callable
from pathlib import Path

from ebbflow.core.files import write_whole
from ebbflow.errors import CheckpointError, OutputError

__all__ = ["Checkpoints", "read_checkpoint"]

_MAGIC = b"ebbflow-fleet 1"
_NAME = re.compile(r"step-(\d{9})-[0-9a-f]{12}\.ckpt")


def read_checkpoint(path: Path) -> bytes:
    """What was saved in a file; a CheckpointError if it is not exactly that."""
    try:
        head, _, body = path.read_bytes().partition(b"\n")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if head != _head(body):
        raise CheckpointError(f"{path} is damaged: its length or its checksum is not what its first line says")
    return body


def _head(body: bytes | memoryview) -> bytes:
    return b"%s bytes=%d sha256=%s" % (_MAGIC, len(body), hashlib.sha256(body).hexdigest().encode())


class Checkpoints:
    """The checkpoints in a folder; replicas of a job share it where they share a disk."""

    def __init__(self, folder: Path, *, keep: int = 3, on_event: Callable[[str, str], None]) -> None:
        """`keep`: how many are left; `on_event(what, text)` hears what went well and what did not, from any thread."""
        self.folder = folder
        self.keep = keep
        self.on_event = on_event
        self._writing: threading.Thread | None = None

    def names(self) -> list[Path]:
        """The files, newest first."""
        found = [path for path in self.folder.glob("step-*.ckpt") if _NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: path.name, reverse=True)

    def newest(self, *, beyond: int = -1) -> tuple[Path, bytes] | None:
        """The newest that is whole, of those beyond a step; damaged ones are named and passed over."""
        for path in self.names():
            if int(path.name[5:14]) <= beyond:
                return None
            try:
                return path, read_checkpoint(path)
            except CheckpointError as error:
                self.on_event("checkpoint damaged", f"{error}; the one before it is used")
        return None

    def save(self, data: bytes | memoryview, *, step: int, lineage: int) -> None:
        """Write in the background. While an earlier one is still being written, this one is left out."""
        if self._writing is not None and self._writing.is_alive():
            return
        path = self.folder / f"step-{step:09d}-{lineage:012x}.ckpt"
        self._writing = threading.Thread(target=self._write, args=(path, data), name="ebbflow-checkpoint")
        self._writing.start()

    def _write(self, path: Path, data: bytes | memoryview) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, b"\n".join((_head(data), data)))
        except (OutputError, OSError) as error:
            self.on_event("checkpoint failed", f"{error}; training goes on, and the next one is tried")
            return
        for old in self.names()[self.keep :]:
            with contextlib.suppress(OSError):
                old.unlink()

    def wait(self) -> None:
        """Until the one under way is written."""
        if self._writing is not None:
            self._writing.join()
