"""Replicas that share a GPU: gloo carries their gradients, and NCCL says that it does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from live.harness import TestFleet

pytest.importorskip("torchft", reason="the live engine needs torchft: pip install 'ebbflow[live]'")

from contract.suite import EPOCHS, SAMPLES
from ebbflow.live.accounting import read_fleet
from live import rank_replicas, replicas
from live.unsharded_runs import check

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.process,
]


@pytest.mark.parametrize(("names", "transport"), [(["r0"], "auto"), (["r0", "r1"], "gloo")])
def test_replicas_train_on_one_gpu(tmp_path: Path, names: list[str], transport: str) -> None:
    settings = {"all": names, "device": "cuda", "environment": {"EBBFLOW_TRANSPORT": transport}}
    with TestFleet(tmp_path, replicas.tiny, settings) as group:
        group.start(*names)
        assert group.wait(within_s=200) == dict.fromkeys(names, 0)
    account, runs = read_fleet(tmp_path)
    assert account.mistakes == () and account.samples == EPOCHS * SAMPLES
    assert len({run.end.weights_sha256 if run.end else "none" for run in runs}) == 1


@pytest.mark.parametrize(("names", "rule"), [(["r0"], "linear"), (["r0", "r1"], "adascale"), (["r0", "r1"], "linear")])
def test_replicas_that_replay_cuda_graphs_train_as_others(tmp_path: Path, names: list[str], rule: str) -> None:
    """Of two replicas, each replays its first micro-batch, and sends gradients while it computes the second."""
    losses = []
    for compiled in (False, True):
        settings = {
            "all": names, "device": "cuda", "rule": rule, "micro_batch": 2, "compile": compiled,
            "environment": {"EBBFLOW_TRANSPORT": "gloo"},
        }  # fmt: skip
        folder = tmp_path / str(compiled)
        folder.mkdir()
        with TestFleet(folder, replicas.tiny, settings) as group:
            group.start(*names)
            assert group.wait(within_s=280) == dict.fromkeys(names, 0)
        account, runs = read_fleet(folder)
        assert account.mistakes == () and account.samples == EPOCHS * SAMPLES
        assert len({run.end.weights_sha256 if run.end else "none" for run in runs}) == 1
        assert not [event for run in runs for event in run.events if event.what == "no CUDA graph"]
        losses.append([row.loss for row in runs[0].steps])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@contextmanager
def told_on_failure(group: TestFleet, logs: Path) -> Iterator[None]:
    """If the test fails: what the processes have written, how they ended, and their statuses."""
    try:
        yield
    except BaseException:
        codes = {name: process.exitcode for name, process in group.processes.items()}
        print(f"exit codes (None: still runs, -11: crashed): {codes}")
        for name in {name.partition(".")[0] for name in group.processes}:
            print(f"status of {name}: {group.status(name)}")
        for file in sorted([*logs.glob("*.txt"), *group.folder.glob("replicas/*/record.jsonl")]):
            print(f"---- {file.relative_to(group.folder.parent)}", file.read_text(errors="replace")[-6000:], sep="\n")
        raise


@pytest.mark.parametrize("inside", ["fsdp", "ddp"])
@pytest.mark.parametrize("late", [False, True], ids=["together", "one comes later"])
def test_replicas_of_two_ranks_on_one_gpu_train_as_the_unsharded_model(tmp_path: Path, inside: str, late: bool) -> None:
    """Four processes on one GPU; gloo carries everything, inside a replica and between the two."""
    settings = {
        "all": ["r0"] if late else ["r0", "r1"], "device": "cuda:0", "inside": inside, "rule": "adascale",
        "max_steps": 20, "micro_batch": 2, "logs": str(tmp_path / "logs"), "check_every": 5,
        **({"hold": 3} if late else {}),
    }  # fmt: skip
    folder = tmp_path / "job"
    folder.mkdir()
    group = TestFleet(folder, rank_replicas.sharded, settings)
    with group, told_on_failure(group, tmp_path / "logs"):
        by_gloo = {"environment_of_all": {"EBBFLOW_TRANSPORT": "gloo"}}
        group.start_ranks("r0", 2, **by_gloo)
        if late:
            group.trains("r0", step=3)
        group.start_ranks("r1", 2, **by_gloo)
        if late:
            group.trains("r1", step=5, members=2)
            group.stop_holding()
        assert set(group.wait(within_s=150).values()) == {0}
        account = check(folder, rule="adascale", micro_batch=2)
        assert len(account.steps) == 20 and account.steps[-1].workers == 2
        assert account.steps[-1].stats["noise"] > 0


def test_two_replicas_on_one_gpu_end_with_what_nccl_says(tmp_path: Path) -> None:
    settings = {"all": ["r0", "r1"], "device": "cuda", "environment": {"EBBFLOW_TRANSPORT": "nccl"}}
    with TestFleet(tmp_path, replicas.tiny, settings) as group:
        group.start("r0", "r1")
        assert group.wait(within_s=280) == {"r0": 1, "r1": 1}
        for name in ("r0", "r1"):
            reason = group.status(name)["reason"]
            assert "Duplicate GPU" in reason and "--transport gloo" in reason, reason
