"""The rule of a run that names none, in every front end but the live one: the best fixed rule that can work there."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ebbflow
from contract.suite import make_data, make_model
from ebbflow.engines.base import EngineParts
from ebbflow.engines.emulated import LoopEngine
from ebbflow.integrations.elastic_loop import elastic_loop
from ebbflow.record import Run
from ebbflow.rules.families import default_rule
from ebbflow.workloads import TensorSource, cross_entropy

SGD = "adascale+statewarmup(0.05)"
ADAM = "sqrt+statewarmup(0.05, by=multiplier)"


class Mine(torch.optim.Optimizer):
    """An optimizer of unknown family."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        pass


class Derived(torch.optim.SGD):
    """An optimizer of a user that is SGD all the same."""


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said about the rule."""
    lines = [record.getMessage() for record in caplog.records if record.name == "ebbflow.rules.families"]
    caplog.clear()
    return lines


# -- ElasticOptimizer --------------------------------------------------------------------------------------------------


def elastic(kind: Any = torch.optim.SGD, *, workers: int = 4, sampler: bool = True, **options: Any) -> str:
    plan = ebbflow.ElasticSampler(40, workers, local_batch=4) if sampler else None
    options = {"base_batch": 8, "epochs": 2, "sampler": plan, **options}
    return str(ebbflow.ElasticOptimizer(kind(nn.Linear(2, 2).parameters(), lr=0.1), **options).rule)


def test_an_elastic_optimizer_follows_the_rule_of_its_family(caplog: pytest.LogCaptureFixture) -> None:
    assert (elastic(), elastic(torch.optim.AdamW), elastic(Derived)) == (SGD, ADAM, SGD)
    assert elastic(torch.optim.Adam, workers=1) == ADAM, "it measures nothing, so that one micro-batch will do"
    assert elastic(rule="linear") == "linear"
    assert told(caplog) == []


@pytest.mark.parametrize(
    ("changes", "rule", "why"),
    [
        ({"sampler": False, "epoch_samples": 40}, ADAM, "nothing is measured without a sampler"),
        ({"accumulation": 2}, ADAM, "with accumulation no single micro-batch can be measured"),
        ({"workers": 1}, ADAM, "all steps have one micro-batch, in which no noise is seen (a smaller local_batch"),
        ({"epochs": None}, "adascale", "the run has no end, of which a warm-up would be a part (give epochs)"),
        ({"kind": torch.optim.Adam, "epochs": None}, "sqrt", "the run has no end"),
        ({"kind": Mine}, ADAM, "Mine is not known to be related to SGD or Adam"),
    ],
    ids=["no sampler", "accumulation", "one micro-batch", "no end", "no end, Adam", "unknown"],
)
def test_an_elastic_optimizer_says_what_it_falls_back_to(
    changes: dict[str, Any], rule: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert elastic(**changes) == rule
    (line,) = told(caplog)
    assert line.startswith(f"no rule was named: {rule} is used, because {why}")


# -- train -------------------------------------------------------------------------------------------------------------


def trained(folder: Path, **settings: Any) -> Run:
    values = {"trace": "constant(workers=4)", "epochs": 1, "validate_every": 1, **settings}
    return ebbflow.train(ebbflow.RunConfig(workload="digits-mlp", **values), folder)


@pytest.mark.parametrize(
    ("settings", "rule", "line"),
    [
        ({}, SGD, None),
        ({"optimizer": "adamw", "lr": 0.001}, ADAM, None),
        ({"trace": "constant(workers=1)"}, ADAM, "micro_batch=4 or less makes two"),
        ({"trace": "constant(workers=1)", "micro_batch": 4}, SGD, None),
        ({"batch_norm": "sync"}, ADAM, "synchronised batch norm computes a step in one micro-batch"),
        ({"policy": "geo(1ep, factor=2)"}, "constant", None),
        ({"policy": "goodput"}, SGD, None),
    ],
    ids=["sgd", "adamw", "one micro-batch", "two", "sync", "grows", "goodput"],
)
def test_train_records_the_rule_that_it_used(
    settings: dict[str, Any], rule: str, line: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = trained(tmp_path, **settings)
    assert (run.status, run.header.config["rule"]) == ("finished", rule)
    assert [line in one for one in told(caplog)] == ([True] if line is not None else [])


def test_the_default_is_the_same_run_as_the_rule_named(tmp_path: Path) -> None:
    first = trained(tmp_path)
    stamp = (tmp_path / "record.jsonl").stat().st_mtime_ns
    for settings in ({}, {"rule": SGD}):
        assert trained(tmp_path, **settings).end == first.end
    assert (tmp_path / "record.jsonl").stat().st_mtime_ns == stamp, "nothing was trained again"
    with pytest.raises(ebbflow.EbbflowError, match="rule is 'linear', was 'adascale"):
        trained(tmp_path, rule="linear")


# -- Session and the loops of frameworks -------------------------------------------------------------------------------

SETTINGS: dict[str, Any] = {"trace": "constant(workers=4)", "base_batch": 8, "local_batch": 4, "epochs": 1}


def session(folder: Path, optimizer: Any = None, **changes: Any) -> str:
    model = make_model(batch_norm=False)
    given = optimizer(model) if optimizer is not None else torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {**SETTINGS, "loss": cross_entropy, "out": folder, **changes}
    with ebbflow.Session(model, given, TensorSource(*make_data()), **settings) as opened:
        opened.run()
        return str(opened.record.header.config["rule"])


def test_a_session_records_the_rule_that_it_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert session(tmp_path / "sgd") == SGD
    assert session(tmp_path / "adam", lambda model: torch.optim.Adam(model.parameters())) == ADAM
    assert session(tmp_path / "single", trace="constant(workers=1)", micro_batch=2) == SGD
    given = {"rule": "power(0.7)", "base_batch": 8}
    assert session(tmp_path / "own", lambda m: ebbflow.ElasticOptimizer(sgd(m), **given)) == "power(0.7)"
    assert told(caplog) == []
    assert session(tmp_path / "one", trace="constant(workers=1)") == ADAM
    assert "micro_batch=2 or less makes two" in told(caplog)[0]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_an_engine_that_does_not_measure_gets_a_rule_that_needs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def own(parts: EngineParts) -> LoopEngine:
        assert parts.plan is not None and not parts.needs
        return LoopEngine(parts.model, parts.fetch, parts.loss, parts.plan, samples=parts.samples, seed=parts.seed)

    assert session(tmp_path, engine=own) == ADAM
    assert "the engine is not registered as one that measures" in told(caplog)[0]


def test_the_loop_of_a_framework_has_the_default_of_its_optimizer() -> None:
    model = make_model(batch_norm=False)
    loader = DataLoader(TensorDataset(*make_data()), batch_size=4)
    made, _ = elastic_loop(sgd(model), loader, model=model, trace="constant(workers=4)", base_batch=8, epochs=1)
    assert str(made.rule) == SGD


# -- the decision ------------------------------------------------------------------------------------------------------


def test_several_reasons_are_told_together_and_growth_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    rule, why = default_rule("Mine", ends=False, unmeasured="nothing is measured")
    assert rule == "sqrt"
    assert why == (
        "Mine is not known to be related to SGD or Adam; the run has no end, of which a warm-up would be a part (give "
        "epochs)"
    )
    assert default_rule("sgd", grows=True, ends=False, unmeasured="nothing is measured")[0] == "constant"
    with caplog.at_level(logging.INFO):
        elastic(epochs=None, workers=1)
        assert told(caplog)[0].count(";") == 1
