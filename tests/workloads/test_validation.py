"""Scores over the whole validation set: means over samples, sums with counts, and metrics that see all of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ebbflow.errors import ConfigError
from ebbflow.workloads import DatasetSource, LossSum, Recipe, Task, TensorSource

X = torch.arange(7.0)[:, None]


def recipe(metric: str) -> Recipe:
    return Recipe(ref_batch=4, local_batch=2, lr=0.1, optimizer="sgd", schedule="constant", epochs=1, metric=metric)


def task(**settings: Any) -> Task:
    source = TensorSource(X, X.squeeze())
    return Task(model=nn.Identity(), train=source, valid=source, eval_batch=3, **settings)


class Median:
    """No mean over batches of it is the median of the whole set."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def update(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        assert not model.training and not torch.is_grad_enabled()
        self.seen += model(x).flatten().tolist()

    def compute(self) -> Mapping[str, float]:
        return {"median": sorted(self.seen)[len(self.seen) // 2]}


def test_a_metric_sees_every_sample_once_and_is_made_anew_for_each_validation() -> None:
    judged = task(recipe=recipe("median"), validation=Median)
    assert judged.evaluate(judged.model) == {"median": 3.0}
    assert judged.evaluate(judged.model) == {"median": 3.0}


def test_sums_with_counts_are_divided_once_and_means_weighted_by_samples() -> None:
    """0 + ... + 6 = 21. Above 2 there are 3, 4, 5 and 6, in batches of 0, 3 and 1 of them; their mean is 18/4."""

    def scores(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor | LossSum]:
        large = y[y > 2]
        return {"mean": y.mean(), "large": LossSum(large.sum(), torch.tensor(len(large)))}

    judged = task(recipe=recipe("large"), scores=scores)
    assert judged.evaluate(judged.model) == {"mean": pytest.approx(3.0), "large": pytest.approx(4.5)}


def test_scores_and_a_metric_go_together_and_a_metric_that_is_missing_is_named() -> None:
    both = task(recipe=recipe("median"), scores=lambda model, x, y: {"mean": y.mean()}, validation=Median)
    assert both.evaluate(both.model) == {"mean": 3.0, "median": 3.0}
    wrong = task(recipe=recipe("map"), validation=Median)
    with pytest.raises(ConfigError, match="the metric is 'map', but the scores are median"):
        wrong.evaluate(wrong.model)


class Boxes(Dataset[Any]):
    """Images of one size, each with a different number of boxes."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.full((3,), index, dtype=torch.uint8), {"boxes": torch.zeros(index, 4)}


def collate(samples: list[Any]) -> tuple[Tensor, list[dict[str, Tensor]]]:
    return torch.stack([image for image, _ in samples]), [target for _, target in samples]


@pytest.mark.parametrize("processes", [0, pytest.param(2, marks=pytest.mark.process)])
def test_targets_may_be_a_list_with_one_entry_per_sample(processes: int) -> None:
    source = DatasetSource(Boxes(), loader_workers=processes, collate_fn=collate, mean=torch.tensor(1.0))
    try:
        images, targets = source.batch(torch.tensor([4, 1, 2]), train=True)
    finally:
        source.close()
    assert images.tolist() == [[3.0] * 3, [0.0] * 3, [1.0] * 3]
    assert [len(target["boxes"]) for target in targets] == [4, 1, 2]
