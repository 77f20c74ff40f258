"""`ebbflow trace`: draw availability traces, convert them, generate them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from ebbflow.cli.common import AsJson, FormatName, PluginFiles, TraceText, Verb, out, print_json
from ebbflow.core.plugins import load_plugins
from ebbflow.core.units import Seconds, format_seconds, parse_seconds
from ebbflow.errors import TraceError
from ebbflow.report.trace_drawing import chart, figure
from ebbflow.traces import GENERATORS, Trace, load, write

__all__ = ["app"]

app = typer.Typer(help="Draw availability traces, convert them, generate them.", no_args_is_help=True)


@app.command(cls=Verb)
def show(
    trace: TraceText,
    to: Annotated[Path | None, typer.Option("--out", help="Also draw into this .svg, .png or .pdf file.")] = None,
    width: Annotated[
        int | None, typer.Option(help="Columns of the drawing. Default: the terminal's, at most 80.", min=20)
    ] = None,
    format: FormatName = None,
    plugin: PluginFiles = None,
) -> None:
    """Draw a trace in the terminal, and into a file.

    ebbflow trace show gcp-a100-2022-05 --out trace.svg
    """
    load_plugins(plugin or [])
    loaded = load(trace, format=format)
    if to is not None:
        figure(loaded, to)
    out.print(loaded.name, style="bold", soft_wrap=True)
    out.print(chart(loaded, width=width or min(out.width, 80)), soft_wrap=True)
    out.print(_summary(loaded))
    if to is not None:
        out.print(f"wrote {to}", soft_wrap=True)


@app.command(cls=Verb)
def stats(trace: TraceText, format: FormatName = None, plugin: PluginFiles = None, json: AsJson = False) -> None:
    """Duration, smallest, mean and largest count, changes, accelerator-hours, part of the time without workers."""
    load_plugins(plugin or [])
    loaded = load(trace, format=format)
    found = loaded.stats()
    if json:
        print_json(dataclasses.asdict(found))
        return
    out.print(loaded.name, style="bold", soft_wrap=True)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_row("duration", format_seconds(found.duration_s))
    table.add_row("fewest workers", str(found.min))
    table.add_row("mean workers", f"{found.mean:.1f}")
    table.add_row("most workers", str(found.max))
    table.add_row("changes", str(found.changes))
    table.add_row("mean between changes", format_seconds(found.duration_s / found.changes) if found.changes else "-")
    table.add_row("accelerator-hours", f"{found.accelerator_hours:,.1f} h")
    table.add_row("time without workers", f"{found.zero_fraction:.1%}")
    out.print(table)


@app.command(cls=Verb)
def convert(
    trace: TraceText,
    to: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write; compressed if it ends in .gz.")],
    format: FormatName = None,
    start: Annotated[str, typer.Option(help="Leave out what lies before this time, such as 30min.")] = "0s",
    stop: Annotated[str | None, typer.Option(help="Leave out what lies after this time.")] = None,
    max_workers: Annotated[int | None, typer.Option(help="Scale the counts so that the largest is this one.")] = None,
    plugin: PluginFiles = None,
) -> None:
    """Write a trace in the canonical format (time_s,accelerators); optionally a part of it, or scaled.

    ebbflow trace convert gcp-a100-2022-05 small.csv --stop 2h --max-workers 8
    """
    load_plugins(plugin or [])
    part = load(trace, format=format).slice(parse_seconds(start), None if stop is None else parse_seconds(stop))
    _write(part if max_workers is None else part.scale(max_workers=max_workers), to)


def _list_generators(wanted: bool) -> None:
    if not wanted:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("generator")
    table.add_column("what it makes")
    for entry in GENERATORS:
        form = ", ".join(f"{name}={default}" if default else name for name, default, _ in entry.parameters)
        table.add_row(entry.name, Text.assemble(entry.summary, "\n", (f"({form})", "dim")))
    out.print(table)
    raise typer.Exit


@app.command(cls=Verb)
def make(
    text: Annotated[str, typer.Argument(metavar="GENERATOR", help="Such as 'poisson(workers=8, seed=1)'.")],
    to: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write; compressed if it ends in .gz.")],
    listed: Annotated[
        bool, typer.Option("--list", callback=_list_generators, is_eager=True, help="List the generators and exit.")
    ] = False,
    plugin: PluginFiles = None,
) -> None:
    """Write a generated trace in the canonical format.

    ebbflow trace make "gcp-a100-like(seed=3)" spot.csv
    """
    load_plugins(plugin or [])
    if Path(text).exists():
        raise TraceError(f"{text} is a file, not a generator; use: ebbflow trace convert {text} {to}")
    _write(load(text), to)


def _write(trace: Trace, to: Path) -> None:
    write(trace, to)
    out.print(f"wrote {to}: {_summary(trace)}", soft_wrap=True)


def _summary(trace: Trace) -> str:
    stats = trace.stats()
    duration = format_seconds(Seconds(stats.duration_s))
    return f"{stats.min} to {stats.max} workers, mean {stats.mean:.1f}, {stats.changes} changes in {duration}"
