"""Sources of samples: the protocol, and the sources that hold their samples in memory.

Augmentation draws from torch's global generator of the device that holds the samples. An engine seeds it before each
micro-batch, so that the samples of a step do not depend on what happened before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ebbflow.errors import ConfigError

__all__ = ["EvenSubset", "Indices", "Source", "TensorSource", "TokenSource", "crop_and_flip", "move_all", "standardise"]

Indices = NDArray[np.int64] | Tensor
"""Indices of samples, in the order of the batch."""


class Source(Protocol):
    """Samples that are fetched by their indices, one batch at a time."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def batch(self, indices: Indices, *, train: bool) -> Any:
        """Return the inputs and targets of the samples, in the given order.

        Each is a tensor or any nesting of containers with tensors. A batch that is no pair is all inputs. Samples are
        augmented only if `train` is true: each on its own, with draws from torch's global generator.
        """

    def to(self, device: torch.device) -> Self:
        """Return a source of the same samples whose batches are on the device."""


def crop_and_flip(images: Tensor, *, pad: int = 4) -> Tensor:
    """Shift each image by up to `pad` pixels, with zeros at the edge, and mirror it with probability 1/2.

    Images have the shape `(samples, channels, height, width)` and any type; shape and type stay the same. The result is
    a random crop of the padded image, computed for the whole batch with one gather.
    """
    count, _, height, width = images.shape
    device = images.device
    down, right = torch.randint(0, 2 * pad + 1, (2, count, 1), device=device)
    mirrored = torch.randint(0, 2, (count, 1), device=device, dtype=torch.bool)
    rows = torch.arange(height, device=device) + down
    columns = torch.arange(width, device=device).expand(count, width)
    columns = torch.where(mirrored, width - 1 - columns, columns) + right
    padded = F.pad(images, (pad, pad, pad, pad))
    sample = torch.arange(count, device=device)[:, None, None]
    # Indexing with tensors around a slice moves the channels to the end; the permutation moves them back.
    return padded[sample, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def _indices_on(device: torch.device, indices: Indices) -> Tensor:
    """Move indices to the device; to a GPU from pinned memory, so that this process need not wait for its work."""
    index = torch.as_tensor(indices)
    if device.type != "cuda" or index.is_cuda:
        return index.to(device)
    return index.pin_memory().to(device, non_blocking=True)


def move_all(device: torch.device, *tensors: Tensor | None) -> list[Tensor | None]:
    """Move those tensors to the device that are not None."""
    return [None if tensor is None else tensor.to(device) for tensor in tensors]


def standardise(x: Tensor, mean: Tensor | None, std: Tensor | None) -> Tensor:
    """Subtract the mean and divide by the standard deviation, where they are given."""
    if mean is not None:
        x = x - mean
    return x if std is None else x / std


@dataclass(frozen=True, eq=False)
class TensorSource:
    """Samples in two tensors, stored as they are (bytes stay bytes) and standardised when they are fetched."""

    x: Tensor
    y: Tensor
    augment: Callable[[Tensor], Tensor] | None = None
    """Applied to the stored inputs of a training batch; it must change each sample on its own."""
    mean: Tensor | None = None
    """Subtracted from the inputs; broadcast against one batch."""
    std: Tensor | None = None
    """The inputs are divided by it; broadcast against one batch."""

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ConfigError(f"{len(self.x)} inputs but {len(self.y)} targets; expected one target per input")

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, indices: Indices, *, train: bool) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of the samples, augmented only if `train` is true."""
        index = _indices_on(self.y.device, indices)
        x, y = self.x[index], self.y[index]
        if train and self.augment is not None:
            x = self.augment(x)
        return standardise(x, self.mean, self.std), y

    def to(self, device: torch.device) -> Self:
        """Return a source of the same samples on the device; all of them are copied there now."""
        mean, std = move_all(device, self.mean, self.std)
        return replace(self, x=self.x.to(device), y=self.y.to(device), mean=mean, std=std)


@dataclass(frozen=True, eq=False)
class TokenSource:
    """Blocks of `context` tokens of a sequence: sample i starts at token i * stride.

    The target of each token is the next token. Tokens at the end that do not fill a block are not used.
    """

    tokens: Tensor
    context: int
    stride: int

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1 - self.context) // self.stride + 1)

    def batch(self, indices: Indices, *, train: bool) -> tuple[Tensor, Tensor]:
        """Return the blocks, and as targets the same blocks one token later; `train` makes no difference."""
        starts = _indices_on(self.tokens.device, indices) * self.stride
        block = self.tokens[starts[:, None] + torch.arange(self.context + 1, device=self.tokens.device)]
        return block[:, :-1].contiguous(), block[:, 1:].contiguous()

    def to(self, device: torch.device) -> Self:
        """Return a source of the same tokens on the device."""
        return replace(self, tokens=self.tokens.to(device))


@dataclass(frozen=True, eq=False)
class EvenSubset:
    """`count` samples of a source at equal distances, so that samples sorted by class are all represented.

    All of them if the source has no more.
    """

    source: Source
    count: int

    def __len__(self) -> int:
        return min(self.count, len(self.source))

    def batch(self, indices: Indices, *, train: bool) -> Any:
        """Return the batch of the source."""
        return self.source.batch(torch.as_tensor(indices) * len(self.source) // len(self), train=train)

    def to(self, device: torch.device) -> Self:
        """Return the subset on the device."""
        return replace(self, source=self.source.to(device))
