"""How the processes of a fleet find and inform each other: addresses, environment, files, the lighthouse's page.

The launcher describes the fleet to a replica by environment variables (`ReplicaConfig`). The replica reports by its
status file (`ReplicaStatus`, replaced as a whole, about twice per second), its log and its record; its exit code only
says whether an error ended it. SIGTERM tells it to leave: it finishes its step and leaves.

    <folder>/fleet.json                    who launched what, and the address of the lighthouse
    <folder>/secret                        what the replicas prove to each other that they know; only for its owner
    <folder>/lighthouse/log.txt
    <folder>/replicas/<name>/log.txt       everything that the replica printed, of all incarnations
    <folder>/replicas/<name>/status.json   what it is doing now
    <folder>/replicas/<name>/record.jsonl  the steps that it committed
    <folder>/checkpoints/                  unless they are elsewhere (`FleetConfig.checkpoints`)
    <folder>/weights.pt                    the final weights, which torch.load(weights_only=True) reads
"""

from __future__ import annotations

import contextlib
import dataclasses
import html
import http.client
import ipaddress
import json
import math
import os
import re
import secrets
import socket
import time
import typing
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self

from ebbflow.core.files import read_text, write_whole
from ebbflow.core.key_store import KeyStoreClient, StoreLost
from ebbflow.core.spec import param
from ebbflow.errors import ConfigError, OutputError

__all__ = [
    "DEFAULT_PORT", "EXIT_RESTART", "FINAL_WEIGHTS", "HEARTBEAT_INTERVAL_S", "HEARTBEAT_TIMEOUT_MS", "LOOPBACK",
    "SECRET_VARIABLE", "STATUS_KEY", "FleetConfig", "LighthouseStatus", "ReplicaConfig", "ReplicaStatus",
    "create_secret", "fetch_heartbeat_ages",
    "fetch_quorum_and_ages", "parse_quorum", "fetch_lighthouse_status", "fetch_statuses",
    "find_folder", "find_secret", "format_address", "is_loopback", "local_address_towards",
    "parse_address", "parse_bind", "parse_heartbeat_ages", "parse_lighthouse_page", "parse_status",
    "read_lighthouse_address", "read_status", "read_statuses", "replica_folder", "write_fleet_file",
]  # fmt: skip

LOOPBACK = "127.0.0.1"
Transport = Literal["auto", "nccl", "gloo"]
"""What carries the gradients of GPUs: NCCL, which refuses two processes on one GPU; gloo, through the memory of the
host; auto is NCCL. Everything else is carried by gloo."""
DEFAULT_PORT = 29510
"""The port of torchft's lighthouse."""
HEARTBEAT_INTERVAL_S = 0.1
HEARTBEAT_TIMEOUT_MS = 800
"""A replica whose last heartbeat is older is dead. Three replicas on two cores under a load of ten lost nobody in ten
minutes with 700."""
EXIT_RESTART = 75
"""Exit code (EX_TEMPFAIL) with which a replica asks to be started again."""
FINAL_WEIGHTS = "weights.pt"
"""Name of the file with the final weights, in the folder of a job."""
SECRET_VARIABLE = "EBBFLOW_SECRET"
"""Environment variable with the secret of the job; without it, the file in the folder of the job has it."""
_SECRET_FILE = "secret"
_SHORTEST_SECRET = 16
STATUS_KEY = "ebbflow/status"
"""Key of a replica's status in its store, for those who cannot read its files."""


# Addresses ------------------------------------------------------------------------------------------------------------


