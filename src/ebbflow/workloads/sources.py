"""Where samples come from: tensors in memory, any torch data set, a text; and the augmentation of images.

Augmentation draws from torch's global generator of the device that holds the samples. An engine that seeds it before
each micro-batch of a step gets the same samples whatever happened before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ebbflow.errors import ConfigError

__all__ = [
    "Indices",
    "PrefetchingSource",
    "Source",
    "TensorSource",
    "TokenSource",
    "crop_and_flip",
]

Indices = NDArray[np.int64] | Tensor
"""Numbers of samples, in the order in which the batch shall hold them."""


class Source(Protocol):
    """Samples that are fetched by number, many at once."""

    def __len__(self) -> int:
        """How many samples there are."""

    def batch(self, indices: Indices, *, train: bool) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the samples, in the given order.

        Augmented only when `train`, with randomness from torch's global generator and independently for each sample.
        """

    def to(self, device: torch.device) -> Self:
        """The same samples, delivered on the device."""


@runtime_checkable
class PrefetchingSource(Source, Protocol):
    """A source that worker processes read ahead, if it is told what is upcoming."""

    def batches(self, many: Sequence[Indices]) -> Iterator[tuple[Tensor, Tensor]]:
        """What `batch` gives for validation, one batch after the other."""

    def follow(self, upcoming: Callable[[], Iterator[tuple[int, Indices]]]) -> None:
        """Ask `upcoming` for the batches of training from the present one on: torch's seed before each, and its
        samples.

        It may be wrong about the future: that costs time, and changes no batch.
        """

    def with_loader_workers(self, workers: int) -> Self:
        """The same samples, read by so many processes where the source has no number of its own."""

    def close(self) -> None:
        """End the processes."""


def crop_and_flip(images: Tensor, *, pad: int = 4) -> Tensor:
    """Each image shifted by up to `pad` pixels (what enters is 0) and mirrored with probability 1/2.

    Takes `(samples, channels, height, width)` of any type on any device and gives the same shape and type. Equals a
    random crop of the padded image; the whole batch is one gather.
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
    # Index tensors around a slice put the channels last; the permutation puts them back.
    return padded[sample, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def _on(device: torch.device, indices: Indices) -> Tensor:
    """The indices on the device; a GPU takes them from pinned memory, so that nobody waits for its earlier work."""
    index = torch.as_tensor(indices)
    if device.type != "cuda" or index.is_cuda:
        return index.to(device)
    return index.pin_memory().to(device, non_blocking=True)


def tensors_on(device: torch.device, *tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.to(device) for tensor in tensors]


def standardised(x: Tensor, mean: Tensor | None, std: Tensor | None) -> Tensor:
    if mean is not None:
        x = x - mean
    return x if std is None else x / std


@dataclass(frozen=True, eq=False)
class TensorSource:
    """Samples that lie in two tensors, stored as they are (bytes stay bytes) and standardised when fetched."""

    x: Tensor
    y: Tensor
    augment: Callable[[Tensor], Tensor] | None = None
    """Applied to the stored inputs of a training batch; must treat each sample on its own."""
    mean: Tensor | None = None
    """Subtracted from the inputs; broadcast against one batch."""
    std: Tensor | None = None
    """The inputs are divided by it; broadcast against one batch."""

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ConfigError(f"{len(self.x)} inputs but {len(self.y)} targets; expected one target an input")

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, indices: Indices, *, train: bool) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the samples; augmented only when `train`."""
        index = _on(self.y.device, indices)
        x, y = self.x[index], self.y[index]
        if train and self.augment is not None:
            x = self.augment(x)
        return standardised(x, self.mean, self.std), y

    def to(self, device: torch.device) -> Self:
        """The same samples on the device: they are copied there once, not batch by batch."""
        mean, std = tensors_on(device, self.mean, self.std)
        return replace(self, x=self.x.to(device), y=self.y.to(device), mean=mean, std=std)


@dataclass(frozen=True, eq=False)
class TokenSource:
    """Blocks of a sequence of tokens, at a fixed stride: sample i starts at token i * stride.

    The target of each token is the next one. What is left at the end and fills no block is not used.
    """

    tokens: Tensor
    context: int
    stride: int

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1 - self.context) // self.stride + 1)

    def batch(self, indices: Indices, *, train: bool) -> tuple[Tensor, Tensor]:
        """Blocks and the same blocks one token later; `train` makes no difference."""
        starts = _on(self.tokens.device, indices) * self.stride
        block = self.tokens[starts[:, None] + torch.arange(self.context + 1, device=self.tokens.device)]
        return block[:, :-1].contiguous(), block[:, 1:].contiguous()

    def to(self, device: torch.device) -> Self:
        """The same tokens on the device."""
        return replace(self, tokens=self.tokens.to(device))
