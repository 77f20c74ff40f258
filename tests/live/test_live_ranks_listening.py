"""A replica of several ranks receives the state rank by rank, and the others train meanwhile."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from live.harness import TestFleet, eventually

pytest.importorskip("torchft", reason="the live engine needs torchft: pip install 'ebbflow[live]'")

from ebbflow.live.accounting import read_fleet
from live import rank_replicas
from live.test_live_listening import lines
from live.test_live_ranks import BOTH, KILLED, check

pytestmark = pytest.mark.process

LONG = pytest.mark.long  # each takes seconds; the others show the same in the ordinary suite
STEPS = 60


@pytest.fixture
def fleet(open_fleet: Callable[..., TestFleet]) -> Callable[..., TestFleet]:
    arguments = {"all": BOTH, "max_steps": STEPS, "hold": 2, "soon_s": 0.1, "bucket_bytes": 64}
    return lambda **more: open_fleet(rank_replicas.sharded, {**arguments, **more})


def start(group: TestFleet, *, ranks: int = 2, r0: Any = None, r2: Any = None) -> TestFleet:
    """r0 and r1 train; r2 joins, and rank k of it receives no tensor before the file `release` or `r2.k.release` is
    there."""
    group.start_ranks("r0", ranks, faults=r0)
    group.start_ranks("r1", ranks)
    group.trains(*BOTH)
    group.start_ranks("r2", ranks, faults=r2, receive_later=True, hold=None)
    for rank in range(ranks):
        eventually((group.folder / f"r2.{rank}.receiving").exists, f"a transfer to rank {rank} of r2")
    return group


def committed(group: TestFleet, of: str) -> list[tuple[int, int]]:
    """The steps that a process has committed, and their workers."""
    file = group.folder / f"{of}.committed"
    words = file.read_text().splitlines() if file.exists() else []
    return [(int(step), int(workers)) for step, workers in (line.split() for line in words)]


def commit(group: TestFleet, *, steps: int, of: str = "r0.0") -> int:
    """Wait until a process has committed this many further steps; the steps that it had."""
    before = len(committed(group, of))
    eventually(lambda: len(committed(group, of)) >= before + steps, f"{steps} steps of {of}")
    return before


def computes(group: TestFleet, workers: int, *, of: str = "r2.1") -> None:
    eventually(lambda: workers in [found for _, found in committed(group, of)], f"a step of {workers} with {of}")


def same_weights(folder: Path, names: tuple[str, ...], ranks: int) -> bool:
    """Whether rank k holds the same bits in all replicas."""
    for rank in range(ranks):
        first, *others = (torch.load(folder / f"{name}.{rank}.pt", weights_only=True) for name in names)
        if any(not torch.equal(first[key], other[key]) for other in others for key in first):
            return False
    return True


@pytest.mark.parametrize(("ranks", "arguments"), [(2, {"rule": "adascale"}), (3, {"optimizer": "Adam", "clip": 0.05})])
def test_the_others_train_while_each_rank_of_a_newcomer_receives_its_shards(
    fleet: Any, tmp_path: Path, ranks: int, arguments: dict[str, Any]
) -> None:
    """Rank 0 has its shards steps earlier than the others: the newcomer computes when all have theirs."""
    group = start(fleet(check_every=2, save_weights=True, **arguments), ranks=ranks)
    before = commit(group, steps=3)
    (tmp_path / "r2.0.release").touch()
    commit(group, steps=3)
    assert not committed(group, "r2.0"), "it has not all of the state"
    (tmp_path / "release").touch()
    computes(group, 3)
    group.stop_holding()
    assert set(group.wait().values()) == {0}
    account = check(tmp_path, **arguments)
    heard, first = committed(group, "r2.0")[0][0], next(row.step for row in account.steps if row.workers == 3)
    assert heard <= before + 1 < first - 5, "r2 has the steps that the others committed during the transfer"
    assert {row.workers for row in account.steps[first:]} == {3} and len(account.steps) == STEPS
    assert {committed(group, f"r2.{rank}")[-1] for rank in range(ranks)} == {(STEPS - 1, 3)}
    assert same_weights(tmp_path, ("r0", "r1", "r2"), ranks)
    _, runs = read_fleet(tmp_path)
    told = [
        [(row.step, row.stats, row.loss, row.lr, row.multiplier) for row in run.steps if row.step >= heard]
        for run in runs
    ]
    assert told[0] == told[1] == told[2] and not any(event.what == "lost" for run in runs for event in run.events)


@pytest.mark.parametrize(
    ("victim", "hears"), [pytest.param(0, True, marks=LONG), pytest.param(1, True, marks=LONG), (1, False)]
)
def test_a_rank_of_a_newcomer_is_killed_while_it_listens(fleet: Any, tmp_path: Path, victim: int, hears: bool) -> None:
    """When it has just heard a step, or in the middle of its transfer, when rank 0 has its shards."""
    group = start(fleet(max_steps=30), r2={victim: "kill:hear@*"} if hears else None)
    if not hears:
        (tmp_path / "r2.0.release").touch()
        commit(group, steps=2)
        group.signal(f"r2.{victim}", signal.SIGKILL)
    codes = group.wait("r2.0", "r2.1")
    assert codes[f"r2.{victim}"] == KILLED and codes[f"r2.{1 - victim}"] not in (0, KILLED)
    group.stop_holding()
    assert set(group.wait("r0.0", "r0.1", "r1.0", "r1.1").values()) == {0}
    account = check(tmp_path)
    assert {row.workers for row in account.steps} == {2}, "the others have computed every step, with nobody else"


@pytest.mark.parametrize("victim", [pytest.param(0, marks=LONG), 1])
def test_a_rank_of_the_donor_is_killed_while_a_newcomer_listens(fleet: Any, tmp_path: Path, victim: int) -> None:
    group = start(fleet(), r0={victim: "kill:copy@*"})
    group.wait("r0.0", "r0.1")
    commit(group, steps=2, of="r1.0")
    assert not committed(group, "r2.0") and not committed(group, "r2.1")
    (tmp_path / "release").touch()
    computes(group, 2)
    group.stop_holding()
    assert set(group.wait("r1.0", "r1.1", "r2.0", "r2.1").values()) == {0}
    assert check(tmp_path).given_up == 0
    received = [event.text for run in read_fleet(tmp_path)[1] for event in run.events if event.what == "received"]
    assert len(received) == 1 and "from r1" in received[0], "what came from r0 is forgotten"


@LONG
@pytest.mark.parametrize("lost", [False, True])
def test_the_others_wait_while_one_rank_of_a_newcomer_cannot_keep_more_sums(
    fleet: Any, tmp_path: Path, lost: bool
) -> None:
    """Rank 1 keeps two, and rank 0 waits for it. Then the state comes, or its donor is lost and another sends it."""
    group = start(fleet(most_heard={1: 2}, optimizer="Adam", watch_every_s=0.05))
    eventually(lambda: committed(group, "r0.0")[-1][0] > 3, "steps that r2 hears")
    time.sleep(0.5)  # the others wait by now; nothing shows it but that nothing happens
    if lost:
        group.signal("r0.1", signal.SIGKILL)
        group.wait("r0.0", "r0.1")
    (tmp_path / "release").touch()
    computes(group, 2 if lost else 3)
    group.stop_holding()
    assert set(group.wait("r1.0", "r1.1", "r2.0", "r2.1").values()) == {0}
    check(tmp_path, optimizer="Adam")


def test_a_newcomer_that_is_told_to_leave_while_it_listens_leaves_at_once(fleet: Any, tmp_path: Path) -> None:
    group = start(fleet(max_steps=30))
    commit(group, steps=2)
    (tmp_path / "r2.1.release").touch()
    group.signal("r2.0", signal.SIGTERM)
    assert set(group.wait("r2.0", "r2.1").values()) == {0}
    assert group.status("r2")["state"] == "left"
    group.stop_holding()
    assert set(group.wait().values()) == {0}
    check(tmp_path)


@LONG
def test_the_training_ends_while_a_replica_of_several_ranks_listens(fleet: Any, tmp_path: Path) -> None:
    group = start(fleet(max_steps=30))
    group.stop_holding()
    eventually(lambda: lines(tmp_path / "r0.0.committed") == 30, "the end")
    (tmp_path / "release").touch()
    assert set(group.wait().values()) == {0}
    check(tmp_path)
    assert {group.status(name)["state"] for name in ("r0", "r1", "r2")} == {"finished"}
