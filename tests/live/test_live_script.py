"""A user's own script: the loop over steps and micro-batches, what it refuses, and the example."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from live.harness import TestFleet, eventually

pytest.importorskip("torchft", reason="the live engine needs torchft: pip install 'ebbflow[live]'")

import ebbflow.live
from contract.suite import make_data, make_model
from ebbflow.errors import CheckpointError, ConfigError, Diverged
from ebbflow.live.accounting import read_fleet
from ebbflow.optim.elastic import ElasticOptimizer
from live import replicas

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
loss_fn = nn.CrossEntropyLoss()


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Any]:
    """`join` for a fleet of one, in this process."""
    with TestFleet(tmp_path, replicas.tiny) as fleet:

        def join(**settings: Any) -> tuple[nn.Module, ebbflow.live.LiveSession]:
            model = settings.pop("model", None) or make_model()
            optimizer = settings.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            defaults = {"epochs": 1, "local_batch": 8, "base_batch": 8, "lighthouse": f"127.0.0.1:{fleet.port}"}
            defaults |= {"replica": "r0", "folder": tmp_path}
            return model, ebbflow.live.join(
                model, optimizer, settings.pop("data", TensorDataset(*make_data())), **{**defaults, **settings}
            )

        yield join


def test_a_script_trains_in_its_own_loop(script: Any, tmp_path: Path) -> None:
    rows: list[Any] = []
    model, fleet = script(micro_batch=3, on_commit=rows.append, on_epoch=lambda epoch: {"epoch": float(epoch)})
    sizes: list[int] = []
    with fleet:
        for step in fleet:
            for x, y in step:
                sizes.append(len(x))
                step.backward(loss_fn(model(x), y))
        assert fleet.finished and fleet.first and not fleet.left
    assert sum(sizes) == 97 and max(sizes) == 3 and min(sizes) > 1
    account, (run,) = read_fleet(tmp_path)
    assert account.exactly_once and account.epochs == 1 and len(rows) == len(account.steps)
    assert [row.metrics for row in run.validations] == [{"epoch": 1.0}]


def test_half_precision_by_autocast_in_the_script(script: Any, tmp_path: Path) -> None:
    model, fleet = script(model=make_model(batch_norm=True).float(), rule="adascale", micro_batch=4)
    with fleet:
        for step in fleet:
            for x, y in step:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = loss_fn(model(x.float()), y)
                step.backward(loss)
    account, _ = read_fleet(tmp_path)
    assert account.exactly_once and all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_a_replica_leaves_when_notice_says_that_its_machine_is_taken_away(script: Any, tmp_path: Path) -> None:
    # By the steps, not by the number of calls: while it waits for a slow lighthouse, that is ten times per second.
    model, fleet = script(notice=lambda: fleet.flow.step >= 3)
    with fleet:
        for step in fleet:
            for x, y in step:
                step.backward(loss_fn(model(x), y))
    assert fleet.left and not fleet.finished
    with script(model=model)[1] as again:
        assert 0 < again.flow.step == fleet.flow.step, "the state was kept for whoever comes next"


def test_what_else_belongs_to_the_state_is_kept_with_it(script: Any) -> None:
    class Counter:
        count = 0

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]

    counter, later = Counter(), Counter()
    model, fleet = script(extras={"counter": counter})
    with fleet:
        for step in fleet:
            counter.count += 1
            for x, y in step:
                step.backward(loss_fn(model(x), y))
            if counter.count == 4:
                fleet.leave()
    with script(model=model, extras={"counter": later})[1]:
        pass
    assert later.count == counter.count > 0


@pytest.mark.parametrize("mistake", ["none", "twice", "outside"])
def test_a_forgotten_or_repeated_backward_is_refused(script: Any, mistake: str) -> None:
    model, fleet = script()

    def train() -> None:
        for step in fleet:
            for x, y in step:
                loss = loss_fn(model(x), y)
                if mistake == "twice":
                    step.backward(loss)
                    step.backward(loss)
            if mistake == "outside":
                step.backward(loss)

    with fleet, pytest.raises(ConfigError, match="once for each micro-batch"):
        train()


def test_a_loss_that_is_no_number_ends_the_run_with_its_reason(script: Any, tmp_path: Path) -> None:
    _, fleet = script(loss=lambda model, x, y: loss_fn(model(x), y) * float("nan"))
    with pytest.raises(Diverged, match="norm of the gradient is nan at step 0; use a smaller learning rate"), fleet:
        fleet.run()
    _, (run,) = read_fleet(tmp_path)
    assert run.status == "diverged"


def test_a_step_that_is_skipped_leaves_batch_norm_alone(script: Any) -> None:
    model = nn.Sequential(make_model(), nn.BatchNorm1d(3, dtype=torch.float64))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    rows: list[Any] = []
    _, fleet = script(
        model=model,
        optimizer=ElasticOptimizer(inner, "linear", base_batch=8, on_nonfinite="skip"),
        on_commit=rows.append,
    )
    with fleet:
        for number, step in enumerate(fleet):
            for x, y in step:
                step.backward(loss_fn(model(x * torch.inf if number == 3 else x), y))
    assert [row.step for row in rows if "skipped" in row.stats] == [3]
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


def test_what_a_fleet_cannot_use_is_refused(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("LIGHTHOUSE", "REPLICA", "FOLDER"):
        monkeypatch.delenv(f"EBBFLOW_{variable}", raising=False)
    with pytest.raises(ConfigError, match="ebbflow launch"):
        script(lighthouse=None, replica=None, folder=None)
    with pytest.raises(ConfigError, match="base_batch is missing"):
        script(base_batch=None)
    with pytest.raises(ConfigError, match="fp16"):
        script(precision="fp16")
    model = make_model()
    sampler = ebbflow.ElasticSampler(97, 2, local_batch=4)
    elastic = ElasticOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), base_batch=8, sampler=sampler)
    with pytest.raises(ConfigError, match="sampler of its own"):
        script(model=model, optimizer=elastic)


def test_a_checkpoint_of_another_job_is_refused(script: Any) -> None:
    model, fleet = script()
    with fleet:
        for step in fleet:
            for x, y in step:
                step.backward(loss_fn(model(x), y))
    with pytest.raises(CheckpointError, match="seed is '5' here and '0' in the fleet"), script(seed=5)[1]:
        pass


def test_the_example_runs_on_two_replicas_one_of_which_is_told_to_leave(tmp_path: Path) -> None:
    with TestFleet(tmp_path, replicas.tiny) as fleet:
        processes = {}
        for name in ("r0", "r1"):
            variables = {
                "EBBFLOW_LIGHTHOUSE": f"127.0.0.1:{fleet.port}",
                "EBBFLOW_REPLICA": name,
                "EBBFLOW_FOLDER": str(tmp_path),
            }
            processes[name] = subprocess.Popen(
                [sys.executable, str(ROOT / "examples" / "live_training.py")],
                env={**os.environ, **variables},
                stdout=subprocess.PIPE,
                text=True,
            )
        try:
            eventually(lambda: fleet.status("r1").get("step", 0) > 3, "r1 trains", within_s=120)
            processes["r1"].send_signal(signal.SIGTERM)
            output, _ = processes["r0"].communicate(timeout=120)
            assert processes["r1"].wait(timeout=60) == 0 and processes["r0"].returncode == 0
        finally:
            for process in processes.values():
                process.kill()
                process.communicate()
    assert float(output.split()[-1]) > 0.9
    account, _ = read_fleet(tmp_path)
    assert account.exactly_once and account.epochs == 10
