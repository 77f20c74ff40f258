"""Attacks on a fleet, with real replicas and real sockets on loopback: what a process without the secret can do."""

from __future__ import annotations

import errno
import io
import json
import os
import urllib.error
import urllib.request
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from live.harness import TestFleet, eventually

pytest.importorskip("torchft", reason="the live engine needs torchft: pip install 'ebbflow[live]'")

from contract.suite import EPOCHS, SAMPLES
from ebbflow.core.key_store import KeyStore, NotAuthenticated
from ebbflow.engines.process_group import open_store
from ebbflow.errors import ConfigError, OutputError
from ebbflow.live import torchft_api
from ebbflow.live.accounting import read_fleet
from ebbflow.live.membership_events import Handshake, ReplicaState
from ebbflow.live.protocol import create_secret, fetch_heartbeat_ages, find_secret


def finishes(group: TestFleet, folder: Path) -> None:
    """Both replicas train to the end, alone, and from their own state."""
    group.stop_holding()
    assert group.wait("r0", "r1") == {"r0": 0, "r1": 0}
    account, runs = read_fleet(folder)
    assert account.mistakes == () and account.samples == EPOCHS * SAMPLES
    # 97 samples in steps of 8, since no step is of one lone sample: 13 steps per epoch
    assert {run.end.steps if run.end else 0 for run in runs} == {13 * EPOCHS}
    assert not [event for run in runs for event in run.events if event.what == "received"]


class Intruder:
    """A process that reaches the lighthouse and knows everything but the secret. It claims to be far ahead."""

    def __init__(self, name: str, group: TestFleet, job: dict[str, str]) -> None:
        self.job = job
        self.store = KeyStore("127.0.0.1", b"not the secret of the job")
        self.address = f"127.0.0.1:{self.store.port}"
        self.name = f"{name}@{self.address}"
        lighthouse, timeout = f"127.0.0.1:{group.port}", timedelta(seconds=10)
        self.server = torchft_api.manager_server(
            self.name, lighthouse=lighthouse, heartbeat_interval=timedelta(seconds=0.1), connect_timeout=timeout
        )
        self.client = torchft_api.lighthouse_client(lighthouse, connect_timeout=timeout)

    def take_part(self) -> str:
        """Take a place in a quorum, and say what a replica would say; the address of the store where they meet."""
        quorum = torchft_api.request_quorum(
            self.client, name=self.name, store=self.address, step=10**6,
            data={"group": "[]", "established": "True"}, timeout=timedelta(seconds=60),
        )  # fmt: skip
        assert len(quorum.participants) == 3
        state = ReplicaState(step=10**6, lineage=1, established=True)
        said = Handshake(name=self.name, store=self.address, state=state, job=self.job).encode().encode()
        for rank in range(3):
            self.store.set(f"ebbflow/{quorum.quorum_id}/handshake/{rank}", said)
        return str(quorum.participants[0].store_address)

    def leave(self) -> None:
        self.server.shutdown()
        self.store.close()


@pytest.mark.process
@pytest.mark.parametrize("name", ["a:first", "z:last"])
def test_a_process_without_the_secret_that_claims_to_be_ahead_changes_nothing(
    fleet: Any, tmp_path: Path, name: str
) -> None:
    # All are to meet at the store of the first by name: that of the intruder, or that of r0.
    group = fleet(all=["r0", "r1"], hold=3)
    group.start("r0", "r1")
    group.trains("r0", "r1", step=4)
    header = json.loads((tmp_path / "replicas" / "r0" / "record.jsonl").read_text().splitlines()[0])
    intruder = Intruder(name, group, {key: str(value) for key, value in header.items()})
    meeting = intruder.take_part()
    if name == "a:first":
        assert meeting == intruder.address
        eventually(lambda: intruder.store.refused, "a replica comes to the store of the intruder, and leaves")
    else:
        with pytest.raises(NotAuthenticated):
            open_store(meeting, b"not the secret of the job", timeout_s=10)
    intruder.leave()
    finishes(group, tmp_path)


@pytest.mark.process
def test_replicas_with_another_secret_are_refused_whichever_comes_first(fleet: Any, tmp_path: Path) -> None:
    group = fleet(all=["r0", "r1"], hold=3)
    group.start("r0", "r1")
    group.trains("r0", "r1", step=4)
    group.start("a", "z", all=None, environment={"EBBFLOW_SECRET": "of quite another job"})
    assert group.wait("a", "z") == {"a": 1, "z": 1}
    for name in ("a", "z"):
        assert "its secret" in group.status(name)["reason"] and group.status(name)["state"] == "refused"
        (tmp_path / "replicas" / name / "record.jsonl").unlink()
    finishes(group, tmp_path)


@pytest.mark.process
def test_the_button_of_the_lighthouse_that_kills_replicas_does_not_reach_them(fleet: Any, tmp_path: Path) -> None:
    group = fleet(all=["r0", "r1"], hold=3)
    group.start("r0", "r1")
    group.trains("r0", "r1", step=4)
    for name in fetch_heartbeat_ages(f"127.0.0.1:{group.port}", timeout_s=10):
        request = urllib.request.Request(f"http://127.0.0.1:{group.port}/replica/{name}/kill", method="POST", data=b"")
        # The lighthouse tries for ten seconds to find the replica; there is no need to wait for its answer, an error.
        with pytest.raises((urllib.error.HTTPError, TimeoutError)):
            urllib.request.urlopen(request, timeout=1)
    step = group.status("r0")["step"]
    group.trains("r0", "r1", step=step + 2)
    finishes(group, tmp_path)


# The secret -----------------------------------------------------------------------------------------------------------


def test_the_secret_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    made = create_secret(tmp_path / "job", {})
    path = tmp_path / "job" / "secret"
    assert path.stat().st_mode & 0o777 == 0o600 and len(made) == 64
    assert create_secret(tmp_path / "job", {}) == find_secret(tmp_path / "job", {}) == made
    assert create_secret(tmp_path / "other", {}) != made
    assert [entry.name for entry in path.parent.iterdir()] == ["secret"]


def test_a_secret_that_exists_is_found_while_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = create_secret(tmp_path, {})

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "open", full)
    assert create_secret(tmp_path, {}) == made


def test_a_secret_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def full(descriptor: int, mode: str) -> Full:
        os.close(descriptor)
        return Full()

    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(OutputError, match="secret: cannot be written: No space left on device"):
        create_secret(tmp_path, {})
    assert list(tmp_path.iterdir()) == []


def test_the_environment_goes_before_the_file_and_leaves_none(tmp_path: Path) -> None:
    variables = {"EBBFLOW_SECRET": "from the environment"}
    assert create_secret(tmp_path, variables) == find_secret(tmp_path, variables) == b"from the environment"
    assert list(tmp_path.iterdir()) == []


def test_a_secret_that_cannot_be_used_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"secret: no such file; set EBBFLOW_SECRET"):
        find_secret(tmp_path, {})
    with pytest.raises(ConfigError, match="not known here: set EBBFLOW_SECRET"):
        find_secret(None, {})
    with pytest.raises(ConfigError, match="has 5 characters; expected at least 16"):
        find_secret(None, {"EBBFLOW_SECRET": "short"})
    create_secret(tmp_path, {})
    os.chmod(tmp_path / "secret", 0o644)  # noqa: PTH101 - it is what a user would do
    with pytest.raises(ConfigError, match=r"can be read by others \(mode 644\); expected 600"):
        create_secret(tmp_path, {})
