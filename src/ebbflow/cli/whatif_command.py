"""`ebbflow whatif`: the cheapest setting within a deadline, or the fastest within a budget."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated

import typer
from rich.progress import track
from rich.table import Table
from rich.text import Text

from ebbflow.cli.common import AsJson, TraceText, err, out, print_json
from ebbflow.cli.scenario_options import numbers, takes_scenario
from ebbflow.core.units import format_seconds, parse_seconds
from ebbflow.plan.goodput import FurtherWorker
from ebbflow.simulate.scenario import ScenarioSettings
from ebbflow.simulate.search import Goal, Outcome, SearchResult, find_setting, settings_grid

__all__ = ["whatif"]


@takes_scenario(
    refused=("price", "on_demand_workers", "on_demand_step_time"),
    why="is for the on-demand cluster that simulate and compare add, and whatif tries settings on the trace alone",
)
def whatif(
    settings: ScenarioSettings,
    trace: TraceText,
    deadline: Annotated[str | None, typer.Option(help="Find the cheapest that ends within this time, as 5h.")] = None,
    budget: Annotated[float | None, typer.Option(help="Find the fastest that costs at most this many USD.")] = None,
    max_workers: Annotated[
        str | None, typer.Option(help="Fleet sizes to try: '16,32,64', '8:64' or '8:64:8'. Default: all workers.")
    ] = None,
    local_batch: Annotated[str | None, typer.Option(help="Local batches to try: '32,64,128'.")] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="A policy to try; repeat it for several. Default: follow.")
    ] = None,
    json: AsJson = False,
) -> None:
    r"""Find the best workers to rent, local batch and policy, and show what the answer depends on.

    With a noise scale it also says what a further worker is worth.

    ebbflow whatif gcp-a100-2022-05 --deadline 6h --max-workers 8:56:8 \
        --local-batch 128 --step-time 0.6s --samples 1281167 --epochs 30 \
        --spot-price 0.744
    """
    goal = Goal(deadline=None if deadline is None else parse_seconds(deadline), budget=budget)
    grid = settings_grid(
        [None] if max_workers is None else numbers(max_workers, what="--max-workers"),
        [None] if local_batch is None else numbers(local_batch, what="--local-batch"),
        policy or ["follow"],
    )
    settings.check_ref_batch(setting.policy for setting in grid)
    first = grid[0]
    scenario = dataclasses.replace(settings, local_batch=first.local_batch, policy=first.policy).scenario(trace)
    found = find_setting(
        scenario, grid, goal,
        progress=lambda outcomes: track(
            outcomes, description="settings", total=len(grid), console=err, transient=True, disable=len(grid) < 200
        ),
    )  # fmt: skip
    if json:
        print_json(found.as_json())
        return
    what = "cheapest" if goal.deadline is not None else "fastest"
    out.print(f"the {what} of {found.tried:,} settings:", Text(found.best.name, style="bold"), soft_wrap=True)
    if found.ended < found.tried:
        out.print(f"({found.tried - found.ended:,} settings outlast the trace or its prices)")
    out.print(f"{format_seconds(found.best.time_s)}, {found.best.cost_usd:,.2f} USD\n")
    out.print(_sensitivity_table(found))
    if any(not math.isfinite(one.time_s) for one in found.variations):
        out.print("no end: the trace or its prices end before; --repeat begins the trace again")
    out.print("\nno setting is both faster and cheaper than these")
    out.print(_front_table(found.front, found.best))
    if found.worth:
        out.print("\nwhat a worker is worth; progress is counted in samples at the reference batch")
        out.print(_worth_table(found.worth))
    else:
        out.print("\nwhat a worker is worth depends on the noise scale: give --noise-scale and --ref-batch")


def _worth_table(worth: list[FurtherWorker]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("workers", "batch", "efficiency", "progress/s", "USD/million", "1 more", "of a present one"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in worth:
        now = one.now
        table.add_row(
            f"{now.workers:,}", f"{now.batch:,}", f"{now.efficiency:.0%}", f"{now.goodput:,.4g}",
            f"{now.usd_per_million:,.4g}", f"{one.gain:+.1%}", f"{one.share:.2f}",
        )  # fmt: skip
    return table


def _sensitivity_table(found: SearchResult) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("if")
    for column in ("time", "", "USD", "", "limit"):
        table.add_column(column, justify="right")
    for one in found.variations:
        if not math.isfinite(one.time_s):
            table.add_row(one.name, "no end", "", "", "", "missed")
            continue
        table.add_row(
            one.name,
            format_seconds(one.time_s),
            f"{one.time_s / found.best.time_s - 1:+.0%}",
            f"{one.cost_usd:,.2f}",
            f"{one.cost_usd / found.best.cost_usd - 1:+.0%}" if found.best.cost_usd else "",
            "met" if found.goal.met(one) else "missed",
        )
    return table


def _front_table(front: list[Outcome], best: Outcome, *, most: int = 8) -> Table:
    """The Pareto front, thinned to a few rows."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("setting", overflow="fold")
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("USD", justify="right", no_wrap=True)
    every = max(1, math.ceil(len(front) / most))
    for i, one in enumerate(front):
        if i % every == 0 or one is best or i == len(front) - 1:
            style = "bold" if one is best else ""
            table.add_row(one.name, format_seconds(one.time_s), f"{one.cost_usd:,.2f}", style=style)
    return table
