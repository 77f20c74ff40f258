"""A replica that receives the state takes part in the steps of the others meanwhile: it listens.

    receive     in a thread: the state of before step k
    hear        the sums of the steps k, k+1, ..., to which this replica adds nothing, are kept
    apply       when the state is there, each of these steps is applied as on every other replica

Every step that was heard was confirmed by all participants. Whatever breaks the group before the state is there ends
the transfer, too, and what was heard is forgotten: a listener has either the state of the others, bit for bit, or its
own.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ebbflow.engines.process_group import PeerLost, ProcessGroup
from ebbflow.live.state_transfer import put_together

__all__ = ["Hear", "HeardStep", "IncomingState", "listen"]

SOON_S = 0.5
"""A state that comes within this time is waited for: the others are told sooner that this replica computes."""
_LEAST_BYTES = 1 << 28  # of sums that may be kept, however small the state is
_MOST_STEPS = 64  # that are kept; the others wait while they are applied


@dataclass(frozen=True, kw_only=True, slots=True)
class HeardStep:
    """A step of the others, of which this replica has the sum and not the state to apply it to."""

    message: torch.Tensor
    """The sum, in the memory of the host."""
    leaving: frozenset[int] = frozenset()
    """Ranks that said in it that they leave."""
    arrived: frozenset[int] = frozenset()
    """Ranks that said in it that they have the state."""


Hear = Callable[[frozenset[int]], HeardStep]
"""Takes part in the next step of the others; given the ranks that listen. Raises `PeerLost`."""


class IncomingState:
    """The state of a peer, which a thread receives."""

    def __init__(self, group: ProcessGroup, source: int) -> None:
        self.size = 0
        """Bytes, as soon as they are known."""
        self._group, self._source = group, source
        self._state: Any = None
        self._error: Exception | None = None
        self._done = threading.Event()
        threading.Thread(target=self._receive, daemon=True, name="ebbflow-state").start()

    def _receive(self) -> None:
        try:
            description = self._group.receive(self._source)
            state, tensors = put_together(description)
            self.size = len(description) + sum(tensor.nbytes for tensor in tensors)
            self._group.receive_tensors(tensors, self._source)
            self._state = state
        except Exception as error:  # raised again in the thread of the training loop
            self._error = error
        finally:
            self._done.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the transfer; whether it has come, with the state or with a failure."""
        return self._done.wait(timeout_s)

    @property
    def complete(self) -> bool:
        """Whether the state is there."""
        return self._done.is_set() and self._error is None

    def take(self) -> Any:
        """Wait for the state and return it. Raises `PeerLost` or, for what is no state, a CheckpointError."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._state


def listen(incoming: IncomingState, hear: Hear, listening: frozenset[int], *, rank: int) -> deque[HeardStep]:
    """Hear the steps of the others until the state is there, or this rank leaves; those steps, in their order.

    As many sums are kept as take twice the memory of the state, or 256 MB, and no more than 64; then the others wait
    for the rest of the transfer. Raises `PeerLost` if the group breaks, or changes, before the state is there.
    """
    heard: deque[HeardStep] = deque()
    kept = 0
    while not incoming.wait(0.0):
        room = max(2 * incoming.size, _LEAST_BYTES)
        if heard and (kept + heard[-1].message.nbytes > room or len(heard) == _MOST_STEPS):
            incoming.wait()
            break
        try:
            step = hear(listening)
        except PeerLost:
            if incoming.complete:  # whatever happens now, these steps count
                break
            raise
        heard.append(step)
        kept += step.message.nbytes
        listening -= step.arrived
        if step.leaving:  # the others go on in another group
            if not incoming.complete and rank not in step.leaving:
                raise PeerLost("a replica left the group before the state was received")
            break
    return heard
