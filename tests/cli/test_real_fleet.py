"""The commands with real replicas that train, are killed, and are counted."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli.conftest import Shell
from live.fakes import until

pytest.importorskip("torchft", reason="the live extra is not installed")

pytestmark = pytest.mark.process

TRAINING = ("--workload", "digits-mlp", "--rule", "adascale", "--local-batch", "32")


def times_each_sample_was_committed(job: Path, *, epoch_samples: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """An independent count: the line of steps behind the final state, sample by sample, from the raw rows."""
    rows = [json.loads(line) for path in job.glob("replicas/*/record.jsonl") for line in path.read_text().splitlines()]
    steps = {row["stats"]["lineage"]: row for row in rows if row["kind"] == "step"}
    parents = {row["stats"]["parent"] for row in steps.values()}
    tip = max((lineage for lineage in steps if lineage not in parents), key=lambda lineage: steps[lineage]["samples"])
    counts = np.zeros((steps[tip]["epoch"] + 1, epoch_samples), dtype=np.int64)
    here: float | None = tip
    while here in steps:
        row = steps[here]
        first = row["samples"] - row["batch"] - row["epoch"] * epoch_samples
        counts[row["epoch"], first : first + row["batch"]] += 1
        here = row["stats"]["parent"]
    return counts


def assert_account_agrees_with_an_independent_count(account: dict[str, Any], job: Path) -> None:
    assert (account["exactly_once"], account["problems"]) == (True, [])
    counts = times_each_sample_was_committed(job, epoch_samples=account["epoch_samples"])
    whole = account["epochs"]
    assert (counts[:whole] == 1).all()
    rest = counts[whole:].ravel()  # of the epoch that was not finished: the first part, once
    assert (np.diff(rest) <= 0).all()
    assert set(rest.tolist()) <= {0, 1}
    assert counts.sum() == account["samples"]


@pytest.mark.timeout(420)
def test_a_replica_killed_under_way_costs_no_sample(shell: Shell) -> None:
    launcher = shell.start("launch", "--replicas", 2, "--out", "job", "--json", *TRAINING, "--epochs", 120)
    until(lambda: shell.training("r0", "r1"))
    found = shell.run("status", "job", "--json").json
    os.kill(shell.status("r0")["pid"], signal.SIGKILL)
    out, err = launcher.communicate(timeout=280)
    account = json.loads(out)
    assert launcher.returncode == 0, err
    assert (account["status"], account["deaths"], account["epochs"]) == ("finished", 1, 120)
    assert_account_agrees_with_an_independent_count(account, shell.job)
    assert account["metrics"]["accuracy"] > 0.9
    assert any(change["before"] > change["after"] for change in account["changes"])
    assert {member["name"] for member in found["members"]} == {"r0", "r1"}
    assert found["batch"] > 0
    assert found["samples_per_s"] > 0


@pytest.mark.timeout(420)
def test_a_trace_with_kills_notices_and_a_time_without_anybody_loses_nothing(shell: Shell) -> None:
    # Played 60 times faster: two for 10 s, one for 3 s, nobody for half a second, then two until the job is done.
    trace = "0min:2 10min:1 13min:0 13.5min:2 15min"
    played = ("--speed", 60, "--signal", "mixed", "--seed", 1, "--finish", "--out", "job", "--json")
    account = shell.run("replay", trace, *TRAINING, "--epochs", 150, *played, timeout_s=400).json
    assert (account["status"], account["epochs"]) == ("finished", 150)
    assert account["kills"] + account["notices"] == 2
    assert account["starts"] >= 4
    assert_account_agrees_with_an_independent_count(account, shell.job)


SCRIPT = """
import sys, torch, ebbflow.live
model = torch.nn.Linear(4, 2)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with ebbflow.live.join(model, optimizer, data, local_batch=8, base_batch=8, epochs=1) as fleet:
    for step in fleet:
        for x, y in step:
            step.backward(torch.nn.functional.cross_entropy(model(x), y))
        if sys.argv[1] == "break" and step.number == 3:
            break
"""


@pytest.mark.process
@pytest.mark.timeout(420)
def test_a_script_that_breaks_is_incomplete_then_finished_and_then_there_is_nothing_to_train(shell: Shell) -> None:
    (shell.folder / "train.py").write_text(SCRIPT)
    ends = []
    for argument in ("break", "on", "on"):
        answer = shell.run("launch", "--out", "job", "--json", "train.py", argument, timeout_s=130)
        account = json.loads(answer.out)
        ends.append((answer.code, account["status"], account["steps"]))
        assert ("nothing was trained" in account["reason"]) == (len(ends) == 3), answer.err
    assert ends == [(4, "incomplete", 3), (0, "finished", 8), (0, "finished", 8)]


@pytest.mark.long
@pytest.mark.process
@pytest.mark.timeout(400)
def test_a_published_trace_of_half_a_day_in_three_minutes_loses_nothing(shell: Shell, shared: Path) -> None:
    played = ("--speed", 228, "--duration", "3min", "--signal", "mixed", "--out", "job", "--json")
    trace = shared / "traces" / "aws_p3_bamboo.csv"
    endless = (*TRAINING, "--epochs", 1_000_000, "--max-workers", 4)
    answer = shell.run("replay", trace, *endless, *played, timeout_s=360)
    account = json.loads(answer.out)
    assert (answer.code, account["status"]) == (4, "trace over"), answer.err
    assert account["kills"] > 5
    assert account["notices"] > 5
    assert account["deaths"] == 0
    assert_account_agrees_with_an_independent_count(account, shell.job)
