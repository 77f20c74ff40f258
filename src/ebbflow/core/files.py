"""Reading text files with clear errors, writing files completely or not at all, and locks between processes."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from ebbflow.errors import ConfigError, InputError, OutputError

__all__ = ["hold_lock", "read_text", "remove_leftovers", "unpacked", "write_whole"]

_GZIP = b"\x1f\x8b"
_MOST_UNPACKED = 256 * 2**20
"""Largest size of an unpacked gzip file, in bytes: a gzip file of 600 kB may unpack to more than fits into memory."""


def read_text(path: Path, *, error: type[InputError]) -> str:
    """The text of a file, which may be compressed with gzip. Every failure is an `error` that names the file."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise error(f"{path}: no such file") from None
    except IsADirectoryError:
        raise error(f"{path}: is a folder; give a file in it") from None
    except OSError as problem:
        raise error(f"{path}: cannot be read: {problem.strerror}") from None
    data = unpacked(data, path, error=error)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        line = data[: problem.start].count(b"\n") + 1
        raise error(f"{path}:{line}: is a binary file, not text (byte {problem.start})") from None
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise error(f"{path}:{line}: is a binary file, not text (a NUL character)")
    if not text.strip():
        raise error(f"{path}: is empty")
    return text


def unpacked(data: bytes, path: Path, *, error: type[InputError]) -> bytes:
    """The bytes of a file, unpacked if they are gzip; damaged or too large ones are an `error` that names the file."""
    if not data.startswith(_GZIP):
        return data
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            data = file.read(_MOST_UNPACKED + 1)
    except (EOFError, OSError, zlib.error) as problem:
        raise error(f"{path}: the gzip data is damaged or cut short ({problem}); fetch the file again") from None
    if len(data) > _MOST_UNPACKED:
        raise error(
            f"{path}: unpacks to more than {_MOST_UNPACKED >> 20} MB; expected a smaller file. If it is the right "
            f"one, unpack it first (gunzip)"
        )
    return data


def write_whole(path: Path, data: bytes) -> None:
    """Write a file completely, or leave what was there before.

    A process that is killed while it writes leaves a file with another name beside it (`remove_leftovers`).
    """
    temporary: Path | None = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())  # a temporary file is private; a result is not
        temporary.replace(path)
    except OSError as problem:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink()
        raise OutputError(f"{path}: cannot be written: {problem.strerror}; nothing was changed") from None


def remove_leftovers(path: Path) -> None:
    """Remove files that killed processes left beside `path` in `write_whole`. Nobody may be writing it meanwhile."""
    for left in path.parent.glob(f".{path.name}.*"):
        with contextlib.suppress(OSError):  # it takes up space, but does no other harm
            left.unlink()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextmanager
def hold_lock(path: Path, *, busy: str | None = None) -> Iterator[None]:
    """Hold an exclusive lock on a file, for example `folder / ".lock"`, which is created together with its folder.

    If another process holds the lock, a ConfigError with the text `busy` is raised at once; without `busy` this waits.
    The operating system releases the lock when the process ends, also by kill -9; the file stays. On a file system
    without locks, such as a mounted bucket, nothing is locked. Raises OutputError if the file cannot be created.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as problem:
        raise OutputError(f"{path.parent}: cannot be written: {problem.strerror}; choose another folder") from None
    try:
        lock = FileLock(path, fallback_to_soft=False)
    except TypeError:  # filelock before version 4 has no such option
        lock = FileLock(path)
    held = True
    try:
        lock.acquire(timeout=-1 if busy is None else 0)
    except Timeout:
        raise ConfigError(busy) from None
    except (OSError, NotImplementedError):  # the file system has no locks
        held = False
    try:
        yield
    finally:
        if held:
            lock.release()
