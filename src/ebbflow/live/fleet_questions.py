"""What a replica asks the lighthouse and the stores of other replicas. The answers are events, or parts of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

from ebbflow.core.key_store import NotAuthenticated, StoreLost
from ebbflow.engines.process_group import open_store
from ebbflow.live import torchft_api
from ebbflow.live.agreement import without_heartbeat
from ebbflow.live.link_probe import is_reached
from ebbflow.live.membership_events import (
    AskLighthouse,
    CheckLinks,
    HeartbeatsReceived,
    LighthouseUnreachable,
    LinksChecked,
    MembershipEvent,
    PublishedGroup,
    QuorumFormed,
)
from ebbflow.live.protocol import HEARTBEAT_INTERVAL_S, fetch_heartbeat_ages, fetch_quorum_and_ages
from ebbflow.live.registration import PROBE_KEY

__all__ = ["CONNECTED_KEY", "GROUP_KEY", "FleetQuestions"]

GROUP_KEY = "ebbflow/group"
"""Key of a replica's quorum group in its store."""
CONNECTED_KEY = "ebbflow/connected"
"""Key, in the store of a replica, of the name of the group in which it is connected, or connects; empty if in none."""
_QUORUM_TIMEOUT = timedelta(minutes=5)  # then the lighthouse is asked again: an answer may have been lost
_STORE_TIMEOUT_S = 2.0  # for reading from the store of another replica
_LONGEST_NUMBER = 18  # digits of a number that anybody may have said to the lighthouse
_WAIT_FOR_LINK_S = 0.5  # while a replica is left out: do those that it does not reach still send heartbeats?


