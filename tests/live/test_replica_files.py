"""Records of a replica: what a kill or a full disk leaves of them."""

from __future__ import annotations

import multiprocessing
import resource
import signal
from pathlib import Path

import pytest

from ebbflow.live.replica_files import ReplicaRecord
from ebbflow.record import Event, Header, read_record


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


def _write_on_a_full_disk(path: Path, rows: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    record = ReplicaRecord(path, Header)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, resource.RLIM_INFINITY))
    for step in range(rows):
        record.event(step, "members", "r0")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    record.event(rows, "members", "r0")
    record.close()


@pytest.mark.process
@pytest.mark.parametrize("rows", [5, 5000], ids=["few", "more than a buffer holds"])
def test_rows_wait_in_memory_while_the_disk_is_full(tmp_path: Path, rows: int) -> None:
    path = tmp_path / "r.jsonl"
    process = multiprocessing.get_context("fork").Process(target=_write_on_a_full_disk, args=(path, rows))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert [event.step for event in read_record(path).events] == list(range(rows + 1))
