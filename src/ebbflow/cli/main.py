"""The command `ebbflow`."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer

from ebbflow import __version__
from ebbflow.cli import (
    compare,
    demo,
    launch,
    lighthouse,
    plan,
    profile,
    replay,
    replica,
    report,
    rules,
    simulate,
    status,
    study,
    trace,
    train,
    whatif,
    workloads,
)
from ebbflow.cli.common import err
from ebbflow.cli.fleet_options import PASS_THROUGH
from ebbflow.errors import EbbflowError, RankLost

__all__ = ["app", "main"]

app = typer.Typer(
    name="ebbflow",
    help="Train PyTorch models on workers that come and go.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo.demo)
app.add_typer(trace.app, name="trace")
app.command("plan")(plan.plan)
app.command("simulate")(simulate.simulate_verb)
app.command("compare")(compare.compare)
app.command("profile")(profile.profile)
app.command("whatif")(whatif.whatif)
app.add_typer(rules.app, name="rules")
app.command("workloads")(workloads.workloads)
app.command("train")(train.train)
app.command("study")(study.study)
app.command("report")(report.report)
app.command("launch", context_settings=PASS_THROUGH)(launch.launch)
app.command("status")(status.status)
app.command("replay", context_settings=PASS_THROUGH)(replay.replay)
app.command("lighthouse")(lighthouse.lighthouse)
app.command("replica", hidden=True)(replica.replica)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"ebbflow {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command; what the user can mend is said in one message, with exit code 2 and no traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows ? and not a traceback
    try:
        app()
    except EbbflowError as error:
        if not (isinstance(error, RankLost) and error.reported):
            err.print(f"[bold red]error:[/] {_escape(str(error))}", soft_wrap=True)
        sys.exit(2)
    except BrokenPipeError:  # the reader of our output left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _escape(text: str) -> str:
    """Square brackets in a message are text, not markup."""
    return text.replace("[", r"\[")
