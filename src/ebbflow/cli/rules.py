"""`ebbflow rules`: what there is to choose from."""

from __future__ import annotations

import inspect
from typing import Annotated

import typer
from rich.table import Table

from ebbflow.cli.common import AsJson, out, print_json
from ebbflow.config import load_plugins
from ebbflow.rules.registry import RULES, table

__all__ = ["app"]

app = typer.Typer(help="The learning-rate rules and their modifiers.", invoke_without_command=True)

Plugins = Annotated[
    list[str] | None, typer.Option("--plugin", help="A Python file with rules of your own; repeatable.")
]


@app.callback()
def rules(context: typer.Context, plugin: Plugins = None, json: AsJson = False) -> None:
    """List all rules and modifiers. Join them with +: linear+warmup(5ep)."""
    load_plugins(plugin or [])
    if context.invoked_subcommand is not None:
        return
    entries = table()
    if json:
        print_json(
            [
                {
                    "name": entry.name,
                    "kind": entry.kind,
                    "needs": sorted(entry.needs),
                    "cite": entry.cite,
                    "summary": entry.summary,
                }
                for entry in entries
            ]
        )
        return
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "kind", "what it does", "source"):
        shown.add_column(column, overflow="fold")
    for entry in entries:
        shown.add_row(entry.name, entry.kind, entry.summary, entry.cite)
    out.print(shown)
    out.print("\nA modifier stands behind a rule: [bold]linear+warmup(5ep)[/]. More: [bold]ebbflow rules show NAME[/]")


@app.command()
def show(name: str) -> None:
    """Everything about one rule or modifier."""
    table()
    entry = RULES.entry(name)
    out.print(f"[bold]{entry.name}[/] ({entry.kind})")
    for paragraph in (inspect.getdoc(entry.make) or "").split("\n\n"):
        out.print(f"\n{' '.join(paragraph.split())}", markup=False)
    if entry.parameters:
        out.print("\nArguments:")
        for parameter, default, doc in entry.parameters:
            out.print(f"  {parameter}{f' = {default}' if default else ''}: {doc}")
    out.print(f"\nSource: {entry.cite or 'not published'}")
    out.print(f"Needs:  {', '.join(sorted(entry.needs)) or 'nothing but the batch size'}")
