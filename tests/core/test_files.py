from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ebbflow.core.files import remove_leftovers, write_whole
from ebbflow.errors import OutputError


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
