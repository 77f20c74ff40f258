"""The files of a replica: its record, which outlives it, and its status, which is about now."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ebbflow.live.protocol import ReplicaStatus
from ebbflow.record import Event, Header, RecordWriter, Row, RowTracker, StepRow, encode

__all__ = ["ReplicaRecord", "StatusFile"]

_LOG = logging.getLogger(__name__)
_STATUS_EVERY_S = 0.5
_SPEED_OVER_S = 2.0


class ReplicaRecord:
    """The record of a replica over all its incarnations. Every row is written at once, so that kill -9 loses none.

    The steps that a replica did not compute, because it received the state of a peer, are not in its record: only the
    records of all replicas together are the history of the fleet (`accounting.py`).
    """

    def __init__(self, path: Path, header: Callable[[], Header], tracker: RowTracker | None = None) -> None:
        """`header`: called only if there is no record yet. `tracker`: where rows go, too."""
        size = _size_of_whole_lines(path)
        self._lock = threading.Lock()  # checkpoints are written, and fail, in a thread of their own
        self._waiting = bytearray()  # what is not in the file yet
        self._disk_full = False
        self._tracker = tracker
        RecordWriter(path, resume_at=size).close()  # makes the file, or cuts it back to whole lines
        self._path = path
        self._file = path.open("ab", buffering=0)  # a buffer would forget what a full disk does not take
        if size is None:
            self.write(header())

    def write(self, row: Row) -> None:
        """Append a row. While the disk is full, rows wait in memory and training goes on."""
        with self._lock:
            if self._tracker is not None:
                self._tracker.write(row)
            self._waiting += encode(row).encode() + b"\n"
            try:
                self._write_waiting()
            except OSError as error:
                if not self._disk_full:
                    _LOG.warning(
                        "%s cannot be written: %s; free some space: until then the newest rows are in memory only",
                        self._path, error.strerror,
                    )  # fmt: skip
                self._disk_full = True
            else:
                self._disk_full = False

    def _write_waiting(self) -> None:
        while self._waiting:
            written = self._file.write(self._waiting)
            del self._waiting[:written]  # a disk that fills up takes a part of a row; the rest follows later

    def event(self, step: int, what: str, text: str) -> None:
        """Append an event, and log it."""
        _LOG.info("step %d: %s: %s", step, what, text)
        self.write(Event(step=step, what=what, text=text))

    def flush(self) -> int:
        """Do nothing: every row is written at once."""
        return 0

    def close(self) -> None:
        """Write what is still in memory, and close the file."""
        with self._lock, self._file:
            try:
                self._write_waiting()
            except OSError as error:
                _LOG.warning("%s cannot be written: %s; the newest rows are lost", self._path, error.strerror)
            if self._tracker is not None:
                self._tracker.close()


def _size_of_whole_lines(path: Path) -> int | None:
    """Bytes up to the end of the last whole line; None if there is no record yet.

    A replica that was killed may leave half a line, and rows that are appended to it could not be read.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    return data.rfind(b"\n") + 1 or None


class StatusFile:
    """status.json of a replica: replaced as a whole, at most twice per second unless state or reason change."""

    def __init__(self, path: Path | None, publish: Callable[[str], None], *, incarnation: str) -> None:
        """`path`: None on a rank that writes no files. `publish`: is given each text that is written, for those who
        cannot read the file."""
        self._path = path
        self._publish = publish
        self._status = ReplicaStatus(state="starting", time=0.0, pid=os.getpid(), incarnation=incarnation)
        self._written = 0.0
        self._samples = 0
        self._recent: deque[tuple[float, int]] = deque()  # time and number of samples after the steps of two seconds

    @property
    def state(self) -> str:
        """The state that was reported last."""
        return self._status.state

    def update(self, state: str | None = None, **values: Any) -> None:
        """Set fields of the `ReplicaStatus`, and write it if that is due."""
        before = self._status
        self._status = dataclasses.replace(before, state=state or before.state, **values)
        changed = (before.state, before.reason) != (self._status.state, self._status.reason)
        if changed or time.monotonic() - self._written >= _STATUS_EVERY_S:
            self._write()

    def step(self, row: StepRow, *, epoch: int, position: int, members: int, ref_batch: int) -> None:
        """Report a committed step."""
        self.update(
            "training",
            reason=None,
            step=row.step + 1,
            epoch=epoch,
            position=position,
            members=members,
            batch=row.batch,
            lr=row.lr,
            multiplier=row.multiplier,
            loss=row.loss,
            samples_per_s=self._speed_after(row.batch),
            workers=row.workers,
            ref_batch=ref_batch,
            noise_scale=row.stats.get("noise_scale"),
        )

    def _speed_after(self, batch: int) -> float | None:
        """Samples per second over about the last two seconds."""
        now = time.monotonic()
        self._samples += batch
        self._recent.append((now, self._samples))
        while len(self._recent) > 2 and self._recent[1][0] < now - _SPEED_OVER_S:
            self._recent.popleft()
        first, before = self._recent[0]
        return round((self._samples - before) / (now - first), 3) if now > first else None

    def _write(self) -> None:
        if self._path is None:
            return
        self._written = time.monotonic()
        text = dataclasses.replace(self._status, time=time.time()).to_json()
        temporary = self._path.with_suffix(".tmp")
        with contextlib.suppress(OSError):  # while the disk is full, the status stays old
            temporary.write_text(text)
            temporary.replace(self._path)
        self._publish(text)
