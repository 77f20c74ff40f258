"""torchft, whose lighthouse and managers form the quorums of a live fleet: the one module that imports it.

Most of it is torchft's compiled part, which is loaded without the rest: `import torchft` imports torch, for which a
launcher has no use. Not used is torchft's `Manager`, which listens on every interface and sends state as pickles.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from ebbflow.core.extras import require
from ebbflow.errors import BrokenExtra, MissingExtra

__all__ = [
    "SUPPORTED_VERSION", "USED_MEMBERS", "answers", "lighthouse_client", "manager_server", "missing_members",
    "nccl_group", "request_quorum", "require_torchft", "start_lighthouse",
]  # fmt: skip

SUPPORTED_VERSION = "0.2.0"
"""Lighthouse and managers must be of one version, so that pyproject.toml asks for this one."""

_NOBODY = "replica.invalid"  # a name that never has an address (RFC 2606)

USED_MEMBERS = (
    "LighthouseClient.heartbeat", "LighthouseClient.quorum", "LighthouseServer.address", "LighthouseServer.shutdown",
    "ManagerServer.shutdown", "Quorum.participants", "Quorum.quorum_id", "QuorumMember.data", "QuorumMember.replica_id",
    "QuorumMember.store_address",
)  # fmt: skip
"""What this package uses of torchft's compiled part, public or not; it is looked for when that is loaded."""


def require_torchft(needed_for: str) -> None:
    """Raise MissingExtra, which says the pip command, if torchft is not installed."""
    if importlib.util.find_spec("torchft") is None:
        raise MissingExtra("torchft", extra="live", needed_for=needed_for)


def load_compiled_part() -> Any:
    """Load torchft's compiled part alone. An error names its cause: not installed, not loadable, another version."""
    name = "torchft._torchft"
    if name in sys.modules:
        return sys.modules[name]
    require_torchft("a live fleet")
    os.environ.setdefault("RUST_LOG", "warn")  # else every step of every replica is several lines in its log
    try:
        package = importlib.util.find_spec("torchft")
        folders = package.submodule_search_locations if package is not None else None
        libraries = [path for folder in folders or () for path in sorted(Path(folder).glob("_torchft*.so"))]
        if not libraries:
            raise ImportError(f"it has no compiled part; expected version {SUPPORTED_VERSION}")
        library = libraries[0]
        spec = importlib.util.spec_from_file_location(name, library)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except Exception as error:
        raise _broken(error) from error
    if missing := missing_members(module):
        found = f"it lacks {', '.join(missing)}; expected version {SUPPORTED_VERSION}"
        raise _broken(ImportError(found))
    sys.modules[name] = module  # if torchft itself is imported later, it is to find this one
    return module


def _broken(cause: Exception) -> BrokenExtra:
    return BrokenExtra("torchft", extra="live", needed_for="a live fleet", cause=cause)


def missing_members(module: Any) -> list[str]:
    """Name the members that this package uses and torchft's compiled part lacks."""
    parts = (name.partition(".") for name in USED_MEMBERS)
    return [f"{kind}.{member}" for kind, _, member in parts if not hasattr(getattr(module, kind, None), member)]


def start_lighthouse(
    bind: str, *, min_replicas: int, join_timeout_ms: int, quorum_tick_ms: int, heartbeat_timeout_ms: int
) -> Any:
    """Start a lighthouse in this process at HOST:PORT; it has `address()` and `shutdown()`."""
    return load_compiled_part().LighthouseServer(
        bind=bind,
        min_replicas=min_replicas,
        join_timeout_ms=join_timeout_ms,
        quorum_tick_ms=quorum_tick_ms,
        heartbeat_timeout_ms=heartbeat_timeout_ms,
    )


def manager_server(name: str, *, lighthouse: str, heartbeat_interval: timedelta, connect_timeout: timedelta) -> Any:
    """Start the manager server of a replica, which sends its heartbeats from a thread of its own; it has `shutdown()`.

    Quorums are not requested from it: if the lighthouse dies meanwhile, it does not report that. It obeys whoever
    reaches it, also a request to end the process, in which torchft may hang. So it listens on loopback only, and tells
    nobody its address: the button of the lighthouse's page that kills a replica does not reach it.
    """
    return load_compiled_part().ManagerServer(
        replica_id=name,
        lighthouse_addr=f"http://{lighthouse}",
        hostname=_NOBODY,
        bind="127.0.0.1:0",
        store_addr="",
        world_size=1,
        heartbeat_interval=heartbeat_interval,
        connect_timeout=connect_timeout,
        quorum_retries=0,
    )


def lighthouse_client(address: str, *, connect_timeout: timedelta) -> Any:
    """Connect to the lighthouse at HOST:PORT, for requests."""
    return load_compiled_part().LighthouseClient(f"http://{address}", connect_timeout=connect_timeout)


def request_quorum(
    client: Any, *, name: str, store: str, step: int, data: Mapping[str, str], timeout: timedelta
) -> Any:
    """Wait for the lighthouse's quorum: `quorum_id`, and `participants` with their `replica_id`s and what they said.

    The address of the manager is not said, so that the button of the lighthouse's page that kills a replica has no
    effect.
    """
    return client.quorum(replica_id=name, timeout=timeout, store_address=store, step=step, data=dict(data))


def answers(client: Any, *, name: str, timeout: timedelta) -> bool:
    """Whether the lighthouse answers over the connection of a client, by one more heartbeat of a replica.

    A connection whose other end has vanished breaks only when torchft's keep-alive notices it, after 80 s.
    """
    try:
        client.heartbeat(name, timeout=timeout)
    except (RuntimeError, TimeoutError):
        return False
    return True


def nccl_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Connect torchft's NCCL group, which aborts a collective that hangs; torch's own would end the process.

    Its `configure` would look for the others at a TCPStore, which answers everybody; the rest of it is this.
    """
    load_compiled_part()
    module = require("torchft.process_group", extra="live", needed_for="a fleet of GPUs")
    group = module.ProcessGroupNCCL(timeout)
    group._rank = rank
    group._pg = group._create_pg(store, rank, size)
    return group
