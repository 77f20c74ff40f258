"""The loop around a supervisor: until the job is finished, nobody is left, or somebody says stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Literal

from ebbflow.core.signals import StopSignal
from ebbflow.live.supervisor import Happening, Supervisor

__all__ = ["Act", "Outcome", "watch"]

Act = Callable[[], Iterable[Happening] | None]
"""Changes the fleet, and says what it did; None when it has no more to do."""

Outcome = Literal["finished", "stopped", "failed", "left"]
"""The job is done; somebody stopped it; every replica was given up; every replica left by itself."""

_LOOK_EVERY_S = 0.05
_OTHERS_MAY_FINISH_S = 10.0


def watch(
    fleet: Supervisor,
    *,
    stop: StopSignal,
    grace_s: float,
    on_happening: Callable[[Happening], None],
    on_look: Callable[[], None],
    act: Act | None = None,
) -> Outcome:
    """Look after the fleet until it is over; how it ended.

    `act` is called at every look; as long as it has more to do, an empty fleet is not the end. The first signal
    dismisses everyone and waits for the grace; a second one raises KeyboardInterrupt, and the supervisor's context then
    kills what is left.
    """
    finished_at: float | None = None
    dismissed = False
    while True:
        for happening in fleet.poll():
            on_happening(happening)
            if happening.what == "finished" and finished_at is None:
                finished_at = time.monotonic()
        planned = None
        if act is not None and finished_at is None and not dismissed:
            planned = act()
            for happening in planned or ():
                on_happening(happening)
        on_look()
        if not dismissed and (stop.requested or _overdue(finished_at)):
            dismissed = True
            for happening in fleet.dismiss_all(grace_s=grace_s):
                on_happening(happening)
        elif finished_at is not None:
            fleet.retire_absent()  # the job is done: the dead need not come back
        if planned is None and not fleet.active:
            return _outcome(fleet, finished=finished_at is not None, stopped=stop.requested)
        time.sleep(_LOOK_EVERY_S)


def _overdue(finished_at: float | None) -> bool:
    """A replica finished, and the others have had the time to do so."""
    return finished_at is not None and time.monotonic() - finished_at > _OTHERS_MAY_FINISH_S


def _outcome(fleet: Supervisor, *, finished: bool, stopped: bool) -> Outcome:
    if finished:
        return "finished"
    if stopped:
        return "stopped"
    gave_up = any(replica.outcome == "gave up" for replica in fleet.replicas.values())
    return "failed" if gave_up else "left"
