"""The record of a fit: the same rows as every run, so that `ebbflow report` and `read_record` read them.

Each fit writes a folder of its own below the one that was asked for, so that the fits of a grid search, also in several
processes, do not meet: FOLDER/arms/fit-XXXXXXXX/record.jsonl. `ebbflow report FOLDER` compares them.
"""

from __future__ import annotations

import datetime
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import skorch
import torch

from ebbflow._version import __version__
from ebbflow.errors import OutputError
from ebbflow.record import End, Event, Header, RecordWriter, Row, ValidationRow
from ebbflow.run.flow import Flow

__all__ = ["FitRecord"]


class FitRecord:
    """Writes the rows of one fit, or nothing where no record is wanted."""

    def __init__(self, folder: str | Path | None) -> None:
        self._writer: RecordWriter | None = None
        if folder is None:
            return
        try:
            arms = Path(folder) / "arms"
            arms.mkdir(parents=True, exist_ok=True)
            own = Path(tempfile.mkdtemp(prefix="fit-", dir=arms))
        except OSError as error:
            raise OutputError(f"record={str(folder)!r} cannot be written: {error.strerror}; name a folder") from error
        own.chmod(0o755)  # a temporary folder is for its owner alone, a record is not
        self._writer = RecordWriter(own / "record.jsonl")

    @property
    def path(self) -> Path | None:
        """The file, if there is one."""
        return None if self._writer is None else self._writer.path

    def write(self, row: Row) -> None:
        """Append a row."""
        if self._writer is not None:
            self._writer.write(row)

    def begin(self, config: Mapping[str, Any], plan: Mapping[str, Any], device: str) -> None:
        """The first row: what was asked for and what with."""
        versions = {
            "python": platform.python_version(),
            "ebbflow": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "skorch": skorch.__version__,
        }
        created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.write(Header(config=config, plan=plan, versions=versions, created=created, device=device))

    def event(self, flow: Flow, what: str, text: str) -> None:
        """Something worth telling."""
        self.write(Event(step=flow.step, what=what, text=text))

    def epoch(self, flow: Flow, metrics: Mapping[str, float]) -> None:
        """What an epoch came to: the losses and scores of the history."""
        ledger = flow.ledger
        self.write(
            ValidationRow(
                step=flow.step,
                epoch=ledger.total / ledger.samples,
                samples=ledger.total,
                time_s=0.0,
                wall_s=round(flow.wall_s, 6),
                metrics=metrics,
            )
        )

    def end(self, flow: Flow, status: Any, text: str = "") -> None:
        """The last row."""
        wall_s = round(flow.wall_s, 6)
        self.write(End(status=status, steps=flow.step, samples=flow.ledger.total, wall_s=wall_s, text=text))

    def close(self) -> None:
        """Bring it all to the disk."""
        if self._writer is not None:
            self._writer.close()
