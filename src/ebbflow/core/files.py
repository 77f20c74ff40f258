"""Reading a whole text file with errors that people understand, and writing a whole file or nothing."""

from __future__ import annotations

import contextlib
import gzip
import os
import tempfile
import zlib
from pathlib import Path

from ebbflow.errors import InputError, OutputError

__all__ = ["read_text", "remove_leftovers", "write_whole"]

_GZIP = b"\x1f\x8b"


def read_text(path: Path, *, error: type[InputError]) -> str:
    """The text of a file, unpacked if it is gzip; every way in which that fails is an `error` that names the file."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise error(f"{path}: no such file") from None
    except IsADirectoryError:
        raise error(f"{path}: is a folder; give a file in it") from None
    except OSError as problem:
        raise error(f"{path}: cannot be read: {problem.strerror}") from None
    if data.startswith(_GZIP):
        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, zlib.error) as problem:
            raise error(f"{path}: the gzip data is damaged or cut short ({problem}); fetch the file again") from None
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


def write_whole(path: Path, data: bytes) -> None:
    """Write the file, or leave whatever was there: never half of it.

    A process that is killed meanwhile leaves a part beside it, under another name (`remove_leftovers`).
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
    """Remove what a kill in the middle of `write_whole` left beside the file; nobody may be writing it now."""
    for left in path.parent.glob(f".{path.name}.*"):
        with contextlib.suppress(OSError):  # it takes up space, and does no other harm
            left.unlink()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
