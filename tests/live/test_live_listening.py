"""A new replica receives the state for as long as that takes, and the others train meanwhile."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from live.harness import TestFleet, eventually

pytest.importorskip("torchft", reason="the live engine needs torchft: pip install 'ebbflow[live]'")

from contract.suite import SAMPLES, BackAndForth, make_data, make_model
from ebbflow.data.ledger import Ledger
from ebbflow.engines.emulated import LoopEngine
from ebbflow.live.accounting import Account
from ebbflow.live.protocol import FINAL_WEIGHTS
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.optim.ema import WeightAverage
from ebbflow.plan.batch_plan import StepSize
from ebbflow.run.checkpoint import load_checkpoint
from ebbflow.run.flow import Flow
from ebbflow.workloads import cross_entropy
from live.test_live_faults import KILLED, check, what

pytestmark = pytest.mark.process

OLD, ALL = ("r0", "r1"), ("r0", "r1", "r2")
EPOCHS = 6


def lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def start(
    fleet: Any,
    *,
    r0: str = "",
    r2: str = "",
    epochs: int = EPOCHS,
    newcomers: tuple[str, ...] = ("r2",),
    **arguments: Any,
) -> TestFleet:
    """r0 and r1 train; r2 joins, and receives no tensor of the state before the file `release` is there."""
    group: TestFleet = fleet(all=OLD, hold=2, note=True, epochs=epochs, soon_s=0.1, **arguments)
    group.start("r0", fault=r0)
    group.start("r1")
    group.trains(*OLD)
    group.start(*newcomers, receive_later=True, fault=r2, hold=None)  # it applies what it has heard at once
    for name in newcomers:
        eventually((group.folder / f"{name}.asked").exists, f"a request of {name}")
    if "gate" in arguments:  # the requests have been made, and nothing shows when the lighthouse has them
        time.sleep(2)
    (group.folder / "gate-open").touch()
    for name in newcomers:
        eventually((group.folder / f"{name}.receiving").exists, f"a transfer to {name}")
    return group


def commit(group: TestFleet, *, steps: int, of: str = "r0") -> int:
    """Wait until a replica has committed this many further steps; the steps that it had."""
    file = group.folder / f"{of}.committed"
    before = lines(file)
    eventually(lambda: lines(file) >= before + steps, f"{steps} steps of {of}")
    return before


def test_the_others_train_while_a_new_replica_receives_the_state(fleet: Any, tmp_path: Path) -> None:
    """In buckets, with batch norm, momentum and AdaScale; weights are compared in every second step.

    r2 receives the state of before the first step that it hears: r0 has copied it.
    """
    group = start(fleet, rule="adascale", bucket_bytes=64, check_every=2)
    before = commit(group, steps=4)
    (tmp_path / "release").touch()
    eventually(lambda: lines(tmp_path / "r2.fetched") > 0, "a step that r2 computes")
    group.stop_holding()
    assert group.wait() == {"r0": 0, "r1": 0, "r2": 0}
    account, runs = check(tmp_path, *ALL, rule="adascale", epochs=EPOCHS)
    heard = runs["r2"].steps[0].step
    computes = next(row.step for row in account.steps if row.workers == 3)
    assert heard <= before + 1 < computes - 3, "the others committed steps during the transfer, and r2 has them all"
    assert {row.workers for row in account.steps[:computes]} == {2}
    assert {row.workers for row in account.steps[computes:]} == {3}
    told = {
        name: [(row.step, row.stats, row.loss, row.lr, row.multiplier) for row in run.steps if row.step >= heard]
        for name, run in runs.items()
    }
    assert told["r2"] == told["r0"] == told["r1"], "lineage, and the state of the rule"
    fetched = [number for name in ALL for number in (tmp_path / f"{name}.fetched").read_text().split()]
    assert len(fetched) == EPOCHS * SAMPLES
    assert not what(runs["r0"], "lost") and len(what(runs["r2"], "received")) == 1


def test_a_replica_killed_while_it_listens_costs_the_others_nothing_but_time(fleet: Any, tmp_path: Path) -> None:
    group = start(fleet, r2="kill:hear@*")
    assert group.wait("r2") == {"r2": KILLED}
    group.stop_holding()
    assert group.wait() == {"r0": 0, "r1": 0, "r2": KILLED}
    check(tmp_path, *OLD, epochs=EPOCHS)
    fetched = [number for name in OLD for number in (tmp_path / f"{name}.fetched").read_text().split()]
    assert len(fetched) == EPOCHS * SAMPLES, "they have computed nothing twice"


@pytest.mark.parametrize("ends", ["is killed", "leaves"])
def test_the_sender_goes_while_a_replica_listens_to_it(fleet: Any, tmp_path: Path, ends: str) -> None:
    group = start(fleet, r0="kill:copy@*" if ends == "is killed" else "")
    if ends == "leaves":
        commit(group, steps=2)
        group.signal("r0", signal.SIGTERM)
    assert group.wait("r0") == {"r0": KILLED if ends == "is killed" else 0}
    commit(group, steps=2, of="r1")
    (tmp_path / "release").touch()
    eventually(lambda: lines(tmp_path / "r2.fetched") > 0, "a step that r2 computes")
    group.stop_holding()
    assert set(group.wait("r1", "r2").values()) == {0}
    account, runs = check(tmp_path, "r1", "r2", epochs=EPOCHS)
    assert account.given_up == 0
    (received,) = what(runs["r2"], "received")
    assert "from r1" in received, "what came from r0 is forgotten"


def test_the_only_one_with_the_newest_state_leaves_while_one_that_stood_still_listens_to_it(
    fleet: Any, tmp_path: Path
) -> None:
    """The one that stood still has an older state of its own, and must not go on from there."""
    group = fleet(all=OLD, hold=2, note=True, epochs=EPOCHS, soon_s=0.1)
    group.start("r0")
    group.start("r1", receive_later=True)
    group.trains(*OLD)
    group.signal("r1", signal.SIGSTOP)
    commit(group, steps=4)
    group.signal("r1", signal.SIGCONT)
    eventually((tmp_path / "r1.receiving").exists, "a transfer to r1")
    commit(group, steps=2)
    group.signal("r0", signal.SIGTERM)
    assert group.wait("r0") == {"r0": 0}
    (tmp_path / "release").touch()
    group.stop_holding()
    assert group.wait("r1") == {"r1": 0}
    account, _ = check(tmp_path, "r1", epochs=EPOCHS)
    assert account.given_up == 0, "the state that r0 saved when it left"


def test_a_replica_that_is_told_to_leave_while_it_listens_leaves_at_once(fleet: Any, tmp_path: Path) -> None:
    group = start(fleet)
    commit(group, steps=3)
    group.signal("r2", signal.SIGTERM)
    assert group.wait("r2") == {"r2": 0}
    assert group.status("r2")["state"] == "left"
    group.stop_holding()
    assert set(group.wait().values()) == {0}
    _, runs = check(tmp_path, *OLD, epochs=EPOCHS)
    assert not what(runs["r0"], "lost") and not runs["r2"].steps


def test_the_training_ends_while_a_replica_listens(fleet: Any, tmp_path: Path) -> None:
    """r0 waits for the end of the transfer before it ends."""
    group = start(fleet, epochs=3)
    commit(group, steps=3)
    group.stop_holding()
    # In each epoch 12 steps of 8 samples and one of the last sample. No more than 64 steps are heard.
    eventually(lambda: lines(tmp_path / "r0.committed") == 3 * 13, "the end")
    (tmp_path / "release").touch()
    assert group.wait() == {"r0": 0, "r1": 0, "r2": 0}
    check(tmp_path, *ALL, epochs=3)
    assert {group.status(name)["state"] for name in ALL} == {"finished"}


def test_a_replica_that_listens_goes_back_with_the_others_and_averages_the_same_weights(
    fleet: Any, tmp_path: Path
) -> None:
    """A snapshot after step 2, to which the run goes back after steps 20 and 30: r2 hears both, or all three.

    r2 is the last one and writes the average of the weights.
    """
    group = start(fleet, rule=BackAndForth((20, 30)), ema=0.9)
    eventually(lambda: lines(tmp_path / "r0.committed") > 32, "step 32")
    (tmp_path / "release").touch()
    eventually(lambda: lines(tmp_path / "r2.fetched") > 0, "a step that r2 computes")
    for name in OLD:
        group.signal(name, signal.SIGTERM)
    assert group.wait(*OLD) == {"r0": 0, "r1": 0}
    group.stop_holding()
    assert group.wait("r2") == {"r2": 0}
    account, runs = check(tmp_path, "r2", epochs=EPOCHS)
    assert what(runs["r2"], "received") and len(what(runs["r2"], "went back")) == 2
    assert not {row.step for row in account.steps} & {*range(3, 31)}, "what was given back is not part of the run"
    expected = averaged(account, 0.9)
    found = load_checkpoint(tmp_path / FINAL_WEIGHTS)["ema"]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def averaged(account: Account, decay: float) -> dict[str, Any]:
    """The average of the weights of an emulated run with the same members in every step."""

    class Plan:
        def at(self, step: int) -> StepSize:
            workers = account.steps[step].workers
            return StepSize(workers=workers, samples=4 * workers, time_s=0.0, duration_s=1.0)

    x, y = make_data()
    model = make_model(batch_norm=True)
    optimizer = ElasticOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "linear", base_batch=8, epoch_samples=SAMPLES
    )
    engine = LoopEngine(model, lambda i: (x[i], y[i]), cross_entropy, Plan(), samples=SAMPLES, seed=7)
    average = WeightAverage(model, decay)
    flow = Flow(engine, optimizer, Ledger(samples=SAMPLES), average=average)
    for _ in account.steps:
        flow.run_step()
    return average.state_dict()


def test_two_replicas_listen_at_once_and_one_has_the_state_earlier(fleet: Any, tmp_path: Path) -> None:
    """r0 and r1 wait after step 1 until both have asked for a quorum. r3 computes while r2 still listens."""
    group = start(fleet, newcomers=("r2", "r3"), gate=1)
    before = commit(group, steps=3)
    (tmp_path / "r3.release").touch()
    eventually(lambda: lines(tmp_path / "r3.fetched") > 0, "a step that r3 computes")
    commit(group, steps=2)
    assert not lines(tmp_path / "r2.fetched")
    (tmp_path / "r2.release").touch()
    eventually(lambda: lines(tmp_path / "r2.fetched") > 0, "a step that r2 computes")
    group.stop_holding()
    assert group.wait() == dict.fromkeys((*ALL, "r3"), 0)
    account, runs = check(tmp_path, *ALL, "r3", epochs=EPOCHS)
    assert account.given_up == 0 and not what(runs["r0"], "lost")
    assert [len(what(runs[name], "received")) for name in ("r2", "r3")] == [1, 1]
    assert {row.workers for row in account.steps[before:]} >= {2, 3, 4}


def test_the_training_ends_while_a_replica_listens_and_another_is_gone_before_the_sender(
    fleet: Any, tmp_path: Path
) -> None:
    """r1 has nothing to send and ends; r0 sends the state on."""
    group = start(fleet, epochs=3)
    commit(group, steps=3)
    group.stop_holding()
    assert group.wait("r1") == {"r1": 0}
    (tmp_path / "release").touch()
    assert group.wait() == {"r0": 0, "r1": 0, "r2": 0}
    check(tmp_path, *ALL, epochs=3)
    assert {group.status(name)["state"] for name in ALL} == {"finished"}
