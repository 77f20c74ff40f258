"""`ebbflow compare`: several fleets, policies and recoveries in one table and one figure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer
from rich.progress import track
from rich.table import Table
from rich.text import Text

from ebbflow.cli.common import AsJson, err, out, print_json
from ebbflow.cli.scenario_options import OutFolder, takes_scenario, write_page
from ebbflow.core.units import format_seconds
from ebbflow.simulate.scenario import ScenarioSettings
from ebbflow.simulate.search import compare_fleets, pareto, round_to_cents
from ebbflow.simulate.simulation import Simulation

__all__ = ["compare"]


@takes_scenario()
def compare(
    settings: ScenarioSettings,
    traces: Annotated[list[str], typer.Argument(metavar="TRACE...", help="One or more trace files or generators.")],
    policy: Annotated[
        list[str] | None, typer.Option(help="A policy; repeat it to compare several. Default: follow.")
    ] = None,
    recovery: Annotated[
        list[str] | None,
        typer.Option(help="What a change costs; repeat it to compare several systems. Default: ideal."),
    ] = None,
    spot_price: Annotated[
        list[str] | None,
        typer.Option(help="USD per hour of one worker, or a price model of a plugin; one, or one for each trace."),
    ] = None,
    out_folder: OutFolder = None,
    json: AsJson = False,
) -> None:
    r"""Compare fleets, policies and recoveries by time and cost.

    All combinations are simulated. A star marks those than which no other is both faster and cheaper (the
    Pareto front).

    ebbflow compare gcp-a100-2022-05 --policy follow --policy "fixed(8192)" \
        --local-batch 128 --step-time 0.6s --samples 1281167 --epochs 90 \
        --spot-price 0.744
    """

    def progress(combinations: Sequence[Any]) -> Iterable[Any]:
        few = len(combinations) < 20
        return track(combinations, description="simulating", console=err, transient=True, disable=few)

    policies = policy or ["follow"]
    settings.check_ref_batch(policies)
    found = compare_fleets(
        settings, traces, policies=policies, recoveries=recovery or ["ideal"], prices=spot_price or [],
        progress=progress,
    )  # fmt: skip
    front = pareto([(one.time_s, round_to_cents(one.cost_usd)) for one in found.values()])
    write_page(found, folder=out_folder, name="Comparison")
    if json:
        print_json(
            [
                {"name": name, **one.as_json(), "workers": one.mean_workers, "computing": one.computing, "pareto": best}
                for (name, one), best in zip(found.items(), front, strict=True)
            ]
        )
        return
    out.print(_table(found, front))


def _table(found: dict[str, Simulation], front: list[bool]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column("what", overflow="fold")
    for column in ("time", "USD", "workers", "computing", "goodput"):
        table.add_column(column, justify="right", no_wrap=True)
    for (name, one), best in zip(found.items(), front, strict=True):
        table.add_row(
            "*" if best else "", Text(name), format_seconds(one.time_s), f"{one.cost_usd:,.2f}",
            f"{one.mean_workers:.1f}", f"{one.computing:.0%}", f"{one.goodput:,.0f}/s", style="bold" if best else "",
        )  # fmt: skip
    table.caption = "* no other is both faster and cheaper; computing: of the worker time that is paid for"
    table.caption_justify = "left"
    return table
