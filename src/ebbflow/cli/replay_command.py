"""`ebbflow replay`: real replicas that come and go as an availability trace says."""

from __future__ import annotations

from typing import Annotated, cast

import typer

from ebbflow.cli.common import AsJson, PluginFiles, TraceText, err, out, print_json
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
    Out,
    Ranks,
    TransportName,
    Workload,
    check_ranks,
    heartbeat_milliseconds,
    positive,
    with_plugins,
)
from ebbflow.core.endings import Ending
from ebbflow.core.plugins import load_plugins
from ebbflow.core.units import format_seconds, parse_seconds
from ebbflow.live.accounting import account_lines, read_account
from ebbflow.live.launcher import launch_fleet, run_fleet
from ebbflow.live.processes import LighthouseOptions
from ebbflow.live.protocol import HEARTBEAT_TIMEOUT_MS
from ebbflow.live.torchft_api import require_torchft
from ebbflow.live.trace_replay import Leaver, StopSignalName, TraceReplay, adapt_trace, make_schedule
from ebbflow.traces import load

__all__ = ["replay"]


def replay(
    trace: TraceText,
    command: Command = None,
    speed: Annotated[float, typer.Option(help="How many times faster than the trace: 60 is an hour per minute.")] = 1.0,
    max_workers: Annotated[int | None, typer.Option(help="Scale the trace down to this many replicas.")] = None,
    signal: Annotated[str, typer.Option(help="How a replica is ended: kill (-9), term (SIGTERM), or mixed.")] = "kill",
    leaver: Annotated[str, typer.Option(help="Which replica is ended: newest, oldest or random.")] = "random",
    seed: Annotated[int, typer.Option(help="Seed of which replica is ended, and how.")] = 0,
    duration: Annotated[str | None, typer.Option(help="Stop after this long, of real time.")] = None,
    finish: Annotated[
        bool, typer.Option("--finish", help="When the trace is over, keep the last replicas until the job is done.")
    ] = False,
    workload: Workload = None,
    plugin: PluginFiles = None,
    out_folder: Out = None,
    job: JobName = None,
    heartbeat_timeout: Heartbeat = f"{HEARTBEAT_TIMEOUT_MS}ms",
    grace: Grace = "30s",
    max_failures: MaxFailures = 5,
    gpus: Gpus = 0,
    ranks: Ranks = 1,
    transport: TransportName = "auto",
    from_scratch: FromScratch = False,
    allow_changes: AllowChanges = False,
    checkpoints: CheckpointPlace = "",
    json: AsJson = False,
) -> None:
    """Start and kill real replicas on this machine as an availability trace says, and end with an account.

    The account is made from the replicas' own records: steps, samples committed exactly once, what was lost, and how
    long each change delayed the fleet.

    Exit codes are those of launch; 4 (incomplete) if the trace is over first.

    ebbflow replay spot.csv --speed 60 --max-workers 4 train.py
    """
    require_torchft("ebbflow replay")
    load_plugins(plugin or [])
    if max_workers is not None:
        positive(max_workers, "max-workers")
    positive(max_failures, "max-failures")
    check_ranks(ranks, gpus=gpus)
    duration_s = parse_seconds(duration) if duration else None
    grace_s = parse_seconds(grace)
    played = adapt_trace(load(trace), speed=speed, max_workers=max_workers, duration_s=duration_s)
    schedule = make_schedule(played, stop=cast(StopSignalName, signal), leaver=cast(Leaver, leaver), seed=seed)
    options = LighthouseOptions(heartbeat_timeout_ms=heartbeat_milliseconds(heartbeat_timeout))
    with launch_fleet(
        with_plugins(command or [], plugin or [], workload=workload), replicas=played.stats().max, workload=workload,
        out=out_folder, job=job, lighthouse=options, max_failures=max_failures, gpus=gpus, ranks=ranks,
        transport=transport, from_scratch=from_scratch, allow_changes=allow_changes, checkpoints=checkpoints,
    ) as fleet:  # fmt: skip
        replayed = TraceReplay(fleet, schedule, grace_s=grace_s, finish=finish)
        config = fleet.job.fleet

        def title() -> str:
            now = min(replayed.elapsed_s, played.end)
            available = len(schedule.running(now))
            return f"{config.job}: {now:.0f} of {format_seconds(played.end)}, {available} available by {trace}"

        err.print(f"{title()}; folder {config.folder}", soft_wrap=True)
        run = run_fleet(fleet, grace_s=grace_s, console=err, title=title, act=replayed.act)
    account = read_account(config.folder)
    seen = run.account(fleet)
    ending = run.ending
    if replayed.over and ending is Ending.STOPPED and not run.signalled:
        ending = Ending.INCOMPLETE
        reason = (
            "the trace was over before all epochs were done; the same command continues, --finish goes on to the end"
        )
        seen |= {"status": "trace over", "reason": reason}
    if account.problems:
        ending = Ending.FAILED
        seen |= {"status": ending.word, "reason": "a sample was lost or repeated, or the records cannot be read"}
    seen |= {
        "trace": trace,
        "speed": speed,
        "trace_played_s": round(min(run.seconds, played.end), 3),
        "trace_over": replayed.over,
        "kills": sum(action.what == "kill" for action in replayed.done),
        "notices": sum(action.what == "term" for action in replayed.done),
    }
    if json:
        print_json({**seen, **account.to_json()})
    else:
        for line in account_lines(seen, account):
            out.print(line, soft_wrap=True)
        if seen["reason"]:
            out.print(seen["reason"], soft_wrap=True)
    raise typer.Exit(ending.code)
