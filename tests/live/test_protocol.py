"""Addresses, the environment of a replica, status files and the page of the lighthouse."""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ebbflow.errors import ConfigError
from ebbflow.live.protocol import (
    FleetConfig,
    LighthouseStatus,
    ReplicaConfig,
    fetch_heartbeat_ages,
    fetch_lighthouse_status,
    find_folder,
    is_loopback,
    local_address_towards,
    parse_address,
    parse_bind,
    parse_heartbeat_ages,
    parse_lighthouse_page,
    read_status,
    read_statuses,
)
from live.fakes import LIGHTHOUSE_PAGE

VARIABLES = {"EBBFLOW_LIGHTHOUSE": "10.0.0.7:1", "EBBFLOW_REPLICA": "r2", "EBBFLOW_FOLDER": "f"}


def test_a_script_may_override_the_environment() -> None:
    config = ReplicaConfig.from_environment(
        {**VARIABLES, "EBBFLOW_HEARTBEAT_TIMEOUT_MS": "700"}, replica="r3", bind=None
    )
    assert config.replica == "r3" and config.heartbeat_timeout_ms == 700 and config.bind == "127.0.0.1"
    assert config.own_folder == Path("f/replicas/r3")


def test_a_replica_reads_what_the_launcher_writes() -> None:
    fleet = FleetConfig(lighthouse="10.0.0.7:1", folder=Path("f"), job="j", min_replicas=2, heartbeat_timeout_ms=700)
    config = fleet.for_replica("r2")
    assert config.environment()["EBBFLOW_MIN_REPLICAS"] == "2"
    assert ReplicaConfig.from_environment(config.environment()) == config


def test_the_documentation_names_every_variable_of_a_replica() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "live-operations.md").read_text()
    for variable, one in ReplicaConfig.variables():
        default = "" if one.default in (dataclasses.MISSING, "") else f" ({one.default})"
        assert f"| `{variable}` | {one.metadata['doc']}{default} |" in text


@pytest.mark.parametrize("missing", ["LIGHTHOUSE", "REPLICA", "FOLDER"])
def test_a_missing_variable_is_named_with_the_command_that_sets_it(missing: str) -> None:
    variables = {key: value for key, value in VARIABLES.items() if not key.endswith(missing)}
    with pytest.raises(ConfigError, match=rf"EBBFLOW_{missing} not set.*ebbflow launch"):
        ReplicaConfig.from_environment(variables)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"EBBFLOW_MIN_REPLICAS": "two"}, "EBBFLOW_MIN_REPLICAS is 'two'; expected a whole number"),
        ({"EBBFLOW_MIN_REPLICAS": "0"}, "min_replicas is 0"),
        ({"EBBFLOW_REPLICA": "../r2"}, "expected letters"),
    ],
)
def test_bad_config_are_refused(more: dict[str, str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        ReplicaConfig.from_environment({**VARIABLES, **more})


def test_a_damaged_or_foreign_status_file_is_no_status(tmp_path: Path) -> None:
    folder = tmp_path / "replicas" / "r0"
    folder.mkdir(parents=True)
    assert read_status(tmp_path, "r0") is None
    for text in ("", "{", "[]", '{"state": 3, "time": 1}', '{"state": "training"}'):
        (folder / "status.json").write_text(text)
        assert read_status(tmp_path, "r0") is None
    (folder / "status.json").write_text('{"state": "training", "time": 5, "step": true, "loss": NaN, "members": ["a"]}')
    status = read_status(tmp_path, "r0")
    assert status is not None
    assert (status.step, status.loss, status.members) == (None, None, None)


def test_the_page_of_the_lighthouse_is_read() -> None:
    assert parse_lighthouse_page(LIGHTHOUSE_PAGE) == LighthouseStatus(
        quorum_id=7,
        quorum_age_s=0.83071074,
        steps={"r1": 40, "r0": 0},
        recovering=frozenset({"r0"}),
        stores={"r1": "127.0.0.1:2"},
        heartbeat_ages={"r1": 0.027221429, "r0": 0.1},
    )


def test_heartbeats_are_read_from_the_page_of_the_lighthouse() -> None:
    assert parse_heartbeat_ages(LIGHTHOUSE_PAGE) == {"r1:uuid1": 0.027221429, "r0:uuid0": 0.1, "r0:earlier": 830.9}
    assert parse_heartbeat_ages("nothing of the kind") == {}


def test_a_name_that_looks_like_the_age_of_a_heartbeat_is_a_name() -> None:
    """Whoever reaches the lighthouse may choose it, and must not end those who read the page."""
    lines = ("x: seen ..s ago: seen 0.5s ago", "y: seen 0.1s ago")
    page = "".join(f'<li class="heartbeat">\n {line}\n</li>' for line in lines)
    assert parse_heartbeat_ages(page) == {"x: seen ..s ago": 0.5, "y": 0.1}


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


@pytest.mark.process
@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (b"HTTP/1.0 200 OK\r\n\r\nhello", "is not a lighthouse"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "not that of a web server"),
    ],
)
def test_what_is_not_a_lighthouse_is_recognized(said: bytes, problem: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def answer() -> None:
            for _ in range(2):
                connection, _ = server.accept()
                with connection:
                    connection.recv(10_000)
                    connection.sendall(said)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConfigError, match=problem):
            fetch_lighthouse_status(address)
        assert fetch_heartbeat_ages(address, timeout_s=10) == {}
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


@pytest.mark.process
@pytest.mark.parametrize(
    "module",
    [
        "live.accounting",
        "live.launcher",
        "live.membership",
        "live.trace_replay",
        "cli.launch_command",
        "cli.replay_command",
    ],
)
def test_launching_and_accounting_need_no_torch(module: str) -> None:
    code = f"import sys, ebbflow.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "text", ["0.0.0.0", "0", "0.0", "0x0", "000.000.000.000", "::", "[::]", "0:0::0", "::ffff:0.0.0.0", "*"]
)
def test_no_way_to_write_all_networks_is_an_address_to_listen_on(text: str) -> None:
    with pytest.raises(ConfigError, match="means every network of this machine"):
        parse_bind(text)
    with pytest.raises(ConfigError, match="means every network of this machine"):
        ReplicaConfig.from_environment({**VARIABLES, "EBBFLOW_BIND": text})


@pytest.mark.parametrize("text", ["127.0.0.1", "::1", "::ffff:127.0.0.1", "localhost", "no-such-host.invalid"])
def test_one_address_or_a_name_is_one_to_listen_on(text: str) -> None:
    assert parse_bind(text) == text
