"""Signs of life between the ranks of a replica."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any, cast

import pytest

from ebbflow.engines.replica_ranks import ReplicaRanks
from ebbflow.live import rank_watch
from ebbflow.live.rank_watch import RankWatch
from live.fakes import until

pytestmark = pytest.mark.process

SECRET = b"of the ranks of this replica"


@dataclass
class OneOfTwo:
    """A rank, without connections of torch: it is told what rank 0 shares."""

    rank: int
    size: int = 2
    shared: Any = None

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def share(self, value: Any) -> Any:
        self.shared = value if self.leads else self.shared
        return self.shared


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> tuple[RankWatch, RankWatch, list[str]]:
    """Those of rank 0 and rank 1, and why rank 0 gave the replica up."""
    monkeypatch.setattr(rank_watch, "INTERVAL_S", 0.01)
    monkeypatch.setattr(rank_watch, "MOST_MISSED", 10_000)  # a busy machine may keep a thread waiting for long
    reasons: list[str] = []
    ranks = [OneOfTwo(0), OneOfTwo(1)]
    first = RankWatch(cast(ReplicaRanks, ranks[0]), "127.0.0.1", SECRET, give_up=reasons.append)
    ranks[1].shared = ranks[0].shared
    return first, RankWatch(cast(ReplicaRanks, ranks[1]), "127.0.0.1", SECRET), reasons


def test_a_rank_that_gives_no_sign_of_life_is_given_up(
    watches: tuple[RankWatch, RankWatch, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_watch, "MOST_MISSED", 5)
    first, _, reasons = watches
    with first:
        until(lambda: bool(reasons))
    assert reasons[0].startswith("rank 1 of this replica has given no sign of life")


def test_a_rank_that_ends_with_the_training_is_not_given_up(watches: tuple[RankWatch, RankWatch, list[str]]) -> None:
    first, second, reasons = watches
    with first:
        with second:
            until(lambda: first._store is not None and first._store.peek("1") is not None)
        assert first._store is not None and first._store.peek("1 left") is not None
    assert not reasons


def test_a_rank_goes_on_to_give_signs_of_life_after_rank_0_was_stopped_for_a_while(
    watches: tuple[RankWatch, RankWatch, list[str]],
) -> None:
    """Rank 0 does not answer for longer than a request may take, so that the connection of rank 1 is gone."""
    first, second, reasons = watches
    store = first._store
    assert store is not None
    with first, second:
        until(lambda: store.peek("1") is not None)
        for connection in [*store._server.connections]:
            connection.shutdown(socket.SHUT_RDWR)
        before = int(store.peek("1") or 0)
        until(lambda: int(store.peek("1") or 0) > before + 3, seconds=20.0)  # one may have been under way
    assert not reasons
