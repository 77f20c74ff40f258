"""How the replicas of a quorum meet, and what keeps them from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

pytest.importorskip("torchft", reason="the live engine needs torchft: pip install 'ebbflow[live]'")

from ebbflow.core.key_store import KeyStore, KeyStoreClient, NotAuthenticated
from ebbflow.live.membership_events import Handshake, ReplicaState, SendHandshake
from ebbflow.live.protocol import ReplicaConfig
from ebbflow.live.registration import Registration
from ebbflow.live.rendezvous import RefusedConnections

pytestmark = pytest.mark.process

SECRET = b"the secret of the job"
HANDSHAKE = Handshake(name="a", store="", state=ReplicaState(step=0, lineage=0), job={}, objects=False, attempt=1)


@pytest.fixture
def registration() -> Iterator[Registration]:
    """Of a replica that has a store, and no lighthouse."""
    config = ReplicaConfig(lighthouse="127.0.0.1:1", folder="", job="j", replica="a")  # type: ignore[arg-type]
    registration = Registration(config, SECRET, lambda: False)
    with closing(KeyStore("127.0.0.1", SECRET)) as store:
        registration.store = store
        yield registration
        registration.store = None


def test_a_replica_with_another_secret_that_came_before_the_handshake_began_is_not_waited_for(
    registration: Registration,
) -> None:
    """The lighthouse names both in a quorum, and its answer reaches the one with the other secret first."""
    assert registration.store is not None
    before = registration.refused  # when this replica asks the lighthouse
    with pytest.raises(NotAuthenticated):
        KeyStoreClient("127.0.0.1", registration.store.port, b"another secret than that", timeout_s=10.0)
    meeting = f"127.0.0.1:{registration.store.port}/quorum"
    instruction = SendHandshake(rendezvous=meeting, names=("a", "b"), rank=0, handshake=HANDSHAKE)
    refused = RefusedConnections(instruction, registration, before)
    assert refused.failure(100.0) is None  # handshakes may come after all
    failure = refused.failure(101.0)
    assert failure is not None and failure.foreign
    assert registration.store.peek("quorum/handshake/1") == b"refused"  # which others of the quorum read
