from __future__ import annotations

import pickle

import torch
from torch import nn

from ebbflow.moments.estimate import Measurement
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.rules.rule import StepContext


def step(model: nn.Module, optimizer: ElasticOptimizer, number: int) -> None:
    model.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    context = StepContext(step=number, batch=16, ref_batch=8, samples=16 * number, epoch_samples=64, total_samples=128)
    optimizer.update(context, Measurement(batch=16, micro_batches=2, mean_sq=(5.0,), sq_mean=(4.0,)))


def test_model_and_optimizer_go_on_together_after_a_pickle() -> None:
    model = nn.Linear(3, 2)
    optimizer = ElasticOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "adascale+warmup(1ep)", base_batch=8,
        schedule="cosine", epochs=2, epoch_samples=64, memory_steps=7, clip=3.0, on_nonfinite="skip",
    )  # fmt: skip
    step(model, optimizer, 0)
    twin_model, twin = pickle.loads(pickle.dumps((model, optimizer)))
    assert twin.layers[0] is twin_model.weight, "the twin trains its own model"
    for number in (1, 2):
        step(model, optimizer, number)
        step(twin_model, twin, number)
        assert twin.last == optimizer.last
        assert torch.equal(twin_model.weight, model.weight)
    assert twin.state_dict()["averages"] == optimizer.state_dict()["averages"]
    assert (twin.clip, twin.on_nonfinite, twin.memory, twin.total_samples) == (3.0, "skip", 56.0, 128)
