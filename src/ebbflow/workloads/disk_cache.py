"""Made once, used by many: an array that takes long to make is kept in a folder and mapped into memory from there.

    with kept_in(folder):
        pixels = kept("jpeg", [blob, offsets], lambda: decode_jpegs(blob, offsets))

Outside of `disk_cached_in` nothing is kept. Processes that ask for the same array at the same time wait for the first
one to make it, and share its memory."""

from __future__ import annotations

import fcntl
import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ebbflow.core.files import write_whole

__all__ = ["kept", "disk_cached_in"]

_FOLDER: ContextVar[Path | None] = ContextVar("disk_cached_in", default=None)


@contextmanager
def disk_cached_in(folder: Path) -> Iterator[None]:
    """Keep arrays in this folder, which is made when the first one is."""
    before = _FOLDER.set(folder)
    try:
        yield
    finally:
        _FOLDER.reset(before)


def kept(name: str, sources: Sequence[NDArray[Any]], make: Callable[[], NDArray[Any]]) -> NDArray[Any]:
    """What `make` makes from the sources; the file is found by their content, so it is never out of date.

    Writing to the array changes nobody else's. Where the folder cannot be written the array is simply made.
    """
    folder = _FOLDER.get()
    if folder is None:
        return make()
    digest = hashlib.sha256()
    for source in sources:
        digest.update(np.ascontiguousarray(source).data)
    path = folder / f"{name}-{digest.hexdigest()[:16]}.npy"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (found := _mapped(path)) is None:
                write_whole(path, _bytes(make()))
                found = _mapped(path)
    except OSError:  # read-only, or full
        return make()
    return make() if found is None else found


def _mapped(path: Path) -> NDArray[Any] | None:
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError, EOFError):  # not there, or damaged
        return None
    return array


def _bytes(array: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()
