"""`Columns`: base class of dataclasses that hold a table as one array per column."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

__all__ = ["Columns"]


class Columns:
    """Fields of a subclass, a dataclass, are arrays of one entry per row, tables of the same rows, or single values."""

    def take(self, rows: npt.NDArray[np.int64] | slice) -> Self:
        """The rows with these numbers; single values stay as they are."""
        changed: dict[str, Any] = {}
        for name, value in self._items():
            if isinstance(value, np.ndarray):
                changed[name] = value[rows]
            elif isinstance(value, Columns):
                changed[name] = value.take(rows)
        return dataclasses.replace(self, **changed)  # type: ignore[type-var]

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The rows of all tables, which have no single values, one after another."""
        columns = {name: [getattr(part, name) for part in parts] for name, _ in parts[0]._items()}
        return cls(
            **{
                name: type(values[0]).joined(values) if isinstance(values[0], Columns) else np.concatenate(values)
                for name, values in columns.items()
            }
        )

    def _items(self) -> list[tuple[str, Any]]:
        return [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]  # type: ignore[arg-type]
