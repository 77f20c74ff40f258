"""Long series made short enough to draw, without hiding what they do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["changes", "envelope", "over_seeds", "smooth"]

Array = npt.NDArray[np.float64]


def envelope(x: Array, y: Array, *, points: int = 800) -> tuple[Array, Array]:
    """At most about `points` points with the same extremes everywhere: of each stretch its lowest and highest one.

    >>> x = np.arange(1e5); y = np.zeros(100_000); y[77_777] = 5.0
    >>> short_x, short_y = envelope(x, y, points=100)
    >>> short_x.size <= 102, float(short_y.max())
    (True, 5.0)
    """
    if x.size <= points:
        return x, y
    bins = max(points // 2, 1)
    starts = np.linspace(0, x.size, bins, endpoint=False).astype(np.intp)
    stops = np.append(starts[1:], x.size)
    ranked = np.where(np.isnan(y), np.inf, y), np.where(np.isnan(y), -np.inf, y)
    low = [int(a + np.argmin(ranked[0][a:b])) for a, b in zip(starts, stops, strict=True)]
    high = [int(a + np.argmax(ranked[1][a:b])) for a, b in zip(starts, stops, strict=True)]
    keep = np.unique([0, *low, *high, x.size - 1])
    return x[keep], y[keep]


def changes(x: Array, y: Array) -> tuple[Array, Array]:
    """The points at which a step function changes, and its last one: exact when drawn with steps.

    >>> changes(np.arange(5.0), np.array([1.0, 1, 2, 2, 2]))
    (array([0., 2., 4.]), array([1., 2., 2.]))
    """
    if x.size < 3:
        return x, y
    keep = np.concatenate([[True], y[1:] != y[:-1]])
    keep[-1] = True
    return x[keep], y[keep]


def smooth(x: Array, y: Array, *, end: float, bins: int = 150) -> tuple[Array, Array]:
    """The mean of y in each of `bins` equal stretches of [0, end]; stretches without a finite value are left out.

    >>> smooth(np.array([0.1, 0.2, 0.9]), np.array([1.0, 3.0, 7.0]), end=1.0, bins=2)
    (array([0.25, 0.75]), array([2., 7.]))
    """
    good = np.isfinite(y) & np.isfinite(x)
    if not good.any() or end <= 0:
        return np.empty(0), np.empty(0)
    index = np.clip((x[good] / end * bins).astype(np.intp), 0, bins - 1)
    count = np.bincount(index, minlength=bins)
    total = np.bincount(index, weights=y[good], minlength=bins)
    there = count > 0
    return ((np.arange(bins) + 0.5) * end / bins)[there], total[there] / count[there]


def over_seeds(curves: Sequence[tuple[Array, Array]]) -> tuple[Array, Array, Array, Array]:
    """(x, mean, lowest, highest) where all curves have values, at the points of the longest, others interpolated.

    >>> a = np.array([1.0, 2.0]), np.array([0.5, 0.75])
    >>> b = np.array([1.0, 2.0]), np.array([1.0, 0.25])
    >>> x, mean, low, high = over_seeds([a, b])
    >>> mean, low, high
    (array([0.75, 0.5 ]), array([0.5 , 0.25]), array([1.  , 0.75]))
    """
    curves = [(x[np.isfinite(y)], y[np.isfinite(y)]) for x, y in curves]
    curves = [(x, y) for x, y in curves if x.size]
    if not curves:
        empty = np.empty(0)
        return empty, empty, empty, empty
    longest = max((x for x, _ in curves), key=lambda x: x.size)
    start, stop = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    grid = longest[(longest >= start) & (longest <= stop)]
    values = np.array([np.interp(grid, x, y) for x, y in curves])
    return grid, values.mean(axis=0), values.min(axis=0), values.max(axis=0)
