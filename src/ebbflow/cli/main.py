"""The command `ebbflow`."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer
from rich.text import Text

from ebbflow import __version__
from ebbflow.cli.choose_command import choose_verb
from ebbflow.cli.common import Verb, err
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
from ebbflow.core.plugins import raised_in_plugin
from ebbflow.core.wording import names_of_options
from ebbflow.errors import EbbflowError, RankLost

__all__ = ["app", "main"]

app = typer.Typer(
    name="ebbflow",
    help="Train PyTorch models on workers that come and go.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_VERBS: dict[str, dict[str, Callable[..., None]]] = {
    "Begin": {"demo": demo, "doctor": doctor},
    "Train, and find the rule": {
        "workloads": workloads, "train": train, "study": study, "choose": choose_verb, "report": report,
    },
    "Live fleets": {"launch": launch, "status": status, "replay": replay, "lighthouse": lighthouse},
    "Traces, time and money": {
        "plan": plan, "simulate": simulate_verb, "compare": compare, "whatif": whatif, "profile": profile,
    },
}  # fmt: skip
for _panel, _verbs in _VERBS.items():
    for _name, _verb in _verbs.items():
        _of_a_script = _verb in (launch, replay)
        app.command(
            _name,
            cls=ScriptCommand if _of_a_script else Verb,
            context_settings=PASS_THROUGH if _of_a_script else None,
            rich_help_panel=_panel,
        )(_verb)
app.command("replica", cls=Verb, hidden=True)(replica)
app.add_typer(rules_app, name="rules", rich_help_panel="Train, and find the rule")
app.add_typer(trace_app, name="trace", rich_help_panel="Traces, time and money")


def _print_version(requested: bool) -> None:
    if requested:
        print(f"ebbflow {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    context.with_resource(names_of_options())


def main() -> None:
    """Run the command; what the user can mend is one message without a traceback, and `Ending` has its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows ? and not a traceback
    try:
        app()
    except EbbflowError as error:
        if not (isinstance(error, RankLost) and error.reported):
            err.print(Text("error:", style="bold red"), str(error), soft_wrap=True)
        sys.exit(Ending.of(error).code)
    except BrokenPipeError:  # the reader of our output left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        said = raised_in_plugin(error)
        if not said:
            raise
        err.print(Text("error:", style="bold red"), f"a plugin raised {said}", soft_wrap=True)
        sys.exit(Ending.of(error).code)
