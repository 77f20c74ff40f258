"""From a trace to the workers that are paid for and to those that can compute."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ebbflow.core.units import Seconds
from ebbflow.errors import ConfigError
from ebbflow.traces import Trace

__all__ = ["different", "provisioned", "rented"]

Ints = npt.NDArray[np.int64]


def rented(trace: Trace, *, offset: Seconds, max_workers: int | None) -> Trace:
    """The workers that are paid for: the trace from `offset` on, never more than `max_workers`."""
    if max_workers is not None and max_workers < 1:
        raise ConfigError(f"the fleet is limited to {max_workers} workers; expected at least 1")
    if not 0 <= offset < trace.end:
        raise ConfigError(f"the offset of {offset:g} s lies outside of the trace, which covers 0 to {trace.end:g} s")
    part = trace.shift(offset)
    return part if max_workers is None else part.clip(maximum=max_workers)


def provisioned(trace: Trace, delay: Seconds) -> Trace:
    """The workers that can compute when each takes `delay` from its arrival until then: boot, image, environment.

    The newest leave first, so at any time as many are ready as the least count of the last `delay` seconds; before 0 s
    nobody was there.

    >>> provisioned(Trace.parse("0s:4 60s:6 100s:5 200s"), Seconds(30))
    Trace('0s:0 30s:4 90s:6 100s:5 200s')
    """
    if delay < 0:
        raise ConfigError(f"the provisioning delay is {delay:g} s; expected a time that is not negative")
    if not delay:
        return trace
    edges = np.unique(np.concatenate([[0.0], trace.times, trace.times + delay]))
    edges = edges[edges < trace.end]
    low = np.searchsorted(trace.times, edges - delay, side="right") - 1  # the count at the window's beginning
    high = np.searchsorted(trace.times, edges, side="right") - 1
    least = _range_minimum(trace.workers, np.maximum(low, 0), high)
    return replace(trace, times=edges, workers=np.where(low < 0, 0, least), final=None)


def different(workers: Ints) -> tuple[Ints, Ints]:
    """The different counts in increasing order, and which of them each entry is.

    >>> different(np.array([4, 0, 4, 6]))
    (array([0, 4, 6]), array([1, 0, 1, 2]))
    """
    highest = int(workers.max())
    if highest > 10 * len(workers):  # a table by count would be long and empty
        return np.unique(workers, return_inverse=True)
    there = np.bincount(workers, minlength=highest + 1) > 0
    return np.flatnonzero(there), (np.cumsum(there) - 1)[workers]


def _range_minimum(values: Ints, low: Ints, high: Ints) -> Ints:
    """The least of values[low..high], both included, for each pair: by minima over blocks of powers of two."""
    span = high - low + 1
    levels = np.floor(np.log2(span)).astype(np.int64)
    result = np.empty(len(low), np.int64)
    block, size = values, 1
    for level in range(int(levels.max()) + 1):
        if level:
            block, size = np.minimum(block[:-size], block[size:]), 2 * size
        at = np.flatnonzero(levels == level)
        result[at] = np.minimum(block[low[at]], block[high[at] - size + 1])
    return result
