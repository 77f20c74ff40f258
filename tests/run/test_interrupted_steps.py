"""A step happens wholly or not at all, wherever a run is interrupted: in the loss, the optimizer, or an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ebbflow
from contract.suite import make_data, make_model, weights_of
from ebbflow.engines.base import EngineParts
from ebbflow.engines.emulated import LoopEngine
from ebbflow.run.loop import Callbacks
from ebbflow.workloads import TensorSource, cross_entropy
from step_counter import Counter

SETTINGS: dict[str, Any] = {
    "trace": "0s:4 3s:2 7s:5 60s", "base_batch": 8, "local_batch": 4, "epochs": 2, "seed": 7, "rule": "linear"
}  # fmt: skip


class Interrupted(Exception):
    """What the tests raise in the middle of a step."""


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Interrupts:
    """Raises the first time that something is counted to a number."""

    def __init__(self, at: int) -> None:
        self._left: int | None = at

    def __call__(self, *_: Any) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left == 0:
                self._left = None
                raise Interrupted


def run(folder: Path | None, *, loss: Any = cross_entropy, model: nn.Module | None = None, **changes: Any) -> nn.Module:
    model = model or make_model(batch_norm=True)
    optimizer = changes.pop("optimizer", None) or sgd(model)
    settings = {**SETTINGS, "loss": loss, "out": folder, **changes}
    with ebbflow.Session(model, optimizer, TensorSource(*make_data()), **settings) as session:
        session.run()
    return model


def rows(folder: Path) -> list[tuple[Any, ...]]:
    """The rows of steps, without the times that the clock measured."""
    return [(row.step, row.samples, row.loss, row.lr) for row in ebbflow.read_record(folder / "record.jsonl").steps]


@pytest.mark.parametrize("engine", ["loop", "fused"])
def test_half_a_step_is_not_saved(engine: str, tmp_path: Path) -> None:
    """The weights are of after the step, the position and the record of before it."""
    whole = run(tmp_path / "whole", engine=engine)
    model = make_model(batch_norm=True)
    optimizer = sgd(model)
    optimizer.register_step_post_hook(Interrupts(at=5))
    halves = tmp_path / "halves"
    with pytest.raises(Interrupted):
        run(halves, engine=engine, model=model, optimizer=optimizer, checkpoint_every_s=0.0)
    again = run(halves, engine=engine)
    assert torch.equal(weights_of(again), weights_of(whole))
    assert rows(halves) == rows(tmp_path / "whole")


@pytest.mark.parametrize("engine", ["loop", "fused"])
def test_a_run_goes_on_after_a_callback_that_raised(engine: str, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", engine=engine)
    with pytest.raises(Interrupted):
        run(tmp_path / "halves", engine=engine, callbacks=Callbacks(on_step=Interrupts(at=4)))
    assert torch.equal(weights_of(run(tmp_path / "halves", engine=engine)), weights_of(whole))
    assert rows(tmp_path / "halves") == rows(tmp_path / "whole")


def test_a_step_interrupted_in_the_loss_leaves_batch_norm_as_it_was() -> None:
    interrupt = Interrupts(at=2)

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mean = cross_entropy(model, x, y)  # the forward pass has changed the running mean
        interrupt()
        return mean

    model = make_model(batch_norm=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(Interrupted):
        run(None, model=model, loss=loss, engine="loop")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_an_own_loop_that_is_interrupted_leaves_batch_norm_as_it_was() -> None:
    model = make_model(batch_norm=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def loop() -> None:
        with ebbflow.Session(model, sgd(model), TensorSource(*make_data()), **SETTINGS) as session:
            while (step := session.next_step()) is not None:
                for x, y in step:
                    step.backward(cross_entropy(model, x, y))
                    raise Interrupted

    with pytest.raises(Interrupted):
        loop()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("epoch", [1, 2])
def test_an_interrupted_evaluation_is_made_up_for(epoch: int, tmp_path: Path) -> None:
    interrupt = Interrupts(at=epoch)

    def evaluate() -> dict[str, float]:
        interrupt()
        return {"score": 0.5}

    with pytest.raises(Interrupted):
        run(tmp_path, evaluate=evaluate)
    run(tmp_path, evaluate=evaluate)
    record = ebbflow.read_record(tmp_path / "record.jsonl")
    assert record.status == "finished"
    assert [row.epoch for row in record.validations] == [1.0, 2.0]


# -- what the loop changes in a step that does not count ---------------------------------------------------------------


class LosesSteps(LoopEngine):
    """Loses the third and the sixth attempt at a step."""

    attempts = 0

    def commit(self) -> bool:
        self.attempts += 1
        if self.attempts in (3, 6):
            self.abandon()
            return False
        return super().commit()


def losing(parts: EngineParts) -> LoopEngine:
    assert parts.plan is not None
    return LosesSteps(parts.model, parts.fetch, parts.loss, parts.plan, samples=parts.samples, seed=parts.seed)


def scheduled(engine: Any, *, leave_at: int | None = None) -> tuple[int, torch.Tensor]:
    """Steps that the scheduler has counted beyond those that the session has, and the weights."""
    model = make_model()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    counter = Counter()
    extras = {"scheduler": scheduler, "counter": counter}
    data = TensorSource(*make_data())
    with ebbflow.Session(model, optimizer, data, engine=engine, extras=extras, **SETTINGS) as session:
        for step in session:
            counter.count += 1
            if session.step:  # the steps before this one
                scheduler.step()
            for x, y in step:
                step.backward(cross_entropy(model, x, y))
            if session.step == leave_at:
                break
        committed = session.step
    assert scheduler.last_epoch == counter.count - 1
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9 ** (counter.count - 1))
    return counter.count - committed, weights_of(model)


def test_a_scheduler_among_the_extras_does_not_count_lost_steps() -> None:
    beyond, weights = scheduled(losing)
    expected_beyond, expected = scheduled("loop")
    assert beyond == expected_beyond == 0
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-12)


def test_a_scheduler_among_the_extras_does_not_count_a_step_that_the_loop_leaves() -> None:
    assert scheduled("loop", leave_at=4)[0] == 0
