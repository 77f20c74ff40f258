"""Semantic segmentation: folders of images with a class per pixel, FCN-ResNet50, pixel accuracy and mean IoU.

Two layouts are read. An image and its mask have the same name, up to the suffix.

    DIR/train/images/*.jpg        DIR/train/masks/*.png              and the same in DIR/val
    DIR/images/training/*.jpg     DIR/annotations/training/*.png     and the same in validation: ADE20K's scene parsing
                                                                     benchmark (ADEChallengeData2016)

A mask is an image with one number per pixel. One number, `void`, marks pixels that count neither in the loss nor in the
metrics; the others are the classes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from ebbflow.engines.loss_sum import LossSum
from ebbflow.errors import ConfigError, DataError
from ebbflow.workloads.image_files import (
    IMAGE_SUFFIXES,
    IMAGENET_MEAN,
    IMAGENET_STD,
    TURNED,
    check_all,
    check_header,
    decode_image,
    is_turned,
    open_image,
    png_format,
    transformed,
)  # fmt: skip
from ebbflow.workloads.prefetch import DatasetSource
from ebbflow.workloads.torchvision_import import import_torchvision, load_backbone, pickle_with_torchvision
from ebbflow.workloads.workload import Recipe, Task, missing_data, register_workload

__all__ = [
    "VOID", "MaskClasses", "ResizeImage", "SegmentationFolder", "SegmentationMetric", "ade20k_fcn",
    "pixel_cross_entropy", "random_scale_crop",
]  # fmt: skip

VOID = 255
"""The value of void pixels in the masks of samples, whatever it is in the files."""
_UNKNOWN = 254
_MASK_SUFFIXES = (".png",)
_NUMBER_MODES = ("L", "P", "1", "I", "I;16")
"""Pillow's modes of a PNG with one number per pixel. The numbers of a palette image (P) are its indices, as in Pascal
VOC."""
_GREY = 0  # the colour type of a PNG without palette, colours or transparency
_SOME_MASKS = 16  # training masks that are read before training
_AUXILIARY = 0.5  # weight of the auxiliary head's loss, in GluonCV's and torchvision's training scripts alike
_BASE = 520 / 480  # shorter side of an image divided by the side of a crop, in both scripts
_torchvision = functools.partial(import_torchvision, needed_for="segmentation")

Transform = Callable[[Any, Any], tuple[Tensor, Tensor]]
"""Changes an image and its mask, both torchvision's TVTensors of bytes, and returns plain tensors."""


# ---- reading ----


class MaskClasses:
    """Which numbers occur in the masks of a data set: the first `classes` numbers from 0 on except `void`, and `void`.

    >>> MaskClasses(classes=150, void=0)                      # ADE20K
    the classes 1 to 150, and 0 for void
    >>> MaskClasses(classes=11, void=11).indices(np.array([0, 10, 11]), "a.png").tolist()
    [0, 10, 255]
    """

    def __init__(self, *, classes: int, void: int) -> None:
        for name, value, least, most in (("classes", classes, 2, 254), ("void", void, 0, 255)):
            if not least <= value <= most:
                raise ConfigError(f"{name} is {value}; expected {least} to {most}")
        self.void = void
        self.values = [value for value in range(classes + 1) if value != void][:classes]
        self._table = np.full(256, _UNKNOWN, dtype=np.uint8)
        self._table[self.values] = np.arange(classes)
        self._table[void] = VOID

    def __repr__(self) -> str:
        return f"the classes {self.values[0]} to {self.values[-1]}, and {self.void} for void"

    def indices(self, mask: NDArray[Any], path: Path | str) -> NDArray[np.uint8]:
        """Return the index of each pixel's class, or VOID; raise DataError if there are other numbers in the mask."""
        bytes_only = mask.astype(np.uint8)
        indices: NDArray[np.uint8] = self._table[bytes_only]
        wrong = (indices == _UNKNOWN) | (bytes_only != mask)
        if wrong.any():
            values = np.unique(mask[wrong]).tolist()
            shown = ", ".join(str(value) for value in values[:5]) + (", ..." if len(values) > 5 else "")
            raise DataError(
                f"{path}: {int(wrong.sum())} pixels have the value {shown}; expected {self}: correct the mask, or the "
                f"arguments classes= and void= of the workload"
            )
        return indices


