"""Images in folders, one per class, for data sets too large for memory: ImageNet, and others in its layout.

    FOLDER/CLASS/*.jpg         with any names; classes are numbered in alphabetical order

Loader processes decode the images (`prefetch.py`). Their transforms return bytes, which take a quarter of the memory of
floats, and the device standardises them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from ebbflow.errors import DataError
from ebbflow.workloads.image_files import IMAGE_SUFFIXES, check_all, check_header, decode_image, transformed

__all__ = ["ImageFolder", "Transform"]

Transform = Callable[[Any], Tensor]
"""Makes a tensor of an RGB image of Pillow. It may draw from the global generators of torch, numpy and Python."""


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """The images of a folder with one folder per class, each as its transform and the index of its class.

    Every file counts: one that is neither an image by its name nor hidden (.NAME), a class without images, and anything
    else that would otherwise be left out without notice raises DataError at once. Damaged images raise it when they are
    read, and those with a damaged header in `check_headers`. Every error names the file.
    """

    def __init__(self, folder: Path, transform: Transform) -> None:
        self.folder = folder
        self.transform = transform
        try:
            self.classes = _names(folder, folders=True)
            images = [_names(folder / name, folders=False) for name in self.classes]
        except OSError as error:
            raise DataError(
                f"{error.filename or folder}: cannot be read ({error.strerror or error}); expected a folder with one "
                f"folder of images per class"
            ) from None
        for name, files in zip(self.classes, images, strict=True):
            if not files:
                raise DataError(f"{folder / name}: no images in this class; add some, or remove the folder")
        if not self.classes:
            raise DataError(f"{folder}: no folders; expected CLASS/NAME.jpg")
        # Arrays instead of lists of objects: reading an object writes its reference count, so that every loader process
        # would soon have its own copy of the memory.
        self._names = np.array([os.fsencode(file) for files in images for file in files])
        self._labels = np.repeat(np.arange(len(images)), [len(files) for files in images])

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path = self._path(index)
        return transformed(path, self.transform, decode_image(path, path)), int(self._labels[index])

    def check_headers(self) -> None:
        """Read the headers of all images; those that are no images raise DataError."""

        def problem(index: int) -> str | None:
            try:
                check_header(self._path(index), self._path(index))
            except DataError as error:
                return str(error)
            return None

        check_all(problem, len(self), "images")

    def _path(self, index: int) -> Path:
        return self.folder / self.classes[int(self._labels[index])] / os.fsdecode(self._names[index])


def _names(folder: Path, *, folders: bool) -> list[str]:
    """Return the sorted names in a folder, all of which must be folders, or images; hidden files are left out."""
    expected = "folders with the images of one class each" if folders else f"images ({', '.join(IMAGE_SUFFIXES)})"
    names = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            fits = entry.is_dir() if folders else entry.is_file() and entry.name.lower().endswith(IMAGE_SUFFIXES)
            if not fits:  # a pipe, too: opening it would wait for ever
                neither = not (entry.is_file() or entry.is_dir())
                found = "neither a file nor a folder, but a link to nothing, or a pipe; " if neither else ""
                raise DataError(f"{entry.path}: {found}expected only {expected} in {folder}; move this elsewhere")
            names.append(entry.name)
    return sorted(names)
