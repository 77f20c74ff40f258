"""The driver's side of a Dask cluster: who is there, starting replicas, sending messages, scaling."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from distributed import Client

from ebbflow._version import __version__
from ebbflow.core.units import format_seconds
from ebbflow.engines.dask.dask_worker import HANDLER, WorkerFailure
from ebbflow.engines.dask.distributed_api import known_workers, rpc_through_scheduler, to_serialize
from ebbflow.errors import ConfigError

__all__ = ["DaskCluster", "Message", "connect"]

Message = tuple[str, dict[str, Any]]
"""What a worker is to do, and the arguments."""

_LOOK_EVERY_S = 0.25
_RETRY_AFTER_S = 5.0
_STARTING, _SENDING = 256, 4
"""Workers that are started at the same time, and those of them that are sent model and data, which are large."""
_FRAMES = 0.6
"""Fraction of a worker's memory that a data set may take; it is there twice while it is unpacked."""
_START_TRIES = 2
"""A worker may fail once to make the model for a reason that passes, like an import during that of another thread."""


def connect(address: str | Any, *, timeout_s: float = 10.0) -> Client:
    """A Client for the address of a scheduler or for a cluster object; a Client is returned as it is."""
    if isinstance(address, Client):
        return address
    try:
        return Client(address, timeout=timeout_s)  # type: ignore[no-untyped-call]
    except (OSError, TimeoutError, ValueError) as error:
        raise ConfigError(
            f"no Dask cluster answers at {address} within {format_seconds(timeout_s)} ({error}); is the scheduler "
            f"running (dask scheduler), and is this its address?"
        ) from None


def _starter() -> Callable[[str], Any]:
    """A task that arrives even where ebbflow is not installed: a nested function is pickled by value."""

    def start(version: str) -> Any:
        try:
            import ebbflow._version as found
            from ebbflow.engines.dask.dask_worker import install
        except ImportError as error:
            return f"cannot import ebbflow ({error}); install it there: pip install 'ebbflow[dask]=={version}'"
        if found.__version__ != version:
            return f"has ebbflow {found.__version__}, this process {version}; install the same version on both"
        return install()

    return start


