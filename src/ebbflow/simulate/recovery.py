"""What a change of the fleet costs: the step under way, the time until it is noticed, the restart.

    ideal        nothing but, if asked, the step under way: the formula of Andre, Strati and Klimovic (2022)
    step         survivors go on: a loss costs the step under way and its detection, a gain the time to join
    checkpoint   everybody restarts from the last checkpoint, which was written every so often

Which worker leaves is not known, and a change that the policy does not pass on (above a cap, say) is none.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ebbflow.core.spec import Registry, param, render
from ebbflow.core.units import Seconds
from ebbflow.errors import ConfigError

__all__ = ["DRAIN", "FINISH", "LOSE", "RECOVERIES", "Checkpoint", "Ideal", "PerStep", "Recovery", "Reaction"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_NONE = Seconds(0.0)
_SECOND = Seconds(1.0)

FINISH, LOSE, DRAIN = 0, 1, 2
"""How a stretch of constant fleet ends: the step under way is finished after the change; it is lost; or, the change
being announced, it is begun without those who leave."""


@dataclass(frozen=True, kw_only=True)
class Reaction:
    """What happens at the changes between stretches, in arrays of one entry a stretch."""

    ends: Ints
    """How each stretch ends: FINISH, LOSE or DRAIN."""
    pauses: Floats
    """Seconds without a step at the beginning of each stretch."""
    every: Ints
    """Steps from one checkpoint to the next; 0: none are written, and a step that was made is never lost."""
    saves: npt.NDArray[np.bool_]
    """Whether a checkpoint is written at the end of the stretch, the change being announced."""
    write: float = 0.0
    """Seconds that a checkpoint takes."""

    def part(self, first: int, stop: int) -> Reaction:
        """From one stretch up to but without another."""
        within = slice(first, stop)
        return dataclasses.replace(
            self,
            ends=self.ends[within],
            pauses=self.pauses[within],
            every=self.every[within],
            saves=self.saves[within],
        )


@runtime_checkable
class Recovery(Protocol):
    """How a system reacts to changes."""

    def react(self, workers: Ints, seconds: Floats) -> Reaction:
        """From the workers that take part in each stretch (0: nobody is there) and the duration of its steps."""
        ...


RECOVERIES: Registry[Recovery] = Registry("recovery")


def _check(name: str, recovery: object) -> None:
    for field in dataclasses.fields(recovery):  # type: ignore[arg-type]  # only called by the dataclasses below
        value = getattr(recovery, field.name)
        if isinstance(value, float) and not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{name}: {field.name} is {value:g} s; expected a finite time that is not negative")


def _changes(workers: Ints) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """(is a loss, is a gain) for the change at the end of each stretch; the end of the last one is neither."""
    difference = np.diff(workers, append=workers[-1:])
    return difference < 0, difference > 0


@RECOVERIES.register("ideal", cite="Andre, Strati, Klimovic 2022")
@dataclass(frozen=True)
class Ideal:
    """A change costs no time; the step under way is finished as it began, or lost."""

    on_change: Literal["finish", "lose"] = param("finish", doc="what happens to the step under way: finish or lose")

    def react(self, workers: Ints, seconds: Floats) -> Reaction:
        """All changes alike."""
        count = len(workers)
        loses = np.append(workers[1:] != workers[:-1], True) & (self.on_change == "lose")
        return Reaction(
            ends=np.where(loses, LOSE, FINISH),
            pauses=np.zeros(count),
            every=np.zeros(count, np.int64),
            saves=np.zeros(count, np.bool_),
        )

    def __str__(self) -> str:
        return render("ideal", self)


@RECOVERIES.register("step")
@dataclass(frozen=True)
class PerStep:
    """Survivors go on after a loss: it costs the step under way, its detection and a pause; no other step is repeated.

    A loss that is announced at least a step ahead costs the pause alone: the last step before it is begun without those
    who leave. A gain costs a pause after the step under way.
    """

    detect: Seconds = param(_SECOND, doc="from a loss until the others know")
    restart: Seconds = param(_NONE, doc="from knowing of a loss, or from an empty fleet, to the next step")
    join: Seconds = param(_NONE, doc="pause when workers are added")
    notice: Seconds = param(_NONE, doc="how long ahead a loss is announced")

    def __post_init__(self) -> None:
        _check("step", self)

    def react(self, workers: Ints, seconds: Floats) -> Reaction:
        """Losses are lost or drained, gains wait for the step under way."""
        loss, gain = _changes(workers)
        drained = loss & (self.notice > 0) & (self.notice >= seconds)
        return Reaction(
            ends=np.where(drained, DRAIN, np.where(loss, LOSE, FINISH)),
            pauses=_pauses(workers, loss, gain, drained, detect=self.detect, restart=self.restart, join=self.join),
            every=np.zeros(len(workers), np.int64),
            saves=np.zeros(len(workers), np.bool_),
        )

    def __str__(self) -> str:
        return render("step", self)


_TEN_MINUTES, _FIVE_SECONDS, _HALF_MINUTE = Seconds(600.0), Seconds(5.0), Seconds(30.0)


@RECOVERIES.register("checkpoint")
@dataclass(frozen=True)
class Checkpoint:
    """Every change restarts everybody; a loss throws away what came after the last checkpoint.

    A checkpoint is written after the first step that ends `every` after the one before, and before workers are added.
    A loss that is announced at least a step and a write ahead is like a gain: nothing is thrown away.
    """

    every: Seconds = param(_TEN_MINUTES, doc="training between two checkpoints")
    write: Seconds = param(_FIVE_SECONDS, doc="training stands still for so long while one is written")
    detect: Seconds = param(_FIVE_SECONDS, doc="from a loss until it is noticed")
    restart: Seconds = param(_HALF_MINUTE, doc="from noticing to the next step: start, connect, load")
    notice: Seconds = param(_NONE, doc="how long ahead a loss is announced")

    def __post_init__(self) -> None:
        _check("checkpoint", self)

    def react(self, workers: Ints, seconds: Floats) -> Reaction:
        """Losses are lost or drained, and every change means a restart."""
        loss, gain = _changes(workers)
        drained = loss & (self.notice > 0) & (self.notice >= seconds + self.write)
        return Reaction(
            ends=np.where(drained, DRAIN, np.where(loss, LOSE, FINISH)),
            pauses=_pauses(workers, loss, gain, drained, detect=self.detect, restart=self.restart, join=self.restart),
            every=np.maximum(np.ceil(self.every / seconds - 1e-6), 1).astype(np.int64),
            saves=gain | drained,
            write=float(self.write),
        )

    def __str__(self) -> str:
        return render("checkpoint", self)


def _pauses(
    workers: Ints,
    loss: npt.NDArray[np.bool_],
    gain: npt.NDArray[np.bool_],
    drained: npt.NDArray[np.bool_],
    *,
    detect: float,
    restart: float,
    join: float,
) -> Floats:
    """The pause at the beginning of each stretch: of the change before it. The first begins without one."""
    after = np.where(loss, np.where(drained, restart, detect + restart), np.where(gain, join, 0.0))
    after = np.where(workers == 0, restart, after)  # an empty fleet starts anew
    return np.append(0.0, after[:-1])
