"""Checkpoints by `torch.distributed.checkpoint`, which several ranks write and read together, each its own shards.

    save_state("s3://bucket/job/step-100", state, group=group)     all ranks of the group call it, rank 0 coordinates
    state = load_state("s3://bucket/job/step-100", group=group)

A checkpoint is a folder on a disk or in a bucket. Its tensors are those of DCP's own format, under the names that they
have in the state (`model.fc.weight`), so that `torch.distributed.checkpoint.load` and `dcp_to_torch_save` read them
without Ebbflow. Everything else of the state is one entry, `ebbflow`. The file `ebbflow.json` is written last and has
the length and the SHA-256 of the others: a folder without it is no checkpoint.

Reading executes nothing. DCP would unpickle its index and what is not a tensor; here only DCP's own classes and plain
values are accepted.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ebbflow.core.storage import COMPLETE, Storage, short_reason
from ebbflow.errors import CheckpointError, StorageUnreachable

__all__ = ["MakeTensor", "load_state", "save_state", "whole_tensor"]

VERSION = 1
_REST = "ebbflow"
_TENSOR = "__tensor__"
_READ_AT_ONCE = 16 * 2**20

MakeTensor = Callable[[str, torch.Size, torch.dtype], torch.Tensor]
"""(name, global size, type) -> the tensor into which it is read: a whole one, or a DTensor for this rank's shard."""


