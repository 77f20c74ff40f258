"""Figures of what rules say at each step: gain, noise scale, ramp, warm-up. A new one is one line of `STATISTICS`.

A column of the records that is not listed here gets a plain figure all the same, so nothing that was recorded is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ebbflow.report.results import ArmResult
from ebbflow.report.series import envelope
from ebbflow.report.style import (
    MUTED,
    Drawing,
    RuleStyle,
    drawing_style,
    legend,
    log_if_wide,
    outer_labels,
    panels,
    slug,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["STATISTICS", "Statistic", "on_trace", "over_epochs", "statistic_figures"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """How one column of the steps is drawn over the epochs."""

    column: str
    title: str
    caption: str
    label: str = ""
    """Of the vertical axis; by default the title."""
    wide: float = 50.0
    """The axis is logarithmic where the values span more than this factor."""
    with_batch: bool = False
    """Draw the batch behind it, which is in the same unit."""
    beside: frozenset[str] = frozenset()
    """For a column that every record has: draw it only where one of these was recorded too."""

    def drawn_for(self, recorded: frozenset[str]) -> bool:
        """Whether records with these statistics have anything to show here."""
        return bool(recorded & (self.beside or {self.column}))


STATISTICS = (
    Statistic(
        column="multiplier", title="Multiplier", label="multiplier of the rate",
        beside=frozenset({"gain", "ramp", "warming"}),
        caption="What each rule multiplied the step with, warm-up and ramp included; the mean over layers that differ.",
    ),
    Statistic(
        column="gain", title="Gain", label="gain (reference steps)",
        caption="How many steps at the reference batch a step was worth, by noise and signal of its gradient.",
    ),
    Statistic(
        column="gain_min", title="Lowest gain of a layer", label="gain (reference steps)",
        caption="The gain of the layer whose gradient is the least noisy, of layer-wise rules.",
    ),
    Statistic(
        column="gain_max", title="Highest gain of a layer", label="gain (reference steps)",
        caption="The gain of the layer whose gradient is the noisiest, of layer-wise rules.",
    ),
    Statistic(
        column="noise_scale", title="Noise scale", label="samples", wide=5.0, with_batch=True,
        caption="The noise scale, noise over signal, in samples (McCandlish et al. 2018). A batch below it is mostly "
        "noise and gains from more workers; far above it, more samples hardly help. Grey: the batch.",
    ),
    Statistic(
        column="noise", title="Noise", label="trace of the covariance", wide=5.0,
        caption="Noise: the variance of one sample's gradient, summed over all parameters.",
    ),
    Statistic(
        column="signal", title="Signal", label="squared norm", wide=5.0,
        caption="Signal: the squared norm of the true gradient, estimated.",
    ),
    Statistic(
        column="ramp", title="Ramp", label="multiplier / its target",
        caption="The multiplier in force over the one that the rule wants: below 1 while it climbs after an increase "
        "of the batch.",
    ),
    Statistic(
        column="warming", title="Layers in warm-up", label="layers",
        caption="Layers that are still in their warm-up; a step down by n is n layers that ended it there, as in "
        "Figure 7 of Ko et al. (2022). A rule for the whole model has one warm-up.",
    ),
    Statistic(
        column="progress", title="Progress", label="reference steps",
        caption="Reference steps that the run was worth so far, by which its schedule goes.",
    ),
)  # fmt: skip


def statistic_figures(
    arms: Sequence[ArmResult], traces: Sequence[str], style: RuleStyle, workload: str, name: str
) -> Iterator[Drawing]:
    """One figure a statistic that any of the records has: those of `STATISTICS` in their order, then all others."""
    recorded = frozenset(column for arm in arms for column in arm.stats)
    known = {statistic.column for statistic in STATISTICS}
    for statistic in (*STATISTICS, *map(_plain, sorted(recorded - known))):
        if statistic.drawn_for(recorded):
            with drawing_style():
                drawing = _draw(statistic, arms, traces, style, workload, name)
            yield drawing


def _plain(column: str) -> Statistic:
    title = column.replace("_", " ")
    title = title[:1].upper() + title[1:]
    return Statistic(column=column, title=title, caption=f"{title}, as recorded at each step.")


def _draw(
    statistic: Statistic, arms: Sequence[ArmResult], traces: Sequence[str], style: RuleStyle, workload: str, name: str
) -> Drawing:
    figure, axes = panels(traces, height=2.4)
    drawn: list[Array] = []
    for axis, trace in zip(axes, traces, strict=True):
        mine = on_trace(arms, trace)
        drawn += over_epochs(axis, mine, style, statistic.column)
        if statistic.with_batch:
            drawn += _batch_behind(axis, mine, statistic.column)
    log_if_wide(axes, drawn, wide=statistic.wide)
    outer_labels(axes, "epoch", statistic.label or statistic.title.lower())
    legend(figure, axes)
    return Drawing(
        stem=f"stat-{slug(statistic.column)}-{name}",
        kind=statistic.column,
        title=statistic.title,
        caption=f"{statistic.caption} One seed.",
        figure=figure,
        workload=workload,
    )


def on_trace(arms: Sequence[ArmResult], trace: str) -> list[ArmResult]:
    """The arms of one trace."""
    return [arm for arm in arms if arm.trace == trace]


def over_epochs(axis: Axes, arms: Sequence[ArmResult], style: RuleStyle, column: str) -> list[Array]:
    """One line a rule, of its first seed: what a rule does hardly depends on the seed. All values drawn."""
    drawn = []
    for rule in style.rules:
        mine = [arm for arm in arms if arm.rule == rule and column in arm.columns]
        if not mine:
            continue
        longest = max(mine, key=lambda arm: arm.steps)
        x, y = envelope(*longest.whole_steps("position", column))
        axis.plot(x, y, drawstyle="steps-pre", **{**style.line(rule), "linewidth": 1.2})  # x: where the step ends
        drawn.append(y)
    return drawn


def _batch_behind(axis: Axes, arms: Sequence[ArmResult], column: str) -> list[Array]:
    """The batch of the longest arm that has the column, as a thin grey line."""
    mine = [arm for arm in arms if column in arm.columns]
    if not mine:
        return []
    x, y = envelope(*max(mine, key=lambda arm: arm.steps).whole_steps("position", "batch"))
    axis.plot(x, y, drawstyle="steps-pre", color=MUTED, linewidth=0.8, alpha=0.8, zorder=1)
    return [y]
