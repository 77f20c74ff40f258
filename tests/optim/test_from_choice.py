"""An optimizer from the file that `ebbflow choose` wrote."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import ebbflow
from ebbflow.core.choices import Choice, write_choice
from ebbflow.errors import ConfigError


def chosen(folder: Path, **source: int) -> Path:
    write_choice(Choice(rule="sqrt+warmup(1ep)", lr=0.4, source=source), folder / "choice.toml")
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


def test_without_a_reference_batch_it_asks_for_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no ref_batch in \[source\]; give base_batch="):
        ebbflow.ElasticOptimizer.from_choice(chosen(tmp_path), sgd())


def test_a_rate_of_zero_cannot_be_multiplied(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the optimizer's rate is 0; expected one above 0"):
        ebbflow.ElasticOptimizer.from_choice(chosen(tmp_path, ref_batch=64), sgd(0.0))
