"""Real replicas that are really killed: every sample counts once, and all replicas have the same weights."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from live.buckets import BUCKET, DOWN, HANGS
from live.harness import CONTEXT, HEARTBEAT_MS, TestFleet, eventually, final_state

pytest.importorskip("torchft", reason="the live engine needs torchft: pip install 'ebbflow[live]'")

from contract.suite import EPOCHS, SAMPLES, BackAndForth, make_data, make_model
from ebbflow.data.ledger import Ledger
from ebbflow.engines.emulated import LoopEngine
from ebbflow.live.accounting import Account, read_fleet
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.plan.batch_plan import StepSize
from ebbflow.record import Run, read_record
from ebbflow.run.flow import Flow
from ebbflow.workloads import cross_entropy
from live import replicas

pytestmark = pytest.mark.process

LOCAL = 4
KILLED = -signal.SIGKILL


def reports(folder: Path) -> tuple[Account, dict[str, Run]]:
    account, runs = read_fleet(folder)
    return account, {run.path.parent.name: run for run in runs}


def what(run: Run, kind: str) -> list[str]:
    return [event.text for event in run.events if event.what == kind]


def emulated(
    account: Account, *, rule: str = "linear", batch_norm: bool = True, memory_steps: float = 1000.0
) -> dict[str, torch.Tensor]:
    """The weights of an emulated run with the same members in every step."""

    class Plan:
        def at(self, step: int) -> StepSize:
            workers = account.steps[step].workers
            return StepSize(workers=workers, samples=LOCAL * workers, time_s=0.0, duration_s=1.0)

    x, y = make_data()
    model = make_model(batch_norm=batch_norm)
    optimizer = ElasticOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rule, base_batch=8, epoch_samples=SAMPLES,
        memory_steps=memory_steps,
    )  # fmt: skip
    engine = LoopEngine(
        model, lambda i: (x[i], y[i]), cross_entropy, Plan(), samples=SAMPLES, seed=7, needs=optimizer.rule.needs
    )
    flow = Flow(engine, optimizer, Ledger(samples=SAMPLES))
    for row in account.steps:
        assert flow.run_step().batch == row.batch
    return model.state_dict()


def check(
    folder: Path, *finishers: str, rule: str = "linear", epochs: int = EPOCHS, **more: Any
) -> tuple[Account, dict[str, Run]]:
    """Every sample once; equal weights, bit for bit, where training finished; the weights of an emulated run."""
    account, runs = reports(folder)
    assert account.mistakes == ()
    assert account.epochs == epochs and account.samples == epochs * SAMPLES
    digests = {name: run.end.weights_sha256 if run.end else "none" for name, run in runs.items() if name in finishers}
    assert len(digests) == len(finishers) and len(set(digests.values())) == 1, digests
    state = final_state(folder)["model"]
    for name, expected in emulated(account, rule=rule, **more).items():
        torch.testing.assert_close(state[name], expected, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
    return account, runs


def complete_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints that were written to their end, newest first."""
    return sorted((path.parent for path in folder.glob("step-*/ebbflow.json")), reverse=True)


ALL = ("r0", "r1", "r2")


@pytest.mark.parametrize("point", ["quorum", "backward", "allreduce", "sum", "commit", "step"])
def test_a_replica_killed_at_any_point_costs_no_sample(fleet: Any, tmp_path: Path, point: str) -> None:
    group = fleet(all=ALL, rule="adascale")
    group.start("r1", fault=f"kill:{point}@6")
    group.start("r0", "r2")
    assert group.wait() == {"r0": 0, "r1": KILLED, "r2": 0}
    account, _ = check(tmp_path, "r0", "r2", rule="adascale")
    assert [row.workers for row in account.steps[:6]] == [3] * 6
    assert {row.workers for row in account.steps[8:]} == {2}


@pytest.mark.parametrize(("rule", "memory_steps"), [("linear", 1000.0), ("adascale", 2.0)])
def test_only_the_samples_of_a_lost_replica_are_computed_again(
    fleet: Any, tmp_path: Path, rule: str, memory_steps: float
) -> None:
    """r1 has computed 4 samples in each of the steps 0 to 5, and is killed before it computes any of step 6.

    Without a meter, and with one that is off in most steps (memory of two steps).
    """
    more = {"rule": rule, "memory_steps": memory_steps}
    group = fleet(all=ALL, note=True, **more)
    group.start("r1", fault="kill:quorum@6")
    group.start("r0", "r2")
    assert group.wait() == {"r0": 0, "r1": KILLED, "r2": 0}
    account, _ = check(tmp_path, "r0", "r2", **more)
    fetched = {name: (tmp_path / f"{name}.fetched").read_text().split() for name in ALL}
    assert len(fetched["r1"]) == 6 * LOCAL
    assert len(fetched["r0"]) + len(fetched["r2"]) == EPOCHS * SAMPLES - 6 * LOCAL, "none of them twice"
    assert account.steps[6].workers == 3, "the step is completed as it was begun"


