"""What workers cost: a flat price or a history of prices, in USD an hour of one worker.

All workers that are there are paid for, from their arrival to the end of training, whether they take part in a step or
not: a cap in the policy leaves workers idle and paid, a cap on the fleet does not rent them.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ebbflow.core.files import read_text
from ebbflow.core.spec import nearest
from ebbflow.core.units import Seconds, Usd, format_seconds
from ebbflow.errors import ConfigError, PlanError
from ebbflow.traces import Trace

__all__ = ["FlatPrice", "Price", "PriceHistory", "cost", "cost_over_time", "read_prices"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_NONE = Seconds(0.0)


@runtime_checkable
class Price(Protocol):
    """Money as a function of time."""

    def integral(self, times: Floats) -> Floats:
        """USD that one worker costs from 0 s to each time."""
        ...


def _check_price(usd: float, where: str) -> None:
    if not (math.isfinite(usd) and usd >= 0):
        raise ConfigError(f"{where} is {usd:g} USD an hour; expected a finite number that is not negative")


@dataclass(frozen=True)
class FlatPrice:
    """Always the same."""

    usd_per_hour: float

    def __post_init__(self) -> None:
        _check_price(self.usd_per_hour, "the price")

    def integral(self, times: Floats) -> Floats:
        """Proportional to the time."""
        return times * (self.usd_per_hour / 3600)


@dataclass(frozen=True, eq=False)
class PriceHistory:
    """A step function of time, right-continuous, from its first time to the end of what is known.

    >>> history = PriceHistory(np.array([0.0, 3600.0]), np.array([1.0, 2.0]), end=7200.0)
    >>> history.integral(np.array([1800.0, 5400.0]))
    array([0.5, 2. ])
    """

    times: Floats
    usd_per_hour: Floats
    end: float
    name: str = ""

    def __post_init__(self) -> None:
        for usd, time in zip(self.usd_per_hour.tolist(), self.times.tolist(), strict=True):
            _check_price(usd, f"{self.name or 'price history'}: the price at {time:g} s")

    @cached_property
    def _before(self) -> Floats:
        return np.append(0.0, np.cumsum(self.usd_per_hour[:-1] * np.diff(self.times)) / 3600)

    def integral(self, times: Floats) -> Floats:
        """The area below the prices; a time beyond the end is a PlanError that says how far the history reaches."""
        if len(times) and not times.max() <= self.end * (1 + 1e-12):
            raise PlanError(
                f"{self.name or 'the price history'} covers {format_seconds(self.end)}, the run takes "
                f"{format_seconds(float(times.max()))}; give a longer history, begin earlier in it (--price-offset), "
                f"or a flat price"
            )
        index = np.searchsorted(self.times, times, side="right") - 1
        return self._before[index] + (times - self.times[index]) * self.usd_per_hour[index] / 3600

    def shift(self, offset: Seconds) -> PriceHistory:
        """Without its first `offset` seconds."""
        if not self.times[0] <= offset < self.end:
            raise ConfigError(
                f"{self.name or 'the price history'} has prices from {self.times[0]:g} to {self.end:g} s; a beginning "
                f"at {offset:g} s lies outside of it; choose another with --price-offset"
            )
        low = int(np.searchsorted(self.times, offset, side="right")) - 1
        times = np.maximum(self.times[low:] - offset, 0.0)
        return PriceHistory(times, self.usd_per_hour[low:], self.end - offset, self.name)


def read_prices(path: Path, *, zone: str | None = None, offset: Seconds = _NONE) -> PriceHistory:
    """A price history from a CSV file `time_s,zone,usd_per_hour` (the zone column may be missing).

    `zone` takes the prices of one zone; without it workers are spread evenly, and pay the mean of the zones that have
    had a price by then. A row holds until the next of its zone; what is known ends with the last row of the file.
    `offset`: the time in the file at which training begins.
    """
    rows = list(csv.reader(read_text(path, error=ConfigError).splitlines()))
    header = [name.strip().lower() for name in rows[0]]
    if "time_s" not in header or "usd_per_hour" not in header:
        raise ConfigError(f"{path}: the first line is {','.join(rows[0])!r}; expected time_s,zone,usd_per_hour")
    columns = header.index("time_s"), header.index("usd_per_hour"), header.index("zone") if "zone" in header else None
    zones: dict[str, tuple[list[float], list[float]]] = {}
    end = 0.0
    for number, row in enumerate(rows[1:], start=2):
        if not row:
            continue
        time, usd, name = _row(path, number, row, columns)
        times, prices = zones.setdefault(name, ([], []))
        if times and time < times[-1]:
            raise ConfigError(f"{path}:{number}: {time:g} s follows {times[-1]:g} s; expected times that increase")
        times.append(time)
        prices.append(usd)
        end = max(end, time)
    if not zones:
        raise ConfigError(f"{path}: has no prices; expected rows time_s,zone,usd_per_hour")
    if zone is not None and zone not in zones:
        raise ConfigError(f"{path}: has no zone {zone!r}; {nearest(zone, list(zones))}")
    chosen = [zones[zone]] if zone is not None else list(zones.values())
    return _mean_of(chosen, end, name=path.name if zone is None else f"{path.name} ({zone})").shift(offset)


def _row(path: Path, number: int, row: list[str], columns: tuple[int, int, int | None]) -> tuple[float, float, str]:
    time_at, usd_at, zone_at = columns
    try:
        time, usd = float(row[time_at]), float(row[usd_at])
        name = row[zone_at].strip() if zone_at is not None else ""
    except (ValueError, IndexError):
        raise ConfigError(f"{path}:{number}: {','.join(row)!r} has no time and price; expected numbers") from None
    _check_price(usd, f"{path}:{number}: the price")
    if not (math.isfinite(time) and time >= 0):
        raise ConfigError(f"{path}:{number}: the time is {time:g} s; expected seconds from 0 on")
    return time, usd, name


def _mean_of(zones: list[tuple[list[float], list[float]]], end: float, name: str) -> PriceHistory:
    """The mean over the zones that have had a price so far."""
    edges = np.unique(np.concatenate([np.asarray(times) for times, _ in zones]))
    edges = edges[edges < end] if len(edges) > 1 else edges
    sums, known = np.zeros(len(edges)), np.zeros(len(edges))
    for times, prices in zones:
        index = np.searchsorted(times, edges, side="right") - 1
        sums += np.where(index >= 0, np.asarray(prices)[index], 0.0)
        known += index >= 0
    return PriceHistory(edges, sums / known, end, name)


def cost(trace: Trace, until: float, price: Price, *, minimum: Seconds = _NONE) -> Usd:
    """USD for all workers of the trace from 0 s until a time, at which they are given back.

    `minimum`: every worker is billed for at least so long. Nobody knows which worker leaves; the newest is taken to
    leave first, which is the dearest case.
    """
    high = int(np.searchsorted(trace.times, until, side="right"))
    usd = float(np.einsum("i,i", np.diff(price.integral(np.append(trace.times[:high], until))), trace.workers[:high]))
    if minimum > 0:
        # Within a history the minimum is billed at the price of the last moment of the rental.
        short = _short_rentals(trace, until, minimum)
        if len(short):
            ends, missing = short.T
            rate = price.integral(ends) - price.integral(np.maximum(ends - 1.0, 0.0))
            usd += float((missing * rate / np.minimum(ends, 1.0)).sum())
    return Usd(usd)


def cost_over_time(trace: Trace, times: Floats, price: Price) -> Floats:
    """USD spent up to each time, billed by the second; the times lie inside the trace."""
    last = float(times.max()) if len(times) else 0.0
    high = int(np.searchsorted(trace.times, last, side="right"))
    starts, workers = trace.times[:high], trace.workers[:high].astype(np.float64)
    at = price.integral(starts)
    before = np.append(0.0, np.cumsum(workers[:-1] * np.diff(at)))
    index = np.searchsorted(starts, times, side="right") - 1
    spent: Floats = before[index] + workers[index] * (price.integral(times) - at[index])
    return spent


def _short_rentals(trace: Trace, until: float, minimum: float) -> Floats:
    """(end, worker-seconds missing to the minimum) of the rentals that are shorter than it; the newest leave first."""
    stack: list[tuple[float, int]] = []
    short: list[tuple[float, float]] = []
    have = 0

    def leave(time: float, count: int) -> None:
        while count:
            begin, size = stack.pop()
            gone = min(size, count)
            if time - begin < minimum:
                short.append((time, gone * (minimum - (time - begin))))
            if gone < size:
                stack.append((begin, size - gone))
            count -= gone

    for time, workers in zip(trace.times.tolist(), trace.workers.tolist(), strict=True):
        if time >= until:
            break
        if workers > have:
            stack.append((time, workers - have))
        else:
            leave(time, have - workers)
        have = workers
    leave(until, have)
    return np.array(short).reshape(-1, 2)
