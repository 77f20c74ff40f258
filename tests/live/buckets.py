"""A stand-in for a bucket: a file system of fsspec that stores in a local folder and may stop answering."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

BUCKET = "standin://"
DOWN = "STANDIN_BUCKET_DOWN"
"""Names a file; the bucket does not answer while it is there."""


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
