"""COCO's annotations and images (Lin et al., ECCV 2014), and mean average precision.

    DIR/annotations/instances_train2017.json      DIR/train2017/*.jpg
    DIR/annotations/instances_val2017.json        DIR/val2017/*.jpg

`read_coco` checks the whole annotation file before training begins. What cannot be used is an error that names the file
and the id. Four things are left out and counted (`CocoSplit.left_out`), so that COCO can be used as it is: crowd boxes
and images without other boxes, both in training only, a few bad boxes, such as the zero-area boxes of train2017, and
images in the folder that the annotations do not name. Images are decoded when they are used; one that is damaged, or
has another size than its annotations say, is an error then. `check_headers` finds most of them before: the task has it
read the headers of the validation images, which would otherwise fail after the first epoch.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import math
import os
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from ebbflow.core.extras import require
from ebbflow.errors import DataError
from ebbflow.workloads.image_files import (
    IMAGE_SUFFIXES,
    IMAGENET_MEAN,
    check_all,
    check_header,
    decode_image,
    transformed,
)
from ebbflow.workloads.torchvision_import import import_torchvision, pickle_with_torchvision

__all__ = ["CocoImages", "CocoMetric", "CocoSplit", "check_headers", "collate_detection", "read_coco"]

Target = dict[str, Tensor]
"""Boxes `(n, 4)` as x1, y1, x2, y2 in pixels of the network's input, labels `(n,)` from 1 on, the id of the image, and
its original size (height, width)."""

_LOG = logging.getLogger(__name__)
_ROUNDING = 1.0  # pixels by which a box may leave its image
_MOST_HEADERS = 200  # images with bad boxes whose headers are read, before the boxes are taken to be what is wrong
_MOST_ID = 10**15 - 1  # pycocotools keeps ids as floats, which have all whole numbers up to 2**53
_MOST_PIXELS = 1_000_000  # no image format has more in a row
_MOST_AREA = 10**10  # square pixels; pycocotools counts no object with more, or with less than 0, and says nothing
_LEAST_SIDE = 1e-6  # of the image's side; in 32 bits a thinner box has none, of which the loss takes the logarithm
_LEAST_CROPPED = 4  # pixels; of a shorter side, torchvision's crop may take 0.3 and have none left, and divides by 0
_FIRST_PIXEL = 1.02  # where boxes that are fractions of their image end, also if they were rounded to two digits
_MOST_BAD = 0.01  # part of a file's boxes that may be bad; more of them mean another format, such as x1, y1, x2, y2


@dataclass(frozen=True, kw_only=True)
class CocoSplit:
    """The checked annotations of one split, as arrays: objects would be copied into every loader process."""

    folder: Path
    """The folder of the images."""
    names: NDArray[np.bytes_]
    """File name of each image."""
    ids: NDArray[np.int64]
    """Id of each image."""
    sizes: NDArray[np.int64]
    """Height and width of each image."""
    first: NDArray[np.int64]
    """The boxes of image i are those from `first[i]` to `first[i + 1]`."""
    boxes: NDArray[np.float32]
    """x1, y1, x2, y2 of each box, in pixels of its image."""
    labels: NDArray[np.int64]
    """1 for the category with the lowest id, and so on; 0 is the background."""
    crowd: NDArray[np.bool_]
    """Whether a box surrounds a crowd: not trained on, and neither right nor wrong in validation."""
    areas: NDArray[np.float64]
    """Area of each object, by which validation tells small ones from large ones."""
    categories: Mapping[int, str]
    """Names by id, in the order of the labels."""
    left_out: Mapping[str, int]
    """What is not used or was changed, by kind."""

    def without_empty_images(self) -> CocoSplit:
        """Return the split for training: images with a box that is not a crowd's, and only such boxes."""
        kept = ~self.crowd
        counts = np.add.reduceat(np.append(kept, False), self.first[:-1]) * (np.diff(self.first) > 0)
        used = counts > 0
        left_out = {"images without boxes": int((~used).sum()), "crowd boxes": int(self.crowd.sum())}
        return CocoSplit(
            folder=self.folder, names=self.names[used], ids=self.ids[used], sizes=self.sizes[used],
            first=np.concatenate([[0], np.cumsum(counts[used])]), boxes=self.boxes[kept], labels=self.labels[kept],
            crowd=self.crowd[kept], areas=self.areas[kept], categories=self.categories,
            left_out={**self.left_out, **{name: count for name, count in left_out.items() if count}},
        )  # fmt: skip


