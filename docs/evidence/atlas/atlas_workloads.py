"""Workloads of the atlas that one CPU core trains in seconds: small networks on CIFAR-10 reduced to 8x8 pixels.

They learn from the first `samples` training images and are validated on all 10,000 test images, so that one run is
known to about half a point.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ebbflow.errors import ConfigError
from ebbflow.workloads.disk_cache import disk_cached
from ebbflow.workloads.image_files import read_cifar10
from ebbflow.workloads.models import MLP
from ebbflow.workloads.sources import TensorSource
from ebbflow.workloads.workload import Recipe, Task, register_workload

SIDE = 8
CLASSES = 10
SGD = Recipe(
    ref_batch=8, local_batch=8, lr=0.01, optimizer="sgd(momentum=0.9, weight_decay=5e-4)", schedule="cosine",
    epochs=22, metric="accuracy",
)  # fmt: skip
ADAMW = replace(SGD, lr=0.001, optimizer="adamw(weight_decay=0.05)")


def mirrored(images: Tensor) -> Tensor:
    """Each image, or with probability 1/2 its mirror image."""
    flip = torch.rand(len(images), 1, 1, 1) < 0.5
    return torch.where(flip, images.flip(-1), images)


def small_cifar10(model: nn.Module, data: Path | None, recipe: Recipe, samples: int) -> Task:
    """The task of a model on reduced images; they are reduced once for all runs of a study."""
    if data is None:
        raise ConfigError("the workloads of the atlas need CIFAR-10; give its folder or npz file as data")

    def reduce() -> np.ndarray:
        kept = []
        for pixels, labels in read_cifar10(data):
            means = pixels.reshape(-1, 3, SIDE, 4, SIDE, 4).mean(axis=(3, 5)).round()
            kept.append(np.column_stack([means.reshape(len(pixels), -1), labels]).astype(np.uint8))
        return np.concatenate(kept)

    # Named after the path and size of the data, since reading them is what takes long.
    name = np.frombuffer(f"{data.resolve()} {data.stat().st_size}".encode(), dtype=np.uint8)
    rows = torch.from_numpy(np.array(disk_cached("cifar10-8x8", [name], reduce)))
    x, y = rows[:, :-1].reshape(-1, 3, SIDE, SIDE).float(), rows[:, -1].long()
    mean, std = x[:50_000].mean((0, 2, 3), keepdim=True), x[:50_000].std((0, 2, 3), keepdim=True)
    x = (x - mean) / std
    train = TensorSource(x[:samples], y[:samples], augment=mirrored)
    return Task(model=model, train=train, valid=TensorSource(x[50_000:], y[50_000:]), recipe=recipe, eval_batch=1000)


def convolutions(width: int, *, norm: bool) -> nn.Module:
    """Three 3x3 convolutions, pooled between them and averaged at the end, with or without batch norm."""
    layers: list[nn.Module] = []
    before = 3
    for depth, after in enumerate((width, 2 * width, 4 * width)):
        layers += [nn.MaxPool2d(2)] if depth else []
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=not norm)]
        layers += [nn.BatchNorm2d(after), nn.ReLU()] if norm else [nn.ReLU()]
        before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES))


class SmallViT(nn.Module):
    """A transformer on the sixteen 2x2 patches of an image of 8x8."""

    def __init__(self, *, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 2, stride=2)
        self.places = nn.Parameter(0.02 * torch.randn(1, (SIDE // 2) ** 2, width))
        block = nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `(samples, classes)`."""
        stream = self.patches(x).flatten(2).transpose(1, 2) + self.places
        logits: Tensor = self.head(self.blocks(stream).mean(1))
        return logits


@register_workload("atlas-cnn", recipe=SGD)
def atlas_cnn(data: Path | None, recipe: Recipe, width: int = 12, norm: bool = True, samples: int = 16_000) -> Task:
    """Three convolutions on CIFAR-10 of 8x8, with batch norm or without."""
    return small_cifar10(convolutions(width, norm=norm), data, recipe, samples)


@register_workload("atlas-mlp", recipe=SGD)
def atlas_mlp(data: Path | None, recipe: Recipe, width: int = 64, samples: int = 16_000) -> Task:
    """A perceptron with two hidden layers on CIFAR-10 of 8x8."""
    return small_cifar10(MLP(inputs=3 * SIDE**2, width=width, classes=CLASSES), data, recipe, samples)


@register_workload("atlas-vit", recipe=ADAMW)
def atlas_vit(
    data: Path | None, recipe: Recipe, width: int = 32, layers: int = 1, heads: int = 2, samples: int = 16_000
) -> Task:
    """A small vision transformer on CIFAR-10 of 8x8, with AdamW."""
    return small_cifar10(SmallViT(width=width, layers=layers, heads=heads), data, recipe, samples)
