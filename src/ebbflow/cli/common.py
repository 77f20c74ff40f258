"""What the verbs share: where output goes, and how an answer is printed as JSON."""

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

__all__ = ["AsJson", "PluginFiles", "command_line", "err", "interruptible", "out", "print_json"]

out = Console(highlight=False)
"""Answers."""
err = Console(stderr=True, highlight=False)
"""Progress, notes and errors: never mixed into an answer that a script reads."""

PluginFiles = Annotated[
    list[str] | None,
    typer.Option("--plugin", help="A Python file that registers your own traces, policies, ...; repeatable."),
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
