"""What happened: one row per step, one per validation, append-only.

A record is a file of JSON lines. The first line is the header, which makes the run repeatable (configuration, seed,
versions, commit); every further line is a step, a validation, an event or the end. Engines and the simulator write the
same rows, and reports read nothing but rows, so a report can be made anew at any time from the files alone.

    {"kind": "header", "version": 2, "config": {...}, "versions": {...}, ...}
    {"kind": "step", "step": 0, "time_s": 0.0, "epoch": 0, "samples": 256, "workers": 8, "batch": 256, ...}
    {"kind": "layers", "step": 0, "samples": 256, "batch": 256, "noise": [...], "signal": [...], "multiplier": [...]}
    {"kind": "validation", "step": 5, "epoch": 1.0, "samples": 1437, "metrics": {"accuracy": 0.91, "loss": 0.3}}
    {"kind": "event", "step": 7, "what": "resumed", "text": "..."}
    {"kind": "end", "status": "finished", "steps": 120, "samples": 43110, "wall_s": 12.5}

A crash can damage at most the last line: the reader reports it and uses the rest. Version 2 added the rows of layers,
which only runs of layer-wise rules have; records of version 1 are read as before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt

from ebbflow.core.trackers import Tracker, tracked_numbers
from ebbflow.errors import OutputError, RecordError

__all__ = [
    "End", "Event", "Header", "LayersRow", "NoRecord", "RecordWriter", "Row", "RowTracker", "Run", "StepRow",
    "ValidationRow", "has_header", "layers_due", "read_record",
]  # fmt: skip

VERSION = 2
LAYER_ROWS = 200
"""Rows of layers in a whole run: enough for a curve, and a record of hundreds of layers stays small."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What makes the run repeatable."""

    kind: ClassVar[str] = "header"
    version: int = VERSION
    config: Mapping[str, Any] = field(default_factory=dict)
    """Everything that was asked for: workload, trace, rule, seed, epochs, policy, step time, ..."""
    trace: Mapping[str, Any] = field(default_factory=dict)
    """The availability trace itself: {"name", "times", "workers", "end"}; empty for a plan without one."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of Python, Ebbflow, torch, numpy."""
    command: str = ""
    git_commit: str = ""
    created: str = ""
    device: str = "cpu"

    @property
    def left_out(self) -> str:
        """What the run did not use of its data, or changed, in one line; empty if that is nothing.

        >>> Header(config={"task": {"left_out": {"train": {"crowd boxes": 3}, "val": {"bad boxes": 1}}}}).left_out
        'train: 3 crowd boxes; val: 1 bad boxes'
        """
        task = self.config.get("task")
        found = task.get("left_out") if isinstance(task, Mapping) else None
        return "; ".join(
            f"{name}: {', '.join(f'{count} {kind}' for kind, count in value.items())}"
            if isinstance(value, Mapping)
            else f"{value} {name}"
            for name, value in (found.items() if isinstance(found, Mapping) else ())
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRow:
    """One committed step."""

    kind: ClassVar[str] = "step"
    step: int
    """Number of the step, from 0, over all epochs."""
    time_s: float
    """When the step started, on the clock of the trace."""
    duration_s: float | None = None
    """How long the step took on that clock: as planned, or measured from its start until it was applied. The next one
    may start later: after a validation, a lost step, a time without workers. None in records of older versions."""
    wall_s: float
    """When the step was committed, in seconds of computing since the run began (all resumed parts added up)."""
    epoch: int
    samples: int
    """Samples committed since the start of the run, this step included, and those that were dropped."""
    workers: int
    batch: int
    micro_batches: int
    """Gradient micro-batches the step was made of."""
    lr_base: float
    """The rate of the schedule, at the reference batch."""
    lr: float
    """The rate that the optimizer used, of the first parameter group: the mean over the layers if they differ, and 0 if
    the step was skipped."""
    multiplier: float
    """What the rule made of the batch: the factor of the whole step relative to one at `lr_base`, inside and outside
    the momentum together; the mean over the layers if they differ."""
    loss: float | None
    """Mean over the step's samples; None if it was not a finite number."""
    stats: Mapping[str, float] = field(default_factory=dict)
    """What else the rule or the engine has to say: gain, noise, signal, ...; with the policy `drop` also `dropped`, the
    samples that the step dropped, and `dropped_in_epoch`, those of its epoch up to this step."""

    def tracked(self, ref_batch: int) -> dict[str, float]:
        """What trackers and the logs of frameworks show of the step."""
        return tracked_numbers(
            workers=self.workers,
            batch=self.batch,
            ref_batch=ref_batch,
            multiplier=self.multiplier,
            stats=self.stats,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LayersRow:
    """Noise, signal and multiplier of each layer at one committed step.

    Written behind the row of the step when `layers_due` says so, if the rule has layers at all. The names of the layers
    are `layers` in the header's config.
    """

    kind: ClassVar[str] = "layers"
    step: int
    samples: int
    """Committed in all, this step's included."""
    batch: int
    noise: Sequence[float | None]
    signal: Sequence[float | None]
    multiplier: Sequence[float | None]
    warm_up: Sequence[float | None] | None = None
    """How far the warm-up of each layer is, from 0 to 1; None if the layers have none of their own."""

    @classmethod
    def of(
        cls,
        row: StepRow,
        *,
        noise: Iterable[float],
        signal: Iterable[float],
        multiplier: Iterable[float],
        warm_up: Iterable[float] | None = None,
    ) -> Self:
        """The row that belongs to a step, with six digits of each number."""

        def short(values: Iterable[float]) -> list[float]:
            return [float(f"{value:.6g}") for value in values]

        return cls(
            step=row.step,
            samples=row.samples,
            batch=row.batch,
            noise=short(noise),
            signal=short(signal),
            multiplier=short(multiplier),
            warm_up=None
            if warm_up is None
            else short(value if value >= 1 else min(value, 0.999999) for value in warm_up),
        )


def layers_due(row: StepRow, *, total_samples: int, rows: int = LAYER_ROWS) -> bool:
    """Whether a step is one of about `rows`, spread evenly over the samples of a run, whose layers are recorded.

    A function of the position alone, so that a resumed run writes what an uninterrupted one writes. The first step is
    always among them; a run that goes on beyond its samples keeps the distance.

    >>> row = StepRow(step=0, time_s=0, wall_s=0, epoch=0, samples=32, workers=1, batch=32, micro_batches=1,
    ...               lr_base=0.1, lr=0.1, multiplier=1.0, loss=1.0)
    >>> layers_due(row, total_samples=100_000)
    True
    >>> later = dataclasses.replace(row, step=1, samples=64)
    >>> layers_due(later, total_samples=100_000), layers_due(later, total_samples=6_400)
    (False, True)
    """
    if total_samples <= 0:
        return False
    before = row.samples - row.batch - row.stats.get("dropped", 0)
    return before == 0 or before * rows // total_samples < row.samples * rows // total_samples


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationRow:
    """One validation, after a whole number of steps."""

    kind: ClassVar[str] = "validation"
    step: int
    """Steps committed before this validation."""
    epoch: float
    """Epochs committed before this validation."""
    samples: int
    time_s: float
    wall_s: float
    metrics: Mapping[str, float | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something worth telling that is neither a step nor a validation: a resume, a lost step, a divergence."""

    kind: ClassVar[str] = "event"
    step: int
    what: str
    text: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """The last row of a run that came to an end, good or bad. A record without it was interrupted."""

    kind: ClassVar[str] = "end"
    status: Literal["finished", "diverged", "failed"]
    steps: int
    samples: int
    wall_s: float
    text: str = ""
    """Why, if it did not finish."""
    weights_sha256: str = ""
    """Of the final weights and buffers: two runs with the same digest ended with the same model, bit for bit."""


Row = Header | StepRow | LayersRow | ValidationRow | Event | End
_KINDS: dict[str, type[Row]] = {row.kind: row for row in (Header, StepRow, LayersRow, ValidationRow, Event, End)}
_FIELDS = {kind: tuple(f.name for f in dataclasses.fields(row)) for kind, row in _KINDS.items()}
_KEYS = {"micro_batches": "pieces"}
"""Fields whose key in the file is another one: the files are older than the names."""


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def encode(row: Row) -> str:
    """One line, without its line end."""
    body = {"kind": row.kind, **{_KEYS.get(name, name): _finite(getattr(row, name)) for name in _FIELDS[row.kind]}}
    return json.dumps(body, separators=(",", ":"), allow_nan=False)


def decode(line: str) -> Row:
    """The row of a line; fields that a newer version added are ignored."""
    body = json.loads(line)
    if not isinstance(body, dict) or body.get("kind") not in _KINDS:
        raise ValueError(f"not a row: {line[:60]!r}")
    kind = _KINDS[body["kind"]]
    keys = ((name, _KEYS.get(name, name)) for name in _FIELDS[kind.kind])
    return kind(**{name: body[key] for name, key in keys if key in body})


def has_header(path: Path) -> bool:
    """Whether the first line of a record is complete; not if the run has only begun, or was killed before it was
    written."""
    with path.open("rb") as file:
        return file.readline().endswith(b"\n")


class RowTracker:
    """Sends the rows of a record to a tracker, too, which is opened by the first of them."""

    def __init__(self, make: Callable[[], Tracker], *, ref_batch: int, when: Callable[[], bool] = lambda: True) -> None:
        """`when`: asked for every row; False if another process sends it."""
        self._make = make
        self._ref_batch = ref_batch
        self._when = when
        self._tracker: Tracker | None = None

    def write(self, row: Row) -> None:
        """Send one row: a step, a validation, an event or the end."""
        if not self._when():
            return
        if self._tracker is None:
            self._tracker = self._make()
        tracker = self._tracker
        match row:
            case StepRow():
                own = {"lr": row.lr, "lr_base": row.lr_base, "samples": float(row.samples), "epoch": float(row.epoch)}
                loss = {"loss": row.loss} if row.loss is not None else {}
                tracker.scalars(row.step, loss | own | row.tracked(self._ref_batch))
            case ValidationRow():
                metrics = {f"validation/{name}": value for name, value in row.metrics.items() if value is not None}
                tracker.scalars(row.step, metrics)
            case Event():
                tracker.event(row.step, row.what, row.text)
            case End():
                tracker.event(row.steps, row.status, row.text)

    def close(self) -> None:
        """Let the tracker write what is left."""
        if self._tracker is not None:
            self._tracker.close()
            self._tracker = None


class RecordWriter:
    """Appends rows to a record file, and sends them to a tracker if there is one.

    `flush` makes what was written so far survive a crash of the process and of the machine and returns the size of
    the file in bytes; `resume_at` cuts the file back to such a size, so that rows written after a checkpoint are not
    repeated when the run continues from it.
    """

    tracker: RowTracker | None = None

    def __init__(self, path: Path, *, resume_at: int | None = None, tracker: RowTracker | None = None) -> None:
        self.path = path
        self.tracker = tracker
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if resume_at is None:
                self._file = path.open("w", encoding="utf-8")
            else:
                if path.stat().st_size < resume_at:
                    raise RecordError(
                        f"{path} has {path.stat().st_size} bytes, the checkpoint was made at {resume_at}: rows are "
                        f"missing; delete the folder to start anew"
                    )
                os.truncate(path, resume_at)
                self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise OutputError(f"{path} cannot be written: {error.strerror}; choose another output folder") from error

    def write(self, row: Row) -> None:
        """Append one row (buffered)."""
        if self.tracker is not None:
            self.tracker.write(row)
        try:
            self._file.write(encode(row) + "\n")
        except OSError as error:
            raise self._unwritable(error) from error

    def flush(self) -> int:
        """Bring all rows to the disk; the size of the file in bytes. After `close` they are there already."""
        try:
            if self._file.closed:
                return self.path.stat().st_size
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._unwritable(error) from error
        return os.fstat(self._file.fileno()).st_size

    def _unwritable(self, error: OSError) -> OutputError:
        return OutputError(f"{self.path} cannot be written: {error.strerror}; free some space and resume")

    def close(self) -> None:
        """Flush and close."""
        if not self._file.closed:
            try:
                self.flush()
            finally:
                with contextlib.suppress(OSError):  # flush has said what there is to say
                    self._file.close()
                if self.tracker is not None:
                    self.tracker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class NoRecord(RecordWriter):
    """Takes rows and keeps none: for a process of a run whose record another one writes."""

    def __init__(self) -> None:
        """Opens nothing."""

    def write(self, row: Row) -> None:
        """Nothing happens."""

    def flush(self) -> int:
        """Nothing happens."""
        return 0

    def close(self) -> None:
        """Nothing happens."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A record that was read: the rows by kind, each in the order of writing."""

    path: Path
    header: Header
    steps: list[StepRow]
    validations: list[ValidationRow]
    events: list[Event]
    end: End | None
    layers: list[LayersRow] = field(default_factory=list)
    damage: str = ""
    """What was wrong with the last line, or empty."""
    given_back: list[StepRow] = field(default_factory=list)
    """Steps of a live fleet that its rule gave back, which are not among `steps`; the record of one process has them
    there."""

    @property
    def status(self) -> str:
        """finished, diverged, failed, or interrupted if the record has no end."""
        return self.end.status if self.end else "interrupted"

    @property
    def dropped(self) -> int:
        """Samples that the policy `drop` dropped: they are in the `samples` of rows, and were not trained on."""
        return int(self.dropped_until([math.inf])[0])

    def dropped_until(self, samples: Iterable[float]) -> npt.NDArray[np.float64]:
        """How many of the first so many samples of the run were dropped. What was given back does not count."""
        ends, before = self._dropped_before
        return before[np.searchsorted(ends, list(samples), side="right")]

    @cached_property
    def _dropped_before(self) -> tuple[list[int], npt.NDArray[np.float64]]:
        """Where the steps end that were not given back, and the samples dropped before the first of them and so on."""
        ends: list[int] = []
        dropped: list[int] = []
        begin = math.inf
        for row in reversed(self.steps):
            if row.samples <= begin:  # otherwise a later step went back to before this one
                ends.append(row.samples)
                dropped.append(int(row.stats.get("dropped", 0)))
                begin = row.samples - row.batch - dropped[-1]
        return ends[::-1], np.append(0.0, np.cumsum(dropped[::-1]))

    def column(self, name: str) -> npt.NDArray[np.float64]:
        """One field (or one of the `stats`) of all steps as an array; NaN where a step does not have it."""
        own = name in _FIELDS["step"]
        values = [getattr(row, name) if own else row.stats.get(name) for row in self.steps]
        return np.array([math.nan if value is None else value for value in values], dtype=np.float64)

    def metric(self, name: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """(epochs, values) of one metric over the validations; NaN where it was not a finite number."""
        rows = [row for row in self.validations if name in row.metrics]
        values = [row.metrics[name] for row in rows]
        return (
            np.array([row.epoch for row in rows], dtype=np.float64),
            np.array([math.nan if value is None else value for value in values], dtype=np.float64),
        )


def read_record(path: Path | str) -> Run:
    """Read a record. A damaged last line, as a crash leaves it, is reported in `damage`; any other is an error."""
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}; expected a record written by ebbflow") from error
    lines = raw.split(b"\n")
    complete, rest = lines[:-1], lines[-1]
    rows: list[Row] = []
    damage = ""
    for number, line in enumerate(complete if not rest else [*complete, rest], start=1):
        try:
            row = decode(line.decode("utf-8"))
        except (ValueError, TypeError) as error:
            if number < len(complete) + bool(rest) or number == 1:
                raise RecordError(
                    f"{path}, line {number}: not a row of a record ({error}); the file is damaged"
                ) from None
            damage = f"{path}, line {number}: the last line is incomplete ({len(line)} bytes) and was left out"
        else:
            if isinstance(row, Header) and row.version > VERSION:  # before the other lines: new kinds are no damage
                raise RecordError(
                    f"{path} has record version {row.version}, this ebbflow reads up to {VERSION}; upgrade ebbflow"
                )
            rows.append(row)
    return _assemble(path, rows, damage)


def _assemble(path: Path, rows: Iterable[Row], damage: str) -> Run:
    by_kind: dict[str, list[Any]] = {kind: [] for kind in _KINDS}
    for row in rows:
        by_kind[row.kind].append(row)
    headers: list[Header] = by_kind["header"]
    if not headers:
        raise RecordError(f"{path} has no header; expected a record written by ebbflow")
    return Run(
        path=path,
        header=headers[0],
        steps=by_kind["step"],
        validations=by_kind["validation"],
        events=by_kind["event"],
        layers=by_kind["layers"],
        end=by_kind["end"][-1] if by_kind["end"] else None,
        damage=damage,
    )
