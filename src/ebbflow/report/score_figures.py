"""Figures of whole runs, with a point for each run or for each cell of the table: its score, its batch, its time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from ebbflow.report.intervals import CONFIDENCE
from ebbflow.report.plotting import (
    DOTTED,
    Drawing,
    RuleStyle,
    WorkloadArms,
    legend,
    outer_labels,
    panels,
    ticks_at_powers_of_two,
    time_unit,
)
from ebbflow.report.results import ArmResult
from ebbflow.report.summary import Cell, Summary, outcome

__all__ = ["scores", "scores_by_batch", "time_by_updates"]

_FEWEST = 3
"""Points from which on a figure shows more than the table does."""


def scores(of: WorkloadArms, *, summary: Summary) -> Drawing | None:
    """The scores that the table has, with their intervals; nothing to show if every rule has one run."""
    cells = [cell for cell in summary.cells_of(of.workload) if cell.trace in of.traces]
    if not any(cell.margin is not None for cell in cells):
        return None
    numbers, rules = summary.number_format(of.workload), summary.rules_of(of.workload)
    figure, axes = panels(of.traces, height=0.3 * len(rules) + 0.9)
    for axis, trace in zip(axes, of.traces, strict=True):
        row = [cell for cell in cells if cell.trace == trace and cell.values]
        for cell in row:
            y, values = rules.index(cell.rule), np.array(cell.values) * numbers.factor
            look = {key: value for key, value in of.style.line(cell.rule).items() if key in ("color", "gid")}
            axis.plot(values, np.full(len(values), y), "|", markersize=9, alpha=0.7, **look)
            axis.plot(values.mean(), y, marker=of.style.marker(cell.rule), markersize=6, **look)
            if cell.margin is not None:  # the seeds decide what the axis shows: two give a very wide interval
                reach = cell.margin * numbers.factor
                axis.hlines(y, values.mean() - reach, values.mean() + reach, linewidth=1.4, **look)
        if row:
            seen = np.concatenate([np.array(cell.values) * numbers.factor for cell in row])
            pad = max(0.3 * float(np.ptp(seen)), 1e-3 * abs(float(seen.mean())), 1e-9)
            low, high = float(seen.min()) - pad, float(seen.max()) + pad
            axis.set_xlim(max(low, 0.0), min(high, 100.5)) if numbers.unit else axis.set_xlim(low, high)
        axis.set_yticks(range(len(rules)), rules)
        axis.set_ylim(len(rules) - 0.4, -0.6)
        axis.grid(visible=False, axis="y")
    outer_labels(axes, numbers.heading(cells[0].metric), "")
    caption = (
        f"The score of each seed (stroke), their mean (point) and its {CONFIDENCE} interval (line), which may be wider "
        f"than the panel; one run: no interval."
    )
    return of.drawing("scores", "Scores and intervals", caption, figure)


def usual_batch(arm: ArmResult) -> float | None:
    """The batch that at least half of the samples of a run were in; None if there is no such batch."""
    (batches,) = arm.whole_steps("batch")
    found, steps = np.unique(batches, return_counts=True)
    samples = found * steps
    return float(found[samples.argmax()]) if 2 * samples.max(initial=0.0) >= samples.sum() > 0 else None


def scores_by_batch(of: WorkloadArms, *, summary: Summary) -> Drawing | None:
    """The score of each cell over its batch, if the study compares batches."""
    numbers = summary.number_format(of.workload)
    points: dict[str, list[tuple[float, list[float]]]] = {rule: [] for rule in of.style.rules}
    for cell in summary.cells_of(of.workload):
        batches = {usual_batch(arm) for arm in _finished(of, cell)}
        if cell.values and len(batches) == 1 and (batch := batches.pop()) is not None:
            points[cell.rule].append((batch, [value * numbers.factor for value in cell.values]))
    if max(len({batch for batch, _ in of_rule}) for of_rule in points.values()) < _FEWEST:
        return None
    figure, (axis,) = panels([""], height=2.9)
    for rule, of_rule in points.items():
        of_rule.sort()
        x = [batch for batch, _ in of_rule]
        look = of.style.line(rule) | {"marker": of.style.marker(rule), "markersize": 5.5}
        if len({*x}) < len(x):  # fleets that change beside others that do not: a line would go up and down
            look["linestyle"] = ""
        if x:
            axis.plot(x, [statistics.fmean(values) for _, values in of_rule], **look)
        for batch, values in of_rule:
            if len(values) > 1:
                line = {"color": look["color"], "gid": look["gid"], "linewidth": 1.2, "alpha": 0.6}
                axis.vlines(batch, min(values), max(values), **line)
    axis.set_xscale("log", base=2)
    ticks_at_powers_of_two(axis.xaxis)
    base = summary.baseline(of.workload)
    level = base.mean if base is not None else None
    if level is not None:
        axis.axhline(level * numbers.factor, **DOTTED)
    metric = summary.cells_of(of.workload)[0].metric
    outer_labels([axis], "samples per step", numbers.heading(metric))
    legend(figure, [axis])
    seeds = any(len(values) > 1 for of_rule in points.values() for _, values in of_rule)
    caption = (
        f"The {metric} of each rule by the batch that at least half of the samples of a run were in, as in Figure 5 of "
        f"Lin et al. (2019); runs without such a batch are left out."
        + (" Strokes: from the lowest to the highest seed." if seeds else "")
        + (" Dotted: the runs at the reference batch." if level is not None else "")
    )
    return of.drawing("scores-by-batch", f"{metric.capitalize()} by batch", caption, figure)


def time_by_updates(of: WorkloadArms, *, summary: Summary) -> Drawing | None:
    """The simulated time of whole runs over their updates, one point per cell and network."""
    clocks = list(dict.fromkeys(name for arm in of.arms for name in arm.simulated))
    cells = [(cell, arms) for cell in summary.cells_of(of.workload) if (arms := _finished(of, cell))]
    if not clocks or len(cells) < _FEWEST:
        return None

    def point(arms: Sequence[ArmResult], clock: str) -> tuple[float, float]:
        """Mean updates and seconds of the runs of a cell."""
        return (
            statistics.fmean(float(arm.updates[-1]) for arm in arms),
            statistics.fmean(float(arm.simulated[clock][-1]) for arm in arms),
        )

    points = {clock: sorted(point(arms, clock) for _, arms in cells) for clock in clocks}
    unit, length = time_unit(max(seconds for found in points.values() for _, seconds in found))
    style = RuleStyle(clocks, "network")
    figure, (axis,) = panels([""], height=2.9)
    for clock, found in points.items():
        x, y = ([numbers[i] for numbers in found] for i in (0, 1))
        look = style.line(clock) | {"linestyle": "", "marker": style.marker(clock), "markersize": 6}
        axis.plot(x, [seconds / length for seconds in y], **look)
    base = summary.baseline(of.workload)
    runs = _finished(of, base) if base is not None else []
    if runs:
        updates, seconds = point(runs, clocks[0])
        most = max(x for found in points.values() for x, _ in found)
        axis.plot([0, most], [0, seconds / updates * most / length], **DOTTED)
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    outer_labels([axis], "updates", f"simulated {unit}")
    legend(figure, [axis])
    caption = (
        "Simulated time of whole runs over their updates, one point for each rule on each trace (mean over seeds), as "
        "in Figure 5 of Holt and Sievert (2021)."
        + (" Dotted: if every update took as long as one at the reference batch." if runs else "")
    )
    return of.drawing("time-by-updates", "Simulated time by updates", caption, figure)


def _finished(of: WorkloadArms, cell: Cell) -> list[ArmResult]:
    """The runs of a cell that have a score."""
    return [
        arm for arm in of.arms
        if (arm.trace, arm.rule) == (cell.trace, cell.rule) and outcome(arm) == "finished"
    ]  # fmt: skip