class SegmentationFolder(Dataset[tuple[Tensor, Tensor]]):
    """The images of a folder with the masks of another: bytes `(3, height, width)` and class indices `(height, width)`.

    When it is made, all names are compared and the headers of all files are read: an image without a mask, a mask
    without an image, other files, different sizes, masks in colours or not in PNG, and images with more than 8 bits per
    channel raise DataError then. `check_masks` reads some masks, or all. Numbers in other masks that are no class, and
    files that are damaged behind their header, raise DataError when the sample is read. No file is left out.
    """

    def __init__(self, images: Path, masks: Path, *, values: MaskClasses, transform: Transform) -> None:
        self.images, self.masks = images, masks
        self.values = values
        self.transform = transform
        names, mask_names = _files(images, IMAGE_SUFFIXES), _files(masks, _MASK_SUFFIXES)
        _refuse(images, [names[stem] for stem in names.keys() - mask_names.keys()], f"without a mask in {masks}")
        _refuse(masks, [mask_names[stem] for stem in mask_names.keys() - names.keys()], f"without an image in {images}")
        # Arrays instead of lists of objects: reading an object writes its reference count, so that every loader process
        # would soon have its own copy of the memory.
        self._images = np.array([os.fsencode(names[stem]) for stem in sorted(names)])
        self._masks = np.array([os.fsencode(mask_names[stem]) for stem in sorted(names)])
        check_all(self._header_problem, len(self), "samples")

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image_path, mask_path = self._paths(index)
        pixels = np.array(decode_image(image_path, image_path))
        numbers = _numbers(mask_path)
        if pixels.shape[:2] != numbers.shape:
            raise DataError(_size_problem(image_path, pixels.shape[1::-1], mask_path, numbers.shape[1::-1]))
        tv_tensors = _torchvision("tv_tensors")
        image = tv_tensors.Image(torch.from_numpy(pixels).permute(2, 0, 1))
        indices = tv_tensors.Mask(torch.from_numpy(self.values.indices(numbers, mask_path)))
        sample: tuple[Tensor, Tensor] = transformed(image_path, self.transform, image, indices)
        return sample

    def check_masks(self, most: int | None = None) -> None:
        """Read all masks, or `most` that are spread over the folder.

        Numbers that are no class, damaged files, and nothing but void in any of them raise DataError. So classes and
        void that do not fit the data are found before training, and not at the first validation.
        """
        count = len(self) if most is None else min(most, len(self))
        chosen = np.linspace(0, len(self) - 1, count).round().astype(int)
        only_void = np.ones(count, dtype=bool)

        def problem(number: int) -> str | None:
            path = self._paths(chosen[number])[1]
            try:
                only_void[number] = (self.values.indices(_numbers(path), path) == VOID).all()
            except DataError as error:
                return str(error)
            return None

        check_all(problem, count, "masks")
        if only_void.all():
            raise DataError(
                f"{self.masks}: all pixels of the {count} masks that were read have the value {self.values.void}, "
                f"void; expected {self.values}: get the masks with the classes, or correct the arguments classes= and "
                f"void= of the workload"
            )

    def _paths(self, index: int) -> tuple[Path, Path]:
        return self.images / os.fsdecode(self._images[index]), self.masks / os.fsdecode(self._masks[index])

    def _header_problem(self, index: int) -> str | None:
        """Return what the headers of an image and its mask say that is wrong."""
        image_path, mask_path = self._paths(index)
        try:
            image_size = check_header(image_path, image_path)
            with open_image(mask_path, mask_path) as mask:
                mask_size, mode, kind = mask.size, mask.mode, mask.format
        except DataError as error:
            return str(error)
        if kind != "PNG":
            return (
                f"{mask_path}: it is a {kind} by its content; expected a PNG, since other formats may change numbers: "
                f"make it again from the original mask"
            )
        if mode not in _NUMBER_MODES:
            return (
                f"{mask_path}: an image in colours (Pillow's mode {mode}); expected one number per pixel, that is "
                f"{self.values}: replace the colours by these numbers"
            )
        return _size_problem(image_path, image_size, mask_path, mask_size) if image_size != mask_size else None


def _numbers(mask: Path) -> NDArray[Any]:
    """Return the numbers that are in the file of a mask."""
    with open_image(mask, mask) as opened:
        bits, colours = png_format(opened) or (8, None)
        numbers = np.array(opened)
    # Pillow makes greys from 0 to 255 of the numbers 0 to 3 and 0 to 15, but 0 and 1 (False and True) of single bits.
    return numbers // (255 // (2**bits - 1)) if colours == _GREY and bits in (2, 4) else numbers


