"""Losses that are divided by something else than samples: what is refused, and the edges of the count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ebbflow.engines.base import Gradients
from ebbflow.engines.batches import as_pair, map_batch, move_batch, tensors_in
from ebbflow.engines.loss_sum import LossSum, mean_over_samples, normalise
from ebbflow.errors import ConfigError
from ebbflow.moments.estimate import Measurement


def parameter(gradient: float) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(1))
    made.grad = torch.tensor([gradient])
    return made


def test_a_mean_over_samples_has_their_number_as_its_count() -> None:
    loss = torch.tensor(2.5)
    assert mean_over_samples(loss, 4) == (loss, 4)
    mean, count = mean_over_samples(LossSum(torch.tensor(6.0), torch.tensor(3)), 4)
    assert (mean.item(), float(count)) == (1.5, 3.0)


def test_the_step_is_multiplied_once_and_its_statistics_are_those_of_the_result() -> None:
    # 8 samples, and 2 of what is counted: the mean over the samples is a quarter of what is wanted.
    measured = Measurement(batch=8, micro_batches=2, mean_sq=(5.0,), sq_mean=(4.0,))
    weight = parameter(2.0)
    found = normalise(Gradients(loss=1.5, micro_batches=2, measurement=measured, norm=2.0), [weight], count=2, batch=8)
    assert (found.loss, found.norm) == (6.0, 8.0)
    assert weight.grad is not None and weight.grad.item() == 8.0
    assert found.measurement is not None
    assert (found.measurement.mean_sq, found.measurement.sq_mean) == ((80.0,), (64.0,))


def test_a_step_that_counts_nothing_is_divided_by_one() -> None:
    weight = parameter(0.0)
    assert normalise(Gradients(loss=0.0, micro_batches=1), [weight], count=torch.tensor(0), batch=8).loss == 0.0
    assert weight.grad is not None and weight.grad.item() == 0.0


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ConfigError, match="add up to -1; expected 0 or more"):
        normalise(Gradients(loss=0.0, micro_batches=1), [], count=-1.0, batch=8)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (torch.zeros(3), r"the loss has the shape \(3,\); expected one number"),
        (LossSum(torch.zeros(3), 2), r"the loss has the shape \(3,\); expected one number"),
        (LossSum(torch.zeros(()), torch.ones(2)), r"the count of the loss has the shape \(2,\); expected one number"),
        (1.0, "the loss is of type float; expected a tensor with one number, or a LossSum"),
        ((torch.zeros(()), 3), "the loss is of type tuple; expected a tensor with one number, or a LossSum"),
    ],
)
def test_what_is_no_loss_is_named(loss: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mean_over_samples(loss, 4)


def test_batches_keep_their_containers() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    batch = ({"x": x, "name": "a"}, [y, (y,)])
    moved = move_batch(batch, "cpu")
    assert moved[0]["name"] == "a" and isinstance(moved[1], list) and isinstance(moved[1][1], tuple)
    assert [tensor.tolist() for tensor in tensors_in(batch)] == [[1, 1], [0, 0], [0, 0]]
    assert map_batch([1, (2, {"a": 3})], lambda value: value * 2) == [2, (4, {"a": 6})]
    assert as_pair((x, None)) == ((x, None), None)
