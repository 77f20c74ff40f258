"""Checkpoints that ranks write together: read by any number of ranks, by plain torch, and never executed."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ebbflow.core.storage import COMPLETE
from ebbflow.errors import CheckpointError, ConfigError, StorageUnreachable
from ebbflow.run.sharded_checkpoint import load_state, save_state
from live.harness import run_ranks
from run import sharding_ranks
from run.sharding_ranks import Answer, complete_state, make_net, trained_net


def run(ranks: int, what: str, folder: Path, rendezvous: Path) -> list[Answer]:
    return run_ranks(sharding_ranks.rank_main, ranks, rendezvous, what, str(folder))


@pytest.mark.process
def test_a_state_of_two_shards_is_read_by_three_ranks_and_by_one_process(tmp_path: Path) -> None:
    assert [problem for _, problem, _ in run(2, "save", tmp_path / "c", tmp_path / "r2")] == ["", ""]
    assert {"__0_0.distcp", "__1_0.distcp"} <= {path.name for path in (tmp_path / "c").iterdir()}
    net, optimizer = trained_net()  # the mean over two equal halves is the mean over all
    alone = load_state(tmp_path / "c")
    for name, value in net.state_dict().items():
        torch.testing.assert_close(alone["model"][name], value)
    for number, values in optimizer.state_dict()["state"].items():
        torch.testing.assert_close(alone["optimizer"]["state"][number]["momentum_buffer"], values["momentum_buffer"])
    for _, problem, found in run(3, "load", tmp_path / "c", tmp_path / "r3"):
        assert problem == ""
        for name, value in alone["model"].items():
            assert (found[f"model.{name}"] == value.numpy()).all()
        for number, values in alone["optimizer"]["state"].items():
            assert (found[f"momentum.{number}"] == values["momentum_buffer"].numpy()).all()


@pytest.mark.process
def test_a_rank_that_cannot_write_fails_the_checkpoint_on_all_ranks(tmp_path: Path) -> None:
    answers = run(2, "save and fail", tmp_path / "c", tmp_path / "r")
    assert all("StorageUnreachable" in problem and "Is a directory" in problem for _, problem, _ in answers), answers
    assert not (tmp_path / "c" / COMPLETE).exists()


@pytest.mark.process
def test_a_checkpoint_that_rank_0_cannot_complete_fails_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "c" / COMPLETE).mkdir(parents=True)  # a folder in the way of the file that is written last
    answers = run(2, "save", tmp_path / "c", tmp_path / "r")
    assert all("StorageUnreachable" in problem and "cannot be written" in problem for _, problem, _ in answers), answers


# One process ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["disk", "file", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A folder, by its path and by URLs."""
    yield {"disk": f"{tmp_path}/a folder", "file": f"file://{tmp_path}/b", "memory": "memory://job/c"}[request.param]
    if request.param == "memory":
        import fsspec

        fsspec.filesystem("memory").rm("/job", recursive=True)


def test_a_state_survives_on_disks_and_in_buckets(place: str) -> None:
    state = {
        **complete_state(*trained_net()), "rng": torch.get_rng_state(), "empty": {}, "0": {0: torch.ones(2)},
        "mixed": [1.5, (torch.zeros(()), None), {"deep": torch.arange(3)}], "half": torch.ones(2, dtype=torch.bfloat16),
    }  # fmt: skip
    save_state(place, state)
    assert_equal(load_state(place), state)


def assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_equal(found[key], value)
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected) and len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        assert found == expected


def test_plain_torch_reads_it(tmp_path: Path) -> None:
    net, optimizer = trained_net()
    save_state(tmp_path / "c", complete_state(net, optimizer))
    other = make_net()
    state = {"model": other.state_dict()}
    with pytest.warns(UserWarning, match="load in a single process"):
        dcp.load(state, checkpoint_id=tmp_path / "c")
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in other.state_dict().items())
    dcp_to_torch_save(tmp_path / "c", tmp_path / "c.pt")
    converted = torch.load(tmp_path / "c.pt", weights_only=True)
    assert all(torch.equal(converted["model"][name], value) for name, value in net.state_dict().items())


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", COMPLETE])
@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "removed"])
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, name: str, damage: str) -> None:
    save_state(tmp_path / "c", complete_state(*trained_net()))
    path = tmp_path / "c" / name
    content = bytearray(path.read_bytes())
    content[content.index(b"sha256") if name == COMPLETE else len(content) // 2] ^= 1
    match damage:
        case "cut":
            path.write_bytes(path.read_bytes()[:-3])
        case "flipped":
            path.write_bytes(content)
        case "emptied":
            path.write_bytes(b"")
        case _:
            path.unlink()
    with pytest.raises(CheckpointError, match=r"c is damaged: .*(__0_0.distcp|metadata|ebbflow.json)"):
        load_state(tmp_path / "c")


class Malicious:
    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


def test_nothing_in_it_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_state("bytes", {"x": Malicious()})
    with pytest.raises(CheckpointError, match=r"damaged: .*[Ww]eights"):
        load_state("bytes")
    save_state("index", {"x": torch.ones(2)})
    digests = Path("index", COMPLETE).read_text()
    old, new = Path("index/.metadata").read_bytes(), pickle.dumps(Malicious())
    Path("index/.metadata").write_bytes(new)
    for measure in (lambda data: hashlib.sha256(data).hexdigest(), lambda data: str(len(data))):
        digests = digests.replace(measure(old), measure(new))
    Path("index", COMPLETE).write_text(digests)
    with pytest.raises(CheckpointError, match=r"names posix\.mkdir, which is not loaded"):
        load_state("index")
    assert not Path("executed").exists()


def test_places_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere://x: Protocol not known: nowhere; expected a folder, or a URL"):
        save_state("nowhere://x", {})
    (tmp_path / "file").touch()
    with pytest.raises(StorageUnreachable, match=r"file/c: cannot be written: (Not a directory|File exists)"):
        save_state(tmp_path / "file" / "c", {"x": torch.ones(1)})
