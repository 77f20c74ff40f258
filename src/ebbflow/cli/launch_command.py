"""`ebbflow launch`: a fleet on this machine, or one replica of a fleet elsewhere."""

from __future__ import annotations

from typing import Annotated

import typer

from ebbflow.cli.common import AsJson, PluginFiles, err, out, print_json
from ebbflow.cli.fleet_options import (
    AllowChanges,
    CheckpointPlace,
    Command,
    FromScratch,
    Gpus,
    Grace,
    Heartbeat,
    JobName,
    MaxFailures,
    MinReplicas,
    Notices,
    Out,
    Ranks,
    TransportName,
    Workload,
    check_ranks,
    heartbeat_milliseconds,
    positive,
    with_plugins,
)
from ebbflow.core.plugins import load_plugins
from ebbflow.core.preemption import NOTICES
from ebbflow.core.units import parse_seconds
from ebbflow.errors import ConfigError
from ebbflow.live.accounting import account_lines, read_account
from ebbflow.live.launcher import join_fleet, launch_fleet, run_fleet
from ebbflow.live.processes import LighthouseOptions
from ebbflow.live.protocol import HEARTBEAT_TIMEOUT_MS, LOOPBACK, parse_address, parse_bind
from ebbflow.live.torchft_api import require_torchft

__all__ = ["launch"]


def launch(
    command: Command = None,
    replicas: Annotated[int, typer.Option(help="Number of replicas on this machine.")] = 1,
    join: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Run one replica of the fleet with this lighthouse.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="Name of this replica, unique in the fleet (with --join). By default the host name."),
    ] = None,
    workload: Workload = None,
    plugin: PluginFiles = None,
    out_folder: Out = None,
    job: JobName = None,
    bind: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS[:PORT]",
            help="Where the lighthouse listens; by default loopback, at any free port. With --join: the address of "
            "this replica; by default the one through which it reaches the lighthouse.",
        ),
    ] = None,
    min_replicas: MinReplicas = 1,
    heartbeat_timeout: Heartbeat = f"{HEARTBEAT_TIMEOUT_MS}ms",
    grace: Grace = "30s",
    max_failures: MaxFailures = 5,
    gpus: Gpus = 0,
    ranks: Ranks = 1,
    transport: TransportName = "auto",
    notice: Notices = None,
    from_scratch: FromScratch = False,
    allow_changes: AllowChanges = False,
    checkpoints: CheckpointPlace = "",
    json: AsJson = False,
) -> None:
    """Run a script as a fleet: a lighthouse and replicas on this machine, restarted when they die.

    Ctrl-C asks all replicas to leave, so that they write a checkpoint; the same command continues. A second Ctrl-C
    kills them. With --join, one replica is run as part of a fleet elsewhere.

    Exit codes: 0 finished, 1 failed, 2 wrong input, 3 stopped (the same command continues), 4 incomplete, 5 diverged.

    ebbflow launch --replicas 4 train.py
    ebbflow launch --replicas 3 --workload digits-mlp --rule adascale
    ebbflow launch --join 10.0.0.7:29510 --name node3 train.py
    """
    require_torchft("ebbflow launch")
    if plugin and workload is None:
        raise ConfigError(
            "--plugin belongs to --workload; a script imports its plugins itself, and its options go behind its name"
        )
    program = with_plugins(command or [], plugin or [], workload=workload)
    if notice:
        load_plugins(plugin or [])  # a source of notices may be among them
    notices = [NOTICES.make(text) for text in notice or ()]
    positive(replicas, "replicas")
    positive(min_replicas, "min-replicas")
    positive(max_failures, "max-failures")
    check_ranks(ranks, gpus=gpus)
    grace_s = parse_seconds(grace)
    timeout_ms = heartbeat_milliseconds(heartbeat_timeout)
    if join is not None:
        if replicas > 1:
            raise ConfigError("--join starts one replica; run the command once for each, with another --name each time")
        if from_scratch:
            raise ConfigError(
                "--from-scratch is for a fleet on this machine; with --join, give a new --out to all replicas"
            )
        running = join_fleet(
            program, lighthouse=join, workload=workload, out=out_folder, job=job, name=name, bind=bind,
            min_replicas=min_replicas, heartbeat_timeout_ms=timeout_ms, max_failures=max_failures, gpus=gpus,
            ranks=ranks, transport=transport, allow_changes=allow_changes, checkpoints=checkpoints,
        )  # fmt: skip
    else:
        if name is not None:
            raise ConfigError("--name belongs to --join; replicas of a fleet on this machine are called r0, r1, ...")
        host, port = parse_address(bind or LOOPBACK, default_port=0)
        options = LighthouseOptions(
            bind=parse_bind(host), port=port, min_replicas=min_replicas, heartbeat_timeout_ms=timeout_ms
        )
        running = launch_fleet(
            program, replicas=replicas, workload=workload, out=out_folder, job=job, lighthouse=options,
            max_failures=max_failures, gpus=gpus, ranks=ranks, transport=transport, from_scratch=from_scratch,
            allow_changes=allow_changes, checkpoints=checkpoints,
        )  # fmt: skip
    with running as fleet:
        if join is None:
            for number in range(replicas):
                fleet.request(f"r{number}")
        config = fleet.job.fleet
        title = f"{config.job}: lighthouse {config.lighthouse}, folder {config.folder}"
        err.print(title, soft_wrap=True)
        run = run_fleet(fleet, grace_s=grace_s, console=err, title=lambda: title, notices=notices)
    seen = run.account(fleet)
    # The records of a fleet elsewhere may be elsewhere, too.
    account = read_account(config.folder) if join is None else None
    if json:
        print_json({**seen, **(account.to_json() if account else {})})
    else:
        for line in account_lines(seen, account):
            out.print(line, soft_wrap=True)
        if run.reason:
            out.print(run.reason, soft_wrap=True)
    raise typer.Exit(run.ending.code)
