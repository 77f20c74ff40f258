from __future__ import annotations

import io
import json
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ebbflow.errors import ConfigError
from ebbflow.live.fleet_status import combine, members_table
from ebbflow.live.protocol import (
    STATUS_KEY,
    LighthouseStatus,
    ReplicaStatus,
    fetch_lighthouse_status,
    find_folder,
    is_loopback,
    local_address_towards,
    parse_address,
    parse_heartbeat_ages,
    parse_lighthouse_page,
    read_statuses,
)

PAGE = """
Current quorum_id: 7 <br>
Next quorum status: New quorum not ready, only have 0 participants, need min_replicas 1
<h3>Previous Quorum</h3>
Previous quorum id: 7 <br>
Num participants: 2 <br>
Quorum age:
0.83071074s
<div class="member

">
  <b>r1:uuid1</b> <br/>
  Step: 40 <br/>
  Manager: http://127.0.0.1:1 <br/>
  TCPStore: 127.0.0.1:2 <br/>
</div>
<div class="member
recovering
">
  <b>r0:uuid0</b> <br/>
  Step: 0 <br/>
</div>
<h2>Heartbeats</h2>
<ul>
  <li class="heartbeat

  ">
    r1:uuid1: seen 0.027221429s ago
  </li>
  <li class="heartbeat

  ">
    r0:uuid0: seen 0.1s ago
  </li>
  <li class="heartbeat
    old
  ">
    r0:earlier: seen 830.9s ago
  </li>
</ul>
"""


def said(state: str, **values: Any) -> ReplicaStatus:
    return ReplicaStatus(state=state, time=1000.0, **values)


def test_the_page_of_the_lighthouse_is_read() -> None:
    assert parse_lighthouse_page(PAGE) == LighthouseStatus(
        quorum_id=7,
        quorum_age_s=0.83071074,
        steps={"r1": 40, "r0": 0},
        recovering=frozenset({"r0"}),
        stores={"r1": "127.0.0.1:2"},
        heartbeat_ages={"r1": 0.027221429, "r0": 0.1},
    )


def test_heartbeats_are_read_from_the_page_of_the_lighthouse() -> None:
    assert parse_heartbeat_ages(PAGE) == {"r1:uuid1": 0.027221429, "r0:uuid0": 0.1, "r0:earlier": 830.9}
    assert parse_heartbeat_ages("nothing of the kind") == {}


def test_what_lighthouse_and_replicas_say_becomes_one_picture() -> None:
    statuses = {
        "r1": said("training", step=43, epoch=1, batch=64, lr=0.2, multiplier=2.0, samples_per_s=640.0, loss=0.5),
        "r2": said("training", step=12, batch=32),  # killed: nobody hears of it
        "r3": said("finished", step=9),
        "r4": said("starting"),
    }
    picture = combine("127.0.0.1:1", parse_lighthouse_page(PAGE), statuses)
    assert [(m.name, m.state, m.step) for m in picture.members] == [
        ("r0", "recovering", 0), ("r1", "training", 43), ("r2", "dead", 12), ("r3", "finished", 9),
        ("r4", "starting", None),
    ]  # fmt: skip
    assert (picture.step, picture.batch, picture.lr, picture.samples_per_s) == (43, 64, 0.2, 640.0)


def test_without_status_files_the_lighthouse_is_believed() -> None:
    picture = combine("127.0.0.1:1", parse_lighthouse_page(PAGE), {})
    assert [(m.name, m.state) for m in picture.members] == [("r0", "recovering"), ("r1", "training")]
    assert (picture.step, picture.batch) == (40, None)


def test_the_table_fits_eighty_columns() -> None:
    statuses = {"r1": said("training", step=430_000, epoch=100, batch=65536, lr=0.0123456, multiplier=123.456,
                           samples_per_s=1234567.8, loss=0.12345)}  # fmt: skip
    page = Console(file=io.StringIO(), width=80)
    page.print(members_table(combine("10.0.0.1:29510", parse_lighthouse_page(PAGE), statuses)))
    assert isinstance(page.file, io.StringIO)
    lines = page.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) == 6  # a head, the columns' names, two replicas, the fleet in two
    assert "1,234,568 samples/s" in lines[-2]


