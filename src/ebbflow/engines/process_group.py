"""Process groups and stores of torch, for processes that come and go.

This is the one module that constructs torch's gloo and NCCL groups and its TCP stores, for the replicas of a live fleet
and for the workers of a Dask cluster.

None of these groups is torch's default group: a process may belong to several runs, and a group must be able to end
before its process does. A killed process closes its connections, so that whoever waits for it fails at once. A machine
that vanished or a process that was stopped closes nothing; for those, a group can ask meanwhile who has stopped.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ebbflow.torch_api import gloo_group, prefix_store, tcp_store

if TYPE_CHECKING:
    from ebbflow.torch_api import Store, TCPStore

__all__ = [
    "Fault", "NcclFactory", "PeerLost", "ProcessGroup", "no_fault", "open_store", "serve_store",
]  # fmt: skip

Fault = Callable[[str], None]
"""Called at named points of a step, where tests let a process die."""

NcclFactory = Callable[[str, int, int, timedelta], Any]
"""(rendezvous, rank, size, timeout) -> an NCCL group whose collectives can be aborted."""

_POLL = timedelta(seconds=0.5)  # how often it is asked who has stopped
_STORE_TIMEOUT = timedelta(seconds=60)
_CHUNK = 1 << 26  # bytes per message


class PeerLost(Exception):
    """A peer has gone or did not answer in time; the process group cannot be used any more."""


def no_fault(point: str) -> None:
    """Do nothing."""


def serve_store(host: str) -> TCPStore:
    """Serve a store on one address of this machine, for as long as the result is held; its `port` is chosen."""
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listener.getsockname()[1]
    return tcp_store(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=_STORE_TIMEOUT,
        master_listen_fd=listener.detach(),
        use_libuv=True,
    )


def open_store(rendezvous: str, *, timeout_s: float) -> Store:
    """Connect to the store at HOST:PORT, or to the keys below a prefix of it (HOST:PORT/PREFIX).

    Raises `PeerLost` if nobody serves it.
    """
    address, _, prefix = rendezvous.partition("/")
    host, _, port = address.rpartition(":")
    timeout = timedelta(seconds=timeout_s)
    try:
        client = tcp_store(host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise PeerLost(f"no store at {address}: {_first_line(error)}") from None
    return prefix_store(prefix, client) if prefix else client


class ProcessGroup:
    """Processes that add up tensors and send each other bytes, until one of them is lost.

    CPU tensors and bytes are sent by gloo, bound to one address; CUDA tensors by NCCL. After a `PeerLost` the group
    cannot be used any more. A group of one process connects with nobody.
    """

    def __init__(
        self,
        rendezvous: str,
        rank: int,
        size: int,
        *,
        host: str,
        connect_s: float,
        timeout_s: float,
        device: torch.device | str = "cpu",
        store: TCPStore | None = None,
        nccl: NcclFactory | None = None,
        stopped: Callable[[], Sequence[str]] | None = None,
        fault: Fault = no_fault,
    ) -> None:
        """`rendezvous`: HOST:PORT/PREFIX of the store where the processes meet. `host`: the address that this process
        listens on. `connect_s`: how long connecting may take. `timeout_s`: how long a collective may take. `store`:
        the store of the rendezvous, in the process that serves it; kept as long as the group. `nccl`: makes the NCCL
        group; by default torch's own, whose collectives cannot be aborted. `stopped`: asked every half second while a
        collective takes that long; it names the peers that will not answer, and the collective is given up."""
        self.rendezvous = rendezvous
        self.rank = rank
        self.size = size
        self.host = host
        self.device = torch.device(device)
        self._connect_timeout = timedelta(seconds=connect_s)
        self._timeout = timedelta(seconds=timeout_s)
        self._store = store
        self._nccl_factory = nccl
        self._stopped = stopped
        self._fault = fault
        self._gloo: Any = None
        self._nccl: Any = None

    def connect(self) -> None:
        """Connect with the other processes, which all call this."""
        if self.size == 1:
            return
        backend: Any = dist  # torch's type stubs know little of its process groups
        try:
            store = open_store(self.rendezvous, timeout_s=self._connect_timeout.total_seconds())
            self._gloo = gloo_group(store, self.rank, self.size, host=self.host, timeout=self._connect_timeout)
            if self.device.type == "cuda" and self._nccl_factory is not None:
                self._nccl = self._nccl_factory(f"{self.rendezvous}/nccl", self.rank, self.size, self._timeout)
            elif self.device.type == "cuda":
                nccl_store = prefix_store("nccl", store)
                self._nccl = backend.ProcessGroupNCCL(nccl_store, self.rank, self.size, self._timeout)
        except RuntimeError as error:
            raise PeerLost(f"the processes could not connect: {_first_line(error)}") from None

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace the tensor by its sum over the group, with the same bits in every process.

        After a `PeerLost` the tensor is undefined, and may be written to for a while: use another one afterwards.
        """
        if self.size == 1:
            self._fault("allreduce")
            return
        options = dist.AllreduceOptions()  # by default a sum
        options.timeout = self._timeout
        group = self._gloo if tensor.device.type == "cpu" else self._nccl
        self._wait(self._begin(lambda: group.allreduce([tensor], options), "allreduce"))
        if tensor.device.type != "cpu" and self._nccl_factory is not None:
            error = self._nccl.errored()  # waits for the device
            if error is not None:
                raise PeerLost(_first_line(error))

    def send(self, data: memoryview, to: int) -> None:
        """Send the bytes of a writable buffer to a rank that receives them."""
        self._pass_on(self._gloo.send, torch.tensor([len(data)]), to, "announce")
        for chunk in torch.frombuffer(data, dtype=torch.uint8).split(_CHUNK):  # type: ignore[no-untyped-call]
            self._pass_on(self._gloo.send, chunk, to, "send")

    def receive(self, source: int) -> memoryview:
        """Receive the bytes that a rank sends."""
        length = torch.zeros(1, dtype=torch.int64)
        self._pass_on(self._gloo.recv, length, source, "announced")
        body = torch.empty(int(length), dtype=torch.uint8)
        for chunk in body.split(_CHUNK):  # type: ignore[no-untyped-call]
            self._pass_on(self._gloo.recv, chunk, source, "receive")
        return body.numpy().data

    def broadcast(self, data: bytes, source: int) -> bytes:
        """Give the `data` of the rank `source` to all ranks, which all call this."""
        if self.size == 1:
            return data
        length = torch.tensor([len(data)])
        self._broadcast(length, source)
        body = torch.empty(int(length), dtype=torch.uint8)
        if self.rank == source:
            body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._broadcast(body, source)
        return body.numpy().tobytes()

    def _broadcast(self, tensor: torch.Tensor, source: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.timeout = self._timeout
        self._wait(self._begin(lambda: self._gloo.broadcast([tensor], options), "broadcast"))

    def close(self) -> None:
        """Drop the connections, so that nobody waits for this process any longer. May be called from any thread."""
        if self._nccl is not None and self._nccl_factory is not None:
            self._nccl.abort()
        self._gloo = self._nccl = self._store = None

    # Waiting ----------------------------------------------------------------------------------------------------------

    def _begin(self, begin: Callable[[], dist.Work], point: str) -> dist.Work:
        try:
            work = begin()
        except RuntimeError as error:
            raise PeerLost(_first_line(error)) from None
        self._fault(point)
        return work

    def _wait(self, work: dist.Work) -> None:
        """Wait for a collective."""

        def ended() -> bool:
            try:
                work.wait(_POLL) if self._stopped is not None else work.wait()
            except RuntimeError as error:
                if self._stopped is None or work.is_completed():
                    raise PeerLost(_first_line(error)) from None
                return False
            return True

        self._wait_until(ended, work)

    def _pass_on(self, how: Callable[..., dist.Work], chunk: torch.Tensor, peer: int, point: str) -> None:
        """Send or receive. Gloo breaks the connection when waiting for these is cut short, so a thread waits."""
        done: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

        def wait(work: dist.Work) -> None:
            try:
                work.wait(self._timeout)
            except RuntimeError as error:
                done.put(error)
            else:
                done.put(None)

        work = self._begin(lambda: how([chunk], peer, 0), point)
        threading.Thread(target=wait, args=(work,), daemon=True, name="ebbflow-transfer").start()

        def ended() -> bool:
            try:
                error = done.get(timeout=_POLL.total_seconds())
            except queue.Empty:
                return False
            if error is not None:
                raise PeerLost(_first_line(error))
            return True

        self._wait_until(ended, work)

    def _wait_until(self, ended: Callable[[], bool], work: dist.Work) -> None:
        """Wait until work has ended, or cannot end any more; `ended` itself waits for a while."""
        deadline = time.monotonic() + self._timeout.total_seconds()
        while not ended():
            stopped = self._stopped() if self._stopped is not None else ()
            if stopped or time.monotonic() > deadline:
                self._abandon(work)
                reason = f"no heartbeat of {', '.join(stopped)}" if stopped else f"no answer in {self._timeout}"
                raise PeerLost(reason)

    def _abandon(self, work: dist.Work) -> None:
        """Leave a collective that cannot end; its thread ends by the timeout, and only then may the group be freed."""
        held = (work, self._gloo, self._nccl)
        threading.Thread(target=_hold, args=(held, self._timeout), daemon=True).start()


def _hold(held: tuple[Any, ...], timeout: timedelta) -> None:
    time.sleep(timeout.total_seconds() + 1)


def _first_line(error: BaseException) -> str:
    text = str(error).partition("\n")[0]
    return text.rpartition("] ")[2][:200] if text.startswith("[") else text[:200]
