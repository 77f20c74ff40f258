"""Replays an availability trace on real replicas: when which of them is started and stopped.

A trace says how many workers there are, not which. `make_schedule` decides that from a seed, as a pure function:
replicas are numbered slots r0, r1, ...; a new replica takes the free slot with the lowest number, and the newest, the
oldest or a random one leaves. `TraceReplay` carries the schedule out.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ebbflow.core.units import Seconds
from ebbflow.errors import ConfigError
from ebbflow.live.supervisor import FleetEvent, Supervisor
from ebbflow.traces import Trace

__all__ = ["Leaver", "ReplayAction", "ReplaySchedule", "StopSignalName", "TraceReplay", "adapt_trace", "make_schedule"]

StopSignalName = Literal["kill", "term", "mixed"]
"""kill -9, SIGTERM, or one of the two at random."""
Leaver = Literal["newest", "oldest", "random"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayAction:
    """One replica that is started or stopped."""

    time_s: float
    """Seconds since the start of the replay, of real time."""
    what: Literal["start", "kill", "term"]
    replica: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaySchedule:
    """All actions of a replay, in order."""

    actions: tuple[ReplayAction, ...]
    end_s: float
    """Seconds of real time after which the trace is over."""

    def running(self, time_s: float) -> set[str]:
        """Name the replicas that should run at a time."""
        running: set[str] = set()
        for action in self.actions:
            if action.time_s > time_s:
                break
            (running.add if action.what == "start" else running.discard)(action.replica)
        return running


def adapt_trace(
    trace: Trace, *, speed: float = 1.0, max_workers: int | None = None, duration_s: float | None = None
) -> Trace:
    """Make a trace `speed` times faster, scale it down to `max_workers`, and cut it to a duration of real time.

    >>> adapt_trace(Trace.parse("0s:8 60s:4 120s"), speed=60, max_workers=4, duration_s=1.5)
    Trace('0s:4 1s:2 1.5s')
    """
    if not speed > 0:
        raise ConfigError(f"speed is {speed:g}; expected a number above 0, such as 60: an hour in a minute")
    peak = trace.stats().max
    scaled = trace.scale(max_workers=max_workers if max_workers and peak > max_workers else None, time=1 / speed)
    if duration_s is not None and duration_s < scaled.end:
        scaled = scaled.slice(stop=Seconds(duration_s))
    return scaled


def make_schedule(
    trace: Trace, *, stop: StopSignalName = "kill", leaver: Leaver = "random", seed: int = 0
) -> ReplaySchedule:
    """Decide which replicas to start and stop so that their number is that of the trace at every time.

    >>> for action in make_schedule(Trace.parse("0s:2 5s:1 9s"), leaver="newest").actions:
    ...     print(action.time_s, action.what, action.replica)
    0.0 start r0
    0.0 start r1
    5.0 kill r1
    """
    if stop not in ("kill", "term", "mixed"):
        raise ConfigError(f"signal is {stop!r}; expected kill, term or mixed")
    if leaver not in ("newest", "oldest", "random"):
        raise ConfigError(f"leaver is {leaver!r}; expected newest, oldest or random")
    dice = random.Random(seed)
    actions: list[ReplayAction] = []
    running: list[int] = []  # slots, the oldest first
    for start, _, workers in trace.segments():
        while len(running) > workers:
            index = {"newest": len(running) - 1, "oldest": 0, "random": dice.randrange(len(running))}[leaver]
            what: Literal["kill", "term"] = dice.choice(("kill", "term")) if stop == "mixed" else stop
            actions.append(ReplayAction(time_s=start, what=what, replica=f"r{running.pop(index)}"))
        while len(running) < workers:
            slot = next(i for i in range(len(running) + 1) if i not in running)
            running.append(slot)
            actions.append(ReplayAction(time_s=start, what="start", replica=f"r{slot}"))
    return ReplaySchedule(actions=tuple(actions), end_s=trace.end)


class TraceReplay:
    """Carries out a schedule: `act` does what is due, and is called by `supervise`.

    A replica that dies although the schedule keeps it is started again by the supervisor. One that finishes ends the
    replay, since the job is done. When the trace is over, all replicas are told to leave; with `finish`, the last ones
    run until the job is done.
    """

    def __init__(
        self,
        fleet: Supervisor,
        schedule: ReplaySchedule,
        *,
        grace_s: float,
        finish: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fleet = fleet
        self.grace_s = grace_s
        self.finish = finish
        self.end_s = schedule.end_s
        self.done: list[ReplayAction] = []
        """The actions that were carried out, with the times at which they were."""
        self._due = deque(schedule.actions)
        self._clock = clock
        self._began = clock()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start of the replay."""
        return self._clock() - self._began

    @property
    def over(self) -> bool:
        """Whether the trace has been replayed to its end."""
        return self.elapsed_s >= self.end_s

    def act(self) -> list[FleetEvent] | None:
        """Do what is due and return what was done; None when the trace is over.

        Of several changes that are due, as on a machine that stood still for a while, one call makes the first: a
        replica that comes for a short time is really started.
        """
        events: list[FleetEvent] = []
        now = self.elapsed_s
        change_s = min(now, self._due[0].time_s) if self._due else now
        while self._due and self._due[0].time_s <= change_s:
            action = self._due.popleft()
            if action.what == "start":
                self.fleet.request(action.replica)  # the supervisor reports when it has started
            else:
                events += self.fleet.stop(action.replica, kill=action.what == "kill", grace_s=self.grace_s)
            self.done.append(ReplayAction(time_s=now, what=action.what, replica=action.replica))
        if self._due or not self.over:
            return events
        if not self.finish:
            events += self.fleet.stop_all(grace_s=self.grace_s)
        return events or None
