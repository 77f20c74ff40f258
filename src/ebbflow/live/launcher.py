"""Launching: the command of a replica, a fleet on this machine, one replica of a fleet elsewhere.

with launch_fleet(["train.py"], replicas=2) as fleet:
    fleet.request("r0")
    run = run_fleet(fleet, grace_s=30, console=console, title=lambda: "my job")
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console

from ebbflow.core.endings import Ending
from ebbflow.core.files import hold_lock
from ebbflow.core.folders import check_folder
from ebbflow.core.preemption import NoticeSource, watching
from ebbflow.core.signals import StopSignal
from ebbflow.errors import ConfigError
from ebbflow.live.fleet_status import FleetDisplay
from ebbflow.live.processes import LighthouseOptions, LighthouseProcess
from ebbflow.live.protocol import (
    DEFAULT_PORT,
    FINAL_WEIGHTS,
    HEARTBEAT_TIMEOUT_MS,
    FleetConfig,
    Transport,
    create_secret,
    format_address,
    is_loopback,
    local_address_towards,
    parse_address,
    parse_bind,
    replica_folder,
    write_fleet_file,
)
from ebbflow.live.supervisor import Act, Job, RestartPolicy, Supervisor, supervise

__all__ = [
    "FleetRun", "job_name", "join_fleet", "launch_fleet", "replica_command", "replica_name", "run_fleet",
]  # fmt: skip

# What is run, and its name --------------------------------------------------------------------------------------------


def replica_command(command: Sequence[str], *, workload: str | None = None) -> tuple[str, ...]:
    """Give the command of a replica: a Python script, `-m` and a module, or the ready-made replica on a workload.

    >>> replica_command(["-m", "my.training", "--lr", "0.1"])[1:]
    ('-m', 'my.training', '--lr', '0.1')
    """
    if workload is not None:
        if command and not command[0].startswith("-"):
            raise ConfigError(
                f"--workload {workload} runs without a script, but {command[0]!r} was given; leave one of them out"
            )
        return (sys.executable, "-m", "ebbflow", "replica", "--workload", workload, *command)
    if not command:
        raise ConfigError(
            "nothing to run; give a Python script, -m and a module, or --workload and a name (ebbflow workloads)"
        )
    first = command[0]
    if first == "-m":
        if len(command) < 2:
            raise ConfigError("-m needs the name of a module, such as -m my.training")
        return (sys.executable, *command)
    if first.startswith("-"):
        raise ConfigError(f"unknown option {first}; options of the script go behind the script")
    if not Path(first).is_file():
        raise ConfigError(f"{first}: no such file; expected a Python script")
    return (sys.executable, *command)


def job_name(command: Sequence[str], *, workload: str | None = None) -> str:
    """Name a job after what it runs.

    >>> job_name(["train/my net.py"]), job_name(["-m", "my.training"]), job_name([], workload="digits-mlp")
    ('my-net', 'training', 'digits-mlp')
    """
    text = workload or (command[1].rpartition(".")[2] if command[0] == "-m" else Path(command[0]).stem)
    return re.sub(r"[^\w.-]+", "-", text)


def replica_name(name: str | None) -> str:
    """Name a replica that joins a fleet elsewhere, after this machine by default, such that a folder can have the name.

    >>> replica_name("node 7 (gpu)")
    'node-7-gpu'
    """
    own = re.sub(r"[^A-Za-z0-9._-]+", "-", name or socket.gethostname()).strip("._-")
    if not own:
        raise ConfigError(f"--name {name}: expected letters or digits, for example r2")
    return own


def _check_gpus(replicas: int, gpus: int) -> None:
    """Refuse replicas for which there are no GPUs of their own: they would see none, and train without a word."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    there = len(visible.split(",")) if visible else replicas * gpus
    if there < replicas * gpus:
        raise ConfigError(
            f"{replicas} replicas with {gpus} GPUs each (--gpus) need {replicas * gpus}, and CUDA_VISIBLE_DEVICES has "
            f"{there}: {visible}; run fewer replicas, or leave --gpus out and choose the devices in the script"
        )


def _hold_folder(folder: Path) -> AbstractContextManager[None]:
    """Hold a folder, since a second launcher would write into the files of the first."""
    busy = f"{folder} is in use by another launcher; stop that one first, or choose another --out"
    return hold_lock(folder / ".lock", busy=busy)


def _move_aside(folder: Path) -> None:
    """Move checkpoints, records and weights of an earlier launch into a folder `earlier-N` beside them."""
    old = [path for name in ("checkpoints", "replicas", FINAL_WEIGHTS) if (path := folder / name).exists()]
    if not old:
        return
    aside = next(path for number in count(1) if not (path := folder / f"earlier-{number}").exists())
    aside.mkdir()
    for path in old:
        path.rename(aside / path.name)


# Fleets ---------------------------------------------------------------------------------------------------------------


