"""What a Dask worker answers to a run's driver: a handler beside Dask's own, and the replicas behind it.

Messages between driver and workers go over Dask's connections, with Dask's security, but not through its scheduler's
task graph: a task a step and worker costs milliseconds that a message does not.
"""

from __future__ import annotations

import asyncio
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from distributed import get_worker
from distributed.comm.addressing import get_address_host
from distributed.protocol.pickle import dumps, loads
from distributed.protocol.serialize import to_serialize

from ebbflow.engines.dask.replica import Replica, Settle, Work
from ebbflow.engines.process_group import PeerLost, ProcessGroup, serve_store

__all__ = ["HANDLER", "Failure", "install"]

HANDLER = "ebbflow"


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a worker has no answer."""

    text: str
    partner: bool = False
    """Another worker is to blame: the step is lost, and nothing else."""
    gone: bool = False
    """The worker did not answer at all."""
    error: BaseException | None = None
    """What the user's model, loss or data raised."""


@dataclass(eq=False)
class _Served:
    """One run's replica on this worker, and the only thread that touches it."""

    host: str
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "ebbflow"))
    replica: Replica | None = None
    store: Any = None

    def start(self, *, blueprint: bytes, data: bytes, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(True)  # denormals late in training slow a CPU down several times
        self.replica = Replica.load(blueprint, data)

    def gradients(self, *, weights: Any, work: Work) -> Any:
        return self._replica.gradients(weights, work)

    def step(self, *, settle: Settle | None, work: Work) -> Any:
        return self._replica.step(settle, work)

    def open_store(self) -> tuple[str, int]:
        self.store = serve_store(self.host)
        return self.host, self.store.port

    def join(self, *, settle: Settle | None, group: dict[str, Any], **options: Any) -> None:
        store, self.store = self.store, None
        made = ProcessGroup(host=self.host, store=store if group["rank"] == 0 else None, **group)
        self._replica.join(settle, made, **options)

    def state(self, *, settle: Settle | None) -> bytes:
        return self._replica.state(settle)

    def load_state(self, *, content: bytes) -> None:
        self._replica.load_state(content)

    def stop(self) -> None:
        if self.replica is not None:
            self.replica.leave()
        self.replica = None

    @property
    def _replica(self) -> Replica:
        if self.replica is None:
            raise RuntimeError("this worker has no replica of the run; was it restarted?")
        return self.replica

    def answer(self, what: str, arguments: dict[str, Any]) -> Any:
        """Do it, in the replica's thread; errors are answers, too."""
        try:
            return getattr(self, what)(**arguments)
        except PeerLost as error:
            self._replica.leave()  # those who wait for this one are told in turn
            return Failure(text=str(error), partner=True)
        except Exception as error:  # whatever a user's model raises belongs to the user, in the driver
            if self.replica is not None:
                self.replica.leave()
            return Failure(text="".join(traceback.format_exception(error)), error=_portable(error))


def _portable(error: Exception) -> Exception:
    """The error if it survives the way to the driver, else its kind and its text."""
    try:
        loads(dumps(error))  # type: ignore[no-untyped-call]
    except Exception:  # one that holds a lock, or whose class asks for more arguments than it keeps
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


_RUNS: dict[tuple[str, str], _Served] = {}
"""By the run and the address of the worker: several workers may share a process."""


def _host(address: str) -> str:
    """Where a worker listens for its partners; those that share a process need no network."""
    return "127.0.0.1" if address.startswith("inproc://") else get_address_host(address)


async def _handle(run: str, what: str, arguments: dict[str, Any], address: str) -> dict[str, Any]:
    served = _RUNS.setdefault((run, address), _Served(_host(address)))
    answer = await asyncio.get_running_loop().run_in_executor(served.thread, served.answer, what, arguments)
    if what == "stop":
        _RUNS.pop((run, address), None)
        served.thread.shutdown(wait=False)
    return {"status": "OK", "answer": to_serialize(answer)}  # type: ignore[no-untyped-call]


def install() -> int:
    """A Dask task: make this worker answer to drivers; the threads that it may compute with."""
    worker = get_worker()
    address = str(worker.address)

    async def handle(run: str, what: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return await _handle(run, what, arguments, address)

    worker.handlers[HANDLER] = handle
    return int(worker.state.nthreads)
