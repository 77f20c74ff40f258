"""`ebbflow workloads`: list what can be trained."""

from __future__ import annotations

from dataclasses import asdict

from rich.table import Table

from ebbflow.cli.common import AsJson, PluginFiles, out, print_json
from ebbflow.core.plugins import load_plugins

__all__ = ["workloads"]


def workloads(plugin: PluginFiles = None, json: AsJson = False) -> None:
    """List the workloads and their recipes."""
    from ebbflow.workloads import WORKLOADS, recipe

    load_plugins(plugin or [])
    listed = [(entry, recipe(entry.name)) for entry in WORKLOADS]
    if json:
        print_json([{"name": e.name, "summary": e.summary, "recipe": asdict(r)} for e, r in listed])
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "what it is", "batch", "rate", "epochs", "metric"):
        table.add_column(column, justify="right" if column in ("batch", "rate", "epochs") else "left")
    for e, r in listed:
        table.add_row(e.name, e.summary, str(r.ref_batch), f"{r.lr:g}", str(r.epochs), r.metric)
    out.print(table)
    without = [e.name for e, _ in listed if not WORKLOADS.make(e.name).takes_data]
    out.print(
        f"\n{', '.join(without)}: without --data. The others read the data that they name from --data PATH; a run "
        f"without it ends with an error that says in which files they expect them."
    )
