"""One replica's place in the fleet: it asks the lighthouse, greets the others, and is connected with them.

    ask        the lighthouse's quorum: who takes part in the next step
    greet      everybody says who it is and how far it has come; all settle what follows (`agreement.py`)
    connect    the circle of the next steps, until somebody comes or goes

A *leaving* replica says so in its last step, and the others form the next circle among themselves at once. For as long
as the lighthouse still believes in the one that left, asking it would mean waiting for a heartbeat that has stopped.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Store, TCPStore

from ebbflow.errors import ConfigError, MissingExtra
from ebbflow.live.agreement import Hello, Settlement, Standing, settle, strangeness
from ebbflow.live.group import Fault, Group, Lost, no_fault, open_store
from ebbflow.live.heartbeats import Heartbeats

__all__ = ["Circle", "Gone", "Member", "Place"]

_ASK = timedelta(minutes=5)  # then again: an answer may have been lost with its connection
_HEARTBEAT = timedelta(milliseconds=100)
_RETRY_S = 0.2
_OBJECTIONS = 5


class Gone(Exception):
    """This replica was told to leave while it waited for others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a replica meets the others."""

    lighthouse: str
    """HOST:PORT."""
    name: str
    """Of the replica, for people; each start of it gets a suffix."""
    bind: str = "127.0.0.1"
    """The address that this replica listens on, and under which others reach it."""
    min_replicas: int = 1
    """Fewer do not train."""
    heartbeat_timeout_s: float = 0.8
    """The lighthouse's: how long a heart may pause."""
    connect_s: float = 10.0
    """How long greeting and connecting may take."""
    timeout_s: float = 60.0
    """How long a collective may take while every heart beats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Circle:
    """Replicas that compute together."""

    group: Group
    key: str
    """A name for this meeting of these replicas: no other one ever has it."""
    settlement: Settlement
    new: bool
    """Whether it was formed just now: transfers are due."""
    stores: tuple[str, ...]
    """HOST:PORT of each member's store."""

    @property
    def rank(self) -> int:
        """Of this replica."""
        return self.group.rank

    @property
    def names(self) -> tuple[str, ...]:
        """Of all, by rank."""
        return self.group.names


