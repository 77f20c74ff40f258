"""Intervals that know how few runs they rest on: Student's t for a mean, and for the difference of two means.

With two runs half of the interval of a mean is nine times their standard deviation: two runs say little about the
spread. One run says nothing about it, so there is no interval. The interval of a difference assumes that both rules
spread alike, which matters little where both have as many runs. Every comparison is made for itself: among many rules
some will be called different by chance, one in twenty where there is no difference at all.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

__all__ = ["CONFIDENCE", "difference_interval", "mean_margin", "t_quantile"]

CONFIDENCE = "95 %"
_TABLE = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788)
_NORMAL = 1.959964


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t with this many degrees of freedom (at least 1), to four digits.

    Above 12 by the expansion of Fisher and Cornish (1960).

    >>> t_quantile(1), round(t_quantile(13), 3), round(t_quantile(1000), 3)
    (12.7062, 2.16, 1.962)
    """
    if freedom <= len(_TABLE):
        return _TABLE[freedom - 1]
    z = _NORMAL
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def mean_margin(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % interval of the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    return t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def difference_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % interval of mean(first) - mean(second); None if one of them has fewer than two values.

    >>> low, high = difference_interval([1.0, 3.0], [0.0, 2.0])  # 1 +- 4.3027 x sqrt(2 (1/2 + 1/2))
    >>> round(low, 3), round(high, 3)
    (-5.085, 7.085)
    """
    if len(first) < 2 or len(second) < 2:
        return None
    freedom = len(first) + len(second) - 2
    squares = sum(statistics.variance(values) * (len(values) - 1) for values in (first, second))
    margin = t_quantile(freedom) * math.sqrt(squares / freedom * (1 / len(first) + 1 / len(second)))
    gap = statistics.fmean(first) - statistics.fmean(second)
    return gap - margin, gap + margin