def _files(folder: Path, suffixes: tuple[str, ...]) -> dict[str, str]:
    """Return the names of a folder's files by their names without suffix; there may be no other files in it."""
    expected = f"expected files {', '.join(f'*{suffix}' for suffix in suffixes)}"
    try:
        with os.scandir(folder) as entries:
            is_file = {entry.name: entry.is_file() for entry in entries if not entry.name.startswith(".")}
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror or error}); {expected}") from None
    if not is_file:
        raise DataError(f"{folder}: the folder is empty; {expected}")
    names = sorted(is_file)
    _refuse(folder, [name for name in names if not name.lower().endswith(suffixes)], f"of another kind; {expected}")
    # Opening a pipe would wait for ever.
    no_files = [name for name in names if not is_file[name]]
    _refuse(folder, no_files, f"that are folders, pipes or broken links; {expected}")
    by_stem: dict[str, str] = {}
    for name in names:
        stem = Path(name).stem
        if stem in by_stem:
            raise DataError(f"{folder}: {by_stem[stem]} and {name} have the same name; expected one of them")
        by_stem[stem] = name
    return by_stem


def _refuse(folder: Path, names: list[str], why: str) -> None:
    if names:
        shown = ", ".join(sorted(names)[:5]) + (", ..." if len(names) > 5 else "")
        raise DataError(f"{folder}: {len(names)} file(s) {why}: {shown}; add what is missing, or move them elsewhere")


def _size_problem(image: Path, image_size: tuple[int, ...], mask: Path, mask_size: tuple[int, ...]) -> str:
    sizes = " pixels, but ".join(
        f"{path} has {width}x{height}" for path, (width, height) in ((image, image_size), (mask, mask_size))
    )
    cure = "make it again from the original image"
    if image_size[::-1] == mask_size:
        with open_image(image, image) as opened:
            cure = TURNED if is_turned(opened) else cure
    return f"{sizes}; expected a mask of the image's own size: {cure}"


def random_scale_crop(size: int) -> Transform:
    """Return the training transform: resize, mirror with probability 1/2, and crop to a square of this size.

    The shorter side becomes a random number from half to twice 520/480 of the size. An image smaller than the crop is
    placed at random on a black one, where the mask is void. All draws are from torch's global generator.
    """
    v2, tv_tensors = _torchvision("transforms.v2"), _torchvision("tv_tensors")
    base = size * _BASE
    transform: Transform = v2.Compose(
        [
            v2.RandomResize(round(base / 2), round(2 * base) + 1),
            v2.RandomHorizontalFlip(),
            v2.RandomCrop(size, pad_if_needed=True, fill={tv_tensors.Image: 0, tv_tensors.Mask: VOID}),
            v2.ToPureTensor(),
        ]
    )
    return pickle_with_torchvision(transform)


@dataclass(frozen=True)
class ResizeImage:
    """The validation transform: the image's shorter side becomes 520/480 of the size, the mask stays as it is."""

    size: int

    def __call__(self, image: Any, mask: Any) -> tuple[Tensor, Tensor]:
        """Return the resized image and the mask."""
        resized: Tensor = _torchvision("transforms.v2.functional").resize(image, [round(self.size * _BASE)])
        return resized.as_subclass(Tensor), mask.as_subclass(Tensor)


# ---- loss and metric ----


def pixel_cross_entropy(model: nn.Module, images: Tensor, masks: Tensor) -> LossSum:
    """Return the cross-entropy of all pixels that are not void, summed, and their number.

    The model returns logits by name, as those of torchvision do: `out`, and perhaps those of an auxiliary head as
    `aux`, whose cross-entropy is added with a weight of 0.5.
    """
    logits: Mapping[str, Tensor] = model(images)
    targets = masks.long()
    total = F.cross_entropy(logits["out"], targets, ignore_index=VOID, reduction="sum")
    if "aux" in logits:
        auxiliary = F.cross_entropy(logits["aux"], targets, ignore_index=VOID, reduction="sum")
        total = total + _AUXILIARY * auxiliary
    return LossSum(total, (targets != VOID).sum())


class SegmentationMetric:
    """Pixel accuracy and mean intersection over union, from the confusion matrix of the whole validation set.

    Logits are interpolated to the size of the mask, so that every pixel of the file counts once. Void pixels do not
    count, whatever is predicted there. A class that occurs neither in the masks nor in the predictions is left out of
    the mean; one that is predicted but in no mask has an IoU of 0.
    """

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self._counts: Tensor | None = None

    def update(self, model: nn.Module, images: Tensor, masks: Tensor) -> None:
        """Add the pixels of a batch."""
        logits: Tensor = model(images)["out"].float()
        if logits.shape[-2:] != masks.shape[-2:]:
            logits = F.interpolate(logits, size=masks.shape[-2:], mode="bilinear", align_corners=False)
        # Void pixels have a row of their own: leaving them out first would make a GPU wait for their number.
        rows = masks.long().where(masks != VOID, self.classes)
        cells = torch.bincount(
            (rows * self.classes + logits.argmax(1)).flatten(), minlength=(self.classes + 1) * self.classes
        )
        self._counts = cells if self._counts is None else self._counts + cells

    def compute(self) -> dict[str, float]:
        """Return `pixel_accuracy` and `miou`; raise DataError if all pixels are void."""
        if self._counts is None or not (counts := self._counts.cpu().view(-1, self.classes)[:-1].double()).any():
            raise DataError("all pixels of the validation masks are void; expected some that have a class")
        hits = counts.diagonal()
        unions = counts.sum(0) + counts.sum(1) - hits
        seen = unions > 0
        return {"pixel_accuracy": float(hits.sum() / counts.sum()), "miou": float((hits[seen] / unions[seen]).mean())}


