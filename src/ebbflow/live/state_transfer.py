"""The complete state of a replica as a short description and its tensors, which are sent straight from where they are.

The description is the state with every large tensor replaced by an empty one of its shape. Reading it executes nothing.
The state is sent while steps go on: what is not sent yet when a step is about to change it is copied before.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from ebbflow.engines.batches import map_batch
from ebbflow.engines.process_group import CHUNK_BYTES, PeerLost, ProcessGroup
from ebbflow.errors import CheckpointError

__all__ = ["OutgoingState", "StateTransfers", "TransferableState", "put_together", "take_apart"]

_DESCRIBED = 1 << 12  # bytes of a tensor that is sent as a part of the description


class TransferableState(Protocol):
    """The complete state of a replica, which can be sent to a peer and loaded from a checkpoint."""

    def pack(self) -> Any:
        """The state after the last committed step, in plain containers. Nothing in it changes before the next step is
        committed."""

    def unpack(self, state: Any) -> tuple[int, int]:
        """Load what `pack` returned; return its number of committed steps and its lineage."""

    def refresh(self) -> tuple[int, int] | None:
        """Load the newest checkpoint if it is further than this state; return its steps and lineage, or None."""

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to train."""


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


class OutgoingState:
    """The state of a replica at one moment, on its way to receivers, each of which is served by a thread of its own.

    Guarantees: every receiver gets the numbers of that moment, if `keep` is called before any of them changes. Costs
    one copy of a message while it is sent and, after `keep`, one copy in the memory of the host of what some receiver
    lacks, however many receivers there are; it is freed as it is sent.
    """

    def __init__(self, state: Any, receivers: int) -> None:
        self.description, tensors = take_apart(state)
        self._tensors: list[torch.Tensor | None] = [*tensors]
        self._copied = [False] * len(tensors)
        self._lacking = [receivers] * len(tensors)  # by tensor: receivers that do not have all of it
        self._lock = threading.Lock()

    def messages(self) -> Iterator[torch.Tensor]:
        """The bytes of the tensors for one receiver, as many at a time as one message holds; nobody changes them."""
        for number in range(len(self._tensors)):
            start, stop = 0, 1
            while start < stop:
                with self._lock:
                    numbers = self._bytes(number)
                    stop = len(numbers)
                    message = numbers[start : start + CHUNK_BYTES]
                    message = message if self._copied[number] else message.to("cpu", copy=True)
                if len(message):
                    yield message
                start += CHUNK_BYTES
            with self._lock:
                self._lacking[number] -= 1
                if not self._lacking[number]:
                    self._tensors[number] = None

    def keep(self) -> None:
        """Copy what some receiver lacks: the state is about to change."""
        with self._lock:
            for number, tensor in enumerate(self._tensors):
                if tensor is not None:
                    self._copy(number)

    def _bytes(self, number: int) -> torch.Tensor:
        tensor = self._tensors[number]
        assert tensor is not None, "a receiver lacks it"
        if not tensor.is_contiguous():
            tensor = self._copy(number)
        return tensor.reshape(-1).view(torch.uint8)

    def _copy(self, number: int) -> torch.Tensor:
        tensor = self._tensors[number]
        assert tensor is not None
        if not self._copied[number]:
            self._tensors[number] = tensor = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
            self._copied[number] = True
        return tensor


class StateTransfers:
    """The transfers of the state from this replica to others of one group, while it computes steps."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        """Names of replicas that could not receive the state."""
        self._outgoing: OutgoingState | None = None
        self._threads: list[threading.Thread] = []

    def begin(self, state: Any, group: ProcessGroup, names: Sequence[str], receivers: Sequence[int]) -> None:
        """Begin to send the state to all receivers at once. `names`: of the replicas of the group, by rank."""
        self._outgoing = outgoing = OutgoingState(state, len(receivers))

        def send(rank: int) -> None:
            try:
                group.send(outgoing.description, rank)
                group.send_tensors(outgoing.messages(), rank)
            except PeerLost:
                self.failed.append(names[rank])  # then the step fails, too

        self._threads = [
            threading.Thread(target=send, args=(rank,), daemon=True, name="ebbflow-state") for rank in receivers
        ]
        for thread in self._threads:
            thread.start()

    def keep_unsent(self) -> bool:
        """Copy what is still to be sent, since the state is about to change; whether there may be something."""
        if self._outgoing is None:
            return False
        if not any(thread.is_alive() for thread in self._threads):
            self._outgoing = None
            return False
        self._outgoing.keep()
        return True

    def finish(self) -> None:
        """Wait until all receivers have the state, or are lost."""
        for thread in self._threads:
            thread.join()
