"""CIFAR-10 (Krizhevsky 2009): 50,000 training and 10,000 test images of 32x32 in ten classes."""

from __future__ import annotations

from pathlib import Path

import torch

from ebbflow.errors import DataError
from ebbflow.workloads.base import Recipe, Task, register
from ebbflow.workloads.models import resnet18
from ebbflow.workloads.readers import Images, read_cifar10
from ebbflow.workloads.sources import TensorSource, crop_and_flip

__all__ = ["cifar10_resnet18"]

# Of the training pixels, as bytes, for red, green and blue.
_MEAN = (125.31, 122.95, 113.87)
_STD = (62.99, 62.09, 66.70)


@register(
    "cifar10-resnet18",
    recipe=Recipe(
        ref_batch=128,
        local_batch=128,
        lr=0.1,
        optimizer="sgd(momentum=0.9, weight_decay=5e-4)",
        schedule="exponential(factor=0.01)",
        epochs=100,
        metric="accuracy",
    ),
    cite="Ko et al., WWW 2022 (recipe)",
)
def cifar10_resnet18(data: Path | None, recipe: Recipe, width: int = 64) -> Task:
    """ResNet-18 on CIFAR-10 (32x32), random crops and flips; the recipe of LENA's experiments."""
    if data is None:
        raise DataError(
            "cifar10-resnet18 needs its data: give the folder of the unpacked original batches (python or binary "
            "version), or an npz file of JPEGs"
        )
    train, test = read_cifar10(data)
    return Task(
        model=resnet18(classes=10, width=width),
        train=_source(train, augmented=True),
        valid=_source(test, augmented=False),
        recipe=recipe,
    )


def _source(images: Images, *, augmented: bool) -> TensorSource:
    return TensorSource(
        torch.from_numpy(images.pixels),
        torch.from_numpy(images.labels),
        augment=crop_and_flip if augmented else None,
        mean=torch.tensor(_MEAN)[:, None, None],
        std=torch.tensor(_STD)[:, None, None],
    )
