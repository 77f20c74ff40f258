"""Where samples come from: tensors in memory, any torch data set, a text; and the augmentation of images.

Augmentation draws from torch's global generator of the device that holds the samples. An engine that seeds it before
each micro-batch of a step gets the same samples whatever happened before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from ebbflow.errors import ConfigError
from ebbflow.workloads.base import Indices
from ebbflow.workloads.prefetch import Reader
from ebbflow.workloads.requests import Request

__all__ = ["DatasetSource", "TensorSource", "TokenSource", "crop_and_flip"]


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


def _all_on(device: torch.device, *tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.to(device) for tensor in tensors]


def _standardised(x: Tensor, mean: Tensor | None, std: Tensor | None) -> Tensor:
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
        return _standardised(x, self.mean, self.std), y

    def to(self, device: torch.device) -> Self:
        """The same samples on the device: they are copied there once, not batch by batch."""
        mean, std = _all_on(device, self.mean, self.std)
        return replace(self, x=self.x.to(device), y=self.y.to(device), mean=mean, std=std)


@dataclass(eq=False)
class DatasetSource:
    """Any map-style torch data set of (input, target) pairs, collated by torch's default.

    Worker processes read the samples of upcoming batches ahead, so that decoding and transforms cost no time while they
    take less of it than computing (`prefetch.py`). The data set's own transforms run for training and validation alike:
    give two data sets where they should differ. They may draw from the global generators of torch, numpy and Python:
    in training these are seeded from one number of torch's generator, in validation always the same, and so the samples
    do not depend on the number of processes, nor on what was read before.
    """

    dataset: Dataset[Any]
    device: torch.device = torch.device("cpu")
    workers: int | None = None
    """Processes that read ahead. None: as many as the run says (`loader_workers`), and outside of a run none."""
    ahead: int = 512
    """Samples, about, that are read before they are asked for; they take up memory."""
    mean: Tensor | None = None
    """Subtracted from the inputs on the device, so that bytes may travel as bytes; broadcast against one batch."""
    std: Tensor | None = None
    """The inputs are divided by it; broadcast against one batch."""
    _reader: Reader = field(init=False, repr=False)

    def __post_init__(self) -> None:
        pinned = self.device.type == "cuda"
        self._reader = Reader(self.dataset, workers=self.workers or 0, ahead=self.ahead, pin_memory=pinned)

    def __len__(self) -> int:
        return len(cast(Sized, self.dataset))

    def batch(self, indices: Indices, *, train: bool) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the samples; the data set decides what `train` means, but for its random numbers."""
        parts = self._reader.read(_request(indices, _draw() if train else 0))
        inputs, targets = (
            [part.to(self.device, non_blocking=True) for part in side] for side in zip(*parts, strict=True)
        )
        return _standardised(_joined(inputs), self.mean, self.std), _joined(targets)

    def batches(self, many: Sequence[Indices]) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of a validation, one after the other; all of them are known, and are read ahead."""
        requests = [_request(indices, 0) for indices in many]
        with self._reader.following(lambda: iter(requests)):
            for indices in many:
                yield self.batch(indices, train=False)

    def follow(self, upcoming: Callable[[], Iterator[tuple[int, Indices]]]) -> None:
        """Read ahead what an engine says is upcoming: the seed of torch's generator and the samples of each batch."""
        generator = torch.Generator()
        self._reader.follow(
            lambda: (_request(indices, _draw(generator.manual_seed(seed))) for seed, indices in upcoming())
        )

    def with_loader_workers(self, workers: int) -> Self:
        """The same samples, read by so many processes, unless the source has its own number or holds tensors anyway."""
        if self.workers is not None or isinstance(self.dataset, TensorDataset):
            return self
        return replace(self, workers=workers)

    def close(self) -> None:
        """End the processes; the next batch starts them again."""
        self._reader.close()

    def to(self, device: torch.device) -> Self:
        """The same samples, each batch moved to the device when it is fetched."""
        mean, std = _all_on(device, self.mean, self.std)
        return replace(self, device=device, mean=mean, std=std)


def _draw(generator: torch.Generator | None = None) -> int:
    """The number that a batch's transforms draw from; the engine that seeds torch's generator can foretell it."""
    return int(torch.randint(1 << 62, (), generator=generator, device="cpu"))


def _request(indices: Indices, seed: int) -> Request:
    return Request(seed, tuple(indices.tolist()))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


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
