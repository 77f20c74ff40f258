"""Process groups and stores of torch, for processes that come and go.

This is the one module that constructs torch's gloo and NCCL groups, for the replicas of a live fleet and for the
workers of a Dask cluster. The processes of a group meet at a store that answers only those who know its secret
(`core/key_store.py`); torch's own TCPStore would answer everybody.

None of these groups is torch's default group: a process may belong to several runs, and a group must be able to end
before its process does. A killed process closes its connections, so that whoever waits for it fails at once. A machine
that vanished or a process that was stopped closes nothing; for those, a group can ask meanwhile who has stopped.
"""

from __future__ import annotations

import hashlib
import hmac
import queue
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ebbflow.core.key_store import KeyStore, KeyStoreClient, StoreLost
from ebbflow.torch_api import Store, gloo_group

__all__ = [
    "CHUNK_BYTES", "BackendFailed", "Fault", "NcclFactory", "PeerLost", "ProcessGroup", "TorchStore", "no_fault",
    "open_store",
]  # fmt: skip

Fault = Callable[[str], None]
"""Called at named points of a step, where tests let a process die."""

NcclFactory = Callable[["TorchStore", int, int, timedelta], Any]
"""(store, rank, size, timeout) -> an NCCL group whose collectives can be aborted."""

_LONGEST_PORT = 5  # digits
_CONNECT_SLACK_S = 1.0  # after which gloo itself should have said why it could not connect
_POLL = timedelta(seconds=0.5)  # how often it is asked who has stopped
CHUNK_BYTES = 1 << 20
"""Most bytes in one message to a peer. A sum that uses the same connection waits for the message before it: 8 ms on a
link of 1 Gbit/s."""
_CONNECTION_LOST = re.compile(
    r"abort|broken pipe|clos|connect|network|peer|refused|remote|reset|route|socket|store|time ?d? ?out|unreachable",
    re.I,
)
"""What gloo says when a connection broke or could not be made. Everything else is a failure of gloo itself.

A firewall, or a failure of gloo that speaks of a socket, sounds like this, too. So the words only decide how soon a
failure that repeats with the same processes is taken for one that stays."""


class PeerLost(Exception):
    """A peer has gone or did not answer in time; the process group cannot be used any more."""


class BackendFailed(PeerLost):
    """The backend failed, perhaps for a reason that has nothing to do with a peer: if it fails a few more times with
    the same peers, it will fail for ever."""


def no_fault(point: str) -> None:
    """Do nothing."""


def open_store(rendezvous: str, secret: bytes, *, timeout_s: float) -> KeyStoreClient:
    """Connect to the store at HOST:PORT, or to the keys below a prefix of it (HOST:PORT/PREFIX).

    Raises `StoreLost` if nobody serves it, and `NotAuthenticated` if it has another secret.
    """
    address, _, prefix = rendezvous.partition("/")
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or len(port) > _LONGEST_PORT:
        raise StoreLost(f"{address!r} is not the address of a store")
    return KeyStoreClient(host.strip("[]"), int(port), secret, prefix=prefix, timeout_s=timeout_s)