def test_buffers_that_passes_change_are_each_replicas_own_and_count_what_is_kept_once(
    fleet: Any, tmp_path: Path
) -> None:
    """r1 is killed before it computes step 6; the others keep what they have computed of it."""
    group = fleet(all=ALL, note=True, change="passes")
    group.start("r1", fault="kill:quorum@6")
    group.start("r0", "r2")
    assert group.wait() == {"r0": 0, "r1": KILLED, "r2": 0}
    account, runs = reports(tmp_path)
    assert account.mistakes == () and account.samples == EPOCHS * SAMPLES
    assert [text.partition(":")[0] for name in ("r0", "r2") for text in what(runs[name], "buffers differ")] == (
        ["passes", "passes"]
    )
    passes = {len((tmp_path / f"{name}.fetched").read_text().splitlines()) for name in ("r0", "r2")}
    assert int(final_state(tmp_path)["model"]["passes"]) in passes


@pytest.mark.parametrize(
    ("point", "rule"), [("kill:bucket@6", "linear"), ("kill:bucket@6", "adascale"), ("fail:bucket@6", "adascale")]
)
def test_a_replica_is_lost_while_a_part_of_the_gradient_is_on_its_way(
    fleet: Any, tmp_path: Path, point: str, rule: str
) -> None:
    """The model has 6 tensors of 3 to 40 numbers; a bucket has at least 8 of them."""
    group = fleet(all=ALL, rule=rule, note=True, bucket_bytes=64)
    group.start("r1", fault=point)
    group.start("r0", "r2")
    killed = point.startswith("kill")
    assert group.wait() == {"r0": 0, "r1": KILLED if killed else 0, "r2": 0}
    account, runs = check(tmp_path, *(("r0", "r2") if killed else ALL), rule=rule)
    assert account.steps[6].workers == 3, "no gradient was lost but that of r1"
    assert what(runs["r0"], "lost step") or what(runs["r0"], "received")


def test_two_are_killed_one_after_the_other_in_the_same_step(fleet: Any, tmp_path: Path) -> None:
    """r0 computes 4 samples of step 6 first, then the 4 of r1, then the 4 of r2 and the 4 that r2 had from r1's."""
    names = ("r0", "r1", "r2", "r3")
    group = fleet(all=names, note=True)
    group.start("r1", fault="kill:quorum@6")
    group.start("r2", fault="kill:allreduce@6")
    group.start("r0", "r3")
    assert group.wait() == {"r0": 0, "r1": KILLED, "r2": KILLED, "r3": 0}
    account, _ = check(tmp_path, "r0", "r3")
    assert account.steps[6].workers == 4


def test_a_replica_is_killed_while_only_some_steps_are_measured(fleet: Any, tmp_path: Path) -> None:
    # Steps of 12 samples, of 8 after the kill. 100 reference steps are 800 samples, seen after 67 steps; an observation
    # may stand for 25, so that of the steps of 12 samples every second one is measured, and of those of 8 one in three.
    group = fleet(all=ALL, rule="adascale", epochs=20, memory_steps=100, batch_norm=False)
    group.start("r1", fault="kill:sum@101")
    group.start("r0", "r2")
    assert group.wait() == {"r0": 0, "r1": KILLED, "r2": 0}
    account, _ = check(tmp_path, "r0", "r2", rule="adascale", epochs=20, memory_steps=100, batch_norm=False)
    held = [a.stats["noise"] == b.stats["noise"] for a, b in pairwise(account.steps)]
    # An epoch's last step has one sample, which says nothing.
    assert sum(held[:60]) <= 7 and 0.5 < sum(held[80:]) / len(held[80:]) < 0.8


@pytest.mark.parametrize("victim", ["r0", "r2"])
def test_the_first_or_the_last_is_killed_inside_the_sum_and_comes_back(fleet: Any, tmp_path: Path, victim: str) -> None:
    group = fleet(all=ALL, hold=8)
    group.start(victim, fault="kill:allreduce@6")
    group.start(*(name for name in ALL if name != victim))
    assert group.wait(victim) == {victim: KILLED}
    group.start(victim)
    group.trains(*ALL, step=8, members=3)
    group.stop_holding()
    assert group.wait() == {"r0": 0, "r1": 0, "r2": 0}
    _, runs = check(tmp_path, *ALL)
    assert what(runs[victim], "received"), "the state came from a peer"


