"""`ebbflow simulate`: how long and how much on a trace, beside the on-demand cluster."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer
from rich.progress import track
from rich.table import Table

from ebbflow.cli.common import AsJson, err, out, print_json
from ebbflow.cli.scenario import OutFolder, ScenarioOptions, takes_scenario, write_page
from ebbflow.cli.trace import TraceText
from ebbflow.core.units import format_seconds
from ebbflow.errors import ConfigError
from ebbflow.simulate.montecarlo import Interval, draws, interval, reseeded
from ebbflow.simulate.simulate import BREAKDOWN, Simulation, simulate

__all__ = ["simulate_verb"]


@takes_scenario
def simulate_verb(
    options: ScenarioOptions,
    trace: TraceText,
    seeds: Annotated[
        int | None, typer.Option(help="Draw trace and stragglers so many times, and give intervals.", min=2)
    ] = None,
    out_folder: OutFolder = None,
    json: AsJson = False,
) -> None:
    """Say how long a training takes on a trace and what it costs, without training, beside an on-demand cluster.

    Where the time goes: compute; network (what computing does not hide);
    waiting (nobody is there, a worker boots, the slowest worker, data); lost
    (steps that did not count); restart; checkpoint (writing them).
    """
    found = simulate(options.scenario(trace))
    beside = options.beside(found)
    spread = None if seeds is None else _spread(options, trace, seeds)
    answer = _answer(found, beside)
    if spread is not None:
        answer["seeds"] = {"count": seeds, **{name: dataclasses.asdict(part) for name, part in spread.items()}}
    write_page({"spot": found, "on demand": beside}, folder=out_folder, name=found.scenario.trace.name or trace)
    if json:
        print_json(answer)
        return
    out.print(trace, style="bold", markup=False, soft_wrap=True)
    out.print(_table(found, beside, spread))
    out.print(_where(found))


def _answer(found: Simulation, beside: Simulation) -> dict[str, Any]:
    """The fixed shape."""
    figures = found.as_json()
    cluster = {"time_s": beside.time_s, "cost_usd": beside.cost_usd, "workers": int(beside.trace.workers[0])}
    head = {name: figures.pop(name) for name in ("time_s", "cost_usd")}
    return {**head, "on_demand": cluster, **figures}


def _spread(options: ScenarioOptions, trace: str, seeds: int) -> dict[str, Interval]:
    """Intervals of time and cost over seeds."""
    if options.stragglers is None and reseeded(trace, 0) == reseeded(trace, 1):
        raise ConfigError("--seeds draws nothing here: the trace has no seed and there are no stragglers; give a "
                          "generator such as 'poisson(8)', or --stragglers 'lognormal(0.1)'")  # fmt: skip
    drawn = draws(lambda seed: options.scenario(reseeded(trace, seed)), seeds)
    results = list(track(drawn, description="drawing", total=seeds, console=err, transient=True))
    return {
        "time_s": interval([one.time_s for one in results]),
        "cost_usd": interval([one.cost_usd for one in results]),
    }


def _table(found: Simulation, beside: Simulation, spread: dict[str, Interval] | None) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column("spot", justify="right")
    if spread is not None:
        table.add_column("mean, 5 to 95 % of seeds", justify="right")
    table.add_column(f"{int(beside.trace.workers[0])} on demand", justify="right")
    rows: list[tuple[str, str, str, str]] = []
    times, costs = (spread["time_s"], spread["cost_usd"]) if spread is not None else (None, None)
    drawn = "" if times is None else "{}, {} to {}".format(*map(format_seconds, (times.mean, times.low, times.high)))
    rows.append(("time", format_seconds(found.time_s), drawn, format_seconds(beside.time_s)))
    drawn = "" if costs is None else f"{costs.mean:,.2f}, {costs.low:,.2f} to {costs.high:,.2f} USD"
    rows.append(("cost", f"{found.cost_usd:,.2f} USD", drawn, f"{beside.cost_usd:,.2f} USD"))
    rows.append(("workers, mean", f"{found.mean_workers:.1f}", "", f"{beside.mean_workers:.1f}"))
    rows.append(("steps", f"{found.steps:,}", "", f"{beside.steps:,}"))
    rows.append(("samples", f"{found.samples:,}", "", f"{beside.samples:,}"))
    rows.append(("goodput", f"{found.goodput:,.0f} samples/s", "", f"{beside.goodput:,.0f} samples/s"))
    for name, spot, middle, demand in rows:
        table.add_row(name, spot, *([middle] if spread is not None else []), demand)
    return table


def _where(found: Simulation) -> Table:
    """Where the time went, with bars."""
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
