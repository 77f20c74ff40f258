"""How long a study will still take, and which arm to start next, from the progress of its arms so far.

Arms are timed while they run. An arm that has not begun is assumed to be as fast as those of the same workload on the
same trace, or else those of the same workload, or else all of them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

__all__ = ["ArmPace", "Speeds", "StudyForecast", "remaining_s"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmPace:
    """What is known about the speed of an arm."""

    epochs: float
    """Epochs of the whole arm."""
    kind: tuple[str, ...]
    """From general to specific: arms with the same first entries have about the same speed."""
    done: float = 0.0
    """Fraction of the epochs that is done."""
    timed_epochs: float = 0.0
    """Epochs done while the arm was timed; a resumed arm has done more."""
    timed_s: float = 0.0
    """Seconds for which the arm was timed."""

    @property
    def left(self) -> float:
        """Epochs that are left."""
        return self.epochs * (1 - self.done)


class Speeds:
    """How fast arms are, from those that were timed: all of them are read once, and every question is a look-up.

    >>> timed = ArmPace(epochs=10, kind=("mlp", "spot"), timed_epochs=5, timed_s=20)
    >>> Speeds([timed]).of(("mlp", "static")), Speeds([]).of(("mlp", "static"))
    (0.25, None)
    """

    def __init__(self, known: Iterable[ArmPace]) -> None:
        self._sums: dict[tuple[str, ...], tuple[float, float]] = {}
        """Epochs and seconds of the timed arms by the first entries of their kind, from none to all of them."""
        for arm in known:
            if arm.timed_epochs > 0 and arm.timed_s > 0:
                for length in range(len(arm.kind) + 1):
                    epochs, seconds = self._sums.get(arm.kind[:length], (0.0, 0.0))
                    self._sums[arm.kind[:length]] = (epochs + arm.timed_epochs, seconds + arm.timed_s)

    def of(self, kind: Sequence[str]) -> float | None:
        """Epochs per second of arms of a kind, from the most similar ones; None if nothing has been timed."""
        for length in range(len(kind), -1, -1):
            if found := self._sums.get(tuple(kind[:length])):
                return found[0] / found[1]
        return None


def remaining_s(
    running: Sequence[ArmPace], waiting: Sequence[ArmPace], ended: Sequence[ArmPace], *, jobs: int
) -> float | None:
    """Seconds until the last arm ends, if `jobs` arms run at once and each slot takes the next waiting one.

    None as long as nothing has been timed. A running arm is assumed to keep its own speed.

    >>> one = ArmPace(epochs=10, kind=("mlp",), done=0.5, timed_epochs=5, timed_s=20)    # 4 s per epoch: 20 s left
    >>> remaining_s([one], [replace(one, done=0, timed_epochs=0)] * 2, [], jobs=2)       # 40 s beside it, then 40 s
    60.0
    """
    speeds = Speeds([*running, *ended])
    ends = []
    for arm in running:
        speed = Speeds([arm]).of(arm.kind) if arm.timed_epochs > 0 else speeds.of(arm.kind)
        if speed is None:
            return None
        ends.append(arm.left / speed)
    ends += [0.0] * (jobs - len(ends))
    heapq.heapify(ends)
    for arm in waiting:
        speed = speeds.of(arm.kind)
        if speed is None:
            return None
        heapq.heappush(ends, heapq.heappop(ends) + arm.left / speed)
    return max(ends, default=0.0)


@dataclass
class StudyForecast:
    """The arms of a study as they wait, run and end. It never reads a clock; times are passed in."""

    waiting: dict[str, ArmPace]
    """Waiting arms by name, in the order of the study."""
    running: dict[str, ArmPace] = field(default_factory=dict)
    ended: list[ArmPace] = field(default_factory=list)
    _first_report: dict[str, tuple[float, float]] = field(default_factory=dict)
    """The time of the first report of each running arm, and the fraction that was done by then."""
    _speeds: Speeds | None = None
    """Of the running and ended arms as they are now; None where it is to be made again, since one of them changed."""

    def longest(self, names: Sequence[str]) -> str:
        """The waiting arm among these that is expected to take longest; the first one if several do."""

        def expected(name: str) -> float:
            seconds = self.expected_s(name)
            return self.waiting[name].left if seconds is None else seconds

        return max(names, key=expected)

    def expected_s(self, name: str) -> float | None:
        """Seconds that a waiting arm is expected to take, beside as many others as now; None if nothing was timed."""
        arm = self.waiting[name]
        if self._speeds is None:
            self._speeds = Speeds([*self.running.values(), *self.ended])
        speed = self._speeds.of(arm.kind)
        return None if speed is None else arm.left / speed

    def fits(self, name: str, left_s: float) -> bool:
        """Whether a waiting arm may end within so many seconds: as long as nothing was timed, any may."""
        if left_s == math.inf:
            return True
        expected = self.expected_s(name)
        return left_s > 0 and (expected is None or expected <= left_s)

    def start(self, name: str) -> None:
        """Note that an arm has started."""
        self.running[name] = self.waiting.pop(name)
        self._speeds = None

    def move(self, name: str, done: float, now: float) -> None:
        """Note that an arm has done this fraction of its epochs at the time `now`."""
        arm = self.running[name]
        began, before = self._first_report.setdefault(name, (now, done))
        timed = max(0.0, done - before) * arm.epochs
        self.running[name] = replace(arm, done=done, timed_epochs=timed, timed_s=now - began)
        self._speeds = None

    def end(self, name: str) -> None:
        """Note that an arm has ended, whether it succeeded or not."""
        self.ended.append(self.running.pop(name))
        self._speeds = None

    def remaining_s(self, jobs: int) -> float | None:
        """Seconds until all arms have ended; None as long as nothing has been timed."""
        return remaining_s([*self.running.values()], [*self.waiting.values()], self.ended, jobs=jobs)
