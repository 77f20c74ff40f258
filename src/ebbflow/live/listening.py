"""A replica that receives the state takes part in the steps of the others meanwhile: it listens.

    receive     a thread: the state of before step k
    hear        another thread: the sums of the steps k, k+1, ..., to which this replica adds nothing, are kept
    apply       the training loop, when the state is there: each of these steps is applied as on every other replica

When it has applied all steps but the one that is being added up, it says so in that step, and computes from the next
one on. The others wait for the transfer only at its beginning (`SOON_S`), and where no more sums can be kept.

In a replica of several ranks, each receives its shards and hears the sums of these. They hear a step together or not at
all, and the replica has the state when all of them have theirs.

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

__all__ = ["Hear", "HeardStep", "IncomingState", "Listener"]

SOON_S = 0.5
"""A state that comes within this time is waited for: the others are told sooner that this replica computes."""
_LEAST_BYTES = 1 << 28  # of sums that may be kept, however small the state is
_MOST_STEPS = 64  # that are kept, however small they are


@dataclass(frozen=True, kw_only=True, slots=True)
class HeardStep:
    """A step of the others, of which this replica has the sum and not the state to apply it to."""

    message: torch.Tensor
    """The sum, in the memory of the host."""
    leaving: frozenset[int] = frozenset()
    """Ranks that said in it that they leave."""
    arrived: frozenset[int] = frozenset()
    """Ranks that said in it that they have the state."""


Hear = Callable[[frozenset[int], Callable[[], bool]], HeardStep]
"""Takes part in the next step of the others; given the ranks that listen, and what says, when the sum is there, whether
this replica computes from the next step on. Raises `PeerLost`."""


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
        except PeerLost as error:
            self._error = error.with_traceback(None)  # which would keep the connections open, and the others waiting
        except Exception as error:  # raised again in the thread of the training loop
            self._error = error
        finally:
            self._done.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the transfer; whether it has come, with the state or with a failure."""
        return self._done.wait(timeout_s)

    def take(self) -> Any:
        """Wait for the state and return it. Raises `PeerLost` or, for what is no state, a CheckpointError."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._state


class Listener:
    """Hears the steps of the others in a thread, until this replica has applied them all, leaves, or the group breaks.

    Keeps sums of twice the size of the state or 256 MB, whichever is more, and no more than 64. From when the first one
    is applied, twice as many are heard as are kept then: enough for a replica that applies steps in two thirds of the
    time that they take. Should that not be enough, the others wait until all of them are applied.
    """

    def __init__(
        self,
        hear: Hear,
        listening: frozenset[int],
        incoming: IncomingState,
        *,
        rank: int,
        all_agree: Callable[[bool], bool] = lambda flag: flag,
    ) -> None:
        """`listening`: the replicas that listen, by their ranks in the group; `rank`: this one. `all_agree`: tells all
        ranks of this replica, which call it together, whether a flag is set on each of them."""
        self.leaves = False
        """Whether this replica has told the others that it leaves."""
        self.ended = threading.Event()
        """Set when the thread has sent its last message."""
        self._all_agree = all_agree
        self._hear, self._listening, self._incoming, self._rank = hear, listening, incoming, rank
        self._steps: deque[HeardStep] = deque()
        self._further: int | None = None  # steps that may still be heard, since the first one was applied
        self._waits = False  # the training loop, which has applied everything, for the next step
        self._closed = False
        self._error: Exception | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True, name="ebbflow-hear").start()

    def _run(self) -> None:
        try:
            while self._all_agree(self._has_room()):
                step = self._hear(self._listening, self._caught_up)
                self._listening -= step.arrived
                self.leaves = self._rank in step.leaving
                with self._changed:
                    self._steps.append(step)
                    if self._further is not None:
                        self._further -= 1
                    self._changed.notify_all()
                if step.leaving:  # the others go on in another group
                    raise PeerLost("a replica left the group while this one listened")
                if self._rank in step.arrived:
                    break
        except PeerLost as error:
            self._error = error.with_traceback(None)  # as above
        except Exception as error:  # raised again in the thread of the training loop
            self._error = error
        finally:
            with self._changed:
                self.ended.set()
                self._changed.notify_all()

    def _has_room(self) -> bool:
        """Wait for room for one more step; False if nobody wants it."""
        with self._changed:
            kept = sum(step.message.nbytes for step in self._steps)
            full = self._steps and kept + self._steps[-1].message.nbytes > max(2 * self._incoming.size, _LEAST_BYTES)
            if full or len(self._steps) == _MOST_STEPS or self._further == 0:
                self._changed.wait_for(lambda: self._closed or self._caught_up())
            return not self._closed

    def _caught_up(self) -> bool:
        with self._changed:
            return self._waits and not self._steps

    @property
    def failure(self) -> Exception | None:
        """Why no further step is heard; None if one is."""
        with self._changed:
            return (self._error or PeerLost("there is no further step to hear")) if self.ended.is_set() else None

    def next(self) -> HeardStep:
        """Wait for the next step, when all before it are applied. Raises `PeerLost` if there is none."""
        with self._changed:
            self._waits = True
            if self._further is None:
                self._further = 2 * len(self._steps) + 2
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._steps or self.ended.is_set())
            self._waits = False
            if self._steps:
                return self._steps.popleft()
        assert self.failure is not None
        raise self.failure

    def close(self) -> None:
        """Nobody wants to hear anything any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