# ---- the workload ----


class _Layout(NamedTuple):
    """Folders of images and masks for training and validation, and what the layout says about the masks."""

    train: tuple[Path, Path]
    valid: tuple[Path, Path]
    classes: int | None = None
    void: int | None = None


def _layout(data: Path) -> _Layout:
    for root in (data, data / "ADEChallengeData2016"):
        if (root / "images" / "training").is_dir():
            train, valid = (
                (root / "images" / part, root / "annotations" / part) for part in ("training", "validation")
            )
            return _Layout(train, valid, classes=150, void=0)
    if (data / "train" / "images").is_dir():
        train, valid = ((data / part / "images", data / part / "masks") for part in ("train", "val"))
        return _Layout(train, valid)
    raise DataError(f"{data}: neither train/images nor images/training is a folder in it; expected {_EXPECTED}")


_EXPECTED = (
    "the folder that holds {train,val}/images/*.jpg and {train,val}/masks/*.png, or ADE20K's ADEChallengeData2016 with "
    "images/{training,validation}/*.jpg and annotations/{training,validation}/*.png"
)


# The paper: batch 16, rate 0.1, cosine, batch norm over 16 images however many workers there are (so one worker here is
# one of its machines). It does not say the rest: momentum and weight decay are those of its other experiments and of
# GluonCV's script, in which it was run; 120 epochs are those of the training code of its reference for batch norm.
@register_workload(
    "ade20k-fcn",
    recipe=Recipe(
        ref_batch=16,
        local_batch=16,
        lr=0.1,
        optimizer="sgd(momentum=0.9, weight_decay=1e-4)",
        schedule="cosine",
        epochs=120,
        metric="miou",
    ),
    cite="Lin et al. 2019 (recipe); Zhou et al., CVPR 2017 (data)",
)
def ade20k_fcn(
    data: Path | None,
    recipe: Recipe,
    classes: int | None = None,
    void: int | None = None,
    size: int = 480,
    backbone: str = "",
) -> Task:
    """FCN-ResNet50 on ADE20K, or on other folders of images and masks.

    Other folders need `classes` and `void`. `backbone` is the file of a state dict, with which the ResNet begins.
    """
    if data is None:
        raise missing_data("ade20k-fcn", _EXPECTED)
    if size < 32:
        raise ConfigError(f"ade20k-fcn: size is {size}; expected 32 or more, the side of a training crop in pixels")
    layout = _layout(data)
    classes, void = layout.classes if classes is None else classes, layout.void if void is None else void
    if classes is None or void is None:
        raise ConfigError(
            f"{data}: the folders do not say what the numbers in the masks mean; give the number of classes and the "
            f"number of void pixels, such as ade20k-fcn(classes=11, void=11) for classes 0 to 10 and 11 for void"
        )
    values = MaskClasses(classes=classes, void=void)
    source = functools.partial(DatasetSource, mean=IMAGENET_MEAN, std=IMAGENET_STD)
    train = SegmentationFolder(*layout.train, values=values, transform=random_scale_crop(size))
    valid = SegmentationFolder(*layout.valid, values=values, transform=ResizeImage(size))
    train.check_masks(_SOME_MASKS)
    valid.check_masks()  # all: a wrong one would otherwise end the run after its first epoch
    models = _torchvision("models.segmentation")
    model: nn.Module = models.fcn_resnet50(weights=None, weights_backbone=None, num_classes=classes, aux_loss=True)
    if backbone:
        load_backbone(model.get_submodule("backbone"), backbone)
    return Task(
        model=pickle_with_torchvision(model),
        train=source(train),
        valid=source(valid),
        recipe=recipe,
        loss=pixel_cross_entropy,
        validation=functools.partial(SegmentationMetric, classes),
        eval_batch=1,  # images have different sizes, and padding would change what the convolutions see
    )
