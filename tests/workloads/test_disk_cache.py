"""The disk cache: an array is made once, found again, and shared by processes."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from ebbflow.workloads.disk_cache import disk_cached, disk_cached_in

SOURCE = np.arange(10, dtype=np.uint8)


class Maker:
    """Counts how often it was called."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self) -> np.ndarray:
        self.made += 1
        return np.arange(12).reshape(3, 4)


def test_an_array_is_made_once_and_found_again(tmp_path: Path) -> None:
    make = Maker()
    with disk_cached_in(tmp_path / "there"):
        first, second = (disk_cached("x", [SOURCE], make) for _ in range(2))
        other = disk_cached("x", [SOURCE + 1], make)
    assert make.made == 2, "another content is another file"
    for array in (first, second, other):
        assert array.tolist() == np.arange(12).reshape(3, 4).tolist()
    second[0, 0] = 99  # changes a private copy of the page
    assert first[0, 0] == 0
    with disk_cached_in(tmp_path / "there"):
        assert disk_cached("x", [SOURCE], make)[0, 0] == 0
    assert make.made == 2


def test_nothing_is_cached_outside_of_the_with_block(tmp_path: Path) -> None:
    make = Maker()
    with disk_cached_in(tmp_path):
        pass
    disk_cached("x", [SOURCE], make)
    disk_cached("x", [SOURCE], make)
    assert (make.made, list(tmp_path.iterdir())) == (2, [])


def test_a_damaged_file_is_replaced(tmp_path: Path) -> None:
    make = Maker()
    with disk_cached_in(tmp_path):
        disk_cached("x", [SOURCE], make)
        (file,) = tmp_path.glob("*.npy")
        file.write_bytes(file.read_bytes()[:100])
        assert disk_cached("x", [SOURCE], make).shape == (3, 4)
    assert make.made == 2


def test_an_array_is_made_without_the_cache_if_the_folder_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with disk_cached_in(tmp_path / "file" / "folder"):
        assert disk_cached("x", [SOURCE], Maker()).shape == (3, 4)


def test_an_error_of_the_making_function_reaches_the_caller(tmp_path: Path) -> None:
    def fails() -> np.ndarray:
        raise KeyError("no")

    with disk_cached_in(tmp_path), pytest.raises(KeyError):
        disk_cached("x", [SOURCE], fails)
    assert not list(tmp_path.glob("*.npy"))


def _ask(folder: Path) -> None:
    def make() -> np.ndarray:
        with (folder / "made").open("a") as file:
            file.write("x")
        return np.zeros(1000)

    with disk_cached_in(folder):
        disk_cached("x", [SOURCE], make)


@pytest.mark.process
def test_of_several_processes_at_the_same_time_one_makes_the_array(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_ask, args=(tmp_path,)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=150)
    assert [process.exitcode for process in processes] == [0] * 4
    assert (tmp_path / "made").read_text() == "x"
