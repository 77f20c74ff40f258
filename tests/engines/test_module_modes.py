"""Modules that a user has put into eval mode stay in it while the others train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ebbflow
from ebbflow.data.ledger import Ledger
from ebbflow.engines.emulated import FusedEngine, LoopEngine
from ebbflow.engines.module_modes import ModuleModes, modes_kept
from ebbflow.plan.batch_plan import BatchPlan
from ebbflow.run.config import RunConfig
from ebbflow.run.training import train
from ebbflow.workloads import WORKLOADS, Recipe, Task, TensorSource, cross_entropy

SAMPLES = 24


def make_model() -> nn.Sequential:
    """A backbone with batch norm, dropout, and a head with batch norm."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
    return nn.Sequential(backbone, nn.Dropout(0.5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return 2 + torch.randn(SAMPLES, 5, generator=generator), torch.randint(3, (SAMPLES,), generator=generator)


def in_eval(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if not module.training]


BACKBONE = ["0", "0.0", "0.1"]


def session_of(model: nn.Module, **settings: Any) -> ebbflow.Session:
    settings = {"loss": cross_entropy, "epochs": 2, "base_batch": 8, "local_batch": 4, "rule": "linear", **settings}
    data = torch.utils.data.TensorDataset(*make_data())
    return ebbflow.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), data, trace="0s:2 100s", **settings)


@pytest.mark.parametrize("engine", ["loop", "fused"])
def test_a_backbone_in_eval_mode_stays_frozen_in_a_session_also_after_evaluations(engine: str) -> None:
    model = make_model()
    model[0].eval()

    def evaluate() -> dict[str, float]:
        model.eval()
        with torch.no_grad():
            score = float(model(make_data()[0]).mean())
        model.train()  # as most loops do it
        return {"score": score}

    with session_of(model, engine=engine, evaluate=evaluate) as session:
        seen = [in_eval(model) for _ in session]
    assert seen == [BACKBONE] * 6 and in_eval(model) == BACKBONE
    assert model[0][1].num_batches_tracked == 0 and not model[0][1].running_mean.any()
    assert model[2].num_batches_tracked == 6 and model[2].running_mean.any()


@pytest.mark.parametrize("engine", ["loop", "fused"])
def test_what_a_loop_sets_between_two_steps_holds(engine: str) -> None:
    model, counts = make_model(), []
    with session_of(model, engine=engine, epochs=3) as session:
        for step in session:
            counts.append((int(model[0][1].num_batches_tracked), int(model[2].num_batches_tracked)))
            if step.number == 2:
                model[0].eval()
            if step.number == 4:
                model[0].train()
                model[1].eval()
            if step.number == 6:
                model.eval()
                model[3].train()
    assert counts == [(0, 0), (1, 1), (2, 2), (2, 3), (2, 4), (3, 5), (4, 6), (4, 6), (4, 6)]
    assert in_eval(model) == ["", *BACKBONE, "1", "2"]


@pytest.mark.parametrize("engine", [LoopEngine, FusedEngine])
def test_a_model_that_was_evaluated_trains_again_as_it_did_before(engine: type[LoopEngine] | type[FusedEngine]) -> None:
    model, (x, y) = make_model(), make_data()
    model[0].eval()
    plan = BatchPlan.constant(2, 8)
    made = engine(model, lambda i: (x[i], y[i]), cross_entropy, plan, samples=SAMPLES)
    ledger = Ledger(samples=SAMPLES)
    for number in range(3):
        size = made.participants(number)
        assignment = ledger.assign(size.samples)
        made.gradients(assignment, size)
        assert made.commit()
        ledger = ledger.commit(assignment)
        assert in_eval(model) == BACKBONE
        model.eval()
    assert model[2].num_batches_tracked == 3 and model[0][1].num_batches_tracked == 0


def test_a_model_that_is_in_eval_mode_as_a_whole_is_trained() -> None:
    model = make_model().eval()
    with session_of(model) as session:
        session.run()
    assert in_eval(model) == []
    assert model[0][1].num_batches_tracked == 6


def test_a_workload_may_have_a_frozen_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = []

    def fine_tuned(recipe: Recipe) -> Task:
        model, source = make_model(), TensorSource(*make_data())
        model[0].eval()
        models.append(model)
        return Task(model=model, train=source, valid=source, recipe=recipe)

    monkeypatch.setattr(WORKLOADS, "_entries", dict(WORKLOADS._entries))
    recipe = Recipe(
        ref_batch=8, local_batch=4, lr=0.1, optimizer="sgd", schedule="constant", epochs=2, metric="accuracy"
    )
    ebbflow.register_workload("fine-tuned", recipe=recipe, cite="this test")(fine_tuned)
    run = train(RunConfig(workload="fine-tuned", rule="linear", trace="0s:2 100s"), tmp_path / "run")
    assert len(run.validations) == 2
    assert in_eval(models[-1]) == BACKBONE
    assert models[-1][0][1].num_batches_tracked == 0 and models[-1][2].num_batches_tracked == 6


class Merging(nn.Module):
    """Does more in `train` than to set the mode, as layers with LoRA weights do."""

    merged = False

    def train(self, mode: bool = True) -> Merging:
        self.merged = not mode
        return super().train(mode)


def test_modes_come_back_through_the_methods_of_the_modules() -> None:
    model = nn.Sequential(Merging(), Merging())
    model[1].eval()
    modes = ModuleModes(model)
    modes.train()
    for _ in range(2):
        model.eval()
        modes.train()
        assert [part.merged for part in model] == [False, True]
        assert in_eval(model) == ["1"]
    with modes_kept(model):
        model.eval()
    assert [part.merged for part in model] == [False, True]
    with modes_kept(model):
        model.train()
    assert [part.merged for part in model] == [False, True]


def test_what_a_model_does_in_its_own_train_is_done_before_the_first_step() -> None:
    class FineTuned(nn.Sequential):
        def train(self, mode: bool = True) -> FineTuned:
            super().train(mode)
            self[0].eval()
            return self

    model = FineTuned(nn.BatchNorm1d(5), nn.Dropout(), nn.Linear(5, 3))
    model[1].eval()
    modes = ModuleModes(model)
    modes.train()
    assert in_eval(model) == ["0", "1"]
    model[0].train()  # by hand, between two steps
    modes.train()
    assert in_eval(model) == ["1"]


def test_a_part_whose_train_ignores_the_mode_is_set_all_the_same() -> None:
    class Stubborn(nn.Sequential):
        def train(self, mode: bool = True) -> Stubborn:
            super().train(mode)
            self[0].train(True)
            return self

    model = Stubborn(nn.Dropout(), nn.Dropout())
    model[0].eval()
    with modes_kept(model):
        model.eval()
    assert in_eval(model) == ["0"]
