"""The rule `auto` on a fleet of real replicas: all decide alike, and a probe that loses a replica is abandoned."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from live.harness import TestFleet

pytest.importorskip("torchft", reason="the live engine needs torchft: pip install 'ebbflow[live]'")

from contract.suite import EPOCHS, SAMPLES
from ebbflow.live.accounting import read_fleet
from ebbflow.record import Run, StepRow
from live import replicas

pytestmark = pytest.mark.process

ALL = ("r0", "r1", "r2")
# Branches of 2 steps, scored in 2 more, so that a branch of steps of 12 samples fits into an epoch of 97; one probe is
# due after a third of the run.
SMALL = {"_BRANCH": 2, "_SCORED": 1, "_SCORES": 2, "_COST": 1.0, "_PROBES_AT": (0.34,)}
RULE = "auto(limit=0.1, guard=false, probe=true)"


@pytest.fixture
def fleet(open_fleet: Callable[..., TestFleet]) -> Callable[..., TestFleet]:
    return lambda **arguments: open_fleet(replicas.tiny, {"all": ALL, "rule": RULE, "auto": SMALL, **arguments})


def checked(folder: Path, *finishers: str) -> dict[str, Run]:
    """Every sample once, and the same weights in all replicas that finished."""
    account, found = read_fleet(folder)
    runs = {run.path.parent.name: run for run in found}
    assert account.mistakes == ()
    assert (account.epochs, account.samples) == (EPOCHS, EPOCHS * SAMPLES)
    assert len({runs[name].end.weights_sha256 for name in finishers if runs[name].end}) == 1
    return runs


def in_probe(rows: Sequence[StepRow]) -> list[tuple[int, float, float]]:
    """Step, branch and coefficient of the steps of a probe."""
    return [(row.step, row.stats["probe"], row.stats["coefficient"]) for row in rows if "probe" in row.stats]


def test_three_replicas_probe_and_decide_alike(fleet: Any, tmp_path: Path) -> None:
    group = fleet()
    group.start(*ALL)
    assert group.wait() == dict.fromkeys(ALL, 0)
    runs = checked(tmp_path, *ALL)
    first = runs["r0"]
    assert [(branch, coefficient) for _, branch, coefficient in in_probe(first.steps)] == [
        *[(1.0, 1.0)] * 4, *[(2.0, 0.5)] * 4, *[(3.0, 2.0)] * 4,
    ]  # fmt: skip
    (decided,) = [row.stats["probed"] for row in first.steps if "probed" in row.stats]
    assert decided in (1.0, 0.5, 2.0)
    given_back = sum(row.stats.get("given_back", 0) for row in first.steps)
    assert given_back == (2 + 4 + 4) * 12, "all but the two steps of the branch with which the run went on"
    assert sum(row.batch for row in first.steps) - given_back == EPOCHS * SAMPLES
    for name in ("r1", "r2"):
        assert [(row.step, row.stats, row.loss) for row in runs[name].steps] == [
            (row.step, row.stats, row.loss) for row in first.steps
        ]


@pytest.mark.parametrize(("later", "branch"), [(1, 1), (2, 1), (5, 2), (10, 3)])
def test_a_replica_killed_in_a_branch_abandons_the_probe_and_costs_no_sample(
    fleet: Any, tmp_path: Path, later: int, branch: int
) -> None:
    """Killed so many steps after the probe began: where the first branch trains and is scored, and in the others.

    The others complete the step as it was begun, so that the next one shows that a replica is missing.
    """
    begin = 10  # an epoch has 9 steps; after the first one of the second epoch a third of the run is over
    group = fleet()
    group.start("r1", fault=f"kill:allreduce@{begin + later}")
    group.start("r0", "r2")
    assert group.wait() == {"r0": 0, "r1": -signal.SIGKILL, "r2": 0}
    runs = checked(tmp_path, "r0", "r2")
    # A replica that receives the state of the other one after a step has no row of that step.
    rows = [{row.step: row for row in runs[name].steps} for name in ("r0", "r2")]
    assert all(rows[0][step].stats == rows[1][step].stats for step in rows[0].keys() & rows[1].keys())
    both = [row for _, row in sorted((rows[0] | rows[1]).items())]
    steps = in_probe(both)
    assert steps[0][0] == begin and steps[-1][1] == branch
    after = [row for row in both if row.step > steps[-1][0]]
    assert after[0].stats["probed"] == 0.0, "abandoned"
    assert {row.stats["coefficient"] for row in after} == {1.0}
