"""A new replica receives the state for as long as that takes, and the others train meanwhile."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from live.harness import eventually

pytest.importorskip("torchft", reason="the live engine needs torchft: pip install 'ebbflow[live]'")

from contract.suite import EPOCHS, SAMPLES
from live.test_live_faults import KILLED, check, reports, what

pytestmark = pytest.mark.process

OLD = ("r0", "r1")
ALL = ("r0", "r1", "r2")


def lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def listening(group: Any, folder: Path, *, steps: int = 3, of: str = "r0") -> int:
    """Wait until the others have committed this many steps while r2 receives the state; the steps that they have."""
    eventually((folder / "r2.receiving").exists, "a transfer")
    before = lines(folder / f"{of}.committed")
    eventually(lambda: lines(folder / f"{of}.committed") >= before + steps, f"{steps} steps during the transfer")
    return before


@pytest.mark.parametrize("rule", ["linear", "adascale"])
def test_the_others_train_while_a_new_replica_receives_the_state(fleet: Any, tmp_path: Path, rule: str) -> None:
    """In buckets, with batch norm and momentum, and weights that are compared in every second step.

    The state that r2 receives is that of the first step which it hears: what was not sent by then was copied."""
    group = fleet(all=OLD, hold=2, hold_s=0.05, note=True, rule=rule, bucket_bytes=64, check_every=2)
    group.start(*OLD)
    group.trains(*OLD)
    group.start("r2", receive_later=True)
    before = listening(group, tmp_path)
    (tmp_path / "release").touch()
    group.trains(*ALL, members=3)
    eventually(lambda: lines(tmp_path / "r2.fetched") > 0, "a step that r2 computes")
    group.stop_holding()
    assert group.wait() == {"r0": 0, "r1": 0, "r2": 0}
    account, runs = check(tmp_path, *ALL, rule=rule)
    heard = runs["r2"].steps[0].step
    assert heard <= before + 1, "it has the steps that the others committed since the state was packed"
    computes = next(row.step for row in account.steps if row.workers == 3)
    assert computes - heard > 3, "the others committed steps during the transfer"
    assert [row.workers for row in account.steps[heard:computes]] == [2] * (computes - heard)
    assert {row.workers for row in account.steps[computes:]} == {3}
    lineages = {name: {row.step: row.stats["lineage"] for row in run.steps} for name, run in runs.items()}
    assert lineages["r2"].items() <= lineages["r0"].items() and lineages["r0"] == lineages["r1"]
    losses = {name: {row.step: (row.loss, row.lr, row.multiplier) for row in run.steps} for name, run in runs.items()}
    assert losses["r2"].items() <= losses["r0"].items(), "the rule has the same state, too"
    fetched = [number for name in ALL for number in (tmp_path / f"{name}.fetched").read_text().split()]
    assert len(fetched) == EPOCHS * SAMPLES
    assert not what(runs["r0"], "lost") and len(what(runs["r2"], "received")) == 1
