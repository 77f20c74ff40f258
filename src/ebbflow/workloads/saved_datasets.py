"""Data sets that Hugging Face `datasets` saved with `DatasetDict.save_to_disk`: images with labels, and token blocks.

A DatasetDict has a split `train`, and `validation`, `valid` or `test`, the first of which is there; no others are read.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ebbflow.core.extras import require
from ebbflow.errors import DataError
from ebbflow.workloads.image_files import check_all, check_header, transformed
from ebbflow.workloads.image_folders import Transform

__all__ = ["SavedBlocks", "SavedImages", "SavedSplit", "SavedSplits", "is_saved", "read_saved"]

_VALIDATION = ("validation", "valid", "test")
_IMAGES, _LABELS, _TOKENS = ("image", "img"), ("label", "labels"), "input_ids"
_EMPTY = "remove the row, or add its image"


class SavedSplit(NamedTuple):
    """A split, as `datasets` gives it, and what errors call it: its folder and its name."""

    rows: Any
    where: str


class SavedSplits(NamedTuple):
    """The two splits that are used; a DatasetDict may have more."""

    train: SavedSplit
    valid: SavedSplit


def is_saved(folder: Path) -> bool:
    """Whether the folder was saved by `datasets`."""
    return (folder / "dataset_dict.json").exists() or (folder / "dataset_info.json").exists()


def read_saved(folder: Path) -> SavedSplits:
    """Open the two splits of a DatasetDict, memory-mapped; the samples are not read."""
    index = folder / "dataset_dict.json"
    if not index.exists():
        raise DataError(
            f"{folder}: one Dataset; expected a DatasetDict with a split for training and one for validation: save "
            f"data.train_test_split(0.1), for example"
        )
    datasets = require("datasets", extra="hf", needed_for=f"the saved data set {folder}")
    try:
        names = [str(name) for name in json.loads(index.read_bytes())["splits"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{index}: not a readable list of splits ({error!r}); save the data set again") from None
    valid = next((name for name in _VALIDATION if name in names), None)
    if "train" not in names or valid is None:
        raise DataError(
            f"{folder}: the splits are {', '.join(names)}; expected train and one of {', '.join(_VALIDATION)}"
        )

    def opened(name: str) -> SavedSplit:
        where = f"{folder}, split {name}"
        try:
            rows = datasets.load_from_disk(str(folder / name))
        except MemoryError:
            raise
        except Exception as error:  # of datasets, pyarrow or the file system: a damaged file raises nearly anything
            raise DataError(
                f"{where}: cannot be opened ({type(error).__name__}: {error}); save a split with rows again"
            ) from None
        return SavedSplit(rows, where)

    return SavedSplits(opened("train"), opened(valid))


def _column(split: SavedSplit, names: tuple[str, ...]) -> str:
    """The first of these columns that the split has."""
    for name in names:
        if name in split.rows.column_names:
            return name
    raise DataError(
        f"{split.where}: the columns are {', '.join(split.rows.column_names)}; expected {' or '.join(names)}: rename a "
        f"column before saving"
    )


class SavedImages(Dataset[tuple[Tensor, int]]):
    """The images of a split, each as its transform and its label; errors name the folder, the split and the column.

    `datasets` decodes the images, and turns those whose EXIF says how viewers should turn them.
    """

    def __init__(self, split: SavedSplit, transform: Transform, *, classes: int | None = None) -> None:
        """`classes` is the number of classes; by default the column says it, or its labels, then without gaps."""
        self._images, self._labels = _column(split, _IMAGES), _column(split, _LABELS)
        self._where = f"{split.where}, column {self._images}"
        self.transform = transform
        datasets = require("datasets", extra="hf", needed_for="a saved data set")
        self._decoder = split.rows.features[self._images]
        if not isinstance(self._decoder, datasets.Image) or not self._decoder.decode:
            raise DataError(
                f"{self._where}: it holds {self._decoder}; expected images that are decoded when they are read: cast "
                f"the column to datasets.Image() before saving"
            )
        # Files instead of decoded images: only the header of a file says how many bits its channels have.
        files = split.rows.select_columns([self._images, self._labels])
        self._rows = files.cast_column(self._images, datasets.Image(decode=False))
        self.classes = _number_of_classes(split, self._labels, classes)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        row = self._rows[int(index)]
        where = self._check_header(row, index)
        try:
            image = self._decoder.decode_example(row[self._images]).convert("RGB")
        except MemoryError:
            raise
        except Exception as error:  # Pillow raises nearly anything for a damaged file
            raise DataError(f"{where} cannot be decoded: {error}; get it again") from error
        return transformed(where, self.transform, image), int(row[self._labels])

    def check_headers(self) -> None:
        """Read the headers of all images; those that are no images raise DataError."""

        def problem(index: int) -> str | None:
            try:
                self._check_header(self._rows[index], index)
            except DataError as error:
                return str(error)
            return None

        check_all(problem, len(self), "images")

    def _check_header(self, row: dict[str, Any], index: int) -> str:
        """Return what errors call the image of a row, whose header must be that of an image that can be used."""
        where = f"{self._where}, image {index}"
        image: dict[str, Any] | None = row[self._images]
        if image is None or not (image["bytes"] or image["path"]):
            raise DataError(f"{where} is empty; {_EMPTY}")
        check_header(io.BytesIO(image["bytes"]) if image["bytes"] else Path(image["path"]), where)
        return where


def _number_of_classes(split: SavedSplit, column: str, classes: int | None) -> int:
    """Check the labels of a split, which are the numbers from 0 to `classes` - 1; return how many classes there are."""
    where = f"{split.where}, column {column}"
    stored = _stored(split, column)
    if stored.null_count:
        row = stored.is_null().index(True).as_py()
        raise DataError(f"{where}: row {row} has no label (of {stored.null_count} without one); remove them")
    labels = stored.to_numpy()
    if labels.dtype.kind not in "iu":
        raise DataError(
            f"{where}: labels of type {stored.type}; expected whole numbers: encode the column as datasets.ClassLabel "
            f"before saving (class_encode_column)"
        )
    if not len(labels):
        raise DataError(f"{where}: no rows; expected some")
    declared = getattr(split.rows.features[column], "num_classes", None)
    if classes is not None:
        expected = f"the split for training has 0 to {classes - 1}"
    elif declared is not None:
        classes, expected = int(declared), f"the column declares 0 to {declared - 1}"
    else:
        present = np.unique(labels[labels >= 0])
        gaps = np.flatnonzero(present != np.arange(len(present)))
        classes = int(gaps[0]) if len(gaps) else len(present)
        expected = (
            f"no row has {classes}; expected 0, 1, 2, ... without gaps, or a column of datasets.ClassLabel, which says "
            f"how many classes there are"
        )
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        label = labels[wrong[0]]
        if label < 0:
            expected = "labels are numbers from 0 on; a split that is published without labels has -1 in all rows"
        raise DataError(f"{where}: row {wrong[0]} has the label {label}, but {expected}")
    return classes


def _stored(split: SavedSplit, column: str) -> Any:
    """The values of a column as Arrow stores them: at once, where going through a Dataset takes a call for each row."""
    return split.rows.with_format("arrow").select_columns([column])[:].column(column)


class SavedBlocks(Dataset[tuple[Tensor, Tensor]]):
    """Blocks of tokens of a split: (inputs, targets) of each row of `input_ids`, all of one length."""

    def __init__(self, split: SavedSplit, *, vocabulary: int) -> None:
        _column(split, (_TOKENS,))
        self._split = split.rows
        self._where = f"{split.where}, column {_TOKENS}"
        self._vocabulary = vocabulary
        if not len(self._split):
            raise DataError(f"{self._where}: no rows; expected some")
        self.length = len(self._tokens(0))
        if self.length < 2:
            raise DataError(f"{self._where}: rows of {self.length} tokens; expected blocks of two or more")

    def __len__(self) -> int:
        return len(self._split)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = self._tokens(index)
        if len(tokens) != self.length:
            raise DataError(
                f"{self._where}: row {index} has {len(tokens)} tokens and row 0 has {self.length}; join the texts and "
                f"cut them into blocks of one length before saving, as run_clm.py does"
            )
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < self._vocabulary:
            raise DataError(f"{self._where}: row {index} has a token that is not in a vocabulary of {self._vocabulary}")
        return tokens[:-1], tokens[1:]

    def _tokens(self, index: int) -> Tensor:
        row = np.asarray(self._split[int(index)][_TOKENS])
        if row.ndim != 1 or (len(row) and row.dtype.kind not in "iu"):
            raise DataError(
                f"{self._where}: row {index} is no list of whole numbers; expected the tokens of a block, which a "
                f"tokenizer makes"
            )
        return torch.from_numpy(row.astype(np.int64))
