from __future__ import annotations

import errno
import fcntl
import gzip
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ebbflow.core import files
from ebbflow.core.files import hold_lock, read_text, remove_leftovers, write_whole
from ebbflow.errors import ConfigError, OutputError, TraceError


def test_a_disk_that_fills_up_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "result"
    write_whole(target, b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left on device; nothing was changed"):
        write_whole(target, b"new" * 1000)
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["result"]


def test_what_a_kill_left_of_one_file_is_removed_and_nothing_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def kill(descriptor: int) -> None:
        raise Killed

    target = tmp_path / "result"
    write_whole(target, b"old")
    (tmp_path / ".result2.abc").write_bytes(b"of another file")
    monkeypatch.setattr(os, "fsync", kill)
    with pytest.raises(Killed):
        write_whole(target, b"new")
    assert len([*tmp_path.iterdir()]) == 3
    remove_leftovers(target)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".result2.abc", "result"]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written"):
        write_whole(tmp_path / "none" / "result", b"")


def test_a_gzip_file_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MOST_UNPACKED", 3 * 2**20)
    (tmp_path / "small.gz").write_bytes(gzip.compress(b"0\n" * 3 * 2**19))
    assert len(read_text(tmp_path / "small.gz", error=TraceError)) == 3 * 2**20
    (tmp_path / "large.gz").write_bytes(gzip.compress(b"0\n" * 3 * 2**19 + b"0"))
    with pytest.raises(TraceError, match=r"large.gz: unpacks to more than 3 MB; .* unpack it first \(gunzip\)"):
        read_text(tmp_path / "large.gz", error=TraceError)


def test_a_gzip_file_of_several_members_is_read_completely(tmp_path: Path) -> None:
    (tmp_path / "two.gz").write_bytes(gzip.compress(b"one\n") + gzip.compress(b"two\n"))
    assert read_text(tmp_path / "two.gz", error=TraceError) == "one\ntwo\n"


HOLDER = """
import sys, time
from pathlib import Path
from ebbflow.core.files import hold_lock

with hold_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock until its standard input is closed."""
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


@pytest.mark.process
def test_a_lock_that_another_process_holds_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / ".lock"
    with holder(path), pytest.raises(ConfigError, match="wait for it"), hold_lock(path, busy="in use; wait for it"):
        pass
    with hold_lock(path, busy="the holder has ended"):
        assert path.exists()


@pytest.mark.process
def test_a_lock_is_free_after_the_holder_was_killed(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with holder(path) as process:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with hold_lock(path, busy="still held"):
            pass


@pytest.mark.process
def test_without_a_text_it_waits_for_the_lock(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    waiting, got = threading.Event(), threading.Event()

    def wait() -> None:
        waiting.set()
        with hold_lock(path):
            got.set()

    with holder(path) as process:
        thread = threading.Thread(target=wait)
        thread.start()
        waiting.wait()
        assert not got.wait(0.3), "the other process still holds it"
        assert process.stdin is not None
        process.stdin.close()
        assert got.wait(60)
        thread.join()


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_a_file_system_without_locks_does_not_stop_anybody(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    for _ in range(2):
        with hold_lock(tmp_path / ".lock", busy="in use"), hold_lock(tmp_path / ".lock"):
            pass


def test_an_error_inside_frees_the_lock_and_is_raised(tmp_path: Path) -> None:
    with pytest.raises(KeyError), hold_lock(tmp_path / ".lock", busy="in use"):
        raise KeyError
    with hold_lock(tmp_path / ".lock", busy="in use"):
        pass


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = r"file: cannot be written: .*; choose another folder"
    with pytest.raises(OutputError, match=message), hold_lock(tmp_path / "file" / ".lock"):
        pass
