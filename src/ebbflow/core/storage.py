"""Folders on a disk or in a bucket (s3://, gs://, any URL that fsspec knows): listing, reading, writing, removing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ebbflow.core.files import write_whole
from ebbflow.errors import ConfigError, StorageUnreachable

__all__ = ["COMPLETE", "Storage", "short_reason"]

COMPLETE = "ebbflow.json"
"""Name of the file that is written last into the folder of a checkpoint: without it, there is no checkpoint."""


def short_reason(error: BaseException) -> str:
    """What went wrong, in one line without the names of files.

    >>> short_reason(OSError(28, "No space left on device", "/data/x")), short_reason(KeyError("x"))
    ('No space left on device', "KeyError: 'x'")
    """
    text = getattr(error, "strerror", None)
    return text or f"{type(error).__name__}: {error}".partition("\n")[0][:200]


class Storage:
    """One folder, by its path or URL. What is not there is a FileNotFoundError, other failures a StorageUnreachable."""

    def __init__(self, location: str | Path) -> None:
        from fsspec.core import url_to_fs  # a tenth of a second, which most commands need not pay
        from fsspec.implementations.local import LocalFileSystem

        self.location = str(location)
        try:
            self.files, root = url_to_fs(self.location)
        except ImportError as error:
            raise ConfigError(f"{self.location}: {error} (pip install), or give a folder") from None
        except ValueError as error:
            raise ConfigError(f"{self.location}: {error}; expected a folder, or a URL such as s3://bucket/x") from None
        self.root = root.rstrip("/")
        self.local = isinstance(self.files, LocalFileSystem)
        """Whether it is a folder of this machine, or one that is mounted here."""

    def path(self, *names: str) -> str:
        """The path of something in the folder, as `files` takes it."""
        return "/".join((self.root, *names))

    def names(self) -> list[str]:
        """What is in the folder; nothing if there is no folder."""
        with self._explained("be listed"):
            self.files.invalidate_cache()  # others write here, too
            try:
                found = self.files.ls(self.root, detail=False)
            except FileNotFoundError:
                return []
            return [path.rstrip("/").rpartition("/")[2] for path in found]

    def exists(self, *names: str) -> bool:
        """Whether something is there."""
        with self._explained("be read"):
            return bool(self.files.exists(self.path(*names)))

    def size(self, *names: str) -> int:
        """The size of a file in bytes."""
        with self._explained("be read"):
            return int(self.files.size(self.path(*names)))

    def read(self, *names: str) -> bytes:
        """The content of a file."""
        with self._explained("be read"):
            return bytes(self.files.cat_file(self.path(*names)))

    def write(self, data: bytes, *names: str) -> None:
        """Write a file as a whole, or not at all."""
        path = self.path(*names)
        with self._explained("be written"):
            if self.local:
                write_whole(Path(path), data)
            else:  # an object of a bucket is there when all of it is there
                self.files.pipe_file(path, data)

    def remove(self, *names: str) -> None:
        """Remove a file, or a folder with everything in it."""
        with self._explained("be removed"):
            self.files.rm(self.path(*names), recursive=True)

    @contextmanager
    def _explained(self, what: str) -> Iterator[Any]:
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:  # every kind of storage raises its own kinds
            raise StorageUnreachable(f"{self.location}: cannot {what}: {short_reason(error)}") from error
