"""A plugin with a workload that reads a data set of the tests and has dropout."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from ebbflow import workloads
from ebbflow.workloads import DatasetSource, Recipe, Task
from workloads.drawing import Broken, Drawing, Watched

RECIPE = Recipe(
    ref_batch=16, local_batch=6, lr=0.05, optimizer="sgd(momentum=0.9)", schedule="cosine", epochs=2, metric="accuracy"
)  # fmt: skip


class Net(nn.Module):
    """A perceptron in double precision, so that the sums of several ranks equal those of one process."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.net((x / x.new_tensor([100, 1, 1, 1, 3])).double())
        return logits


def drawing(recipe: Recipe, data: Path | None = None, broken: bool = False, kill: bool = False) -> Task:
    """Samples with noise; with `kill`, the process that reads sample 150 dies."""
    train: Drawing = Broken() if broken else Killing() if kill else Watched(data) if data is not None else Drawing()
    return Task(
        model=Net(),
        train=DatasetSource(train, prefetch=40),
        valid=DatasetSource(Drawing()),
        recipe=recipe,
        eval_batch=50,
    )


class Killing(Drawing):
    """Sample 150 kills the process that reads it."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 150:
            os.kill(os.getpid(), 9)
        return super().__getitem__(index)


if "test-drawing" not in workloads.WORKLOADS.names():
    workloads.register("test-drawing", recipe=RECIPE)(drawing)
