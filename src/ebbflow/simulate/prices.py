"""What workers cost: a flat price, a history of prices, or a price model of one's own, in USD per hour of one worker.

Every available worker is paid for, from its arrival to the end of training, whether it takes part in a step or not. A
policy that limits the workers of a step leaves the others idle and paid; a limit on the fleet does not rent them.

A plugin (`--plugin FILE`) registers a price model by name, and `--spot-price "night(0.9)"` chooses it:

    @ebbflow.register_price("night")
    @dataclass(frozen=True)
    class NightPrice:
        day: float
        night: float = 0.5

        def integral(self, times): ...   # USD that one worker costs from 0 s to each of these times (a numpy array)
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from ebbflow.core.files import read_text
from ebbflow.core.plugins import raise_naming
from ebbflow.core.spec import Registry, nearest, param, parse_call, render
from ebbflow.core.units import Seconds, Usd, format_seconds
from ebbflow.core.wording import called
from ebbflow.errors import ConfigError, PlanError
from ebbflow.traces import Trace

__all__ = [
    "PRICES", "FlatPrice", "Price", "PriceHistory", "ScaledPrice", "cost", "cost_over_time", "make_price",
    "read_prices", "register_price", "usd_until",
]  # fmt: skip

Floats = npt.NDArray[np.float64]
_NONE = Seconds(0.0)


@runtime_checkable
class Price(Protocol):
    """The price of one worker as a function of time."""

    def integral(self, times: Floats) -> Floats:
        """USD that one worker costs from 0 s to each time, which never falls; 0 s is the start of training."""
        ...


PRICES: Registry[Price] = Registry("price model")
_Model = TypeVar("_Model", bound=Callable[..., Price])


def register_price(name: str, *, cite: str = "") -> Callable[[_Model], _Model]:
    """Return a decorator that adds a price model: a class or a function that returns a `Price`.

    `--spot-price "name(arguments)"` then finds it. Arguments are converted by their annotations.
    """
    return PRICES.register(name, cite=cite)


def make_price(text: str | float) -> Price:
    """A price from its text: USD per hour, or the text form of a registered price model.

    >>> make_price("0.744"), make_price("flat(0.744)")
    (FlatPrice(usd_per_hour=0.744), FlatPrice(usd_per_hour=0.744))
    """
    try:
        usd = float(text)
    except ValueError:
        call = parse_call(str(text))
        price = PRICES.make(call)
        if not isinstance(price, Price):
            raise ConfigError(
                f"the price model {call} is a {type(price).__name__}, which has no method integral(times); expected "
                f"one that gives the USD that one worker costs from 0 s to each time"
            ) from None
        return price
    return FlatPrice(usd)


def usd_until(price: Price, times: Floats) -> Floats:
    """What `price.integral` returns, checked; an exception in a price model of a plugin is a ConfigError with its line.

    >>> usd_until(FlatPrice(3600.0), np.array([0.0, 2.0]))
    array([0., 2.])
    """
    what = f"the price model {type(price).__name__}: integral()"
    try:
        usd: Any = price.integral(times)
    except Exception as error:
        raise_naming(error, price, what)
    if not isinstance(usd, np.ndarray) or usd.dtype.kind not in "fiu" or usd.shape != times.shape:
        found = " ".join(repr(usd).split())
        raise ConfigError(
            f"{what} returned {found[:200]} for {len(times)} times; expected an array of as many numbers: the USD that "
            f"one worker costs from 0 s to each time"
        )
    if problem := _why_impossible(times, usd):
        raise ConfigError(
            f"{what} returned {problem}; expected the USD that one worker costs from 0 s to each time: 0 at 0 s, "
            f"finite, and never less than at an earlier time"
        )
    return usd


def _why_impossible(times: Floats, usd: Floats) -> str:
    """The first of these costs from 0 s to each of the times that cannot be one; empty if all of them can."""
    if not len(usd):
        return ""
    order = np.argsort(times, kind="stable")
    at, spent = (np.concatenate([[0.0], values[order]]) for values in (times, usd))  # nothing is spent before the start
    rounding = 1e-9 * abs(spent[-1]) if math.isfinite(spent[-1]) else 0.0
    with np.errstate(invalid="ignore"):  # infinite costs are refused, whatever their difference
        change = spent[1:] - spent[:-1]
    right = (change >= -rounding) & (change < math.inf)
    right[0] &= at[1] > 0 or change[0] <= rounding
    if right.all():
        return ""
    first = int(np.argmin(right))
    before = f" after {spent[first]:g} USD for {at[first]:g} s" if first else ""
    return f"{spent[first + 1]:g} USD for {at[first + 1]:g} s{before}"


def _check_price(usd: float, where: str) -> None:
    if not (math.isfinite(usd) and usd >= 0):
        raise ConfigError(f"{where} is {usd:g} USD per hour; expected a finite number that is not negative")


@PRICES.register("flat")
@dataclass(frozen=True)
class FlatPrice:
    """The same price at all times."""

    usd_per_hour: float = param(doc="USD per hour of one worker")

    def __post_init__(self) -> None:
        _check_price(self.usd_per_hour, "the price")

    def integral(self, times: Floats) -> Floats:
        """Proportional to the time."""
        return times * (self.usd_per_hour / 3600)

    def __str__(self) -> str:
        return render("flat", self)


@dataclass(frozen=True)
class ScaledPrice:
    """Another price, multiplied by a factor."""

    price: Price
    factor: float

    def integral(self, times: Floats) -> Floats:
        """The integral of the other price times the factor."""
        return usd_until(self.price, times) * self.factor


@dataclass(frozen=True, eq=False)
class PriceHistory:
    """A step function of time, right-continuous, from its first time to its end.

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
        """The area under the prices. A time after the end is a PlanError that says how far the history reaches."""
        if len(times) and not times.max() <= self.end * (1 + 1e-12):
            raise PlanError(
                f"{self.name or 'the price history'} covers {format_seconds(self.end)}, the run takes "
                f"{format_seconds(float(times.max()))}; give a longer history, begin earlier in it "
                f"({called('price_offset')}), or a flat price"
            )
        index = np.searchsorted(self.times, times, side="right") - 1
        return self._before[index] + (times - self.times[index]) * self.usd_per_hour[index] / 3600

    def shift(self, offset: Seconds) -> PriceHistory:
        """The history without its first `offset` seconds."""
        if not self.times[0] <= offset < self.end:
            raise ConfigError(
                f"{self.name or 'the price history'} has prices from {self.times[0]:g} to {self.end:g} s; it cannot "
                f"begin at {offset:g} s; choose another time with {called('price_offset')}"
            )
        low = int(np.searchsorted(self.times, offset, side="right")) - 1
        times = np.maximum(self.times[low:] - offset, 0.0)
        return PriceHistory(times, self.usd_per_hour[low:], self.end - offset, self.name)