def read_coco(data: Path, split: str) -> CocoSplit:
    """Read and check the annotations of a split, such as train2017.

    A box that leaves its image by at most a pixel is clipped. A box that leaves it by more, or that is empty, is left
    out; this is reported as a warning that names the first ones, and is an error if more than 1 % of the boxes (and
    more than one) are bad. Everything else that is wrong is an error.
    """
    path = data / "annotations" / f"instances_{split}.json"
    content = _read_json(path)
    categories = _categories(path, content["categories"])
    images = _images(path, content["images"], data / split)
    without_entry = _check_files(data / split, path, images)
    index = {image["id"]: number for number, image in enumerate(images)}
    sizes = np.array([(image["height"], image["width"]) for image in images], dtype=np.int64)
    label = {category: number for number, category in enumerate(categories, start=1)}
    if not content["annotations"]:
        raise DataError(f"{path}: it has no annotations; expected boxes, so get the file with them")

    rows: list[tuple[int, int, bool, float, int]] = []
    boxes: list[tuple[float, float, float, float]] = []
    seen: set[int] = set()
    for number, annotation in enumerate(content["annotations"]):
        where, identity = _identity(path, "annotation", annotation, number, seen)
        image, category = annotation.get("image_id"), annotation.get("category_id")
        if type(image) is not int or image not in index:
            raise DataError(
                f"{where}: image_id is {_shown(image)}, which no image has; correct or remove the annotation"
            )
        if type(category) is not int or category not in label:
            raise DataError(
                f"{where}: category_id is {_shown(category)}; expected one of the {len(label)} categories of the file"
            )
        box = annotation.get("bbox")
        if not (isinstance(box, list) and len(box) == 4 and all(_is_number(value) for value in box)):
            raise DataError(
                f"{where} (image {image}): bbox is {_shown(box)}; expected four finite numbers: x, y, width, height"
            )
        x, y, width, height = map(float, box)
        area = annotation.get("area", width * height)
        if not _is_number(area) or ("area" in annotation and not 0 <= area <= _MOST_AREA):
            raise DataError(
                f"{where} (image {image}): area is {_shown(area)}; expected a finite number, from 0 to {_MOST_AREA:,}"
            )
        crowd = annotation.get("iscrowd", 0)
        if not isinstance(crowd, int | float) or crowd not in (0, 1):
            raise DataError(f"{where} (image {image}): iscrowd is {_shown(crowd)}; expected 0 or 1")
        rows.append((index[image], label[category], bool(crowd), float(area), identity))
        boxes.append((x, y, x + width, y + height))

    numbers = np.array([row[:2] for row in rows], dtype=np.int64)
    corners = np.array(boxes, dtype=np.float64)
    # A data set may have some boxes in the first pixel of their image, but not most. So neither rounding, by which
    # fractions end behind 1, nor a few boxes in pixels hide that the others are fractions.
    within = int((corners[:, 2:] <= _FIRST_PIXEL).all(axis=1).sum())
    if 2 * within > len(corners):
        raise DataError(
            f"{path}: {within} of {len(corners)} boxes end within the first pixel of their image, as if bbox were "
            f"fractions of it; expected x, y, width, height in pixels: correct the file"
        )
    clipped, bad, left_out = _clip(corners, sizes[numbers[:, 0]])
    names = np.array([os.fsencode(image["file_name"]) for image in images])
    ids = np.array([image["id"] for image in images], dtype=np.int64)
    if bad.any():
        # A box may be outside only because the annotations have a wrong size of the image.
        of_bad = np.unique(numbers[bad, 0])[:_MOST_HEADERS]
        check_headers(data / split, names[of_bad], ids[of_bad], sizes[of_bad])
        _report_bad(path, corners, bad, sizes[numbers[:, 0]], rows)
    order = np.argsort(numbers[:, 0], kind="stable")
    order = order[~bad[order]]
    counts = np.bincount(numbers[order, 0], minlength=len(images))
    return CocoSplit(
        folder=data / split,
        names=names,
        ids=ids,
        sizes=sizes,
        first=np.concatenate([[0], np.cumsum(counts)]),
        boxes=clipped[order].astype(np.float32),
        labels=numbers[order, 1],
        crowd=np.array([row[2] for row in rows])[order],
        areas=np.array([row[3] for row in rows], dtype=np.float64)[order],
        categories=categories,
        left_out={**left_out, **({"images on disk without an entry": without_entry} if without_entry else {})},
    )


