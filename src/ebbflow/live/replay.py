"""Carries out a schedule on real processes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from ebbflow.live.schedule import Action, Schedule
from ebbflow.live.supervisor import Happening, Supervisor

__all__ = ["Replay"]


class Replay:
    """Does what is due whenever it is asked: the `act` of `watch`.

    A replica that dies although the schedule keeps it is started again by the supervisor. One that finished ends the
    replay, since the job is done. When the trace is over, everyone gets a notice, unless `finish` is set: then the last
    workers stay until the job is done.
    """

    def __init__(
        self,
        fleet: Supervisor,
        schedule: Schedule,
        *,
        grace_s: float,
        finish: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fleet = fleet
        self.grace_s = grace_s
        self.finish = finish
        self.end_s = schedule.end_s
        self.done: list[Action] = []
        """What was carried out, with the time at which it was."""
        self._due = deque(schedule.actions)
        self._clock = clock
        self._began = clock()

    @property
    def elapsed_s(self) -> float:
        """Since the start of the replay."""
        return self._clock() - self._began

    @property
    def over(self) -> bool:
        """The trace has been played to its end."""
        return self.elapsed_s >= self.end_s

    def act(self) -> list[Happening] | None:
        """Do what is due, and say what was done; None when the trace is over."""
        happenings: list[Happening] = []
        now = self.elapsed_s
        while self._due and self._due[0].time_s <= now:
            action = self._due.popleft()
            happenings += self._do(action)
            self.done.append(Action(time_s=now, what=action.what, replica=action.replica))
        if not self.over:
            return happenings
        if not self.finish:
            happenings += self.fleet.dismiss_all(grace_s=self.grace_s)
        return happenings or None

    def _do(self, action: Action) -> list[Happening]:
        if action.what == "start":
            self.fleet.want(action.replica)
            return []  # the supervisor tells when it has started
        return self.fleet.dismiss(action.replica, kill=action.what == "kill", grace_s=self.grace_s)
