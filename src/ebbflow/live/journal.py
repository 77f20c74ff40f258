"""What a replica writes: its record, which outlives it, and its status, which is about now."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ebbflow.errors import OutputError
from ebbflow.record import Event, Header, RecordWriter, Row, StepRow

__all__ = ["Journal", "Status"]

_LOG = logging.getLogger(__name__)
_EVERY_S = 0.5


def _whole_lines(path: Path) -> int | None:
    """Bytes up to the end of the last whole line; None if there is no record yet.

    A replica that was killed may leave half a line, behind which nothing could be read.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    return data.rfind(b"\n") + 1 or None


class Journal:
    """The record of a replica over all its starts: rows are handed to the system one by one, so kill -9 loses none.

    A replica that takes its peers' state leaves out what they trained on without it: the records of all replicas
    together are the story of the fleet (`account.py`).
    """

    def __init__(self, path: Path, header: Callable[[], Header]) -> None:
        """`header`: made only for a record that does not exist yet."""
        size = _whole_lines(path)
        self._lock = threading.Lock()  # checkpoints are written, and fail, in a thread of their own
        self._full = False
        self._record = RecordWriter(path, resume_at=size)
        if size is None:
            self.write(header())

    def write(self, row: Row) -> None:
        """Append a row. While the disk is full rows wait in memory, and training goes on."""
        with self._lock:
            try:
                self._record.write(row)
                self._record.push()
            except OutputError as error:
                if not self._full:
                    _LOG.warning("%s; until then the newest rows are in memory only", error)
                self._full = True
            else:
                self._full = False

    def event(self, step: int, what: str, text: str) -> None:
        """Append an event, and log it."""
        _LOG.info("step %d: %s: %s", step, what, text)
        self.write(Event(step=step, what=what, text=text))

    def close(self) -> None:
        """Bring everything to the disk."""
        with self._lock:
            try:
                self._record.close()
            except OutputError as error:
                _LOG.warning("%s; the newest rows are lost", error)


class Status:
    """`status.json`: written whole, at most twice a second unless the state changes."""

    def __init__(self, path: Path, publish: Callable[[str], None], **always: Any) -> None:
        self._path = path
        self._publish = publish
        self._always = {"pid": os.getpid(), **always}
        self._values: dict[str, Any] = {"state": "starting"}
        self._written = 0.0
        self._rate = _Rate()

    def tell(self, state: str | None = None, **values: Any) -> None:
        """What is new."""
        changed = state is not None and state != self._values["state"]
        self._values |= values | ({"state": state} if state is not None else {})
        if changed or time.monotonic() - self._written >= _EVERY_S:
            self._write()

    def step(self, row: StepRow, *, epoch: int, position: int, members: int) -> None:
        """A step was committed."""
        self.tell(
            "training",
            step=row.step + 1,
            epoch=epoch,
            position=position,
            members=members,
            batch=row.batch,
            lr=row.lr,
            multiplier=row.multiplier,
            loss=row.loss,
            samples_per_s=self._rate.after(row.batch),
        )

    def _write(self) -> None:
        self._written = time.monotonic()
        text = json.dumps({**self._always, **self._values, "time": time.time()})
        temporary = self._path.with_suffix(".tmp")
        with contextlib.suppress(OSError):  # a full disk: the status is old for a while
            temporary.write_text(text)
            temporary.replace(self._path)
        self._publish(text)


class _Rate:
    """Samples a second over about the last two seconds."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []
        self._total = 0

    def after(self, batch: int) -> float | None:
        """With one more step, of so many samples."""
        now = time.monotonic()
        self._total += batch
        self._seen.append((now, self._total))
        while len(self._seen) > 2 and self._seen[1][0] < now - 2.0:
            del self._seen[0]
        first, before = self._seen[0]
        return round((self._total - before) / (now - first), 3) if now > first else None
