"""Members of distributed that are not part of its documented interface: the one module that imports them.

Messages between driver and workers use Dask's own connections and serialization, since one task per step and worker
would cost milliseconds. A distributed that lacks a member is refused when this module is imported.
"""

from __future__ import annotations

import importlib
from typing import Any

from ebbflow.errors import BrokenExtra

__all__ = [
    "MINIMUM_VERSION", "USED_MEMBERS", "add_handler", "dumps", "get_address_host", "known_workers", "loads",
    "missing_members", "rpc_through_scheduler", "to_serialize", "worker_threads",
]  # fmt: skip

MINIMUM_VERSION = "2024.8"
"""The oldest distributed that has all of them; pyproject.toml asks for it."""

USED_MEMBERS = (
    "actor:ProxyRPC", "client:Client.sync", "comm.addressing:get_address_host", "core:ConnectionPool",
    "protocol.pickle:dumps", "protocol.pickle:loads", "protocol.serialize:to_serialize", "scheduler:Scheduler.identity",
    "scheduler:Scheduler.get_who_has", "worker:Worker.address", "worker_state_machine:WorkerState",
)  # fmt: skip
"""Module below `distributed`, and member of it."""


def missing_members(names: tuple[str, ...] = USED_MEMBERS) -> list[str]:
    """Name the members that the installed distributed lacks."""
    return [name for name in names if _member(name) is None]


def _member(name: str) -> Any:
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(f"distributed.{module}")
    except ModuleNotFoundError:
        return None
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


if _missing := missing_members():
    raise BrokenExtra(
        "distributed",
        extra="dask",
        needed_for="training on a Dask cluster",
        cause=ImportError(f"it lacks {', '.join(_missing)}; expected version {MINIMUM_VERSION} or newer"),
    )

get_address_host = _member("comm.addressing:get_address_host")
dumps = _member("protocol.pickle:dumps")
loads = _member("protocol.pickle:loads")
to_serialize = _member("protocol.serialize:to_serialize")


# The driver's side ----------------------------------------------------------------------------------------------------


async def known_workers(client: Any) -> dict[str, dict[str, Any]]:
    """The workers that the scheduler knows, by address.

    The scheduler itself is asked: `Client.scheduler_info` answers from a cache that a timer of the Client overwrites
    with an empty list every few seconds, and at that moment all workers would look lost.
    """
    workers: dict[str, dict[str, Any]] = (await client.scheduler.identity(n_workers=-1))["workers"]
    return workers


def rpc_through_scheduler(client: Any, address: str) -> Any:
    """Handlers of a worker that this process cannot reach: the scheduler passes the messages on."""
    return _member("actor:ProxyRPC")(client.scheduler, address)


# The worker's side ----------------------------------------------------------------------------------------------------


def add_handler(worker: Any, name: str, handle: Any) -> None:
    """Let a worker answer messages of this name."""
    worker.handlers[name] = handle


def worker_threads(worker: Any) -> int:
    """Number of threads in which a worker computes."""
    return int(worker.state.nthreads)
