"""`Trace`: the number of available workers as a function of time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from ebbflow.core.units import Seconds, format_seconds, parse_seconds
from ebbflow.errors import TraceError, UnitError

__all__ = ["Trace", "TraceStats"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_BEGINNING = Seconds(0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceStats:
    """Statistics of a trace; the field names are the keys of `ebbflow trace stats --json`."""

    duration_s: float
    min: int
    mean: float
    """Mean number of workers over time."""
    max: int
    changes: int
    """How often the count changed, including a change at the very end of the observation."""
    accelerator_hours: float
    zero_fraction: float
    """Part of the time without any worker, between 0 and 1."""


@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """The number of available workers over time: a right-continuous step function from 0 s to its end, immutable.

    A trace does not say *which* worker leaves; the engine chooses. Only changes are stored, so that traces which are
    equal as functions are equal as values, whatever their names.

    >>> trace = Trace.parse("0s:4 60s:2 90s:6 120s")
    >>> trace.at(75), trace.mean_workers(until=Seconds(120)), trace.stats().changes
    (2, 4.0, 2)
    >>> trace
    Trace('0s:4 60s:2 90s:6 120s')
    """

    times: Floats
    """When each count begins, in seconds; the first time is 0. Read-only."""
    workers: Ints
    """The count from that time on. Read-only."""
    end: float
    """When the observation ends, in seconds; nothing is known about later times."""
    final: int | None = None
    """The count at the very end: that of the last event of an event log, otherwise the last count. It has no duration,
    so that it enters the minimum, the maximum and the changes, and nothing else."""
    name: str = ""
    """Where the trace comes from, for messages and tables."""

    def __post_init__(self) -> None:
        times, workers = _checked(self.times, self.workers, self.end)
        final = int(workers[-1]) if self.final is None else self.final
        if final < 0 or final != int(final):
            raise TraceError(f"the count at the end is {final}; expected a whole number that is not negative")
        kept = np.concatenate([[True], workers[1:] != workers[:-1]])
        times, workers = times[kept], workers[kept]
        times.flags.writeable = workers.flags.writeable = False
        for field, value in {"times": times, "workers": workers, "end": float(self.end), "final": int(final)}.items():
            object.__setattr__(self, field, value)

    # -- construction ----------------------------------------------------------------------------------------------

    @classmethod
    def from_points(cls, points: Iterable[tuple[float, int]], *, end: Seconds | None = None, name: str = "") -> Trace:
        """A trace from (time in seconds, count) pairs; without `end`, the last pair is the end of the observation.

        >>> Trace.from_points([(0, 4), (60, 2), (120, 2)]) == Trace.parse("0s:4 60s:2 120s")
        True
        """
        rows = list(points)
        final = None
        if end is None:
            if len(rows) < 2:
                raise TraceError(f"{len(rows)} points make no trace; expected at least two, the last being the end")
            last, final = rows.pop()
            end = Seconds(last)
        times, counts = zip(*rows, strict=True) if rows else ((), ())
        return cls(np.asarray(times), np.asarray(counts), end, final, name)

    @classmethod
    def parse(cls, text: str, *, name: str = "") -> Trace:
        """A trace from a text of `time:count` words; the last word is a time without a count, the end.

        >>> Trace.parse("0s:4 1h:2 90min").end
        5400.0
        """
        words = text.split()
        if len(words) < 2 or ":" in words[-1]:
            raise TraceError(f"trace {text!r} has no end; write for example '0s:4 60s:2 120s'")
        points = []
        try:
            for word in words[:-1]:
                time, colon, count = word.partition(":")
                if not colon or not count.isdecimal():
                    raise TraceError(f"{word!r} in trace {text!r} is not time:count; write for example 60s:2")
                points.append((parse_seconds(time), int(count)))
            return cls.from_points(points, end=parse_seconds(words[-1]), name=name)
        except UnitError as error:
            raise TraceError(f"trace {text!r}: {error}") from None

    # -- values ----------------------------------------------------------------------------------------------------

    @overload
    def at(self, time: float) -> int: ...
    @overload
    def at(self, time: npt.NDArray[Any]) -> Ints: ...
    def at(self, time: float | npt.NDArray[Any]) -> int | Ints:
        """The number of workers at a time, or at each of an array of times, in seconds; 0 <= time < end."""
        asked = np.asarray(time, dtype=np.float64)
        outside = ~((asked >= 0) & (asked < self.end))
        if outside.any():
            raise TraceError(
                f"{self._label} has no count at {asked[outside].flat[0]:g} s; it covers 0 to {self.end:g} s"
            )
        counts = self.workers[np.searchsorted(self.times, asked, side="right") - 1]
        return int(counts) if asked.ndim == 0 else counts

    def segments(self) -> Iterator[tuple[Seconds, Seconds, int]]:
        """(start, stop, workers) of each segment, in which the count is constant."""
        stops = [*self.times[1:].tolist(), self.end]
        for start, stop, workers in zip(self.times.tolist(), stops, self.workers.tolist(), strict=True):
            yield Seconds(start), Seconds(stop), workers

    def integral(self, start: Seconds = _BEGINNING, stop: Seconds | None = None) -> float:
        """Worker-seconds between two times, in O(log n); without `stop`, to the end."""
        return self._area_until(self.end if stop is None else stop) - self._area_until(start)

    def mean_workers(self, until: Seconds | None = None) -> float:
        """The mean number of workers over time, from 0 s to `until` or the end."""
        stop = self.end if until is None else until
        if not stop > 0:
            raise TraceError(f"a mean over {stop:g} s is not defined; give a time after 0 s")
        return self._area_until(stop) / stop

    def stats(self) -> TraceStats:
        """Statistics of the whole trace."""
        area, counts = self.integral(), np.append(self.workers, self._final)
        return TraceStats(
            duration_s=self.end,
            min=int(counts.min()),
            mean=area / self.end,
            max=int(counts.max()),
            changes=int(np.count_nonzero(np.diff(counts))),
            accelerator_hours=area / 3600,
            zero_fraction=float(self._lengths[self.workers == 0].sum()) / self.end,
        )

    # -- derived traces --------------------------------------------------------------------------------------------

    def slice(self, start: Seconds = _BEGINNING, stop: Seconds | None = None) -> Trace:
        """The part from `start` to `stop` or the end, as a trace that begins at 0 s."""
        stop = Seconds(self.end) if stop is None else stop
        if not 0 <= start < stop <= self.end:
            raise TraceError(
                f"{self._label} cannot be cut to {start:g} .. {stop:g} s; it covers 0 to {self.end:g} s, "
                f"and the start must lie before the stop"
            )
        if not start and stop == self.end:
            return self
        low = int(np.searchsorted(self.times, start, side="right")) - 1
        high = int(np.searchsorted(self.times, stop, side="left"))
        times = self.times[low:high] - start
        times[0] = 0.0
        final = self.final if stop == self.end else None
        return replace(self, times=times, workers=self.workers[low:high], end=stop - start, final=final)

    def shift(self, offset: Seconds) -> Trace:
        """The trace without its first `offset` seconds."""
        return self.slice(offset)

    def repeat(self, times: int) -> Trace:
        """The trace `times` times in a row."""
        if times < 1:
            raise TraceError(f"{self._label} cannot be repeated {times} times; expected at least 1")
        starts = np.repeat(np.arange(times) * self.end, len(self.times))
        return replace(
            self, times=starts + np.tile(self.times, times), workers=np.tile(self.workers, times), end=times * self.end
        )

    def scale(self, *, workers: float | None = None, max_workers: int | None = None, time: float = 1.0) -> Trace:
        """The trace with times multiplied by `time`, and counts by `workers` or such that the largest is `max_workers`.

        Counts are rounded to the nearest whole number, halves up. A count above zero does not become zero, since
        training waits while there are no workers; rounding therefore raises the mean of a trace with few workers.

        >>> Trace.parse("0s:56 60s:29 90s:0 120s").scale(max_workers=4, time=0.5)
        Trace('0s:4 30s:2 45s:0 60s')
        """
        if workers is not None and max_workers is not None:
            raise TraceError("scale takes workers (a factor) or max_workers, not both")
        peak = int(max(self.workers.max(), self._final))
        factor = 1.0 if workers is None else workers
        if max_workers is not None:
            if max_workers < 1:
                raise TraceError(f"max_workers is {max_workers}; expected at least 1")
            factor = max_workers / peak if peak else 1.0
        if not (math.isfinite(factor) and factor > 0 and math.isfinite(time) and time > 0):
            raise TraceError(f"{self._label} cannot be scaled by {factor:g} in workers and {time:g} in time; "
                             f"both must be finite and above 0")  # fmt: skip
        return self._map(lambda counts: np.where(counts > 0, np.maximum(1, np.floor(counts * factor + 0.5)), 0), time)

    def clip(self, *, minimum: int = 0, maximum: int | None = None) -> Trace:
        """The trace with each count below `minimum` raised to it, and each count above `maximum` lowered to it."""
        if minimum < 0 or (maximum is not None and maximum < minimum):
            raise TraceError(f"cannot clip to {minimum} .. {maximum} workers; expected 0 <= minimum <= maximum")
        return self._map(lambda counts: np.clip(counts, minimum, maximum))

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _map(self, function: Any, time: float = 1.0) -> Trace:
        counts = function(np.append(self.workers, self._final)).astype(np.int64)
        return replace(self, times=self.times * time, workers=counts[:-1], end=self.end * time, final=int(counts[-1]))

    @property
    def _final(self) -> int:
        assert self.final is not None  # set by __post_init__
        return self.final

    @property
    def _label(self) -> str:
        return f"trace {self.name}" if self.name else "the trace"

    @cached_property
    def _lengths(self) -> Floats:
        return np.diff(self.times, append=self.end)

    @cached_property
    def _area(self) -> Floats:
        """Worker-seconds from 0 s to each change and to the end."""
        return np.concatenate([[0.0], np.cumsum(self.workers * self._lengths)])

    def _area_until(self, time: float) -> float:
        if not 0 <= time <= self.end:
            raise TraceError(f"{self._label} has no count up to {time:g} s; it covers 0 to {self.end:g} s")
        index = int(np.searchsorted(self.times, time, side="right")) - 1
        return float(self._area[index] + self.workers[index] * (time - self.times[index]))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trace):
            return NotImplemented
        return (
            (self.end, self.final) == (other.end, other.final)
            and np.array_equal(self.times, other.times)
            and np.array_equal(self.workers, other.workers)
        )

    def __hash__(self) -> int:
        return hash((self.times.tobytes(), self.workers.tobytes(), self.end, self.final))

    def __reduce__(self) -> tuple[Any, ...]:
        return Trace, (self.times, self.workers, self.end, self.final, self.name)  # a copy is read-only, too

    def __repr__(self) -> str:
        if len(self.times) <= 6 and self.final == self.workers[-1]:
            body = " ".join(f"{start:.12g}s:{workers}" for start, _, workers in self.segments())
            body = f"'{body} {self.end:.12g}s'"
        else:
            stats = self.stats()
            body = f"{stats.min} to {stats.max} workers, {stats.changes} changes in {format_seconds(self.end)}"
        return f"Trace({body}, name={self.name!r})" if self.name else f"Trace({body})"


def _checked(times: Any, workers: Any, end: float) -> tuple[Floats, Ints]:
    """Copies of the arrays, or a TraceError that names the first wrong entry."""
    moments, counts = np.array(times, dtype=np.float64), np.array(workers)
    if moments.ndim != 1 or moments.shape != counts.shape or not len(moments):
        raise TraceError(f"times of shape {moments.shape} and counts of shape {counts.shape} make no trace; "
                         f"expected one count for each of at least one time")  # fmt: skip
    if counts.dtype == np.bool_ or not np.issubdtype(counts.dtype, np.number):
        raise TraceError(f"the counts are of type {counts.dtype}; expected whole numbers")
    bad = ~(np.isfinite(counts) & (counts >= 0) & (counts == np.floor(counts)))
    if bad.any():
        i = int(np.argmax(bad))
        raise TraceError(f"the count at {moments[i]:g} s is {counts[i]}; expected a whole number that is not negative")
    if not np.isfinite(moments).all():
        raise TraceError(f"time number {int(np.argmin(np.isfinite(moments))) + 1} is not finite; expected seconds")
    if moments[0] != 0:
        raise TraceError(f"the first time is {moments[0]:g} s; expected 0 s, the start of the trace")
    back = np.diff(moments) <= 0
    if back.any():
        i = int(np.argmax(back))
        raise TraceError(f"time {moments[i + 1]:g} s follows {moments[i]:g} s; expected times that strictly increase")
    if not (math.isfinite(end) and end > moments[-1]):
        raise TraceError(f"the end is {end:g} s; expected a time after the last change at {moments[-1]:g} s")
    return moments, counts.astype(np.int64)
