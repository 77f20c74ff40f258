"""A user's own script: the loop over steps and micro-batches, what it refuses, and the example."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from live.harness import TestFleet, eventually, final_state

pytest.importorskip("torchft", reason="the live engine needs torchft: pip install 'ebbflow[live]'")

import ebbflow.live
from contract.suite import BackAndForth, make_data, make_model
from ebbflow.errors import CheckpointError, ConfigError, Diverged, StorageUnreachable
from ebbflow.live import checkpoints, connection, live_session, membership
from ebbflow.live.accounting import read_fleet, read_fleet_run
from ebbflow.live.fleet_questions import FleetQuestions
from ebbflow.live.membership_events import LighthouseUnreachable
from ebbflow.live.protocol import read_statuses
from ebbflow.live.registration import Registration
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.report.results import load_results
from ebbflow.run.loop import Callbacks
from ebbflow.workloads.prefetch import Request, SampleReader
from live import replicas
from step_counter import Counter

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


class Both:
    """What a script keeps together: a scheduler, and more."""

    def __init__(self, scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
        self.scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        return {"schedules": [self.scheduler.state_dict()], "more": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state_dict["schedules"][0])


def train_with(scheduler: torch.optim.lr_scheduler.LRScheduler, model: nn.Module, fleet: Any) -> None:
    """The loop of a script that has a scheduler of torch."""
    for step in fleet:
        if step.number:  # the optimizer has made a step
            scheduler.step()
        for x, y in step:
            step.backward(loss_fn(model(x), y))


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
    assert fleet.record == run


def test_scores_may_come_from_evaluate_as_in_other_sessions(script: Any) -> None:
    _, fleet = script(loss=lambda model, x, y: loss_fn(model(x), y), evaluate=lambda: {"score": 0.5})
    with fleet:
        fleet.run()
    assert [row.metrics for row in fleet.record.validations] == [{"score": 0.5}]


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({}, "adascale+statewarmup(0.05)"),
        ({"adam": True}, "sqrt+statewarmup(0.05, by=multiplier)"),
        ({"epochs": None, "max_steps": 5}, "adascale"),
    ],
    ids=["sgd", "adam", "no end"],
)
def test_a_replica_that_names_no_rule_records_the_one_that_it_used(
    script: Any, tmp_path: Path, settings: dict[str, Any], rule: str
) -> None:
    """Also where it is alone, with one micro-batch per step: then nothing is measured, and others may come."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters()) if settings.pop("adam", False) else None
    with script(model=model, optimizer=optimizer, loss=lambda m, x, y: loss_fn(m(x), y), **settings)[1] as fleet:
        fleet.run()
    _, (run,) = read_fleet(tmp_path)
    assert run.header.config["rule"] == rule


def test_a_lone_replica_asks_the_lighthouse_in_threads_that_stay_until_it_is_closed(script: Any) -> None:
    def asking() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "ebbflow-membership"}

    model, fleet = script()
    seen: list[set[threading.Thread]] = []
    with fleet:
        for step in fleet:
            seen.append(asking())
            for x, y in step:
                step.backward(loss_fn(model(x), y))
    assert seen[0] and all(seen[0] <= later for later in seen)
    for thread in seen[-1]:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("holds", [True, False])
def test_a_lone_replica_asks_for_the_next_step_while_the_optimizer_applies_this_one(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holds: bool
) -> None:
    """But not at the end of an epoch; and after a long pause it asks again, since the answer may be out of date."""
    done: list[str] = []
    ask = FleetQuestions.ask_for_quorum

    def asked(self: FleetQuestions, request: Any, **settings: Any) -> Any:
        done.append(f"asked for {request.step}")
        return ask(self, request, **settings)

    def applied(*_: Any) -> None:
        if "applied" not in done:
            eventually(lambda: "asked for 1" in done, "a question for the next step")
        done.append("applied")

    monkeypatch.setattr(FleetQuestions, "ask_for_quorum", asked)
    monkeypatch.setattr(connection, "answer_holds", lambda answer, *, asked, now: holds)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(applied)
    _, fleet = script(model=model, optimizer=optimizer, local_batch=49, loss=lambda m, x, y: loss_fn(m(x), y))
    with fleet:
        fleet.run()
    account, _ = read_fleet(tmp_path)
    assert account.exactly_once and len(account.steps) == 2
    again = [] if holds else ["asked for 1"]
    assert done[done.index("asked for 1") :] == ["asked for 1", "applied", *again, "applied", "asked for 2"]


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


