"""How the replicas of a quorum meet: they exchange handshakes in the store of one of them, and then connect."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from time import monotonic

import torch

from ebbflow.core.key_store import NotAuthenticated, StoreLost
from ebbflow.engines.process_group import BackendFailed, PeerLost, ProcessGroup, open_store
from ebbflow.live.membership_events import (
    ConnectionFailed,
    GroupConnected,
    Handshake,
    HandshakeFailed,
    HandshakesReceived,
    MembershipEvent,
    SendHandshake,
)
from ebbflow.live.registration import Registration

__all__ = ["RefusedConnections", "connect_group", "connection_failed", "exchange_handshakes"]

_READ_AGAIN_S = 0.1  # before handshakes that not all replicas confirm are read again
_AFTER_REFUSAL_S = 0.5  # for handshakes to come after all, when this replica's store has refused a connection
_REFUSED = b"refused"
"""What stands in the place of a handshake that will not come."""


def exchange_handshakes(
    instruction: SendHandshake, secret: bytes, *, timeout_s: float, abandoned: threading.Event
) -> MembershipEvent:
    """Exchange handshakes, and make sure that all replicas have read the same ones.

    The store may hold handshakes of an earlier quorum with the same number, which a lighthouse that was restarted
    has given twice. So each replica also sets a key with a digest of all handshakes that it has read: nobody can
    know the digest of a handshake that has just been written without having read it.

    `abandoned` is set when nobody waits for the outcome any longer.
    """
    own, ranks = instruction.rank, range(len(instruction.names))
    deadline = monotonic() + timeout_s
    try:
        with open_store(instruction.rendezvous, secret, timeout_s=timeout_s) as store:
            store.set({f"handshake/{own}": instruction.handshake.encode().encode()})
            while monotonic() < deadline and not abandoned.is_set():
                texts = store.get([f"handshake/{rank}" for rank in ranks], timeout_s=_READ_AGAIN_S)
                if texts is None:
                    continue
                if _REFUSED in texts:
                    raise StoreLost("a replica of the quorum does not know the secret of the others")
                handshakes = tuple(Handshake.decode(text) for text in texts)
                digest = hashlib.sha256(b"\0".join(texts)).hexdigest()
                store.set({f"confirmed/{own}/{digest}": b""})
                if store.get([f"confirmed/{rank}/{digest}" for rank in ranks], timeout_s=_READ_AGAIN_S) is None:
                    continue
                return HandshakesReceived(now=monotonic(), handshakes=handshakes)
        raise StoreLost("not all replicas answered")
    except (StoreLost, ValueError) as error:  # the store ended with the replica that had it
        foreign = isinstance(error, NotAuthenticated)
        return HandshakeFailed(now=monotonic(), reason=f"the handshake failed: {error}", foreign=foreign)


class RefusedConnections:
    """Whether this replica's store refuses a connection during a handshake; made before the handshake begins.

    If it does, then a replica of the quorum probably has another secret, and its handshake will not come. Such a
    replica may know of the quorum before this one, and may have come already.
    """

    def __init__(self, instruction: SendHandshake, registration: Registration, before: int) -> None:
        """`before`: how many connections the store had refused when this replica asked for the quorum."""
        self._instruction, self._registration, self._before = instruction, registration, before
        if (store := registration.store) is not None:
            store.forget(_REFUSED)  # a quorum may have the number of an earlier one
        self._first_at: float | None = None

    def failure(self, now: float) -> HandshakeFailed | None:
        """The end of the handshake, a while after the store has refused a connection. The others learn of it, too."""
        store = self._registration.store
        if self._first_at is None and self._registration.refused > self._before:
            self._first_at = now
        if self._first_at is None or now - self._first_at < _AFTER_REFUSAL_S:
            return None
        if store is not None:  # the others need not wait for what will not come
            prefix = self._instruction.rendezvous.partition("/")[2]
            store.complete([f"{prefix}/handshake/{rank}" for rank in range(len(self._instruction.names))], _REFUSED)
        reason = "a replica that came to this one's store does not know the secret of this one"
        return HandshakeFailed(now=now, reason=f"the handshake failed: {reason}", foreign=True)


def connect_group(group: ProcessGroup, device: torch.device) -> MembershipEvent:
    """Connect a group, whose collectives use a device; what came of it."""
    try:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            group.connect()
    except PeerLost as error:
        return connection_failed(error)
    return GroupConnected(now=monotonic())


def connection_failed(error: PeerLost) -> ConnectionFailed:
    """The event that reports a failure of the connections with the peers."""
    return ConnectionFailed(now=monotonic(), reason=str(error), backend=isinstance(error, BackendFailed))
