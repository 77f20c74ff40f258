"""What a replica is told by whoever starts it, and what it tells.

A replica is told by environment variables (`Job.environment`; `ebbflow.live.settings` reads them). It answers with its
status file (`ReplicaStatus`, written whole, about twice a second), its log, its record and its exit code. SIGTERM is
the notice to leave: finish the step, leave cleanly, exit with 0.

    <folder>/fleet.json                    who launched what; where the lighthouse is
    <folder>/lighthouse/log.txt
    <folder>/replicas/<name>/log.txt       everything the replica printed, all incarnations
    <folder>/replicas/<name>/status.json   what it is doing now
    <folder>/replicas/<name>/record.jsonl  the steps it committed
    <folder>/checkpoints/
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ebbflow.live.settings import HEARTBEAT_TIMEOUT_MS

__all__ = ["STATUS_KEY", "Job", "ReplicaStatus", "parse_status", "read_status", "replica_folder"]

STATUS_KEY = "ebbflow/status"
"""Where a replica's store has its status, too, for those who do not see its files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What the replicas of a fleet run, and what they are told."""

    command: tuple[str, ...]
    """The program and its arguments."""
    name: str
    """Of the job; replicas of another job are refused by the fleet."""
    folder: Path
    lighthouse: str
    """HOST:PORT."""
    bind: str = "127.0.0.1"
    """The address that replicas listen on."""
    min_replicas: int = 1
    heartbeat_timeout_ms: int = HEARTBEAT_TIMEOUT_MS
    gpus: int = 0
    """GPUs a replica; 0 leaves them alone."""
    threads: int = 0
    """CPU threads a replica, unless OMP_NUM_THREADS is set already; 0 leaves them alone."""

    def environment(self, replica: str, *, slot: int, base: dict[str, str]) -> dict[str, str]:
        """The environment of a replica: that of the launcher, and what the replica must know.

        `slot` numbers the replicas of this machine from 0; with `gpus` set, slot i sees the i-th group of GPUs (of
        those that the launcher sees).

        >>> job = Job(command=("python",), name="j", folder=Path("/f"), lighthouse="127.0.0.1:1", gpus=2)
        >>> job.environment("r1", slot=1, base={"CUDA_VISIBLE_DEVICES": "4,5,6,7"})["CUDA_VISIBLE_DEVICES"]
        '6,7'
        """
        told = {
            "EBBFLOW_LIGHTHOUSE": self.lighthouse,
            "EBBFLOW_REPLICA": replica,
            "EBBFLOW_JOB": self.name,
            "EBBFLOW_FOLDER": str(self.folder),
            "EBBFLOW_BIND": self.bind,
            "EBBFLOW_MIN_REPLICAS": str(self.min_replicas),
            "EBBFLOW_HEARTBEAT_TIMEOUT_MS": str(self.heartbeat_timeout_ms),
            "PYTHONUNBUFFERED": "1",  # a log of a killed process ends with what it printed last
        }
        if self.threads and "OMP_NUM_THREADS" not in base:
            told["OMP_NUM_THREADS"] = str(self.threads)
        if self.gpus:
            seen = base.get("CUDA_VISIBLE_DEVICES", "")
            every = seen.split(",") if seen else [str(i) for i in range((slot + 1) * self.gpus)]
            told["CUDA_VISIBLE_DEVICES"] = ",".join(every[slot * self.gpus : (slot + 1) * self.gpus])
        return {**base, **told}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaStatus:
    """What a replica said last. Everything but state and time may be unknown while it starts."""

    state: str
    """starting, joining, training, leaving, left, finished."""
    time: float
    """When it was written, in seconds since 1970."""
    pid: int | None = None
    incarnation: str | int | None = None
    step: int | None = None
    """Committed steps."""
    epoch: int | None = None
    position: int | None = None
    """Samples of the epoch that are committed."""
    members: int | None = None
    """Replicas in the last step."""
    batch: int | None = None
    """Samples in the last step, of all members together."""
    lr: float | None = None
    multiplier: float | None = None
    """What the rule made of the batch."""
    samples_per_s: float | None = None
    """Of the fleet, as this replica sees it."""
    loss: float | None = None


def replica_folder(folder: Path, replica: str) -> Path:
    """Where a replica keeps its files."""
    return folder / "replicas" / replica


def read_status(folder: Path, replica: str) -> ReplicaStatus | None:
    """The status of a replica; None if there is none that can be read."""
    try:
        return parse_status((replica_folder(folder, replica) / "status.json").read_bytes())
    except OSError:
        return None


def parse_status(text: str | bytes) -> ReplicaStatus | None:
    """A status as a replica writes it; None for anything else. What is not of the expected kind is unknown.

    >>> parse_status('{"state": "training", "time": 5.0, "step": 3, "loss": NaN}').step
    3
    """
    try:
        body = json.loads(text)
    except ValueError:
        return None
    if not isinstance(body, dict):
        return None
    values = {field.name: _plain(body.get(field.name)) for field in fields(ReplicaStatus)}
    if not isinstance(values["state"], str) or not isinstance(values["time"], int | float):
        return None
    return ReplicaStatus(**values)


def _plain(value: Any) -> Any:
    """A number or a text; anything else is unknown."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, int | float | str) and not isinstance(value, bool) else None
