"""Images in tar files (shards), in the layout of webdataset, which large file systems prefer to single files.

    DIR/NAME-train-000000.tar, DIR/NAME-train-000001.tar, ...   or train-000000.tar; numbered from 0 without gaps
    DIR/NAME-val-000000.tar, ...                                or NAME-validation-, val-, validation-

Each sample is two members of a shard with the same key: KEY.jpg (or another image) and KEY.cls, the number of its class
as text. Keys are unique in a shard. Other members with the key of a sample, such as KEY.json, are not used.

The shards are read once to index their members, and the index is cached; afterwards, a sample is read by its position
in the file. So samples can be read in any order, as a sampler that uses each of them exactly once per epoch needs it.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from ebbflow.errors import DataError
from ebbflow.workloads.disk_cache import disk_cached
from ebbflow.workloads.image_files import IMAGE_SUFFIXES, check_all, check_header, decode_image, transformed
from ebbflow.workloads.image_folders import Transform

__all__ = ["ImageShards", "ShardSample", "find_shards", "index_shard"]

_BLOCK = 512  # the unit of tar files
_SHARD = re.compile(r"(?P<stem>(?:.+-)?(?P<part>train|val|validation)-)(?P<number>\d+)\.tar")
_LIKE_A_SHARD = re.compile(
    r"(?:.*[^a-z])?(?:train|training|val|valid|validation)[-_.]?\d.*"
    r"\.(?:tar|tgz|tar\.(?:gz|bz2|xz|zst|lz4|part|tmp|incomplete|crdownload))",
    re.IGNORECASE,
)
"""Numbered archives of training or validation, whatever stands between the parts of their names."""
_AGAIN = "get or write the shard again"


class ShardSample(NamedTuple):
    """Where the image of a sample is in its shard, and the class."""

    offset: int
    size: int
    label: int
    member: str


def find_shards(folder: Path) -> dict[str, list[Path]]:
    """Return the shards of a folder in the order of their numbers, under "train" and "val".

    A gap in the numbers raises DataError, and so does a shard of another name, whose samples would be left out.
    """
    try:
        names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror or error})") from None
    found = [match for name in names if (match := _SHARD.fullmatch(name))]
    others = [name for name in names if _LIKE_A_SHARD.fullmatch(name) and not _SHARD.fullmatch(name)]
    if others:
        shown = ", ".join(others[:5]) + (", ..." if len(others) > 5 else "")
        raise DataError(
            f"{folder}: {len(others)} file(s) that look like shards but would not be read: {shown}; expected names "
            f"such as train-000000.tar or NAME-val-000000.tar, not compressed: rename or unpack them, or move them "
            f"elsewhere"
        )
    shards: dict[str, list[Path]] = {"train": [], "val": []}
    stems: dict[str, str] = {}
    for match in sorted(found, key=lambda match: (match["stem"], int(match["number"]))):
        stem, number = match["stem"], match["number"]
        part = "train" if match["part"] == "train" else "val"
        if stems.setdefault(part, stem) != stem:
            raise DataError(f"{folder}: shards of two data sets, {stems[part]}* and {stem}*; expected one per folder")
        if int(number) != len(shards[part]):
            missing = f"{stem}{len(shards[part]):0{len(number)}}.tar"
            raise DataError(f"{folder}: {match[0]} is there, but {missing} is not; shards are numbered from 0")
        shards[part].append(folder / match[0])
    return shards


def index_shard(shard: Path) -> Iterator[ShardSample]:
    """Yield the samples of a shard in the order of their keys' first members.

    Raises DataError, with the shard and the member, for a shard that was cut short or is damaged, for a key without
    image or label, for members of the same name, for an empty image, and for a label that is not a number.
    """
    samples: dict[str, dict[str, tarfile.TarInfo]] = {}
    labels: dict[str, int] = {}
    last, end = "its beginning", 0
    try:
        with shard.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            size = shard.stat().st_size
            for member in tar:
                last, end = member.name, member.offset_data + -(-member.size // _BLOCK) * _BLOCK
                if end > size:
                    raise DataError(f"{shard}: cut short in {last}, which ends at byte {end} of {size}; {_AGAIN}")
                folder, _, name = member.name.rpartition("/")
                if member.isdir() or name.startswith("."):
                    continue
                if not member.isreg() or member.issparse():
                    raise DataError(f"{shard}: {member.name} is a link or a special file; expected plain files")
                stem, _, suffix = name.partition(".")
                key, kind = f"{folder}/{stem}", suffix.lower()
                kind = "image" if f".{kind}" in IMAGE_SUFFIXES else kind
                members = samples.setdefault(key, {})
                if kind in members:
                    raise DataError(f"{shard}: {member.name} repeats the key of {members[kind].name}; keys are unique")
                members[kind] = member
                if kind == "cls":
                    file.seek(member.offset_data)
                    labels[key] = _label(file.read(min(member.size, 100)), shard, member.name)
            # A reader of tar files stops at a damaged header as at the end; only zeros may follow the last member.
            file.seek(end)
            tail = file.read(1 << 20)
            if len(tail) < _BLOCK or tail.strip(b"\0"):
                raise DataError(
                    f"{shard}: no end of the archive after {last} (byte {end}); the shard was cut short, is damaged, "
                    f"or was joined from several; {_AGAIN}"
                )
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{shard}: cannot be read ({error.strerror or error})") from None
    except Exception as error:  # of tarfile, or of Python, for numbers and names in a damaged header
        raise DataError(f"{shard}: cut short, damaged, or not a tar file, after {last} ({error}); {_AGAIN}") from None
    if not samples:
        raise DataError(f"{shard}: no samples; expected members KEY.jpg and KEY.cls")
    for key, members in samples.items():
        image = members.get("image")
        if image is None or key not in labels:
            lacks = "image, such as KEY.jpg" if image is None else "label, KEY.cls"
            raise DataError(f"{shard}: {next(iter(members.values())).name} is there, but its key has no {lacks}")
        if image.size == 0:
            raise DataError(f"{shard}: {image.name} is empty; {_AGAIN}")
        yield ShardSample(image.offset_data, image.size, labels[key], image.name)


def _label(text: bytes, shard: Path, member: str) -> int:
    number = text.strip()
    if not (number.isdigit() and len(number) < 10):
        raise DataError(f"{shard}: {member} is {text[:20]!r}; expected the number of a class, such as 7")
    return int(number)


class ImageShards(Dataset[tuple[Tensor, int]]):
    """The images of shards, each as its transform and the number of its class.

    Errors in the shards (see `index_shard`) and labels that are not classes raise DataError at once, damaged images
    when they are read, and those with a damaged header in `check_headers`; every error names the shard and the member.
    """

    def __init__(self, shards: Sequence[Path], transform: Transform, *, classes: int | None = None) -> None:
        """`classes` is the number of classes; by default they are the labels, which must be 0, 1, 2, ... without gaps.

        The index is cached beside the shards, unless there is a disk cache of the run, or the folder is read-only.
        """
        self.shards = list(shards)
        self.transform = transform
        try:
            stats = [(shard.resolve(), shard.stat()) for shard in self.shards]
        except OSError as error:
            raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from None
        # The index depends on files that are not read for its key. A copy may keep size and time of another file, and a
        # cache may be that of several folders; but a copy has a number of its own, or was changed (ctime) later.
        state = "\n".join(
            f"{path} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}" for path, stat in stats
        )
        self._index = disk_cached(
            "shards", [np.frombuffer(os.fsencode(state), np.uint8)], self._make_index, folder=self.shards[0].parent
        )
        present = np.unique(self._index["label"])
        if classes is None:
            gaps = np.flatnonzero(present != np.arange(len(present)))
            classes = int(gaps[0]) if len(gaps) else len(present)
            expected = f"no sample has {classes}; expected labels 0, 1, 2, ... without gaps"
        else:
            expected = f"the training samples have 0 to {classes - 1}"
        wrong = np.flatnonzero(self._index["label"] >= classes)
        if len(wrong):
            raise DataError(f"{self._where(wrong[0])}: its label is {self._index['label'][wrong[0]]}, but {expected}")
        self.classes = classes

    def _make_index(self) -> NDArray[np.void]:
        rows = [(i, *sample) for i, shard in enumerate(self.shards) for sample in index_shard(shard)]
        columns = list(zip(*rows, strict=True))
        members = np.array([os.fsencode(name) for name in columns[4]])  # which need not be UTF-8
        arrays = [*(np.array(column, dtype=np.int64) for column in columns[:4]), members]
        names = ("shard", "offset", "size", "label", "member")
        index = np.empty(len(rows), dtype=[(name, array.dtype) for name, array in zip(names, arrays, strict=True)])
        for name, array in zip(names, arrays, strict=True):
            index[name] = array
        return index

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        row = self._index[index]
        where = self._where(index)
        try:
            with self.shards[row["shard"]].open("rb") as file:
                file.seek(row["offset"])
                content = file.read(row["size"])
        except OSError as error:
            raise DataError(f"{where}: cannot be read ({error.strerror or error})") from None
        return transformed(where, self.transform, decode_image(io.BytesIO(content), where)), int(row["label"])

    def check_headers(self) -> None:
        """Read the headers of all images; those that are no images raise DataError."""

        def problem(index: int) -> str | None:
            row, where = self._index[index], self._where(index)
            try:
                with self.shards[row["shard"]].open("rb", buffering=0) as shard:
                    member = _Member(shard, int(row["offset"]), int(row["size"]))
                    check_header(io.BufferedReader(member), where)
            except OSError as error:
                return f"{where}: cannot be read ({error.strerror or error})"
            except DataError as error:
                return str(error)
            return None

        check_all(problem, len(self), "images")

    def _where(self, index: int | np.int64) -> str:
        row = self._index[index]
        return f"{self.shards[row['shard']]}: {os.fsdecode(row['member'])}"


class _Member(io.RawIOBase):
    """A member of a shard as a file, of which only what is asked for is read."""

    def __init__(self, shard: io.FileIO, offset: int, size: int) -> None:
        self._shard, self._offset, self._size = shard, offset, size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._position = (0, self._position, self._size)[whence] + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        self._shard.seek(self._offset + self._position)
        part = self._shard.read(max(0, min(len(buffer), self._size - self._position)))
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)
