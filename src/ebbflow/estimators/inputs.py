"""Inputs of `fit` and `predict`: checked as scikit-learn does it, and fetched by sample number."""
# ruff: noqa: N803, because X is scikit-learn's name for it

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.utils.validation import validate_data
from skorch.dataset import Dataset as ArrayDataset
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from ebbflow.errors import DataError

__all__ = ["DatasetRows", "Encoded", "Slices", "as_tensor", "check_arrays", "check_dataset", "encode", "targets_of"]


def _plain(data: Any) -> Any:
    """A tensor of torch as an array; anything else as it is."""
    return data.detach().cpu().numpy() if isinstance(data, torch.Tensor) else data


def _check_frame(frame: Any) -> None:
    """Refuse a data frame with columns that are not numeric, and name them."""
    kinds = getattr(frame, "dtypes", None)
    if kinds is None or not hasattr(frame, "columns"):
        return
    text = [f"{name!r} ({kind})" for name, kind in zip(frame.columns, kinds, strict=True) if _not_numeric(kind)]
    if text:
        raise DataError(
            f"the columns {', '.join(text[:5])}{' and others' if len(text) > 5 else ''} do not hold numbers; encode "
            f"them first, for example with sklearn.preprocessing.OneHotEncoder in a Pipeline, or leave them out"
        )


def _not_numeric(kind: Any) -> bool:
    return getattr(kind, "kind", "O") not in "biuf"


def check_arrays(net: Any, X: Any, y: Any = None, *, reset: bool, dtype: str | None, **checks: Any) -> Any:
    """X, or X and y where y is not None, as arrays of numbers of this type.

    Sets `n_features_in_` and `feature_names_in_` (`reset`) or compares with them. Samples may have any shape.
    """
    _check_frame(X)
    given = {} if y is None else {"y": _plain(y)}
    return validate_data(
        net, _plain(X), **given, reset=reset, dtype=dtype or "numeric", allow_nd=True, **checks
    )  # fmt: skip


def check_dataset(net: Any, data: Any, y: Any, *, reset: bool) -> int:
    """Refuse a Dataset that cannot be trained on; returns how many numbers one sample has."""
    if y is not None:
        raise DataError("X is a Dataset, which brings its own targets, but y is given, too; leave y out")
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise DataError(
            f"{type(data).__name__} has no length or no samples by number; using every sample once per epoch takes "
            f"a map-style Dataset, with __len__ and __getitem__"
        )
    if not len(data):
        raise DataError("the Dataset has no samples; expected at least one")
    sample = data[0]
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        raise DataError(f"a sample of {type(data).__name__} is a {type(sample).__name__}; expected a pair (x, y)")
    shape = np.shape(_plain(sample[0]))
    if reset:
        net.n_features_in_ = shape[0] if shape else 1
    return math.prod(shape)


def targets_of(data: Any) -> npt.NDArray[Any]:
    """All targets of a Dataset: taken as a whole if the Dataset stores them so, else sample by sample."""
    if isinstance(data, Subset):
        return np.asarray(targets_of(data.dataset)[np.asarray(data.indices)])
    if isinstance(data, TensorDataset):
        return np.asarray(data.tensors[-1].numpy())
    for name in ("targets", "y"):
        if getattr(data, name, None) is not None:
            return np.asarray(_plain(getattr(data, name)))
    return np.asarray([_plain(data[i][1]) for i in range(len(data))])


def encode(y: Any, classes: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The labels as positions in the sorted classes; a label that is not among them is a DataError."""
    labels = np.asarray(_plain(y))
    codes = np.minimum(np.searchsorted(classes, labels), len(classes) - 1)
    if not np.array_equal(classes[codes], labels):
        unknown = sorted({str(label) for label in np.atleast_1d(labels)[np.atleast_1d(classes[codes] != labels)]})
        raise DataError(
            f"y has labels that the classes do not have: {', '.join(unknown[:5])}; in the first partial_fit name all "
            f"classes (classes=[...])"
        )
    return np.asarray(codes, dtype=np.int64)


class Encoded(Dataset[Any]):
    """A Dataset whose labels are the positions in the sorted classes."""

    def __init__(self, data: Any, classes: npt.NDArray[Any]) -> None:
        self.data = data
        self.classes = classes

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        x, y = self.data[index]
        return x, int(encode(y, self.classes))


def as_tensor(data: Any) -> torch.Tensor:
    """An array as a tensor, in the same memory if that is writable."""
    if isinstance(data, torch.Tensor):
        return data
    array = np.asarray(data)
    return torch.from_numpy(array if array.flags.writeable and all(s >= 0 for s in array.strides) else array.copy())


def _unwrapped(data: Any) -> tuple[Any, npt.NDArray[np.int64] | None]:
    """The Dataset inside of Subsets, and the sample numbers that they select; None: all."""
    numbers: npt.NDArray[np.int64] | None = None
    while isinstance(data, Subset):  # a validation split, perhaps of a split
        inner = np.asarray(data.indices, dtype=np.int64)
        numbers = inner if numbers is None else inner[numbers]
        data = data.dataset
    return data, numbers


def _together(data: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Inputs and targets as two tensors, if that is what the Dataset holds."""
    if type(data) is TensorDataset and len(data.tensors) == 2:
        return data.tensors[0], data.tensors[1]
    if type(data) is ArrayDataset and isinstance(data.X, torch.Tensor):
        # Without targets skorch returns zeros, which are not used.
        targets = data.y if data.y is not None else torch.zeros(1).expand(len(data.X))
        return (data.X, targets) if isinstance(targets, torch.Tensor) else None
    return None


class DatasetRows:
    """The samples of a Dataset, fetched by their numbers: all at once where they are in tensors. Can be pickled."""

    def __init__(self, data: Any, device: str | torch.device) -> None:
        self.data = data
        self.device = device
        self._samples, self._numbers = _unwrapped(data)
        self._tensors = _together(self._samples)

    def __len__(self) -> int:
        return len(self.data)

    def fetch(self, indices: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of these samples on the device, in this order."""
        chosen = indices if self._numbers is None else self._numbers[indices]
        if self._tensors is not None:
            rows = torch.from_numpy(chosen)
            x, y = (tensor[rows] for tensor in self._tensors)
        else:
            x, y = default_collate([self._samples[int(i)] for i in chosen])
        return x.to(self.device), y.to(self.device)

    def batch(self, indices: Any, *, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """As `fetch`, for the training loop."""
        return self.fetch(indices)

    def to(self, device: torch.device) -> DatasetRows:
        """The same samples on another device."""
        return DatasetRows(self.data, device)


class Slices:
    """Batches of consecutive samples, cut out of tensors; a DataLoader would collect them one by one.

    `Slices.can(data)` says whether the samples of a Dataset are in tensors.
    """

    def __init__(self, data: Any, size: int) -> None:
        self._fetch = DatasetRows(data, "cpu").fetch
        self._samples = len(data)
        self._size = size

    @staticmethod
    def can(data: Any) -> bool:
        """Whether the samples are in tensors."""
        return _together(_unwrapped(data)[0]) is not None

    def __len__(self) -> int:
        return -(-self._samples // self._size)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for start in range(0, self._samples, self._size):
            yield self._fetch(np.arange(start, min(start + self._size, self._samples)))
