"""What a change of the fleet costs: the step in progress, the time until the change is noticed, the restart.

    ideal        nothing but, if asked, the step in progress: the formula of Andre, Strati and Klimovic (2022)
    step         the survivors go on: a loss costs the step in progress and its detection, a gain the time to join
    checkpoint   every change restarts all workers from the latest checkpoint

A *loss* means that workers leave, a *gain* that workers are added. Which worker leaves is not known. A change that the
policy does not pass on, for example above a limit, costs nothing.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ebbflow.core.columns import Columns
from ebbflow.core.spec import Registry, param
from ebbflow.core.units import Seconds
from ebbflow.errors import ConfigError

__all__ = [
    "DRAIN", "FINISH", "LOSE", "RECOVERIES", "CheckpointRecovery", "Ideal", "Reaction", "Recovery", "StepRecovery",
]  # fmt: skip

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
_NONE = Seconds(0.0)

FINISH, LOSE, DRAIN = 0, 1, 2
"""How a segment of constant fleet ends: the step in progress is finished after the change (FINISH); it is lost (LOSE);
or, since the change was announced, that step is begun without the workers that leave (DRAIN)."""


@dataclass(frozen=True, kw_only=True)
class Reaction(Columns):
    """What happens at the changes between segments, in arrays of one entry per segment."""

    ends: Ints
    """How each segment ends: FINISH, LOSE or DRAIN."""
    pauses: Floats
    """Seconds without a step at the beginning of each segment."""
    every: Ints
    """Steps from one checkpoint to the next; 0: no checkpoints, and a completed step is never lost."""
    saves: Bools
    """Whether a checkpoint is written at the end of the segment because the change was announced."""
    write: float = 0.0
    """Seconds that writing a checkpoint takes."""


@runtime_checkable
class Recovery(Protocol):
    """How a training system reacts to changes of the fleet."""

    def react(self, workers: Ints, seconds: Floats) -> Reaction:
        """The reaction, from the workers that take part in each segment (0: none) and the duration of its steps."""
        ...

    def __str__(self) -> str:
        return RECOVERIES.text(self)


RECOVERIES: Registry[Recovery] = Registry("recovery")


@RECOVERIES.register("ideal", cite="Andre, Strati, Klimovic 2022")
@dataclass(frozen=True)
class Ideal(Recovery):
    """A change costs no time; the step in progress is finished with the old workers, or lost."""

    on_change: Literal["finish", "lose"] = param("finish", doc="what happens to the step in progress: finish or lose")

    def react(self, workers: Ints, seconds: Floats) -> Reaction:
        """The same for all changes."""
        count = len(workers)
        loses = np.append(workers[1:] != workers[:-1], True) & (self.on_change == "lose")
        return Reaction(
            ends=np.where(loses, LOSE, FINISH),
            pauses=np.zeros(count),
            every=np.zeros(count, np.int64),
            saves=np.zeros(count, np.bool_),
        )


_ONE_SECOND, _FIVE_SECONDS, _HALF_MINUTE, _TEN_MINUTES = Seconds(1.0), Seconds(5.0), Seconds(30.0), Seconds(600.0)


@RECOVERIES.register("step")
@dataclass(frozen=True)
class StepRecovery(Recovery):
    """The survivors go on after a loss, which costs the step in progress, its detection and a pause.

    No other step is repeated. A loss that is announced at least one step ahead costs only the pause: the last step
    before it is begun without the workers that leave. A gain costs a pause after the step in progress.
    """

    detect: Seconds = param(_ONE_SECOND, doc="from a loss until the other workers notice it")
    restart: Seconds = param(_NONE, doc="from noticing a loss, or from an empty fleet, to the next step")
    join: Seconds = param(_NONE, doc="pause when workers are added")
    notice: Seconds = param(_NONE, doc="how long ahead a loss is announced")

    def __post_init__(self) -> None:
        _check_times("step", self)

    def react(self, workers: Ints, seconds: Floats) -> Reaction:
        """The step in progress is lost or drained at a loss, and finished at a gain."""
        loss, gain = _changes(workers)
        drained = loss & (self.notice > 0) & (self.notice >= seconds)
        return Reaction(
            ends=np.where(drained, DRAIN, np.where(loss, LOSE, FINISH)),
            pauses=_pauses(workers, loss, gain, drained, detect=self.detect, restart=self.restart, join=self.join),
            every=np.zeros(len(workers), np.int64),
            saves=np.zeros(len(workers), np.bool_),
        )


@RECOVERIES.register("checkpoint")
@dataclass(frozen=True)
class CheckpointRecovery(Recovery):
    """Every change restarts all workers; a loss discards all steps since the latest checkpoint.

    A checkpoint is written after the first step that ends `every` after the previous one, and before workers are
    added. A loss that is announced early enough for one step and one write is like a gain: nothing is discarded.
    """

    every: Seconds = param(_TEN_MINUTES, doc="training between two checkpoints")
    write: Seconds = param(_FIVE_SECONDS, doc="how long training stops while one is written")
    detect: Seconds = param(_FIVE_SECONDS, doc="from a loss until it is noticed")
    restart: Seconds = param(_HALF_MINUTE, doc="from noticing to the next step: start, connect, load")
    notice: Seconds = param(_NONE, doc="how long ahead a loss is announced")

    def __post_init__(self) -> None:
        _check_times("checkpoint", self)

    def react(self, workers: Ints, seconds: Floats) -> Reaction:
        """The step in progress is lost or drained at a loss, and every change means a restart."""
        loss, gain = _changes(workers)
        drained = loss & (self.notice > 0) & (self.notice >= seconds + self.write)
        return Reaction(
            ends=np.where(drained, DRAIN, np.where(loss, LOSE, FINISH)),
            pauses=_pauses(workers, loss, gain, drained, detect=self.detect, restart=self.restart, join=self.restart),
            every=np.maximum(np.ceil(self.every / seconds - 1e-6), 1).astype(np.int64),
            saves=gain | drained,
            write=float(self.write),
        )


def _check_times(name: str, recovery: StepRecovery | CheckpointRecovery) -> None:
    for field in dataclasses.fields(recovery):
        value = getattr(recovery, field.name)
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{name}: {field.name} is {value:g} s; expected a finite time that is not negative")


def _changes(workers: Ints) -> tuple[Bools, Bools]:
    """(is a loss, is a gain) for the change at the end of each segment; the end of the last one is neither."""
    difference = np.diff(workers, append=workers[-1:])
    return difference < 0, difference > 0


def _pauses(
    workers: Ints, loss: Bools, gain: Bools, drained: Bools, *, detect: float, restart: float, join: float
) -> Floats:
    """The pause at the beginning of each segment, caused by the change before it. The first begins without one."""
    after = np.where(loss, np.where(drained, restart, detect + restart), np.where(gain, join, 0.0))
    after = np.where(workers == 0, restart, after)  # an empty fleet starts anew
    return np.append(0.0, after[:-1])
