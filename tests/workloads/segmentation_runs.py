"""A plugin with a small segmentation workload: our reader, loss and metrics with a network of two layers."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from ebbflow import workloads
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.workloads import DatasetSource, Recipe, Task, TensorSource
from ebbflow.workloads.segmentation import (
    VOID,
    MaskClasses,
    ResizeImage,
    SegmentationFolder,
    SegmentationMetric,
    pixel_cross_entropy,
    random_scale_crop,
)

RECIPE = Recipe(
    ref_batch=8, local_batch=3, lr=0.05, optimizer="sgd(momentum=0.9)", schedule="cosine", epochs=2, metric="miou"
)  # fmt: skip
CLASSES = 11


class SmallFCN(nn.Module):
    """Two heads, as torchvision's networks have; in double precision, so that sums agree in any order."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8) if norm else nn.Identity(), nn.ReLU()
        )
        self.out, self.aux = nn.Conv2d(8, CLASSES, 1), nn.Conv2d(8, CLASSES, 1)
        self.double()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        features = self.features(x.double())
        return {"out": self.out(features), "aux": self.aux(features)}


class Corners(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples without random draws: the upper left corners of images and masks; every third mask is mostly void."""

    def __init__(self, samples: SegmentationFolder) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image, mask = self.samples[index]
        mask = mask[:32, :32].clone()
        if index % 3 == 0:
            mask[4:] = VOID
        return image[:, :32, :32], mask


def segmentation(data: Path, recipe: Recipe, crops: bool = True, norm: bool = True) -> Task:
    """Classes of the pixels of camvid_tiny; without `crops`, nothing is drawn."""
    values = MaskClasses(classes=CLASSES, void=11)

    def part(name: str, *, crop: bool) -> SegmentationFolder:
        transform = random_scale_crop(32) if crop else ResizeImage(166)  # whose images keep their size of 240x180
        return SegmentationFolder(data / name / "images", data / name / "masks", values=values, transform=transform)

    scale = {"mean": torch.tensor(128.0), "std": torch.tensor(64.0)}
    return Task(
        model=SmallFCN(norm=norm),
        train=DatasetSource(part("train", crop=True) if crops else Corners(part("train", crop=False)), **scale),
        valid=DatasetSource(part("val", crop=False), **scale),
        recipe=recipe,
        loss=pixel_cross_entropy,
        validation=functools.partial(SegmentationMetric, CLASSES),
        eval_batch=1,
    )


def parts(folder: Path) -> tuple[TensorSource, nn.Module, ElasticOptimizer]:
    """Return corners of all training images, and a network with its optimizer: the same in every process."""
    task = workloads.build("test-segmentation(crops=false)", data=folder, seed=3)
    samples = TensorSource(*task.train.batch(torch.arange(len(task.train)), train=False))
    optimizer = ElasticOptimizer(
        torch.optim.SGD(task.model.parameters(), lr=0.05, momentum=0.9), "linear", base_batch=8,
        epoch_samples=len(samples),
    )  # fmt: skip
    return samples, task.model, optimizer


def replica(environment: dict[str, str], arguments: dict[str, Any]) -> None:
    """One replica of a live fleet, in its own process; none begins without all others."""
    from ebbflow.live.live_session import join
    from live.replicas import together

    os.environ.update(environment)
    torch.set_num_threads(1)
    samples, model, optimizer = parts(Path(arguments["scenes"]))
    with join(
        model, optimizer, samples, epochs=2, policy=arguments["policy"], local_batch=3, seed=7, loss=pixel_cross_entropy
    ) as fleet:
        folder, own = Path(environment["EBBFLOW_FOLDER"]), environment["EBBFLOW_REPLICA"]
        together(folder, environment["EBBFLOW_LIGHTHOUSE"], own, arguments["all"])
        fleet.run()


if "test-segmentation" not in workloads.WORKLOADS.names():
    workloads.register("test-segmentation", recipe=RECIPE)(segmentation)