def _read_json(path: Path) -> dict[str, list[dict[str, Any]]]:
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        found = sorted(file.name for file in path.parent.glob("instances_*.json"))
        raise DataError(
            f"{path}: there is no such file; expected COCO's layout, annotations/{path.name} and the folder "
            f"{path.stem.removeprefix('instances_')} beside annotations"
            + (f" (there are {', '.join(found)}: give their year)" if found else "")
        ) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None
    except RecursionError:
        raise DataError(f"{path}: lists or objects inside of too many others; expected COCO's instances file") from None
    except ValueError as error:  # JSON that is cut short, or bytes that are no text
        raise DataError(f"{path}: not a readable JSON file ({error}); get the file again") from None
    for key in ("images", "annotations", "categories"):
        entries = content.get(key) if isinstance(content, dict) else None
        if not (isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)):
            raise DataError(f"{path}: it has no list {key!r} of objects; expected COCO's instances file")
    return content  # type: ignore[no-any-return]


def _identity(path: Path, kind: str, entry: dict[str, Any], number: int, seen: set[int]) -> tuple[str, int]:
    """Return how messages name an entry, and its id, which must be a whole number that no entry before it has."""
    identity = entry.get("id")
    if type(identity) is not int or abs(identity) > _MOST_ID:
        raise DataError(
            f"{path}: {kind} number {number + 1} has the id {_shown(identity)}; expected a whole number of at most 15 "
            f"digits"
        )
    if identity in seen:
        raise DataError(f"{path}: two entries have the {kind} id {identity}; expected each id once, so remove one")
    seen.add(identity)
    return f"{path}: {kind} {identity}", identity


def _categories(path: Path, entries: Sequence[dict[str, Any]]) -> dict[int, str]:
    seen: set[int] = set()
    names = {_identity(path, "category", entry, i, seen)[1]: str(entry.get("name")) for i, entry in enumerate(entries)}
    if not names:
        raise DataError(f"{path}: it has no categories; expected those of its annotations")
    return dict(sorted(names.items()))


