"""`ebbflow workloads`: what there is to train."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from ebbflow.cli.common import AsJson, out, print_json
from ebbflow.core.plugins import load_plugins

__all__ = ["workloads"]


def workloads(
    plugin: Annotated[
        list[str] | None, typer.Option("--plugin", help="A Python file with workloads of your own; repeatable.")
    ] = None,
    json: AsJson = False,
) -> None:
    """List the workloads and the recipe that each is trained with."""
    import dataclasses

    from ebbflow.workloads import WORKLOADS, recipe

    load_plugins(plugin or [])
    if json:
        print_json(
            [{"name": e.name, "summary": e.summary, "recipe": dataclasses.asdict(recipe(e.name))} for e in WORKLOADS]
        )
        return
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "what it is", "batch", "rate", "epochs", "metric"):
        shown.add_column(column, justify="right" if column in ("batch", "rate", "epochs") else "left")
    for entry in WORKLOADS:
        chosen = recipe(entry.name)
        shown.add_row(
            entry.name, entry.summary, str(chosen.ref_batch), f"{chosen.lr:g}", str(chosen.epochs), chosen.metric
        )
    out.print(shown)
