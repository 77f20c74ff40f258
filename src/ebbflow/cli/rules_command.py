"""`ebbflow rules`: list the rules and modifiers, describe one, write the pages of the documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from ebbflow.cli.common import AsJson, PluginFiles, Verb, out, print_json
from ebbflow.core.files import write_whole
from ebbflow.core.plugins import load_plugins
from ebbflow.core.spec import Entry
from ebbflow.errors import ConfigError, OutputError
from ebbflow.report import rule_pages
from ebbflow.rules import RULES, Modifier, Rule, rule_entries

__all__ = ["app"]

app = typer.Typer(help="The learning-rate rules and their modifiers.", invoke_without_command=True)


@app.callback()
def rules(context: typer.Context, plugin: PluginFiles = None, json: AsJson = False) -> None:
    """List all rules and modifiers. Join them with +: linear+warmup(5ep)."""
    load_plugins(plugin or [])
    if context.invoked_subcommand is not None:
        if json:
            raise ConfigError(f"--json is for the list of rules; leave it out before {context.invoked_subcommand}")
        return
    entries = rule_entries()
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
    for kind, title in (("rule", "Rules"), ("modifier", "Modifiers")):
        out.print(_listing([entry for entry in entries if entry.kind == kind], title))
        out.print()
    out.print("B is the batch, B0 the reference batch, S = B/B0; m multiplies the base rate.")
    out.print(Text.assemble("Write a modifier after a rule: ", ("linear+warmup(5ep)", "bold"), "."))
    out.print("More about one of them:", Text("ebbflow rules show NAME", style="bold"))


def _listing(entries: list[Entry[Rule | Modifier]], title: str) -> Table:
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column(title, no_wrap=True, min_width=11)
    shown.add_column("what it does", overflow="fold", ratio=3)
    shown.add_column("source", overflow="fold", ratio=1, style="dim")
    for entry in entries:
        # Authors and year only; `show` prints the whole citation.
        shown.add_row(entry.name, rule_pages.describe(entry).formula, entry.cite.partition(", ")[0])
    return shown


@app.command(cls=Verb)
def show(
    name: Annotated[str, typer.Argument(help="Name of a rule or modifier; ebbflow rules lists them.")],
    to: Annotated[Path | None, typer.Option("--out", help="Also draw into this .svg, .png or .pdf file.")] = None,
    plugin: PluginFiles = None,
) -> None:
    """Describe one rule or modifier: formula, source, needs, arguments, and a plot."""
    load_plugins(plugin or [])
    rule_entries()  # registers the rules
    entry = RULES.entry(name)
    about, lines = rule_pages.describe(entry), rule_pages.curves(entry)
    out.print(Text(entry.name, style="bold"), f"({entry.kind})\n")
    for paragraph in (about.formula, *about.explanation):
        out.print(f"{paragraph}\n")
    if about.suits:
        out.print(Text("Suits:  ", style="bold"), about.suits)
    out.print(Text("Needs:  ", style="bold"), "; ".join(about.needs) or "nothing but the batch size")
    out.print(Text("Source: ", style="bold"), entry.cite or "not published")
    out.print(Text("Example:", style="bold"), about.example)
    for parameter, default, doc in entry.parameters:
        out.print(Text(parameter, style="bold"), f"({f'default {default}' if default else 'required'}): {doc}")
    out.print()
    out.print(rule_pages.chart(lines, width=min(out.width, 80)), no_wrap=True)
    if to is not None:
        rule_pages.figure(lines, to)
        out.print(f"wrote {to}", soft_wrap=True)


@app.command(cls=Verb)
def cards(
    folder: Annotated[Path, typer.Argument(help="Folder of the pages, for example docs/rules.")],
    plugin: PluginFiles = None,
) -> None:
    """Write one page of documentation for each rule and modifier, and an index."""
    load_plugins(plugin or [])
    pages = rule_pages.cards(rule_entries())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise OutputError(f"{folder}: cannot be created: {problem.strerror}") from None
    for name, text in pages.items():
        write_whole(folder / name, text.encode())
    out.print(f"{len(pages)} pages in {folder}", soft_wrap=True)
