"""The command `ebbflow`."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer

from ebbflow import __version__
from ebbflow.cli.choose_command import choose_verb
from ebbflow.cli.common import err
from ebbflow.cli.compare_command import compare
from ebbflow.cli.demo_command import demo
from ebbflow.cli.doctor_command import doctor
from ebbflow.cli.fleet_options import PASS_THROUGH, ScriptCommand
from ebbflow.cli.launch_command import launch
from ebbflow.cli.lighthouse_command import lighthouse
from ebbflow.cli.plan_command import plan
from ebbflow.cli.profile_command import profile
from ebbflow.cli.replay_command import replay
from ebbflow.cli.replica_command import replica
from ebbflow.cli.report_command import report
from ebbflow.cli.rules_command import app as rules_app
from ebbflow.cli.simulate_command import simulate_verb
from ebbflow.cli.status_command import status
from ebbflow.cli.study_command import study
from ebbflow.cli.trace_command import app as trace_app
from ebbflow.cli.train_command import train
from ebbflow.cli.whatif_command import whatif
from ebbflow.cli.workloads_command import workloads
from ebbflow.core.endings import Ending
from ebbflow.errors import EbbflowError, RankLost

__all__ = ["app", "main"]

app = typer.Typer(
    name="ebbflow",
    help="Train PyTorch models on workers that come and go.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo)
app.add_typer(trace_app, name="trace")
app.command("plan")(plan)
app.command("simulate")(simulate_verb)
app.command("compare")(compare)
app.command("profile")(profile)
app.command("whatif")(whatif)
app.add_typer(rules_app, name="rules")
app.command("workloads")(workloads)
app.command("train")(train)
app.command("study")(study)
app.command("choose")(choose_verb)
app.command("report")(report)
app.command("launch", cls=ScriptCommand, context_settings=PASS_THROUGH)(launch)
app.command("status")(status)
app.command("replay", cls=ScriptCommand, context_settings=PASS_THROUGH)(replay)
app.command("lighthouse")(lighthouse)
app.command("doctor")(doctor)
app.command("replica", hidden=True)(replica)


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
    """Run the command; what the user can mend is one message without a traceback, and `Ending` has its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows ? and not a traceback
    try:
        app()
    except EbbflowError as error:
        if not (isinstance(error, RankLost) and error.reported):
            err.print(f"[bold red]error:[/] {_escape(str(error))}", soft_wrap=True)
        sys.exit(Ending.of(error).code)
    except BrokenPipeError:  # the reader of our output left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _escape(text: str) -> str:
    """Square brackets in a message are text, not markup."""
    return text.replace("[", r"\[")
