"""The lighthouse of a simulated fleet: heartbeats and quorums, as torchft's (0.2.0) gives them.

A lighthouse of thousands of replicas is asked by each of them in every step. So it does not look at all replicas for
every request, but only at those of which it does not hear at present.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ebbflow.live import membership_events as m
from ebbflow.live.protocol import HEARTBEAT_INTERVAL_S

if TYPE_CHECKING:
    from live.fleet_simulator import Replica, SimulatedFleet

HEARTBEAT_TIMEOUT_S = 0.8
KEEP_ALIVE_S = 80.0
"""After which torchft's client notices that a machine has vanished: it asks every 60 s and waits for 20 s."""
_LOOK_EVERY_S = 0.05  # whether a quorum can be formed; besides at every request
_NEVER_HEARD = -100.0


@dataclass(eq=False, slots=True)
class Heartbeats:
    """The heartbeats that a replica sends under one name."""

    name: str
    replica: Replica
    silent_since: float | None = _NEVER_HEARD
    """Since when the lighthouse hears nothing of it; negative if it has never heard of it."""
    heard_from: float = 0.0
    """When the first one came to this lighthouse, or comes."""

    @property
    def over(self) -> bool:
        """Whether none will ever come."""
        return self.replica.dead or self.replica.heartbeats is not self


