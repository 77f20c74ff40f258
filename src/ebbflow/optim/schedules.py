"""Schedules of the base rate, as functions of the progress of training.

Progress is counted in samples, never in optimizer steps, so that a schedule does not depend on the history of workers:
`multistep(30ep, 60ep)` decays after 30 epochs, whether they took a thousand steps or ten thousand. Schedules that are
joined by + are multiplied: `warmup(5ep)+cosine`. A schedule of your own is registered by `register_schedule`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ebbflow.core.plugins import raise_naming
from ebbflow.core.spec import Registry, bind, param, parse_calls
from ebbflow.core.units import Span
from ebbflow.errors import ConfigError, SpecError

__all__ = ["SCHEDULES", "Schedule", "TrainingProgress", "factor_of", "make_schedule", "register_schedule"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingProgress:
    """How far training has come."""

    samples: float
    """Samples of the reference run so far."""
    epoch_samples: int
    """Samples in an epoch; 0 if there are no epochs."""
    total_samples: float
    """Samples in the whole run; 0 if the run has no end."""
    ref_batch: int
    """The reference batch."""

    def of(self, span: Span | None) -> float:
        """The completed part of a span (of the whole run if None), 0 to 1."""
        if span is not None:
            length = span.samples(epoch_samples=self.epoch_samples, ref_batch=self.ref_batch)
        else:
            length = self.total_samples
            if length <= 0:
                raise ConfigError(
                    "the schedule spans the whole run, but the run has no end; "
                    "give the schedule a length, such as cosine(90ep), or the optimizer its number of epochs"
                )
        return min(1.0, self.samples / length) if length > 0 else 1.0


class Schedule(ABC):
    """A factor of the base rate as a function of progress. Subclasses are frozen dataclasses."""

    @abstractmethod
    def value(self, progress: TrainingProgress) -> float:
        """The factor at a point of training, 0 or more; 1 leaves the base rate unchanged."""

    def __str__(self) -> str:
        return SCHEDULES.text(self)


SCHEDULES: Registry[Schedule] = Registry("schedule")


def register_schedule(name: str, *, cite: str = "") -> Callable[[Any], Any]:
    """Return a decorator that adds a schedule, a subclass of `Schedule` that is a frozen dataclass."""
    return SCHEDULES.register(name, cite=cite)


def factor_of(schedule: Schedule, progress: TrainingProgress) -> float:
    """What `schedule.value` returns, checked; an exception in a schedule of a plugin is a ConfigError with its line.

    >>> progress = TrainingProgress(samples=50, epoch_samples=100, total_samples=100, ref_batch=10)
    >>> factor_of(PolynomialSchedule(power=2), progress)
    0.25
    """
    try:
        factor: Any = schedule.value(progress)
    except Exception as error:
        raise_naming(error, schedule, f"the schedule {schedule}: value()")
    try:
        number = math.nan if isinstance(factor, str) else float(factor)
    except Exception:  # what the conversion raises depends on the type that was returned
        number = math.nan
    if not 0 <= number < math.inf:
        raise ConfigError(
            f"the schedule {schedule}: value() returned {factor!r} after {progress.samples:g} samples; expected the "
            f"factor of the base rate, a finite number of 0 or more"
        )
    return number


def _not_negative(schedule: str, **values: float) -> None:
    """Refuse arguments that would make the base rate negative, or infinite at the end of the run."""
    for name, value in values.items():
        if not value >= 0:
            raise SpecError(f"{schedule}: {name} is {value:g}; expected a number of 0 or more")


@register_schedule("constant")
@dataclass(frozen=True)
class ConstantSchedule(Schedule):
    """The base rate throughout."""

    def value(self, progress: TrainingProgress) -> float:
        """Always 1."""
        return 1.0


@register_schedule("multistep", cite="He et al. 2016; Goyal et al. 2017")
@dataclass(frozen=True)
class MultiStepSchedule(Schedule):
    """Multiplied by `factor` at each of the given points."""

    at: tuple[Span, ...] = param(doc="the points, for example 30ep, 60ep, 80ep")
    factor: float = param(0.1, doc="what the rate is multiplied by at each point")

    def __post_init__(self) -> None:
        _not_negative("multistep", factor=self.factor)

    def value(self, progress: TrainingProgress) -> float:
        """factor^(number of points passed)."""
        passed = sum(progress.of(point) >= 1.0 for point in self.at)
        return float(self.factor**passed)


@register_schedule("cosine", cite="Loshchilov and Hutter 2017, arXiv 1608.03983")
@dataclass(frozen=True)
class CosineSchedule(Schedule):
    """Half a cosine from 1 down to `end`."""

    length: Span | None = param(None, doc="length; default: the whole run")
    end: float = param(0.0, doc="the factor at the end")

    def __post_init__(self) -> None:
        _not_negative("cosine", end=self.end)

    def value(self, progress: TrainingProgress) -> float:
        """end + (1 - end) (1 + cos(pi x)) / 2."""
        return self.end + (1 - self.end) * (1 + math.cos(math.pi * progress.of(self.length))) / 2


@register_schedule("exponential")
@dataclass(frozen=True)
class ExponentialSchedule(Schedule):
    """Decays exponentially to `factor` at the end of the given length."""

    length: Span | None = param(None, doc="length; default: the whole run")
    factor: float = param(0.01, doc="the factor at the end")

    def __post_init__(self) -> None:
        if not 0 < self.factor <= 1:
            raise SpecError(f"exponential: factor is {self.factor:g}; expected a number above 0, at most 1")

    def value(self, progress: TrainingProgress) -> float:
        """factor^x."""
        return float(self.factor ** progress.of(self.length))


@register_schedule("polynomial")
@dataclass(frozen=True)
class PolynomialSchedule(Schedule):
    """Falls as (1 - x)^power from 1 to `end`; with power 1 linearly."""

    power: float = param(1.0, doc="the exponent")
    end: float = param(0.0, doc="the factor at the end")
    length: Span | None = param(None, doc="length; default: the whole run")

    def __post_init__(self) -> None:
        _not_negative("polynomial", power=self.power, end=self.end)

    def value(self, progress: TrainingProgress) -> float:
        """end + (1 - end) (1 - x)^power."""
        return float(self.end + (1 - self.end) * (1 - progress.of(self.length)) ** self.power)


@register_schedule("warmup")
@dataclass(frozen=True)
class WarmupSchedule(Schedule):
    """Climbs linearly from `start` to 1: a warm-up of the base rate.

    The modifier of the same name (`linear+warmup(5ep)`) instead warms up the multiplier that a rule gives a large
    batch.
    """

    length: Span = param(doc="length of the warm-up")
    start: float = param(0.0, doc="the factor at the first sample")

    def __post_init__(self) -> None:
        _not_negative("warmup", start=self.start)

    def value(self, progress: TrainingProgress) -> float:
        """start + (1 - start) x."""
        return self.start + (1 - self.start) * progress.of(self.length)


@dataclass(frozen=True)
class ProductSchedule(Schedule):
    """The product of several schedules."""

    parts: tuple[Schedule, ...]
    text: str

    def value(self, progress: TrainingProgress) -> float:
        """The product of all factors."""
        return math.prod(factor_of(part, progress) for part in self.parts)

    def __str__(self) -> str:
        return self.text


def make_schedule(text: str | Schedule | None) -> Schedule:
    """The schedule of a text; None is a constant base rate.

    >>> schedule = make_schedule("multistep(30ep, 60ep, factor=0.1)")
    >>> run = {"epoch_samples": 100, "total_samples": 9000, "ref_batch": 10}
    >>> [schedule.value(TrainingProgress(samples=samples, **run)) for samples in (0, 3000)]
    [1.0, 0.1]
    """
    if isinstance(text, Schedule):
        return text
    calls = parse_calls(text or "constant")
    parts: list[Any] = [bind(call, SCHEDULES.entry(call.name).make) for call in calls]
    return ProductSchedule(tuple(parts), text="+".join(str(call) for call in calls))
