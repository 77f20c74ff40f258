"""Samples on their way from the process that reads them: their tensors are copied into one block.

Torch sends every tensor by a file descriptor of its own, and with it the whole memory of which it is a part. So samples
that are waiting could need more descriptors than a process may have (often 1,024), and one that is a row of a large
tensor would copy all of that tensor. What cannot be pickled is an error here, in the process that reads it: a queue
would drop it, and whoever waits for the samples would wait for ever.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

__all__ = ["PackedSamples", "pack_samples"]

_ALIGNMENT = 64  # bytes: a tensor of any type may begin at a multiple of it


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies in the block."""

    start: int
    stop: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]

    def of(self, block: Tensor) -> Tensor:
        """The tensor, in the memory of the block."""
        return block[self.start : self.stop].view(self.dtype).as_strided(self.shape, self.strides)


@dataclass(frozen=True, slots=True)
class PackedSamples:
    """Pickled samples, without their tensors; these are in the block."""

    pickled: bytes
    places: tuple[_Place, ...]
    block: Tensor

    def unpack(self) -> list[Any]:
        """The samples."""
        samples: list[Any] = _Unpacker(self).load()
        return samples


class _Packer(ForkingPickler):
    """Pickles samples; of their tensors it notes where they will lie."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.size = 0
        self.places: list[_Place] = []
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if type(value) is not Tensor or not _is_plain(value):
            return None
        if (number := self._numbers.get(id(value))) is None:
            number = self._numbers[id(value)] = len(self.tensors)
            start, stop = self.size, self.size + value.numel() * value.element_size()
            # Those of a copy: a permuted tensor stays permuted, and an expanded one takes its own memory.
            strides = value.stride() if value.is_contiguous() else torch.empty_like(value, device="meta").stride()
            self.places.append(_Place(start, stop, value.dtype, value.shape, strides))
            self.tensors.append(value)
            self.size = -(-stop // _ALIGNMENT) * _ALIGNMENT
        return number


class _Unpacker(pickle.Unpickler):
    def __init__(self, packed: PackedSamples) -> None:
        super().__init__(io.BytesIO(packed.pickled))
        self._tensors = [place.of(packed.block) for place in packed.places]

    def persistent_load(self, number: int) -> Tensor:
        return self._tensors[number]


def _is_plain(tensor: Tensor) -> bool:
    """Whether the tensor is its bytes and nothing else."""
    special = tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and not special


def pack_samples(samples: list[Any]) -> PackedSamples:
    """Pack samples to be sent to another process of this machine.

    >>> row = torch.arange(6.0).view(2, 3).T[1]
    >>> pack_samples([{"x": row, "name": "a"}]).unpack()
    [{'x': tensor([1., 4.]), 'name': 'a'}]
    """
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(samples)
    block = torch.empty(packer.size, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
    for tensor, place in zip(packer.tensors, packer.places, strict=True):
        place.of(block).copy_(tensor)
    return PackedSamples(file.getvalue(), tuple(packer.places), block)
