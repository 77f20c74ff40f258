"""Data sets that Hugging Face `datasets` saved with `DatasetDict.save_to_disk`: images with labels, and token blocks.

A DatasetDict has a split `train`, and `validation`, `valid` or `test`, the first of which is there.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ebbflow.core.extras import require
from ebbflow.errors import DataError
from ebbflow.workloads.image_files import check_all, check_header
from ebbflow.workloads.image_folders import Transform

__all__ = ["SavedBlocks", "SavedImages", "SavedSplits", "is_saved", "read_saved"]

_VALIDATION = ("validation", "valid", "test")
_IMAGES, _LABELS, _TOKENS = ("image", "img"), ("label", "labels"), "input_ids"


class SavedSplits(NamedTuple):
    """The two splits, as `datasets` gives them."""

    train: Any
    valid: Any


def is_saved(folder: Path) -> bool:
    """Whether the folder was saved by `datasets`."""
    return (folder / "dataset_dict.json").exists() or (folder / "dataset_info.json").exists()


def read_saved(folder: Path) -> SavedSplits:
    """Open a DatasetDict, memory-mapped; the samples are not read."""
    if not (folder / "dataset_dict.json").exists():
        raise DataError(
            f"{folder}: one Dataset; expected a DatasetDict with a split for training and one for validation: save "
            f"data.train_test_split(0.1), for example"
        )
    datasets = require("datasets", extra="hf", needed_for=f"the saved data set {folder}")
    splits = datasets.load_from_disk(str(folder))
    valid = next((name for name in _VALIDATION if name in splits), None)
    if "train" not in splits or valid is None:
        raise DataError(
            f"{folder}: the splits are {', '.join(splits)}; expected train and one of {', '.join(_VALIDATION)}"
        )
    return SavedSplits(splits["train"], splits[valid])


def _column(split: Any, names: tuple[str, ...], folder: Path) -> str:
    """The first of these columns that the split has."""
    for name in names:
        if name in split.column_names:
            return name
    raise DataError(
        f"{folder}: the columns are {', '.join(split.column_names)}; expected {' or '.join(names)}: rename a column "
        f"before saving"
    )


class SavedImages(Dataset[tuple[Tensor, int]]):
    """The images of a split, each as its transform and its label."""

    def __init__(self, split: Any, transform: Transform, folder: Path) -> None:
        self._images, self._labels = _column(split, _IMAGES, folder), _column(split, _LABELS, folder)
        self._split = split
        self._folder = folder
        self.transform = transform
        labels = np.asarray(split[self._labels])
        if not len(labels) or labels.dtype.kind not in "iu" or labels.min() < 0:
            raise DataError(f"{folder}: the column {self._labels} must hold class indices from 0 on, and some")
        self.classes = max(int(labels.max()) + 1, getattr(split.features[self._labels], "num_classes", None) or 0)

    def __len__(self) -> int:
        return len(self._split)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        try:
            row = self._split[int(index)]
            image = row[self._images].convert("RGB")
        except (OSError, SyntaxError, AttributeError) as error:  # Pillow's errors of damaged files
            raise DataError(f"{self._folder}: image {index} cannot be decoded: {error}") from error
        return self.transform(image), int(row[self._labels])

    def check_headers(self) -> None:
        """Read the headers of all images; those that are no images raise DataError."""
        datasets = require("datasets", extra="hf", needed_for=f"the saved data set {self._folder}")
        if not isinstance(kind := self._split.features[self._images], datasets.Image):
            raise DataError(
                f"{self._folder}: the column {self._images} is {kind}; expected images: cast it to datasets.Image() "
                f"before saving"
            )
        stored = self._split.select_columns([self._images]).cast_column(self._images, datasets.Image(decode=False))

        def problem(index: int) -> str | None:
            where = f"{self._folder}: image {index}"
            image: dict[str, Any] | None = stored[index][self._images]
            if image is None or not (image["bytes"] or image["path"]):
                return f"{where} is empty; remove the row, or add its image"
            try:
                check_header(io.BytesIO(image["bytes"]) if image["bytes"] else Path(image["path"]), where)
            except DataError as error:
                return str(error)
            return None

        check_all(problem, len(self), "images")


class SavedBlocks(Dataset[tuple[Tensor, Tensor]]):
    """Blocks of tokens of a split: (inputs, targets) of each row of `input_ids`, all of one length."""

    def __init__(self, split: Any, folder: Path, *, vocabulary: int) -> None:
        _column(split, (_TOKENS,), folder)
        if not len(split):
            raise DataError(f"{folder}: a split without rows")
        self._split = split
        self._folder = folder
        self._vocabulary = vocabulary
        self.length = len(split[0][_TOKENS])
        if self.length < 2:
            raise DataError(f"{folder}: rows of {self.length} tokens; expected blocks of two or more")

    def __len__(self) -> int:
        return len(self._split)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = torch.tensor(self._split[int(index)][_TOKENS])
        if len(tokens) != self.length:
            raise DataError(
                f"{self._folder}: row {index} has {len(tokens)} tokens and row 0 has {self.length}; join the texts and "
                f"cut them into blocks of one length before saving, as run_clm.py does"
            )
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < self._vocabulary:
            raise DataError(
                f"{self._folder}: row {index} has a token that is not in a vocabulary of {self._vocabulary}"
            )
        return tokens[:-1], tokens[1:]
