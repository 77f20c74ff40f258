"""Every setting of a run has an option, and the option reaches the run."""

from __future__ import annotations

from typing import Any

import pytest

from cli.answers import Ebbflow
from ebbflow.errors import ConfigError
from ebbflow.run import training
from ebbflow.run.config import RunConfig, fields_of

COMMAND = {name: field for name, field in fields_of("command") if name not in ("workload", "label")}
WORDS = {"plan": "plan.csv", "on_change": "lose", "precision": "bf16", "batch_norm": "sync", "on_nonfinite": "skip"}
"""Other values of the settings that accept certain words only."""


def other_value(name: str) -> Any:
    """A value of the setting that is not its default."""
    default, kind = COMMAND[name].default, str(COMMAND[name].annotation)
    if name in WORDS:
        return WORDS[name]
    if "bool" in kind:
        return not default
    if "tuple" in kind:
        return ("mine.py",)
    return "another" if "str" in kind else 0.5 if "float" in kind else 7


@pytest.mark.parametrize("name", COMMAND)
def test_an_option_reaches_the_run(name: str, ebbflow: Ebbflow, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[RunConfig] = []

    def train(config: RunConfig, *args: Any, **settings: Any) -> None:
        seen.append(config)
        raise ConfigError("that is all we wanted to know")

    monkeypatch.setattr(training, "train", train)
    value = other_value(name)
    option = "--plugin" if name == "plugins" else f"--{name.replace('_', '-')}"
    given = [option] if value is True else [option, value[0] if isinstance(value, tuple) else value]
    answer = ebbflow("train", "digits-mlp", *given)
    assert answer.code == 2 and "that is all" in answer.err, answer
    (config,) = seen
    default = RunConfig(workload="digits-mlp")
    assert getattr(config, name) == value != getattr(default, name)
    others = [other for other in RunConfig.model_fields if other != name]
    assert all(getattr(config, other) == getattr(default, other) for other in others), "and nothing else changes"