def parse_address(text: str, *, default_port: int | None = None) -> tuple[str, int]:
    """Split HOST:PORT, [V6]:PORT or http://HOST:PORT into host and port.

    >>> parse_address("10.0.0.7:29510"), parse_address("[::1]:80"), parse_address("head", default_port=29510)
    (('10.0.0.7', 29510), ('::1', 80), ('head', 29510))
    """
    bare = text.strip().removeprefix("http://").rstrip("/")
    if bare.startswith("["):
        host, bracket, rest = bare[1:].partition("]")
        port = rest[1:] if bracket and rest.startswith(":") else None if bracket and not rest else ""
    elif bare.count(":") > 1:
        raise ConfigError(f"{text!r}: an IPv6 address goes into brackets; write for example [::1]:29510")
    else:
        host, colon, after = bare.partition(":")
        port = after if colon else None
    if port is None and default_port is not None:
        port = str(default_port)
    if not host or not port or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{text!r} is not an address; expected HOST:PORT, for example 10.0.0.7:29510")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """Write host and port as `parse_address` reads them.

    >>> format_address("::1", 80)
    '[::1]:80'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_bind(text: str, option: str = "--bind") -> str:
    """Check the address to listen on. It is announced to other machines, so it must be one address and not all.

    >>> parse_bind("[::1]"), parse_bind("10.0.0.7")
    ('::1', '10.0.0.7')
    """
    bare = text.strip().removeprefix("[").removesuffix("]")
    try:
        addresses = [ipaddress.ip_address(bare)]
    except ValueError:  # a host name, or a way to write an address that only the system knows, such as 0 or 0x0
        if not bare or ":" in bare:
            raise ConfigError(f"{option} {text}: expected an address without a port, for example 10.0.0.7") from None
        addresses = _addresses_of(bare)
    if bare == "*" or any(_means_all(address) for address in addresses):
        raise ConfigError(
            f"{option} {text} means every network of this machine; give the one address at which the others reach it"
        )
    return bare