class SimulatedLighthouse:
    """Hears heartbeats, says how old they are, and forms quorums of those that ask."""

    def __init__(self, fleet: SimulatedFleet, *, min_replicas: int, join_timeout_s: float) -> None:
        self.fleet = fleet
        self.min_replicas = min_replicas
        self.join_timeout_s = join_timeout_s
        self.away = False
        self.stalled_since: float | None = None
        self.quorum_id = 0
        self.previous: tuple[str, ...] = ()
        self.asked: dict[str, tuple[float, m.AskLighthouse, int]] = {}
        """Who waits for a quorum -> since when, the request, and the number of the wait; the first ones first."""
        self.heard: dict[str, None] = {}
        """Those whose heartbeats come."""
        self.silent: dict[str, Heartbeats] = {}
        """Those whose heartbeats do not come, or have not been noticed yet."""
        self._buried: dict[str, Heartbeats] = {}
        """Those that ended longer than the timeout ago."""
        self._buried_asked = 0
        self._look_at: float | None = None

    # Heartbeats -------------------------------------------------------------------------------------------------------

    def add(self, replica: Replica) -> None:
        """Listen to a replica that has a name that nobody had before."""
        replica.heartbeats = self.silent[replica.name] = Heartbeats(replica.name, replica)

    def silence(self, replica: Replica) -> None:
        """No more heartbeats come."""
        if replica.heartbeats.silent_since is None:
            self._miss(replica.heartbeats, self.fleet.now)
        replica.unresponsive = self.fleet.now

    def hear(self, replica: Replica, after_s: float) -> None:
        """Its heartbeats come from then on, if it sends any."""
        replica.heartbeats.heard_from = self.fleet.now + after_s if replica.registered else math.inf

    def _miss(self, heartbeats: Heartbeats, since: float) -> None:
        heartbeats.silent_since = since
        self.heard.pop(heartbeats.name, None)
        self.silent[heartbeats.name] = heartbeats

    def _listen(self) -> None:
        """Notice whose heartbeats have begun to come."""
        now = self.fleet.now if self.stalled_since is None else self.stalled_since
        for heartbeats in [*self.silent.values()]:
            if heartbeats.heard_from <= now and not heartbeats.over:
                replica = heartbeats.replica
                if not (replica.paused or replica.cut_off):
                    heartbeats.silent_since = None
                    del self.silent[heartbeats.name]
                    self.heard[heartbeats.name] = None

    def _silence_of(self, heartbeats: Heartbeats) -> float:
        """Seconds since the last one; infinite if none has ever come."""
        since = heartbeats.silent_since
        if since is None:
            return 0.0
        return self.fleet.now - since if since >= 0.0 else math.inf

    def ages(self) -> dict[str, float]:
        """Seconds since the last heartbeat of every replica that this lighthouse has heard of."""
        self._listen()
        ages = dict.fromkeys(self.heard, 0.0)
        for known in (self.silent, self._buried):
            for name, heartbeats in known.items():
                if (age := self._silence_of(heartbeats)) < math.inf:
                    ages[name] = age
        return ages

    def stopped(self, members: frozenset[str]) -> list[str]:
        """Name those of these replicas whose last heartbeat is too old."""
        self._listen()
        return [
            name
            for known in (self.silent, self._buried)
            for name, heartbeats in known.items()
            if name in members and HEARTBEAT_TIMEOUT_S < self._silence_of(heartbeats) < math.inf
        ]

    def reaches(self, replica: Replica) -> bool:
        return not (self.away or replica.cut_off or self.stalled_since is not None)

    # Faults -----------------------------------------------------------------------------------------------------------

    def stall(self, seconds: float) -> None:
        """Let it stand still."""
        if self.stalled_since is None and not self.away:
            self.stalled_since = self.fleet.now
            self.fleet.at(seconds, self._go_on)

    def _go_on(self) -> None:
        if self.stalled_since is None:
            return
        for replica in self.fleet.running():
            if replica.heartbeats.silent_since is None:
                self._miss(replica.heartbeats, self.stalled_since)
            self.hear(replica, self.fleet.random.uniform(0, HEARTBEAT_INTERVAL_S))
        self.stalled_since = None
        self._form_quorum()

    def restart(self, seconds: float) -> None:
        """End it, and start it again later; requests fail at once, and heartbeats begin anew."""
        if self.away:
            return
        self.away, self.stalled_since = True, None
        asked, self.asked, self._buried_asked = self.asked, {}, 0
        for name, (_, _, wait) in asked.items():
            replica = self.fleet.replicas[name]
            if replica.wants(wait):  # one that is cut off is not told so
                replica.disconnected = replica.cut_off
                self.answer_is_lost(replica, wait)
        self.silent.clear()
        self._buried.clear()
        for replica in self.fleet.running():
            self._miss(replica.heartbeats, _NEVER_HEARD)
        self.fleet.at(seconds, self._is_back)

    def _is_back(self) -> None:
        self.away, self.quorum_id, self.previous = False, 0, ()
        for replica in self.fleet.running():
            if replica.membership.name:
                self.hear(replica, self.fleet.random.uniform(0, 0.6))

    # Quorums ----------------------------------------------------------------------------------------------------------

    def _refuse(self, replica: Replica, wait: int, after_s: float = 0.0) -> None:
        def refused(now: float) -> m.LighthouseUnreachable:
            replica.disconnected = False  # torchft's client connects again when a connection has broken
            return m.LighthouseUnreachable(now=now, reason="refused")

        self.fleet.answer_request(replica, refused, after_s + self.fleet.delay(), wait)

    def answer_is_lost(self, replica: Replica, wait: int, after_s: float = 0.0) -> None:
        """A connection broke: a replica learns it at once, or, if nobody tells it, from the keep-alive."""
        self._refuse(replica, wait, after_s + (KEEP_ALIVE_S if replica.disconnected else 0.0))

    def request(self, replica: Replica, request: m.AskLighthouse, wait: int) -> None:
        """A request for a quorum arrives."""
        if replica.dead or not replica.wants(wait):
            return
        if self.away:
            self._refuse(replica, wait)
        elif replica.cut_off or self.stalled_since is not None:  # it is repeated by TCP
            self.fleet.at(0.2, partial(self.request, replica, request, wait))
        else:
            if not replica.paused:
                self.hear(replica, 0.0)  # a request is a heartbeat
            self.asked.pop(replica.name, None)
            self.asked[replica.name] = (self.fleet.now, request, wait)
            self._form_quorum()

    def _form_quorum(self) -> None:
        """As torchft's lighthouse: at every request, and every 50 ms."""
        if self.away or self.stalled_since is not None or not self.asked:
            return
        now, asked, heard = self.fleet.now, self.asked, self.heard
        self._listen()
        late = set()  # whose heartbeats are missed, and not for long
        here = len(asked) - self._buried_asked
        for name, heartbeats in [*self.silent.items()]:
            if self._silence_of(heartbeats) < HEARTBEAT_TIMEOUT_S:
                late.add(name)
                continue
            here -= name in asked
            if heartbeats.over:
                self._buried[name] = self.silent.pop(name)
                self._buried_asked += name in asked
        if not self._is_complete(here, late):
            if self._look_at is None or self._look_at <= now:
                self._look_at = now + _LOOK_EVERY_S
                self.fleet.at(_LOOK_EVERY_S, self._form_quorum)
            return
        replicas = tuple(sorted(name for name in asked if name in heard or name in late))
        self.quorum_id += replicas != self.previous
        self.previous = replicas
        requests = [asked.pop(name) for name in replicas]
        if asked:
            self.fleet.at(_LOOK_EVERY_S, self._form_quorum)
        formed = partial(
            m.QuorumFormed,
            quorum_id=self.quorum_id,
            replicas=replicas,
            store=replicas[0],
            groups=tuple(one.group for _, one, _ in requests),
            established=tuple(one.established for _, one, _ in requests),
            steps=tuple(one.step for _, one, _ in requests),
            unreachable=tuple(one.unreachable for _, one, _ in requests),
            blocked=tuple(one.blocked for _, one, _ in requests),
            hopeless=tuple(one.hopeless for _, one, _ in requests),
            attempts=tuple(one.attempt for _, one, _ in requests),
        )
        for rank, (name, (_, _, wait)) in enumerate(zip(replicas, requests, strict=True)):
            replica = self.fleet.replicas[name]
            if replica.wants(wait) and self.fleet.loses(replica):
                replica.disconnected = self.fleet.loses_silently()
                self.answer_is_lost(replica, wait)
            elif replica.wants(wait):
                self.fleet.answer_request(replica, partial(formed, rank=rank), self.fleet.delay(), wait)

    def _is_complete(self, here: int, late: set[str]) -> bool:
        """Whether a quorum can be formed of the living replicas that have asked, of which there are `here`."""
        asked, heard = self.asked, self.heard
        if here == 0:
            return False
        previous = self.previous if 0 < len(self.previous) <= here else ("",)  # which has not asked
        if all(name in asked and (name in heard or name in late) for name in previous):
            return True
        healthy = len(heard) + len(late)
        if here < self.min_replicas or here <= healthy // 2:
            return False
        if here == healthy:
            return True
        first = next(since for name, (since, _, _) in asked.items() if name in heard or name in late)
        return self.fleet.now - first >= self.join_timeout_s
