"""The complete state of a replica as a short description and its tensors, which are sent straight from where they are.

The description is the state with every large tensor replaced by an empty one of its shape. Reading it executes nothing.
"""

from __future__ import annotations

import io
from typing import Any

import torch

from ebbflow.engines.batches import map_batch
from ebbflow.errors import CheckpointError

__all__ = ["put_together", "take_apart"]

_DESCRIBED = 1 << 12  # bytes of a tensor that is sent as a part of the description


def take_apart(state: Any) -> tuple[memoryview, list[torch.Tensor]]:
    """The description of a state, and its large tensors themselves, not copies, in the order of the description.

    >>> description, tensors = take_apart({"step": 3, "weights": torch.ones(40, 50)})
    >>> len(description) < 4000, [tuple(tensor.shape) for tensor in tensors]
    (True, [(40, 50)])
    """
    tensors: list[torch.Tensor] = []

    def take(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.nbytes <= _DESCRIBED:
            return value
        tensors.append(value.detach())
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    buffer = io.BytesIO()
    torch.save(map_batch(state, take), buffer)
    return buffer.getbuffer(), tensors


def put_together(description: bytes | memoryview) -> tuple[Any, list[torch.Tensor]]:
    """The state that was described, and those of its tensors that are still to be filled in, in the same order."""
    try:
        described = torch.load(io.BytesIO(description), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for damaged bytes; all mean the same
        text = str(error).partition("\n")[0][:200]
        raise CheckpointError(f"the state of a peer cannot be read: {text}") from None
    tensors: list[torch.Tensor] = []

    def make(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type != "meta":
            return value
        tensors.append(torch.empty(value.shape, dtype=value.dtype))
        return tensors[-1]

    return map_batch(described, make), tensors