class TorchStore(Store):
    """A store as torch's process groups use it. It has to be kept as long as they are."""

    def __init__(self, rendezvous: str, secret: bytes, *, timeout_s: float) -> None:
        super().__init__()
        self._settings = (rendezvous, secret, timeout_s)
        self._client = open_store(rendezvous, secret, timeout_s=timeout_s)
        self._clones: list[TorchStore] = []

    def below(self, prefix: str) -> TorchStore:
        """The keys below a prefix, over a connection of its own."""
        rendezvous, secret, timeout_s = self._settings
        return TorchStore(f"{rendezvous}/{prefix}", secret, timeout_s=timeout_s)

    def clone(self) -> TorchStore:
        """The same keys over another connection, kept as long as this one, since torch keeps only its own half."""
        rendezvous, secret, timeout_s = self._settings
        self._clones.append(TorchStore(rendezvous, secret, timeout_s=timeout_s))
        return self._clones[-1]

    def set(self, key: str, value: bytes | str) -> None:
        """Set a value."""
        self._client.set({key: value.encode() if isinstance(value, str) else bytes(value)})

    def get(self, key: str) -> bytes:
        """The value of a key, for which it waits."""
        return self._get([key], self._settings[2])[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        self._get(keys, self._settings[2] if timeout is None else timeout.total_seconds())

    def _get(self, keys: list[str], timeout_s: float) -> list[bytes]:
        found = self._client.get(keys, timeout_s=timeout_s)
        if found is None:
            raise StoreLost(f"{', '.join(keys)} did not come within {timeout_s:g} s")
        return found

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return self._client.check(keys)

    def add(self, key: str, amount: int) -> int:
        """Add to a number; the sum."""
        return self._client.add(key, amount)

    def delete_key(self, key: str) -> bool:
        """Delete a key; whether it was there."""
        return self._client.delete(key)

    def close(self) -> None:
        """End the connections."""
        self._client.close()
        for clone in self._clones:
            clone.close()


class ProcessGroup:
    """Processes that add up tensors and send each other bytes, until one of them is lost.

    CPU tensors and bytes are sent by gloo, bound to one address; CUDA tensors by NCCL, or by gloo, too, through the
    memory of the host: NCCL refuses two processes on one GPU. Bytes carry a code that takes the secret to compute, and
    others are refused; tensors that are added up carry none. After a `PeerLost` the group cannot be used any more. A
    group of one process connects with nobody.
    """

    def __init__(
        self,
        rendezvous: str,
        rank: int,
        size: int,
        *,
        host: str,
        secret: bytes,
        connect_s: float,
        timeout_s: float,
        device: torch.device | str = "cpu",
        by_nccl: bool = True,
        store: KeyStore | None = None,
        nccl: NcclFactory | None = None,
        stopped: Callable[[], Sequence[str]] | None = None,
        fault: Fault = no_fault,
    ) -> None:
        """`rendezvous`: HOST:PORT/PREFIX of the store where the processes meet. `host`: the address that this process
        listens on. `secret`: of the store. `connect_s`: how long connecting may take. `timeout_s`: how long a
        collective may take. `store`: the store of the rendezvous, in the process that serves it for this group alone;
        closed with the group. `by_nccl`: whether NCCL carries CUDA tensors, or gloo. `nccl`: makes the NCCL
        group; by default torch's own, whose collectives cannot be aborted. `stopped`: asked every half second while a
        collective takes that long; it names the peers that will not answer, and the collective is given up."""
        self.rendezvous = rendezvous
        self.rank = rank
        self.size = size
        self.host = host
        self.device = torch.device(device)
        self._by_nccl = self.device.type == "cuda" and by_nccl
        self._secret = secret
        self._stores: list[TorchStore] = []
        self._transfers: Counter[tuple[int, int]] = Counter()
        self._connect_timeout = timedelta(seconds=connect_s)
        self._timeout = timedelta(seconds=timeout_s)
        self._store = store
        self._nccl_factory = nccl
        self._stopped = stopped
        self._fault = fault
        self._gloo: Any = None
        self._nccl: Any = None
        self._begun: list[dist.Work] = []
        self._passing = 0  # messages that are being sent or received
        self.patience = self._timeout
        """How long the next collectives may take."""

    def connect(self) -> None:
        """Connect with the other processes, which all call this."""
        if self.size == 1:
            return
        backend: Any = dist  # torch's type stubs know little of its process groups
        try:
            store = TorchStore(self.rendezvous, self._secret, timeout_s=self._connect_timeout.total_seconds())
            self._stores = [store]
            self._gloo = self._connect_gloo(store)
        except RuntimeError as error:
            raise _lost(error, "the processes could not connect: ") from None
        if self._by_nccl:
            make = self._nccl_factory or backend.ProcessGroupNCCL
            try:
                self._stores.append(store.below("nccl"))
                self._nccl = make(self._stores[-1], self.rank, self.size, self._timeout)
            except StoreLost as error:
                raise PeerLost(f"the processes could not connect: {error}") from None
            except RuntimeError as error:
                raise BackendFailed(f"NCCL could not connect: {_words(error)}") from None

    def _connect_gloo(self, store: TorchStore) -> Any:
        """Gloo waits five times as long as it is told for a peer that is to connect with it: so a thread waits for it.

        A group that is connected after all is dropped then.
        """
        outcome: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def connect() -> None:
            try:
                outcome.put(gloo_group(store, self.rank, self.size, host=self.host, timeout=self._connect_timeout))
            except Exception as error:
                outcome.put(error)

        threading.Thread(target=connect, daemon=True, name="ebbflow-connect").start()
        seconds = self._connect_timeout.total_seconds()
        try:
            connected = outcome.get(timeout=seconds + _CONNECT_SLACK_S)
        except queue.Empty:
            reason = f"the processes could not connect within {seconds:g} s: not all of them reach each other"
            raise PeerLost(reason) from None
        if isinstance(connected, Exception):
            raise connected
        return connected

    def barrier(self) -> None:
        """Wait until all processes have called this."""
        if self.size > 1:
            options = dist.BarrierOptions()
            options.timeout = self.patience
            self._wait(self._begin(lambda: self._gloo.barrier(options), "barrier"))

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace the tensor by its sum over the group, with the same bits in every process.

        After a `PeerLost` the tensor is undefined, and may be written to for a while: use another one afterwards.
        """
        self.begin_all_reduce(tensor)()

    def begin_all_reduce(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Begin an `all_reduce`; the result waits for the sum. All processes begin theirs in the same order."""
        if self.size == 1:
            self._fault("allreduce")
            return lambda: None
        options = dist.AllreduceOptions()  # by default a sum
        options.timeout = self.patience
        by_nccl = self._by_nccl and tensor.device.type != "cpu"
        group = self._nccl if by_nccl else self._gloo
        try:
            work = self._begin(lambda: group.allreduce([tensor], options), "allreduce")
        except PeerLost as problem:
            raise _noted(problem, by_nccl=by_nccl) from None
        self._begun.append(work)

        def wait() -> None:
            try:
                self._wait(work)
                self._begun.remove(work)
                error = self._nccl.errored() if by_nccl and self._nccl_factory is not None else None
                if error is not None:  # asking for it has waited for the device
                    raise PeerLost(_words(error))
            except PeerLost as problem:
                raise _noted(problem, by_nccl=by_nccl) from None

        return wait

    def send(self, data: memoryview, to: int) -> None:
        """Send the bytes of a writable buffer to a rank that receives them."""
        code = self._code(self.rank, to)
        length = len(data).to_bytes(8, "big")
        code.update(length)
        self._pass_on(self._connected.send, _tensor(length + code.digest()), to, "announce")
        for chunk in torch.frombuffer(data, dtype=torch.uint8).split(CHUNK_BYTES):  # type: ignore[no-untyped-call]
            code.update(chunk.numpy())
            self._pass_on(self._connected.send, chunk, to, "send")
        self._pass_on(self._connected.send, _tensor(code.digest()), to, "send")

    def receive(self, source: int) -> memoryview:
        """Receive the bytes that a rank sends; a `PeerLost` if they are not what a process with the secret sent."""
        code = self._code(source, self.rank)
        announced = torch.empty(8 + code.digest_size, dtype=torch.uint8)
        self._pass_on(self._connected.recv, announced, source, "announced")
        length = announced.numpy()[:8].tobytes()
        code.update(length)
        _check_code(announced[8:], code, source)
        body = torch.empty(int.from_bytes(length, "big"), dtype=torch.uint8)
        for chunk in body.split(CHUNK_BYTES):  # type: ignore[no-untyped-call]
            self._pass_on(self._connected.recv, chunk, source, "receive")
            code.update(chunk.numpy())
        found = torch.empty(code.digest_size, dtype=torch.uint8)
        self._pass_on(self._connected.recv, found, source, "receive")
        _check_code(found, code, source)
        return body.numpy().data

    def send_tensors(self, tensors: Iterable[torch.Tensor], to: int) -> None:
        """Send the numbers of tensors to a rank that receives them; of one on a GPU a chunk at a time is copied.

        They must not change meanwhile. A thread of its own may do this while others compute and add up.
        """
        code = self._code(self.rank, to)
        for chunk in _chunks(tensors):
            in_memory = chunk.cpu()
            code.update(in_memory.numpy().data)
            self._pass_on(self._connected.send, in_memory, to, "send")
        self._pass_on(self._connected.send, _tensor(code.digest()), to, "send")

    def receive_tensors(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        """Fill these contiguous tensors of the CPU with the numbers that a rank sends."""
        code = self._code(source, self.rank)
        for chunk in _chunks(tensors):
            self._pass_on(self._connected.recv, chunk, source, "receive")
            code.update(chunk.numpy().data)
        found = torch.empty(code.digest_size, dtype=torch.uint8)
        self._pass_on(self._connected.recv, found, source, "receive")
        _check_code(found, code, source)

    @property
    def _connected(self) -> Any:
        """The gloo group, which another thread may have closed."""
        gloo = self._gloo
        if gloo is None:
            raise PeerLost("the group was closed")
        return gloo

    def _code(self, source: int, to: int) -> hmac.HMAC:
        """The code of a transfer, to which its bytes are added; each transfer of a group has another one."""
        self._transfers[source, to] += 1
        about = f"{self.rendezvous} {source} {to} {self._transfers[source, to]}"
        return hmac.new(self._secret, about.encode(), hashlib.sha256)

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
        if self._passing or any(not work.is_completed() for work in self._begun):
            # Freeing the group waits for its collectives, some of which may wait for a process that has given up, too.
            threading.Thread(target=list.clear, args=([self._gloo, *self._begun],), daemon=True).start()
        self._begun = []
        self._gloo = self._nccl = None
        while self._stores:
            self._stores.pop().close()
        if self._store is not None:
            self._store.close()
            self._store = None

    # Waiting ----------------------------------------------------------------------------------------------------------

    def _begin(self, begin: Callable[[], dist.Work], point: str) -> dist.Work:
        try:
            work = begin()
        except RuntimeError as error:
            raise _lost(error) from None
        self._fault(point)
        return work

    def _wait(self, work: dist.Work) -> None:
        """Wait for a collective."""

        def ended() -> bool:
            try:
                work.wait(_POLL) if self._stopped is not None else work.wait()
            except RuntimeError as error:
                if self._stopped is None or work.is_completed():
                    raise _lost(error) from None
                return False
            return True

        self._wait_until(ended, work, self.patience)

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
                raise _lost(error)
            return True

        self._passing += 1
        try:
            self._wait_until(ended, work, self._timeout)
        finally:
            self._passing -= 1

    def _wait_until(self, ended: Callable[[], bool], work: dist.Work, timeout: timedelta) -> None:
        """Wait until work has ended, or cannot end any more; `ended` itself waits for a while."""
        deadline = time.monotonic() + timeout.total_seconds()
        while not ended():
            stopped = self._stopped() if self._stopped is not None else ()
            if stopped or time.monotonic() > deadline:
                self._abandon(work)
                reason = f"no heartbeat of {', '.join(stopped)}" if stopped else f"no answer in {timeout}"
                raise PeerLost(reason)

    def _abandon(self, work: dist.Work) -> None:
        """Leave a collective that cannot end; its thread ends by the timeout, and only then may the group be freed."""
        held = (work, self._gloo, self._nccl)
        threading.Thread(target=_hold, args=(held, self._timeout), daemon=True).start()


def _chunks(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The bytes of tensors, as pieces that one message can hold; of a tensor that is not contiguous, of a copy."""
    for tensor in tensors:
        if tensor.numel():
            yield from tensor.detach().contiguous().reshape(-1).view(torch.uint8).split(CHUNK_BYTES)  # type: ignore[no-untyped-call]


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _check_code(found: torch.Tensor, code: hmac.HMAC, source: int) -> None:
    if not hmac.compare_digest(found.numpy().tobytes(), code.digest()):
        raise PeerLost(f"what rank {source} sent was changed on the way, or its sender does not know the secret")


def _hold(held: tuple[Any, ...], timeout: timedelta) -> None:
    time.sleep(timeout.total_seconds() + 1)


def _noted(problem: PeerLost, *, by_nccl: bool) -> PeerLost:
    """What a failed sum means: whatever NCCL says may have nothing to do with a peer."""
    return BackendFailed(f"NCCL: {problem}") if by_nccl else problem


def _lost(error: BaseException, before: str = "") -> PeerLost:
    """What a failure of gloo means."""
    lost = isinstance(error, StoreLost) or _CONNECTION_LOST.search(str(error)) is not None
    return (PeerLost if lost else BackendFailed)(before + _words(error))


def _words(error: BaseException) -> str:
    """What a backend says: the first line of its message, and behind it what NCCL calls the last error."""
    text = str(error)
    first = text.partition("\n")[0]
    first = first.rpartition("] ")[2][:200] if first.startswith("[") else first[:200]
    last = text.partition("Last error:")[2].strip()
    return f"{first}: {last.partition(chr(10))[0][:200]}" if last else first
