"""How much slower the slowest of W workers is: a synchronous step waits for it.

A worker's computing time in a step is its usual time times a random factor, independent of all others. What a step
waits for is the largest of W such factors; its mean and its variance are all that a long run of steps needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ebbflow.core.spec import Registry, param, render
from ebbflow.errors import ConfigError

__all__ = ["STRAGGLERS", "Exponential", "Lognormal", "Rare", "Stragglers"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@runtime_checkable
class Stragglers(Protocol):
    """The largest of W random factors."""

    def slowest(self, workers: Ints) -> tuple[Floats, Floats]:
        """(mean, variance) of the largest factor among so many workers, for each count."""
        ...


STRAGGLERS: Registry[Stragglers] = Registry("straggler model")


def _not_negative(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"stragglers: {name} is {value:g}; expected a number that is not negative")


@STRAGGLERS.register("exponential", cite="Dutta et al. 2018")
@dataclass(frozen=True)
class Exponential:
    """The usual time and an exponential delay on top; the slowest of W adds 1 + 1/2 + ... + 1/W mean delays.

    >>> Exponential(0.1).slowest(np.array([1, 3]))[0].round(6)
    array([1.1     , 1.183333])
    """

    delay: float = param(doc="mean delay, as a share of the computing time")

    def __post_init__(self) -> None:
        _not_negative("delay", self.delay)

    def slowest(self, workers: Ints) -> tuple[Floats, Floats]:
        """1 + delay H(W), and delay^2 (1 + 1/4 + ... + 1/W^2)."""
        ranks = 1.0 / np.arange(1, int(workers.max()) + 1)
        return (
            1.0 + self.delay * np.cumsum(ranks)[workers - 1],
            self.delay**2 * np.cumsum(ranks**2)[workers - 1],
        )

    def __str__(self) -> str:
        return render("exponential", self)


@STRAGGLERS.register("rare")
@dataclass(frozen=True)
class Rare:
    """Now and then a worker takes several times as long: with W workers that is W times as likely.

    >>> Rare(0.5, factor=3).slowest(np.array([1, 2]))
    (array([2. , 2.5]), array([1.  , 0.75]))
    """

    chance: float = param(doc="probability for one worker in one step, between 0 and 1")
    factor: float = param(2.0, doc="how many times the usual time it takes then")

    def __post_init__(self) -> None:
        if not 0 <= self.chance <= 1 or not (math.isfinite(self.factor) and self.factor >= 1):
            raise ConfigError(f"stragglers: a chance of {self.chance:g} for {self.factor:g} times the time; expected a "
                              f"chance between 0 and 1 and a factor of at least 1")  # fmt: skip

    def slowest(self, workers: Ints) -> tuple[Floats, Floats]:
        """1 + (factor - 1) p and (factor - 1)^2 p (1 - p), where p = 1 - (1 - chance)^W."""
        hit = 1.0 - (1.0 - self.chance) ** workers.astype(np.float64)
        return 1.0 + (self.factor - 1) * hit, (self.factor - 1) ** 2 * hit * (1 - hit)

    def __str__(self) -> str:
        return render("rare", self)


@STRAGGLERS.register("lognormal")
@dataclass(frozen=True)
class Lognormal:
    """Factors spread by a normal distribution of their logarithm, the usual time in the middle.

    The largest of W has the distribution function F^W; its moments are sums over quantiles, right to a part in a
    thousand for spreads up to 1.
    """

    spread: float = param(doc="standard deviation of the logarithm; 0.1: most are within 10 %")

    def __post_init__(self) -> None:
        _not_negative("spread", self.spread)
        if self.spread > 3:
            raise ConfigError(f"stragglers: a spread of {self.spread:g} means factors of e^{self.spread:g}; "
                              f"expected at most 3")  # fmt: skip

    def slowest(self, workers: Ints) -> tuple[Floats, Floats]:
        """Mean and variance of the largest, from the quantiles of F^W."""
        counts, where = np.unique(workers, return_inverse=True)
        normal = NormalDist()
        # The chance that the largest is above a value is spread evenly in its logarithm towards both ends.
        edges = np.concatenate([np.geomspace(1e-12, 0.5, 400), 1.0 - np.geomspace(1e-12, 0.5, 400)[-2::-1]])
        levels, weights = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
        moments = []
        for count in counts.tolist():
            # u^(1/W) is 1 - tail; the tail keeps its digits where u^(1/W) would round to 1.
            tails = -np.expm1(np.log(levels) / count)
            factors = np.exp(-self.spread * np.array([normal.inv_cdf(max(tail, 1e-300)) for tail in tails.tolist()]))
            mean = float(weights @ factors) / float(weights.sum())
            moments.append((mean, float(weights @ (factors - mean) ** 2) / float(weights.sum())))
        table = np.array(moments)
        return table[where, 0], table[where, 1]

    def __str__(self) -> str:
        return render("lognormal", self)
