"""Availability trace -> who starts and who is killed when: a plain function on values.

A trace says how many workers there are, not which. Here that is decided, by a seed: replicas are slots r0, r1, ...;
whoever comes takes the free slot with the smallest number, and who leaves is the newest, the oldest or anyone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from ebbflow.core.units import Seconds
from ebbflow.errors import ConfigError
from ebbflow.traces import Trace

__all__ = ["Action", "Leaver", "Schedule", "Stop", "make_schedule", "playable"]

Stop = Literal["kill", "term", "mixed"]
"""kill -9, a notice, or either by the toss of a coin."""
Leaver = Literal["newest", "oldest", "random"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One thing to do to the fleet."""

    time_s: float
    """Since the start of the replay, on the clock of the wall."""
    what: Literal["start", "kill", "term"]
    replica: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Everything to do, in order, and when the trace is over."""

    actions: tuple[Action, ...]
    end_s: float

    def running(self, time_s: float) -> set[str]:
        """Who should be there at a time."""
        there: set[str] = set()
        for action in self.actions:
            if action.time_s > time_s:
                break
            (there.add if action.what == "start" else there.discard)(action.replica)
        return there


def playable(
    trace: Trace, *, speed: float = 1.0, max_workers: int | None = None, duration_s: float | None = None
) -> Trace:
    """The trace as it is played: so many times faster, scaled down to `max_workers`, cut to a duration on the wall.

    >>> playable(Trace.parse("0s:8 60s:4 120s"), speed=60, max_workers=4, duration_s=1.5)
    Trace('0s:4 1s:2 1.5s')
    """
    if not speed > 0:
        raise ConfigError(f"speed is {speed:g}; expected a number above 0, such as 60: an hour in a minute")
    peak = trace.stats().max
    scaled = trace.scale(max_workers=max_workers if max_workers and peak > max_workers else None, time=1 / speed)
    if duration_s is not None and duration_s < scaled.end:
        scaled = scaled.slice(stop=Seconds(duration_s))
    return scaled


def make_schedule(trace: Trace, *, stop: Stop = "kill", leaver: Leaver = "random", seed: int = 0) -> Schedule:
    """What to do so that the number of replicas is the trace's at every time.

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
    actions: list[Action] = []
    there: list[int] = []  # slots, the oldest first
    for start, _, workers in trace.segments():
        while len(there) > workers:
            index = {"newest": len(there) - 1, "oldest": 0, "random": dice.randrange(len(there))}[leaver]
            what: Literal["kill", "term"] = dice.choice(("kill", "term")) if stop == "mixed" else stop
            actions.append(Action(time_s=start, what=what, replica=f"r{there.pop(index)}"))
        while len(there) < workers:
            slot = next(i for i in range(len(there) + 1) if i not in there)
            there.append(slot)
            actions.append(Action(time_s=start, what="start", replica=f"r{slot}"))
    return Schedule(actions=tuple(actions), end_s=trace.end)
