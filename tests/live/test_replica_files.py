"""Checkpoints and records of a replica: what a kill or a full disk leaves of them."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
from pathlib import Path

import pytest

from ebbflow.errors import CheckpointError
from ebbflow.live.replica_files import Checkpoints, ReplicaRecord, read_checkpoint
from ebbflow.record import Event, Header, read_record


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


@pytest.mark.process
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


@pytest.mark.process
def test_rows_wait_in_memory_while_the_disk_is_full(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_write_on_a_full_disk, args=(tmp_path / "r.jsonl",))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert [event.step for event in read_record(tmp_path / "r.jsonl").events] == [0, 1, 2, 3, 4, 5]
