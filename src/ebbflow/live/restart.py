"""What to do when a replica ends: a plain function on values.

A replica that died is started again, the first time at once, then after pauses that double; a script with a bug is not
started for ever. Deaths count as *in a row* while no incarnation between them made progress, that is, committed a step.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from ebbflow.live.settings import PLEASE_RESTART

__all__ = ["Ending", "RestartPolicy", "Verdict", "describe_exit"]

Verdict = Literal["finished", "left", "restart", "gave up"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How one incarnation of a replica ended."""

    code: int
    """Exit code; negative for a signal."""
    state: str | None
    """What its status file said last; None if it never wrote one."""
    progressed: bool
    """It committed at least one step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartPolicy:
    """When to start a replica again."""

    max_failures: int = 5
    """Give up after so many deaths in a row without progress."""
    first_pause_s: float = 1.0
    longest_pause_s: float = 30.0

    def failures(self, before: int, ending: Ending) -> int:
        """Deaths in a row without progress, this ending included."""
        if ending.progressed or ending.code == 0:
            return 0
        return before + 1

    def judge(self, ending: Ending, failures: int) -> tuple[Verdict, float]:
        """What to do, and how long to wait before; `failures` counts this ending.

        >>> policy = RestartPolicy(max_failures=4)
        >>> died = Ending(code=-9, state="training", progressed=False)
        >>> [policy.judge(died, failures) for failures in (0, 1, 2, 3, 4)]
        [('restart', 0.0), ('restart', 0.0), ('restart', 1.0), ('restart', 2.0), ('gave up', 0.0)]
        """
        if ending.code == 0:
            # A program that never wrote a status is no replica of ours, but 0 means that it is done.
            return ("left" if ending.state in ("leaving", "left") else "finished"), 0.0
        if failures >= self.max_failures:
            return "gave up", 0.0
        if failures < 2:
            return "restart", 0.0
        return "restart", min(self.longest_pause_s, self.first_pause_s * 2.0 ** (failures - 2))


def describe_exit(code: int) -> str:
    """An exit code for people.

    >>> describe_exit(-9), describe_exit(75), describe_exit(1)
    ('killed by SIGKILL', 'asked to be started again', 'exit code 1')
    """
    if code == PLEASE_RESTART:
        return "asked to be started again"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
