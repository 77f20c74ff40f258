"""A disk cache of arrays that take long to make: the first process makes an array, all others map its file into memory.

    with disk_cached_in(folder):
        pixels = disk_cached("jpeg", [blob, offsets], lambda: decode_jpegs(blob, offsets))

Outside of `disk_cached_in`, only arrays with a folder of their own are cached. If several processes ask for the same
array at the same time, one of them makes it and the others wait.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ebbflow.core.files import hold_lock, write_whole

__all__ = ["disk_cached", "disk_cached_in"]

_FOLDER: ContextVar[Path | None] = ContextVar("disk_cache_folder", default=None)


@contextmanager
def disk_cached_in(folder: Path) -> Iterator[None]:
    """Cache arrays in this folder inside the `with` block; the folder is created with the first array."""
    before = _FOLDER.set(folder)
    try:
        yield
    finally:
        _FOLDER.reset(before)


def disk_cached(
    name: str, sources: Sequence[NDArray[Any]], make: Callable[[], NDArray[Any]], *, folder: Path | None = None
) -> NDArray[Any]:
    """Return the array that `make` makes from the sources, from the cache if it is there.

    `folder` is where to cache it outside of `disk_cached_in`, if at all.

    The file is named after the content of the sources, so it is never out of date if `make` uses nothing else. If it
    reads other files, the sources have to contain what shows that these have changed.

    The returned array may be changed: neither the file nor the arrays of other processes change with it. If the folder
    cannot be written, the array is made without the cache.
    """
    folder = _FOLDER.get() or folder
    if folder is None:
        return make()
    digest = hashlib.sha256()
    for source in sources:
        digest.update(np.ascontiguousarray(source).data)
    path = folder / f"{name}-{digest.hexdigest()[:16]}.npy"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with hold_lock(path.with_suffix(".lock")):
            if (found := _map_file(path)) is None:
                write_whole(path, _file_content(make()))
                found = _map_file(path)
    except OSError:  # read-only, or full
        return make()
    return make() if found is None else found


def _map_file(path: Path) -> NDArray[Any] | None:
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError, EOFError):  # not there, or damaged
        return None
    return array


def _file_content(array: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()
