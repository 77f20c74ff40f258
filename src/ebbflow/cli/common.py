"""What the verbs share: arguments and options that mean the same everywhere, where output goes, answers as JSON."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from ebbflow.core.endings import Ending
from ebbflow.core.printable import printable
from ebbflow.run.config import RunConfig
from ebbflow.traces.formats import FORMATS

__all__ = [
    "TRACE", "AsJson", "FormatName", "PluginFiles", "TraceText", "command_line", "err", "interruptible", "out",
    "print_json",
]  # fmt: skip


class _PrintableConsole(Console):
    """A console on which the text of others, such as names in records and status files, is text and nothing else."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Replace control characters in the text; what rich adds for colours and positions stays."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


out = _PrintableConsole(highlight=False)
"""Answers."""
err = _PrintableConsole(stderr=True, highlight=False)
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
