"""How long a study will still take, and which arm to start next: arithmetic on what its arms have done so far.

Arms are timed as they run. One that has not begun is taken to be as fast as those of the same workload on the same
trace, or else of the same workload, or else as all of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

__all__ = ["Board", "Timed", "remaining_s", "speed_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """What is known of the pace of an arm."""

    work: float
    """Of the whole arm, in epochs."""
    kind: tuple[str, ...]
    """From the general to the particular: arms that share the beginning have about the same speed."""
    done: float = 0.0
    """Part of the work that is done."""
    gained: float = 0.0
    """Epochs done while it was timed: a resumed arm has done more."""
    seconds: float = 0.0
    """How long it was timed."""

    @property
    def left(self) -> float:
        """Epochs still to do."""
        return self.work * (1 - self.done)


def speed_of(kind: Sequence[str], known: Iterable[Timed]) -> float | None:
    """Epochs a second of arms of a kind, from those that are most like it; None if nothing has been timed."""
    timed = [arm for arm in known if arm.gained > 0 and arm.seconds > 0]
    for length in range(len(kind), -1, -1):
        alike = [arm for arm in timed if arm.kind[:length] == tuple(kind[:length])]
        if alike:
            return sum(arm.gained for arm in alike) / sum(arm.seconds for arm in alike)
    return None


def remaining_s(
    running: Sequence[Timed], waiting: Sequence[Timed], over: Sequence[Timed], *, jobs: int
) -> float | None:
    """Seconds until the last arm ends, when `jobs` of them run at once and each slot takes the next waiting one.

    None as long as nothing has been timed. An arm that runs keeps its own pace.

    >>> one = Timed(work=10, kind=("mlp",), done=0.5, gained=5, seconds=20)      # 4 s an epoch: 20 s to go
    >>> remaining_s([one], [replace(one, done=0, gained=0)] * 2, [], jobs=2)     # 40 s beside it, then 40 s behind it
    60.0
    """
    known = [*running, *over]
    ends = []
    for arm in running:
        speed = speed_of(arm.kind, [arm]) if arm.gained > 0 else speed_of(arm.kind, known)
        if speed is None:
            return None
        ends.append(arm.left / speed)
    ends += [0.0] * (jobs - len(ends))
    heapq.heapify(ends)
    for arm in waiting:
        speed = speed_of(arm.kind, known)
        if speed is None:
            return None
        heapq.heappush(ends, heapq.heappop(ends) + arm.left / speed)
    return max(ends, default=0.0)


@dataclass
class Board:
    """The arms of a study as they wait, run and end; clocks are given, not read."""

    waiting: dict[str, Timed]
    """By name, in the order of the study."""
    running: dict[str, Timed] = field(default_factory=dict)
    over: list[Timed] = field(default_factory=list)
    _since: dict[str, tuple[float, float]] = field(default_factory=dict)
    """When an arm that runs was first heard of, and what it had done by then."""

    def longest(self, names: Sequence[str]) -> str:
        """The one of these waiting arms that is expected to take longest; the first of them if several do."""

        def expected(name: str) -> float:
            arm = self.waiting[name]
            return arm.left / (speed_of(arm.kind, [*self.running.values(), *self.over]) or 1.0)

        return max(names, key=expected)

    def start(self, name: str) -> None:
        """An arm begins."""
        self.running[name] = self.waiting.pop(name)

    def move(self, name: str, done: float, now: float) -> None:
        """An arm has done this part of its work."""
        arm = self.running[name]
        began, before = self._since.setdefault(name, (now, done))
        gained = max(0.0, done - before) * arm.work
        self.running[name] = replace(arm, done=done, gained=gained, seconds=now - began)

    def end(self, name: str) -> None:
        """An arm has ended, whatever became of it."""
        self.over.append(self.running.pop(name))

    def remaining_s(self, jobs: int) -> float | None:
        """Seconds until all have ended; None as long as nothing has been timed."""
        return remaining_s([*self.running.values()], [*self.waiting.values()], self.over, jobs=jobs)
