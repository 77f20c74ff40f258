"""An optimizer from the file that `ebbflow choose` wrote."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import ebbflow
from ebbflow.core.choices import Choice, write_choice
from ebbflow.errors import ConfigError


def chosen(folder: Path, *, note: str = "", **source: Any) -> Path:
    decided_by: Any = "fallback" if note else "tournament"
    choice = Choice(rule="sqrt+warmup(1ep)", lr=0.4, source=source, note=note, decided_by=decided_by)
    write_choice(choice, folder / "choice.toml")
    return folder / "choice.toml"


def sgd(lr: float = 0.1) -> torch.optim.Optimizer:
    weights, bias = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(1))
    return torch.optim.SGD([{"params": [weights], "lr": lr}, {"params": [bias], "lr": 2 * lr}])


def test_it_has_the_rule_the_reference_batch_and_the_rates_in_the_same_proportion(tmp_path: Path) -> None:
    optimizer = ebbflow.ElasticOptimizer.from_choice(chosen(tmp_path, ref_batch=64), sgd(), epochs=2, epoch_samples=640)
    assert str(optimizer.rule) == "sqrt+warmup(1ep)"
    assert optimizer.base_batch == 64
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.4, 0.8])
    assert optimizer.total_samples == 1280


def test_what_is_given_is_used_instead_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        optimizer = ebbflow.ElasticOptimizer.from_choice(
            chosen(tmp_path, ref_batch=64), sgd(), base_batch=32, rule="linear"
        )
    assert (str(optimizer.rule), optimizer.base_batch) == ("linear", 32)
    assert "the rule linear was given and is used instead of sqrt+warmup(1ep)" in caplog.text


def test_a_choice_for_an_optimizer_of_another_family_is_refused(tmp_path: Path) -> None:
    path = chosen(tmp_path, ref_batch=64, optimizer="adamw(weight_decay=0.1)")
    with pytest.raises(ConfigError, match=r"were chosen for adamw\(weight_decay=0.1\), but the optimizer is SGD"):
        ebbflow.ElasticOptimizer.from_choice(path, sgd())
    # The family is written down, since a name that a plugin gave does not say it.
    plugin = chosen(tmp_path, ref_batch=64, optimizer="plain-descent", optimizer_family="sgd")
    assert ebbflow.ElasticOptimizer.from_choice(plugin, sgd()).base_batch == 64


def test_another_reference_batch_and_the_fallback_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ebbflow.ElasticOptimizer.from_choice(chosen(tmp_path, ref_batch=64, optimizer="SGD"), sgd())
    assert not caplog.records
    ebbflow.ElasticOptimizer.from_choice(chosen(tmp_path, ref_batch=64, note="No time."), sgd(), base_batch=32)
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "nothing was decided, and this is the fallback: No time",
        "the base rate was chosen for a reference batch of 64, and here it is 32: give the same one, or choose again",
    ]


def test_without_a_reference_batch_it_asks_for_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no ref_batch in \[source\]; give base_batch="):
        ebbflow.ElasticOptimizer.from_choice(chosen(tmp_path), sgd())


def test_a_rate_of_zero_cannot_be_multiplied(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the optimizer's rate is 0; expected one above 0"):
        ebbflow.ElasticOptimizer.from_choice(chosen(tmp_path, ref_batch=64), sgd(0.0))
