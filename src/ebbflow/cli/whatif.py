"""`ebbflow whatif`: the cheapest setting before a deadline, the fastest within a budget."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Annotated, Any

import typer
from rich.progress import track
from rich.table import Table

from ebbflow.cli.common import AsJson, err, out, print_json
from ebbflow.cli.scenario import ScenarioOptions, takes_scenario
from ebbflow.cli.trace import TraceText
from ebbflow.core.units import format_seconds, parse_seconds
from ebbflow.errors import ConfigError, PlanError
from ebbflow.simulate.search import Goal, Outcome, Setting, best, outcomes, pareto, sensitivity, to_the_cent

__all__ = ["numbers", "whatif"]

_MOST_SETTINGS = 1_000_000


@takes_scenario
def whatif(
    options: ScenarioOptions,
    trace: TraceText,
    deadline: Annotated[str | None, typer.Option(help="The cheapest that ends within this time, such as 5h.")] = None,
    budget: Annotated[float | None, typer.Option(help="The fastest that costs at most so many USD.")] = None,
    max_workers: Annotated[
        str | None, typer.Option(help="Fleet sizes to try: '16,32,64', '8:64' or '8:64:8'; default: all there are.")
    ] = None,
    local_batch: Annotated[str | None, typer.Option(help="Local batches to try: '32,64,128'.")] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="A policy to try; repeat it for several. Default: follow.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Find the setting: how many workers to rent, the local batch, the policy. And say what the answer hangs on."""
    goal = Goal(deadline=None if deadline is None else parse_seconds(deadline), budget=budget)
    settings = _settings(max_workers, local_batch, policy or ["follow"])
    first = settings[0]
    scenario = options.scenario(trace, local_batch=first.local_batch, policy=first.policy)
    tried = track(
        outcomes(scenario, settings), description="settings", total=len(settings), console=err, transient=True,
        disable=len(settings) < 200,
    )  # fmt: skip
    results = list(tried)
    found = [one for one in results if isinstance(one, Outcome)]
    if not found and not isinstance(results[0], Outcome):
        many = f"none of {len(results):,} settings comes to an end; the first: " if len(results) > 1 else ""
        raise PlanError(f"{many}{results[0]}")
    chosen = best(found, goal)
    assert chosen.setting is not None
    varied = sensitivity(chosen.setting.apply(scenario))
    ahead = pareto([(one.time_s, to_the_cent(one.cost_usd)) for one in found])
    front = sorted(
        (one for one, best_trade in zip(found, ahead, strict=True) if best_trade), key=lambda one: one.time_s
    )
    if json:
        print_json(_answer(chosen, front, varied, goal, tried=len(settings), ended=len(found)))
        return
    what = "cheapest" if goal.deadline is not None else "fastest"
    out.print(f"the {what} of {len(settings):,} settings: [bold]{chosen.name}[/]", soft_wrap=True)
    if len(found) < len(settings):
        out.print(f"({len(settings) - len(found):,} settings outlast the trace or its prices)")
    out.print(f"{format_seconds(chosen.time_s)}, {chosen.cost_usd:,.2f} USD\n")
    out.print(_sensitivity_table(chosen, varied, goal))
    out.print("\nno setting is both faster and cheaper than these")
    out.print(_front_table(front, chosen))


def numbers(text: str, *, what: str) -> list[int]:
    """Whole numbers from a list and ranges, both ends included.

    >>> numbers("8,16:20:2", what="max_workers")
    [8, 16, 18, 20]
    """
    found: list[int] = []
    for part in text.split(","):
        try:
            edges = [int(edge) for edge in part.split(":")]
        except ValueError:
            edges = []
        if not 1 <= len(edges) <= 3 or min(edges) < 1 or (len(edges) > 1 and edges[1] < edges[0]):
            raise ConfigError(
                f"{what} {part.strip()!r} is not a number or a range; write '16,32,64', '8:64' or '8:64:8'"
            )
        begin, end, step = edges[0], edges[1] if len(edges) > 1 else edges[0], edges[2] if len(edges) > 2 else 1
        if (end - begin) // step > _MOST_SETTINGS:
            raise ConfigError(f"{what} {part.strip()!r} has more than {_MOST_SETTINGS:,} values; give a larger step")
        found += range(begin, end + 1, step)
    return list(dict.fromkeys(found))


def _settings(max_workers: str | None, local_batch: str | None, policies: list[str]) -> list[Setting]:
    fleets: list[int | None] = [None] if max_workers is None else [*numbers(max_workers, what="--max-workers")]
    locals_: list[int | None] = [None] if local_batch is None else [*numbers(local_batch, what="--local-batch")]
    count = len(fleets) * len(locals_) * len(policies)
    if count > _MOST_SETTINGS:
        raise ConfigError(f"{count:,} settings are too many; expected at most {_MOST_SETTINGS:,}")
    return [
        Setting(max_workers=fleet, local_batch=local, policy=policy)
        for policy, local, fleet in itertools.product(policies, locals_, fleets)
    ]


def _plain(one: Outcome) -> dict[str, Any]:
    setting = {} if one.setting is None else {"setting": dataclasses.asdict(one.setting)}
    finite = math.isfinite(one.time_s)
    return {
        "name": one.name,
        **setting,
        "time_s": one.time_s if finite else None,
        "cost_usd": one.cost_usd if finite else None,
    }


def _answer(
    chosen: Outcome, front: list[Outcome], varied: list[Outcome], goal: Goal, *, tried: int, ended: int
) -> dict[str, Any]:
    return {
        **_plain(chosen),
        "goal": {"deadline_s": goal.deadline, "budget_usd": goal.budget},
        "settings": {"tried": tried, "ended": ended},
        "sensitivity": [{**_plain(one), "met": goal.met(one)} for one in varied],
        "pareto": [_plain(one) for one in front],
    }


def _sensitivity_table(chosen: Outcome, varied: list[Outcome], goal: Goal) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("if")
    for column in ("time", "", "USD", "", "limit"):
        table.add_column(column, justify="right")
    for one in varied:
        if not math.isfinite(one.time_s):
            table.add_row(one.name, "no end", "", "", "", "missed")
            continue
        table.add_row(
            one.name,
            format_seconds(one.time_s),
            f"{one.time_s / chosen.time_s - 1:+.0%}",
            f"{one.cost_usd:,.2f}",
            f"{one.cost_usd / chosen.cost_usd - 1:+.0%}" if chosen.cost_usd else "",
            "met" if goal.met(one) else "missed",
        )
    return table


def _front_table(front: list[Outcome], chosen: Outcome, *, most: int = 8) -> Table:
    """The best trades of time for money, thinned to a few rows."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("setting", overflow="fold")
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("USD", justify="right", no_wrap=True)
    every = max(1, math.ceil(len(front) / most))
    for i, one in enumerate(front):
        if i % every == 0 or one is chosen or i == len(front) - 1:
            style = "bold" if one is chosen else ""
            table.add_row(one.name, format_seconds(one.time_s), f"{one.cost_usd:,.2f}", style=style)
    return table