def test_a_replica_that_leaves_while_it_asks_the_lighthouse_still_takes_the_answer(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which torchft would abort the process with, were it to come while the interpreter ends."""
    asks, closes, answered = threading.Event(), threading.Event(), threading.Event()

    def ask(questions: FleetQuestions, *_: Any, **__: Any) -> LighthouseUnreachable:
        asks.set()
        closes.wait(60)
        time.sleep(0.3)  # after which the replica would be gone
        answered.set()
        return LighthouseUnreachable(now=time.monotonic(), reason="nobody waits for it")

    def close(registration: Registration) -> None:
        closing(registration)
        closes.set()

    closing = Registration.close
    monkeypatch.setattr(FleetQuestions, "ask_for_quorum", ask)
    monkeypatch.setattr(Registration, "close", close)
    monkeypatch.setattr(connection, "_ANSWER_SLACK_S", 60.0)
    model, fleet = script(notice=asks.is_set)
    with fleet:
        train(model, fleet)
    assert fleet.left and answered.is_set()


def test_a_replica_that_leaves_says_that_its_state_could_not_be_saved(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise StorageUnreachable("no space left on device")

    monkeypatch.setattr(checkpoints, "save_state", full)
    model, fleet = script(notice=lambda: fleet.flow.step >= 3)
    with fleet:
        for step in fleet:
            for x, y in step:
                step.backward(loss_fn(model(x), y))
    (status,) = read_statuses(tmp_path).values()
    assert (status.state, status.step) == ("left", fleet.flow.step)
    said = f"the state of step {fleet.flow.step} could not be saved; only older ones may be there"
    assert status.reason == said


def test_what_else_belongs_to_the_state_is_kept_with_it(script: Any) -> None:
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


def test_a_state_that_would_be_saved_and_not_read_back_is_refused_at_the_start_or_when_it_becomes_one(
    script: Any,
) -> None:
    counter = Counter()
    counter.count = np.float64(3)  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"'counter' among the extras .* \(numpy\._core\.multiarray\.scalar\)"):
        script(extras={"counter": counter})
    counter.count = 3
    with script(extras={"counter": counter})[1] as fleet:
        counter.count = np.float64(4)  # type: ignore[assignment]
        with pytest.raises(ConfigError, match="is not read back from a checkpoint"):
            fleet.pack()


class Counting(nn.Linear):
    """A layer that counts its batches in something that is no tensor."""

    batches = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.batches += self.training
        return super().forward(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"batches": self.batches}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


def with_counting_layer() -> nn.Sequential:
    model = make_model()
    return nn.Sequential(model, Counting(3, 3).double())


def test_what_a_module_keeps_besides_tensors_is_in_the_checkpoint(script: Any) -> None:
    first, fleet = script(model=with_counting_layer())
    with fleet:
        for step in fleet:
            for x, y in step:
                step.backward(loss_fn(first(x), y))
            if step.number == 3:
                fleet.leave()
    later, fleet = script(model=with_counting_layer())
    with fleet:
        for _ in fleet:
            break
    assert later[1].batches == first[1].batches > 0


def test_a_model_with_a_sparse_buffer_is_refused_unless_every_replica_makes_it_itself(script: Any) -> None:
    model = make_model()
    model.register_buffer("neighbours", torch.eye(3).to_sparse())
    with pytest.raises(ConfigError, match=r"neighbours of the model is a sparse tensor.*persistent=False"):
        script(model=model)
    model = make_model()
    model.register_buffer("neighbours", torch.eye(3).to_sparse(), persistent=False)
    with script(model=model)[1] as fleet:
        for step in fleet:
            for x, y in step:
                step.backward(loss_fn(model(x), y))


def test_what_else_belongs_to_the_state_goes_back_to_a_snapshot_with_it(script: Any) -> None:
    """An epoch of 97 samples is 13 steps of 8; the rate falls after each of them, and the seven that were given back do
    not count."""
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = ebbflow.ElasticOptimizer(inner, BackAndForth(), base_batch=8, epochs=2, epoch_samples=97)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, step_size=1, gamma=0.9)
    rows: list[Any] = []
    _, fleet = script(
        model=model, optimizer=optimizer, epochs=2, extras={"scheduler": scheduler}, on_commit=rows.append
    )
    with fleet:
        train_with(scheduler, model, fleet)
    assert len(rows) == 26 + 7 and scheduler.last_epoch == 25
    assert inner.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**25)


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


def _finite_loss_nan_gradient(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return loss_fn(model(x), y) + (0 * model(x)).sum().sqrt()  # the derivative of the root at 0 is infinite, times 0


@pytest.mark.parametrize("setting", ["stop", "skip"])
def test_a_gradient_that_is_no_number_is_not_applied_although_the_loss_is_finite(
    script: Any, tmp_path: Path, setting: str
) -> None:
    model = make_model()
    rows: list[Any] = []
    _, fleet = script(
        model=model,
        optimizer=ElasticOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), base_batch=8),
        on_nonfinite=setting,
        loss=lambda model, x, y: (_finite_loss_nan_gradient if len(rows) == 3 else cross)(model, x, y),
        on_commit=rows.append,
        checkpoint_every_s=0.0,
    )
    expected = pytest.raises(Diverged, match="norm of the gradient is nan at step 3")
    with expected if setting == "stop" else nullcontext(), fleet:
        fleet.run()
    assert all(torch.isfinite(value).all() for value in model.parameters())
    assert [row.step for row in rows if "skipped" in row.stats] == ([3] if setting == "skip" else [])
    assert all(torch.isfinite(value).all() for value in final_state(tmp_path)["model"].values())


def cross(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return loss_fn(model(x), y)


def test_weights_that_are_no_numbers_are_not_saved(script: Any, tmp_path: Path) -> None:
    model = make_model()

    def spoil(row: Any) -> None:
        if row.step == 4:
            next(model.parameters()).data.fill_(torch.inf)

    _, fleet = script(model=model, loss=cross, on_commit=spoil, checkpoint_every_s=0.0)
    with pytest.raises(Diverged, match="the weights are not finite after step 5"), fleet:
        fleet.run()
    assert status(tmp_path)["state"] == "diverged"
    assert all(torch.isfinite(value).all() for value in final_state(tmp_path)["model"].values())


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
    with pytest.raises(ConfigError, match=r"out is given, but a replica writes .* give folder="):
        script(out="runs")
    with pytest.raises(ConfigError, match=r"callbacks is given, but a replica calls on_commit\(row\)"):
        script(callbacks=Callbacks())
    with pytest.raises(ConfigError, match="evaluate and on_epoch are both called"):
        script(evaluate=dict, on_epoch=lambda epoch: {})
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
    with pytest.raises(CheckpointError, match="seed is '5' here and '0' in the saved state"), script(seed=5)[1]:
        pass


@pytest.mark.parametrize(
    "setting", [{"memory_steps": 10.0}, {"measure_every": 1}, {"on_nonfinite": "skip"}, {"ema": 0.9}], ids=str
)
def test_settings_by_which_replicas_would_come_to_other_weights_are_compared(
    script: Any, setting: dict[str, Any]
) -> None:
    said, other = (script(**settings)[1]._connection.membership.job for settings in ({}, setting))
    assert {key for key in said if said[key] != other[key]} == {*setting}


# Endings -------------------------------------------------------------------------------------------------------------


def train(model: nn.Module, fleet: Any, *, steps: int | None = None) -> None:
    """The loop of a script; leaves it after a number of steps."""
    for step in fleet:
        for x, y in step:
            step.backward(loss_fn(model(x), y))
        if steps is not None and step.number + 2 > steps:
            break


def status(folder: Path) -> dict[str, Any]:
    body = json.loads((folder / "replicas" / "r0" / "status.json").read_text())
    assert isinstance(body, dict)
    return body


def test_a_loop_that_is_left_early_is_incomplete_and_can_be_continued(script: Any, tmp_path: Path) -> None:
    model, fleet = script()
    with fleet:
        train(model, fleet, steps=3)
    assert status(tmp_path)["state"] == "incomplete"
    assert "the loop ended after step 2" in status(tmp_path)["reason"], "the third one was not committed"
    model, fleet = script()
    with fleet:
        assert fleet.step == 2
        train(model, fleet)
    assert status(tmp_path)["state"] == "finished"
    saved = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert all(torch.equal(saved["model"][name], value) for name, value in model.state_dict().items())


def test_a_replica_that_comes_back_when_all_others_have_finished_does_not_wait_for_them(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it is alone and two are needed to train: nothing is left to train, and nobody will come."""
    model, fleet = script()
    with fleet:
        train(model, fleet)
    (tmp_path / "weights.pt").unlink()  # the one that saved it has another folder
    monkeypatch.setenv("EBBFLOW_MIN_REPLICAS", "2")
    monkeypatch.setattr(live_session, "_MEET_S", 0.5)
    model, fleet = script()
    patience = threading.Timer(30.0, fleet.leave)  # so that the test ends if the replica would not
    patience.start()
    with fleet:
        train(model, fleet)
    assert patience.is_alive(), "it waited for others"
    patience.cancel()
    assert status(tmp_path)["state"] == "finished" and (tmp_path / "weights.pt").is_file()


def test_sys_exit_in_the_loop_is_incomplete(script: Any, tmp_path: Path) -> None:
    _, fleet = script()

    def body() -> None:
        for _ in fleet:
            sys.exit(0)

    with pytest.raises(SystemExit), fleet:
        body()
    assert status(tmp_path)["state"] == "incomplete"


def test_what_cannot_be_saved_is_not_finished(script: Any, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    model, fleet = script()
    with fleet:
        train(model, fleet)
    assert (status(tmp_path)["state"], fleet.finished) == ("incomplete", True)
    assert "could not be saved" in status(tmp_path)["reason"]


def test_an_exception_is_in_the_status_with_its_step(script: Any, tmp_path: Path) -> None:
    def on_epoch(epoch: int) -> None:
        raise RuntimeError("no such metric")

    model, fleet = script(on_epoch=on_epoch)
    with pytest.raises(RuntimeError), fleet:
        train(model, fleet)
    assert (status(tmp_path)["state"], status(tmp_path)["reason"]) == ("failed", "RuntimeError: no such metric")
    assert status(tmp_path)["step"] == fleet.step > 0


def test_damaged_checkpoints_are_not_taken_for_no_checkpoints(script: Any, tmp_path: Path) -> None:
    model, fleet = script()
    with fleet:
        train(model, fleet)
    for path in (tmp_path / "checkpoints").glob("*/*.distcp"):
        path.write_bytes(path.read_bytes()[:-1])
    _, fleet = script(loss=lambda model, x, y: loss_fn(model(x), y))
    with pytest.raises(CheckpointError, match=r"all 1 checkpoints in .* are damaged.*--from-scratch"), fleet:
        fleet.run()
    assert status(tmp_path)["state"] == "refused" and fleet.step == 0


def test_nobody_at_the_address_is_explained_and_a_notice_ends_the_wait(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "_EXPLAIN_AFTER_S", 0.0)
    monkeypatch.setattr(connection, "_CONNECT_TIMEOUT_S", 0.2)
    seen: list[str] = []

    def notice() -> bool:
        path = tmp_path / "replicas" / "r0" / "status.json"
        seen.append(status(tmp_path)["state"] if path.exists() else "")
        return seen[-1] == "waiting"

    _, fleet = script(lighthouse="127.0.0.1:1", notice=notice)
    with fleet:
        fleet.run()
    assert fleet.left
    _, (run,) = read_fleet(tmp_path)
    assert "nobody answers at 127.0.0.1:1" in next(event.text for event in run.events if event.what == "waiting")


def test_a_live_job_can_be_reported(script: Any, tmp_path: Path) -> None:
    model, fleet = script(on_epoch=lambda epoch: {"loss": torch.tensor(0.5), "wrong": torch.ones(1)}, epochs=2)
    with fleet:
        train(model, fleet)
    (arm,) = load_results(tmp_path).arms
    assert (arm.status, arm.samples) == ("finished", 2 * 97)
    run = read_fleet_run(tmp_path)
    assert [row.metrics for row in run.validations] == [{"loss": 0.5, "wrong": 1.0}] * 2
    assert all(row.duration_s for row in run.steps)
    assert run.steps[-1].duration_s == pytest.approx(arm.end_s - run.steps[-1].time_s)


# Guards --------------------------------------------------------------------------------------------------------------


def test_a_scheduler_in_the_loop_has_to_belong_to_the_state(script: Any, tmp_path: Path) -> None:
    def run(folder: str, **settings: Any) -> None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        kept = {True: {"scheduler": scheduler}, "within": {"all": Both(scheduler)}, "other": {"counter": Counter()}}
        extras = {"extras": kept[how]} if (how := settings.pop("kept", False)) else {}
        _, fleet = script(model=model, optimizer=optimizer, folder=tmp_path / folder, **extras, **settings)
        with fleet:
            train_with(scheduler, model, fleet)

    with pytest.raises(ConfigError, match=r"extras=\{'scheduler': scheduler\}"):
        run("a")
    with pytest.raises(ConfigError, match=r"extras=\{'scheduler': scheduler\}"):
        run("other", kept="other")
    with pytest.raises(ConfigError, match="use one of the two"):
        run("b", kept=True, schedule="multistep(1ep)")
    run("c", kept=True)
    run("within", kept="within")


def test_what_the_optimizer_must_not_be_is_refused(script: Any) -> None:
    model, fleet = script()

    def body() -> None:
        for step in fleet:
            for x, y in step:
                step.backward(loss_fn(model(x), y))
            fleet._optimizer.inner.step()

    with fleet, pytest.raises(ConfigError, match=r"remove optimizer.step\(\) from the loop"):
        body()
    with pytest.raises(ConfigError, match="do not belong to the model"):
        script(optimizer=torch.optim.SGD(make_model().parameters(), lr=0.1))
    rotation = nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(ConfigError, match="complex parameters"):
        script(model=rotation)
    with pytest.raises(ConfigError, match=r"^1 is an Embedding with sparse=True"):
        script(model=nn.Sequential(nn.Linear(2, 2), nn.Embedding(2, 2, sparse=True)))


def test_changed_settings_are_refused_or_used_but_never_dropped(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, fleet = script()
    with fleet:
        train(model, fleet, steps=3)

    def changed() -> Any:
        model = make_model()
        return script(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9))

    with (
        pytest.raises(
            CheckpointError, match=r"optimizer.lr is '0.02' here and '0.1' in the saved state;.*--allow-changes"
        ),
        changed()[1],
    ):
        pass
    monkeypatch.setenv("EBBFLOW_ALLOW_CHANGES", "1")
    model, fleet = changed()
    with fleet:
        assert fleet.step == 2
        train(model, fleet)
        assert fleet._optimizer.inner.param_groups[0]["lr"] == 0.02
    _, (run,) = read_fleet(tmp_path)
    assert {row.lr_base for row in run.steps} == {0.1, 0.02}


def test_two_replicas_of_one_name_do_not_write_one_record(script: Any) -> None:
    with script()[1], pytest.raises(ConfigError, match="in use by another replica of this name"), script()[1]:
        pass


# Batches -------------------------------------------------------------------------------------------------------------


class Samples(Dataset[Any]):
    """Samples of any kind."""

    def __init__(self, make: Any) -> None:
        self.x, self.y = make_data()
        self.make = make

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.make(self.x[index], self.y[index])


def as_text(batch: list[Any]) -> dict[str, Any]:
    return {"x": torch.stack([x for x, _ in batch]), "labels": [int(y) for _, y in batch]}


@pytest.mark.parametrize(
    ("data", "loss"),
    [
        (Samples(lambda x, y: {"x": x, "y": y}), lambda model, b: loss_fn(model(b["x"]), b["y"])),
        (Samples(lambda x, y: x), lambda model, b: model(b).square().mean()),
        (Samples(lambda x, y: (x, y, 1.0)), lambda model, b: loss_fn(model(b[0]), b[1]) * b[2].mean()),
        (Samples(lambda x, y: (x, y)), lambda model, b: loss_fn(model(b[0]), b[1])),
        pytest.param(
            DataLoader(Samples(lambda x, y: (x, y)), batch_size=7, shuffle=True, collate_fn=as_text, num_workers=1),
            lambda model, b: loss_fn(model(b["x"]), torch.tensor(b["labels"])),
            marks=pytest.mark.process,
        ),
    ],
    ids=["dict", "tensor", "triple", "pair", "collate_fn"],
)
def test_the_loop_yields_what_a_data_loader_would(script: Any, tmp_path: Path, data: Any, loss: Any) -> None:
    model, fleet = script(data=data, local_batch=7)
    numbers = []
    with fleet:
        for step in fleet:
            numbers.append(step.number)
            assert step.epoch == 0
            for batch in step:
                step.backward(loss(model, batch))
    assert numbers == list(range(14)), "97 samples by seven"
    account, _ = read_fleet(tmp_path)
    assert account.exactly_once and account.epochs == 1


def test_the_processes_of_a_data_loader_read_ahead_and_are_initialized(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is predicted comes: the loader begins to read once, over micro-batches, steps and epochs."""
    begun: list[object] = []
    restart = SampleReader._restart

    def noted(reader: SampleReader, requests: Iterator[Request]) -> None:
        begun.append(requests)
        restart(reader, requests)

    def initialize(number: int) -> None:
        (tmp_path / f"process-{number}").touch()

    monkeypatch.setattr(SampleReader, "_restart", noted)
    pairs = Samples(lambda x, y: (x, y))
    loader = DataLoader(pairs, batch_size=7, shuffle=True, num_workers=2, worker_init_fn=initialize)
    model, fleet = script(data=loader, local_batch=7, micro_batch=4, epochs=2)
    with fleet:
        assert sorted(path.name for path in tmp_path.glob("process-*")) == ["process-0", "process-1"]
        begun.clear()
        train(model, fleet)
    assert len(begun) == 1, "at the first micro-batch"
    account, _ = read_fleet(tmp_path)
    assert account.exactly_once and account.epochs == 2


def test_the_loss_is_compiled_if_asked_for_and_a_loop_compiles_by_itself(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[int] = []

    def compiled(loss: Any) -> Any:
        def run(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            called.append(len(x))
            return loss(model, x, y)

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    with pytest.raises(ConfigError, match=r"compile needs loss=.*torch\.compile"):
        script(compile=True)
    _, fleet = script(compile=True, loss=lambda model, x, y: loss_fn(model(x), y), max_steps=3)
    with fleet:
        fleet.run()
    assert called == [8, 8, 8]


def test_a_run_ends_after_max_steps(script: Any, tmp_path: Path) -> None:
    model, fleet = script(epochs=None, max_steps=20)
    with fleet:
        train(model, fleet)
        assert (fleet.step, fleet.finished) == (20, True)
    assert status(tmp_path)["state"] == "finished"


def test_several_losses_of_a_micro_batch_are_added_up(script: Any, tmp_path: Path) -> None:
    rows: dict[bool, list[float]] = {True: [], False: []}
    for together in (True, False):
        model, fleet = script(
            folder=tmp_path / str(together), on_commit=lambda row, own=rows[together]: own.append(row.loss)
        )
        with fleet:
            for step in fleet:
                for x, y in step:
                    first, second = loss_fn(model(x), y), model(x).square().mean()
                    if together:
                        step.backward(first + second)
                    else:
                        step.backward(first, last=False)
                        step.backward(second)
    assert rows[False] == pytest.approx(rows[True])


def test_data_and_losses_that_cannot_be_used_are_named(script: Any) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(())

    for data in (Stream(), DataLoader(Stream())):
        with pytest.raises(ConfigError, match="no map-style data set"):
            script(data=data)
    pairs = Samples(lambda x, y: (x, y))
    weighted = DataLoader(pairs, batch_size=4, sampler=WeightedRandomSampler([1.0] * 97, 97))
    with pytest.raises(ConfigError, match="a sampler of its own"):
        script(data=weighted)
    model, fleet = script()

    def body() -> None:
        for step in fleet:
            for x, y in step:
                step.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))

    with fleet, pytest.raises(ConfigError, match=r"the loss has the shape \(8,\); expected one number"):
        body()
    _, unopened = script()
    with pytest.raises(ConfigError, match="use it in a `with`"):
        unopened.run()


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
