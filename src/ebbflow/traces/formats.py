"""Trace files: one reader a published format, one writer.

| name      | what it looks like                                    | where the observation ends               |
|-----------|-------------------------------------------------------|------------------------------------------|
| canonical | CSV `time_s,accelerators`, one row a change           | at its last row                          |
| samples   | CSV `,Time,GPUs`: an index, unix time, count          | one sampling interval after the last row |
| events    | CSV without a header: milliseconds, add/remove, node  | at its last event                        |
| skypilot  | JSON `{"metadata": {"gap_seconds": 300}, "data": []}` | one gap after the last count             |

*samples* is the format of eth-easl (Andre, Strati, Klimovic 2022), *events* that of Bamboo (NSDI 2023). Each may be
packed with gzip. The format is found from the content. One more format is one more function below `@_reader`.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ebbflow.core.files import read_text, write_whole
from ebbflow.core.spec import nearest
from ebbflow.core.units import Seconds
from ebbflow.errors import InputError, TraceError
from ebbflow.traces.trace import Trace

__all__ = ["FORMATS", "Format", "Source", "read", "write"]

_HEADER = "time_s,accelerators"


def _is_count(value: float) -> bool:
    return 0 <= value < math.inf and value == int(value)


@dataclass(frozen=True, kw_only=True)
class Source:
    """The text of one file and where it came from."""

    path: Path
    text: str
    kind: type[InputError] = TraceError
    """What an error in the file is raised as."""

    @property
    def first_line(self) -> str:
        """The first line without spaces, in lower case: what formats are told apart by."""
        return "".join(self.beginning.lower().split())

    @property
    def beginning(self) -> str:
        """The first line that is not blank, as it stands in the file, for messages."""
        return self.text.lstrip().splitlines()[0]

    def rows(self, *, columns: str, header: bool) -> Iterator[tuple[int, list[str]]]:
        """(line number, fields) of each row that is not blank; every row has as many fields as `columns` names."""
        reader = csv.reader(self.text.splitlines())
        try:
            rows = ((reader.line_num, [field.strip() for field in fields]) for fields in reader if fields)
            if header:
                next(rows, None)
            for line, fields in rows:
                if len(fields) != columns.count(",") + 1:
                    raise self.error(f"found {','.join(fields)!r}; expected {columns}", line=line)
                yield line, fields
        except csv.Error as problem:
            raise self.error(f"is not CSV: {problem}", line=reader.line_num) from None

    def number(self, text: str, what: str, *, line: int) -> float:
        """A finite number."""
        try:
            value = float(text)
        except ValueError:
            raise self.error(f"the {what} is {text!r}; expected a number", line=line) from None
        if not math.isfinite(value):
            raise self.error(f"the {what} is {text}; expected a finite number", line=line)
        return value

    def count(self, text: str, what: str = "count", *, line: int) -> int:
        """A number of workers or samples: whole and not negative."""
        if not text:
            raise self.error(f"the {what} is missing", line=line)
        value = self.number(text, what, line=line)
        if not _is_count(value):
            raise self.error(f"the {what} is {text}; expected a whole number that is not negative", line=line)
        return int(value)

    def error(self, message: str, *, line: int | None = None) -> InputError:
        """The message with file and line before it."""
        return self.kind(f"{self.path}:{line}: {message}" if line else f"{self.path}: {message}")


@dataclass(frozen=True, kw_only=True)
class Format:
    """What is known of one format."""

    name: str
    sniff: Callable[[Source], bool]
    """Whether a file looks like this format; only its beginning is looked at."""
    read: Callable[[Source], Trace]


FORMATS: dict[str, Format] = {}


def _reader(name: str, sniff: Callable[[Source], bool]) -> Callable[[Callable[[Source], Trace]], Any]:
    def add(function: Callable[[Source], Trace]) -> Callable[[Source], Trace]:
        FORMATS[name] = Format(name=name, sniff=sniff, read=function)
        return function

    return add


def read(path: Path | str, format: str | None = None) -> Trace:
    """The trace in a file; its format is found from the content, or forced by its name."""
    path = Path(path)
    if format is not None and format not in FORMATS:
        raise TraceError(f"unknown trace format {format!r}; {nearest(format, list(FORMATS))}")
    source = Source(path=path, text=read_text(path, error=TraceError))
    if source.first_line == "step,batchsize":
        raise source.error(
            "is a batch plan (step,batchsize), not an availability trace; "
            "read it with BatchPlan.read, or with ebbflow plan --batches"
        )
    found = [FORMATS[format]] if format else [known for known in FORMATS.values() if known.sniff(source)]
    if not found:
        raise source.error(
            f"is in no known trace format; it begins with {source.beginning[:40]!r}; expected for example "
            f"the header {_HEADER!r}. Known formats: {', '.join(FORMATS)}",
            line=1,
        )
    trace = found[0].read(source)
    name = path.name.removesuffix(".gz")
    return Trace(trace.times, trace.workers, trace.end, trace.final, Path(name).stem)


def write(trace: Trace, path: Path | str) -> None:
    """Write the canonical CSV, packed if the name ends in .gz: the whole file or nothing. `read` gives an equal one."""
    path = Path(path)
    points = [*zip(trace.times.tolist(), trace.workers.tolist(), strict=True), (trace.end, trace.final)]
    lines = [_HEADER, *(f"{int(time) if time.is_integer() else repr(time)},{count}" for time, count in points), ""]
    data = "\n".join(lines).encode()
    write_whole(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


# -- the readers -------------------------------------------------------------------------------------------------------


@_reader("canonical", lambda source: source.first_line == _HEADER)
def _canonical(source: Source) -> Trace:
    points: list[tuple[float, int]] = []
    for line, (time_text, count_text) in source.rows(columns=_HEADER, header=True):
        time = source.number(time_text, "time", line=line)
        if not points and time != 0:
            raise source.error(f"the first time is {time_text}; expected 0, the start of the trace", line=line)
        if points and time <= points[-1][0]:
            raise source.error(f"time {time_text} follows {points[-1][0]:g}; expected times that increase", line=line)
        points.append((time, source.count(count_text, line=line)))
    if len(points) < 2:
        raise source.error(
            f"has {len(points)} rows after its header; expected at least two, the last being the end of the "
            f"observation. Is the file cut short?"
        )
    return Trace.from_points(points)


@_reader("samples", lambda source: source.first_line.startswith(",") and source.first_line.count(",") == 2)
def _samples(source: Source) -> Trace:
    times: list[float] = []
    counts: list[int] = []
    for line, (_, time_text, count_text) in source.rows(columns="index,time,count", header=True):
        time = source.number(time_text, "time", line=line)
        if times and time <= times[-1]:
            raise source.error(f"time {time_text} follows {times[-1]:.6f}; expected times that increase", line=line)
        times.append(time)
        counts.append(source.count(count_text, line=line))
    if len(times) < 2:
        raise source.error(f"has {len(times)} samples; expected at least two. Is the file cut short?")
    # Differences of unix times are good to a microsecond, no better; rounding gives back the 63 s that was meant.
    seconds = np.round(np.array(times) - times[0], 6)
    interval = float(np.median(np.diff(seconds)))
    return Trace(seconds, np.array(counts), float(seconds[-1]) + interval)


@_reader("events", lambda source: source.first_line.partition(",")[2].startswith(("add,", "remove,")))
def _events(source: Source) -> Trace:
    nodes: set[str] = set()
    counts: dict[float, int] = {0.0: 0}  # events of one moment take effect together
    last = 0.0
    for line, (time_text, event, node) in source.rows(columns="milliseconds,add|remove,node", header=False):
        time = source.number(time_text, "time", line=line) / 1000
        if time < last:
            raise source.error(f"time {time_text} ms follows {last * 1000:g} ms; time cannot go backwards", line=line)
        if event == "add":
            if node in nodes:
                raise source.error(f"node {node!r} is added, but it is there already", line=line)
            nodes.add(node)
        elif event == "remove":
            if node not in nodes:
                raise source.error(f"node {node!r} is removed, but it is not there", line=line)
            nodes.remove(node)
        else:
            raise source.error(f"the event is {event!r}; expected add or remove", line=line)
        counts[time] = len(nodes)
        last = time
    if last == 0:
        raise source.error("has no event after 0 ms, so it covers no time. Is the file cut short?")
    return Trace.from_points(counts.items())


@_reader("skypilot", lambda source: source.first_line.startswith("{"))
def _skypilot(source: Source) -> Trace:
    def no_constant(text: str) -> float:
        raise source.error(f"contains {text}; expected finite numbers")

    try:
        content = json.loads(source.text, parse_constant=no_constant)
    except json.JSONDecodeError as problem:
        message = f"is not complete JSON ({problem.msg}). Is the file cut short?"
        raise source.error(message, line=problem.lineno) from None
    metadata = content.get("metadata") if isinstance(content, dict) else None
    gap = metadata.get("gap_seconds") if isinstance(metadata, dict) else None
    data = content.get("data") if isinstance(content, dict) else None
    if isinstance(gap, bool) or not isinstance(gap, int | float) or not 0 < gap < math.inf:
        raise source.error(f"metadata.gap_seconds is {gap!r}; expected the seconds between two counts")
    if not isinstance(data, list) or not data:
        found = "an empty list" if data == [] else "missing" if data is None else repr(data)[:40]
        raise source.error(f"data is {found}; expected a list of counts")
    for index, value in enumerate(data):
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_count(value):
            raise source.error(f"data[{index}] is {value!r}; expected a whole number that is not negative")
    points = ((index * gap, int(value)) for index, value in enumerate(data))
    return Trace.from_points(points, end=Seconds(len(data) * gap))
