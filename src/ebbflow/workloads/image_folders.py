"""Workloads with images in folders, for data sets too large for memory: ImageNet, and others in its layout.

    DIR/train/CLASS/*.jpg      with any names; classes are numbered in alphabetical order
    DIR/val/CLASS/*.jpg

Loader processes decode the images (`prefetch.py`). They send bytes, which take a quarter of the memory of floats, and
the device standardises them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ebbflow.core.extras import require
from ebbflow.errors import DataError
from ebbflow.workloads.models import ResNet, resnet18, resnet50
from ebbflow.workloads.prefetch import DatasetSource
from ebbflow.workloads.workload import Recipe, Task, missing_data, register_workload

__all__ = ["ImageFolder", "center_crop", "folder_resnet18", "folder_resnet50", "random_crop"]

_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
_MARGIN = 256 / 224  # shorter side of a validation image divided by the side of its crop
# Mean and standard deviation of ImageNet's pixels, as bytes, for red, green and blue.
_MEAN, _STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)

Box = tuple[float, float, float, float]
Crop = Callable[[int, int], Box]
"""Maps width and height of an image to the box that is used: left, upper, right, lower."""


def random_crop(width: int, height: int) -> Box:
    """Draw a box of 8 to 100 % of the image's area and an aspect ratio of 3:4 to 4:3 (Szegedy et al., CVPR 2015).

    If ten draws do not fit into the image, the box is the largest one in its centre with such an aspect ratio. Draws
    are from torch's global generator.
    """
    for _ in range(10):
        area_draw, ratio_draw = torch.rand(2).tolist()
        area = width * height * (0.08 + 0.92 * area_draw)
        ratio = (3 / 4) ** (1 - 2 * ratio_draw)
        wide, high = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < wide <= width and 0 < high <= height:
            left, upper = (int(torch.randint(margin + 1, ())) for margin in (width - wide, height - high))
            return left, upper, left + wide, upper + high
    return _central_box(width, height, min(width, height * 4 / 3), min(height, width * 4 / 3))


def center_crop(width: int, height: int) -> Box:
    """Return the square in the centre whose side is 7/8 of the image's shorter side.

    >>> center_crop(400, 256)
    (88.0, 16.0, 312.0, 240.0)
    """
    side = min(width, height) / _MARGIN
    return _central_box(width, height, side, side)


def _central_box(width: int, height: int, wide: float, high: float) -> Box:
    left, upper = (width - wide) / 2, (height - high) / 2
    return left, upper, left + wide, upper + high


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """The images of a folder with one folder per class, as bytes `(3, size, size)` with the index of their class."""

    def __init__(self, folder: Path, *, size: int, crop: Crop, mirror: bool = False) -> None:
        """With `mirror`, each image is mirrored with probability 1/2, drawn from torch's global generator."""
        require("PIL.Image", extra="vision", needed_for="a folder of images", package="pillow")
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
                f"{folder}: cannot be read ({error.strerror or error}); expected a folder with one folder of images "
                f"per class"
            ) from None
        if not names:
            raise DataError(f"{folder}: no images in its {len(self.classes)} folders; expected CLASS/NAME.jpg")
        # Arrays instead of lists of objects: reading an object writes its reference count, so that every loader process
        # would soon have its own copy of the memory.
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
                resized = image.convert("RGB").resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        except (OSError, SyntaxError) as error:
            raise DataError(f"{path}: not a readable image ({error})") from None
        if self.mirror and torch.rand(()) < 0.5:
            resized = resized.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(resized)).permute(2, 0, 1), int(self._labels[index])


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
    valid = ImageFolder(data / "val", size=size, crop=center_crop)
    if train.classes != valid.classes:
        only_one = sorted({*train.classes} ^ {*valid.classes})[0]
        raise DataError(f"{data}: train and val have different classes: {only_one!r} is in one of them only")

    mean, std = (torch.tensor(values)[:, None, None] for values in (_MEAN, _STD))
    return Task(
        model=model(classes=len(train.classes), width=width, large=True),
        train=DatasetSource(train, mean=mean, std=std),
        valid=DatasetSource(valid, mean=mean, std=std),
        recipe=recipe,
    )
