"""What the verbs share: arguments and options that mean the same everywhere, where output goes, answers as JSON."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console

from ebbflow.core.endings import Ending
from ebbflow.run.config import RunConfig
from ebbflow.traces.formats import FORMATS

__all__ = [
    "TRACE", "AsJson", "FormatName", "PluginFiles", "TraceText", "command_line", "err", "interruptible", "out",
    "print_json",
]  # fmt: skip

out = Console(highlight=False)
"""Answers."""
err = Console(stderr=True, highlight=False)
"""Progress, notes and errors: never mixed into an answer that a script reads."""

TRACE = typer.Argument(
    metavar="TRACE", help="A trace file, a generator such as 'gcp-a100-like(seed=3)', or gcp-a100-2022-05."
)
TraceText = Annotated[str, TRACE]
FormatName = Annotated[
    str | None,
    typer.Option(
        "--format",
        help=f"Format of the file: {', '.join(FORMATS)}, or one from a plugin. Default: recognised by its content.",
    ),
]
PluginFiles = Annotated[
    list[str] | None, typer.Option("--plugin", help=f"{RunConfig.model_fields['plugins'].description} Repeatable.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Answer with JSON on standard output.")]


def print_json(value: Any) -> None:
    """One JSON document on standard output, and nothing else."""
    print(json.dumps(value, indent=2, allow_nan=False))


@contextmanager
def interruptible(*, tell: bool = True) -> Iterator[None]:
    """Ctrl-C and SIGTERM interrupt the work inside; the user is told that it can be continued."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        if tell:
            err.print("interrupted; what was done is kept, and the same command continues")
        raise typer.Exit(Ending.STOPPED.code) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def command_line() -> str:
    """The command as the user typed it: goes into records and reports."""
    name = Path(sys.argv[0]).name
    program = ["python", "-m", "ebbflow"] if name == "__main__.py" else [name]
    return shlex.join([*program, *sys.argv[1:]])
