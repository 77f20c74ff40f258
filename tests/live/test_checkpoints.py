"""The checkpoints of a fleet: which are kept, which are read, and what a kill, a full disk or a dead bucket leaves."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ebbflow.core.storage import COMPLETE
from ebbflow.errors import StorageUnreachable, UnreadableCheckpoints
from ebbflow.live import checkpoints as module
from ebbflow.live.checkpoint_names import CheckpointName
from ebbflow.live.checkpoints import Checkpoints
from live import checkpoint_ranks
from live.buckets import BUCKET, bucket_down, bucket_hangs
from live.harness import run_ranks


def checkpoints(place: Path | str, *, keep: int = 2) -> tuple[Checkpoints, list[tuple[str, str]]]:
    heard: list[tuple[str, str]] = []
    return Checkpoints(place, keep=keep, on_event=lambda what, text: heard.append((what, text))), heard


def save(store: Checkpoints, *steps: int) -> None:
    for step in steps:
        store.save({"step": step, "model": {"w": torch.full((3,), float(step))}}, step=step, lineage=step)
        store.wait()


def kept(folder: Path) -> list[int]:
    names = [CheckpointName.parse(path.name) for path in folder.iterdir()]
    return sorted(name.step for name in names if name is not None)


def loaded_step(store: Checkpoints) -> int:
    found = store.newest()
    assert found is not None
    assert found[1]["model"]["w"].tolist() == [float(found[0].step)] * 3
    return int(found[1]["step"])


def path_of(folder: Path, step: int) -> Path:
    (found,) = folder.glob(f"step-{step:09d}-*")
    return found


def test_where_no_memory_can_be_pinned_checkpoints_are_copied_into_other_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refuses:
        def copied(self, state: object) -> None:
            raise RuntimeError("Registering memory failed with cudaError: 2.")

    make = module.HostCopies
    monkeypatch.setattr(module, "HostCopies", lambda *, pinned: Refuses() if pinned else make(pinned=False))
    heard: list[tuple[str, str]] = []
    store = Checkpoints(tmp_path, on_event=lambda what, text: heard.append((what, text)), pinned=True)
    save(store, 1, 2)
    assert loaded_step(store) == 2
    assert [what for what, _ in heard] == ["memory is not pinned"] and "cudaError: 2" in heard[0][1]


def test_the_last_few_checkpoints_are_kept_and_the_newest_is_found(tmp_path: Path) -> None:
    store, heard = checkpoints(tmp_path / "checkpoints")
    assert store.newest() is None
    save(store, 5, 10, 100)
    assert kept(tmp_path / "checkpoints") == [10, 100] and loaded_step(store) == 100 and heard == []
    assert store.newest(beyond=99) is not None and store.newest(beyond=100) is None
    assert store.has(100, 100) and not store.has(100, 7) and not store.has(5, 5)


def test_what_changes_after_a_save_is_not_saved(tmp_path: Path) -> None:
    store, _ = checkpoints(tmp_path)
    weights = torch.zeros(1000)
    for step in (1, 2):
        weights.fill_(float(step))
        store.save({"step": step, "w": weights}, step=step, lineage=0)
        weights.fill_(9.0)  # the next step of the training, while the thread writes
        store.wait()
        found = store.newest()
        assert found is not None and torch.equal(found[1]["w"], torch.full((1000,), float(step)))


def test_damaged_checkpoints_with_higher_steps_do_not_push_out_the_new_ones(tmp_path: Path) -> None:
    store, heard = checkpoints(tmp_path, keep=3)
    save(store, 50, 60, 70)
    for step in (50, 60, 70):
        (path_of(tmp_path, step) / "__0_0.distcp").write_bytes(b"damaged")
    save(store, 10, 20)
    assert kept(tmp_path) == [10, 20, 50, 60, 70] and loaded_step(store) == 20
    assert [what for what, _ in heard] == ["checkpoint damaged"] * 3
    save(store, 55, 80)  # as training passes them they go
    assert kept(tmp_path) == [60, 70, 80] and loaded_step(store) == 80


def test_what_a_killed_replica_left_half_written_is_no_checkpoint_and_goes_with_the_next_one(tmp_path: Path) -> None:
    store, _ = checkpoints(tmp_path, keep=3)
    save(store, 1, 2, 4)
    for step in (2, 4):
        (path_of(tmp_path, step) / COMPLETE).unlink()
    assert loaded_step(store) == 1 and not store.has(4, 4)
    save(store, 3)
    assert kept(tmp_path) == [1, 3, 4], "a replica may still be writing what is further"
    save(store, 5)
    assert kept(tmp_path) == [1, 3, 5]


def test_if_all_are_damaged_training_does_not_begin_anew(tmp_path: Path) -> None:
    store, _ = checkpoints(tmp_path)
    save(store, 1, 2)
    for step in (1, 2):
        (path_of(tmp_path, step) / "__0_0.distcp").unlink()
    with pytest.raises(UnreadableCheckpoints, match=r"all 2 checkpoints in .* are damaged.*--from-scratch"):
        store.newest(beyond=0)
    assert store.newest(beyond=1) is None, "what this replica has is further than what it could begin anew with"


def test_checkpoints_of_the_earlier_format_are_refused(tmp_path: Path) -> None:
    (tmp_path / "step-000000012-0000deadbeef.ckpt").touch()
    store, _ = checkpoints(tmp_path)
    with pytest.raises(UnreadableCheckpoints, match=r"of an earlier version of ebbflow \(\*\.ckpt\).*--from-scratch"):
        store.newest()
    save(store, 13)
    assert loaded_step(store) == 13


def _save_on_a_full_disk(folder: Path, answers: Any) -> None:
    torch.set_num_threads(1)  # the threads of the process that was forked are not here
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store, heard = checkpoints(folder)
    save(store, 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # the system writes no more, as if the disk were full
    store.save({"step": 2, "w": torch.zeros(100_000)}, step=2, lineage=0)
    store.wait()
    answers.put((heard, loaded_step(store), sorted(os.listdir(folder))))  # noqa: PTH208


@pytest.mark.process
def test_a_full_disk_costs_a_checkpoint_and_not_the_training(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=_save_on_a_full_disk, args=(tmp_path, answers))
    process.start()
    heard, step, files = answers.get()
    process.join()
    assert [what for what, _ in heard] == ["checkpoint failed"]
    assert "cannot be written: File too large; training goes on" in heard[0][1]
    assert step == 1 and files == [path_of(tmp_path, 1).name], "the older one is whole, and nothing half-written stays"


def test_an_unreachable_bucket_costs_a_checkpoint_and_not_the_training(tmp_path: Path) -> None:
    place = f"{BUCKET}{tmp_path}/job"
    store, heard = checkpoints(place)
    save(store, 1)
    with bucket_down():
        save(store, 2)
        assert not store.has(1, 1)
        with pytest.raises(StorageUnreachable, match=r"job: cannot be listed: .*the bucket does not answer"):
            store.newest()
    assert [what for what, _ in heard] == ["checkpoint failed"]
    assert "cannot be written: ConnectionError: the bucket does not answer; training goes on" in heard[0][1]
    assert loaded_step(store) == 1
    save(store, 3, 4)
    assert loaded_step(store) == 4 and kept(tmp_path / "job") == [3, 4]


def test_a_bucket_that_hangs_costs_checkpoints_and_nobody_waits_for_it(tmp_path: Path) -> None:
    store, heard = checkpoints(f"{BUCKET}{tmp_path}/job", keep=3)
    save(store, 1)
    with bucket_hangs(tmp_path):
        for step in (2, 3, 4):  # 2 is on its way for as long as the bucket hangs
            store.save({"step": step, "model": {"w": torch.full((3,), float(step))}}, step=step, lineage=step)
        assert heard == [("checkpoint skipped", "that of step 3: the one before it is still being written")]
    store.wait()
    save(store, 5)
    assert kept(tmp_path / "job") == [1, 2, 5] and loaded_step(store) == 5 and len(heard) == 1


# Several ranks --------------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_ranks_skip_a_checkpoint_while_the_one_before_is_being_written_and_wait_for_nothing(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"rank{rank}").mkdir()
    # Whoever waited for the second checkpoint would wait for ever: only afterwards the bucket answers again.
    for _, meanwhile, heard in run_ranks(checkpoint_ranks.save_while_it_hangs, 2, tmp_path / "r", str(tmp_path)):
        assert meanwhile == [("checkpoint skipped", "that of step 3: the one before it is still being written")]
        assert heard == meanwhile, "said once, although two were skipped"
    assert kept(tmp_path / "job") == [1, 2, 5]
    store, _ = checkpoints(f"{BUCKET}{tmp_path}/job")
    found = store.newest()
    assert found is not None and found[1]["model"]["w"].tolist() == [5.0] * 8


@pytest.mark.process
def test_a_rank_without_memory_for_the_copy_costs_all_ranks_this_checkpoint_and_no_more(tmp_path: Path) -> None:
    said = ("checkpoint failed", "the state cannot be copied: no memory for 3 GB; training goes on")
    answers = run_ranks(checkpoint_ranks.save_without_memory, 2, tmp_path / "r", str(tmp_path / "job"))
    assert answers == [(0, [said]), (1, [said])]
    assert kept(tmp_path / "job") == [1, 3]


@pytest.mark.process
def test_a_full_disk_of_one_rank_costs_all_ranks_this_checkpoint_and_no_more(tmp_path: Path) -> None:
    answers = run_ranks(checkpoint_ranks.save_on_a_full_disk, 2, tmp_path / "r", str(tmp_path / "job"))
    for _, heard, files in answers:
        assert [what for what, _ in heard] == ["checkpoint failed"]
        assert "cannot be written: File too large; training goes on" in heard[0][1]
        assert files == [path_of(tmp_path / "job", 1).name], "the older one is there, and nothing half-written"
    assert kept(tmp_path / "job") == [1, 3]
    store, _ = checkpoints(tmp_path / "job")
    found = store.newest()
    assert found is not None and found[1]["model"]["w"].tolist() == [3.0] * 100_000


@pytest.mark.parametrize(("established", "ranks", "goes_on"), [(True, 1, True), (False, 1, False), (True, 2, False)])
def test_one_that_has_trained_goes_on_with_its_own_state_if_the_checkpoints_cannot_be_read(
    established: bool, ranks: int, goes_on: bool
) -> None:
    """As one that was left out, and comes back alone. Of several ranks, some might have read what others have not."""
    pytest.importorskip("torchft", reason="the live engine needs torchft: pip install 'ebbflow[live]'")
    from ebbflow.live.connection import FleetConnection
    from ebbflow.live.membership_events import NoNewerCheckpoint

    told: list[str] = []
    connection: Any = mock.Mock(_on_event=lambda what, text: told.append(text))
    connection.state.refresh.side_effect = StorageUnreachable("the bucket does not answer")
    connection.membership.state.established, connection.ranks.size = established, ranks
    if not goes_on:
        with pytest.raises(StorageUnreachable):
            FleetConnection._load_checkpoint(connection)
        return
    assert isinstance(FleetConnection._load_checkpoint(connection), NoNewerCheckpoint)
    assert told == ["the bucket does not answer; this replica goes on with its own state"]
