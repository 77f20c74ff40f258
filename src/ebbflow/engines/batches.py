"""Batches as data sets give them: inputs and targets, each a tensor or any nesting of containers with tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from typing import Any

import torch

__all__ = ["DeviceCopy", "as_pair", "map_batch", "missing_samples", "move_batch", "pin_batch", "tensors_in"]


def as_pair(batch: Any, *, named: bool = True) -> tuple[Any, Any]:
    """A batch as (inputs, targets); one that is no pair is all inputs, with None as targets.

    `named`: whether a named tuple of two is a pair. A user's own loop asks for its fields by their names.

    >>> as_pair([1, 2]), as_pair({"x": 1, "y": 2})
    ((1, 2), ({'x': 1, 'y': 2}, None))
    """
    pair = isinstance(batch, tuple | list) and (named or not hasattr(batch, "_fields"))
    if pair and len(batch) == 2 and batch[1] is not None:
        return batch[0], batch[1]
    return batch, None


def map_batch(batch: Any, function: Callable[[Any], Any]) -> Any:
    """Replace what is in the containers of a batch; the containers stay what they are.

    An object that can be moved (it has `to`) is not a container.
    """
    if hasattr(batch, "to"):
        return function(batch)
    if isinstance(batch, Mapping):
        return {name: map_batch(value, function) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_batch(value, function) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(map_batch(value, function) for value in batch)
    return function(batch)


def move_batch(batch: Any, device: torch.device | str) -> Any:
    """Move everything in a batch that can be moved; the rest is left alone."""

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(device, non_blocking=True)
        return value.to(device) if hasattr(value, "to") else value

    return map_batch(batch, move)


def pin_batch(batch: Any) -> Any:
    """Copy everything in a batch that can be pinned into pinned memory, as a DataLoader does; the rest is left alone.

    An object that is to be pinned has `pin_memory()`, which returns the pinned one.
    """

    def pin(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.pin_memory() if _is_of_the_host(value) else value
        return value.pin_memory() if hasattr(value, "pin_memory") else value

    return map_batch(batch, pin)


def _is_of_the_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout == torch.strided


class DeviceCopy:
    """Moves batches to one device.

    A GPU copies them on a stream of its own: what is in pinned memory is copied while the GPU still computes what it
    was given before, as long as this process does not wait for that.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = None

    def move(self, batch: Any) -> Any:
        """Move a batch; whatever is computed on the current stream afterwards finds it there."""
        if self.device.type == "cuda":
            batch = self._copy_aside(batch)
        return move_batch(batch, self.device)

    def _copy_aside(self, batch: Any) -> Any:
        """Copy the plain tensors of the host. Others, and objects with tensors inside, are not told of streams."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(self.device)

        def copy(value: Any) -> Any:
            if type(value) is not torch.Tensor or not _is_of_the_host(value):
                return value
            copied = value.to(self.device, non_blocking=True)
            # Its memory is of the stream of copies, which must not use it again before the current one is done with it.
            copied.record_stream(current)
            return copied

        with torch.cuda.stream(self._stream):
            batch = map_batch(batch, copy)
        current.wait_stream(self._stream)
        return batch


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """Iterate over the tensors of a batch, in the order of its containers."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_in(value)
    elif isinstance(batch, tuple | list):
        for value in batch:
            yield from tensors_in(value)


def missing_samples(batch: Any, given: int) -> int | None:
    """How many samples a batch has, if these are fewer than the `given` ones that it was made of; else None.

    All its parts then have one length, by their first dimension or as a list, that is smaller. A batch is complete if
    anything in it has an entry for each sample, or if samples are the second dimension of all its tensors; and a single
    row may hold several samples, one after the other. What is in objects of a user's own is not known.

    >>> x, y = torch.zeros(7, 3, 8, 8), torch.zeros(7)
    >>> missing_samples((x, y), 8), missing_samples({"x": x, "lengths": torch.zeros(8)}, 8), missing_samples(None, 8)
    (7, None, 0)
    """
    if batch is None:
        return 0
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    parts = list(parts) if isinstance(parts, tuple | list) else [parts]
    lengths = [found for part in parts if (found := _lengths(part))]
    tensors = list(tensors_in(batch))
    second = bool(tensors) and all(tensor.ndim > 1 and tensor.shape[1] == given for tensor in tensors)
    if not lengths or second or given in {length for found in lengths for length in found}:
        return None
    common = [length for length in reduce(set.intersection, lengths) if length < given]
    if not common:
        return None
    packed = max(common) == 1 and bool(tensors) and all(tensor.numel() >= given for tensor in tensors)
    return None if packed else max(common)


def _lengths(part: Any) -> set[int]:
    """What may be the number of samples in a part of a batch: its length, and those of what it contains."""
    if isinstance(part, torch.Tensor):
        return {len(part)} if part.ndim else set()
    if isinstance(part, Mapping):
        return {length for value in part.values() for length in _lengths(value)}
    if isinstance(part, tuple | list):
        return {len(part)} | {length for value in part for length in _lengths(value)}
    return set()