def _addresses_of(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The addresses that the system would listen on for a name; none if it does not know it, and will say so then."""
    try:
        return [ipaddress.ip_address(found[4][0]) for found in socket.getaddrinfo(host, None)]
    except (OSError, UnicodeError, ValueError):
        return []


def _means_all(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_unspecified


def is_loopback(host: str) -> bool:
    """Whether other machines cannot reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def local_address_towards(host: str, port: int) -> str:
    """Find the address of this machine on the network through which it reaches a host. Nothing is sent."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as problem:
        raise ConfigError(
            f"{format_address(host, port)} cannot be reached from here ({problem.strerror or problem}); "
            f"check the name and the network, or say with --bind which address to listen on"
        ) from None


# The environment of a replica -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """What all replicas of a fleet need to know. Each field is an environment variable: EBBFLOW_LIGHTHOUSE, ..."""

    lighthouse: str = param(doc="HOST:PORT of the lighthouse")
    folder: Path = param(doc="folder of the job, with records, status files and checkpoints")
    job: str = param("job", doc="name of the job; a replica of another job is refused")
    bind: str = param(LOOPBACK, doc="address that the replica listens on, and at which its peers reach it")
    min_replicas: int = param(
        1,
        doc="training waits while there are fewer replicas; if it is a majority of all that may run, no two groups "
        "ever train at the same time",
    )
    heartbeat_timeout_ms: int = param(
        HEARTBEAT_TIMEOUT_MS, doc="a replica whose last heartbeat is older is dead; as at the lighthouse"
    )
    checkpoints: str = param("", doc="folder or URL of the checkpoints, if they are not in the folder")
    transport: Transport = param(
        "auto", doc="what carries the gradients of GPUs: nccl, gloo (replicas may share a GPU), or auto, which is nccl"
    )
    allow_changes: int = param(0, doc="1: a checkpoint may have other settings; those of the script are used")

    def __post_init__(self) -> None:
        for name in ("min_replicas", "heartbeat_timeout_ms"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected 1 or more")
        parse_bind(self.bind, "bind")
        if self.transport not in typing.get_args(Transport):
            raise ConfigError(f"transport is {self.transport!r}; expected {', '.join(typing.get_args(Transport))}")

    @property
    def checkpoint_place(self) -> str:
        """Folder or URL of the checkpoints."""
        return self.checkpoints or str(self.folder / "checkpoints")

    def for_replica(self, replica: str) -> ReplicaConfig:
        """Give the configuration of one replica."""
        return ReplicaConfig(replica=replica, **{f.name: getattr(self, f.name) for f in fields(FleetConfig)})


@dataclass(frozen=True, kw_only=True)
class ReplicaConfig(FleetConfig):
    """What one replica needs to know. The launcher writes these variables and the replica reads them."""

    replica: str = param(doc="name of this replica, unique in the fleet")

    def __post_init__(self) -> None:
        FleetConfig.__post_init__(self)
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.replica):
            raise ConfigError(
                f"the replica is called {self.replica!r}; expected letters, digits, dots and dashes, such as r2"
            )

    @property
    def own_folder(self) -> Path:
        """Folder of this replica's record and status."""
        return replica_folder(self.folder, self.replica)

    @classmethod
    def variables(cls) -> Iterator[tuple[str, dataclasses.Field[Any]]]:
        """Name the environment variable of each field."""
        for one in fields(cls):
            yield f"EBBFLOW_{one.name.upper()}", one

    def environment(self) -> dict[str, str]:
        """Write the environment variables."""
        return {variable: str(getattr(self, one.name)) for variable, one in self.variables()}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None, **overrides: object) -> Self:
        """Read the environment variables; overrides that are not None take precedence.

        >>> variables = {"EBBFLOW_LIGHTHOUSE": "10.0.0.7:29510", "EBBFLOW_REPLICA": "r2", "EBBFLOW_FOLDER": "runs/a"}
        >>> ReplicaConfig.from_environment(variables, job="a").lighthouse
        '10.0.0.7:29510'
        """
        variables = os.environ if environment is None else environment
        types = typing.get_type_hints(cls)
        values: dict[str, Any] = {}
        missing: dict[str, str] = {}
        for variable, one in cls.variables():
            value = overrides.get(one.name)
            if value is None:
                value = variables.get(variable) or None
            if value is None:
                if one.default is dataclasses.MISSING:
                    missing[variable] = one.name
                continue
            try:
                values[one.name] = str(value) if one.name == "transport" else types[one.name](value)
            except ValueError:
                raise ConfigError(f"{variable} is {value!r}; expected a whole number") from None
        if missing:
            raise ConfigError(
                f"this replica does not know where its fleet is ({', '.join(missing)} not set): run the script with "
                f"`ebbflow launch --replicas 2 SCRIPT`, or pass {', '.join(missing.values())} to join()"
            )
        return cls(**values)


# Files ----------------------------------------------------------------------------------------------------------------


def replica_folder(folder: Path, replica: str) -> Path:
    """Folder of a replica's files, in the folder of its job."""
    return folder / "replicas" / replica


