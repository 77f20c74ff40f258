"""Schedules of the base rate, as functions of progress.

Progress is counted in samples, never in optimizer steps, so a schedule means the same for every history of workers:
`multistep(30ep, 60ep)` decays after 30 epochs whether they took a thousand steps or ten thousand. Schedules joined by
+ are multiplied: `warmup(5ep)+cosine`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from ebbflow.core.spec import Registry, bind, param, parse_calls
from ebbflow.core.units import Span
from ebbflow.errors import ConfigError, SpecError

__all__ = ["SCHEDULES", "Progress", "Schedule", "make_schedule"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far training has come."""

    samples: float
    epoch_samples: int
    total_samples: float
    """Samples in the whole run; 0 if it has no end."""
    ref_batch: int

    def of(self, span: Span | None) -> float:
        """The fraction of a span (of the whole run if None) that is done, 0 to 1."""
        if span is not None:
            length = span.samples(epoch_samples=self.epoch_samples, ref_batch=self.ref_batch)
        else:
            length = self.total_samples
            if length <= 0:
                raise ConfigError(
                    "the schedule spans the whole run, but the run has no end; "
                    "give the schedule a length, such as cosine(90ep), or the optimizer total_samples"
                )
        return min(1.0, self.samples / length) if length > 0 else 1.0


class Schedule(ABC):
    """A factor of the base rate: 1 leaves it as it is."""

    @abstractmethod
    def value(self, progress: Progress) -> float:
        """The factor at a point of training."""


SCHEDULES: Registry[Schedule] = Registry("schedule")


@SCHEDULES.register("constant")
@dataclass(frozen=True)
class Constant(Schedule):
    """The base rate throughout."""

    def value(self, progress: Progress) -> float:
        """Always 1."""
        return 1.0


@SCHEDULES.register("multistep", cite="He et al. 2016; Goyal et al. 2017")
@dataclass(frozen=True)
class MultiStep(Schedule):
    """Multiplied by `factor` at each of the given points."""

    at: tuple[Span, ...] = param(doc="the points, for example 30ep, 60ep, 80ep")
    factor: float = param(0.1, doc="what the rate is multiplied by at each point")

    def value(self, progress: Progress) -> float:
        """factor^(points passed)."""
        passed = sum(progress.of(point) >= 1.0 for point in self.at)
        return float(self.factor**passed)


@SCHEDULES.register("cosine", cite="Loshchilov and Hutter 2017, arXiv 1608.03983")
@dataclass(frozen=True)
class Cosine(Schedule):
    """Half a cosine from 1 down to `end`."""

    length: Span | None = param(None, doc="over which span; the whole run if left out")
    end: float = param(0.0, doc="the factor at the end")

    def value(self, progress: Progress) -> float:
        """end + (1 - end) (1 + cos(pi x)) / 2."""
        return self.end + (1 - self.end) * (1 + math.cos(math.pi * progress.of(self.length))) / 2


@SCHEDULES.register("exponential")
@dataclass(frozen=True)
class Exponential(Schedule):
    """Decays exponentially, to `factor` after the given span."""

    length: Span | None = param(None, doc="over which span; the whole run if left out")
    factor: float = param(0.01, doc="the factor at the end of the span")

    def __post_init__(self) -> None:
        if not 0 < self.factor <= 1:
            raise SpecError(f"exponential: factor is {self.factor:g}; expected a number above 0, at most 1")

    def value(self, progress: Progress) -> float:
        """factor^x."""
        return float(self.factor ** progress.of(self.length))


@SCHEDULES.register("polynomial")
@dataclass(frozen=True)
class Polynomial(Schedule):
    """Falls as (1 - x)^power from 1 to `end`; power 1 is a straight line."""

    power: float = param(1.0, doc="the exponent")
    end: float = param(0.0, doc="the factor at the end")
    length: Span | None = param(None, doc="over which span; the whole run if left out")

    def value(self, progress: Progress) -> float:
        """end + (1 - end) (1 - x)^power."""
        return float(self.end + (1 - self.end) * (1 - progress.of(self.length)) ** self.power)


@SCHEDULES.register("warmup")
@dataclass(frozen=True)
class WarmUp(Schedule):
    """Climbs linearly from `start` to 1: the warm-up of the base rate itself.

    The modifier of the same name (`linear+warmup(5ep)`) instead warms up what a rule makes of a large batch.
    """

    length: Span = param(doc="over which span")
    start: float = param(0.0, doc="the factor at the first sample")

    def value(self, progress: Progress) -> float:
        """start + (1 - start) x."""
        return self.start + (1 - self.start) * progress.of(self.length)


@dataclass(frozen=True)
class Product(Schedule):
    """Several schedules, multiplied."""

    parts: tuple[Schedule, ...]
    text: str

    def value(self, progress: Progress) -> float:
        """The product of all factors."""
        return math.prod(part.value(progress) for part in self.parts)

    def __str__(self) -> str:
        return self.text


def make_schedule(text: str | Schedule | None) -> Schedule:
    """The schedule of a text; none means a constant base rate.

    >>> schedule = make_schedule("multistep(30ep, 60ep, factor=0.1)")
    >>> [schedule.value(Progress(samples=s, epoch_samples=100, total_samples=9000, ref_batch=10)) for s in (0, 3000)]
    [1.0, 0.1]
    """
    if isinstance(text, Schedule):
        return text
    calls = parse_calls(text or "constant")
    parts: list[Any] = [bind(call, SCHEDULES.entry(call.name).make) for call in calls]
    return Product(tuple(parts), text="+".join(str(call) for call in calls))