class Member:
    """This replica among the others."""

    def __init__(
        self,
        place: Place,
        job: Mapping[str, str],
        *,
        device: torch.device,
        leaving: Callable[[], bool] = lambda: False,
        fault: Fault = no_fault,
    ) -> None:
        """`job`: what must be the same for all. `leaving`: whether this replica was told to leave."""
        self.place = place
        self.job = dict(job)
        self.name = self._new_name()
        self._device = device
        self._leaving = leaving
        self._fault = fault
        self._url = f"http://{place.lighthouse}"
        self._hearts = Heartbeats(self._url, timeout_s=place.heartbeat_timeout_s)
        self._circle: Circle | None = None
        self._quorum: tuple[int, tuple[str, ...]] = (-1, ())
        self._failures = 0
        self._known: tuple[str, ...] = ()  # members of the last committed step
        self._objections = 0
        self._alone_since: float | None = None  # the circle goes on by itself, without asking the lighthouse
        self._generation = 0
        self._server: Any = None
        self._store: TCPStore | None = None

    def _new_name(self) -> str:
        return f"{self.place.name}:{uuid.uuid4().hex[:12]}"

    def arrive(self) -> None:
        """Be known to the lighthouse from now on, and waited for. `Lost`: there is none, try again."""
        if self._server is not None:
            return
        torchft = _torchft()
        host = self.place.bind
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port = listener.getsockname()[1]
        self.store_address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._store = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
        )
        try:
            self._server = torchft.ManagerServer(
                replica_id=self.name,
                lighthouse_addr=self._url,
                hostname=host,
                bind=f"[{host}]:0" if ":" in host else f"{host}:0",
                store_addr=self.store_address,
                world_size=1,
                heartbeat_interval=_HEARTBEAT,
                connect_timeout=timedelta(seconds=self.place.connect_s),
                quorum_retries=0,
            )
        except (RuntimeError, TimeoutError) as error:
            time.sleep(_RETRY_S)
            raise Lost(f"no lighthouse at {self.place.lighthouse}: {error}") from None
        self._client = torchft.ManagerClient(
            self._server.address(), connect_timeout=timedelta(seconds=self.place.connect_s)
        )

    def publish(self, key: str, text: str) -> None:
        """Put a text into this replica's own store, where whoever knows the store's address can read it."""
        if self._store is not None:
            self._store.set(key, text)

    # The circle -------------------------------------------------------------------------------------------------

    def meet(self, standing: Standing) -> Circle:
        """The circle of the next step: the same as before, or a new one. `Lost`: try again."""
        circle = self._circle
        if circle is not None and self._alone_since is not None:
            return circle
        self.arrive()
        answer = self._ask(standing.step)
        quorum = (answer.quorum_id, tuple(answer.replica_ids))
        if circle is not None and quorum == self._quorum:
            return circle
        self._drop()
        if answer.quorum_id < self._quorum[0]:  # another lighthouse than before: its numbers may have been used
            self._quorum = (-1, ())
            self._retire()
            raise Lost("the lighthouse was started anew")
        self._quorum = quorum
        self._generation = 0
        rendezvous = f"{answer.store_address}/ebbflow/{answer.quorum_id}"
        store = open_store(rendezvous, timeout_s=self.place.connect_s)
        hellos = self._greet(store, answer.replica_rank, quorum[1], standing)
        if any(hello.objects for hello in hellos):
            self._objections += 1
            time.sleep(_RETRY_S / 2)
            raise Lost("the lighthouse left out somebody whose heart beats")
        settlement = settle(hellos)
        if answer.replica_rank in settlement.strangers:
            self._retire()
            raise ConfigError(
                f"the fleet at {self.place.lighthouse} refuses this replica, which is of another job: "
                f"{strangeness(self.job, settlement.job)}. Start it with the same script, settings and version, or "
                f"give the job a lighthouse of its own"
            )
        if settlement.strangers:
            raise Lost(f"strangers were refused: {', '.join(hellos[rank].name for rank in settlement.strangers)}")
        key = f"{answer.quorum_id}/{'/'.join(quorum[1])}"
        stores = tuple(hello.store for hello in hellos)
        return self._connect(rendezvous, quorum[1], answer.replica_rank, key, settlement, stores)

    def _connect(
        self,
        rendezvous: str,
        names: tuple[str, ...],
        rank: int,
        key: str,
        settlement: Settlement,
        stores: tuple[str, ...],
    ) -> Circle:
        group = Group(
            rendezvous,
            names,
            rank,
            bind=self.place.bind,
            device=self._device,
            connect_s=self.place.connect_s,
            timeout_s=self.place.timeout_s,
            silent=self._hearts.silent,
            fault=self._fault,
        )
        circle = Circle(group=group, key=key, settlement=settlement, new=True, stores=stores)
        self._circle = Circle(group=group, key=key, settlement=settlement, new=False, stores=stores)
        return circle

    def _ask(self, step: int) -> Any:
        """The lighthouse's quorum, which is formed when all who were in the last one ask, or are gone.

        Who is told to leave takes part in one more step, in which it says so; alone, or with others that do not come,
        it just goes.
        """
        patience = time.monotonic() + (0.0 if self._circle is None else self.place.connect_s)
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        failures, self._failures = self._failures, self._failures + 1  # counts as failed until the step is committed

        def ask() -> None:
            try:
                answers.put(
                    self._client._quorum(
                        group_rank=0,
                        step=step,
                        checkpoint_metadata="",
                        shrink_only=False,
                        timeout=_ASK,
                        init_sync=False,
                        commit_failures=failures,
                    )
                )
            except Exception as error:
                answers.put(error)

        threading.Thread(target=ask, daemon=True, name="ebbflow-quorum").start()  # cannot be interrupted: not here
        while True:
            try:
                answer = answers.get(timeout=0.1)
            except queue.Empty:
                if self._leaving() and time.monotonic() > patience:
                    raise Gone from None
                continue
            if isinstance(answer, Exception):
                time.sleep(_RETRY_S)
                raise Lost(f"the lighthouse at {self.place.lighthouse} does not answer: {answer}")
            return answer

    def _greet(self, store: Store, rank: int, names: tuple[str, ...], standing: Standing) -> list[Hello]:
        """Everybody's greeting, by rank."""
        objects = self._misses_somebody(names)
        own = Hello(name=self.name, store=self.store_address, standing=standing, job=self.job, objects=objects)
        until = time.monotonic() + self.place.connect_s
        look = time.monotonic() + self.place.heartbeat_timeout_s
        keys = [f"hello/{i}" for i in range(len(names))]
        try:
            store.set(keys[rank], own.encode())
            while not store.check(keys):
                time.sleep(0.002)
                now = time.monotonic()
                if now > look:
                    look = now + self.place.heartbeat_timeout_s / 2
                    if gone := self._hearts.silent(names):
                        raise Lost(f"no heartbeat of {', '.join(gone)}")
                if now > until:
                    raise Lost(f"not everybody greeted within {self.place.connect_s:g} s")
            return [Hello.decode(store.get(key)) for key in keys]
        except (RuntimeError, ValueError) as error:  # the store went with its owner
            raise Lost(f"the greeting failed: {error}") from None

    def _misses_somebody(self, names: tuple[str, ...]) -> bool:
        """Whether one of the last step was left out although its heart beats.

        A lighthouse, or its machine, that stood still for a moment takes all hearts for stopped, and believes whoever
        asks first to be the only one. A replica that hangs is left out after the lighthouse's patience, and its heart
        beats: so not for ever.
        """
        missing = set(self._known) - set(names)
        if not missing or self._objections >= _OBJECTIONS:
            return False
        return len(self._hearts.silent(missing)) < len(missing)

    # What became of the step ------------------------------------------------------------------------------------

    def committed(self) -> None:
        """The step counts on this replica."""
        self._failures = self._objections = 0
        self._known = self._circle.names if self._circle is not None else ()

    def failed(self) -> None:
        """The step does not count here: its circle is given up, and the lighthouse forms another one."""
        self._alone_since = None
        self._failures += 1
        self._drop()

    def go_on_without(self, leavers: Collection[int]) -> tuple[str, ...]:
        """Form the next circle at once with those who stay, and name them; all in the circle know the leavers."""
        circle = self._circle
        assert circle is not None, "only members of a circle hear who leaves it"
        stay = [rank for rank in range(len(circle.names)) if rank not in leavers]
        if len(stay) < self.place.min_replicas:
            raise Lost(f"{len(stay)} replicas are left, and {self.place.min_replicas} are needed")
        names = tuple(circle.names[rank] for rank in stay)
        stores = tuple(circle.stores[rank] for rank in stay)
        settlement = Settlement(strangers=frozenset(), transfers={}, job=self.job)
        self._known = names
        self._generation += 1
        key = f"{circle.key}+{self._generation}"
        self._drop()
        rendezvous = f"{stores[0]}/ebbflow/{self._quorum[0]}+{self._generation}"
        self._connect(rendezvous, names, stay.index(circle.rank), key, settlement, stores)
        self._alone_since = time.monotonic()
        return names

    @property
    def wants_lighthouse(self) -> bool:
        """Whether a circle that goes on by itself should ask the lighthouse again: the leaver is forgotten there.

        Clocks differ, so this is only a wish: the members tell each other, and all return when one wants to.
        """
        enough = self.place.heartbeat_timeout_s + 2 * _HEARTBEAT.total_seconds()
        return self._alone_since is not None and time.monotonic() - self._alone_since > enough

    def return_to_lighthouse(self) -> None:
        """Ask the lighthouse from the next step on."""
        self._alone_since = None

    # The end ----------------------------------------------------------------------------------------------------

    def _drop(self) -> None:
        if self._circle is not None:
            self._circle.group.close()
            self._circle = None

    def _retire(self) -> None:
        """Be forgotten by the lighthouse, as soon as a heartbeat is missed; who comes back is another one."""
        if self._server is not None:
            with contextlib.suppress(RuntimeError):
                self._server.shutdown()
        self._server = self._store = None
        self.name = self._new_name()

    def leave(self) -> None:
        """Close everything."""
        self._retire()
        self._drop()


def _torchft() -> Any:
    os.environ.setdefault("RUST_LOG", "warn")  # else every step of every replica is several lines in its log
    try:
        from torchft import _torchft
    except ImportError:
        raise MissingExtra("torchft", extra="live", needed_for="training with a live fleet") from None
    return _torchft