def create_secret(folder: Path, environment: Mapping[str, str] | None = None) -> bytes:
    """Find the secret of a job, and make one if there is none: a file that only its owner can read."""
    path = folder / _SECRET_FILE
    if (os.environ if environment is None else environment).get(SECRET_VARIABLE) or path.exists():
        return find_secret(folder, environment)  # even while the disk is full
    own = path.with_name(f".{_SECRET_FILE}.{os.getpid()}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(secrets.token_hex(32) + "\n")
        try:
            os.link(own, path)  # at once whole, and never over the secret of another process
        except FileExistsError:
            pass
        except OSError:  # a file system without links, such as a mounted bucket
            if not path.exists():
                own.replace(path)
    except OSError as problem:
        raise OutputError(
            f"{path}: cannot be written: {problem.strerror}; choose another folder, or set {SECRET_VARIABLE}"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            own.unlink()
    return find_secret(folder, environment)


def find_secret(folder: Path | None, environment: Mapping[str, str] | None = None) -> bytes:
    """Find the secret of a job: that of the environment, else that of the folder. All its replicas have the same.

    >>> find_secret(None, {"EBBFLOW_SECRET": "0123456789abcdef"})
    b'0123456789abcdef'
    """
    said = (os.environ if environment is None else environment).get(SECRET_VARIABLE, "").strip()
    where = SECRET_VARIABLE
    if not said:
        advice = (
            f"set {SECRET_VARIABLE} to the secret of the job, which is in the file {_SECRET_FILE} of the folder where "
            f"ebbflow launch began it, or copy that file"
        )
        if folder is None:
            raise ConfigError(f"the secret of this fleet is not known here: {advice}")
        path = folder / _SECRET_FILE
        where = str(path)
        try:
            mode, said = path.stat().st_mode, path.read_text().strip()
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such file; {advice} to here") from None
        except (OSError, UnicodeDecodeError) as problem:
            raise ConfigError(f"{path}: cannot be read: {problem}; {advice} to here") from None
        if mode & 0o077:
            raise ConfigError(
                f"{path} can be read by others (mode {mode & 0o777:o}); expected 600: run chmod 600 {path}, or, where "
                f"the file system has no modes, delete it and set {SECRET_VARIABLE}"
            )
    if len(said) < _SHORTEST_SECRET:
        raise ConfigError(
            f"the secret in {where} has {len(said)} characters; expected at least {_SHORTEST_SECRET}: for example "
            f"what `openssl rand -hex 32` prints"
        )
    return said.encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaStatus:
    """What a replica is doing, as its status file says. Until its first step, most of it may be unknown."""

    state: str
    """starting, joining, waiting, training, leaving, left, finished, incomplete, diverged, refused, failed."""
    time: float
    """When it was written, in seconds since 1970."""
    pid: int | None = None
    incarnation: str | int | None = None
    step: int | None = None
    """Number of committed steps."""
    epoch: int | None = None
    position: int | None = None
    """Committed samples of the epoch."""
    members: int | None = None
    """Participants of the last step."""
    batch: int | None = None
    """Samples of the last step, over all participants."""
    lr: float | None = None
    multiplier: float | None = None
    """Factor by which the rule changed the base rate."""
    samples_per_s: float | None = None
    """Speed of the fleet, as this replica measures it."""
    loss: float | None = None
    workers: int | None = None
    """Workers that took part in the last step, after what the policy leaves idle."""
    ref_batch: int | None = None
    noise_scale: float | None = None
    """In samples, where rule or policy measure it and it is finite."""
    reason: str | None = None
    """Why it is in this state, in one line: what it waits for, or what ended it."""

    def to_json(self) -> str:
        """Write what is known."""
        return json.dumps({name: value for name, value in dataclasses.asdict(self).items() if value is not None})


def parse_status(text: str | bytes) -> ReplicaStatus | None:
    """Read a status; None if it is not one. Values of an unexpected type are unknown.

    >>> parse_status('{"state": "training", "time": 5.0, "step": 3, "loss": NaN}').step
    3
    """
    try:
        body = json.loads(text)
    except ValueError:
        return None
    if not isinstance(body, dict):
        return None
    values = {one.name: _number_or_text(body.get(one.name)) for one in fields(ReplicaStatus)}
    if not isinstance(values["state"], str) or not isinstance(values["time"], int | float):
        return None
    return ReplicaStatus(**values)


def _number_or_text(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, int | float | str) and not isinstance(value, bool) else None


def read_status(folder: Path, replica: str) -> ReplicaStatus | None:
    """Read the status file of a replica; None if there is none that can be read."""
    try:
        return parse_status((replica_folder(folder, replica) / "status.json").read_bytes())
    except OSError:
        return None


def read_statuses(folder: Path) -> dict[str, ReplicaStatus]:
    """Read the status files of a job, by replica."""
    found = {path.parent.name: read_status(folder, path.parent.name) for path in folder.glob("replicas/*/status.json")}
    return {name: status for name, status in sorted(found.items()) if status is not None}


def write_fleet_file(folder: Path, *, job: str, lighthouse: str, command: Sequence[str]) -> None:
    """Write fleet.json, by which `ebbflow status` finds the lighthouse of a folder and the folder of a lighthouse."""
    body = {
        "job": job, "lighthouse": lighthouse, "command": list(command), "launcher": os.getpid(), "time": time.time(),
    }  # fmt: skip
    write_whole(folder / "fleet.json", json.dumps(body, indent=2).encode())


def read_lighthouse_address(folder: Path) -> str:
    """Read the address of the lighthouse from fleet.json in the folder of a job."""
    path = folder / "fleet.json"
    try:
        address = json.loads(read_text(path, error=ConfigError))["lighthouse"]
    except (ValueError, KeyError, TypeError) as problem:
        if isinstance(problem, ConfigError):
            raise ConfigError(f"{problem}; expected the folder of a job that ebbflow launch made") from None
        raise ConfigError(f"{path} is damaged; give the lighthouse as HOST:PORT instead") from None
    return str(address)


def find_folder(address: str, below: Path) -> Path | None:
    """Find the folder of the job that was launched with this lighthouse, among the folders below one."""
    for path in sorted(below.glob("*/fleet.json")):
        try:
            body = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(body, dict) and body.get("lighthouse") == address:
            return path.parent
    return None


# The status page of the lighthouse ------------------------------------------------------------------------------------

_PAGE_TIMEOUT_S = 5.0
_STATUS_TIMEOUT_S = 2.0  # for reading the status of another replica
_PAGE_BYTES = 10_000_000
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the lighthouse is never behind a proxy
_QUORUM_ID = re.compile(r"Previous quorum id:\s*(\d+)")
_QUORUM_AGE = re.compile(r"Quorum age:\s*([\d.]+)")
_MEMBER = re.compile(
    r'<div class="member\s*(?P<kind>[^"]*?)\s*">\s*<b>(?P<id>.*?)</b>.*?Step:\s*(?P<step>-?\d+)'
    r"(?:.*?TCPStore:\s*(?P<store>\S+))?",
    re.DOTALL,
)
_HEARTBEAT = re.compile(
    r'<li class="heartbeat\s*(?P<kind>[^"]*?)\s*">\s*(?P<id>.*?): seen (?P<age>[\d.eE+-]+)s ago\s*</li>', re.DOTALL
)  # a name may have ": seen 1s ago" in it: the lighthouse takes any


@dataclass(frozen=True, kw_only=True, slots=True)
class LighthouseStatus:
    """What the lighthouse knows. Replicas are named without the suffix of their incarnation."""

    quorum_id: int
    """Number of the last quorum; 0 before the first."""
    quorum_age_s: float | None = None
    steps: Mapping[str, int] = field(default_factory=dict)
    """Replica -> step at which it joined the last quorum."""
    recovering: frozenset[str] = frozenset()
    """Replicas of the quorum that are behind the others."""
    stores: Mapping[str, str] = field(default_factory=dict)
    """Replica -> HOST:PORT of its store."""
    heartbeat_ages: Mapping[str, float] = field(default_factory=dict)
    """Replica -> seconds since its last heartbeat, of those that the lighthouse does not take for dead."""


def parse_lighthouse_page(page: str) -> LighthouseStatus:
    """Read the status page of the lighthouse."""
    quorum_id, age = _QUORUM_ID.search(page), _QUORUM_AGE.search(page)
    members = {_replica_name(member["id"]): member for member in _MEMBER.finditer(page)}
    return LighthouseStatus(
        quorum_id=int(quorum_id[1]) if quorum_id else 0,
        quorum_age_s=float(age[1]) if age else None,
        steps={name: int(member["step"]) for name, member in members.items()},
        recovering=frozenset(name for name, member in members.items() if "recovering" in member["kind"]),
        stores={name: member["store"] for name, member in members.items() if member["store"]},
        heartbeat_ages={
            _replica_name(heartbeat["id"]): float(heartbeat["age"])
            for heartbeat in _HEARTBEAT.finditer(page)
            if "old" not in heartbeat["kind"]
        },
    )


def _replica_name(identifier: str) -> str:
    """Strip the suffix that distinguishes the incarnations of a replica at the lighthouse."""
    return html.unescape(identifier).partition(":")[0]


def parse_heartbeat_ages(page: str) -> dict[str, float]:
    """Read the seconds since the last heartbeat of every incarnation that the lighthouse remembers, dead or not.

    >>> parse_heartbeat_ages('<li class="heartbeat">r1:5f3a: seen 4.395209627s ago</li>')
    {'r1:5f3a': 4.395209627}
    """
    return {html.unescape(found["id"]): float(found["age"]) for found in _HEARTBEAT.finditer(page)}


def parse_quorum(page: str) -> frozenset[str]:
    """Read the names of the incarnations in the last quorum that the lighthouse has formed."""
    return frozenset(html.unescape(member["id"]) for member in _MEMBER.finditer(page))


def fetch_quorum_and_ages(lighthouse: str, *, timeout_s: float) -> tuple[frozenset[str], dict[str, float]]:
    """Ask the lighthouse at HOST:PORT for its last quorum and for heartbeats; nothing if it does not answer."""
    try:
        page = _fetch_page(lighthouse, timeout_s)
    except (OSError, ValueError):
        return frozenset(), {}
    return parse_quorum(page), parse_heartbeat_ages(page)


def fetch_heartbeat_ages(lighthouse: str, *, timeout_s: float) -> dict[str, float]:
    """Ask the lighthouse at HOST:PORT for heartbeats (`parse_heartbeat_ages`); nothing if it does not answer.

    A connection to a machine that vanished, or to a stopped process, does not break: the lighthouse knows within a
    heartbeat what a process that waits for a collective would learn after its timeout only.
    """
    return fetch_quorum_and_ages(lighthouse, timeout_s=timeout_s)[1]


def fetch_lighthouse_status(lighthouse: str) -> LighthouseStatus:
    """Ask the lighthouse at HOST:PORT for its status."""
    try:
        page = _fetch_page(lighthouse, _PAGE_TIMEOUT_S)
    except (OSError, ValueError) as problem:  # URLError is an OSError
        reason = getattr(problem, "reason", None) or problem
        raise ConfigError(
            f"no lighthouse answers at {lighthouse} ({reason}); is the fleet running, and may this machine reach that "
            f"port? ebbflow launch prints the address, and a job's folder has it in fleet.json"
        ) from None
    if "quorum" not in page.lower():
        raise ConfigError(f"what answers at {lighthouse} is not a lighthouse; ebbflow launch prints the address of one")
    return parse_lighthouse_page(page)


def _fetch_page(lighthouse: str, timeout_s: float) -> str:
    try:
        with _OPENER.open(f"http://{lighthouse}/status", timeout=timeout_s) as answer:
            return str(answer.read(_PAGE_BYTES).decode("utf-8", "replace"))
    except http.client.HTTPException as problem:  # another program has the port
        raise OSError(f"the answer is not that of a web server: {problem}"[:200]) from None


def fetch_statuses(lighthouse: LighthouseStatus, secret: bytes) -> dict[str, ReplicaStatus]:
    """Read what the living replicas published, from the store of each; those that do not answer are left out.

    Both sides prove that they know the secret of the job.
    """
    found = {}
    for name, address in lighthouse.stores.items():
        if name in lighthouse.heartbeat_ages:
            with contextlib.suppress(ConfigError, StoreLost):
                host, port = parse_address(address)
                with KeyStoreClient(host, port, secret, timeout_s=_STATUS_TIMEOUT_S) as store:
                    said = store.get([STATUS_KEY], timeout_s=0.0)
                status = parse_status(said[0]) if said is not None else None
                if status is not None:
                    found[name] = status
    return found
