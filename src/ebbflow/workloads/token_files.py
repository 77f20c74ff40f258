"""Token files that are memory-mapped: blocks of them as samples, and a language model on them from the command line.

Two formats are read. *nanoGPT*: the tokens one after the other, by default as little-endian uint16, without a header.
*Megatron-LM*: the same in a file `NAME.bin`, beside a file `NAME.idx` that says the type and where documents begin.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ebbflow.errors import ConfigError, DataError
from ebbflow.workloads.models import GPT
from ebbflow.workloads.sources import Indices
from ebbflow.workloads.workload import Recipe, Task, missing_data, register_workload

__all__ = ["TokenFiles", "read_token_files", "token_gpt", "token_gpt_recipe"]

_RAW_TYPES = ("uint8", "uint16", "uint32", "int32", "int64")
_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, type, sequences, documents


@dataclass(frozen=True, slots=True)
class _TokenFile:
    """One file of tokens."""

    path: Path
    dtype: np.dtype[Any]
    tokens: int


@dataclass(frozen=True, eq=False)
class TokenFiles(Dataset[tuple[Tensor, Tensor]]):
    """Blocks of `context` tokens of token files, as a map-style data set and as a source of a workload.

        data = TokenFiles("openwebtext/train.bin", context=1024)
        sampler = ElasticSampler(data, "fixed(480)", local_batch=12)

    A sample is (inputs, targets): `context` tokens, and the same one token later. Blocks of a file follow each other
    without overlap, so that every token but the first is a target once per epoch; tokens at the end of a file that do
    not fill a block are not used. Blocks may span documents. Files are memory-mapped and never read as a whole:
    opening, and resuming at any sample, take constant time and memory whatever their size. A data set can be sent to
    other processes, which open the files themselves.

    `paths`: a file, a folder with files `*.bin` (in the order of their names), or a list of files. `dtype` is that of
    files without an index. With `vocabulary`, a token that is not below it is a DataError that names the file.
    `first` and `stop` select blocks, such as those for validation.
    """

    paths: Path | str | Sequence[Path | str]
    context: int
    dtype: str = "uint16"
    vocabulary: int | None = None
    first: int = 0
    stop: int | None = None
    device: torch.device = field(default=torch.device("cpu"), repr=False)

    def __post_init__(self) -> None:
        if self.context < 1:
            raise ConfigError(f"the context is {self.context} tokens; expected at least 1")
        if self.dtype not in _RAW_TYPES:
            raise ConfigError(f"the type of tokens is {self.dtype!r}; expected one of {', '.join(_RAW_TYPES)}")
        self._ends  # noqa: B018  # wrong files fail here

    @cached_property
    def _files(self) -> list[_TokenFile]:
        return [_opened(path, self.dtype) for path in _files_of(self.paths)]

    @cached_property
    def _ends(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Number of blocks up to the end of each file."""
        ends = np.cumsum([(file.tokens - 1) // self.context for file in self._files])
        stop = int(ends[-1]) if self.stop is None else self.stop
        if not 0 <= self.first < stop <= int(ends[-1]):
            found = sum(file.tokens for file in self._files)
            raise DataError(
                f"{self._files[0].path}: {found:,} tokens in {len(self._files)} file(s) give {int(ends[-1]):,} blocks "
                f"of {self.context} tokens, but blocks {self.first:,} to {stop:,} are needed; use longer files, or a "
                f"shorter context"
            )
        return ends

    @cached_property
    def _maps(self) -> dict[int, np.memmap[Any, Any]]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave the mapped memory behind, which would be copied as a whole."""
        return {name: value for name, value in self.__dict__.items() if name != "_maps"}

    def __len__(self) -> int:
        return (int(self._ends[-1]) if self.stop is None else self.stop) - self.first

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        block = torch.from_numpy(self._block(index))
        return block[:-1], block[1:]

    def _block(self, index: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The tokens of a block, with the one after it."""
        place = index + self.first
        number = int(np.searchsorted(self._ends, place, side="right"))
        start = (place - (int(self._ends[number - 1]) if number else 0)) * self.context
        file = self._files[number]
        if number not in self._maps:
            self._maps[number] = np.memmap(file.path, file.dtype, mode="r", shape=(file.tokens,))
        block = self._maps[number][start : start + self.context + 1].astype(np.int64)
        if self.vocabulary is not None and not 0 <= block.min() <= block.max() < self.vocabulary:
            wrong = next(int(token) for token in block if not 0 <= token < self.vocabulary)
            raise DataError(
                f"{file.path}: token {wrong} near position {start:,} is not in a vocabulary of {self.vocabulary}; give "
                f"the size of the vocabulary, and the type of the tokens if it is not {file.dtype}"
            )
        return block

    def batch(self, indices: Indices, *, train: bool) -> tuple[Tensor, Tensor]:
        """Return the blocks, and as targets the same blocks one token later; `train` makes no difference."""
        blocks = torch.from_numpy(np.stack([self._block(int(index)) for index in indices]))
        if self.device.type == "cuda":
            blocks = blocks.pin_memory()
        blocks = blocks.to(self.device, non_blocking=True)
        return blocks[:, :-1].contiguous(), blocks[:, 1:].contiguous()

    def to(self, device: torch.device) -> Self:
        """Return a source of the same blocks whose batches are on the device; the files stay where they are."""
        return replace(self, device=device)


def _files_of(paths: Path | str | Sequence[Path | str]) -> list[Path]:
    if isinstance(paths, Path | str):
        path = Path(paths)
        found = sorted(path.glob("*.bin")) if path.is_dir() else [path]
        if not found:
            raise DataError(f"{path}: no files *.bin in the folder; expected token files of nanoGPT or Megatron-LM")
        return found
    if not paths:
        raise DataError("no token files were given")
    return [Path(path) for path in paths]


def _opened(path: Path, dtype: str) -> _TokenFile:
    """What is in a file, without reading its tokens."""
    try:
        size = path.stat().st_size
        index = path.with_suffix(".idx")
        if path.suffix == ".bin" and index.exists():
            return _TokenFile(path, *_read_index(index, size))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}; expected a file of tokens") from None
    kind = np.dtype(dtype).newbyteorder("<")
    if size % kind.itemsize:
        raise DataError(
            f"{path}: {size:,} bytes are no whole number of {dtype} tokens; is the file cut short, or of another type?"
        )
    return _TokenFile(path, kind, size // kind.itemsize)


def _read_index(path: Path, size: int) -> tuple[np.dtype[Any], int]:
    """(type, number of tokens) of the file of `size` bytes that an index of Megatron-LM describes."""
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            raise DataError(
                f"{path}: not an index of Megatron-LM, which begins with MMIDIDX; remove it if it is not one"
            )
        _, version, code, sequences, _ = _HEADER.unpack(header)
        if version != 1 or code not in _MEGATRON_TYPES:
            raise DataError(f"{path}: version {version}, type {code}; expected version 1 and whole numbers as tokens")
        kind = np.dtype(_MEGATRON_TYPES[code]).newbyteorder("<")
        # The lengths of the sequences (int32), then the place of each in bytes (int64): the last of each give the end.
        file.seek(_HEADER.size + 4 * (sequences - 1))
        last = file.read(4)
        file.seek(_HEADER.size + 4 * sequences + 8 * (sequences - 1))
        place = file.read(8)
    if not sequences or len(last) < 4 or len(place) < 8:
        raise DataError(f"{path}: the index of {sequences} sequences is cut short; write it again")
    end = int.from_bytes(place, "little") + int.from_bytes(last, "little") * kind.itemsize
    if end != size:
        raise DataError(
            f"{path}: the index describes {end:,} bytes, but {path.with_suffix('.bin').name} has {size:,}; they do not "
            f"belong together, or one of them is cut short"
        )
    return kind, size // kind.itemsize


token_gpt_recipe = Recipe(
    ref_batch=32,
    local_batch=8,
    lr=6e-4,
    optimizer="adamw(beta2=0.95, weight_decay=0.1)",
    schedule="warmup(0.02ep)+cosine(end=0.1)",
    epochs=1,
    metric="loss",
    higher_is_better=False,
)


@register_workload(
    "token-gpt",
    recipe=token_gpt_recipe,
    cite="the shape of nanoGPT, https://github.com/karpathy/nanoGPT; not tuned here",
)
def token_gpt(
    data: Path | None,
    recipe: Recipe,
    context: int = 1024,
    vocabulary: int = 50304,
    layers: int = 12,
    heads: int = 12,
    width: int = 768,
    dropout: float = 0.0,
    dtype: str = "uint16",
    valid: int = 256,
) -> Task:
    """A causal transformer on token files as nanoGPT and Megatron-LM write them, memory-mapped.

    The data is a file, a folder with `train.bin` and `val.bin`, or a folder of other files `*.bin`. Without `val.bin`,
    the last `valid` blocks are for validation, at most a tenth of all; of `val.bin`, the first `valid` blocks are used.
    """
    if data is None:
        raise missing_data("token-gpt", "a token file, or a folder of them")
    sizes = {"vocabulary": vocabulary, "layers": layers, "heads": heads, "width": width, "valid": valid}
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"token-gpt: {name} is {value}; expected at least 1")
    train, held_out = read_token_files(data, context=context, dtype=dtype, vocabulary=vocabulary, valid=valid)
    model = GPT(vocabulary=vocabulary, context=context, layers=layers, heads=heads, width=width, dropout=dropout)
    return Task(model=model, train=train, valid=held_out, recipe=recipe)


def read_token_files(
    data: Path, *, context: int, dtype: str, vocabulary: int, valid: int
) -> tuple[TokenFiles, TokenFiles]:
    """The blocks for training and for validation; see `token_gpt`."""
    settings: dict[str, Any] = {"context": context, "dtype": dtype, "vocabulary": vocabulary}
    if (data / "train.bin").exists() and (data / "val.bin").exists():
        train = TokenFiles(data / "train.bin", **settings)
        held_out = TokenFiles(data / "val.bin", **settings)
        held_out = replace(held_out, stop=min(valid, len(held_out)))
    else:
        every = TokenFiles(data, **settings)
        if len(every) < 2:
            raise DataError(f"{data}: one block of {context} tokens; expected more, for training and validation")
        cut = len(every) - max(1, min(valid, len(every) // 10))
        train, held_out = replace(every, stop=cut), replace(every, first=cut)
    return train, held_out
