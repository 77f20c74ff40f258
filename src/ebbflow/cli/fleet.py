"""What `launch` and `replay` share: their options, and the fleet on the screen while it runs."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.live import Live

from ebbflow.cli.common import err
from ebbflow.core.signals import StopSignal
from ebbflow.core.units import parse_seconds
from ebbflow.errors import ConfigError
from ebbflow.live.display import fleet_line, fleet_table, happening_line
from ebbflow.live.lighthouse import Lighthouse, LighthouseOptions
from ebbflow.live.program import job_name, locked, replica_command, tell_where
from ebbflow.live.protocol import Job
from ebbflow.live.restart import RestartPolicy
from ebbflow.live.status import FleetStatus, combine
from ebbflow.live.supervisor import Happening, Supervisor
from ebbflow.live.watch import Act, Outcome, watch

__all__ = [
    "PASS_THROUGH", "Bind", "Command", "Folder", "Gpus", "Grace", "Heartbeat", "JobName", "MaxFailures", "MinReplicas",
    "Shown", "Workload", "exit_code", "milliseconds", "positive", "supervised", "supervised_here",
]  # fmt: skip

PASS_THROUGH = {"ignore_unknown_options": True}
"""Options that are not ours are the script's."""

Command = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SCRIPT [ARGS]...",
        help="A Python script (or -m MODULE) and its arguments. Options that are not listed here go to it, and so "
        "does everything behind --.",
    ),
]
Workload = Annotated[
    str | None,
    typer.Option(
        help="Instead of a script: the ready-made replica on this workload; its options (--rule, ...) follow.",
    ),
]
Folder = Annotated[Path | None, typer.Option(help="Of the job: logs, records, checkpoints; default: below runs/.")]
JobName = Annotated[str | None, typer.Option("--job", help="Name of the job; default: of the script.")]
Bind = Annotated[str | None, typer.Option(help="Address to listen on; default: loopback.")]
MinReplicas = Annotated[int, typer.Option(help="Training waits while there are fewer.")]
Heartbeat = Annotated[str, typer.Option(help="A replica silent for so long is dead.")]
Grace = Annotated[str, typer.Option(help="How long a replica may take to leave before it is killed.")]
MaxFailures = Annotated[int, typer.Option(help="Give a replica up after so many deaths in a row without a step.")]
Gpus = Annotated[int, typer.Option(help="GPUs a replica; 0 leaves CUDA_VISIBLE_DEVICES alone.")]

_FIRST_LINE_S, _LINE_EVERY_S = 5.0, 60.0
_TABLE_EVERY_S = 0.25


def milliseconds(text: str) -> int:
    """A duration as whole milliseconds, at least one."""
    return max(1, round(parse_seconds(text) * 1000))


@contextmanager
def supervised_here(
    command: list[str],
    *,
    workload: str | None,
    folder: Path | None,
    job: str | None,
    replicas: int,
    lighthouse: LighthouseOptions,
    max_failures: int,
    gpus: int = 0,
) -> Iterator[Supervisor]:
    """A lighthouse on this machine, and a supervisor for up to so many replicas that meet there."""
    program = replica_command(command, workload=workload)
    name = job or job_name(command, workload=workload)
    folder = (folder or Path("runs") / name).resolve()
    with locked(folder):
        tower = Lighthouse(folder / "lighthouse", lighthouse)
        tell_where(folder, job=name, lighthouse=tower.address, command=program)
        told = Job(
            command=program, name=name, folder=folder, lighthouse=tower.address, bind=lighthouse.bind,
            min_replicas=lighthouse.min_replicas, heartbeat_timeout_ms=lighthouse.heartbeat_timeout_ms,
            gpus=gpus, threads=max(1, (os.cpu_count() or 1) // max(1, replicas)),
        )  # fmt: skip
        with Supervisor(told, tower, RestartPolicy(max_failures=max_failures)) as fleet:
            yield fleet


@dataclass
class Shown:
    """What was seen of a fleet while it ran."""

    outcome: Outcome
    seconds: float
    happened: Counter[str]
    """How often each kind of thing did."""

    def account(self, fleet: Supervisor) -> dict[str, Any]:
        """The part of the final account that the launcher knows by itself."""
        return {
            "status": self.outcome,
            "job": fleet.job.name,
            "folder": str(fleet.job.folder),
            "lighthouse": fleet.job.lighthouse,
            "seconds": round(self.seconds, 3),
            "starts": self.happened["started"],
            "restarts": sum(max(0, replica.incarnations - 1) for replica in fleet.replicas.values()),
            "deaths": sum(replica.deaths for replica in fleet.replicas.values()),
            "gave_up": sorted(r.name for r in fleet.replicas.values() if r.outcome == "gave up"),
        }


def supervised(fleet: Supervisor, *, grace_s: float, title: Callable[[], str], act: Act | None = None) -> Shown:
    """Watch a fleet to its end, with a table on a terminal and lines elsewhere, on standard error."""
    happened: Counter[str] = Counter()
    began = time.monotonic()
    shown_at, pause = 0.0, _TABLE_EVERY_S if err.is_terminal else _FIRST_LINE_S

    def on_happening(happening: Happening) -> None:
        happened[happening.what] += 1
        err.print(happening_line(happening), markup=False, soft_wrap=True)

    def status() -> FleetStatus:
        return combine(
            fleet.job.lighthouse, None, {r.name: r.status for r in fleet.replicas.values() if r.status and r.running}
        )

    def on_look() -> None:
        nonlocal shown_at, pause
        if time.monotonic() - shown_at < pause:
            return
        shown_at = time.monotonic()
        if err.is_terminal:
            live.update(fleet_table(fleet, status(), title=title()), refresh=True)
        else:
            err.print(f"{time.strftime('%H:%M:%S')} {fleet_line(fleet, status())}", markup=False, soft_wrap=True)
            pause = min(2 * pause, _LINE_EVERY_S)  # a log of days is not to be a log of lines like this

    # No thread of its own for the table: the launcher forks.
    live = Live(console=err, auto_refresh=False, transient=True)
    with StopSignal() as stop, live:
        try:
            outcome = watch(fleet, stop=stop, grace_s=grace_s, on_happening=on_happening, on_look=on_look, act=act)
        except KeyboardInterrupt:
            err.print("killed")
            outcome = "stopped"
    return Shown(outcome, time.monotonic() - began, happened)


def exit_code(outcome: Outcome) -> int:
    """0 when the job is done; 130 when it was interrupted and can be continued, as shells have it; 1 for a failure."""
    return {"finished": 0, "left": 130, "stopped": 130, "failed": 1}[outcome]


def positive(value: int, name: str) -> int:
    """The value, which must be at least 1."""
    if value < 1:
        raise ConfigError(f"{name} is {value}; expected at least 1")
    return value
