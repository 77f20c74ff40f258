"""`ebbflow replay`: real replicas that come and go as an availability trace says."""

from __future__ import annotations

from typing import Annotated, cast

import typer

from ebbflow.cli.common import AsJson, err, out, print_json
from ebbflow.cli.fleet import (
    Command,
    Folder,
    Gpus,
    Grace,
    Heartbeat,
    JobName,
    MaxFailures,
    Workload,
    exit_code,
    milliseconds,
    positive,
    supervised,
    supervised_here,
)
from ebbflow.core.units import format_seconds, parse_seconds
from ebbflow.live.account import account_lines, read_account
from ebbflow.live.lighthouse import LighthouseOptions
from ebbflow.live.replay import Replay
from ebbflow.live.schedule import Leaver, Stop, make_schedule, playable
from ebbflow.live.settings import HEARTBEAT_TIMEOUT_MS
from ebbflow.live.torchft_api import require_torchft
from ebbflow.traces import load

__all__ = ["replay"]


def replay(
    trace: Annotated[str, typer.Argument(help="A trace file, or a generator such as 'gcp-a100-like(seed=1)'.")],
    command: Command = None,
    speed: Annotated[float, typer.Option(help="Times faster than the trace: 60 plays an hour in a minute.")] = 1.0,
    max_workers: Annotated[int | None, typer.Option(help="Scale the trace down to at most so many replicas.")] = None,
    signal: Annotated[str, typer.Option(help="How a replica goes: kill (-9), term (a notice), or mixed.")] = "kill",
    leaver: Annotated[str, typer.Option(help="Which one goes: newest, oldest or random.")] = "random",
    seed: Annotated[int, typer.Option(help="Of who goes, and how.")] = 0,
    duration: Annotated[str | None, typer.Option(help="Stop after so long on the clock of the wall.")] = None,
    finish: Annotated[
        bool, typer.Option("--finish", help="When the trace is over, keep the last replicas until the job is done.")
    ] = False,
    workload: Workload = None,
    folder: Folder = None,
    job: JobName = None,
    heartbeat_timeout: Heartbeat = f"{HEARTBEAT_TIMEOUT_MS}ms",
    grace: Grace = "30s",
    max_failures: MaxFailures = 5,
    gpus: Gpus = 0,
    json: AsJson = False,
) -> None:
    """Start and kill real replicas on this machine as an availability trace says, and end with an account.

    The account is made from the replicas' own records: steps, samples committed
    exactly once, what was lost, and how long each change held the fleet up.
    """
    require_torchft("ebbflow replay")
    if max_workers is not None:
        positive(max_workers, "max-workers")
    duration_s = parse_seconds(duration) if duration else None
    grace_s = parse_seconds(grace)
    played = playable(load(trace), speed=speed, max_workers=max_workers, duration_s=duration_s)
    schedule = make_schedule(played, stop=cast(Stop, signal), leaver=cast(Leaver, leaver), seed=seed)
    options = LighthouseOptions(heartbeat_timeout_ms=milliseconds(heartbeat_timeout))
    with supervised_here(
        command or [], workload=workload, folder=folder, job=job, replicas=played.stats().max, lighthouse=options,
        max_failures=max_failures, gpus=gpus,
    ) as fleet:  # fmt: skip
        acting = Replay(fleet, schedule, grace_s=grace_s, finish=finish)

        def title() -> str:
            now = min(acting.elapsed_s, played.end)
            wanted = len(schedule.running(now))
            return f"{fleet.job.name}: {now:.0f} of {format_seconds(played.end)}, {wanted} wanted by {trace}"

        err.print(f"{title()}; folder {fleet.job.folder}", markup=False, soft_wrap=True)
        shown = supervised(fleet, grace_s=grace_s, title=title, act=acting.act)
    account = read_account(fleet.job.folder)
    played_out = acting.over and shown.outcome == "left"
    ended = {
        **shown.account(fleet),
        "status": "trace over" if played_out else shown.outcome,
        "trace": trace,
        "speed": speed,
        "trace_played_s": round(min(shown.seconds, played.end), 3),
        "trace_over": acting.over,
        "kills": sum(action.what == "kill" for action in acting.done),
        "notices": sum(action.what == "term" for action in acting.done),
    }
    if json:
        print_json({**ended, **account.to_json()})
    else:
        for line in account_lines(ended, account):
            out.print(line, markup=False, soft_wrap=True)
    raise typer.Exit(1 if account.problems else 0 if played_out else exit_code(shown.outcome))
