"""Process groups whose processes are threads of this one: gloo does not mind."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbflow.core.key_store import KeyStore, StoreLost
from ebbflow.engines import process_group
from ebbflow.engines.process_group import PeerLost, ProcessGroup, open_store

pytestmark = pytest.mark.process

SECRET = b"of this test"


def in_group(*tasks: Callable[[ProcessGroup], Any], **settings: Any) -> list[Any]:
    """Each task in a thread of its own, with its end of a connected group; their results by rank."""
    store = KeyStore("127.0.0.1", SECRET)
    settings = {"connect_s": 20.0, "timeout_s": 20.0, "secret": SECRET, **settings}

    def run(rank: int) -> Any:
        own = store if rank == 0 else None
        group = ProcessGroup(f"127.0.0.1:{store.port}/g", rank, len(tasks), host="127.0.0.1", store=own, **settings)
        group.connect()
        try:
            return tasks[rank](group)
        finally:
            group.close()

    with ThreadPoolExecutor(len(tasks)) as threads:
        return list(threads.map(run, range(len(tasks))))


@pytest.mark.parametrize("stopped", [None, list])
def test_an_all_reduce_leaves_the_same_sum_everywhere(stopped: Callable[[], list[str]] | None) -> None:
    def add_up(group: ProcessGroup) -> list[float]:
        tensor = torch.tensor([1.0, 10.0 * group.rank])
        group.all_reduce(tensor)
        return tensor.tolist()

    assert in_group(add_up, add_up, add_up, stopped=stopped) == [[3.0, 30.0]] * 3


def test_bytes_are_sent_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "CHUNK_BYTES", 1000)
    data = bytearray(range(256)) * 10
    passed: list[str] = []
    sent, received = in_group(
        lambda group: group.send(memoryview(data), 1), lambda group: bytes(group.receive(0)), fault=passed.append
    )
    assert sent is None and received == bytes(data)
    # 2560 bytes are three messages; the code that authenticates them is one more.
    assert [passed.count(point) for point in ("announce", "send", "announced", "receive")] == [1, 4, 1, 4]


@pytest.mark.parametrize("changed", ["announced", "data"])
def test_bytes_from_a_sender_without_the_secret_are_refused(changed: str) -> None:
    # The connection of gloo itself is not authenticated: a process that got hold of it can send whatever it likes.
    def forge(group: ProcessGroup) -> None:
        if changed == "announced":
            group._secret = b"a guess"
            group.send(memoryview(bytearray(1 << 20)), 1)
        else:
            honest, seen = group._pass_on, list[int]()

            def flip(how: Any, chunk: torch.Tensor, *more: Any) -> None:
                seen.append(len(chunk))
                honest(how, chunk ^ 1 if len(seen) == 2 else chunk, *more)

            group._pass_on = flip  # type: ignore[method-assign]
            group.send(memoryview(bytearray(100)), 1)
            assert seen == [40, 100, 32]

    def refuse(group: ProcessGroup) -> None:
        with pytest.raises(PeerLost, match="does not know the secret"):
            group.receive(0)

    def attack(group: ProcessGroup) -> None:
        with contextlib.suppress(PeerLost):  # the other side has gone
            forge(group)

    in_group(attack, refuse)


def test_tensors_that_were_changed_on_the_way_are_refused() -> None:
    def attack(group: ProcessGroup) -> None:
        group._secret = b"a guess"
        with contextlib.suppress(PeerLost):  # the other side has gone
            group.send_tensors([torch.ones(3), torch.zeros(5)], 1)

    def refuse(group: ProcessGroup) -> None:
        with pytest.raises(PeerLost, match="does not know the secret"):
            group.receive_tensors([torch.empty(3), torch.empty(5)], 0)

    in_group(attack, refuse)


def test_a_broadcast_gives_all_the_bytes_of_one() -> None:
    assert in_group(*[lambda group: group.broadcast(b"%d" % group.rank * 3, 1)] * 3) == [b"111"] * 3


def test_a_group_of_one_connects_with_nobody() -> None:
    group = ProcessGroup("nowhere:1/g", 0, 1, host="127.0.0.1", secret=SECRET, connect_s=1, timeout_s=1)
    group.connect()
    tensor = torch.ones(2)
    group.all_reduce(tensor)
    assert tensor.tolist() == [1.0, 1.0] and group.broadcast(b"own", 0) == b"own"


@pytest.mark.parametrize("stopped", [None, list])
def test_whoever_waits_for_a_peer_that_closes_its_connections_is_told(
    stopped: Callable[[], list[str]] | None,
) -> None:
    connected = threading.Event()

    def wait(group: ProcessGroup) -> None:
        connected.set()
        with pytest.raises(PeerLost):
            group.all_reduce(torch.ones(2))

    in_group(wait, lambda group: connected.wait(), stopped=stopped)


@pytest.mark.parametrize("what", ["all_reduce", "receive"])
def test_a_peer_that_has_stopped_is_not_waited_for(what: str) -> None:
    finished = threading.Event()

    def wait(group: ProcessGroup) -> None:
        argument = torch.ones(2) if what == "all_reduce" else 1
        try:
            with pytest.raises(PeerLost, match="no heartbeat of r1"):
                getattr(group, what)(argument)
        finally:
            finished.set()

    in_group(wait, lambda group: finished.wait(), stopped=lambda: ["r1"], timeout_s=2.0)


def test_gloo_is_not_waited_for_longer_than_connecting_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits five times as long for a peer that does not connect with it; the stand-in waits until it may end."""
    over, ended = threading.Event(), threading.Event()

    def waits(*arguments: Any, **options: Any) -> object:
        over.wait(60)
        ended.set()
        return object()

    monkeypatch.setattr(process_group, "gloo_group", waits)
    monkeypatch.setattr(process_group, "_CONNECT_SLACK_S", 0.0)
    store = KeyStore("127.0.0.1", SECRET)
    try:
        group = ProcessGroup(
            f"127.0.0.1:{store.port}/g", 0, 2, host="127.0.0.1", secret=SECRET, connect_s=0.5, timeout_s=20
        )
        with pytest.raises(PeerLost, match=r"could not connect within 0\.5 s"):
            group.connect()
        assert not ended.is_set()
        group.close()
    finally:
        over.set()
        store.close()
    assert ended.wait(60), "the thread ends with what it waited for"


def test_a_store_listens_on_one_address_and_ends_with_its_owner() -> None:
    store = KeyStore("127.0.0.1", SECRET)
    port = store.port
    ports = {
        line.split()[1]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and int(line.split()[1].rpartition(":")[2], 16) == port
    }
    assert ports == {f"0100007F:{port:04X}"}
    with open_store(f"127.0.0.1:{port}/a", SECRET, timeout_s=5) as client:
        client.set({"key": b"value"})
    with open_store(f"127.0.0.1:{port}/a", SECRET, timeout_s=5) as client:
        assert client.get(["key"], timeout_s=0) == [b"value"]
    with open_store(f"127.0.0.1:{port}/b", SECRET, timeout_s=5) as client:
        assert not client.check(["key"])
        store.close()
        with pytest.raises(StoreLost):
            client.get(["key"], timeout_s=20)
    with pytest.raises(StoreLost, match=f"no store at 127.0.0.1:{port}"):
        open_store(f"127.0.0.1:{port}/a", SECRET, timeout_s=0.1)
