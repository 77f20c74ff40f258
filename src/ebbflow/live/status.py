"""What a fleet is doing now: from the lighthouse's page, and from the status files where they can be read.

The lighthouse knows the members of the last quorum, their steps and heartbeats. Batch, rate and speed are what the
replicas say: in their status files, where the job's folder is, and else in their stores, over the network.
"""

from __future__ import annotations

import contextlib
import html
import json
import re
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from ebbflow.errors import ConfigError
from ebbflow.live.address import parse_address
from ebbflow.live.protocol import STATUS_KEY, ReplicaStatus, parse_status, read_status

__all__ = [
    "FleetStatus", "Member", "Quorum", "combine", "fetch_quorum", "fetch_statuses", "find_folder", "parse_quorum",
    "read_statuses",
]  # fmt: skip

_TIMEOUT_S = 5.0
_STORE_TIMEOUT = timedelta(seconds=2)
_PAGE_BYTES = 10_000_000
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""A lighthouse is on the fleet's own network: no proxy stands before it."""
_QUORUM = re.compile(r"Previous quorum id:\s*(\d+)")
_AGE = re.compile(r"Quorum age:\s*([\d.]+)")
_MEMBER = re.compile(
    r'<div class="member\s*(?P<kind>[^"]*?)\s*">\s*<b>(?P<id>.*?)</b>.*?Step:\s*(?P<step>-?\d+)'
    r"(?:.*?TCPStore:\s*(?P<store>\S+))?",
    re.DOTALL,
)
_BEAT = re.compile(
    r'<li class="heartbeat\s*(?P<kind>[^"]*?)\s*">\s*(?P<id>.*?): seen (?P<ago>[\d.eE+-]+)s ago', re.DOTALL
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Quorum:
    """What the lighthouse says."""

    number: int
    """Counts the quorums; 0 before the first."""
    age_s: float | None = None
    steps: Mapping[str, int] = field(default_factory=dict)
    """Replica -> step at which it joined the last quorum."""
    recovering: frozenset[str] = frozenset()
    """Members that are behind and get their state from the others."""
    stores: Mapping[str, str] = field(default_factory=dict)
    """Replica -> HOST:PORT of its store."""
    heartbeats: Mapping[str, float] = field(default_factory=dict)
    """Replica -> seconds since it was heard, of those not taken for dead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One replica, as far as it is known."""

    name: str
    state: str
    step: int | None = None
    heard_s: float | None = None
    """Seconds since its last heartbeat."""
    samples_per_s: float | None = None
    pid: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetStatus:
    """The fleet in one value; the field names are the keys of `ebbflow status --json`."""

    lighthouse: str
    quorum: int | None
    quorum_age_s: float | None
    members: tuple[Member, ...]
    step: int | None
    epoch: int | None
    batch: int | None
    lr: float | None
    multiplier: float | None
    samples_per_s: float | None
    loss: float | None


def replica_name(member: str) -> str:
    """The name of a replica, from what torchft makes of it.

    >>> replica_name("r2:0d3f-uuid")
    'r2'
    """
    return member.partition(":")[0]


def parse_quorum(page: str) -> Quorum:
    """The lighthouse's status page, read."""
    number, age = _QUORUM.search(page), _AGE.search(page)
    members = list(_MEMBER.finditer(page))
    names = [replica_name(html.unescape(member["id"])) for member in members]
    return Quorum(
        number=int(number[1]) if number else 0,
        age_s=float(age[1]) if age else None,
        steps={name: int(member["step"]) for name, member in zip(names, members, strict=True)},
        recovering=frozenset(
            name for name, member in zip(names, members, strict=True) if "recovering" in member["kind"]
        ),
        stores={name: member["store"] for name, member in zip(names, members, strict=True) if member["store"]},
        heartbeats={
            replica_name(html.unescape(beat["id"])): float(beat["ago"])
            for beat in _BEAT.finditer(page)
            if "old" not in beat["kind"]
        },
    )


def fetch_quorum(address: str) -> Quorum:
    """Ask the lighthouse at HOST:PORT."""
    try:
        with _DIRECT.open(f"http://{address}/status", timeout=_TIMEOUT_S) as answer:
            page = answer.read(_PAGE_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError) as problem:  # URLError is an OSError
        reason = getattr(problem, "reason", None) or problem
        raise ConfigError(
            f"no lighthouse answers at {address} ({reason}); is the fleet running, and may this machine reach that "
            f"port? ebbflow launch prints the address, and a job's folder has it in fleet.json"
        ) from None
    if "quorum" not in page.lower():
        raise ConfigError(f"what answers at {address} is not a lighthouse; ebbflow launch prints the address of one")
    return parse_quorum(page)


def read_statuses(folder: Path) -> dict[str, ReplicaStatus]:
    """The status files of a job, by replica."""
    found = {path.parent.name: read_status(folder, path.parent.name) for path in folder.glob("replicas/*/status.json")}
    return {name: status for name, status in sorted(found.items()) if status is not None}


def fetch_statuses(quorum: Quorum) -> dict[str, ReplicaStatus]:
    """What the living members say of themselves, from the store of each; those that do not answer are left out.

    This alone needs torch, whose store it is.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    found = {}
    for name, address in quorum.stores.items():
        if name not in quorum.heartbeats:
            continue
        host, port = parse_address(address)
        with contextlib.suppress(RuntimeError):
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT)
            if store.check([STATUS_KEY]):
                status = parse_status(store.get(STATUS_KEY))
                if status is not None:
                    found[name] = status
    return found


def combine(lighthouse: str, quorum: Quorum | None, statuses: Mapping[str, ReplicaStatus]) -> FleetStatus:
    """One picture of what the lighthouse and the replicas say.

    With a quorum, those count who are in it or heard of; a status file that nobody else vouches for is of the dead,
    unless it says how the replica ended.
    """
    names = sorted({*statuses, *(quorum.steps if quorum else ()), *(quorum.heartbeats if quorum else ())})
    members = tuple(_member(name, quorum, statuses.get(name)) for name in names)
    alive = [statuses[m.name] for m in members if m.name in statuses and m.state not in ("dead", "left")]
    newest = max((s for s in alive if s.batch is not None), key=lambda s: (s.step or 0, s.time), default=None)
    steps = [member.step for member in members if member.step is not None and member.state != "dead"]
    return FleetStatus(
        lighthouse=lighthouse,
        quorum=quorum.number if quorum else None,
        quorum_age_s=quorum.age_s if quorum else None,
        members=members,
        step=max(steps, default=None),
        epoch=newest.epoch if newest else None,
        batch=newest.batch if newest else None,
        lr=newest.lr if newest else None,
        multiplier=newest.multiplier if newest else None,
        samples_per_s=newest.samples_per_s if newest else None,
        loss=newest.loss if newest else None,
    )


def _member(name: str, quorum: Quorum | None, status: ReplicaStatus | None) -> Member:
    heard = quorum.heartbeats.get(name) if quorum else None
    steps = [s for s in (status.step if status else None, quorum.steps.get(name) if quorum else None) if s is not None]
    if status is not None and (status.state in ("left", "finished") or quorum is None):
        state = status.state
    elif heard is None:
        state = status.state if status and status.state == "starting" else "dead"
    elif quorum is not None and name in quorum.recovering:
        state = "recovering"
    else:
        state = status.state if status else ("training" if quorum and name in quorum.steps else "joining")
    return Member(
        name=name,
        state=state,
        step=max(steps, default=None),
        heard_s=heard,
        samples_per_s=status.samples_per_s if status else None,
        pid=status.pid if status else None,
    )


def find_folder(address: str, below: Path) -> Path | None:
    """The folder of the job that was launched with this lighthouse, among the folders below one."""
    for path in sorted(below.glob("*/fleet.json")):
        try:
            body = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(body, dict) and body.get("lighthouse") == address:
            return path.parent
    return None