@pytest.fixture
def lighthouse() -> Iterator[tuple[str, Any]]:
    pytest.importorskip("torchft", reason="the live extra is not installed")
    from ebbflow.live.processes import LighthouseOptions, listen
    from ebbflow.live.torchft_api import load_compiled_part

    server = listen(LighthouseOptions(heartbeat_timeout_ms=60_000))
    address = f"127.0.0.1:{str(server.address()).rpartition(':')[2]}"
    yield address, load_compiled_part().LighthouseClient(f"http://{address}", timedelta(seconds=10))
    server.shutdown()


def test_a_real_lighthouse_is_asked(lighthouse: tuple[str, Any]) -> None:
    address, client = lighthouse
    assert fetch_lighthouse_status(address) == LighthouseStatus(quorum_id=0)
    client.quorum(
        replica_id="r5:abc", timeout=timedelta(seconds=10), address="http://127.0.0.1:1", store_address="127.0.0.1:2",
        step=17, world_size=1, shrink_only=False,
    )  # fmt: skip
    quorum = fetch_lighthouse_status(address)
    assert quorum.steps == {"r5": 17}
    assert set(quorum.heartbeat_ages) == {"r5"}
    assert quorum.quorum_id > 0


def test_replicas_are_asked_over_the_network_where_their_files_are_not_seen() -> None:
    from torch.distributed import TCPStore

    from ebbflow.live.connection import fetch_statuses

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    silent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set(STATUS_KEY, json.dumps({"state": "training", "time": 1.0, "step": 4, "batch": 64}))
    address = f"127.0.0.1:{store.port}"
    quorum = LighthouseStatus(
        quorum_id=1,
        stores={"r0": address, "r1": f"127.0.0.1:{silent.port}", "r2": "127.0.0.1:1", "dead": address},
        heartbeat_ages={"r0": 0.1, "r1": 0.1, "r2": 0.1},
    )
    assert fetch_statuses(quorum) == {"r0": ReplicaStatus(state="training", time=1.0, step=4, batch=64)}


def test_what_is_no_lighthouse_is_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(10_000)
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\nhello")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConfigError, match="is not a lighthouse"):
            fetch_lighthouse_status(address)
        thread.join()
    with pytest.raises(ConfigError, match=f"no lighthouse answers at {address}"):
        fetch_lighthouse_status(address)


def test_the_folder_of_a_job_is_found_by_its_lighthouse(tmp_path: Path) -> None:
    for name, text in {"a": "{", "b": '{"lighthouse": "127.0.0.1:5"}', "c": "[]"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "fleet.json").write_text(text)
    assert find_folder("127.0.0.1:5", tmp_path) == tmp_path / "b"
    assert find_folder("127.0.0.1:6", tmp_path) is None
    status = tmp_path / "b" / "replicas" / "r0" / "status.json"
    status.parent.mkdir(parents=True)
    status.write_text(json.dumps({"state": "training", "time": time.time(), "step": 3}))
    assert read_statuses(tmp_path / "b")["r0"].step == 3


def test_addresses() -> None:
    assert parse_address("http://head:80/") == ("head", 80)
    for text in ("", "host", "host:", ":5", "host:70000", "[::1", "[::1]", "host:x"):
        with pytest.raises(ConfigError, match="is not an address"):
            parse_address(text)
    with pytest.raises(ConfigError, match="goes into brackets"):
        parse_address("::1:80")
    assert [is_loopback(host) for host in ("127.0.0.9", "::1", "localhost", "10.0.0.1", "head")] == [True] * 3 + [
        False
    ] * 2
    assert local_address_towards("127.0.0.1", 1) == "127.0.0.1"
    with pytest.raises(ConfigError, match="cannot be reached from here"):
        local_address_towards("no-such-host.invalid", 1)