def test_two_at_once_are_killed(fleet: Any, tmp_path: Path) -> None:
    group = fleet(all=ALL)
    group.start("r0", "r1", fault="kill:allreduce@6")
    group.start("r2")
    assert group.wait() == {"r0": KILLED, "r1": KILLED, "r2": 0}
    check(tmp_path, "r2")


def test_newcomers_begin_nothing_of_their_own_while_the_only_trainer_is_busy(fleet: Any, tmp_path: Path) -> None:
    """Two of three replicas that send heartbeats have asked: the lighthouse makes a quorum of them after 0.2 s."""
    group = fleet(join_timeout_ms=200, hold=2, hold_s=2.0)
    group.start("r2")
    group.trains("r2", step=3)
    group.start("r0", "r1")
    group.trains(*ALL, step=4, members=3)
    group.stop_holding()
    assert group.wait() == {"r0": 0, "r1": 0, "r2": 0}
    account, runs = check(tmp_path, *ALL)
    assert account.given_up == 0
    assert what(runs["r0"], "received") and what(runs["r1"], "received")


@pytest.mark.parametrize(("first", "second"), [("r1", "r0"), ("r0", "r1")])
def test_two_kills_shortly_after_one_another_start_no_second_lineage(
    fleet: Any, tmp_path: Path, first: str, second: str
) -> None:
    """The second victim has asked for a quorum already, and the last one may be about to meet it in its store."""
    group = fleet(all=ALL, join_timeout_ms=1000, hold=4)
    group.start(*ALL)
    group.trains(*ALL, step=5, members=3)
    group.processes[first].kill()
    time.sleep(0.3)
    group.processes[second].kill()
    group.forget_who_was_here()
    for name in (first, second):
        group.processes[name].join()
        group.start(name, all=None)
    group.trains(*ALL, members=3)
    group.stop_holding()
    assert group.wait() == {"r0": 0, "r1": 0, "r2": 0}
    account, _ = check(tmp_path, *ALL)
    assert account.given_up == 0


def test_all_are_killed_and_the_lighthouse_too(fleet: Any, tmp_path: Path) -> None:
    group = fleet(all=ALL[:2], checkpoint_every_s=0.0)
    group.start("r0", "r1", fault="kill:allreduce@12")
    assert group.wait() == {"r0": KILLED, "r1": KILLED}
    group.lighthouse.shutdown()
    group.start_lighthouse()
    group.forget_who_was_here()  # neither begins, and writes a checkpoint, before the other has read one
    group.start("r0", "r1")
    assert group.wait() == {"r0": 0, "r1": 0}
    account, runs = check(tmp_path, "r0", "r1")
    restored = what(runs["r0"], "restored")
    assert what(runs["r1"], "restored") == restored
    # On a busy machine the twelve steps may be over before the first checkpoint is written, in the background.
    saved = int(restored[0].split("-")[1]) if restored else 0
    assert account.given_up == 12 - saved, "only the steps since the last checkpoint"


def test_a_fleet_that_goes_back_to_a_snapshot_with_a_replica_that_joined_after_it(fleet: Any, tmp_path: Path) -> None:
    """The snapshot is kept after step 2 and confirmed after step 14; r1 is killed at step 4 and comes back before. All
    go back to it after steps 16 and 20.

    If the machine is so busy that it comes later, everything else holds all the same.
    """
    group = fleet(all=ALL, rule=BackAndForth((16, 20)), hold=7)
    group.start("r1", fault="kill:sum@4")
    group.start("r0", "r2")
    assert group.wait("r1") == {"r1": KILLED}
    group.start("r1")
    group.trains(*ALL, step=8, members=3)
    group.stop_holding()
    assert group.wait() == {"r0": 0, "r1": 0, "r2": 0}
    account, runs = check(tmp_path, *ALL)
    assert what(runs["r1"], "received"), "with the state it received the snapshot"
    assert [row.step for row in runs["r0"].steps if "given_back" in row.stats] == [16, 20]
    assert not {row.step for row in account.steps} & {*range(3, 21)}, "what was given back is not part of the run"
    came_back = min(row.step for row in runs["r1"].steps if row.step > 4)
    assert bool(what(runs["r1"], "went back")) == (came_back <= 20)


def test_a_fleet_goes_on_from_a_state_that_has_just_gone_back(fleet: Any, tmp_path: Path) -> None:
    """The state says from which branch the next step goes on, so that the account follows it."""
    group = fleet(all=ALL[:2], rule=BackAndForth((6, 6)))
    group.start("r0", "r1", max_steps=7)  # the last of them is step 6, after which the run goes back
    assert group.wait() == {"r0": 0, "r1": 0}
    assert final_state(tmp_path)["fork"] is not None
    group.forget_who_was_here()
    group.start("r0", "r1", environment={"EBBFLOW_ALLOW_CHANGES": "1"})
    assert group.wait() == {"r0": 0, "r1": 0}
    account, _ = check(tmp_path, "r0", "r1")
    assert not {row.step for row in account.steps} & {*range(3, 7)}


