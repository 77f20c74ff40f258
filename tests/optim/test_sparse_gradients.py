"""Embeddings with sparse=True: they are trained by optimizers that take their gradients, and refused otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ebbflow
from ebbflow.engines.allreduce import check_dense
from ebbflow.errors import ConfigError
from ebbflow.workloads import TensorSource

Make = Callable[[nn.Sequential], torch.optim.Optimizer]


def trained(make: Make, *, sparse: bool = True, rule: str = "sqrt") -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 4, sparse=sparse), nn.Flatten(), nn.Linear(12, 2))
    x, y = torch.randint(20, (64, 3)), torch.randint(2, (64,))
    with ebbflow.Session(
        model, make(model), TensorSource(x, y), rule=rule, base_batch=8, local_batch=4, trace="constant(2)", epochs=1
    ) as session:
        for step in session:
            for inputs, targets in step:
                step.backward(nn.functional.cross_entropy(model(inputs), targets))
    return model[0].weight.detach()


def sgd(model: nn.Sequential, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **settings)


def sparse_adam(model: nn.Sequential) -> torch.optim.Optimizer:
    model[2].requires_grad_(False)
    return torch.optim.SparseAdam(model[0].parameters(), lr=0.1)


def test_sgd_trains_a_sparse_embedding_as_a_dense_one() -> None:
    torch.testing.assert_close(trained(sgd), trained(sgd, sparse=False))


def test_sparse_adam_trains_embeddings() -> None:
    before = trained(lambda model: torch.optim.SGD(model.parameters(), lr=0.0))
    assert (trained(sparse_adam) != before).any(1).all(), "each of the 20 rows is looked up"


@pytest.mark.parametrize(
    ("make", "rule", "said"),
    [
        (lambda model: torch.optim.Adam(model.parameters()), "sqrt", r"^Adam does not take .*; use sparse=False"),
        (lambda model: sgd(model, weight_decay=0.1), "sqrt", r"^SGD does not take .*; use sparse=False"),
        (lambda model: torch.optim.SparseAdam(model.parameters()), "sqrt", r"one is dense \(.*use adam, with sparse=F"),
        (sparse_adam, "adascale", "dense, as those that the rule adascale measures are"),
    ],
)
def test_an_optimizer_that_does_not_take_the_gradients_is_refused_with_what_to_do(
    make: Make, rule: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        trained(make, rule=rule)


def test_several_processes_refuse_a_sparse_embedding_before_the_first_step() -> None:
    model = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 2))
    with pytest.raises(ConfigError, match=r"^0 is an Embedding with sparse=True, .*; use sparse=False"):
        check_dense(model)
    model[0].requires_grad_(False)
    check_dense(model)
    dask_engine = pytest.importorskip("ebbflow.engines.dask.dask_engine", reason="it needs dask")
    with pytest.raises(ConfigError, match=r"^the model is an EmbeddingBag with sparse=True"):
        dask_engine.DaskEngine(
            nn.EmbeddingBag(20, 4, sparse=True), None, None, "all", client=None, samples=8, transport="centralized"
        )
