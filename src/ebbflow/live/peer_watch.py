"""Who waits in vain: this replica for a peer that has gone on without it, or its peers for this one, which hangs.

Each replica has in its store the name of the group in which it is connected. One that is twice in a row not in the
group of a step has given that step up.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from time import monotonic

from ebbflow.live.agreement import gone_on_without, keeps_others_waiting, without_heartbeat
from ebbflow.live.fleet_questions import CONNECTED_KEY, FleetQuestions
from ebbflow.live.registration import Registration

__all__ = ["HangWatch", "PeerWatch"]

_LOOK_EVERY_S = 5.0  # while a replica waits for its peers: do they answer, and are they still in the group?


class PeerWatch:
    """Finds out, while this replica waits for its peers, which of them will not answer any more.

    Several threads may wait at once, for a sum and for the transfer of a state.
    """

    def __init__(self, questions: FleetQuestions) -> None:
        self._questions = questions
        self._asked_at = self._looks_at = 0.0  # when it was last asked who has stopped; when the peers are looked at
        self._away: frozenset[str] = frozenset()  # peers that did not answer then, or were not in the group
        self._looking = threading.Lock()  # what two threads see at the same time is not seen twice in a row

    def stopped(self, own: str, others: Sequence[str], group: str, *, lost: Sequence[str]) -> list[str]:
        """The peers that will not answer any more. This is asked every half second while they are waited for.

        `lost`: peers that are known not to answer.
        """
        quorum, ages = self._questions.quorum_and_ages()
        dead = without_heartbeat(others, ages, self._questions.heartbeat_timeout_s)
        stopped = [*dead, *gone_on_without(own, others, quorum), *lost]
        now, asked_at = monotonic(), self._asked_at
        if now - asked_at > _LOOK_EVERY_S:  # another wait has begun
            self._looks_at, self._away = now + _LOOK_EVERY_S, frozenset()
        elif not stopped and self._looking.acquire(blocking=False):
            try:
                if now > self._looks_at:
                    stopped = self._gone(others, group)
            finally:
                self._looking.release()
        self._asked_at = monotonic()
        return stopped

    def _gone(self, others: Sequence[str], group: str) -> list[str]:
        """The peers that are not in the group twice in a row: one may just have gone on, after the same step."""
        said = self._questions.read_stores(others, CONNECTED_KEY)
        away = frozenset(name for name, connected in said.items() if connected != group.encode())
        gone = sorted(away & self._away)
        self._looks_at, self._away = monotonic() + _LOOK_EVERY_S, away
        return gone


class HangWatch:
    """Stops the heartbeats of this replica if it keeps the others waiting: the lighthouse would wait for it, too.

    The training thread may hang in a data loader or in a kernel. When it goes on, this replica registers again.
    """

    def __init__(
        self, registration: Registration, questions: FleetQuestions, on_event: Callable[[str, str], None]
    ) -> None:
        self.silenced = False
        """Whether this replica has stopped its heartbeats, since it kept the others waiting."""
        self._registration, self._questions, self._on_event = registration, questions, on_event
        self._group = ""  # the name of the group
        self._names: Sequence[str] = ()  # of its replicas
        self._computing_since: float | None = None  # a step, which may have its sum, but is not committed yet
        self._step_s = 0.0  # how long the last step took
        self._closed = threading.Event()

    def start(self, *, patience_s: float) -> None:
        """Watch the thread that calls this. `patience_s`: how long the others wait for this replica in a step."""
        arguments = (threading.get_ident(), patience_s)
        threading.Thread(target=self._watch, args=arguments, daemon=True, name="ebbflow-watch").start()

    def group_connects(self, group: str, names: Sequence[str]) -> None:
        """Report that the next steps are computed in another group: its name, and those of its replicas."""
        self._group, self._names = group, names

    def step_begins(self) -> None:
        """Report that this replica computes a step from now on."""
        self._computing_since = monotonic()

    def step_committed(self) -> None:
        """Report that the step counts, and how long one takes is known."""
        if self._computing_since is not None:
            self._step_s, self._computing_since = monotonic() - self._computing_since, None

    def step_failed(self) -> None:
        """Report that the step does not count."""
        self._computing_since = None

    def close(self) -> None:
        """End the watch."""
        self._closed.set()

    def _watch(self, training_thread: int, patience_s: float) -> None:
        away: frozenset[str] = frozenset()
        while not self._closed.wait(_LOOK_EVERY_S):
            since, group, before = self._computing_since, self._group, away
            away = frozenset()
            waits = since is not None and keeps_others_waiting(monotonic() - since, self._step_s, patience_s)
            if not waits or self.silenced or not self._registration.has_heartbeats:
                continue
            said = self._questions.read_stores(self._names, CONNECTED_KEY)
            away = frozenset(name for name, connected in said.items() if connected not in (None, group.encode()))
            if not away & before or self._computing_since != since:
                continue
            self.silenced = True
            self._registration.stop_heartbeats()
            self._on_event(
                "waiting",
                f"the others go on without this replica, which hangs: it has computed one step for "
                f"{monotonic() - (since or 0.0):.0f} s, {_where(training_thread)}",
            )


def _where(thread: int) -> str:
    """Where a thread is, in the code that called it last."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "at a place that is not known"
    place = traceback.extract_stack(frame)[-1]
    return f"in {place.name} ({place.filename}, line {place.lineno})"