@pytest.mark.parametrize("losers", [["r1"], ["r0", "r2"]])
def test_a_replica_that_misses_a_sum_receives_the_state_of_one_that_has_it(
    fleet: Any, tmp_path: Path, losers: list[str]
) -> None:
    """Only some commit a step, as after a kill in the middle of the all-reduce: their state counts."""
    group = fleet(all=ALL)
    group.start(*losers, fault="fail:sum@6")
    group.start(*(name for name in ALL if name not in losers))
    assert set(group.wait().values()) == {0}
    account, runs = check(tmp_path, *ALL)
    for name in losers:
        assert what(runs[name], "lost") == ["a fault was asked for at sum"]
        assert any("bytes from" in text for text in what(runs[name], "received"))
    assert account.given_up == 0
    assert [row.workers for row in account.steps[5:9]] == [3, 3, 3 - len(losers), 3], "who receives does not compute"


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_the_others_compute_while_a_new_replica_receives_the_state(fleet: Any, tmp_path: Path) -> None:
    """r2 receives nothing before r0 has fetched a micro-batch of the step after the last committed one."""
    group = fleet(all=ALL[:2], hold=2, note=True)
    group.start("r0", "r1")
    group.trains("r0", "r1")
    group.start("r2", receive_later=True)
    eventually((tmp_path / "r2.receiving").exists, "a transfer")
    eventually(lambda: lines(tmp_path / "r0.fetched") == lines(tmp_path / "r0.committed") + 1, "a micro-batch")
    (tmp_path / "release").touch()
    group.trains(*ALL, members=3)
    group.stop_holding()
    assert group.wait() == {"r0": 0, "r1": 0, "r2": 0}
    account, runs = check(tmp_path, *ALL)
    joined = runs["r2"].steps[0].step
    assert [row.workers for row in account.steps[joined : joined + 2]] == [2, 3], "it computes from the next step on"
    fetched = [number for name in ALL for number in (tmp_path / f"{name}.fetched").read_text().split()]
    assert len(fetched) == EPOCHS * SAMPLES


def test_several_new_replicas_are_served_by_several_others(fleet: Any, tmp_path: Path) -> None:
    group = fleet(hold=2)
    group.start("r0", "r1", all=ALL[:2])
    group.trains("r0", "r1")
    group.start("r2", "r3", all=["r2", "r3"])
    group.trains("r0", "r1", "r2", "r3", members=4)
    group.stop_holding()
    assert set(group.wait().values()) == {0}
    _, runs = check(tmp_path, "r0", "r1", "r2", "r3")
    senders = {
        text.rpartition(" ")[2].partition(":")[0] for name in ("r2", "r3") for text in what(runs[name], "received")
    }
    assert senders == {"r0", "r1"}


def test_a_new_replica_killed_while_it_receives_the_state(fleet: Any, tmp_path: Path) -> None:
    group = fleet(all=ALL[:2], hold=2, note=True)
    group.start("r0", "r1")
    group.trains("r0", "r1")
    group.start("r2", fault="kill:receive@*")
    assert group.wait("r2") == {"r2": KILLED}
    group.stop_holding()
    assert group.wait() == {"r0": 0, "r1": 0, "r2": KILLED}
    check(tmp_path, "r0", "r1")
    fetched = [number for name in ALL[:2] for number in (tmp_path / f"{name}.fetched").read_text().split()]
    assert len(fetched) == EPOCHS * SAMPLES, "the others have computed nothing twice"


def test_a_replica_killed_while_it_sends_the_state(fleet: Any, tmp_path: Path) -> None:
    group = fleet(hold=2)
    group.start("r1")
    group.trains("r1")
    # It receives the state of r1; the next one receives it from r0, the first of two.
    group.start("r0", fault="kill:send@*")
    group.trains("r0", "r1", members=2)
    group.start("r2")
    assert group.wait("r0") == {"r0": KILLED}
    group.trains("r1", "r2", members=2)
    group.stop_holding()
    assert group.wait() == {"r0": KILLED, "r1": 0, "r2": 0}
    _, runs = check(tmp_path, "r1", "r2")
    assert what(runs["r2"], "lost") and what(runs["r2"], "received")


def test_a_flapping_replica(fleet: Any, tmp_path: Path) -> None:
    group = fleet(hold=2)
    group.start("r0", "r1")
    for _ in range(3):
        group.start("r2", fault="kill:backward@*")
        assert group.wait("r2") == {"r2": KILLED}
    group.start("r2")
    group.trains(*ALL, members=3)
    group.stop_holding()
    assert group.wait() == {"r0": 0, "r1": 0, "r2": 0}
    check(tmp_path, *ALL)


