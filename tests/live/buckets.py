"""A stand-in for a bucket: a file system of fsspec that stores in a local folder and may stop answering."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

BUCKET = "standin://"
DOWN = "STANDIN_BUCKET_DOWN"
"""Names a file; the bucket refuses connections while it is there."""
HANGS = "STANDIN_BUCKET_HANGS"
"""Names a file; while it is there, the bucket keeps whoever asks waiting."""


class StandInBucket(DirFileSystem):
    """As with a bucket: no renaming of folders, no locks, errors of its own kind, and folders need not be made."""

    protocol = "standin"

    def __init__(self, **options: Any) -> None:
        super().__init__(path="/", fs=LocalFileSystem(auto_mkdir=True), **options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix(BUCKET).rstrip("/")

    def _join(self, path: Any) -> Any:
        if Path(os.environ.get(DOWN, "/no/such/file")).exists():
            raise ConnectionError("the bucket does not answer")
        while Path(os.environ.get(HANGS, "/no/such/file")).exists():
            time.sleep(0.01)
        return super()._join(self._strip_protocol(path) if isinstance(path, str) else path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Folders are part of names."""
        self._join(path)


fsspec.register_implementation("standin", StandInBucket, clobber=True)


@contextmanager
def bucket_down() -> Iterator[None]:
    """Let the bucket not answer."""
    os.environ[DOWN] = "/"
    try:
        yield
    finally:
        del os.environ[DOWN]


@contextmanager
def bucket_hangs(folder: Path) -> Iterator[None]:
    """Let the bucket keep everybody waiting who asks in the meantime."""
    switch = folder / "hangs"
    os.environ[HANGS] = str(switch)
    switch.touch()
    try:
        yield
    finally:
        switch.unlink()
        del os.environ[HANGS]
