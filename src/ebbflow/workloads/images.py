"""Workloads with small images in memory: scikit-learn's digits, Fashion-MNIST, CIFAR-10 and CIFAR-100."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ebbflow.errors import ConfigError
from ebbflow.workloads.disk_cache import disk_cached
from ebbflow.workloads.image_files import Images, read_cifar10, read_cifar100, read_mnist_folder
from ebbflow.workloads.models import MLP, MobileNet, SmallCNN, WideResNet, resnet18, resnet50, vgg11, vgg16_bn
from ebbflow.workloads.sources import TensorSource, crop_and_flip
from ebbflow.workloads.workload import Recipe, Task, missing_data, register_workload

__all__ = [
    "cifar10_mobilenet", "cifar10_resnet18", "cifar10_resnet50", "cifar10_vgg11", "cifar10_vgg16", "cifar10_wrn16_4",
    "cifar100_resnet50", "digits_cnn", "digits_mlp", "fashion_cnn",
]  # fmt: skip


def _task(
    model: nn.Module,
    images: tuple[Images, Images],
    mean_and_std: tuple[tuple[float, ...], tuple[float, ...]],
    recipe: Recipe,
    *,
    augment: Callable[[Tensor], Tensor] | None = None,
) -> Task:
    """Return the task of training and test images; mean and standard deviation have one value per channel."""
    mean, std = (torch.tensor(values)[:, None, None] for values in mean_and_std)
    train, valid = (
        TensorSource(torch.from_numpy(pixels), torch.from_numpy(labels), mean=mean, std=std)
        for pixels, labels in images
    )
    return Task(model=model, train=replace(train, augment=augment), valid=valid, recipe=recipe)


# ---- scikit-learn's digits: 1,797 images of 8x8, nothing to download, a run takes seconds ----

_FOLDS = 5


# Validation accuracy at the reference batch by learning rate: mean over six seeds (standard deviation 0.002 to 0.005)
# and the last three epochs:   0.02 0.972   0.04 0.976   0.06 0.978   0.08 0.979   0.1 0.978   0.14 0.975;
# at 0.2 two of three seeds collapse.
# At lr=0.06 without warm-up, three seeds:        constant   sqrt    linear
#                               batch x 4         0.974      0.980   0.978
#                               batch x 16        0.956      0.975   0.526 (collapses)
@register_workload(
    "digits-mlp",
    recipe=Recipe(
        ref_batch=32,
        local_batch=8,
        lr=0.06,
        optimizer="sgd(momentum=0.9, weight_decay=5e-4)",
        schedule="cosine",
        epochs=30,
        metric="accuracy",
    ),
)
def digits_mlp(recipe: Recipe, width: int = 64) -> Task:
    """A perceptron with two hidden layers on scikit-learn's digits (8x8)."""
    return _digits_task(MLP(inputs=64, width=width, classes=10), recipe)


# The same over four seeds (0.001 to 0.003):   0.02 0.993   0.05 0.994   0.1 0.993   0.2 0.993   0.4 0.991
# At lr=0.1 without warm-up, two seeds:           constant   sqrt    linear
#                               batch x 4         0.991      0.993   0.993
#                               batch x 16        0.954      0.988   0.956
# Ten epochs are enough, and more would hide differences: after thirty, every rule reaches 0.993 to 0.996 even at x 16.
@register_workload(
    "digits-cnn",
    recipe=Recipe(
        ref_batch=32,
        local_batch=8,
        lr=0.1,
        optimizer="sgd(momentum=0.9, weight_decay=5e-4)",
        schedule="cosine",
        epochs=10,
        metric="accuracy",
    ),
)
def digits_cnn(recipe: Recipe, width: int = 16) -> Task:
    """A convolutional network with batch norm on scikit-learn's digits (8x8)."""
    return _digits_task(SmallCNN(channels=1, widths=(width, 2 * width, 4 * width), classes=10), recipe)


def _read_digits() -> NDArray[np.uint8]:
    """Return one row per image: 64 pixels from 0 to 16, and the digit."""
    from sklearn.datasets import load_digits  # takes half a second, which listing the workloads does not need

    digits = load_digits()
    return np.column_stack([digits.data, digits.target]).astype(np.uint8)


def _digits_task(model: nn.Module, recipe: Recipe) -> Task:
    digits = disk_cached("digits", [], _read_digits)
    labels = digits[:, -1].astype(np.int64)
    # Every fifth image of each class is for validation: a stratified split without random numbers.
    rank = np.zeros(len(labels), dtype=np.int64)
    for label in range(10):
        members = np.flatnonzero(labels == label)
        rank[members] = np.arange(len(members))
    held_out = torch.from_numpy(rank % _FOLDS == _FOLDS - 1)
    x = torch.from_numpy(digits[:, :-1]).float().reshape(-1, 1, 8, 8)
    y = torch.from_numpy(labels)
    mean, std = x[~held_out].mean(), x[~held_out].std()
    return Task(
        model=model,
        train=TensorSource((x[~held_out] - mean) / std, y[~held_out]),
        valid=TensorSource((x[held_out] - mean) / std, y[held_out]),
        recipe=recipe,
    )


# ---- Fashion-MNIST (Xiao et al. 2017): 60,000 training and 10,000 test images of 28x28 in ten classes ----

_DEBIAN = Path("/usr/share/datasets/fashion-mnist")
_WHERE = f"Debian's package dataset-fashion-mnist puts them into {_DEBIAN}"
_FASHION = ((72.94,), (90.02,))  # mean and standard deviation of the training pixels, as bytes