class DaskCluster:
    """The workers of a cluster that have a replica of one run, and those that are being given one."""

    def __init__(
        self,
        client: Client,
        run: str,
        *,
        blueprint: bytes,
        data: bytes,
        direct: bool,
        on_event: Callable[[str, str], None],
    ) -> None:
        if client.status != "running" or client.asynchronous:
            raise ConfigError(
                f"the Client is {'asynchronous' if client.asynchronous else client.status}; expected one that is "
                f"running and synchronous: Client(address)"
            )
        self.client = client
        self.run = run
        self.problems: dict[str, str] = {}
        """Address of a worker -> why it cannot be used."""
        self._blueprint, self._data, self._direct, self._on_event = blueprint, data, direct, on_event
        self._ready: dict[str, int] = {}  # address -> number of arrival
        self._arrivals = 0
        self._starting: dict[str, Future[str | None]] = {}
        self._lost: dict[str, float] = {}
        self._looked = -_LOOK_EVERY_S
        self._threads = ThreadPoolExecutor(_STARTING, "ebbflow-start")
        self._sending = threading.Semaphore(_SENDING)
        self._tasks: dict[str, Any] = {}
        self._served: set[str] = set()  # workers that may have a replica, also lost ones and ones that are not ready
        self._closing = False
        self._rpcs: dict[str, Any] = {}

    # -- who is there ----------------------------------------------------------------------------------------------

    def look(self, *, now: bool = False) -> list[str]:
        """The workers with a replica, in the order of their arrival; newcomers are started in the background."""
        if now or time.monotonic() - self._looked >= _LOOK_EVERY_S or any(f.done() for f in self._starting.values()):
            self._looked = time.monotonic()
            self._take_in(self._listed())
        return list(self._ready)

    def arrival(self, address: str) -> int | None:
        """Number of a worker's arrival, a new one when it comes back; None if it is not there."""
        return self._ready.get(address)

    @property
    def starting(self) -> int:
        """Number of new workers that are not ready yet."""
        return len(self._starting)

    def _listed(self) -> Mapping[str, Mapping[str, Any]]:
        workers: Mapping[str, Mapping[str, Any]] = self._sync(self._known)
        # A worker that is paused, for its memory or its start, still answers messages.
        return {a: info for a, info in workers.items() if not str(info.get("status", "")).startswith("clos")}

    def _sync(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a coroutine in the Client's event loop, which ends with the Client."""
        try:
            return self.client.sync(function, *arguments)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if self.client.status != "closed":
                raise
            raise ConfigError(
                f"the Client was closed while a run used it ({error}), and without it no worker can be reached; leave "
                f"the engine first, then close the Client"
            ) from None

    async def _known(self) -> Mapping[str, Mapping[str, Any]]:
        try:
            return await known_workers(self.client)
        except (OSError, TimeoutError) as error:
            raise ConfigError(
                f"the Dask scheduler no longer answers ({error}), and without it no worker can be reached; start "
                f"another cluster and run again"
            ) from None

    def _take_in(self, listed: Mapping[str, Mapping[str, Any]]) -> None:
        for address in [address for address in self._ready if address not in listed]:
            self.lose(address)
        for address, start in list(self._starting.items()):
            if address not in listed and address in self._tasks:
                self._tasks.pop(address).cancel()  # it would wait for the worker to come back
            if start.done():
                del self._starting[address]
                self._tasks.pop(address, None)
                if address not in listed or start.exception() is not None:
                    self.lose(address)
                    continue
                problem = start.result()
                if problem is None:
                    self._arrivals += 1
                    self._ready[address] = self._arrivals
                else:
                    self.problems[address] = problem
                    self._on_event("worker refused", f"{address} {problem}")
        for address, info in listed.items():
            again = time.monotonic() - self._lost.get(address, -_RETRY_AFTER_S) >= _RETRY_AFTER_S
            if again and not {address} & (self._ready.keys() | self._starting.keys() | self.problems.keys()):
                self._starting[address] = self._threads.submit(self._start, address, dict(info))

    def lose(self, address: str) -> None:
        """Treat a worker as lost; if it is seen again, it starts as a new one."""
        self._ready.pop(address, None)
        self._rpcs.pop(address, None)
        self._lost[address] = time.monotonic()

    def _start(self, address: str, info: Mapping[str, Any]) -> str | None:
        """Make a replica, in a thread; returns why it cannot be made, or None. Raises if the worker dies meanwhile."""
        limit, size = info.get("memory_limit") or 0, len(self._data)
        if limit and size > _FRAMES / 2 * limit:
            return (
                f"has {limit / 2**20:.0f} MiB of memory, the data set {size / 2**20:.0f} MiB, which is there twice "
                f"while it is unpacked; give workers {size * 2 / _FRAMES / 2**20:.0f} MiB, or a data set that reads "
                f"samples by number (numpy.load(..., mmap_mode='r'), a Dask array) and is small when pickled"
            )
        task = self.client.submit(_starter(), __version__, workers=[address], allow_other_workers=False, pure=False)
        self._tasks[address] = task
        if self._closing:  # perhaps just too late for `close` to see the task
            task.cancel()  # type: ignore[no-untyped-call]
        threads = task.result()
        if isinstance(threads, str):
            return threads
        arguments = {"blueprint": self._blueprint, "data": self._data, "threads": threads}
        with self._sending:
            self._served.add(address)
            for _ in range(_START_TRIES):
                answer = self.call({address: ("start", arguments)})[address]
                if not isinstance(answer, WorkerFailure):
                    return None
                if answer.gone:
                    raise ConnectionError(answer.text)
        return f"could not make the model: {answer.text}"

    # -- messages --------------------------------------------------------------------------------------------------

    def call(self, messages: Mapping[str, Message], *, within_s: float = math.inf) -> dict[str, Any]:
        """Send a message to each worker at the same time; their answers, with a WorkerFailure for those that are gone.

        A worker is gone when its connection breaks, when the scheduler no longer knows it, or after `within_s`.
        """
        answers: dict[str, Any] = self._sync(self._call, messages, within_s)
        return answers

    async def _call(self, messages: Mapping[str, Message], within_s: float) -> dict[str, Any]:
        calls = {a: asyncio.ensure_future(self._send(a, *message)) for a, message in messages.items()}
        until = time.monotonic() + within_s
        pending: Collection[Any] = calls.values()
        while pending:
            _, pending = await asyncio.wait(pending, timeout=_LOOK_EVERY_S)
            if pending:
                # A connection to a worker that is gone is tried again for long; the scheduler knows better.
                listed = await self._known()
                late = time.monotonic() > until
                for address, task in calls.items():
                    if late or address not in listed:
                        task.cancel()
        return {address: task.result() for address, task in calls.items()}

    async def _send(self, address: str, what: str, arguments: dict[str, Any]) -> Any:
        if address not in self._rpcs:
            proxy = self.client.rpc(address) if self._direct else rpc_through_scheduler(self.client, address)
            self._rpcs[address] = proxy
        wrapped = {name: to_serialize(value) for name, value in arguments.items()}
        try:
            reply = await getattr(self._rpcs[address], HANDLER)(run=self.run, what=what, arguments=wrapped)
        except (OSError, TimeoutError, asyncio.CancelledError) as error:  # CommClosedError is an OSError
            return WorkerFailure(text=f"{address} is gone: {error}", gone=True)
        return reply["answer"]

    # -- scaling ---------------------------------------------------------------------------------------------------

    def scale(self, workers: int) -> None:
        """Ask for this number of workers; surplus ones are gone when this returns, new ones arrive later."""
        cluster = self.client.cluster
        if cluster is None or not hasattr(cluster, "scale"):
            raise ConfigError(
                "scale=True, but this Client knows an address only and cannot start workers; give it a cluster object "
                "(LocalCluster, KubeCluster, ...), or scale=False to take the cluster as it is"
            )
        fewer = workers < len(self._listed())
        cluster.scale(workers)
        until = time.monotonic() + 30
        while fewer and len(self._listed()) > workers and time.monotonic() < until:
            time.sleep(0.02)
        self.look(now=True)

    def close(self) -> None:
        """Remove the replicas from all workers; the cluster and the Client go on."""
        self._closing = True
        for task in list(self._tasks.values()):
            task.cancel()
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self.client.status == "running":
            self.call({address: ("stop", {}) for address in self._served}, within_s=10)
