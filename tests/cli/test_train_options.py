"""Every setting of a run has an option, and the option reaches the run."""

from __future__ import annotations

from typing import Any

import pytest

from cli.answers import Ebbflow
from ebbflow.errors import ConfigError
from ebbflow.run import training
from ebbflow.run.config import RunConfig

OTHER = {
    "rule": "sqrt", "trace": "constant(workers=2)", "plan": "plan.csv", "seed": 7, "epochs": 3, "lr": 0.5,
    "ref_batch": 48, "local_batch": 24, "optimizer": "adamw", "schedule": "cosine", "policy": "fixed(64)",
    "step_time": "3s", "offset": "9s", "on_change": "lose", "repeat": True, "micro_batch": 12, "engine": "loop",
    "fused_batch": 96,
    "precision": "bf16", "batch_norm": "sync", "compile": True, "memory_steps": 77.0, "measure_every": 2, "clip": 1.5,
    "on_nonfinite": "skip", "ema": 0.9, "bn_follows_batch": True, "validate_every": 5, "data": "folder",
    "loader_workers": 3, "device": "cuda:1", "threads": 2, "plugins": ("mine.py",),
}  # fmt: skip
"""Of each setting a value that is not its default."""
OPTIONS = {"plugins": "--plugin"}


def test_there_is_a_value_for_every_setting() -> None:
    settings = set(RunConfig.model_fields) - {"workload", "label"}
    assert set(OTHER) == settings


@pytest.mark.parametrize("name", OTHER)
def test_an_option_reaches_the_run(name: str, ebbflow: Ebbflow, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[RunConfig] = []

    def train(config: RunConfig, *args: Any, **settings: Any) -> None:
        seen.append(config)
        raise ConfigError("that is all we wanted to know")

    monkeypatch.setattr(training, "train", train)
    value = OTHER[name]
    option = OPTIONS.get(name, f"--{name.replace('_', '-')}")
    given = [option] if value is True else [option, value[0] if isinstance(value, tuple) else value]
    answer = ebbflow("train", "digits-mlp", *given)
    assert answer.code == 2 and "that is all" in answer.err, answer
    (config,) = seen
    default = RunConfig(workload="digits-mlp")
    assert getattr(config, name) == value != getattr(default, name)
    others = [other for other in RunConfig.model_fields if other != name]
    assert all(getattr(config, other) == getattr(default, other) for other in others), "and nothing else changes"
