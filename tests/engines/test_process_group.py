"""Process groups whose processes are threads of this one: gloo does not mind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbflow.engines import process_group
from ebbflow.engines.process_group import PeerLost, ProcessGroup, missing_members, open_store, serve_store


def test_the_installed_torch_has_all_that_is_used() -> None:
    assert not missing_members(), (
        f"torch {torch.__version__} lacks {missing_members()}, which ebbflow.engines.process_group uses: adapt that "
        f"module, or exclude this version in pyproject.toml"
    )


def in_group(*tasks: Callable[[ProcessGroup], Any], **settings: Any) -> list[Any]:
    """Each task in a thread of its own, with its end of a connected group; their results by rank."""
    store = serve_store("127.0.0.1")
    settings = {"connect_s": 20.0, "timeout_s": 20.0, **settings}

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
    monkeypatch.setattr(process_group, "_CHUNK", 1000)
    data = bytearray(range(256)) * 10
    passed: list[str] = []
    sent, received = in_group(
        lambda group: group.send(memoryview(data), 1), lambda group: bytes(group.receive(0)), fault=passed.append
    )
    assert sent is None and received == bytes(data)
    assert [passed.count(point) for point in ("announce", "send", "announced", "receive")] == [1, 3, 1, 3]


def test_a_broadcast_gives_all_the_bytes_of_one() -> None:
    assert in_group(*[lambda group: group.broadcast(b"%d" % group.rank * 3, 1)] * 3) == [b"111"] * 3


def test_a_group_of_one_connects_with_nobody() -> None:
    group = ProcessGroup("nowhere:1/g", 0, 1, host="127.0.0.1", connect_s=1, timeout_s=1)
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


def test_a_store_listens_on_one_address_and_ends_with_its_owner() -> None:
    store = serve_store("127.0.0.1")
    port = store.port
    ports = {
        line.split()[1]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and int(line.split()[1].rpartition(":")[2], 16) == port
    }
    assert ports == {f"0100007F:{port:04X}"}
    open_store(f"127.0.0.1:{port}/a", timeout_s=5).set("key", "value")
    assert open_store(f"127.0.0.1:{port}/a", timeout_s=5).get("key") == b"value"
    assert not open_store(f"127.0.0.1:{port}/b", timeout_s=5).check(["key"])
    del store
    with pytest.raises(PeerLost, match=f"no store at 127.0.0.1:{port}"):
        open_store(f"127.0.0.1:{port}/a", timeout_s=0.1)
