"""Whom a replica waits for in vain: the lighthouse and the stores are stand-ins, and the clock is a number."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("torchft", reason="the live engine needs torchft: pip install 'ebbflow[live]'")

from ebbflow.live import peer_watch
from ebbflow.live.peer_watch import PeerWatch
from live.fakes import until


class Questions:
    """All send heartbeats, and b is in another group than a."""

    heartbeat_timeout_s = 0.8

    def __init__(self) -> None:
        self.reads = 0
        self.answers = threading.Event()

    def quorum_and_ages(self) -> tuple[frozenset[str], dict[str, float]]:
        return frozenset({"a", "b"}), {"a": 0.0, "b": 0.0}

    def read_stores(self, names: Sequence[str], key: str) -> dict[str, bytes | None]:
        self.reads += 1
        assert self.answers.wait(60)
        return dict.fromkeys(names, b"another")


def test_a_peer_that_two_threads_see_elsewhere_at_the_same_time_is_not_there_twice_in_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may just have gone on after the same step, which this replica is about to commit, too."""
    now, questions = [100.0], Questions()
    monkeypatch.setattr(peer_watch, "monotonic", lambda: now[0])
    stand_in: Any = questions
    watch = PeerWatch(stand_in)

    def stopped() -> list[str]:
        return watch.stopped("a", ["b"], "group", lost=())

    found: list[list[str]] = []
    for now[0] in (100.0, 104.0):
        assert stopped() == []
    now[0] = 106.0
    first = threading.Thread(target=lambda: found.append(stopped()))
    first.start()
    until(lambda: questions.reads == 1)
    second = threading.Thread(target=lambda: found.append(stopped()))
    second.start()
    second.join(1.0)  # would wait for the stores, too
    questions.answers.set()
    first.join()
    second.join()
    assert found == [[], []] and questions.reads == 1
    for now[0], gone in ((110.0, []), (112.0, ["b"])):
        assert stopped() == gone
