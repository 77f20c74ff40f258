"""What makes a replica known to its fleet: a name, heartbeats to the lighthouse, and a store that others read."""

from __future__ import annotations

import contextlib
import socket
import uuid
from collections.abc import Callable, Iterable
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

from ebbflow.core.key_store import KeyStore
from ebbflow.live import torchft_api
from ebbflow.live.link_probe import LinkProbe
from ebbflow.live.membership_events import LighthouseUnreachable, MembershipEvent, Registered, ToldToLeave
from ebbflow.live.protocol import HEARTBEAT_INTERVAL_S, ReplicaConfig, format_address, parse_address

__all__ = ["PROBE_KEY", "Registration", "asked_again_key"]

PROBE_KEY = "ebbflow/probe"
"""Key, in the store of a replica, of the address of its `LinkProbe`."""

_PROBE_TIMEOUT_S = 2.0  # for finding out whether anybody listens at the address of the lighthouse
_PROBE_AGAIN_S = 0.1
_ANSWER_TIMEOUT_S = 2.0  # for an answer of the lighthouse over a connection, if it answers over another one


def asked_again_key(name: str) -> str:
    """Key, in the stores of others, of the last request to which a replica lacks the answer of the lighthouse."""
    return f"ebbflow/asked-again/{name}"


class Registration:
    """This replica as the lighthouse and the other replicas know it, from when it is registered until it is not."""

    def __init__(self, config: ReplicaConfig, secret: bytes, leaving: Callable[[], bool]) -> None:
        """`secret`: of the job. `leaving`: whether this replica was told to leave."""
        self._config, self._secret, self._leaving = config, secret, leaving
        self.name = self._new_name()
        """Of this replica, without the address of its store; another one after each time that it was unregistered."""
        self._client: Any = None  # torchft's, for questions to the lighthouse; None while it is not registered
        self.store: KeyStore | None = None
        """What others can read of this replica."""
        self._server: Any = None  # torchft's, which sends the heartbeats
        self._probe: LinkProbe | None = None

    def _new_name(self) -> str:
        return f"{self._config.replica}:{uuid.uuid4().hex[:12]}"

    @property
    def has_heartbeats(self) -> bool:
        """Whether heartbeats were begun, and not ended by `unregister`."""
        return self._server is not None

    @property
    def probe(self) -> str:
        """HOST:PORT at which others try whether they reach this replica; it stays while the replica is left out."""
        return format_address(self._config.bind, self._probe.port) if self._probe is not None else ""

    def register(self, timeout_s: float) -> MembershipEvent:
        """Open a store and begin to send heartbeats, in their name the address of the store; what came of it."""
        timeout = timedelta(seconds=timeout_s)
        if problem := self._nobody_listens(monotonic() + timeout_s):
            return self._unreachable(f"nobody answers at {self._config.lighthouse} ({problem})")
        self._close_store()
        self.store = KeyStore(self._config.bind, self._secret)
        if self._probe is None:
            self._probe = LinkProbe(self._config.bind, self._secret)
        self.publish(PROBE_KEY, self.probe)
        address = format_address(self._config.bind, self.store.port)
        name = f"{self.name}@{address}"  # others find the store of a replica by its heartbeat
        try:
            self.connection(again=True, timeout_s=timeout_s)
            self._server = torchft_api.manager_server(
                name,
                lighthouse=self._config.lighthouse,
                heartbeat_interval=timedelta(seconds=HEARTBEAT_INTERVAL_S),
                connect_timeout=timeout,
            )
        except (RuntimeError, TimeoutError) as error:
            return self._unreachable(f"no lighthouse at {self._config.lighthouse}: {error}")
        return Registered(now=monotonic(), name=name, store=address)

    def connection(self, *, again: bool, timeout_s: float) -> Any:
        """The connection to the lighthouse for the requests of this replica; `again`: another one than before."""
        if again:
            timeout = timedelta(seconds=timeout_s)
            self._client = torchft_api.lighthouse_client(self._config.lighthouse, connect_timeout=timeout)
        return self._client

    def is_connected(self, name: str) -> bool:
        """Whether the lighthouse answers over that connection, to this replica by the name that it registered."""
        return torchft_api.answers(self._client, name=name, timeout=timedelta(seconds=_ANSWER_TIMEOUT_S))

    def asked_again(self, names: Iterable[str]) -> dict[str, int]:
        """Those of some replicas that have said that they lack an answer of the lighthouse -> to which request."""
        said = {name: self.store.peek(asked_again_key(name)) for name in names} if self.store is not None else {}
        return {name: int(number) for name, number in said.items() if number is not None and number.isdigit()}

    @property
    def refused(self) -> int:
        """How many connections the store of this replica has refused, since their other side has another secret."""
        return self.store.refused if self.store is not None else 0

    def publish(self, key: str, text: str) -> None:
        """Put a text into the store of this replica, if it has one, where others can read it over the network."""
        if self.store is not None:
            self.store.set(key, text.encode())

    def stop_heartbeats(self) -> None:
        """Send no more heartbeats; everything else stays as it is. This may be called from any thread."""
        if (server := self._server) is not None:
            with contextlib.suppress(RuntimeError):
                server.shutdown()

    def close(self) -> None:
        """Close everything, for good."""
        self.unregister()
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    def unregister(self) -> None:
        """Close the store and end the heartbeats; the lighthouse forgets this replica when its heartbeat times out."""
        self.stop_heartbeats()
        self._server = self._client = None
        self._close_store()
        self.name = self._new_name()

    def _close_store(self) -> None:
        if self.store is not None:
            self.store.close()
            self.store = None

    def _nobody_listens(self, deadline: float) -> str:
        """Wait until somebody listens at the address of the lighthouse; why not, if nobody does by the deadline.

        torchft would wait, too, but a replica that is told to leave meanwhile could not interrupt it.
        """
        while True:
            try:
                socket.create_connection(parse_address(self._config.lighthouse), timeout=_PROBE_TIMEOUT_S).close()
                return ""
            except OSError as error:
                if monotonic() > deadline or self._leaving():
                    return error.strerror or str(error)
            sleep(_PROBE_AGAIN_S)

    def _unreachable(self, reason: str) -> MembershipEvent:
        if self._leaving():
            return ToldToLeave(now=monotonic())
        return LighthouseUnreachable(now=monotonic(), reason=reason)