@contextmanager
def launch_fleet(
    command: Sequence[str],
    *,
    replicas: int,
    workload: str | None = None,
    out: Path | str | None = None,
    job: str | None = None,
    lighthouse: LighthouseOptions | None = None,
    max_failures: int = 5,
    gpus: int = 0,
    ranks: int = 1,
    transport: Transport = "auto",
    from_scratch: bool = False,
    allow_changes: bool = False,
    checkpoints: str = "",
) -> Iterator[Supervisor]:
    """Start a lighthouse on this machine, and supervise up to `replicas` replicas that meet there.

    `out`: folder of the job, by default runs/ and the name of the job. `from_scratch`: what an earlier launch left
    there is moved aside. `allow_changes`, `checkpoints`: see `FleetConfig`. No replica runs before it is requested.
    """
    if from_scratch and checkpoints:
        raise ConfigError(
            f"--from-scratch moves the files of the job aside, but not the checkpoints in {checkpoints}; give another "
            f"--checkpoints"
        )
    _check_gpus(replicas, gpus)
    program = replica_command(command, workload=workload)
    name = job or job_name(command, workload=workload)
    folder = Path(out or Path("runs") / name).resolve()
    options = lighthouse or LighthouseOptions()
    check_folder(folder, "fleet")
    with _hold_folder(folder):
        if from_scratch:
            _move_aside(folder)
        create_secret(folder)
        process = LighthouseProcess(folder / "lighthouse", options)
        write_fleet_file(folder, job=name, lighthouse=process.address, command=program)
        config = FleetConfig(
            lighthouse=process.address,
            folder=folder,
            job=name,
            bind=options.bind,
            min_replicas=options.min_replicas,
            heartbeat_timeout_ms=options.heartbeat_timeout_ms,
            transport=transport,
            allow_changes=int(allow_changes),
            checkpoints=checkpoints,
        )
        threads = max(1, (os.cpu_count() or 1) // max(1, replicas * ranks))
        run = Job(command=program, fleet=config, gpus=gpus, threads=threads, ranks=ranks)
        with Supervisor(run, process, RestartPolicy(max_failures=max_failures)) as fleet:
            yield fleet


@contextmanager
def join_fleet(
    command: Sequence[str],
    *,
    lighthouse: str,
    workload: str | None = None,
    out: Path | str | None = None,
    job: str | None = None,
    name: str | None = None,
    bind: str | None = None,
    min_replicas: int = 1,
    heartbeat_timeout_ms: int = HEARTBEAT_TIMEOUT_MS,
    max_failures: int = 5,
    gpus: int = 0,
    ranks: int = 1,
    transport: Transport = "auto",
    allow_changes: bool = False,
    checkpoints: str = "",
) -> Iterator[Supervisor]:
    """Supervise one replica of a fleet whose lighthouse, at HOST:PORT, runs elsewhere; it is requested already."""
    host, port = parse_address(lighthouse, default_port=DEFAULT_PORT)
    bind = parse_bind(bind) if bind else local_address_towards(host, port)
    if is_loopback(bind) and not is_loopback(host):
        raise ConfigError(
            f"a replica that listens on {bind} cannot be reached by the others at {host}; "
            f"leave --bind out, or give this machine's address on that network"
        )
    _check_gpus(1, gpus)
    program = replica_command(command, workload=workload)
    title = job or job_name(command, workload=workload)
    config = FleetConfig(
        lighthouse=format_address(host, port),
        folder=Path(out or Path("runs") / title).resolve(),
        job=title,
        bind=bind,
        min_replicas=min_replicas,
        heartbeat_timeout_ms=heartbeat_timeout_ms,
        transport=transport,
        allow_changes=int(allow_changes),
        checkpoints=checkpoints,
    )
    own = replica_name(name)
    check_folder(config.folder, "fleet")
    create_secret(config.folder)
    run = Job(command=program, fleet=config, gpus=gpus, ranks=ranks)
    with (
        _hold_folder(replica_folder(config.folder, own)),
        Supervisor(run, None, RestartPolicy(max_failures=max_failures)) as fleet,
    ):
        fleet.request(own)
        yield fleet


@dataclass(frozen=True)
class FleetRun:
    """How a supervised fleet ended."""

    ending: Ending
    reason: str
    """Why it ended so, in one line."""
    signalled: bool
    """Whether somebody stopped the launcher."""
    seconds: float
    counts: Counter[str]
    """Number of events of each kind."""

    def account(self, fleet: Supervisor) -> dict[str, Any]:
        """Give the part of the final account that the launcher knows by itself; keys of the `--json` answer."""
        return {
            "status": self.ending.word,
            "reason": self.reason,
            "job": fleet.job.fleet.job,
            "folder": str(fleet.job.fleet.folder),
            "lighthouse": fleet.job.fleet.lighthouse,
            "seconds": round(self.seconds, 3),
            "starts": self.counts["started"],
            "restarts": sum(max(0, replica.incarnations - 1) for replica in fleet.replicas.values()),
            "deaths": sum(replica.deaths for replica in fleet.replicas.values()),
            "gave_up": sorted(r.name for r in fleet.replicas.values() if r.outcome == "gave up"),
        }


def run_fleet(
    fleet: Supervisor,
    *,
    grace_s: float,
    console: Console,
    title: Callable[[], str],
    act: Act | None = None,
    notices: Sequence[NoticeSource] = (),
) -> FleetRun:
    """Supervise a fleet to its end and show it meanwhile; signals, and a notice as the first of them, end it as
    `supervise` says. So does a terminal that is closed, unless the launcher was told to ignore that (nohup)."""
    began = time.monotonic()
    ends_it = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        ends_it.append(signal.SIGHUP)
    with StopSignal(*ends_it) as stop, watching(notices, stop.request), FleetDisplay(console, fleet, title) as display:
        try:
            ending, reason = supervise(
                fleet, stop=stop, grace_s=grace_s, on_event=display.on_event, on_poll=display.on_poll, act=act
            )
        except KeyboardInterrupt:
            display.say("killed")
            ending, reason = Ending.STOPPED, "killed by a second signal; the same command continues"
    if ending is Ending.FINISHED and not any(replica.trained for replica in fleet.replicas.values()):
        reason = f"nothing was trained: the job in {fleet.job.fleet.folder} had finished before; give another --out"
    return FleetRun(ending, reason, stop.requested, time.monotonic() - began, display.counts)
