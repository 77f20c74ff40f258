"""Step-time models: how long a step takes, as a constant, a table or any function of the number of workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ebbflow.core.units import Seconds, parse_seconds
from ebbflow.errors import PlanError

__all__ = ["ConstantStepTime", "FunctionStepTime", "StepTime", "StepTimeLike", "TableStepTime", "make_step_time"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@runtime_checkable
class StepTime(Protocol):
    """The duration of a step as a function of the number of workers, which is at least one."""

    def seconds(self, workers: Ints) -> Floats:
        """The duration of a step in seconds, for each number of workers."""
        ...


@dataclass(frozen=True)
class ConstantStepTime:
    """Every step takes the same time, whatever the number of workers: weak scaling without overhead."""

    step: Seconds

    def __post_init__(self) -> None:
        if not (math.isfinite(self.step) and self.step > 0):
            raise PlanError(f"the step time is {self.step:g} s; expected a finite time above 0")

    def seconds(self, workers: Ints) -> Floats:
        """The same duration for each number of workers."""
        return np.full(len(workers), float(self.step))

    def __str__(self) -> str:
        return f"{self.step:.12g}s"


@dataclass(frozen=True)
class TableStepTime:
    """Measured for some numbers of workers, interpolated between them, constant below the first and above the last.

    >>> TableStepTime({1: 0.5, 8: 1.2}).seconds(np.array([1, 2, 64]))
    array([0.5, 0.6, 1.2])
    """

    table: Mapping[int, float]

    def __post_init__(self) -> None:
        if not self.table:
            raise PlanError("the table of step times is empty; expected seconds for at least one number of workers")
        for workers, step in self.table.items():
            if workers < 1 or not (math.isfinite(step) and step > 0):
                raise PlanError(f"the step time for {workers} workers is {step:g} s; expected at least one worker and "
                                f"a finite time above 0")  # fmt: skip

    def seconds(self, workers: Ints) -> Floats:
        """The interpolated duration for each number of workers."""
        known = sorted(self.table)
        return np.interp(workers, known, [self.table[count] for count in known])

    def __str__(self) -> str:
        return " ".join(f"{workers}:{self.table[workers]:.12g}s" for workers in sorted(self.table))


@dataclass(frozen=True)
class FunctionStepTime:
    """Any function from a number of workers to seconds; it is called once for each different number."""

    function: Callable[[int], float]

    def seconds(self, workers: Ints) -> Floats:
        """The value of the function for each number of workers."""
        counts, where = np.unique(workers, return_inverse=True)
        values = np.array([float(self.function(int(count))) for count in counts])
        bad = ~(np.isfinite(values) & (values > 0))
        if bad.any():
            i = int(np.argmax(bad))
            raise PlanError(f"the step time for {counts[i]} workers is {values[i]:g} s; expected a finite time above 0")
        return values[where]

    def __str__(self) -> str:
        return f"function {getattr(self.function, '__name__', '')}".strip()


StepTimeLike = StepTime | str | float | Mapping[int, float] | Callable[[int], float]
"""What `make_step_time` takes."""


def make_step_time(value: StepTimeLike) -> StepTime:
    """A step-time model from "0.6s", from seconds, from a table {workers: seconds}, or from a function of workers.

    >>> make_step_time("600ms")
    ConstantStepTime(step=0.6)
    """
    if isinstance(value, StepTime):
        return value
    if isinstance(value, str):
        return ConstantStepTime(parse_seconds(value))
    if isinstance(value, int | float):
        return ConstantStepTime(Seconds(float(value)))
    if isinstance(value, Mapping):
        return TableStepTime(dict(value))
    if not callable(value):
        raise PlanError(f"the step time is {value!r}; expected '0.6s', seconds, {{workers: seconds}} or a function")
    return FunctionStepTime(value)
