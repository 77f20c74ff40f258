"""`ebbflow simulate`: the time and cost of a training on a trace, next to an on-demand cluster."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer
from rich.progress import track
from rich.table import Table

from ebbflow.cli.common import AsJson, TraceText, err, out, print_json
from ebbflow.cli.scenario_options import OutFolder, takes_scenario, write_page
from ebbflow.core.units import format_seconds
from ebbflow.plan.policies import Drop
from ebbflow.simulate.scenario import ScenarioSettings
from ebbflow.simulate.simulation import (
    BREAKDOWN,
    Interval,
    Simulation,
    comparison_cluster,
    interval_of,
    reseeded_simulations,
    simulate,
)

__all__ = ["simulate_verb"]


@takes_scenario()
def simulate_verb(
    settings: ScenarioSettings,
    trace: TraceText,
    seeds: Annotated[
        int | None, typer.Option(help="Draw trace and stragglers with this many seeds, and give intervals.", min=2)
    ] = None,
    out_folder: OutFolder = None,
    json: AsJson = False,
) -> None:
    r"""Estimate how long a training takes on a trace and what it costs, next to an on-demand cluster.

    Where the time goes: compute; network (what computing does not hide); waiting (for workers, a booting worker, the
    slowest worker, data); lost (steps that did not count); restart; checkpoint (writing them).

    ebbflow simulate gcp-a100-2022-05 --local-batch 128 --step-time 0.6s \
        --samples 1281167 --epochs 90 --spot-price 0.744 --price 2.48
    """
    settings.check_ref_batch([settings.policy])
    found = simulate(settings.scenario(trace))
    cluster = comparison_cluster(found, settings)
    spread = None
    if seeds is not None:
        draws = reseeded_simulations(settings, trace, seeds)
        drawn = list(track(draws, description="drawing", total=seeds, console=err, transient=True))
        spread = {name: interval_of([getattr(one, name) for one in drawn]) for name in ("time_s", "cost_usd")}
    write_page({"spot": found, "on demand": cluster}, folder=out_folder, name=found.scenario.trace.name or trace)
    if json:
        answer = _answer(found, cluster)
        if spread is not None:
            answer["seeds"] = {"count": seeds, **{name: dataclasses.asdict(part) for name, part in spread.items()}}
        print_json(answer)
        return
    out.print(trace, style="bold", soft_wrap=True)
    out.print(_table(found, cluster, spread))
    if isinstance(found.scenario.policy, Drop):
        out.print("samples and goodput: what steps cover, with the samples that are dropped", style="dim")
    out.print(_time_table(found))


def _answer(found: Simulation, cluster: Simulation) -> dict[str, Any]:
    figures = found.as_json()
    head = {name: figures.pop(name) for name in ("time_s", "cost_usd")}
    demand = {"time_s": cluster.time_s, "cost_usd": cluster.cost_usd, "workers": int(cluster.trace.workers[0])}
    return {**head, "on_demand": demand, **figures}


def _table(found: Simulation, cluster: Simulation, spread: dict[str, Interval] | None) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column("spot", justify="right")
    if spread is not None:
        table.add_column("mean, 5 to 95 % of seeds", justify="right")
    table.add_column(f"{int(cluster.trace.workers[0])} on demand", justify="right")
    times = costs = ""
    if spread is not None:
        time, cost = spread["time_s"], spread["cost_usd"]
        times = f"{format_seconds(time.mean)}, {format_seconds(time.low)} to {format_seconds(time.high)}"
        costs = f"{cost.mean:,.2f}, {cost.low:,.2f} to {cost.high:,.2f} USD"
    rows = [
        ("time", format_seconds(found.time_s), times, format_seconds(cluster.time_s)),
        ("cost", f"{found.cost_usd:,.2f} USD", costs, f"{cluster.cost_usd:,.2f} USD"),
        ("workers, mean", f"{found.mean_workers:.1f}", "", f"{cluster.mean_workers:.1f}"),
        ("worker time computing", f"{found.computing:.0%}", "", f"{cluster.computing:.0%}"),
        ("steps", f"{found.steps:,}", "", f"{cluster.steps:,}"),
        ("samples", f"{found.samples:,}", "", f"{cluster.samples:,}"),
        ("goodput", f"{found.goodput:,.0f} samples/s", "", f"{cluster.goodput:,.0f} samples/s"),
    ]
    for name, spot, middle, demand in rows:
        table.add_row(name, spot, *([middle] if spread is not None else []), demand)
    return table


def _time_table(found: Simulation) -> Table:
    """What the time was spent on, with bars."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("where the time goes")
    table.add_column("", justify="right")
    table.add_column("", justify="right")
    table.add_column("")
    for name in BREAKDOWN:
        seconds = found.breakdown[name]
        if seconds > 0:
            share = seconds / found.time_s
            table.add_row(name, format_seconds(seconds), f"{share:.1%}", "━" * round(share * 36))
    return table
