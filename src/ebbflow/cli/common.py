"""What the verbs share: their help, arguments and options that mean the same everywhere, where output goes, JSON."""

from __future__ import annotations

import inspect
import json
import shlex
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import indent
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import TextColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from ebbflow.core.endings import Ending
from ebbflow.core.printable import printable
from ebbflow.run.config import RunConfig
from ebbflow.traces.formats import FORMATS

__all__ = [
    "TRACE", "AsJson", "FormatName", "PluginFiles", "TraceText", "Verb", "command_line", "err", "interruptible",
    "out", "print_json", "text_column",
]  # fmt: skip


class _LiteralConsole(Console):
    """A console on which text is text and nothing else: names in brackets are no styles, and `:smile:` is no emoji.

    What is to have a style is printed as a `rich.text.Text`, or with `style=`.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Replace control characters in the text; what rich adds for colours and positions stays."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


out = _LiteralConsole()
"""Answers."""
err = _LiteralConsole(stderr=True)
"""Progress, notes and errors: never mixed into an answer that a script reads."""


def text_column(form: str, **options: Any) -> TextColumn:
    """A column of a progress bar, whose text is literal, too: rich reads its columns as markup on every console."""
    return TextColumn(form, markup=False, **options)


class Verb(TyperCommand):
    """A verb whose help has the names in one column and the sentences in the other.

    Typer's own has five columns: in a terminal of 80 they leave 24 for the sentences, and cut words that are longer.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the usage, the docstring, whose examples keep their lines, and arguments and options."""
        out.print(Text(self.get_usage(ctx)))
        for paragraph in inspect.cleandoc(self.help or "").split("\n\n"):
            example = paragraph.startswith("ebbflow ")
            out.print(Text("\n" + (indent(paragraph, "  ") if example else " ".join(paragraph.split()))))
        sections: dict[str, Table] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                plain = "Arguments" if parameter.param_type_name == "argument" else "Options"
                title = getattr(parameter, "rich_help_panel", None) or plain
                section = sections.setdefault(title, Table.grid(padding=(0, 2, 0, 0)))
                name, sentences = f"  {record[0]}", " ".join(record[1].split())
                section.add_row(Text(name, no_wrap=True), Text(sentences, overflow="fold"))
        for title in sorted(sections, key="Options".__eq__):  # those that are not of a panel are last
            out.print(Text(f"\n{title}:", style="bold"))
            out.print(sections[title])


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
