"""`--choice` of train, study and replicas: the chosen rule and base rate, unless they are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cli.answers import Ebbflow
from ebbflow.cli import study_command
from ebbflow.core.choices import Choice, write_choice
from ebbflow.core.endings import Ending
from ebbflow.errors import ConfigError
from ebbflow.run import training
from ebbflow.run.config import RunConfig
from ebbflow.studies.grid import Study


@pytest.fixture
def choice(tmp_path: Path) -> str:
    source = {"workload": "digits-mlp"}
    write_choice(Choice(rule="sqrt+warmup(1ep)", lr=0.24, source=source), tmp_path / "choice.toml")
    return str(tmp_path / "choice.toml")


@pytest.mark.parametrize(
    ("given", "expected", "text"),
    [
        ([], ("sqrt+warmup(1ep)", 0.24), "rule sqrt+warmup(1ep); lr 0.24"),
        (["--lr", "0.06"], ("sqrt+warmup(1ep)", 0.06), "not lr 0.24, since 0.06 was given"),
        # Also the value that the option has by default.
        (["--rule", "linear"], ("linear", 0.24), "not rule sqrt+warmup(1ep), since linear was given"),
    ],
)
def test_train_takes_the_choice_unless_something_is_given(
    given: list[str], expected: tuple[str, float], text: str, choice: str, ebbflow: Ebbflow,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    seen: list[RunConfig] = []

    def train(config: RunConfig, *args: Any, **settings: Any) -> None:
        seen.append(config)
        raise ConfigError("that is all we wanted to know")

    monkeypatch.setattr(training, "train", train)
    answer = ebbflow("train", "digits-mlp", "--choice", choice, *given)
    assert [(config.rule, config.lr) for config in seen] == [expected]
    assert text in answer.err
    assert "another workload" not in answer.err
    assert "chosen for another workload, digits-mlp" in ebbflow("train", "digits-cnn", "--choice", choice).err


@pytest.fixture
def of_sgd(tmp_path: Path) -> str:
    """A fallback for the recipe of digits-mlp: SGD, and a reference batch of 32."""
    source = {"workload": "digits-mlp", "optimizer": "sgd(momentum=0.9)", "optimizer_family": "sgd", "ref_batch": 32}
    found = Choice(rule="sqrt", lr=0.24, source=source, decided_by="fallback", note="The budget ended.")
    write_choice(found, tmp_path / "sgd.toml")
    return str(tmp_path / "sgd.toml")


def test_a_choice_is_compared_with_the_optimizer_and_the_reference_batch(
    of_sgd: str, ebbflow: Ebbflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(config: RunConfig, *args: Any, **settings: Any) -> None:
        raise ConfigError("that is all we wanted to know")

    monkeypatch.setattr(training, "train", train)
    taken = ebbflow("train", "digits-mlp", "--choice", of_sgd)
    assert "nothing was decided, and this is the fallback: The budget ended" in taken.err
    assert "that is all" in taken.err and "reference batch" not in taken.err
    other = ebbflow("train", "digits-mlp", "--choice", of_sgd, "--optimizer", "adamw")
    assert "chosen for sgd(momentum=0.9), but the optimizer is adamw" in other.err and "that is all" not in other.err
    both = ebbflow("train", "digits-mlp", "--choice", of_sgd, "--optimizer", "adamw", "--rule", "sqrt", "--lr", "0.01")
    assert "that is all" in both.err, "nothing of the choice is used"
    text = "the base rate was chosen for a reference batch of 32, and here it is 64"
    assert text in ebbflow("train", "digits-mlp", "--choice", of_sgd, "--ref-batch", "64").err
    assert text not in ebbflow("train", "digits-mlp", "--choice", of_sgd, "--ref-batch", "64", "--lr", "1").err


def test_the_runs_of_a_study_that_take_a_choice_are_compared_with_it(
    of_sgd: str, tmp_path: Path, ebbflow: Ebbflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study_command, "run_with_progress", lambda *args, **options: Ending.FAILED)
    text = 'workloads = ["digits-mlp"]\nrules = ["linear"]\ntraces = ["constant(workers=2)"]\n'
    (tmp_path / "study.toml").write_text(text, encoding="utf-8")
    command = ("study", str(tmp_path / "study.toml"), "--choice", of_sgd)
    assert "this is the fallback" in ebbflow(*command).err
    assert "but the optimizer is adamw" in ebbflow(*command, "--set", "optimizer=adamw").err


def test_a_study_gets_the_rule_with_its_rate(
    choice: str, tmp_path: Path, ebbflow: Ebbflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Study] = []

    def run(study: Study, *args: Any, **options: Any) -> Ending:
        seen.append(study)
        raise ConfigError("that is all we wanted to know")

    monkeypatch.setattr(study_command, "run_with_progress", run)
    text = 'workloads = ["digits-mlp"]\nrules = ["linear"]\ntraces = ["constant(workers=2)"]\n'
    (tmp_path / "study.toml").write_text(text, encoding="utf-8")

    def rates(*given: str) -> dict[str, Any]:
        ebbflow("study", str(tmp_path / "study.toml"), "--choice", choice, *given)
        return {arm.config.rule: arm.config.lr for arm in seen[-1].arms()}

    assert rates() == {"linear": None, "sqrt+warmup(1ep)": 0.24}
    assert rates("--set", "lr=0.1") == {"linear": 0.1, "sqrt+warmup(1ep)": 0.1}
    override = '[[override]]\nrule = "linear"\nset = { lr = 0.5 }\n'
    (tmp_path / "study.toml").write_text(text + override, encoding="utf-8")
    assert rates() == {"linear": 0.5, "sqrt+warmup(1ep)": 0.24}


def test_a_replica_of_launch_knows_the_option(ebbflow: Ebbflow) -> None:
    assert "--choice" in ebbflow("replica", "--help").out
