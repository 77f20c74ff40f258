"""`ebbflow compare`: several fleets, policies and recoveries in one table and one figure."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track
from rich.table import Table
from rich.text import Text

from ebbflow.cli.common import AsJson, err, out, print_json
from ebbflow.cli.scenario import OutFolder, ScenarioOptions, takes_scenario, write_page
from ebbflow.core.units import format_seconds
from ebbflow.errors import ConfigError, PlanError
from ebbflow.simulate.search import pareto, to_the_cent
from ebbflow.simulate.simulate import Simulation, simulate

__all__ = ["compare"]


@takes_scenario
def compare(
    options: ScenarioOptions,
    traces: Annotated[list[str], typer.Argument(metavar="TRACE...", help="Trace files or generators, one or more.")],
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
    """Compare fleets, policies and recoveries: time and cost of each, those that nothing beats marked.

    All combinations are simulated. A mark means that no other is both faster and cheaper (the Pareto front).
    """
    found = _simulations(options, traces, policy or ["follow"], recovery or ["ideal"], spot_price or [])
    front = pareto([(one.time_s, to_the_cent(one.cost_usd)) for one in found.values()])
    write_page(found, folder=out_folder, name="Comparison")
    if json:
        print_json(
            [
                {"name": name, **one.as_json(), "workers": one.mean_workers, "pareto": best}
                for (name, one), best in zip(found.items(), front, strict=True)
            ]
        )
        return
    out.print(_table(found, front))


def _simulations(
    options: ScenarioOptions, traces: list[str], policies: list[str], recoveries: list[str], prices: list[str]
) -> dict[str, Simulation]:
    """Each combination by the words in which it differs, and on-demand clusters where a price is given."""
    if len(prices) > 1 and len(prices) != len(traces):
        raise ConfigError(f"{len(prices)} spot prices for {len(traces)} traces; give one, or one for each trace")
    each = prices if len(prices) == len(traces) else (prices or [None]) * len(traces)  # type: ignore[list-item]
    fleets = list(zip(traces, each, strict=True))
    combined = list(itertools.product(fleets, policies, recoveries))
    labels = [_label(trace, usd, traces) for trace, usd in fleets]
    lists = [labels, policies, recoveries]
    found: dict[str, Simulation] = {}
    demand: dict[str, Simulation] = {}
    for (trace, usd), policy, recovery in track(
        combined, description="simulating", console=err, transient=True, disable=len(combined) < 20
    ):
        fleet = _label(trace, usd, traces)
        words = [word for word, known in zip((fleet, policy, recovery), lists, strict=True) if len(set(known)) > 1]
        name = " · ".join(words) or fleet
        if name in found:
            raise ConfigError(f"{name} is given twice; each trace, policy and recovery is compared once")
        try:
            one = simulate(options.scenario(trace, policy=policy, recovery=recovery, spot_price=usd))
            _ = one.cost_usd  # worked out here, so that prices that end too early are told with the name
        except PlanError as error:
            raise PlanError(f"{name}: {error}") from None
        found[name] = one
        if options.price is not None and policy not in demand:
            demand[policy] = options.beside(one)
    for policy, one in demand.items():
        name = f"{int(one.trace.workers[0])} on demand"
        found[name if len(policies) == 1 else f"{name} · {policy}"] = one
    return found


def _label(trace: str, price: str | None, traces: list[str]) -> str:
    """The trace, a file without its folder if no other has its name; with the price where it is compared at several."""
    same = {other for other in traces if Path(other).name == Path(trace).name}
    name = Path(trace).name if len(same) == 1 and Path(trace).exists() else trace
    return f"{name} at {price}" if price is not None and traces.count(trace) > 1 else name


def _table(found: dict[str, Simulation], front: list[bool]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column("what", overflow="fold")
    for column in ("time", "USD", "workers", "goodput"):
        table.add_column(column, justify="right", no_wrap=True)
    for (name, one), best in zip(found.items(), front, strict=True):
        table.add_row(
            "*" if best else "", Text(name), format_seconds(one.time_s), f"{one.cost_usd:,.2f}",
            f"{one.mean_workers:.1f}", f"{one.goodput:,.0f}/s", style="bold" if best else "",
        )  # fmt: skip
    table.caption = "* no other is both faster and cheaper"
    table.caption_justify = "left"
    return table
