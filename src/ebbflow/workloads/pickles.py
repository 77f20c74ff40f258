"""Reading pickles from outside without running what they contain.

A pickle is a program, and numpy's own array reconstruction is code too. This reader knows containers, numbers, text and
bytes; where the pickle names one of the few numpy functions that arrays are stored with, a stand-in of ours notes the
arguments, and the array is made afterwards from checked bytes. Every other name is refused before anything is called.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ebbflow.errors import DataError

__all__ = ["PickledBytes", "load_pickle"]


class _Type:
    """A numpy type: its code counts; its state (byte order, alignment) means nothing for single bytes."""

    __slots__ = ("code",)

    def __init__(self, code: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        pass


class PickledBytes:
    """An array of bytes as the pickle described it; nothing of it is trusted before `array`."""

    __slots__ = ("order", "raw", "shape", "type")

    def __init__(self) -> None:
        self.shape: Any = None
        self.type: Any = None
        self.order: Any = "C"
        self.raw: Any = None

    def __setstate__(self, state: Any) -> None:
        _version, self.shape, self.type, fortran, self.raw = state
        self.order = "F" if fortran else "C"

    def array(self) -> NDArray[np.uint8]:
        """The array, when it is one of unsigned bytes and as long as its shape says."""
        shape = self.shape
        if not (isinstance(shape, tuple) and all(isinstance(side, int) and side >= 0 for side in shape)):
            raise DataError("an array without a proper shape")
        code = self.type.code if isinstance(self.type, _Type) else self.type
        if code not in ("u1", b"u1"):
            raise DataError(f"an array of type {code!r}, expected unsigned bytes (u1)")
        if self.order not in ("C", "F") or not isinstance(self.raw, (bytes, bytearray)):
            raise DataError("an array without bytes")
        flat = np.frombuffer(self.raw, dtype=np.uint8)
        if flat.size != int(np.prod(shape, dtype=object)):
            raise DataError(f"an array of shape {shape} with {flat.size} bytes")
        return flat.reshape(shape, order=self.order)


class _Restricted(pickle.Unpickler):
    """Looks every name up in a table. Its stand-ins are bound methods, which a pickle cannot alter."""

    def find_class(self, module: str, name: str, /) -> Any:
        table: dict[tuple[str, str], Any] = {
            ("numpy", "ndarray"): "ndarray",  # only ever an argument of reconstruct
            ("numpy", "dtype"): self._dtype,
            ("_codecs", "encode"): self._encode,
        }
        for core in ("numpy.core", "numpy._core"):  # numpy 1 and 2
            table[core + ".multiarray", "_reconstruct"] = self._reconstruct
            table[core + ".numeric", "_frombuffer"] = self._frombuffer
        found: Callable[..., Any] | str | None = table.get((module, name))
        if found is None:
            raise DataError(f"it asks for {module}.{name}, which is not part of an array; the file is not trusted")
        return found

    def _reconstruct(self, _subtype: object, _shape: object, _code: object) -> PickledBytes:
        return PickledBytes()

    def _frombuffer(self, raw: object, code: object, shape: object, order: object) -> PickledBytes:
        array = PickledBytes()
        array.raw, array.type, array.shape, array.order = raw, code, shape, order
        return array

    def _dtype(self, code: object, _align: object = None, _copy: object = None) -> _Type:
        return _Type(code)

    def _encode(self, text: object, encoding: object) -> bytes:
        if not (isinstance(text, str) and encoding == "latin1"):
            raise DataError("it stores bytes in an unusual way; the file is not trusted")
        return text.encode("latin1")


def load_pickle(path: Path) -> Any:
    """The content of a pickle made of containers, numbers, text and byte arrays (as `PickledBytes`).

    Texts of Python 2 come as bytes. Anything else in the file is a DataError, and none of it has been executed.
    """
    try:
        with path.open("rb") as file:
            return _Restricted(file, encoding="bytes").load()
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    except Exception as error:  # damaged pickles raise nearly anything: EOFError, KeyError, ValueError, TypeError, ...
        raise DataError(
            f"{path}: not a readable pickle ({type(error).__name__}: {error}); get the file again"
        ) from None