def test_a_stopped_replica_is_left_behind_and_comes_back(fleet: Any, tmp_path: Path) -> None:
    group = fleet(all=ALL, hold=8)
    group.start("r1", fault="stop:backward@6")
    group.start("r0", "r2")
    group.trains("r0", "r2", step=9, members=2)
    group.signal("r1", signal.SIGCONT)
    group.trains(*ALL, step=9, members=3)
    group.stop_holding()
    assert group.wait() == {"r0": 0, "r1": 0, "r2": 0}
    account, runs = check(tmp_path, *ALL)
    assert any("no heartbeat of r1" in text for text in what(runs["r0"], "lost") + what(runs["r2"], "lost"))
    assert account.given_up == 0, "the replica that comes back does not commit the step that the others have repeated"


@pytest.mark.parametrize("others", [("r0",), pytest.param(("r0", "r2"), marks=pytest.mark.long)])
def test_a_replica_that_hangs_while_it_sends_heartbeats_is_left_behind_and_comes_back(
    fleet: Any, tmp_path: Path, others: tuple[str, ...]
) -> None:
    """The lighthouse forms no quorum of half of the replicas that send heartbeats: of two, none at all."""
    group = fleet(all=[*others, "r1"], hold=2, patience_s=2.0)
    group.start(*others)
    group.start("r1", hang=True)
    group.trains(*others, step=2, members=len(others) + 1)
    group.trains(*others, members=len(others))
    eventually(lambda: group.status("r1")["state"] == "waiting", "a word of the one that hangs")
    status = group.status("r1")
    assert "in batch (" in status["reason"], "it says where it hangs"
    group.trains(*others, step=status["step"] + 4, members=len(others))
    (tmp_path / "release").touch()
    group.trains(*others, "r1", members=len(others) + 1)
    group.stop_holding()
    assert set(group.wait().values()) == {0}
    check(tmp_path, *others, "r1")


def test_a_replica_that_was_held_up_until_the_others_had_finished_goes_on_from_their_checkpoint(
    fleet: Any, tmp_path: Path
) -> None:
    """The step fails at r0, which r1 notices late. It must not train to the end once more, from its own state."""
    group = fleet(all=ALL)
    group.start("r0", fault="fail:allreduce@6")
    group.start("r1", notices_late=True)
    group.start("r2")
    assert group.wait("r0", "r2") == {"r0": 0, "r2": 0}
    (tmp_path / "release").touch()
    assert group.wait("r1") == {"r1": 0}
    account, runs = check(tmp_path, *ALL)
    assert account.given_up == 0
    assert runs["r1"].steps[-1].step == 5, "it computes none of the steps after it was held up"


def test_a_replica_that_is_told_to_leave_finishes_its_step(fleet: Any, tmp_path: Path) -> None:
    group = fleet(all=ALL, hold=2)
    group.start(*ALL)
    group.trains(*ALL, step=3, members=3)
    group.signal("r0", signal.SIGTERM)
    assert group.wait("r0") == {"r0": 0}
    assert group.status("r0")["state"] == "left"
    group.stop_holding()
    assert group.wait() == {"r0": 0, "r1": 0, "r2": 0}
    account, runs = check(tmp_path, "r1", "r2")
    assert not any(what(run, "lost step") or what(run, "lost") for run in runs.values()), "nothing was lost"
    assert account.given_up == 0
    assert runs["r0"].steps[-1].workers == 3 and runs["r1"].steps[-1].workers == 2


def test_all_replicas_leave_and_the_next_fleet_goes_on(fleet: Any, tmp_path: Path) -> None:
    group = fleet(all=ALL[:2], hold=2)
    group.start("r0", "r1")
    group.trains("r0", "r1", step=3)
    group.signal("r0", signal.SIGTERM)
    group.signal("r1", signal.SIGTERM)
    assert group.wait() == {"r0": 0, "r1": 0}
    assert [group.status(name)["state"] for name in ("r0", "r1")] == ["left", "left"]
    group.stop_holding()
    group.start("r0", "r1")
    assert group.wait() == {"r0": 0, "r1": 0}
    account, _ = check(tmp_path, "r0", "r1")
    assert account.given_up == 0


def test_a_replica_that_starts_after_the_end_trains_nothing(fleet: Any, tmp_path: Path) -> None:
    group = fleet(all=ALL[:2])
    group.start("r0", "r1")
    assert group.wait() == {"r0": 0, "r1": 0}
    group.start("r2")
    assert group.wait("r2") == {"r2": 0}
    account, runs = check(tmp_path, "r0", "r1", "r2")
    assert account.given_up == 0 and runs["r2"].steps == []


