"""Replicas of several ranks: the weights and statistics of an unsharded run, also when single ranks are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from live.buckets import BUCKET, HANGS
from live.fakes import processes_with
from live.harness import TestFleet, eventually

pytest.importorskip("torchft", reason="the live engine needs torchft: pip install 'ebbflow[live]'")

from contract.suite import BackAndForth, ThreeBranches
from ebbflow.live.accounting import read_fleet
from ebbflow.live.protocol import EXIT_RESTART, FINAL_WEIGHTS, read_status
from live import rank_replicas
from live.unsharded_runs import check

pytestmark = pytest.mark.process

KILLED = -signal.SIGKILL
BOTH = ("r0", "r1")
EXAMPLE = Path(__file__).parents[2] / "examples" / "live_fsdp.py"


@pytest.fixture
def fleet(open_fleet: Callable[..., TestFleet]) -> Callable[..., TestFleet]:
    return lambda **arguments: open_fleet(rank_replicas.sharded, {"all": BOTH, "max_steps": 20, **arguments})


def test_two_replicas_of_two_ranks_with_fsdp_train_as_the_unsharded_model(fleet: Any, tmp_path: Path) -> None:
    group = fleet(rule="adascale")
    for name in BOTH:
        group.start_ranks(name, 2)
    assert set(group.wait().values()) == {0}
    account = check(tmp_path, rule="adascale")
    assert len(account.steps) == 20 and {row.workers for row in account.steps} == {2}
    assert account.steps[-1].stats["noise"] > 0


@pytest.mark.parametrize(
    ("victim", "point"),
    [
        (0, "allreduce"),
        pytest.param(1, "backward", marks=pytest.mark.long),
        pytest.param(0, "bucket", marks=pytest.mark.long),
        (1, "bucket"),
    ],
)
def test_one_killed_rank_takes_its_replica_and_nothing_else(
    fleet: Any, tmp_path: Path, victim: int, point: str
) -> None:
    """Buckets of one parameter each: with "bucket" it is killed in the backward pass, when one is on its way."""
    group = fleet(rule="adascale", bucket_bytes=1)
    group.start_ranks("r0", 2)
    group.start_ranks("r1", 2, faults={victim: f"kill:{point}@6"})
    codes = group.wait()
    assert codes["r0.0"] == codes["r0.1"] == 0 and codes[f"r1.{victim}"] == KILLED
    assert codes[f"r1.{1 - victim}"] not in (0, KILLED)  # it ended by itself: a replica without a rank is none
    account = check(tmp_path, rule="adascale")
    assert [row.workers for row in account.steps[:6]] == [2] * 6
    assert {row.workers for row in account.steps[8:]} == {1}


@pytest.mark.parametrize("rule", [pytest.param("linear", marks=pytest.mark.long), "adascale"])
def test_a_bucket_that_fails_on_one_rank_loses_the_step_on_all_and_what_was_computed_is_kept(
    fleet: Any, tmp_path: Path, rule: str
) -> None:
    group = fleet(rule=rule, bucket_bytes=1, micro_batch=2, max_steps=10)
    group.start_ranks("r0", 2)
    group.start_ranks("r1", 2, faults={1: "fail:bucket@4"})
    assert set(group.wait().values()) == {0}
    account = check(tmp_path, rule=rule, micro_batch=2)
    assert {row.workers for row in account.steps} == {2}
    _, runs = read_fleet(tmp_path)
    assert all("lost step" in [event.what for event in run.events] for run in runs)


def test_a_stopped_rank_ends_its_replica_and_the_others_go_on(fleet: Any, tmp_path: Path) -> None:
    group = fleet(watch_every_s=0.05)
    group.start_ranks("r0", 2)
    group.start_ranks("r1", 2, faults={1: "stop:backward@6"})
    assert group.wait("r1.0", "r0.0", "r0.1") == {"r1.0": EXIT_RESTART, "r0.0": 0, "r0.1": 0}
    account = check(tmp_path)
    assert {row.workers for row in account.steps[8:]} == {1}


def test_a_backend_that_fails_on_another_rank_than_the_first_ends_the_fleet_with_what_it_said(fleet: Any) -> None:
    group = fleet(broken_rank=1, backend_says="Duplicate GPU detected on rank 1")
    for name in BOTH:  # on a busy machine a heartbeat may be late, and one that goes on alone needs no backend
        group.start_ranks(name, 2, environment_of_all={"EBBFLOW_MIN_REPLICAS": "2"})
    assert set(group.wait().values()) == {1}
    for name in BOTH:
        assert group.status(name)["state"] == "refused"
        assert "Duplicate GPU detected on rank 1" in group.status(name)["reason"]


def test_a_replica_that_comes_back_heals_rank_to_rank(fleet: Any, tmp_path: Path) -> None:
    group = fleet(optimizer="Adam", rule="adascale", hold=8, max_steps=30)
    group.start_ranks("r0", 2)
    for fault in ("kill:allreduce@6", "kill:receive@*"):  # the second time while it heals
        group.start_ranks("r1", 2, faults={1: fault})
        assert group.wait("r1.1") == {"r1.1": KILLED}
        group.wait("r1.0")
    group.start_ranks("r1", 2)
    group.trains("r0", "r1", step=8, members=2)
    group.stop_holding()
    assert set(group.wait().values()) == {0}
    account = check(tmp_path, optimizer="Adam", rule="adascale")
    _, runs = read_fleet(tmp_path)
    assert "received" in [event.what for run in runs for event in run.events]
    assert account.steps[-1].workers == 2


def test_no_rank_loads_a_state_of_which_another_rank_did_not_receive_its_part(fleet: Any, tmp_path: Path) -> None:
    group = fleet(all=("r0",), hold=2, max_steps=30)
    group.start_ranks("r0", 2)
    group.trains("r0", step=1)
    group.start_ranks("r1", 2, faults={1: "fail:receive@*"})
    group.trains("r0", "r1", members=2)
    group.stop_holding()
    assert set(group.wait().values()) == {0}
    check(tmp_path)
    assert [(tmp_path / f"r1.{rank}.states").read_text() for rank in range(2)] == ["loaded\n"] * 2, "at the second try"


def lose_and_regain(group: TestFleet, *, step: int) -> None:
    """Train with two replicas of two ranks until the end; r1 is killed at step 4 and has come back by this step."""
    group.start_ranks("r0", 2)
    group.start_ranks("r1", 2, faults={0: "kill:sum@4"})
    assert group.wait("r1.0") == {"r1.0": KILLED}
    group.wait("r1.1")
    group.start_ranks("r1", 2)
    group.trains("r0", "r1", step=step, members=2)
    group.stop_holding()
    assert set(group.wait().values()) == {0}


def test_a_newcomer_receives_the_shards_of_everything_that_belongs_to_the_state(fleet: Any, tmp_path: Path) -> None:
    """A snapshot that is confirmed and gone back to later, and the average of the weights; losses here are sums, and
    clipped."""
    group = fleet(rule=BackAndForth((16, 20)), ema=0.9, counted=True, clip=0.5, hold=7, max_steps=40)
    lose_and_regain(group, step=8)
    account = check(tmp_path, ema=0.9, counted=True, clip=0.5)
    assert not {row.step for row in account.steps} & {*range(3, 21)}, "what was given back is not part of the run"


def test_a_newcomer_receives_the_shards_of_the_branches_that_are_compared(fleet: Any, tmp_path: Path) -> None:
    """The branches begin after step 2; r1 comes back in the first or the second one, which end after steps 8 and 14."""
    group = fleet(rule=ThreeBranches(), hold=5, max_steps=40)
    lose_and_regain(group, step=6)
    account = check(tmp_path)
    assert not {row.step for row in account.steps} & {*range(7, 21)}, "the first branch is steps 3 to 6"


KINDS = {
    "ddp": {"batch_norm": True, "split": 2},  # each rank normalises its own samples, as a worker does
    "tensor": {"rule": "adascale", "clip": 0.05},
    "sequence": {"rule": "adascale", "layer_norm": True},  # the ranks have parts of the gradient of the layer norm
    "both": {"rule": "lena", "ranks": 4},
    "fsdp": {"rule": "lena", "clip": 0.05, "ranks": 3, "local_batch": 7, "micro_batch": 4},
    "fsdp, partly trained": {"partly_trained": True, "micro_batch": 2},
    "fsdp, a layer twice": {"layer_twice": True, "micro_batch": 2},
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.long] * (kind in ("both", "fsdp, a layer twice"))) for kind in KINDS]
)
def test_any_parallelism_inside_trains_as_the_unsharded_model(fleet: Any, tmp_path: Path, kind: str) -> None:
    """Every parameter is a bucket of its own. With DistributedDataParallel none is sent in the backward pass."""
    arguments = dict(KINDS[kind])
    ranks, inside = arguments.pop("ranks", 2), kind.partition(",")[0]
    group = fleet(inside=inside, max_steps=10, bucket_bytes=1, **arguments)
    for name in BOTH:
        group.start_ranks(name, ranks)
    assert set(group.wait().values()) == {0}
    account = check(tmp_path, **arguments)
    assert len(account.steps) == 10
    for rank in range(ranks):
        sent = [[int(word) for word in (tmp_path / f"{name}.{rank}.buckets").read_text().split()] for name in BOTH]
        assert sent[0][1::2] == sent[1][1::2], "the same parts in the same order, whenever each of them was found"
        for found in sent:
            assert any(found[::2]) == (inside != "ddp"), "whether a part was sent in a backward pass"


def test_a_replica_whose_ranks_differ_and_one_of_another_number_of_ranks_are_refused(
    fleet: Any, tmp_path: Path
) -> None:
    group = fleet(all=("r0",), hold=3)
    group.start_ranks("r0", 2)
    group.trains("r0", step=1)
    group.start_ranks("r1", 2, all=("r1",), rates={1: 0.2})
    group.start_ranks("r2", 3, all=("r2",))
    for name, ranks in {"r1": 2, "r2": 3}.items():
        assert set(group.wait(*(f"{name}.{rank}" for rank in range(ranks))).values()) == {1}
        assert group.status(name)["state"] == "refused"
    assert "optimizer.lr is '0.1' on rank 0 and '0.2' on rank 1" in group.status("r1")["reason"]
    assert "ranks is '3, samples over 3' here and '2, samples over 2' in the fleet" in group.status("r2")["reason"]
    group.stop_holding()
    assert group.wait("r0.0", "r0.1") == {"r0.0": 0, "r0.1": 0}
    check(tmp_path)


def test_a_checkpoint_continues_with_another_number_of_ranks(fleet: Any, tmp_path: Path) -> None:
    arguments = {"optimizer": "Adam", "rule": "adascale", "local_batch": 6, "micro_batch": 3}
    group = fleet(all=("r0",), max_steps=8, **arguments)
    group.start_ranks("r0", 2)
    assert set(group.wait().values()) == {0}
    group.forget_who_was_here()
    (tmp_path / FINAL_WEIGHTS).unlink()
    group.start_ranks("r0", 3, max_steps=16, environment_of_all={"EBBFLOW_ALLOW_CHANGES": "1"})
    assert set(group.wait("r0.0", "r0.1", "r0.2").values()) == {0}
    assert len(check(tmp_path, **arguments).steps) == 16


def test_ranks_do_not_wait_for_a_bucket_that_hangs(fleet: Any, tmp_path: Path) -> None:
    switch = tmp_path / "hangs"
    bucket = {"EBBFLOW_CHECKPOINTS": f"{BUCKET}{tmp_path}/checkpoints", HANGS: str(switch)}
    group = fleet(all=("r0",), checkpoint_every_s=0.0, hold=2)
    group.start_ranks("r0", 2, environment_of_all=bucket)
    group.trains("r0", step=3)
    switch.touch()
    group.trains("r0", step=group.status("r0")["step"] + 5)
    switch.unlink()
    group.stop_holding()
    assert set(group.wait().values()) == {0}
    check(tmp_path)
    _, (run,) = read_fleet(tmp_path)
    assert [event for event in run.events if event.what == "checkpoint skipped"]


# Real commands --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_launch_starts_a_replica_again_of_which_one_rank_was_killed(tmp_path: Path) -> None:
    out = tmp_path / "job"
    command = [sys.executable, "-m", "ebbflow", "launch", "--replicas", "2", "--ranks-per-replica", "2", "--json"]
    with subprocess.Popen([*command, "--out", str(out), str(EXAMPLE)], stdout=subprocess.PIPE, text=True) as launcher:
        try:
            eventually(lambda: step_of(out, "r0") > 20 < step_of(out, "r1"), "both train", within_s=240)
            (victim,) = [p for p in processes_with(f"EBBFLOW_FOLDER={out}") if rank_of(p) == ("r1", "1")]
            os.kill(victim, signal.SIGKILL)
            answer, _ = launcher.communicate(timeout=240)
        finally:
            launcher.terminate()
    account = json.loads(answer)
    assert launcher.returncode == 0 and account["status"] == "finished" and account["deaths"] == 1
    assert account["exactly_once"] and account["epochs"] == 10
    assert processes_with(f"EBBFLOW_FOLDER={out}") == []


@pytest.mark.long
def test_replicas_that_torchrun_started_train_together(tmp_path: Path) -> None:
    with TestFleet(tmp_path, rank_replicas.sharded) as group:
        processes = {}
        for name in BOTH:
            variables = {
                "EBBFLOW_LIGHTHOUSE": f"127.0.0.1:{group.port}",
                "EBBFLOW_REPLICA": name,
                "EBBFLOW_FOLDER": str(tmp_path),
                "GLOO_SOCKET_IFNAME": "lo",
            }
            run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
            processes[name] = subprocess.Popen(run, env={**os.environ, **variables})
        try:
            eventually(lambda: group.status("r1").get("members", 0) == 2, "both train", within_s=240)
            processes["r1"].send_signal(signal.SIGTERM)
            assert processes["r0"].wait(timeout=240) == 0
            processes["r1"].wait(timeout=150)
        finally:
            for process in processes.values():
                process.terminate()
                process.wait(timeout=150)
        assert group.status("r1")["state"] == "left"
    account, _ = read_fleet(tmp_path)
    assert account.exactly_once and account.epochs == 10


def step_of(folder: Path, name: str) -> int:
    status = read_status(folder, name)
    return (status.step or 0) if status is not None else 0


def rank_of(process: int) -> tuple[str, str]:
    pairs = (pair.partition("=") for pair in Path(f"/proc/{process}/environ").read_text().split("\0"))
    found = {name: value for name, _, value in pairs}
    return found.get("EBBFLOW_REPLICA", ""), found.get("RANK", "")
