"""The parts of a replica by themselves: what it is told, its checkpoints, its record, its faults."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ebbflow.errors import CheckpointError, ConfigError
from ebbflow.live.protocol import FleetConfig, ReplicaConfig
from ebbflow.live.replica_files import Checkpoints, ReplicaRecord, read_checkpoint
from ebbflow.record import Event, Header, read_record

TOLD = {"EBBFLOW_LIGHTHOUSE": "10.0.0.7:1", "EBBFLOW_REPLICA": "r2", "EBBFLOW_FOLDER": "f"}


def test_a_replica_is_told_by_its_environment_and_a_script_may_override() -> None:
    settings = ReplicaConfig.from_environment({**TOLD, "EBBFLOW_HEARTBEAT_TIMEOUT_MS": "700"}, replica="r3", bind=None)
    assert settings.replica == "r3" and settings.heartbeat_timeout_ms == 700 and settings.bind == "127.0.0.1"
    assert settings.own_folder == Path("f/replicas/r3")


def test_a_replica_reads_what_the_launcher_writes() -> None:
    fleet = FleetConfig(lighthouse="10.0.0.7:1", folder=Path("f"), job="j", min_replicas=2, heartbeat_timeout_ms=700)
    told = fleet.for_replica("r2")
    assert told.environment()["EBBFLOW_MIN_REPLICAS"] == "2"
    assert ReplicaConfig.from_environment(told.environment()) == told


def test_the_documentation_names_every_variable_of_a_replica() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "live.md").read_text()
    for variable, one in ReplicaConfig.variables():
        default = "" if one.default is dataclasses.MISSING else f" ({one.default})"
        assert f"| `{variable}` | {one.metadata['doc']}{default} |" in text


@pytest.mark.parametrize("missing", ["LIGHTHOUSE", "REPLICA", "FOLDER"])
def test_what_is_missing_is_named_with_the_command_that_mends_it(missing: str) -> None:
    told = {key: value for key, value in TOLD.items() if not key.endswith(missing)}
    with pytest.raises(ConfigError, match=rf"EBBFLOW_{missing} not set.*ebbflow launch"):
        ReplicaConfig.from_environment(told)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"EBBFLOW_MIN_REPLICAS": "two"}, "EBBFLOW_MIN_REPLICAS is 'two'; expected a whole number"),
        ({"EBBFLOW_MIN_REPLICAS": "0"}, "min_replicas is 0"),
        ({"EBBFLOW_REPLICA": "../r2"}, "expected letters"),
    ],
)
def test_bad_settings_are_refused(more: dict[str, str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        ReplicaConfig.from_environment({**TOLD, **more})


def checkpoints(folder: Path) -> tuple[Checkpoints, list[tuple[str, str]]]:
    heard: list[tuple[str, str]] = []
    return Checkpoints(folder, keep=2, on_event=lambda what, text: heard.append((what, text))), heard


def test_the_last_few_checkpoints_are_kept_and_the_newest_is_found(tmp_path: Path) -> None:
    store, heard = checkpoints(tmp_path / "checkpoints")
    assert store.newest() is None
    for step in (5, 10, 100):
        store.save(b"state %d" % step, step=step, lineage=step)
        store.wait()
    assert [path.name for path in store.names()] == [
        "step-000000100-000000000064.ckpt",
        "step-000000010-00000000000a.ckpt",
    ]
    assert store.newest() == (store.names()[0], b"state 100") and heard == []


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "foreign"])
def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path: Path, damage: str) -> None:
    store, heard = checkpoints(tmp_path)
    for step in (1, 2):
        store.save(b"x" * 1000, step=step, lineage=0)
        store.wait()
    newest, older = store.names()
    whole = newest.read_bytes()
    flipped = whole[:-1] + bytes([whole[-1] ^ 1])
    newest.write_bytes({"cut": whole[:-1], "flipped": flipped, "emptied": b"", "foreign": b"PK\x03\x04"}[damage])
    with pytest.raises(CheckpointError, match="damaged"):
        read_checkpoint(newest)
    assert store.newest() == (older, b"x" * 1000)
    assert heard[0][0] == "checkpoint damaged" and newest.name in heard[0][1]


def _save_on_a_full_disk(folder: Path, answers: multiprocessing.SimpleQueue) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store, heard = checkpoints(folder)
    store.save(b"small", step=1, lineage=0)
    store.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # the system refuses to write more, as a full disk does
    store.save(bytes(100_000), step=2, lineage=0)
    store.wait()
    answers.put((heard, [path.name for path in store.names()], sorted(os.listdir(folder))))  # noqa: PTH208


def test_a_full_disk_costs_a_checkpoint_and_not_the_training(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=_save_on_a_full_disk, args=(tmp_path, answers))
    process.start()
    heard, names, files = answers.get()
    process.join()
    assert [what for what, _ in heard] == ["checkpoint failed"] and "training goes on" in heard[0][1]
    assert names == files == ["step-000000001-000000000000.ckpt"], "the older one is whole, and nothing half-written"


def test_a_record_goes_on_after_a_kill_in_the_middle_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    first = ReplicaRecord(path, Header)
    first.event(3, "members", "r0")
    first.close()
    with path.open("ab") as file:
        file.write(b'{"kind":"step","st')  # the process is gone
    second = ReplicaRecord(path, Header)
    second.event(4, "members", "r0 r1")
    second.close()
    run = read_record(path)
    assert run.events == [Event(step=3, what="members", text="r0"), Event(step=4, what="members", text="r0 r1")]
    assert run.damage == ""


def _write_on_a_full_disk(path: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    journal = ReplicaRecord(path, Header)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, resource.RLIM_INFINITY))
    for step in range(5):
        journal.event(step, "members", "r0")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    journal.event(5, "members", "r0")
    journal.close()


def test_rows_wait_in_memory_while_the_disk_is_full(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_write_on_a_full_disk, args=(tmp_path / "r.jsonl",))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert [event.step for event in read_record(tmp_path / "r.jsonl").events] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "module", ["live.accounting", "live.launcher", "live.membership", "live.trace_replay", "cli.launch", "cli.replay"]
)
def test_launching_and_accounting_need_no_torch(module: str) -> None:
    code = f"import sys, ebbflow.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