def test_the_lighthouse_is_started_anew_under_a_running_fleet(fleet: Any, tmp_path: Path) -> None:
    group = fleet(all=ALL[:2], hold=2)
    group.start("r0", "r1")
    group.trains("r0", "r1", step=3)
    group.lighthouse.shutdown()
    group.start_lighthouse()
    group.trains("r0", "r1", step=8)
    group.stop_holding()
    assert group.wait() == {"r0": 0, "r1": 0}
    check(tmp_path, "r0", "r1")


def lighthouse_process(group: TestFleet) -> Any:
    """A lighthouse in a process of its own: in the place of the one that a fleet has, or again where one was killed."""
    if group.lighthouse is not None:
        group.lighthouse.shutdown()
        group.lighthouse, group.port = None, 0
    there = group.folder / "lighthouse"
    there.unlink(missing_ok=True)
    arguments = (None, f"127.0.0.1:{group.port}", HEARTBEAT_MS, there)
    lighthouse = CONTEXT.Process(target=replicas.lighthouse, args=arguments, daemon=True)
    lighthouse.start()
    eventually(there.exists, "a lighthouse")
    group.port = int(there.read_text())
    return lighthouse


def test_a_lighthouse_that_is_killed_while_a_replica_waits_for_it_is_asked_again(fleet: Any, tmp_path: Path) -> None:
    """r1 is faster and waits for r0 at the lighthouse most of the time. `trains` gives up after a minute."""
    group = fleet(all=ALL[:2])
    lighthouse = lighthouse_process(group)
    try:
        group.start("r0", hold=0, hold_s=0.5)
        group.start("r1")
        group.trains("r0", "r1", step=3)
        lighthouse.kill()
        lighthouse.join()
        lighthouse = lighthouse_process(group)
        group.trains("r0", "r1", step=group.status("r1")["step"] + 3, members=2)
        group.stop_holding()
        assert group.wait() == {"r0": 0, "r1": 0}
    finally:
        lighthouse.kill()
        lighthouse.join()
    account, runs = check(tmp_path, "r0", "r1")
    assert {row.workers for row in account.steps} == {2}
    members = [text for run in runs.values() for text in what(run, "members")]
    assert len(set(members)) == 1 and len(members) == 2, "the replicas stay connected with each other"


def test_a_replica_that_finds_no_lighthouse_leaves_when_it_is_told_to(fleet: Any, tmp_path: Path) -> None:
    """What answers there is not a lighthouse."""
    group = fleet()
    group.lighthouse.shutdown()
    with socket.create_server(("127.0.0.1", 0)) as other:
        group.port = other.getsockname()[1]
        group.start("r0")
        eventually(lambda: group.status("r0").get("state") == "joining", "r0 looks for a lighthouse")
        group.signal("r0", signal.SIGTERM)
        assert group.wait("r0", within_s=30) == {"r0": 0}
    assert group.status("r0")["state"] == "left"


def test_a_lighthouse_that_stands_still_for_a_while_costs_no_member(fleet: Any, tmp_path: Path) -> None:
    """It takes all replicas for dead then, and would form a quorum of whoever asks first."""
    group = fleet(all=ALL, hold=2)
    lighthouse = lighthouse_process(group)
    try:
        group.start(*ALL)
        group.trains(*ALL, step=3, members=3)
        for _ in range(2):
            os.kill(lighthouse.pid, signal.SIGSTOP)
            time.sleep(3 * HEARTBEAT_MS / 1000)
            os.kill(lighthouse.pid, signal.SIGCONT)
            group.trains(*ALL, step=group.status("r0")["step"] + 3, members=3)
        group.stop_holding()
        assert group.wait() == {"r0": 0, "r1": 0, "r2": 0}
    finally:
        lighthouse.kill()
        lighthouse.join()
    account, _ = check(tmp_path, *ALL)
    assert {row.workers for row in account.steps} == {3}


def test_a_damaged_newest_checkpoint_is_passed_over(fleet: Any, tmp_path: Path) -> None:
    group = fleet(checkpoint_every_s=0.0, hold=0)
    group.start("r0", fault="kill:quorum@4")
    assert group.wait() == {"r0": KILLED}
    newest, older, *_ = complete_checkpoints(tmp_path / "checkpoints")
    shard = newest / "__0_0.distcp"
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    shard.write_bytes(damaged)
    group.stop_holding()
    group.start("r0", "r1", all=ALL[:2])
    assert group.wait() == {"r0": 0, "r1": 0}
    _, runs = check(tmp_path, "r0", "r1")
    assert newest.name in what(runs["r0"], "checkpoint damaged")[0]
    assert what(runs["r0"], "restored") == [f"from {older.name}"]


