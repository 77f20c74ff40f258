"""The page of simulations: time and cost of each, where the time goes, money over time, and which to choose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ebbflow.core.units import format_seconds
from ebbflow.report.plotting import (
    BAND,
    INK,
    MARKERS,
    MUTED,
    PALETTE,
    Drawing,
    RuleStyle,
    drawing_style,
    legend,
    panels,
    time_unit,
)
from ebbflow.report.report_page import CSS_VARIABLES, render_template, replace_folder, write_figures
from ebbflow.simulate.search import pareto, round_to_cents
from ebbflow.simulate.simulation import BREAKDOWN, Simulation

__all__ = ["simulation_figures", "write_simulations"]

Simulations = Mapping[str, Simulation]
_COLOURS = dict(zip(BREAKDOWN, (PALETTE[0], PALETTE[4], BAND, PALETTE[1], PALETTE[3], PALETTE[6]), strict=True))
_MEANINGS = {
    "compute": "forward and backward passes",
    "network": "exchange that computing does not hide",
    "waiting": "for workers, booting, the slowest worker, data",
    "lost": "steps that did not count",
    "restart": "noticing a change and restarting",
    "checkpoint": "writing checkpoints",
}
_POINTS = 400
"""The most points of a line."""


def write_simulations(found: Simulations, *, out: Path | str, name: str, command: str = "") -> Path:
    """Write one self-contained page with the figures beside it; an earlier report there is replaced as a whole."""
    out = Path(out)
    with replace_folder(out) as partial:
        figures = write_figures(simulation_figures(found), partial)
        page = render_template(
            "simulation.html",
            name=name,
            takeaways=_takeaways(found),
            rows=_rows(found),
            parts=[
                {"name": part, "meaning": _MEANINGS[part], "colour": _variable(part)}
                for part in BREAKDOWN
                if any(one.breakdown[part] > 0 for one in found.values())
            ],
            figures=figures,
            assumptions=_assumptions(found),
            command=command,
        )
        (partial / "index.html").write_text(page, encoding="utf-8")
    return out / "index.html"


def _takeaways(found: Simulations) -> list[str]:
    """What a user should conclude, in sentences."""
    cheapest = min(found, key=lambda name: (found[name].cost_usd, found[name].time_s))
    fastest = min(found, key=lambda name: (found[name].time_s, found[name].cost_usd))
    low, quick = found[cheapest], found[fastest]
    if cheapest == fastest:
        first = f"{cheapest} is both the cheapest and the fastest: {_money(low)} in {format_seconds(low.time_s)}."
    else:
        first = (
            f"{cheapest} is the cheapest: {_money(low)} in {format_seconds(low.time_s)}. {fastest} is the fastest: "
            f"{format_seconds(quick.time_s)} for {_money(quick)}."
        )
    second = f"Of the worker time that {cheapest} pays for, {low.computing:.0%} is computing"
    worst = max((part for part in BREAKDOWN if part != "compute"), key=lambda part: low.breakdown[part])
    if low.breakdown[worst] > 0.005 * low.time_s:
        second += f"; of the time, {low.breakdown[worst] / low.time_s:.0%} is {worst}"
    return [first, second + "."]


def _money(one: Simulation) -> str:
    return f"{one.cost_usd:,.2f} USD"


def _rows(found: Simulations) -> list[dict[str, Any]]:
    front = pareto([(one.time_s, round_to_cents(one.cost_usd)) for one in found.values()])
    return [
        {
            "name": name,
            "best": best,
            "time": format_seconds(one.time_s),
            "cost": f"{one.cost_usd:,.2f}",
            "workers": f"{one.mean_workers:.1f}",
            "computing": f"{one.computing:.0%}",
            "steps": f"{one.steps:,}",
            "goodput": f"{one.goodput:,.0f}",
            "parts": [
                {
                    "name": part,
                    "colour": _variable(part),
                    "percent": f"{100 * one.breakdown[part] / one.time_s:.2f}",
                    "text": f"{part}: {format_seconds(one.breakdown[part])}",
                }
                for part in BREAKDOWN
                if one.breakdown[part] > 0
            ],
        }
        for (name, one), best in zip(found.items(), front, strict=True)
    ]


def _variable(part: str) -> str:
    """The colour of a part as a variable of the page, which has a light and a dark scheme."""
    return f"var({CSS_VARIABLES[_COLOURS[part]]})"


def _assumptions(found: Simulations) -> list[dict[str, str]]:
    """What each simulation assumed."""
    return [
        {
            "name": name,
            "trace": one.scenario.trace.name or repr(one.scenario.trace),
            "policy": str(one.scenario.policy),
            "step": str(one.scenario.model),
            "recovery": str(one.scenario.recovery),
            "training": f"{one.scenario.epochs} epochs of {one.scenario.samples:,} samples"
            + ("" if one.scenario.noise_scale == float("inf") else f", noise scale {one.scenario.noise_scale:,.0f}"),
        }
        for name, one in found.items()
    ]


# -- figures -----------------------------------------------------------------------------------------------------------


def simulation_figures(found: Simulations) -> Iterator[Drawing]:
    """The figures, in the order of the page."""
    with drawing_style():
        yield _time_bars(found)
        yield _money_over_time(found)
        if len(found) > 1:
            yield _trade(found)


def _time_bars(found: Simulations) -> Drawing:
    figure, (axis,) = panels([""], height=0.55 * len(found) + 0.7)
    unit, scale = time_unit(max(one.time_s for one in found.values()))
    names = list(found)
    left = np.zeros(len(found))
    for part in BREAKDOWN:
        widths = np.array([one.breakdown[part] for one in found.values()]) / scale
        if widths.any():
            axis.barh(names, widths, left=left, color=_COLOURS[part], label=part, height=0.62)
            left += widths
    axis.invert_yaxis()
    axis.set_xlabel(unit)
    axis.grid(visible=False, axis="y")
    axis.tick_params(axis="y", labelcolor=INK, length=0)
    legend(figure, [axis])
    caption = "Where the time goes: " + "; ".join(
        f"{part}: {_MEANINGS[part]}" for part in BREAKDOWN if any(one.breakdown[part] > 0 for one in found.values())
    )
    return Drawing(stem="time", kind="time", title="Where the time goes", caption=caption + ".", figure=figure)


def _money_over_time(found: Simulations) -> Drawing:
    figure, (axis,) = panels([""], height=3.0)
    unit, scale = time_unit(max(one.time_s for one in found.values()))
    style = RuleStyle(list(found))
    for name, one in found.items():
        times = _times_of_changes(one)
        spent = one.cost_until(times)
        axis.plot(times / scale, spent, **style.line(name))
        axis.plot(times[-1] / scale, spent[-1], marker="o", markersize=4, color=style.line(name)["color"])
    axis.set_xlabel(unit)
    axis.set_ylabel("USD")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    legend(figure, [axis])
    return Drawing(
        stem="cost", kind="cost", title="Money spent over time",
        caption="All available workers are paid for, whether they take part in a step or not; the dot is the end of "
        "training. The lines do not include what minimum billing adds.",
        figure=figure,
    )  # fmt: skip


def _times_of_changes(one: Simulation) -> npt.NDArray[np.float64]:
    """Times at which the slope of the cost changes, thinned to what a figure can show."""
    changes = one.trace.times[one.trace.times < one.time_s]
    if len(changes) > _POINTS:
        changes = changes[np.linspace(0, len(changes) - 1, _POINTS).astype(np.int64)]
    return np.append(changes, one.time_s)


def _trade(found: Simulations) -> Drawing:
    """Cost against time; the Pareto front is joined by a line."""
    figure, (axis,) = panels([""], height=3.6)
    unit, scale = time_unit(max(one.time_s for one in found.values()))
    points = [(one.time_s / scale, round_to_cents(one.cost_usd)) for one in found.values()]
    front = pareto(points)
    ahead = sorted(point for point, best in zip(points, front, strict=True) if best)
    axis.plot(*zip(*ahead, strict=True), color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
    for i, ((x, y), best) in enumerate(zip(points, front, strict=True)):
        colour, shape = PALETTE[i % len(PALETTE)], MARKERS[i // len(PALETTE) % len(MARKERS)]
        axis.plot(
            x, y, marker=shape, markersize=9 if best else 6, color=colour, markerfacecolor=colour if best else "none",
            linestyle="none", label=list(found)[i], gid=f"rule-{i}",
        )  # fmt: skip
    axis.set_xlabel(unit)
    axis.set_ylabel("USD")
    axis.set_xlim(0, 1.08 * max(x for x, _ in points))
    axis.set_ylim(0, 1.08 * max(max(y for _, y in points), 0.01))
    legend(figure, [axis])
    return Drawing(
        stem="trade", kind="trade", title="Cost against time",
        caption="Down and to the left is better. Filled and joined by the dashed line are those than which no other is "
        "both faster and cheaper (the Pareto front).",
        figure=figure,
    )  # fmt: skip
