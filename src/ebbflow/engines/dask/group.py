"""A group of replicas that add up their gradients: gloo on CPUs, NCCL on GPUs, made anew when its members change.

Not torch's default group: a worker may be a member of several runs, and a group must be able to end before the process.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

__all__ = ["Group", "PartnerLost", "open_store"]

_STORE_PATIENCE = datetime.timedelta(seconds=60)


class PartnerLost(Exception):
    """Another member of the group is gone, or did not come within the group's patience."""


@contextmanager
def _partners() -> Iterator[None]:
    """What torch raises of a connection or a timeout, as one kind of error."""
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        raise PartnerLost(str(error).partition("\n")[0][:200]) from None


def open_store(host: str) -> TCPStore:
    """Where the members of a group find each other; lives as long as its first member holds it."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_STORE_PATIENCE)


@dataclass(eq=False, kw_only=True)
class Group:
    """One member's end of a group."""

    name: str
    rank: int
    size: int
    host: str
    """This worker's own address."""
    store_host: str
    store_port: int
    patience_s: float
    """How long a member waits for the others in a sum. One that dies is noticed at once: its connections close."""
    connect_s: float
    """How long connecting may take; who dies before it is connected is not noticed."""
    device: str = "cpu"
    store: Any = None
    """The first member's own store."""
    _backend: Any = field(default=None, init=False)

    def open(self) -> None:
        """Connect with the other members; all of them call it."""
        if self.size > 1:
            with _partners():
                self._connect()

    def _connect(self) -> None:
        within = datetime.timedelta(seconds=self.connect_s)
        if self.store is None:
            self.store = TCPStore(
                self.store_host, self.store_port, is_master=False, wait_for_workers=False, timeout=within
            )
        store = PrefixStore(self.name, self.store)
        if torch.device(self.device).type == "cuda":
            self._backend = dist.ProcessGroupNCCL(store, self.rank, self.size, self._patience)  # type: ignore[arg-type]
            return
        gloo: Any = dist.ProcessGroupGloo  # its options are not in the type stubs
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=self.host)]
        options._timeout = within
        self._backend = gloo(store, self.rank, self.size, options)

    @property
    def _patience(self) -> datetime.timedelta:
        return datetime.timedelta(seconds=self.patience_s)

    def add_up(self, buffer: torch.Tensor) -> None:
        """Sum the buffer over all members, in place."""
        if self._backend is not None:
            options = dist.AllreduceOptions()  # by default a sum
            options.timeout = self._patience
            with _partners():
                self._backend.allreduce([buffer], options).wait()

    def send_bytes(self, content: bytes, source: int) -> bytes:
        """The `content` of the member `source`, to all members."""
        if self._backend is None:
            return content
        with _partners():
            length = torch.tensor([len(content)], device=self.device)
            self._broadcast(length, source)
            if self.rank == source:
                row = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self.device)
            else:
                row = torch.empty(int(length), dtype=torch.uint8, device=self.device)
            self._broadcast(row, source)
        return content if self.rank == source else row.cpu().numpy().tobytes()

    def _broadcast(self, row: torch.Tensor, source: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.timeout = self._patience
        self._backend.broadcast([row], options).wait()

    def close(self) -> None:
        """End the group; members that wait for this one get an error."""
        self._backend = self.store = None