def test_another_replica_saves_the_final_state_if_the_first_one_dies_while_it_does(fleet: Any, tmp_path: Path) -> None:
    (tmp_path / "weights.pt").write_bytes(b"of an earlier, shorter run")
    group = fleet(all=ALL)
    group.start("r0", fault="kill:save@*")
    group.start("r1", "r2")
    assert group.wait() == {"r0": KILLED, "r1": 0, "r2": 0}
    check(tmp_path, "r1", "r2")
    assert {group.status(name)["state"] for name in ("r1", "r2")} == {"finished"}
    final = final_state(tmp_path)
    assert final["step"] == group.status("r1")["step"]
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)["model"]
    assert all(torch.equal(weights[name], value) for name, value in final["model"].items())


def test_unreadable_checkpoints_do_not_stop_a_replica_that_can_receive_the_state(fleet: Any, tmp_path: Path) -> None:
    group = fleet(hold=2)
    group.start("r0")
    group.trains("r0", step=3)
    damaged = tmp_path / "checkpoints" / f"step-{2:09d}-{1:012x}-{2:08x}"
    damaged.mkdir(parents=True)
    (damaged / "ebbflow.json").write_text("not what it should be")
    group.start("r1")
    group.trains("r0", "r1", members=2)
    group.stop_holding()
    assert group.wait() == {"r0": 0, "r1": 0}
    _, runs = check(tmp_path, "r0", "r1")
    (text,) = what(runs["r1"], "no checkpoint")
    assert "all 1 checkpoints in" in text and "the state of a peer is used" in text
    assert what(runs["r1"], "received")


def test_a_fleet_goes_on_from_a_bucket(fleet: Any, tmp_path: Path) -> None:
    bucket = {"EBBFLOW_CHECKPOINTS": f"{BUCKET}{tmp_path}/checkpoints"}
    group = fleet(all=ALL[:2], checkpoint_every_s=0.0, environment=bucket)
    group.start("r0", "r1", fault="kill:quorum@12")
    assert group.wait() == {"r0": KILLED, "r1": KILLED}
    group.forget_who_was_here()
    group.start("r0", "r1")
    assert group.wait() == {"r0": 0, "r1": 0}
    account, runs = check(tmp_path, "r0", "r1")
    (restored,) = what(runs["r0"], "restored")
    assert account.given_up == 12 - int(restored.split("-")[1])


def test_a_bucket_that_does_not_answer_costs_checkpoints_and_no_sample(fleet: Any, tmp_path: Path) -> None:
    bucket = {"EBBFLOW_CHECKPOINTS": f"{BUCKET}{tmp_path}/checkpoints", DOWN: str(tmp_path / "down")}
    group = fleet(all=ALL[:2], checkpoint_every_s=0.0, hold=2, environment=bucket)
    group.start("r0", "r1")
    group.trains("r0", "r1", step=3)
    (tmp_path / "down").touch()
    group.stop_holding()
    assert group.wait() == {"r0": 0, "r1": 0}
    account, runs = reports(tmp_path)
    assert account.mistakes == () and account.samples == EPOCHS * SAMPLES
    assert any("the bucket does not answer" in text for text in what(runs["r0"], "checkpoint failed"))
    for name in ("r0", "r1"):
        assert group.status(name)["state"] == "incomplete" and "could not be saved" in group.status(name)["reason"]


def test_a_bucket_that_hangs_costs_checkpoints_and_no_sample(fleet: Any, tmp_path: Path) -> None:
    switch = tmp_path / "hangs"
    bucket = {"EBBFLOW_CHECKPOINTS": f"{BUCKET}{tmp_path}/checkpoints", HANGS: str(switch)}
    group = fleet(all=ALL[:2], checkpoint_every_s=0.0, hold=2, environment=bucket)
    group.start("r0", "r1")
    group.trains("r0", "r1", step=3)
    switch.touch()
    group.trains("r0", "r1", step=group.status("r0")["step"] + 5)  # nobody waits for the bucket
    switch.unlink()
    group.stop_holding()
    assert group.wait() == {"r0": 0, "r1": 0}
    _, runs = check(tmp_path, "r0", "r1")
    assert any("is still being written" in text for text in what(runs["r0"], "checkpoint skipped"))


