"""Trace generators, and `load`, which makes a trace from a file, from the text of a generator or from its changes.

Every generator is a function of its arguments alone, so that the same text gives the same trace. (NumPy may change its
random streams between releases; the record of a run contains the trace itself.) Two generators imitate published traces
(Andre, Strati, Klimovic 2022) by their statistics; `published_traces` has the traces themselves. A generator of your
own is a function that is registered by `register_trace`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ebbflow.core.spec import Registry, nearest, parse_call
from ebbflow.core.units import Seconds
from ebbflow.errors import SpecError, TraceError
from ebbflow.traces import formats
from ebbflow.traces.availability import Trace

__all__ = ["GENERATORS", "load", "register_trace"]

GENERATORS: Registry[Trace] = Registry("trace")

_DAY = Seconds(86400.0)
_HOUR = Seconds(3600.0)
_FIVE_MINUTES = Seconds(300.0)
_CHANGES = re.compile(r"\s*0\w*:\d+\s")  # how the changes of a trace begin; names of files and generators do not


def register_trace(name: str, *, cite: str = "") -> Callable[[Any], Any]:
    """Return a decorator that adds a trace generator: a function of annotated arguments that returns a `Trace`."""
    return GENERATORS.register(name, cite=cite)


def load(text_or_path: str | Path, *, format: str | None = None) -> Trace:
    """A trace from a file, from the text of a generator such as `gcp-a100-like(seed=3)`, or from its changes.

    A file that exists is preferred to a generator of the same name; with `format` the text is always the name of a
    file. Changes are written as for `Trace.parse`: times with counts, and the end.

    >>> load("step(workers=4, factor=12, at=1h, duration=2h)")
    Trace('0s:4 3600s:48 7200s', name='step(workers=4, factor=12, at=1h, duration=2h)')
    >>> load("0s:4 1h:48 2h").workers
    array([ 4, 48])
    """
    if isinstance(text_or_path, str) and format is None and _CHANGES.match(text_or_path):
        return Trace.parse(text_or_path, name=" ".join(text_or_path.split()))
    if not isinstance(text_or_path, str | Path):
        raise TraceError(f"the trace is {text_or_path!r}; expected a Trace, a file, or a text: constant(workers=8)")
    path = Path(text_or_path)
    if isinstance(text_or_path, Path) or format is not None or path.exists():
        return formats.read(path, format)
    text = text_or_path.strip()
    if "/" in text or path.suffix in {".csv", ".json", ".gz", ".txt"}:
        raise TraceError(f"{text}: no such file")
    try:
        call = parse_call(text)
    except SpecError as error:
        constant = f"; a fleet that stays is constant(workers={text})" if text.isdecimal() else ""
        raise TraceError(f"{text!r} is neither a file nor the text of a generator: {error}{constant}") from None
    if call.name not in GENERATORS:
        raise TraceError(f"{text!r} is neither a file nor a generator; {nearest(call.name, GENERATORS.names())}")
    trace: object = GENERATORS.make(call)
    if not isinstance(trace, Trace):
        raise TraceError(
            f"the generator {call} returned a {type(trace).__name__}; expected a Trace: return "
            f"Trace.from_points([(0, 4), (60, 2)], end=120), for example"
        )
    return replace(trace, name=text)


_MOST_CHANGES = 10_000_000


def _check_changes(count: float) -> None:
    """Refuse a trace that would fill the memory, or take minutes to make."""
    if not count <= _MOST_CHANGES:
        raise TraceError(
            f"the trace would have about {count:.2g} changes; expected at most {_MOST_CHANGES:,}: choose a shorter "
            f"duration, longer times between changes, or fewer workers that change one by one"
        )


def _every(period: float, duration: float) -> npt.NDArray[np.float64]:
    """Multiples of the period below the duration, without one that is there by rounding alone, as in 2.1 / 0.3 > 7."""
    _check_changes(duration / period)
    return np.arange(max(1, int(np.ceil(duration / period - 1e-6))), dtype=np.float64) * period


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise TraceError(f"{name} is {value:g}; expected a value above 0")


@register_trace("constant")
def constant(workers: int, duration: Seconds = _DAY) -> Trace:
    """A constant number of workers."""
    return Trace(np.zeros(1), np.array([workers]), duration)


@register_trace("step", cite="Lin et al. 2019")
def step(
    workers: int, factor: float = 12.0, at: Seconds = _HOUR, duration: Seconds = _DAY, then: int | None = None
) -> Trace:
    """One change: from the time `at` on `factor` times the workers, or `then` workers, as in a fleet that shrinks."""
    after = workers * factor if then is None else then
    if not 0 < at < duration or after != int(after):
        raise TraceError(f"{factor:g} times {workers} workers at {at:g} of {duration:g} s is not possible; "
                         f"expected a whole number of workers, and a time inside the duration")  # fmt: skip
    return Trace.from_points([(0, workers), (at, int(after))], end=duration)


@register_trace("square")
def square(low: int, high: int, period: Seconds = _HOUR, duration: Seconds = _DAY) -> Trace:
    """A square wave: low for half a period, then high for half a period, and so on."""
    _positive(period=period, duration=duration)
    times = _every(period / 2, duration)
    return Trace(times, np.where(np.arange(len(times)) % 2, high, low), duration)


@register_trace("random-levels", cite="Lin et al. 2019")
def random_levels(minimum: int, maximum: int, every: Seconds = _HOUR, duration: Seconds = _DAY, seed: int = 0) -> Trace:
    """A new random number of workers at regular times, uniform from `minimum` to `maximum`, both included."""
    _positive(every=every, duration=duration)
    if not 0 <= minimum <= maximum:
        raise TraceError(f"levels from {minimum} to {maximum} are not possible; expected 0 <= minimum <= maximum")
    times = _every(every, duration)
    return Trace(times, _rng(seed).integers(minimum, maximum, len(times), endpoint=True), duration)


@register_trace("poisson")
def poisson(
    workers: int,
    preempt_every: Seconds = _HOUR,
    provision: Seconds = _FIVE_MINUTES,
    duration: Seconds = _DAY,
    seed: int = 0,
) -> Trace:
    """Every worker is preempted at random times of its own and replaced later; at first all workers are there.

    Both times are exponential: a worker lives for `preempt_every` on average, and its replacement takes `provision` on
    average (`0s`: none). In the long run the part preempt_every / (preempt_every + provision) of the workers is there.
    """
    _positive(preempt_every=preempt_every, duration=duration)
    _check_changes(workers * (1 + 2 * duration / (preempt_every + provision)))
    rng = _rng(seed)
    rounds = 1 + int(1.2 * duration / (preempt_every + provision))
    changes: list[tuple[float, int]] = []
    for _ in range(workers):
        events = np.zeros(0)
        while not len(events) or events[-1] < duration:  # one worker: preempted, replaced, preempted, ...
            waits = rng.exponential((preempt_every, provision), (rounds, 2)).ravel()
            events = np.concatenate([events, np.cumsum(waits) + (events[-1] if len(events) else 0.0)])
        events = events[events < duration]
        changes += zip(events.tolist(), np.where(np.arange(len(events)) % 2, 1, -1).tolist(), strict=True)
    changes.sort()
    counts = {0.0: workers}
    for time, change in changes:
        counts[time] = workers = workers + change
    return Trace.from_points(counts.items(), end=duration)


# -- imitations of published traces ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Cloud:
    """The parameters of a cloud, in machines and in ticks, the sampling intervals of the observer.

    In each `span` the capacity visits every level once, the first one first and the others in random order. When the
    capacity falls, machines are preempted together; when it rises, each missing machine is provisioned after a random
    time of its own. In between, small groups of machines are preempted and provisioned again in the same way.
    """

    wanted: int
    """Machines that were requested: the largest count."""
    unit: int
    """Workers per machine."""
    tick: float
    """Seconds between two observations."""
    span: float
    """Seconds in which every level is visited once."""
    levels: tuple[tuple[int, float], ...]
    """(capacity, part of the span) of each level."""
    losses: int
    """Preemptions of small groups per span."""
    bulk: float
    """Mean number of machines in a small group."""
    wait: float
    """Mean ticks until a machine is provisioned again."""
    floor: int
    """Smallest number of machines."""

    def trace(self, seed: int, duration: Seconds) -> Trace:
        """A random trace of this cloud."""
        if not self.tick <= duration:
            raise TraceError(f"duration is {duration:g} s; expected at least one observation of {self.tick:g} s")
        _check_changes(duration / self.tick)
        rng = _rng(seed)
        ticks = int(np.ceil(duration / self.tick))
        change = np.zeros(ticks + 1, dtype=np.int64)  # machines that come or go at each tick
        begin, level = 0, self.wanted
        change[0] = level
        while begin < ticks:
            order = [0, *(1 + rng.permutation(len(self.levels) - 1))]
            shares = np.array([self.levels[index][1] for index in order]) * rng.uniform(0.8, 1.2, len(order))
            stops = begin + np.round(np.cumsum(shares) / shares.sum() * self.span / self.tick).astype(np.int64)
            for index, stop in zip(order, stops, strict=True):
                capacity = self.levels[index][0]
                self._move(change, rng, begin, capacity - level)
                begin, level = int(stop), capacity
        for at in rng.integers(1, max(2, ticks), round(self.losses * duration / self.span)):
            size = int(rng.geometric(1 / self.bulk))
            self._move(change, rng, int(at), -size)
            self._move(change, rng, int(at), size)
        counts = np.clip(np.cumsum(change[:-1]), self.floor, self.wanted) * self.unit
        return Trace(np.arange(ticks, dtype=np.float64) * self.tick, counts, duration)

    def _move(self, change: npt.NDArray[np.int64], rng: np.random.Generator, begin: int, machines: int) -> None:
        """Remove machines at once, or add each after a random time of its own; those beyond the end are dropped."""
        last = len(change) - 1
        if machines < 0:
            change[min(begin, last)] += machines
        else:
            np.add.at(change, np.minimum(begin + rng.geometric(1 / self.wait, machines), last), 1)


_A100_SPAN = Seconds(13104.0)
_TPU_SPAN = Seconds(58020.0)
_A100 = _Cloud(
    wanted=56, unit=1, tick=63.0, span=_A100_SPAN,
    levels=((56, 0.1), (30, 0.08), (54, 0.2), (52, 0.2), (49, 0.2), (46, 0.22)),
    losses=15, bulk=2.0, wait=4.0, floor=29,
)  # fmt: skip
_TPU = _Cloud(
    wanted=15, unit=8, tick=30.0, span=_TPU_SPAN,
    levels=((15, 0.26), (13, 0.15), (8, 0.25), (6, 0.15), (4, 0.19)),
    losses=45, bulk=1.2, wait=4.0, floor=3,
)  # fmt: skip


@register_trace("gcp-a100-like", cite="Andre, Strati, Klimovic 2022")
def gcp_a100_like(seed: int = 0, duration: Seconds = _A100_SPAN) -> Trace:
    """Imitates a request for 56 A100 on GCP spot: 29 to 56 workers, mean 47.9, 46 changes in 3.6 h.

    These are the statistics of the published trace, which was sampled every 63 s, without the last minutes, in which
    the collection was shut down. Over seeds the mean count stays within 1.5 of it, and the changes are 46 +- 5
    (standard deviation).
    """
    return _A100.trace(seed, duration)


@register_trace("gcp-tpu-like", cite="Andre, Strati, Klimovic 2022")
def gcp_tpu_like(seed: int = 0, duration: Seconds = _TPU_SPAN) -> Trace:
    """Imitates a request for 120 TPU v2 cores on GCP spot: 24 to 120 workers, mean 74.7, 97 changes in 16.1 h.

    These are the statistics of the published trace, which was sampled every 30 s; a machine has 8 cores. Over seeds the
    mean count stays within 6 of it, and the changes are 98 +- 5 (standard deviation).
    """
    return _TPU.trace(seed, duration)


def _rng(seed: int) -> np.random.Generator:
    if seed < 0:
        raise TraceError(f"seed is {seed}; expected a whole number that is not negative")
    return np.random.default_rng(seed)