def read_prices(path: Path | str, *, zone: str | None = None, offset: Seconds = _NONE) -> PriceHistory:
    """A price history from a CSV file `time_s,zone,usd_per_hour` (the zone column may be missing).

    `zone` selects the prices of one zone. Without it, workers are spread evenly over the zones and pay the mean of all
    zones that have had a price by then. A price holds until the next row of its zone; the history ends with the last
    row of the file. `offset` is the time in the file at which training begins.
    """
    path = Path(path)
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
        time, usd, name = _parse_row(path, number, row, columns)
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
    return _mean_of_zones(chosen, end, name=path.name if zone is None else f"{path.name} ({zone})").shift(offset)


def _parse_row(
    path: Path, number: int, row: list[str], columns: tuple[int, int, int | None]
) -> tuple[float, float, str]:
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


def _mean_of_zones(zones: list[tuple[list[float], list[float]]], end: float, name: str) -> PriceHistory:
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

    Every worker is billed for at least `minimum`. Which worker leaves is not known; the newest is assumed to leave
    first, which costs most.
    """
    high = int(np.searchsorted(trace.times, until, side="right"))
    usd = float(np.einsum("i,i", np.diff(usd_until(price, np.append(trace.times[:high], until))), trace.workers[:high]))
    if minimum > 0:
        # Within a history the minimum is billed at the price of the last moment of the rental.
        short = _short_rentals(trace, until, minimum)
        if len(short):
            ends, missing = short.T
            rate = usd_until(price, ends) - usd_until(price, np.maximum(ends - 1.0, 0.0))
            usd += float((missing * rate / np.minimum(ends, 1.0)).sum())
    return Usd(usd)


def cost_over_time(trace: Trace, times: Floats, price: Price) -> Floats:
    """USD spent up to each time, billed per second; the times lie inside the trace."""
    last = float(times.max()) if len(times) else 0.0
    high = int(np.searchsorted(trace.times, last, side="right"))
    starts, workers = trace.times[:high], trace.workers[:high].astype(np.float64)
    at = usd_until(price, starts)
    before = np.append(0.0, np.cumsum(workers[:-1] * np.diff(at)))
    index = np.searchsorted(starts, times, side="right") - 1
    spent: Floats = before[index] + workers[index] * (usd_until(price, times) - at[index])
    return spent


def _short_rentals(trace: Trace, until: float, minimum: float) -> Floats:
    """(end, worker-seconds missing to the minimum) of all shorter rentals; the newest workers leave first."""
    stack: list[tuple[float, int]] = []
    short: list[tuple[float, float]] = []
    have = 0

    def leave(time: float, count: int) -> None:
        while count:
            begin, size = stack.pop()
            leaving = min(size, count)
            if time - begin < minimum:
                short.append((time, leaving * (minimum - (time - begin))))
            if leaving < size:
                stack.append((begin, size - leaving))
            count -= leaving

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