def whole_tensor(name: str, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in the memory of the host, into which a whole one is read."""
    return torch.empty(size, dtype=dtype)


def save_state(folder: str | Path, state: Mapping[str, Any], *, group: dist.ProcessGroup | None = None) -> None:
    """Write a state: containers of plain values, tensors and DTensors, of which each rank writes its own shards.

    `group`: the ranks that have the state together, with a backend for CPU tensors that nobody else uses meanwhile;
    None for a state that this process has alone. Without `ebbflow.json`, which is written last, the folder is not a
    checkpoint. Raises StorageUnreachable on every rank if any of them cannot write.
    """
    storage = Storage(folder)
    tensors: dict[str, Any] = {}
    rest = _take_tensors(state, (), tensors)
    writer = FileSystemWriter(storage.root, sync_files=storage.local)
    files = _DigestedFiles(storage)
    writer.fs = files  # type: ignore[assignment]
    writer.path = storage.root  # the index names it, and is to name no path of this machine's kind
    with _translated(storage.location, "written"):
        # A tuple, since DCP would take a dictionary apart.
        save({**tensors, _REST: (rest,)}, storage_writer=writer, process_group=group, no_dist=_alone(group))
    described = _gathered(files.described, group)
    problem = None
    if group is None or dist.get_rank(group) == 0:
        all_files = {name: entry for one in described for name, entry in one.items()}
        try:
            storage.write(json.dumps({"version": VERSION, "files": all_files}, indent=1).encode(), COMPLETE)
        except StorageUnreachable as error:
            problem = error
    _raise_first(_gathered(problem, group))


def load_state(
    folder: str | Path, *, make: MakeTensor = whole_tensor, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Read what `save_state` wrote, by any number of ranks and into any sharding.

    `make`: called for each tensor of the checkpoint; by default tensors are whole and in the memory of the host. Raises
    CheckpointError on every rank if the checkpoint is damaged or not of this format, and StorageUnreachable if it
    cannot be read now. Lengths are compared everywhere and SHA-256 digests where the folder is on a disk; a bucket
    compares what it stores with digests of its own.
    """
    storage = Storage(folder)
    with _translated(storage.location, "read"):
        _raise_first(_gathered(_damage(storage, group), group))
        reader = _Reader(storage)
        entries = reader.read_metadata().state_dict_metadata
        found: dict[str, Any] = {
            name: make(name, entry.size, entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
            for name, entry in entries.items()
        }
        planner = _Planner(flatten_state_dict=False)
        load(found, storage_reader=reader, planner=planner, process_group=group, no_dist=_alone(group))
        (rest,) = planner.rest
        state = _put_tensors(rest, found)
    assert isinstance(state, dict)
    return state


def _alone(group: dist.ProcessGroup | None) -> bool:
    """Whether DCP is to work without a group; then it would warn about that every time."""
    if group is None:
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    return group is None


def _gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """What all ranks have, in their order."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


# A state is taken apart into tensors and the rest ---------------------------------------------------------------------


def _take_tensors(value: Any, path: tuple[str, ...], tensors: dict[str, Any]) -> Any:
    """Put the tensors of a state into `tensors`, by their top key and the rest of their name; return all the rest.

    Two levels are enough for DCP, which joins names by dots, and leave `dcp_to_torch_save` a dictionary per part.
    """
    if isinstance(value, torch.Tensor):
        top, below = path[0], ".".join(path[1:])
        owner, name = (tensors.setdefault(top, {}), below) if below else (tensors, top)
        while name in owner:  # the keys 0 and "0"
            name += "_"
        owner[name] = value.detach()
        return {_TENSOR: f"{top}.{name}" if below else name}
    if isinstance(value, Mapping):
        return {key: _take_tensors(one, (*path, str(key)), tensors) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_take_tensors(one, (*path, str(i)), tensors) for i, one in enumerate(value)])
    return value


def _put_tensors(rest: Any, tensors: Mapping[str, Any]) -> Any:
    if isinstance(rest, dict):
        if len(rest) == 1 and _TENSOR in rest:
            return tensors[rest[_TENSOR]]
        return {key: _put_tensors(one, tensors) for key, one in rest.items()}
    return type(rest)([_put_tensors(one, tensors) for one in rest]) if isinstance(rest, list | tuple) else rest


# Files ----------------------------------------------------------------------------------------------------------------


class _Digested:
    """A file that is being written, with the SHA-256 and the length of what was written."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.sha256 = hashlib.sha256()
        self.bytes = 0
        self.problem: Exception | None = None
        """Why it could not be written. `torch.save` would say that it is at an unexpected position."""

    def write(self, data: Any) -> Any:
        self.sha256.update(data)
        self.bytes += memoryview(data).nbytes
        try:
            return self._stream.write(data)
        except Exception as problem:
            self.problem = problem
            raise

    def tell(self) -> int:
        return self.bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _DigestedFiles(FileSystemBase):
    """The files of a storage for DCP, which writes each from its beginning to its end."""

    def __init__(self, storage: Storage) -> None:
        self._files = storage.files
        self.described: dict[str, dict[str, Any]] = {}
        """Length and SHA-256 of the files that were written, by name."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Open a file."""
        with self._files.open(str(path), mode) as stream:
            if "r" in mode:
                yield stream
                return
            digested = _Digested(stream)
            try:
                yield digested
            except Exception as error:
                raise digested.problem or error from None
        name = str(path).rpartition("/")[2]
        self.described[name] = {"bytes": digested.bytes, "sha256": digested.sha256.hexdigest()}

    def concat_path(self, path: Any, suffix: str) -> str:
        """The path of a file in a folder."""
        return f"{path}/{suffix}"

    def init_path(self, path: Any) -> str:
        """The path as it is used here."""
        return str(path)

    def rename(self, path: Any, new_path: Any) -> None:
        """Give a file another name."""
        self._files.mv(str(path), str(new_path))
        old, new = (str(one).rpartition("/")[2] for one in (path, new_path))
        self.described[new] = self.described.pop(old)

    def mkdir(self, path: Any) -> None:
        """Make a folder."""
        self._files.makedirs(str(path), exist_ok=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Any path."""
        return True

    def exists(self, path: Any) -> bool:
        """Whether a file is there."""
        return bool(self._files.exists(str(path)))

    def rm_file(self, path: Any) -> None:
        """Remove a file."""
        self._files.rm(str(path))


def _damage(storage: Storage, group: dist.ProcessGroup | None) -> BaseException | None:
    """What is wrong with a checkpoint; every rank looks at some of its files."""
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    try:
        described = json.loads(storage.read(COMPLETE))
        if described["version"] != VERSION:
            return CheckpointError(
                f"{storage.location} has version {described['version']}, expected {VERSION}; use the version of "
                f"ebbflow that wrote it"
            )
        for name, expected in sorted(described["files"].items())[rank::ranks]:
            if storage.size(name) != expected["bytes"] or (
                storage.local and _sha256(storage.path(name)) != expected["sha256"]
            ):
                return CheckpointError(f"{storage.location} is damaged: {name} is not what {COMPLETE} says")
    except StorageUnreachable as error:
        return error
    except FileNotFoundError as error:
        return CheckpointError(f"{storage.location} is damaged: {error.filename or error} is missing")
    except (ValueError, KeyError, TypeError, AttributeError):
        return CheckpointError(f"{storage.location} is damaged: {COMPLETE} cannot be read")
    return None


def _sha256(path: str) -> str:
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while block := file.read(_READ_AT_ONCE):
            digest.update(block)
    return digest.hexdigest()


def _raise_first(problems: list[BaseException | None]) -> None:
    for problem in problems:
        if problem is not None:
            raise problem


@contextmanager
def _translated(location: str, what: str) -> Iterator[None]:
    """Raise what goes wrong in DCP as one of our own errors."""
    try:
        yield
    except (CheckpointError, StorageUnreachable):
        raise
    except CheckpointException as problem:  # not an Exception
        causes = [cause for cause, _ in problem.failures.values()]
        raise _named(causes, location, what) from None
    except Exception as problem:
        raise _named([problem], location, what) from None


def _named(causes: list[BaseException], location: str, what: str) -> Exception:
    reason = short_reason(causes[0]) if causes else "unknown"
    outside = what == "written" or any(isinstance(cause, OSError) for cause in causes)
    if outside:
        return StorageUnreachable(f"{location}: cannot be {what}: {reason}")
    return CheckpointError(f"{location} is damaged: {reason}")


# Reading without executing anything -----------------------------------------------------------------------------------

_INDEX_CLASSES = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
}  # fmt: skip
"""All that DCP's index may consist of, besides types of numbers."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _INDEX_CLASSES or (module == "torch" and isinstance(getattr(torch, name), torch.dtype)):
            return super().find_class(module, name)
        raise CheckpointError(f"the index of a checkpoint names {module}.{name}, which is not loaded")


class _Reader(FileSystemReader):
    def __init__(self, storage: Storage) -> None:
        super().__init__(storage.root)
        self.fs = _DigestedFiles(storage)  # type: ignore[assignment]
        self.path = storage.root

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = self.fs.concat_path(self.path, ".metadata")
        with self.fs.create_stream(path, "rb") as file:
            metadata = _Unpickler(io.BytesIO(file.read())).load()
        assert isinstance(metadata, Metadata)
        return metadata


class _Planner(DefaultLoadPlanner):
    rest: Any = ()
    """The one entry that is not a tensor."""

    def load_bytes(self, read_item: ReadItem, value: IO[bytes]) -> None:
        self.rest = torch.load(value, map_location="cpu", weights_only=True)
