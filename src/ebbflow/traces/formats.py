"""Trace files: one reader per published format, and one writer.

| name      | what it looks like                                    | where the observation ends               |
|-----------|-------------------------------------------------------|------------------------------------------|
| canonical | CSV `time_s,accelerators`, one row per change         | at its last row                          |
| samples   | CSV `,Time,GPUs`: an index, unix time, count          | one sampling interval after the last row |
| events    | CSV without a header: milliseconds, add/remove, node  | at its last event                        |
| skypilot  | JSON `{"metadata": {"gap_seconds": 300}, "data": []}` | one gap after the last count             |

Each file may be compressed with gzip. `read` recognises the format by the content. A format of your own is a function
that is registered by `register_trace_format`; then every command and function that reads a trace file knows it.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ebbflow.core.files import read_text, write_whole
from ebbflow.core.plugins import raise_naming
from ebbflow.core.spec import nearest
from ebbflow.core.units import Seconds
from ebbflow.errors import InputError, SpecError, TraceError
from ebbflow.traces.availability import Trace

__all__ = ["FORMATS", "TextFile", "TraceFormat", "canonical", "read", "register_trace_format", "write"]

_HEADER = "time_s,accelerators"


def _is_count(value: float) -> bool:
    return 0 <= value < math.inf and value == int(value)


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """The text of one file, with methods to read rows and numbers from it whose errors name the file and the line."""

    path: Path
    text: str
    kind: type[InputError] = TraceError
    """The class of the errors."""

    @property
    def first_line(self) -> str:
        """The first line without spaces and in lower case, by which formats are recognised."""
        return "".join(self.beginning.lower().split())

    @property
    def beginning(self) -> str:
        """The first line that is not blank, unchanged, for error messages; spreadsheets leave rows of commas alone."""
        lines = self.text.strip().splitlines()
        return next((line.lstrip() for line in lines if line.strip(", \t")), lines[0])

    def rows(self, *, columns: str, header: bool) -> Iterator[tuple[int, list[str]]]:
        """(line number, fields) of each row that is not blank; a row must have as many fields as `columns` names.

        A row of nothing but spaces and commas is blank.
        """
        reader = csv.reader(self.text.splitlines())
        try:
            stripped = ([field.strip() for field in fields] for fields in reader)
            rows = ((reader.line_num, fields) for fields in stripped if any(fields))
            if header:
                next(rows, None)
            for line, fields in rows:
                if len(fields) != columns.count(",") + 1:
                    raise self.error(f"found {','.join(fields)!r}; expected {columns}", line=line)
                yield line, fields
        except csv.Error as problem:
            raise self.error(f"is not CSV: {problem}", line=reader.line_num) from None

    def number(self, text: str, what: str, *, line: int) -> float:
        """The text as a finite number."""
        try:
            value = float(text)
        except ValueError:
            raise self.error(f"the {what} is {text!r}; expected a number", line=line) from None
        if not math.isfinite(value):
            raise self.error(f"the {what} is {text}; expected a finite number", line=line)
        return value

    def count(self, text: str, what: str = "count", *, line: int) -> int:
        """The text as a number of workers or samples, which is whole and not negative."""
        if not text:
            raise self.error(f"the {what} is missing", line=line)
        value = self.number(text, what, line=line)
        if not _is_count(value):
            raise self.error(f"the {what} is {text}; expected a whole number that is not negative", line=line)
        return int(value)

    def error(self, message: str, *, line: int | None = None) -> InputError:
        """An error with the file and the line before the message."""
        return self.kind(f"{self.path}:{line}: {message}" if line else f"{self.path}: {message}")


@dataclass(frozen=True, kw_only=True)
class TraceFormat:
    """One format of trace files."""

    name: str
    matches: Callable[[TextFile], bool]
    """Whether a file looks like this format."""
    read: Callable[[TextFile], Trace]
    cite: str = ""


FORMATS: dict[str, TraceFormat] = {}


def register_trace_format(
    name: str, *, matches: Callable[[TextFile], bool], cite: str = ""
) -> Callable[[Callable[[TextFile], Trace]], Callable[[TextFile], Trace]]:
    """Return a decorator that adds a trace format: a function from a `TextFile` to a `Trace`.

    `matches` says whether a file looks like this format; it should look at the beginning of the file only. Formats that
    are registered later are asked first.
    """

    def add(function: Callable[[TextFile], Trace]) -> Callable[[TextFile], Trace]:
        if name in FORMATS:
            taken = FORMATS[name].read
            raise SpecError(
                f"the trace format {name!r} is registered already, by {taken.__module__}.{taken.__qualname__}; "
                f"choose another name"
            )
        FORMATS[name] = TraceFormat(name=name, matches=matches, read=function, cite=cite)
        return function

    return add


def read(path: Path | str, format: str | None = None) -> Trace:
    """The trace in a file. The format is recognised by the content, unless its name is given."""
    path = Path(path)
    if format is not None and format not in FORMATS:
        raise TraceError(f"unknown trace format {format!r}; {nearest(format, list(FORMATS))}")
    file = TextFile(path=path, text=read_text(path, error=TraceError))
    if file.first_line == "step,batchsize":
        raise file.error(
            "is a batch plan (step,batchsize), not an availability trace; "
            "read it with BatchPlan.read, or with ebbflow plan --plan FILE"
        )
    asked = [FORMATS[format]] if format else [known for known in reversed(FORMATS.values()) if _matches(known, file)]
    if not asked:
        raise file.error(
            f"is in no known trace format; it begins with {file.beginning[:40]!r}; expected for example "
            f"the header {_HEADER!r}. Known formats: {', '.join(FORMATS)}",
            line=1,
        )
    trace = _trace_of(asked[0], file)
    name = path.name.removesuffix(".gz")
    return Trace(trace.times, trace.workers, trace.end, trace.final, Path(name).stem)


def _matches(known: TraceFormat, file: TextFile) -> bool:
    try:
        return known.matches(file)
    except Exception as error:
        raise_naming(error, known.matches, f"{file.path}: matches() of the trace format {known.name}")


def _trace_of(known: TraceFormat, file: TextFile) -> Trace:
    """What the reader of a format returns, checked; an exception in one of a plugin is a ConfigError with its line."""
    try:
        trace: object = known.read(file)
    except Exception as error:
        raise_naming(error, known.read, f"{file.path}: the reader of the trace format {known.name}")
    if not isinstance(trace, Trace):
        raise file.error(f"the reader of the trace format {known.name} returned a {type(trace).__name__}; expected a "
                         f"Trace, from Trace.from_points for example")  # fmt: skip
    return trace


def write(trace: Trace, path: Path | str) -> None:
    """Write the canonical CSV, compressed if the name ends in .gz; `read` returns an equal trace.

    The file is written completely or not at all.
    """
    path = Path(path)
    points = [*zip(trace.times.tolist(), trace.workers.tolist(), strict=True), (trace.end, trace.final)]
    lines = [_HEADER, *(f"{int(time) if time.is_integer() else repr(time)},{count}" for time, count in points), ""]
    data = "\n".join(lines).encode()
    write_whole(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


# -- the readers -------------------------------------------------------------------------------------------------------


@register_trace_format("canonical", matches=lambda file: file.first_line == _HEADER)
def canonical(file: TextFile) -> Trace:
    """The trace of a file in the canonical format."""
    points: list[tuple[float, int]] = []
    for line, (time_text, count_text) in file.rows(columns=_HEADER, header=True):
        time = file.number(time_text, "time", line=line)
        if not points and time != 0:
            raise file.error(f"the first time is {time_text}; expected 0, the start of the trace", line=line)
        if points and time <= points[-1][0]:
            raise file.error(f"time {time_text} follows {points[-1][0]:g}; expected times that increase", line=line)
        points.append((time, file.count(count_text, line=line)))
    if len(points) < 2:
        raise file.error(
            f"has {len(points)} rows after its header; expected at least two, the last being the end of the "
            f"observation. Is the file cut short?"
        )
    return Trace.from_points(points)


@register_trace_format(
    "samples",
    matches=lambda file: file.first_line.startswith(",") and file.first_line.count(",") == 2,
    cite="eth-easl; Andre, Strati, Klimovic 2022",
)
def _samples(file: TextFile) -> Trace:
    times: list[float] = []
    counts: list[int] = []
    for line, (_, time_text, count_text) in file.rows(columns="index,time,count", header=True):
        time = file.number(time_text, "time", line=line)
        if times and time <= times[-1]:
            raise file.error(f"time {time_text} follows {times[-1]:.6f}; expected times that increase", line=line)
        times.append(time)
        counts.append(file.count(count_text, line=line))
    if len(times) < 2:
        raise file.error(f"has {len(times)} samples; expected at least two. Is the file cut short?")
    # Differences of unix times are accurate to a microsecond; rounding restores the 63 s that were meant.
    seconds = np.round(np.array(times) - times[0], 6)
    interval = float(np.median(np.diff(seconds)))
    return Trace(seconds, np.array(counts), float(seconds[-1]) + interval)


@register_trace_format(
    "events",
    matches=lambda file: file.first_line.partition(",")[2].startswith(("add,", "remove,")),
    cite="Bamboo; Thorpe et al., NSDI 2023",
)
def _events(file: TextFile) -> Trace:
    nodes: set[str] = set()
    counts: dict[float, int] = {0.0: 0}  # events of the same time take effect together
    last = 0.0
    for line, (time_text, event, node) in file.rows(columns="milliseconds,add|remove,node", header=False):
        time = file.number(time_text, "time", line=line) / 1000
        if time < last:
            raise file.error(f"time {time_text} ms follows {last * 1000:g} ms; time cannot go backwards", line=line)
        if event == "add":
            if node in nodes:
                raise file.error(f"node {node!r} is added, but it is there already", line=line)
            nodes.add(node)
        elif event == "remove":
            if node not in nodes:
                raise file.error(f"node {node!r} is removed, but it is not there", line=line)
            nodes.remove(node)
        else:
            raise file.error(f"the event is {event!r}; expected add or remove", line=line)
        counts[time] = len(nodes)
        last = time
    if last == 0:
        raise file.error("has no event after 0 ms, so it covers no time. Is the file cut short?")
    return Trace.from_points(counts.items())


@register_trace_format("skypilot", matches=lambda file: file.first_line.startswith("{"), cite="SkyPilot")
def _skypilot(file: TextFile) -> Trace:
    def no_constant(text: str) -> float:
        raise file.error(f"contains {text}; expected finite numbers")

    try:
        content = json.loads(file.text, parse_constant=no_constant)
    except json.JSONDecodeError as problem:
        message = f"is not complete JSON ({problem.msg}). Is the file cut short?"
        raise file.error(message, line=problem.lineno) from None
    metadata = content.get("metadata") if isinstance(content, dict) else None
    gap = metadata.get("gap_seconds") if isinstance(metadata, dict) else None
    data = content.get("data") if isinstance(content, dict) else None
    if isinstance(gap, bool) or not isinstance(gap, int | float) or not 0 < gap < math.inf:
        raise file.error(f"metadata.gap_seconds is {gap!r}; expected the seconds between two counts")
    if not isinstance(data, list) or not data:
        found = "an empty list" if data == [] else "missing" if data is None else repr(data)[:40]
        raise file.error(f"data is {found}; expected a list of counts")
    for index, value in enumerate(data):
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_count(value):
            raise file.error(f"data[{index}] is {value!r}; expected a whole number that is not negative")
    points = ((index * gap, int(value)) for index, value in enumerate(data))
    return Trace.from_points(points, end=Seconds(len(data) * gap))