def test_an_incompatible_replica_is_refused_and_the_fleet_goes_on(fleet: Any, tmp_path: Path) -> None:
    group = fleet(all=ALL[:2], hold=2)
    group.start("r0", "r1")
    group.trains("r0", "r1", step=3)
    group.start("r2", seed=8)
    assert group.wait("r2") == {"r2": 1}
    group.stop_holding()
    assert group.wait("r0", "r1") == {"r0": 0, "r1": 0}
    (tmp_path / "replicas" / "r2" / "record.jsonl").rename(tmp_path / "incompatible.jsonl")
    check(tmp_path, "r0", "r1")
    (text,) = [read_record(tmp_path / "incompatible.jsonl").end.text]
    assert "refuses this replica" in text and "seed is '8' here and '7' in the fleet" in text


def test_replicas_that_begin_with_other_weights_take_those_of_one(fleet: Any, tmp_path: Path) -> None:
    group = fleet(all=ALL)
    for number, name in enumerate(ALL):
        group.start(name, initial=number)
    assert group.wait() == {"r0": 0, "r1": 0, "r2": 0}
    account, runs = reports(tmp_path)
    assert account.exactly_once and len({run.end.weights_sha256 for run in runs.values()}) == 1


def test_a_growing_batch_goes_on_growing_when_a_replica_is_killed_and_comes_back(fleet: Any, tmp_path: Path) -> None:
    # The policy requests 2 samples, then 4, then 8, for one epoch each. 97 samples by two are 48 steps, the last one of
    # three, so step 52 is in the second epoch.
    group = fleet(all=ALL, policy="geo(delay=1ep, factor=2, initial=2)", hold=54)
    group.start("r1", fault="kill:quorum@52")
    group.start("r0", "r2")
    assert group.wait("r1") == {"r1": KILLED}
    group.start("r1")
    group.trains(*ALL, step=54, members=3)
    group.stop_holding()
    assert group.wait() == {"r0": 0, "r1": 0, "r2": 0}
    account, runs = reports(tmp_path)
    assert account.mistakes == () and account.samples == EPOCHS * SAMPLES
    whole = [sorted({row.batch for row in account.steps if row.epoch == epoch}) for epoch in range(EPOCHS)]
    # 97 = 47 x 2 + 3 = 23 x 4 + 3 + 2 = 11 x 8 + 7 + 2, since no step is of one lone sample
    assert whole == [[2, 3], [2, 3, 4], [2, 7, 8]]
    assert len({run.end.weights_sha256 if run.end else "none" for run in runs.values()}) == 1


def test_replicas_decide_alike_about_the_batch_although_their_clocks_differ(fleet: Any, tmp_path: Path) -> None:
    # The policy measures the durations of steps, of which each replica has its own; r1 learns those of the others with
    # the state. Two workers of 4 are the reference batch.
    policy = "goodput(initial=8, dwell=2, wait=2, margin=0, memory=4steps)"
    group = fleet(all=ALL, policy=policy, hold=20)
    group.start("r1", fault="kill:quorum@9")
    group.start("r0", "r2")
    assert group.wait("r1") == {"r1": KILLED}
    group.start("r1")
    group.trains(*ALL, step=20, members=3)
    group.stop_holding()
    assert group.wait() == {"r0": 0, "r1": 0, "r2": 0}
    account, runs = reports(tmp_path)
    assert account.mistakes == () and account.samples == EPOCHS * SAMPLES
    assert len({run.end.weights_sha256 if run.end else "none" for run in runs.values()}) == 1
    rows = [row for run in runs.values() for row in run.steps]
    seen = {(row.step, row.batch, row.stats.get("noise_scale"), row.stats.get("step_s")) for row in rows}
    assert len(seen) == len({row.step for row in rows}) < len(rows), "what replicas know of a step is the same"
    state = json.loads(final_state(tmp_path)["growth"]["state"])
    assert state["kinds"] and all(seconds > 0 for _, _, seconds, _ in state["kinds"])
    assert group.status("r0")["ref_batch"] == 8


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """The folder of the checkpoints, on a disk of its own that holds one of them and not two."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=60k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a disk of its own takes the right to mount one")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_costs_checkpoints_and_no_sample(fleet: Any, tmp_path: Path, tiny_disk: Path) -> None:
    group = fleet(all=ALL[:2], checkpoint_every_s=0.0)
    group.start("r0", "r1", fault="kill:quorum@12")
    assert group.wait() == {"r0": KILLED, "r1": KILLED}
    (kept,) = complete_checkpoints(tiny_disk)
    group.start("r0", "r1")
    assert group.wait() == {"r0": 0, "r1": 0}
    account, runs = reports(tmp_path)
    assert account.mistakes == () and account.samples == EPOCHS * SAMPLES
    assert len({run.end.weights_sha256 if run.end else "none" for run in runs.values()}) == 1
    assert any("No space left" in text for run in runs.values() for text in what(run, "checkpoint failed"))
    assert {text for run in runs.values() for text in what(run, "restored")} == {f"from {kept.name}"}
