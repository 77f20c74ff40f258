"""Batches as data sets give them: inputs and targets, each a tensor or any nesting of containers with tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

__all__ = ["as_pair", "map_batch", "move_batch", "tensors_in"]


def as_pair(batch: Any) -> tuple[Any, Any]:
    """A batch as (inputs, targets); one that is no pair is all inputs, with None as targets.

    >>> as_pair([1, 2]), as_pair({"x": 1, "y": 2})
    ((1, 2), ({'x': 1, 'y': 2}, None))
    """
    if isinstance(batch, tuple | list) and len(batch) == 2 and batch[1] is not None:
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
