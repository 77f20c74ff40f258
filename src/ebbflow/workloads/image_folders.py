"""Image sets that lie on disk as folders, too large for memory: ImageNet, and what is laid out like it.

    DIR/train/CLASS/*.jpg      any names; the classes are numbered in the order of their names
    DIR/val/CLASS/*.jpg

Worker processes decode the images ahead (`prefetch.py`). They deliver bytes, a fourth of what floats would take on the
way, and the device standardises them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ebbflow.errors import DataError, MissingExtra
from ebbflow.workloads.models import ResNet, resnet18, resnet50
from ebbflow.workloads.prefetch import DatasetSource
from ebbflow.workloads.workload import Recipe, Task, missing_data, register_workload

__all__ = ["ImageFolder", "folder_resnet18", "folder_resnet50", "random_crop", "whole_image"]

_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
_MARGIN = 256 / 224  # a validation image is resized to this times its crop
# Mean and deviation of ImageNet's pixels, as bytes, for red, green and blue.
_MEAN, _STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)

Box = tuple[float, float, float, float]
Crop = Callable[[int, int], Box]
"""From width and height to the part of an image that is used: left, upper, right, lower."""


def random_crop(width: int, height: int) -> Box:
    """A part of 8 to 100 % of an image, 3:4 to 4:3, drawn from torch's generator (Szegedy et al., CVPR 2015).

    After ten draws that do not fit into the image: its middle, as much as has such a shape.
    """
    for _ in range(10):
        share, shape = torch.rand(2).tolist()
        area = width * height * (0.08 + 0.92 * share)
        ratio = (3 / 4) ** (1 - 2 * shape)
        wide, high = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < wide <= width and 0 < high <= height:
            left, upper = (int(torch.randint(room + 1, ())) for room in (width - wide, height - high))
            return left, upper, left + wide, upper + high
    return _middle(width, height, min(width, height * 4 / 3), min(height, width * 4 / 3))


def whole_image(width: int, height: int) -> Box:
    """The square in the middle, less a margin of an eighth.

    >>> whole_image(400, 256)
    (88.0, 16.0, 312.0, 240.0)
    """
    side = min(width, height) / _MARGIN
    return _middle(width, height, side, side)


def _middle(width: int, height: int, wide: float, high: float) -> Box:
    left, upper = (width - wide) / 2, (height - high) / 2
    return left, upper, left + wide, upper + high


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """The images below a folder of one folder a class, as bytes `(3, size, size)`, with the number of their class."""

    def __init__(self, folder: Path, *, size: int, crop: Crop, mirror: bool = False) -> None:
        """`mirror`: half of the images, drawn from torch's generator."""
        try:
            from PIL import Image  # noqa: F401
        except ImportError:
            raise MissingExtra("pillow", extra="vision", needed_for="a folder of images") from None
        self.folder = folder
        self.size = size
        self.crop = crop
        self.mirror = mirror
        try:
            self.classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
            names = [
                (f"{name}/{file}", number)
                for number, name in enumerate(self.classes)
                for file in sorted(entry.name for entry in os.scandir(folder / name))
                if file.lower().endswith(_SUFFIXES)
            ]
        except OSError as error:
            raise DataError(
                f"{folder}: cannot be read ({error.strerror or error}); expected a folder with one folder of images a "
                f"class"
            ) from None
        if not names:
            raise DataError(f"{folder}: no images in {len(self.classes)} folders below it; expected CLASS/NAME.jpg")
        # Arrays, not a list of texts: to read one of those writes its reference count, so that each process would soon
        # have a copy of all of them.
        self._names = np.array([os.fsencode(name) for name, _ in names])
        self._labels = np.array([number for _, number in names])

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        path = self.folder / os.fsdecode(self._names[index])
        try:
            with Image.open(path) as image:
                box = self.crop(image.width, image.height)
                part = image.convert("RGB").resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        except (OSError, SyntaxError) as error:
            raise DataError(f"{path}: not a readable image ({error})") from None
        if self.mirror and torch.rand(()) < 0.5:
            part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(part)).permute(2, 0, 1), int(self._labels[index])


_GOYAL = Recipe(
    ref_batch=256,
    local_batch=32,
    lr=0.1,
    optimizer="sgd(momentum=0.9, weight_decay=1e-4)",
    schedule="multistep(30ep, 60ep, 80ep, factor=0.1)",
    epochs=90,
    metric="accuracy",
)


@register_workload("folder-resnet18", recipe=_GOYAL, cite="Goyal et al. 2017 (recipe)")
def folder_resnet18(data: Path | None, recipe: Recipe, size: int = 224, width: int = 64) -> Task:
    """ResNet-18 on a folder of images, such as ImageNet's: DIR/train/CLASS/*.jpg and DIR/val/CLASS/*.jpg."""
    return _task("folder-resnet18", resnet18, data, recipe, size, width)


@register_workload("folder-resnet50", recipe=_GOYAL, cite="Goyal et al. 2017 (recipe)")
def folder_resnet50(data: Path | None, recipe: Recipe, size: int = 224, width: int = 64) -> Task:
    """ResNet-50 on a folder of images, such as ImageNet's: DIR/train/CLASS/*.jpg and DIR/val/CLASS/*.jpg."""
    return _task("folder-resnet50", resnet50, data, recipe, size, width)


def _task(name: str, model: Callable[..., ResNet], data: Path | None, recipe: Recipe, size: int, width: int) -> Task:
    if data is None:
        raise missing_data(name, "the folder that holds train/CLASS/*.jpg and val/CLASS/*.jpg")
    train = ImageFolder(data / "train", size=size, crop=random_crop, mirror=True)
    valid = ImageFolder(data / "val", size=size, crop=whole_image)
    if train.classes != valid.classes:
        other = sorted({*train.classes} ^ {*valid.classes})
        raise DataError(f"{data}: train and val have other classes, {other[0]} is in one of them; expected the same")

    mean, std = (torch.tensor(values)[:, None, None] for values in (_MEAN, _STD))
    return Task(
        model=model(classes=len(train.classes), width=width, large=True),
        train=DatasetSource(train, mean=mean, std=std),
        valid=DatasetSource(valid, mean=mean, std=std),
        recipe=recipe,
    )
