"""The loss scale of fp16: what one bad batch, or a rest, must not do to the steps after it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from ebbflow import workloads
from ebbflow.data.ledger import Ledger
from ebbflow.data.permutation import Permutation
from ebbflow.engines.emulated import FusedEngine
from ebbflow.engines.loss_sum import LossSum
from ebbflow.plan.batch_plan import BatchPlan
from ebbflow.run import loop, training
from ebbflow.run.config import RunConfig
from ebbflow.workloads import Recipe, Task, TensorSource

SAMPLES = 32
FAINT = 1e-8
"""A factor of the loss that leaves of its gradients nothing in fp16, unless they are scaled."""


def faint(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(x).float() - y).square().mean() * FAINT
    return loss


def engine_on(model: nn.Module, targets: torch.Tensor) -> FusedEngine:
    x = torch.ones(SAMPLES, 4)
    return FusedEngine(
        model, lambda i: (x[i], targets[i]), faint, BatchPlan.constant(4, 8), samples=SAMPLES, precision="fp16"
    )


def steps_of(engine: FusedEngine, count: int) -> list[float]:
    """The norm of the weight's gradient in each step."""
    ledger, norms = Ledger(samples=SAMPLES), []
    for step in range(count):
        size = engine.participants(step)
        assignment = ledger.assign(size.samples)
        engine.gradients(assignment, size)
        assert engine.commit()
        gradient = next(engine.model.parameters()).grad
        assert gradient is not None
        norms.append(float(gradient.norm()))
        ledger = ledger.commit(assignment)
    return norms


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_batch_that_no_scale_makes_finite_costs_the_others_none_of_theirs(bad: float) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    targets = torch.ones(SAMPLES, 1)
    engine = engine_on(model, targets)
    targets[engine._order(0).indices(8, 10)] = bad  # in the second step
    norms = steps_of(engine, 4)
    assert not math.isfinite(norms[1])
    assert norms[0] > 0
    assert norms[2:] == pytest.approx([norms[0]] * 2, rel=1e-2), "at scale 1 nothing is left of them"


def test_a_sum_over_many_pixels_finds_a_scale_below_one() -> None:
    x, y = torch.ones(SAMPLES, 20_000, 2), torch.zeros(SAMPLES, 20_000, 1)

    def summed(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> LossSum:
        return LossSum(10 * (model(x).float() - y).sum(), y.numel())

    engine = FusedEngine(
        nn.Linear(2, 1), lambda i: (x[i], y[i]), summed, BatchPlan.constant(4, 8), samples=SAMPLES, precision="fp16"
    )
    assert steps_of(engine, 2) == pytest.approx([10 * math.sqrt(2)] * 2, rel=1e-2)
    assert engine.state_dict()["scale"] < 1


def test_the_scale_is_doubled_after_many_steps_that_it_suited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbflow.engines.emulated.fused._GROW_AFTER", 3)
    engine = engine_on(nn.Linear(4, 1), torch.ones(SAMPLES, 1))
    engine.load_state_dict({"scale": 2.0**10, "since_overflow": 1})
    scales = []
    for _ in range(3):
        steps_of(engine, 2)
        scales.append(engine.state_dict()["scale"])
    assert scales == [2.0**11, 2.0**11, 2.0**12]  # one step had been counted; three more double it again


RECIPE = Recipe(
    ref_batch=8, local_batch=2, lr=1.0, optimizer="sgd", schedule="constant", epochs=2, metric="loss",
    higher_is_better=False,
)  # fmt: skip


@workloads.register("test-faint", recipe=RECIPE)
def faint_task(recipe: Recipe) -> Task:
    """Faint gradients, and in the second step one that the first loss scale is too large for."""
    x = torch.ones(SAMPLES, 4)
    y = torch.ones(SAMPLES, 1)
    second = Permutation(SAMPLES, 0, 0).indices(8, 10)
    y[second] = 1e9
    model = nn.Linear(4, 1)
    nn.init.zeros_(model.weight)
    return Task(model=model, train=TensorSource(x, y), valid=TensorSource(x[:2], y[:2]), recipe=recipe, loss=faint)


def test_a_run_that_rested_has_the_scale_of_one_that_did_not(tmp_path: Path) -> None:
    config = RunConfig(workload="test-faint", precision="fp16", trace="constant(workers=4)", clip=1e-6)
    whole = training.train(config, tmp_path / "whole")
    steps = 0

    def after_three() -> bool:
        nonlocal steps
        steps += 1
        return steps == 3

    with pytest.raises(KeyboardInterrupt):
        training.train(config, tmp_path / "rested", callbacks=loop.Callbacks(should_stop=after_three))
    rested = training.train(config, tmp_path / "rested")
    assert [row.loss for row in rested.steps] == [row.loss for row in whole.steps]
    assert whole.end is not None and rested.end is not None
    assert rested.end.weights_sha256 == whole.end.weights_sha256
