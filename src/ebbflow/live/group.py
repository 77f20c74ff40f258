"""The connections of one circle of replicas. Nothing waits for the dead: a collective ends or is given up.

A killed process closes its connections, and whoever waits for it fails at once. A machine that vanished or a process
that was stopped closes nothing; while a collective takes long, the heartbeats of its members are looked at, and it is
given up when one has stopped.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

__all__ = ["Fault", "Group", "Lost", "no_fault", "open_store"]

Fault = Callable[[str], None]
"""Called at the named points of a step: tests let a replica die there."""

_PATIENCE = timedelta(seconds=0.5)  # before the heartbeats are looked at, and between two looks
_CHUNK = 1 << 26  # bytes of a state in one message


class Lost(Exception):
    """A member left while the others counted on it: the step is lost, and the circle is formed anew."""


def no_fault(point: str) -> None:
    """Nothing goes wrong."""


class Group:
    """Replicas that can add up tensors and send each other bytes, until one of them is lost.

    CPU tensors go by gloo, bound to one address; CUDA tensors by NCCL. After a `Lost` the group is of no more use.
    """

    def __init__(
        self,
        rendezvous: str,
        names: Sequence[str],
        rank: int,
        *,
        bind: str,
        device: torch.device,
        connect_s: float,
        timeout_s: float,
        silent: Callable[[Sequence[str]], Sequence[str]],
        fault: Fault = no_fault,
    ) -> None:
        """Connect with all `names`, who do the same. `rendezvous`: where, as HOST:PORT/PREFIX of a store.

        `silent` says whose heart has stopped.
        """
        self.names = tuple(names)
        self.rank = rank
        self._silent = silent
        self._fault = fault
        self._timeout = timedelta(seconds=timeout_s)
        self._nccl: Any = None
        backend: Any = dist  # torch's stubs know little of its process groups
        options = backend.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=connect_s)
        options._devices = [backend.ProcessGroupGloo.create_device(hostname=bind, lazy_init=False)]
        try:
            store = open_store(rendezvous, timeout_s=connect_s)
            self._gloo: Any = backend.ProcessGroupGloo(store, rank, len(self.names), options)
            if device.type == "cuda":
                from torchft.process_group import ProcessGroupNCCL  # aborts what hangs, where torch's ends the process

                self._nccl = ProcessGroupNCCL(self._timeout)
                self._nccl.configure(f"{rendezvous}/nccl", self.names[rank], rank, len(self.names))
        except RuntimeError as error:
            raise Lost(f"the replicas could not connect: {_first_line(error)}") from None

    @property
    def size(self) -> int:
        """Replicas in the circle."""
        return len(self.names)

    def add_up(self, tensor: torch.Tensor) -> None:
        """Replace the tensor by its sum over the group, the same bits everywhere. `Lost` leaves it undefined.

        A tensor whose sum was given up may still be written to for a while: use another one afterwards.
        """
        if self.size == 1:
            self._fault("allreduce")
            return
        options = dist.AllreduceOptions()  # by default a sum
        options.timeout = self._timeout
        group = self._gloo if tensor.device.type == "cpu" else self._nccl
        work = self._begin(lambda: group.allreduce([tensor], options), "allreduce")

        def ended() -> bool:
            try:
                work.wait(_PATIENCE)
            except RuntimeError as error:
                if work.is_completed():
                    raise Lost(_first_line(error)) from None
                return False
            return True

        self._await(ended, work)
        if tensor.device.type != "cpu" and (error := self._nccl.errored()) is not None:  # waits for the device
            raise Lost(_first_line(error))

    def send(self, data: memoryview, to: int) -> None:
        """Send bytes, of a buffer that can be written to, to a rank that receives them."""
        self._pass_on(self._gloo.send, torch.tensor([len(data)]), to, "announce")
        for part in torch.frombuffer(data, dtype=torch.uint8).split(_CHUNK):  # type: ignore[no-untyped-call]
            self._pass_on(self._gloo.send, part, to, "send")

    def receive(self, source: int) -> memoryview:
        """The bytes that a rank sends."""
        length = torch.zeros(1, dtype=torch.int64)
        self._pass_on(self._gloo.recv, length, source, "announced")
        body = torch.empty(int(length), dtype=torch.uint8)
        for part in body.split(_CHUNK):  # type: ignore[no-untyped-call]
            self._pass_on(self._gloo.recv, part, source, "receive")
        return body.numpy().data

    def _pass_on(self, how: Callable[..., dist.Work], part: torch.Tensor, peer: int, point: str) -> None:
        """Send or receive. Gloo breaks the connection when waiting for these is cut short, so a thread waits."""
        done: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

        def wait(work: dist.Work) -> None:
            try:
                work.wait(self._timeout)
            except RuntimeError as error:
                done.put(error)
            else:
                done.put(None)

        work = self._begin(lambda: how([part], peer, 0), point)
        threading.Thread(target=wait, args=(work,), daemon=True, name="ebbflow-transfer").start()

        def ended() -> bool:
            try:
                error = done.get(timeout=_PATIENCE.total_seconds())
            except queue.Empty:
                return False
            if error is not None:
                raise Lost(_first_line(error))
            return True

        self._await(ended, work)

    def _begin(self, begin: Callable[[], dist.Work], point: str) -> dist.Work:
        try:
            work = begin()
        except RuntimeError as error:
            raise Lost(_first_line(error)) from None
        self._fault(point)
        return work

    def _await(self, ended: Callable[[], bool], work: dist.Work) -> None:
        """Until it has ended, or cannot end any more; `ended` itself waits a little."""
        until = time.monotonic() + self._timeout.total_seconds()
        others = [name for i, name in enumerate(self.names) if i != self.rank]
        while not ended():
            gone = self._silent(others)
            if gone or time.monotonic() > until:
                self._give_up(work)
                raise Lost(f"no heartbeat of {', '.join(gone)}" if gone else f"no answer in {self._timeout}")

    def _give_up(self, work: dist.Work) -> None:
        """Leave a collective that cannot end; its thread ends by the timeout, and then the group can be freed."""
        held = (work, self._gloo, self._nccl)
        threading.Thread(target=_outlive, args=(held, self._timeout), daemon=True).start()

    def close(self) -> None:
        """Drop the connections, so that nobody waits for this replica any longer."""
        if self._nccl is not None:
            self._nccl.abort()
        self._gloo = self._nccl = None


def open_store(rendezvous: str, *, timeout_s: float) -> Store:
    """The store at HOST:PORT/PREFIX; `Lost` if nobody keeps it any more."""
    address, _, prefix = rendezvous.partition("/")
    host, _, port = address.rpartition(":")
    timeout = timedelta(seconds=timeout_s)
    try:
        client = TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise Lost(f"no store at {address}: {_first_line(error)}") from None
    return PrefixStore(prefix, client)


def _outlive(held: tuple[Any, ...], timeout: timedelta) -> None:
    time.sleep(timeout.total_seconds() + 1)


def _first_line(error: BaseException) -> str:
    text = str(error).partition("\n")[0]
    return text.rpartition("] ")[2][:200] if text.startswith("[") else text[:200]
