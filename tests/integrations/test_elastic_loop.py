"""The two lines of Ebbflow around an optimizer and a DataLoader that are there already."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ebbflow.errors import SpecError
from ebbflow.integrations.elastic_loop import elastic_loop
from ebbflow.optim.elastic import ElasticOptimizer


def made(policy: str) -> ElasticOptimizer:
    """The optimizer of a loop whose workers take four batches of 8 samples per step, as with accumulation."""
    model = torch.nn.Linear(3, 1)
    loader: DataLoader[Any] = DataLoader(TensorDataset(torch.zeros(96, 3), torch.zeros(96, 1)), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"rule": "linear", "base_batch": 32, "local_batch": 32, "micro_batch": 8}
    return elastic_loop(optimizer, loader, model=model, policy=policy, **settings)[0]


@pytest.mark.parametrize(
    "policy", ["follow", "follow(32)", "fixed(32)", "capped(max_workers=2)", "capped(max_batch=64)"]
)
def test_the_local_batch_of_every_policy_is_that_of_a_worker_and_not_of_a_backward_pass(policy: str) -> None:
    optimizer = made(policy)
    assert optimizer.sampler is not None
    micro_batch = optimizer.sampler.peek(optimizer)
    assert (micro_batch.batch, micro_batch.size, micro_batch.count) == (32, 8, 4)


def test_a_fixed_batch_needs_its_number() -> None:
    with pytest.raises(SpecError, match="fixed lacks total"):
        made("fixed")