class FleetQuestions:
    """Questions of one replica to its fleet. They wait for the answers, and have no state: any thread may ask."""

    def __init__(self, lighthouse: str, secret: bytes, *, heartbeat_timeout_s: float) -> None:
        """`lighthouse`: its address. `secret`: of the job, which the stores of its replicas ask for."""
        self.lighthouse, self.heartbeat_timeout_s = lighthouse, heartbeat_timeout_s
        self._secret = secret

    # The lighthouse ---------------------------------------------------------------------------------------------------

    def ask_for_quorum(
        self, request: AskLighthouse, *, client: Callable[[], Any], name: str, store: str
    ) -> MembershipEvent:
        """Wait until the lighthouse has formed a quorum with this replica, by its name and the address of its store."""
        try:
            quorum = torchft_api.request_quorum(
                client(),
                name=name,
                store=store,
                step=request.step,
                data={
                    "group": request.group,
                    "established": str(request.established),
                    "step": str(request.step),
                    "unreachable": " ".join(request.unreachable),
                    "blocked": " ".join(request.blocked),
                    "hopeless": str(request.hopeless),
                    "attempt": str(request.attempt),
                },
                timeout=_QUORUM_TIMEOUT,
            )
        except (RuntimeError, TimeoutError) as error:
            reason = f"the lighthouse at {self.lighthouse} does not answer: {error}"
            return LighthouseUnreachable(now=monotonic(), reason=reason)
        said = [member.data or {} for member in quorum.participants]
        names = tuple(member.replica_id for member in quorum.participants)
        return QuorumFormed(
            now=monotonic(),
            quorum_id=quorum.quorum_id,
            replicas=names,
            rank=names.index(name),
            store=quorum.participants[0].store_address,
            groups=tuple(str(one.get("group")) for one in said),
            established=tuple(one.get("established") == str(True) for one in said),
            steps=tuple(_number(one.get("step")) for one in said),
            unreachable=tuple(tuple(str(one.get("unreachable", "")).split()) for one in said),
            blocked=tuple(tuple(str(one.get("blocked", "")).split()) for one in said),
            hopeless=tuple(one.get("hopeless") == str(True) for one in said),
            attempts=tuple(_number(one.get("attempt")) for one in said),
        )

    def heartbeat_ages(self) -> dict[str, float]:
        """Seconds since the last heartbeat of each replica that the lighthouse knows; none if it does not answer."""
        return fetch_heartbeat_ages(self.lighthouse, timeout_s=self.heartbeat_timeout_s)

    def quorum_and_ages(self) -> tuple[frozenset[str], dict[str, float]]:
        """The replicas of the last quorum, and `heartbeat_ages`."""
        return fetch_quorum_and_ages(self.lighthouse, timeout_s=self.heartbeat_timeout_s)

    def sends_heartbeats(self, name: str) -> bool:
        """Whether the lighthouse has heard of a replica, by its name in the group, within the heartbeat timeout."""
        return self.heartbeat_ages().get(name, math.inf) <= self.heartbeat_timeout_s

    # The stores of other replicas -------------------------------------------------------------------------------------

    def blocked(self, probes: Mapping[str, bytes | None], back: str) -> list[str]:
        """Those of some replicas, by the addresses of their probes, with which connections fail, there or back."""
        tried = [name for name, probe in probes.items() if probe]
        with ThreadPoolExecutor(max(1, len(tried))) as pool:
            addresses = [(probes[name] or b"").decode("latin-1") for name in tried]
            reached = pool.map(lambda address: is_reached(address, self._secret, back=back), addresses)
            return [name for name, there in zip(tried, reached, strict=True) if not there]

    def read_stores(self, names: Sequence[str], key: str) -> dict[str, bytes | None]:
        """Read a key from the stores of replicas, all at once: None if one does not answer, nothing if it has none."""
        with ThreadPoolExecutor(max(1, len(names))) as pool:
            return dict(zip(names, pool.map(lambda name: self._read_store(name, key), names), strict=True))

    def tell(self, names: Sequence[str], key: str, text: str) -> None:
        """Write a key into the stores of replicas, all at once; those that do not answer do not learn it."""
        with ThreadPoolExecutor(max(1, len(names))) as pool:
            list(pool.map(lambda name: self._write_store(name, key, text.encode()), names))

    def _write_store(self, name: str, key: str, value: bytes) -> None:
        address = name.rpartition("@")[2]
        with contextlib.suppress(StoreLost), open_store(address, self._secret, timeout_s=_STORE_TIMEOUT_S) as store:
            store.set({key: value})

    def _read_store(self, name: str, key: str) -> bytes | None:
        try:
            with open_store(name.rpartition("@")[2], self._secret, timeout_s=_STORE_TIMEOUT_S) as store:
                found = store.get([key], timeout_s=0.0)
            return found[0] if found is not None else b""
        except NotAuthenticated:  # it is of another fleet
            return b""
        except StoreLost:
            return None

    # Both -------------------------------------------------------------------------------------------------------------

    def check_heartbeats(
        self, besides: Sequence[str] = (), *, connected: Callable[[], bool] = lambda: True
    ) -> MembershipEvent:
        """Who sends heartbeats, and in which groups those are, if `besides` names any, that are not among these.

        `connected`: whether the lighthouse answers over another connection; not asked if it does not answer at all.
        """
        quorum, ages = self.quorum_and_ages()
        dead = without_heartbeat(ages, ages, self.heartbeat_timeout_s)
        asked = sorted(ages.keys() - {*dead, *besides}) if besides else []
        groups = {name: _published(text) for name, text in self.read_stores(asked, GROUP_KEY).items()}
        there = connected() if ages else True
        return HeartbeatsReceived(now=monotonic(), ages=ages, groups=groups, quorum=quorum, connected=there)

    def check_links(self, instruction: CheckLinks, *, back: str) -> MembershipEvent:
        """Which of some replicas send heartbeats and cannot be reached, tried when the instruction says.

        `back`: the address of this replica's own probe, at which they must reach it.
        """

        def alive(names: Sequence[str]) -> list[str]:
            return [name for name in names if self.sends_heartbeats(name)]

        until, names = monotonic() + instruction.after_s, alive(instruction.names)
        while names and monotonic() < until:
            sleep(min(instruction.after_s, _WAIT_FOR_LINK_S))
            names = alive(instruction.names)
        said = self.read_stores(names, PROBE_KEY)
        silent = [name for name in names if said[name] is None]
        blocked = self.blocked(said, back)
        if silent or blocked:  # one that has just died is no longer there when its heartbeat has timed out
            sleep(self.heartbeat_timeout_s + 2 * HEARTBEAT_INTERVAL_S)
        return LinksChecked(now=monotonic(), unreachable=tuple(alive(silent)), blocked=tuple(alive(blocked)))


def _number(said: object) -> int:
    """A number that a replica has said to the lighthouse, which takes anything from anybody."""
    return int(text) if (text := str(said)).isdecimal() and len(text) <= _LONGEST_NUMBER else 0


def _published(text: bytes | None) -> PublishedGroup | None:
    """The quorum group that a replica has published; None if it is not known."""
    try:
        return PublishedGroup.decode(text) if text else PublishedGroup() if text is not None else None
    except ValueError:
        return None