# Test accuracy at the reference batch by learning rate after 6 epochs, one seed (H200, torch 2.11):
# 0.02 0.897   0.05 0.906   0.1 0.909   0.2 0.911. The second largest is used, to stay away from instability.
@register_workload(
    "fashion-cnn",
    recipe=Recipe(
        ref_batch=128,
        local_batch=32,
        lr=0.1,
        optimizer="sgd(momentum=0.9, weight_decay=5e-4)",
        schedule="cosine",
        epochs=20,
        metric="accuracy",
    ),
    cite="Xiao et al. 2017 (data)",
)
def fashion_cnn(data: Path | None, recipe: Recipe, width: int = 32) -> Task:
    """A convolutional network with batch norm on Fashion-MNIST (28x28)."""
    if data is None and not _DEBIAN.is_dir():
        raise missing_data(
            "fashion-cnn", f"the folder of the idx files train-images-idx3-ubyte(.gz) and the other three; {_WHERE}"
        )
    model = SmallCNN(channels=1, widths=(width, 2 * width, 4 * width), classes=10)
    return _task(model, read_mnist_folder(data or _DEBIAN, source=_WHERE), _FASHION, recipe)


# ---- CIFAR-10 and CIFAR-100 (Krizhevsky 2009): 50,000 training and 10,000 test images of 32x32 ----

# All of them use random crops and flips. `width` is the number of channels of a network's first stage: half the width
# needs a quarter of the computation.

# Mean and standard deviation of the training pixels, as bytes, for red, green and blue.
_CIFAR10 = ((125.31, 122.95, 113.87), (62.99, 62.09, 66.70))
_CIFAR100 = ((129.30, 124.07, 112.43), (68.17, 65.39, 70.42))

_recipe = functools.partial(Recipe, ref_batch=128, local_batch=128, metric="accuracy")

_LENA = _recipe(
    lr=0.1, optimizer="sgd(momentum=0.9, weight_decay=5e-4)", schedule="exponential(factor=0.01)", epochs=100
)


@register_workload("cifar10-resnet18", recipe=_LENA, cite="Ko et al., WWW 2022 (recipe)")
def cifar10_resnet18(data: Path | None, recipe: Recipe, width: int = 64) -> Task:
    """ResNet-18 on CIFAR-10 (32x32), random crops and flips; the recipe of LENA's experiments."""
    return _cifar10("cifar10-resnet18", resnet18(classes=10, width=width), data, recipe)


@register_workload("cifar10-resnet50", recipe=_LENA, cite="Ko et al., WWW 2022 (recipe)")
def cifar10_resnet50(data: Path | None, recipe: Recipe, width: int = 64) -> Task:
    """ResNet-50 on CIFAR-10 (32x32); LENA's recipe."""
    return _cifar10("cifar10-resnet50", resnet50(classes=10, width=width), data, recipe)


@register_workload("cifar100-resnet50", recipe=replace(_LENA, epochs=150), cite="Ko et al., WWW 2022 (recipe)")
def cifar100_resnet50(data: Path | None, recipe: Recipe, width: int = 64) -> Task:
    """ResNet-50 on CIFAR-100 (32x32); the recipe of LENA's experiments."""
    images = _read_cifar("cifar100-resnet50", data, read_cifar100)
    return _task(resnet50(classes=100, width=width), images, _CIFAR100, recipe, augment=crop_and_flip)


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
def cifar10_wrn16_4(data: Path | None, recipe: Recipe, width: int = 64, dropout: float = 0.0) -> Task:
    """A wide ResNet, WRN-16-4, on CIFAR-10 (32x32); its stem has a quarter of the width."""
    if not 0 <= dropout < 1:
        raise ConfigError(f"cifar10-wrn16-4: dropout is {dropout:g}; expected at least 0 and less than 1")
    model = WideResNet(depth=16, width=width, stem=max(1, width // 4), classes=10, dropout=dropout)
    return _cifar10("cifar10-wrn16-4", model, data, recipe)


# Test accuracy after 15 epochs by learning rate, one seed:  0.01 0.808   0.02 0.829   0.05 0.847   0.1 0.838;
# a warm-up of one epoch changes nothing (0.05: 0.846).
@register_workload(
    "cifar10-vgg11",
    recipe=_recipe(lr=0.05, optimizer="sgd(momentum=0.9, weight_decay=5e-4)", schedule="cosine", epochs=90),
)
def cifar10_vgg11(data: Path | None, recipe: Recipe, width: int = 64) -> Task:
    """VGG-11 without batch norm on CIFAR-10 (32x32)."""
    return _cifar10("cifar10-vgg11", vgg11(classes=10, width=width), data, recipe)


# The warm-up of Goyal et al. has no effect at the reference batch; at other batches it belongs to the rule:
# linear+warmup(5ep).
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
        lr=0.05,  # the paper's 0.4 at 1,024 samples, scaled linearly
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
    return _task(model, _read_cifar(name, data, read_cifar10), _CIFAR10, recipe, augment=crop_and_flip)


def _read_cifar(name: str, data: Path | None, read: Callable[[Path], tuple[Images, Images]]) -> tuple[Images, Images]:
    if data is None:
        raise missing_data(
            name, "the folder of the unpacked original batches (python or binary version), or an npz file of JPEGs"
        )
    return read(data)
