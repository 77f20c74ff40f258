"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009): 50,000 training and 10,000 test images of 32x32 in 10 or 100 classes.

Random crops and flips throughout. `width` is that of a network's first stage: a half makes a quarter of the work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from ebbflow.errors import DataError
from ebbflow.workloads.base import Recipe, Task, register_workload
from ebbflow.workloads.models import MobileNet, WideResNet, resnet18, resnet50, vgg11, vgg16_bn
from ebbflow.workloads.readers import Images, read_cifar10, read_cifar100
from ebbflow.workloads.sources import TensorSource, crop_and_flip

__all__ = [
    "cifar10_mobilenet",
    "cifar10_resnet18",
    "cifar10_resnet50",
    "cifar10_vgg11",
    "cifar10_vgg16",
    "cifar10_wrn16_4",
    "cifar100_resnet50",
]

# Mean and deviation of the training pixels, as bytes, for red, green and blue.
_CIFAR10 = ((125.31, 122.95, 113.87), (62.99, 62.09, 66.70))
_CIFAR100 = ((129.30, 124.07, 112.43), (68.17, 65.39, 70.42))

_recipe = functools.partial(Recipe, ref_batch=128, local_batch=128, metric="accuracy")

_LENA = _recipe(
    lr=0.1,
    optimizer="sgd(momentum=0.9, weight_decay=5e-4)",
    schedule="exponential(factor=0.01)",
    epochs=100,
)


@register_workload("cifar10-resnet18", recipe=_LENA, cite="Ko et al., WWW 2022 (recipe)")
def cifar10_resnet18(data: Path | None, recipe: Recipe, width: int = 64) -> Task:
    """ResNet-18 on CIFAR-10 (32x32), random crops and flips; the recipe of LENA's experiments."""
    return _cifar10("cifar10-resnet18", resnet18(classes=10, width=width), data, recipe)


@register_workload("cifar10-resnet50", recipe=_LENA, cite="Ko et al., WWW 2022 (recipe)")
def cifar10_resnet50(data: Path | None, recipe: Recipe, width: int = 64) -> Task:
    """ResNet-50 on CIFAR-10 (32x32); LENA's recipe."""
    return _cifar10("cifar10-resnet50", resnet50(classes=10, width=width), data, recipe)


@register_workload(
    "cifar100-resnet50",
    recipe=_recipe(lr=_LENA.lr, optimizer=_LENA.optimizer, schedule=_LENA.schedule, epochs=150),
    cite="Ko et al., WWW 2022 (recipe)",
)
def cifar100_resnet50(data: Path | None, recipe: Recipe, width: int = 64) -> Task:
    """ResNet-50 on CIFAR-100 (32x32); the recipe of LENA's experiments."""
    train, test = _read("cifar100-resnet50", data, read_cifar100)
    return _task(resnet50(classes=100, width=width), train, test, _CIFAR100, recipe)


@register_workload(
    "cifar10-wrn16-4",
    recipe=_recipe(
        lr=0.05,
        optimizer="sgd(momentum=0.9, weight_decay=5e-4, nesterov=true)",
        schedule="multistep(60ep, 120ep, 180ep, factor=0.2)",
        epochs=200,
    ),
    cite="Holt and Sievert, SciPy 2021 (recipe)",
)
def cifar10_wrn16_4(data: Path | None, recipe: Recipe, width: int = 64) -> Task:
    """A wide ResNet, WRN-16-4, on CIFAR-10 (32x32); a fourth of the width is the stem's."""
    return _cifar10(
        "cifar10-wrn16-4", WideResNet(depth=16, width=width, stem=max(1, width // 4), classes=10), data, recipe
    )


# Test accuracy after 15 epochs by rate, one seed:  0.01 0.808   0.02 0.829   0.05 0.847   0.1 0.838;
# a warm-up of one epoch changes nothing (0.05: 0.846).
@register_workload(
    "cifar10-vgg11",
    recipe=_recipe(
        lr=0.05,
        optimizer="sgd(momentum=0.9, weight_decay=5e-4)",
        schedule="cosine",
        epochs=90,
    ),
)
def cifar10_vgg11(data: Path | None, recipe: Recipe, width: int = 64) -> Task:
    """VGG-11 without batch norm on CIFAR-10 (32x32)."""
    return _cifar10("cifar10-vgg11", vgg11(classes=10, width=width), data, recipe)


# At the reference batch the warm-up of Goyal et al. does nothing; at others it is the rule's: linear+warmup(5ep).
@register_workload(
    "cifar10-vgg16",
    recipe=Recipe(
        ref_batch=256,
        local_batch=128,
        lr=0.1,
        optimizer="sgd(momentum=0.9, weight_decay=1e-4)",
        schedule="multistep(30ep, 60ep, 80ep, factor=0.1)",
        epochs=90,
        metric="accuracy",
    ),
    cite="Andre, Strati, Klimovic 2022 (recipe, from Goyal et al. 2017)",
)
def cifar10_vgg16(data: Path | None, recipe: Recipe, width: int = 64) -> Task:
    """VGG-16 with batch norm on CIFAR-10 (32x32); the recipe that was used on ImageNet."""
    return _cifar10("cifar10-vgg16", vgg16_bn(classes=10, width=width), data, recipe)


@register_workload(
    "cifar10-mobilenet",
    recipe=_recipe(
        lr=0.05,  # the paper's 0.4 at 1,024
        optimizer="sgd(momentum=0.9, weight_decay=1e-4, decay_norms=false)",
        schedule="warmup(5ep)+cosine",
        epochs=90,
    ),
    cite="Lin et al. 2019 (recipe)",
)
def cifar10_mobilenet(data: Path | None, recipe: Recipe, width: int = 32) -> Task:
    """MobileNet on CIFAR-10 (32x32); the recipe that Dynamic SGD used on ImageNet."""
    return _cifar10("cifar10-mobilenet", MobileNet(classes=10, width=width), data, recipe)


def _cifar10(name: str, model: nn.Module, data: Path | None, recipe: Recipe) -> Task:
    train, test = _read(name, data, read_cifar10)
    return _task(model, train, test, _CIFAR10, recipe)


def _read(name: str, data: Path | None, read: Callable[[Path], tuple[Images, Images]]) -> tuple[Images, Images]:
    if data is None:
        raise DataError(
            f"{name} needs its data: give with --data (in a study: --set data=) the folder of the unpacked "
            f"original batches (python or binary version), or an npz file of JPEGs"
        )
    return read(data)


def _task(
    model: nn.Module,
    train: Images,
    test: Images,
    mean_and_std: tuple[tuple[float, ...], tuple[float, ...]],
    recipe: Recipe,
) -> Task:
    mean, std = (torch.tensor(values)[:, None, None] for values in mean_and_std)

    def source(images: Images, *, augmented: bool) -> TensorSource:
        return TensorSource(
            torch.from_numpy(images.pixels),
            torch.from_numpy(images.labels),
            augment=crop_and_flip if augmented else None,
            mean=mean,
            std=std,
        )

    return Task(model=model, train=source(train, augmented=True), valid=source(test, augmented=False), recipe=recipe)
