"""Dask arrays: checked without computing them, and predicted block by block where the blocks are.

The blocks of X are never gathered in one place; neither are the rows of y when the classes are determined.
"""
# ruff: noqa: N803, N806, because X is scikit-learn's name for it

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.utils.validation import validate_data

from ebbflow.errors import DataError

__all__ = ["Blocks", "accuracy", "as_blocks", "check_blocks", "distinct", "is_dask", "map_rows", "r2"]


def is_dask(data: Any) -> bool:
    """Whether this is a Dask collection, an array or a frame, that is not computed yet."""
    return hasattr(data, "__dask_graph__") and data.__dask_graph__() is not None


def as_blocks(data: Any, name: str) -> Any:
    """A Dask array with whole rows in blocks of known size; the rows of a frame are counted for that."""
    if hasattr(data, "to_dask_array"):
        data = data.to_dask_array(lengths=True)
    if not hasattr(data, "chunks"):
        raise DataError(f"{name} is a {type(data).__name__} of Dask; expected an array or a frame")
    if data.dtype.kind not in "biuf" and name == "X":
        raise DataError(f"{name} has the type {data.dtype}; expected numbers: encode what is not a number first")
    if any(np.isnan(size) for size in data.chunks[0]):
        raise DataError(f"the blocks of {name} have an unknown number of rows; call {name}.compute_chunk_sizes() first")
    return data.rechunk(dict.fromkeys(range(1, data.ndim), -1))


def check_blocks(net: Any, X: Any, y: Any = None, *, reset: bool) -> tuple[Any, Any]:
    """X and y as arrays whose blocks have the same rows; sets or compares `n_features_in_`, `feature_names_in_`."""
    named = X._meta if hasattr(X, "columns") else None  # the frame without its rows
    X = as_blocks(X, "X")
    if X.ndim < 2:
        raise DataError(f"Expected 2D array, got 1D array instead: X has the shape {X.shape}; reshape it to one column")
    if not len(X):
        raise DataError("X has no rows; expected at least one")
    validate_data(net, X if named is None else named, reset=reset, skip_check_array=True)
    if y is None:
        return X, None
    y = as_blocks(y, "y") if is_dask(y) else _like(X, y)
    if len(y) != len(X):
        raise DataError(f"X has {len(X)} rows and y has {len(y)}; expected the same number")
    return X, y if y.chunks[0] == X.chunks[0] else y.rechunk({0: X.chunks[0]})


def _like(X: Any, y: Any) -> Any:
    import dask.array as da

    return da.from_array(np.asarray(y), chunks=(X.chunks[0], *np.shape(y)[1:]))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Blocks:
    """Inputs and targets as Dask arrays with the same rows in each block: the data of a fit on a cluster."""

    X: Any
    y: Any

    def __len__(self) -> int:
        return len(self.X)

    @property
    def text(self) -> str:
        """Size of X, for a message."""
        return f"{self.X.nbytes / 2**20:,.0f} MiB in {len(self.X.chunks[0])} blocks"


def distinct(y: Any) -> npt.NDArray[Any]:
    """The different values of y, found block by block."""
    import dask.array as da

    return np.asarray(da.unique(y.reshape(-1)).compute())


def map_rows(function: Callable[[Any, Any], Any], net: Any, X: Any, *, dtype: Any, columns: int | None) -> Any:
    """`function(net, block)` for every block of X, computed where it is: a Dask array of one value or row per
    sample."""
    from dask.delayed import delayed

    chunks = (X.chunks[0],) if columns is None else (X.chunks[0], (columns,))
    return X.map_blocks(
        _on_block,
        function,
        delayed(net),
        dtype=dtype,
        chunks=chunks,
        drop_axis=[*range(len(chunks), X.ndim)],
        meta=np.empty((0,) * len(chunks), dtype),
    )


def _on_block(block: npt.NDArray[Any], function: Callable[[Any, Any], Any], net: Any) -> Any:
    return function(net, block)


def accuracy(truth: Any, predicted: Any) -> float:
    """Fraction of equal labels."""
    return float((truth.reshape(-1) == predicted).mean().compute())


def r2(truth: Any, predicted: Any) -> float:
    """Coefficient of determination; for several targets their mean, as in scikit-learn."""
    truth = truth.reshape(predicted.shape).astype(np.float64)
    left = ((truth - predicted) ** 2).sum(axis=0)
    spread = ((truth - truth.mean(axis=0)) ** 2).sum(axis=0)
    return float((1 - left / spread).mean().compute())
