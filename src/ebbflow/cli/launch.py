"""`ebbflow launch`: a fleet on this machine, or one replica of a fleet elsewhere."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from ebbflow.cli.common import AsJson, err, out, print_json
from ebbflow.cli.fleet import (
    Bind,
    Command,
    Folder,
    Gpus,
    Grace,
    Heartbeat,
    JobName,
    MaxFailures,
    MinReplicas,
    Workload,
    exit_code,
    milliseconds,
    positive,
    supervised,
    supervised_here,
)
from ebbflow.core.units import parse_seconds
from ebbflow.errors import ConfigError
from ebbflow.live.account import account_lines, read_account
from ebbflow.live.address import (
    LOOPBACK,
    format_address,
    is_loopback,
    local_address_towards,
    parse_address,
    parse_bind,
)
from ebbflow.live.lighthouse import DEFAULT_PORT, LighthouseOptions
from ebbflow.live.program import job_name, locked, replica_command
from ebbflow.live.protocol import Job, replica_folder
from ebbflow.live.restart import RestartPolicy
from ebbflow.live.settings import HEARTBEAT_TIMEOUT_MS
from ebbflow.live.supervisor import Supervisor
from ebbflow.live.torchft_api import require_torchft

__all__ = ["launch"]


def launch(
    command: Command = None,
    replicas: Annotated[int, typer.Option(help="How many on this machine.")] = 1,
    join: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Be one replica of the fleet with this lighthouse.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="With --join: of this replica, unlike any other; default: this machine's.")
    ] = None,
    workload: Workload = None,
    folder: Folder = None,
    job: JobName = None,
    bind: Bind = None,
    port: Annotated[int, typer.Option(help="Of the lighthouse; 0: any free one.")] = 0,
    min_replicas: MinReplicas = 1,
    heartbeat_timeout: Heartbeat = f"{HEARTBEAT_TIMEOUT_MS}ms",
    grace: Grace = "30s",
    max_failures: MaxFailures = 5,
    gpus: Gpus = 0,
    json: AsJson = False,
) -> None:
    """Run a script as a fleet: a lighthouse and replicas on this machine, restarted when they die.

    Ctrl-C asks all replicas to leave, so that they write a checkpoint; the same
    command continues. A second Ctrl-C kills them. With --join, one replica is
    run as part of a fleet elsewhere.
    """
    require_torchft("ebbflow launch")
    positive(replicas, "replicas")
    positive(min_replicas, "min-replicas")
    grace_s = parse_seconds(grace)
    beat = milliseconds(heartbeat_timeout)
    given = command or []
    if join is not None:
        if replicas > 1:
            raise ConfigError("--join starts one replica; run the command once for each, with another --name each time")
        running = _joined(
            given, workload=workload, folder=folder, job=job, address=join, name=name, bind=bind,
            min_replicas=min_replicas, heartbeat_timeout_ms=beat, max_failures=max_failures, gpus=gpus,
        )  # fmt: skip
        names = [_own_name(name)]
    else:
        if name is not None:
            raise ConfigError("--name belongs to --join; replicas of a fleet on this machine are called r0, r1, ...")
        running = supervised_here(
            given, workload=workload, folder=folder, job=job, replicas=replicas, max_failures=max_failures, gpus=gpus,
            lighthouse=LighthouseOptions(
                bind=parse_bind(bind or LOOPBACK), port=port, min_replicas=min_replicas, heartbeat_timeout_ms=beat
            ),
        )  # fmt: skip
        names = [f"r{i}" for i in range(replicas)]
    with running as fleet:
        told = f"{fleet.job.name}: lighthouse {fleet.job.lighthouse}, folder {fleet.job.folder}"
        err.print(told, markup=False, soft_wrap=True)
        for replica in names:
            fleet.want(replica)
        shown = supervised(fleet, grace_s=grace_s, title=lambda: told)
    seen = shown.account(fleet)
    # Of a fleet elsewhere the records of the others may be elsewhere, too.
    account = read_account(fleet.job.folder) if join is None else None
    if json:
        print_json({**seen, **(account.to_json() if account else {})})
    else:
        for line in account_lines(seen, account):
            out.print(line, markup=False, soft_wrap=True)
        if shown.outcome in ("stopped", "left"):
            out.print("not finished; the same command continues")
    raise typer.Exit(exit_code(shown.outcome))


def _own_name(name: str | None) -> str:
    """The name of a replica that joins: what a folder can be called, and what the fleet takes for a name.

    >>> _own_name("node 7 (gpu)")
    'node-7-gpu'
    """
    own = re.sub(r"[^A-Za-z0-9._-]+", "-", name or socket.gethostname()).strip("._-")
    if not own:
        raise ConfigError(f"--name {name}: expected letters or digits, for example r2")
    return own


@contextmanager
def _joined(
    command: list[str], *, workload: str | None, folder: Path | None, job: str | None, address: str, name: str | None,
    bind: str | None, min_replicas: int, heartbeat_timeout_ms: int, max_failures: int, gpus: int,
) -> Iterator[Supervisor]:  # fmt: skip
    """A supervisor for one replica of a fleet whose lighthouse is elsewhere."""
    host, port = parse_address(address, default_port=DEFAULT_PORT)
    bind = parse_bind(bind) if bind else local_address_towards(host, port)
    if is_loopback(bind) and not is_loopback(host):
        raise ConfigError(
            f"a replica that listens on {bind} cannot be reached by the others at {host}; "
            f"leave --bind out, or give this machine's address on that network"
        )
    title = job or job_name(command, workload=workload)
    where = (folder or Path("runs") / title).resolve()
    told = Job(
        command=replica_command(command, workload=workload), name=title, folder=where,
        lighthouse=format_address(host, port), bind=bind, min_replicas=min_replicas,
        heartbeat_timeout_ms=heartbeat_timeout_ms, gpus=gpus,
    )  # fmt: skip
    with (
        locked(replica_folder(where, _own_name(name))),
        Supervisor(told, None, RestartPolicy(max_failures=max_failures)) as fleet,
    ):
        yield fleet