def _images(path: Path, entries: Sequence[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Check the images of the annotations, and return them with the names of their files in the folder."""
    images = []
    seen: set[int] = set()
    by_file: dict[str, int] = {}
    resolve = functools.cache(Path.resolve)
    for number, entry in enumerate(entries):
        where, identity = _identity(path, "image", entry, number, seen)
        file = entry.get("file_name")
        if not (isinstance(file, str) and file):
            raise DataError(f"{where}: file_name is {_shown(file)}; expected the name of its file")
        name = _in_folder(file, folder, resolve)
        if by_file.setdefault(name, identity) != identity:  # its samples would not be used once per epoch, but twice
            raise DataError(
                f"{where}: file_name is {_shown(file)}, as of image {by_file[name]}; expected each file once, so move "
                f"all its boxes to one of the two images"
            )
        for side in ("width", "height"):
            if type(entry.get(side)) is not int or not 1 <= entry[side] <= _MOST_PIXELS:
                raise DataError(
                    f"{where}: {side} is {_shown(entry.get(side))}; expected a whole number of pixels, from 1 to "
                    f"{_MOST_PIXELS:,}"
                )
        images.append({**entry, "file_name": name})
    if not images:
        raise DataError(f"{path}: it has no images; expected at least one")
    return images


def _in_folder(file: str, folder: Path, resolve: Callable[[Path], Path]) -> str:
    """Return the name that a file has below the folder of the images, however the annotations write it.

    Some tools write absolute paths, perhaps by another link than the user does. A file elsewhere keeps its path.
    """
    if "/" not in file:
        return file
    path = folder / file
    try:
        found, base = resolve(path.parent) / path.name, resolve(folder)
    except (OSError, RuntimeError, ValueError):  # links in a circle, or a character that no path has: it is not there
        return file
    return os.fspath(found.relative_to(base) if found.is_relative_to(base) else found)


def _check_files(folder: Path, path: Path, images: Sequence[dict[str, Any]]) -> int:
    """Refuse annotations whose images are not there; return the number of images that the annotations do not have.

    These are counted in the folder and in those folders below it in which the annotations have images.
    """
    named = {image["file_name"] for image in images}
    try:
        present = _files(folder)
    except OSError as error:
        raise DataError(
            f"{folder}: cannot be read ({error.strerror or error}); expected the folder of the images of {path.name}"
        ) from None
    for inner in {name.rpartition("/")[0] for name in named if not name.startswith("/")} - {""}:
        with contextlib.suppress(OSError, ValueError):  # its images are then missing
            present |= {f"{inner}/{name}" for name in _files(folder / inner)}
    missing = [i for i in images if i["file_name"] not in present and not _is_file(folder / i["file_name"])]
    if missing:
        raise DataError(
            f"{folder}: {len(missing)} of the {len(images)} images of {path.name} are not there; the first is "
            f"{_shown(missing[0]['file_name'])} (image {missing[0]['id']}); get the missing images, or remove their "
            f"entries"
        )
    others = present - named
    return sum(name.lower().endswith(IMAGE_SUFFIXES) and not name.rpartition("/")[2].startswith(".") for name in others)


def _files(folder: Path) -> set[str]:
    """Return the names of a folder's files. A folder, or a link to nothing, is none.

    This is one call instead of one for each of 118,287 images.
    """
    with os.scandir(folder) as entries:
        return {entry.name for entry in entries if entry.is_file()}


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long for a file
        return False


def _is_number(value: object) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number that is larger than any float
        return False


_SHORTENED = reprlib.Repr()
_SHORTENED.maxstring = 255  # the name of a file as a whole
_shown = _SHORTENED.repr
"""A value of the annotations in a message, shortened: it may be anything."""


def _clip(
    boxes: NDArray[np.float64], sizes: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.bool_], dict[str, int]]:
    """Return the boxes clipped to their images, which of them are bad, and how many of each there are."""
    limits = np.concatenate([sizes[:, ::-1], sizes[:, ::-1]], axis=1)
    clipped = np.clip(boxes, 0, limits)
    moved = np.abs(clipped - boxes).max(axis=1)
    empty = (clipped[:, 2:] - clipped[:, :2] <= _LEAST_SIDE * limits[:, 2:]).any(axis=1)
    bad = (moved > _ROUNDING) | empty
    counts = {"boxes clipped to the image": int((~bad & (moved > 0)).sum()), "bad boxes": int(bad.sum())}
    return clipped, bad, {name: count for name, count in counts.items() if count}


def _report_bad(
    path: Path,
    boxes: NDArray[np.float64],
    bad: NDArray[np.bool_],
    sizes: NDArray[np.int64],
    rows: Sequence[tuple[int, int, bool, float, int]],
) -> None:
    """Name the first bad boxes: as a warning if they are few, otherwise as an error."""
    named = "; ".join(
        f"annotation {rows[i][4]}: x {boxes[i, 0]:g} to {boxes[i, 2]:g} and y {boxes[i, 1]:g} to {boxes[i, 3]:g} "
        f"in an image of {sizes[i, 1]}x{sizes[i, 0]} pixels"
        for i in np.flatnonzero(bad)[:3]
    )
    found = f"{path}: {bad.sum()} of {len(bad)} boxes are empty or outside of their images ({named}"
    found += "; ...)" if bad.sum() > 3 else ")"
    if bad.sum() > max(1, _MOST_BAD * len(bad)):
        raise DataError(f"{found}; expected bbox = x, y, width, height in pixels: correct the file")
    _LOG.warning("%s; they are left out", found)


def check_headers(folder: Path, names: NDArray[np.bytes_], ids: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
    """Read the headers of images: one that is no image, or has another size than `sizes` says, raises DataError."""

    def problem(index: int) -> str | None:
        path = folder / os.fsdecode(names[index])
        height, width = (int(side) for side in sizes[index])
        try:
            check_header(path, _named(path, ids[index]), size=(width, height))
        except DataError as error:
            return str(error)
        return None

    check_all(problem, len(names), "images")


def _named(path: Path, identity: int) -> str:
    return f"{path} (image {identity} of the annotations)"


class CocoImages(Dataset[tuple[Tensor, Target]]):
    """The images of a split as bytes `(3, size, size)`, with their boxes.

    With `augment`, SSD's augmentation (Liu et al., ECCV 2016) by torchvision: photometric distortion, zooming out, a
    crop that overlaps a box, mirroring. It draws from torch's global generator only. Boxes whose centre is outside of
    the crop are left out, and so are boxes of which less than a pixel is left. An image with a side of less than four
    pixels is not cropped.
    """

    def __init__(self, split: CocoSplit, *, size: int, augment: bool) -> None:
        v2 = import_torchvision("transforms.v2", needed_for="COCO's images")
        augmentation = [
            v2.RandomPhotometricDistort(),
            v2.RandomZoomOut(fill=IMAGENET_MEAN.flatten().round().int().tolist()),
            _CropIfLargeEnough(v2.RandomIoUCrop()),
            v2.RandomHorizontalFlip(),
            v2.ClampBoundingBoxes(),
            v2.SanitizeBoundingBoxes(),
        ]
        resize = v2.Resize((size, size), antialias=True)
        self.split = split
        self.transform = pickle_with_torchvision(v2.Compose([*(augmentation if augment else []), resize]))

    def __len__(self) -> int:
        return len(self.split.ids)

    def __getitem__(self, index: int) -> tuple[Tensor, Target]:
        split, tensors = self.split, import_torchvision("tv_tensors", needed_for="COCO's images")
        height, width = (int(side) for side in split.sizes[index])
        path = split.folder / os.fsdecode(split.names[index])
        where = _named(path, split.ids[index])
        pixels = torch.from_numpy(np.array(decode_image(path, where, size=(width, height)))).permute(2, 0, 1)
        part = slice(split.first[index], split.first[index + 1])
        boxes = tensors.BoundingBoxes(torch.from_numpy(split.boxes[part]), format="XYXY", canvas_size=(height, width))
        target = {"boxes": boxes, "labels": torch.from_numpy(split.labels[part])}
        image, target = transformed(where, self.transform, tensors.Image(pixels), target)
        return image.as_subclass(Tensor), {
            "boxes": target["boxes"].as_subclass(Tensor),
            "labels": target["labels"],
            "image_id": torch.tensor(int(split.ids[index])),
            "size": torch.from_numpy(split.sizes[index]),
        }


@dataclass(frozen=True)
class _CropIfLargeEnough:
    """A random crop, and images that are too small for it as they are."""

    crop: Callable[[Tensor, Target], tuple[Tensor, Target]]

    def __call__(self, image: Tensor, target: Target) -> tuple[Tensor, Target]:
        return self.crop(image, target) if min(image.shape[-2:]) >= _LEAST_CROPPED else (image, target)


def collate_detection(samples: Sequence[tuple[Tensor, Target]]) -> tuple[Tensor, list[Target]]:
    """Return the images as one tensor, and a list with one target per image."""
    return torch.stack([image for image, _ in samples]), [target for _, target in samples]


_STATISTICS = ("map", "map50", "map75", "map_small", "map_medium", "map_large")


class CocoMetric:
    """Mean average precision by pycocotools over the whole validation set.

    `map` is the mean over categories and over the overlaps 0.50, 0.55, ... 0.95; `map50` and `map75` are at one
    overlap; `map_small`, `map_medium` and `map_large` count objects below 32x32, up to 96x96 and above, and are left
    out where the split has no such objects. Boxes are compared in pixels of the original images.
    """

    def __init__(self, split: CocoSplit, *, size: int) -> None:
        """`size`: of the network's input, to which all images were resized."""
        coco = require("pycocotools.coco", extra="vision", needed_for="mean average precision", package="pycocotools")
        self._eval: Any = require("pycocotools.cocoeval", extra="vision", needed_for="mean average precision").COCOeval
        self._size = size
        self._categories = [*split.categories]
        image_of = np.repeat(split.ids, np.diff(split.first))
        self._truth = coco.COCO()
        self._truth.dataset = {
            "images": [{"id": int(identity)} for identity in split.ids],
            "categories": [{"id": identity, "name": name} for identity, name in split.categories.items()],
            # Numbered anew from 1: pycocotools takes a box with the id 0 for one that was never found.
            "annotations": [
                {
                    "id": number, "image_id": int(image), "category_id": self._categories[label - 1],
                    "bbox": [x1, y1, x2 - x1, y2 - y1], "area": area, "iscrowd": int(crowd),
                }
                for number, (image, label, (x1, y1, x2, y2), area, crowd) in enumerate(
                    zip(image_of, split.labels, split.boxes.tolist(), split.areas.tolist(), split.crowd, strict=True),
                    start=1,
                )
            ],
        }  # fmt: skip
        with _quiet():
            self._truth.createIndex()
        self._found: list[NDArray[np.float64]] = []

    def update(self, model: nn.Module, inputs: Tensor, targets: Sequence[Target]) -> None:
        """Add the model's detections on a batch."""
        for found, target in zip(model(inputs), targets, strict=True):
            height, width = (float(side) / self._size for side in target["size"])
            boxes = found["boxes"].double().cpu().numpy() * [width, height, width, height]
            boxes[:, 2:] -= boxes[:, :2]
            image = np.full((len(boxes), 1), int(target["image_id"]), dtype=np.float64)
            category = np.array([self._categories[label - 1] for label in found["labels"].tolist()], dtype=np.float64)
            scores = found["scores"].double().cpu().numpy()
            self._found.append(np.hstack([image, boxes, scores[:, None], category[:, None]]))

    def compute(self) -> dict[str, float]:
        """Return the statistics; all are 0 if nothing was detected."""
        rows = np.concatenate(self._found) if self._found else np.empty((0, 7))
        with _quiet():
            # Without any detection pycocotools fails; one with the score 0 that covers nothing changes no precision.
            detected = self._truth.loadRes(rows if len(rows) else self._nothing())
            evaluation = self._eval(self._truth, detected, "bbox")
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
        values = zip(_STATISTICS, evaluation.stats, strict=False)
        return {name: float(value) for name, value in values if value >= 0}  # -1 where there are no such objects

    def _nothing(self) -> NDArray[np.float64]:
        first = self._truth.dataset["annotations"][0]
        return np.array([[first["image_id"], 0, 0, 0, 0, 0, first["category_id"]]], dtype=np.float64)


def _quiet() -> contextlib.redirect_stdout[io.StringIO]:
    """Keep pycocotools from printing."""
    return contextlib.redirect_stdout(io.StringIO())
