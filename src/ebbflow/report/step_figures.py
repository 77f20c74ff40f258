"""Figures of what rules record per step (gain, noise scale, warm-up) and per layer.

A further figure is one entry of `STATISTICS` or `LAYER_FIGURES`. A column of the records that is not listed there gets
a plain figure, so everything that was recorded is shown. The gradient variance of each layer over the epochs is Figure
3 of Ko et al. (2022); how many layers end their warm-up in each epoch is their Figure 7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ebbflow.report.plotting import (
    MUTED,
    PALETTE,
    Drawing,
    RuleStyle,
    WorkloadArms,
    drawing_style,
    envelope,
    legend,
    log_if_wide,
    outer_labels,
    panels,
    slug,
)
from ebbflow.report.results import ArmResult, LayerCurves
from ebbflow.rules.noise_rules import gain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "LAYER_FIGURES",
    "STATISTICS",
    "LayerFigure",
    "Statistic",
    "gradient_variance",
    "layer_figures",
    "ends_by_epoch",
    "over_epochs",
    "statistic_figures",
    "warmup_ends",
]

Array = npt.NDArray[np.float64]
_NAMED_LAYERS = 10
"""Up to this many layers the legend names each of them; otherwise the first and the last."""


# -- per step ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """How one column of the steps is drawn over the epochs."""

    column: str
    title: str
    caption: str
    label: str = ""
    """Label of the vertical axis; by default the title."""
    wide: float = 50.0
    """The axis is logarithmic if the values span more than this factor."""
    with_batch: bool = False
    """Whether to draw the batch behind it, which has the same unit."""
    beside: frozenset[str] = frozenset()
    """For a column that every record has: it is drawn only if one of these columns was recorded, too."""

    def drawn_for(self, recorded: frozenset[str]) -> bool:
        """Whether records with these columns have anything to show here."""
        return bool(recorded & (self.beside or {self.column}))


STATISTICS = (
    Statistic(
        column="multiplier", title="Multiplier", label="multiplier of the rate",
        beside=frozenset({"gain", "ramp", "warming"}),
        caption="The multiplier of the learning rate in each step, with warm-up and ramp; the mean over layers that "
        "differ.",
    ),
    Statistic(
        column="gain", title="Gain", label="gain (reference steps)",
        caption="How many steps at the reference batch one step was worth, by the noise and signal of its gradient.",
    ),
    Statistic(
        column="gain_min", title="Lowest gain of a layer", label="gain (reference steps)",
        caption="The gain of the layer whose gradient is least noisy, for layer-wise rules.",
    ),
    Statistic(
        column="gain_max", title="Highest gain of a layer", label="gain (reference steps)",
        caption="The gain of the layer whose gradient is noisiest, for layer-wise rules.",
    ),
    Statistic(
        column="noise_scale", title="Noise scale", label="samples", wide=5.0, with_batch=True,
        caption="The noise scale, noise divided by signal, in samples (McCandlish et al. 2018). The gradient of a "
        "smaller batch is mostly noise and gains from more workers; far above it, more samples hardly help. Grey: the "
        "batch.",
    ),
    Statistic(
        column="noise", title="Noise", label="trace of the covariance", wide=5.0,
        caption="Noise: the variance of one sample's gradient, summed over all parameters.",
    ),
    Statistic(
        column="signal", title="Signal", label="squared norm", wide=5.0,
        caption="Signal: the estimated squared norm of the true gradient.",
    ),
    Statistic(
        column="ramp", title="Ramp", label="multiplier / its target",
        caption="The multiplier in force divided by the one that the rule asks for: below 1 while it rises after an "
        "increase of the batch.",
    ),
    Statistic(
        column="warming", title="Layers in warm-up", label="layers",
        caption="Layers that are still in their warm-up; a decrease by n means that n layers ended it there. A rule "
        "for the whole model has one warm-up.",
    ),
    Statistic(
        column="coefficient", title="Coefficient", label="coefficient of the gain",
        caption="The coefficient of the rule auto, which is halved whenever the run goes back to a snapshot, and may "
        "change after a probe.",
    ),
    Statistic(
        column="level", title="Level", label="part of the multiplier",
        caption="By what the warm-up of the rule auto multiplies the rate: it rises from 0, to 1 or to where the "
        "slopes along the steps say that they are long enough.",
    ),
    Statistic(
        column="slope_left", title="Slope left", label="slope at the end / at the beginning",
        caption="How steep the loss is along a step where it ends, divided by where it begins, over the last steps of "
        "the warm-up of auto. Near 1 the steps are much too short; below 0 they go beyond the lowest point on their "
        "way.",
    ),
    Statistic(
        column="progress", title="Progress", label="reference steps",
        caption="Reference steps that the run was worth so far, which its schedule follows.",
    ),
)  # fmt: skip


def statistic_figures(of: WorkloadArms) -> Iterator[Drawing]:
    """One figure per recorded statistic: those of `STATISTICS` in their order, then all others."""
    recorded = frozenset(column for arm in of.arms for column in arm.stats)
    known = {statistic.column for statistic in STATISTICS}
    for statistic in (*STATISTICS, *map(_plain, sorted(recorded - known))):
        if statistic.drawn_for(recorded):
            with drawing_style():
                drawing = _draw_statistic(statistic, of)
            yield drawing


def _plain(column: str) -> Statistic:
    title = column.replace("_", " ")
    title = title[:1].upper() + title[1:]
    return Statistic(column=column, title=title, caption=f"{title}, as recorded in each step.")


def _draw_statistic(statistic: Statistic, of: WorkloadArms) -> Drawing:
    figure, axes = panels(of.traces, height=2.4)
    drawn: list[Array] = []
    for axis, trace in zip(axes, of.traces, strict=True):
        arms = of.on_trace(trace)
        drawn += over_epochs(axis, arms, of.style, statistic.column)
        if statistic.with_batch:
            drawn += _batch_behind(axis, arms, statistic.column)
    log_if_wide(axes, drawn, wide=statistic.wide)
    outer_labels(axes, "epoch", statistic.label or statistic.title.lower())
    legend(figure, axes)
    caption = f"{statistic.caption} One seed."
    return of.drawing(statistic.column, statistic.title, caption, figure, stem=f"stat-{slug(statistic.column)}")


def over_epochs(axis: Axes, arms: Sequence[ArmResult], style: RuleStyle, column: str) -> list[Array]:
    """Draw one line per rule (or trace), of its longest run, since seeds hardly matter; returns all drawn values."""
    drawn = []
    for rule in style.rules:
        mine = [arm for arm in arms if getattr(arm, style.kind) == rule and column in arm.columns]
        if not mine:
            continue
        longest = max(mine, key=lambda arm: arm.steps)
        x, y = envelope(*longest.over_epochs(column))
        axis.plot(x, y, drawstyle="steps-pre", **{**style.line(rule), "linewidth": 1.2})  # x is the end of the step
        drawn.append(y)
    return drawn


def _batch_behind(axis: Axes, arms: Sequence[ArmResult], column: str) -> list[Array]:
    """Draw the batch of the longest arm that has the column, as a thin grey line."""
    mine = [arm for arm in arms if column in arm.columns]
    if not mine:
        return []
    x, y = envelope(*max(mine, key=lambda arm: arm.steps).over_epochs("batch"))
    axis.plot(x, y, drawstyle="steps-pre", color=MUTED, linewidth=0.8, alpha=0.8, zorder=1)
    return [y]


# -- per layer ---------------------------------------------------------------------------------------------------------


def gradient_variance(curves: LayerCurves, ref_batch: int) -> Array:
    """The gradient variance of each layer by Ko et al. (2022, eq. 4): from 1 (all signal) to B/B0 (all noise).

    It is the gain of the layer at the batch of the step, from the averages of noise and signal; NaN where they are NaN.
    """
    value = np.full_like(curves.noise, np.nan)
    for row, column in np.argwhere(np.isfinite(curves.noise) & np.isfinite(curves.signal)):
        noise, signal = float(curves.noise[row, column]), float(curves.signal[row, column])
        value[row, column] = gain(noise / ref_batch, signal, float(curves.batch[row]) / ref_batch)
    return value


@dataclass(frozen=True, kw_only=True)
class LayerFigure:
    """One quantity of the layers."""

    kind: str
    title: str
    label: str
    caption: str
    values: Callable[[LayerCurves, int], Array]
    """From the curves and the reference batch: one row per recorded step, one column per layer."""


LAYER_FIGURES = (
    LayerFigure(
        kind="layer-variance", title="Gradient variance of the layers", label="gradient variance",
        values=gradient_variance,
        caption="The gradient variance of each layer as Ko et al. (2022) define it, their Figure 3: from 1, where all "
        "micro-batches agree, to B/B0, where they are all noise.",
    ),
    LayerFigure(
        kind="layer-multiplier", title="Multiplier of the layers", label="multiplier of the rate",
        values=lambda curves, ref_batch: curves.multiplier,
        caption="The multiplier of the learning rate of each layer, with warm-up and ramp.",
    ),
)  # fmt: skip


def layer_figures(of: WorkloadArms) -> Iterator[Drawing]:
    """The figures of `LAYER_FIGURES` and of the ends of warm-ups, with one panel per rule and trace.

    None if no arm recorded its layers; those of the ends only if layers have warm-ups of their own.
    """
    shown: dict[str, ArmResult] = {}
    for rule in of.style.rules:
        for trace in of.traces:
            mine = [arm for arm in of.on_trace(trace) if arm.rule == rule and arm.layers and arm.ref_batch]
            if mine:
                shown[f"{rule}, {trace}"] = max(mine, key=lambda arm: arm.steps)
    if not shown:
        return
    for what in LAYER_FIGURES:
        with drawing_style():
            drawing = _draw_layers(what, shown, of)
        yield drawing
    warmed = {name: arm for name, arm in shown.items() if _layers_in_warmup(arm) > 1}
    if warmed:
        for draw in (_draw_ends_by_epoch, _draw_ends_by_layer):
            with drawing_style():
                drawing = draw(warmed, of)
            yield drawing


def _layers_in_warmup(arm: ArmResult) -> float:
    """The most layers that were in their warm-up at once; 0 if the rule has none."""
    warming = arm.columns.get("warming", np.zeros(1))
    return float(np.nanmax(warming)) if np.isfinite(warming).any() else 0.0


def ends_by_epoch(arm: ArmResult) -> tuple[Array, int]:
    """(how many layers ended their warm-up in each epoch, from the first on; how many never did).

    Exact: from the number of layers in warm-up, which every step of the record has. Before anything is measured all
    layers have one warm-up, which counts as theirs.
    """
    assert arm.layers is not None
    known = np.isfinite(arm.columns["warming"])
    warming, epoch = arm.columns["warming"][known], arm.columns["epoch"][known]
    measured = np.flatnonzero(np.diff(warming) > 0)[:1] + 1  # the only time when the number rises
    before = slice(0, int(measured[0]) if measured.size else 0)
    warming[before] = np.where(warming[before] > 0, len(arm.layers.names), 0)
    ended = -np.diff(warming, prepend=float(len(arm.layers.names)))
    counts = np.zeros(int(epoch[-1]) + 1)
    np.add.at(counts, epoch.astype(np.intp), np.maximum(ended, 0.0))
    return counts, int(warming[-1])


def warmup_ends(curves: LayerCurves, ref_batch: int) -> Array:
    """The epoch in which each layer ended its warm-up; NaN for one that did not.

    As fine as the rows of layers, about 200 per run. Records of earlier versions have the number of layers in warm-up,
    not which ones. Those are then estimated: a warm-up multiplies the gain by what it has done so far, so they are the
    layers whose multiplier is the smallest part of their gain. The eps of a rule is not known here, so that layers with
    hardly any signal may be exchanged with others.
    """
    if np.isfinite(curves.warm_up).any():
        ended = curves.warm_up >= 1  # NaN: not known, not ended
    else:
        part = curves.multiplier / gradient_variance(curves, ref_batch)
        rank = np.argsort(np.argsort(np.where(np.isfinite(part), part, -np.inf), axis=1, kind="stable"), axis=1)
        ended = rank >= curves.warming[:, None]
    return np.where(ended.any(axis=0), curves.position[np.argmax(ended, axis=0)], np.nan)


def _draw_ends_by_epoch(shown: dict[str, ArmResult], of: WorkloadArms) -> Drawing:
    found = {name: ends_by_epoch(arm) for name, arm in shown.items()}
    titles = [f"{name} ({left} left)" if left else name for name, (_, left) in found.items()]
    figure, axes = panels(titles, height=2.1)
    for axis, arm, (counts, _) in zip(axes, shown.values(), found.values(), strict=True):
        look = of.style.line(arm.rule)
        axis.bar(np.arange(counts.size) + 0.5, counts, width=0.9, color=look["color"], gid=look["gid"])
    outer_labels(axes, "epoch", "layers")
    caption = (
        "How many layers ended their warm-up in each epoch, Figure 7 of Ko et al. (2022). In parentheses: layers that "
        "are still in it when the run ends. One seed."
    )
    return of.drawing("warmup-ends", "Ends of warm-up", caption, figure)


def _draw_ends_by_layer(shown: dict[str, ArmResult], of: WorkloadArms) -> Drawing:
    most = max(len(arm.layers.names) for arm in shown.values() if arm.layers)
    figure, axes = panels(list(shown), height=min(max(2.4, 0.05 * most), 6.0), sharey=True)
    for axis, arm in zip(axes, shown.values(), strict=True):
        assert arm.layers is not None and arm.ref_batch is not None  # layer_figures chose arms that have both
        ends, look = warmup_ends(arm.layers, arm.ref_batch), of.style.line(arm.rule)
        for ended, alpha in ((True, 0.9), (False, 0.25)):  # a layer that never ended it has a pale bar to the end
            here = np.flatnonzero(np.isfinite(ends) == ended)
            lengths = ends[here] if ended else np.full(here.size, arm.layers.position[-1])
            if here.size:
                axis.barh(here, lengths, height=0.8, color=look["color"], alpha=alpha, gid=look["gid"])
        axis.set_title(f"{arm.rule}\n{arm.trace}")  # the names of the layers leave little room for one line
        ticks = np.unique(np.linspace(0, most - 1, min(most, 9)).round().astype(int))
        axis.set_yticks(ticks, [arm.layers.names[i] for i in ticks])
        axis.set_ylim(most - 0.4, -0.6)
        axis.grid(visible=False, axis="y")
    outer_labels(axes, "epoch", "")
    caption = (
        "The epoch in which each layer ended its warm-up, one bar per parameter tensor with the input on top, to the "
        "nearest recorded step; pale: not before the end of the run. One seed."
    )
    return of.drawing("layer-warmup", "Warm-up of the layers", caption, figure)


def _draw_layers(what: LayerFigure, shown: dict[str, ArmResult], of: WorkloadArms) -> Drawing:
    figure, axes = panels(list(shown), height=2.4)
    drawn = [_layer_lines(axis, arm, what, of.style) for axis, arm in zip(axes, shown.values(), strict=True)]
    log_if_wide(axes, drawn, wide=50)
    outer_labels(axes, "epoch", what.label)
    legend(figure, axes)
    caption = f"{what.caption} One line per parameter tensor, from blue (nearest the input) to orange. One seed."
    return of.drawing(what.kind, what.title, caption, figure)


def _layer_lines(axis: Axes, arm: ArmResult, what: LayerFigure, style: RuleStyle) -> Array:
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    assert arm.layers is not None and arm.ref_batch is not None  # layer_figures chose arms that have both
    values = what.values(arm.layers, arm.ref_batch)
    count = len(arm.layers.names)
    colours = LinearSegmentedColormap.from_list("depth", [PALETTE[0], PALETTE[5], PALETTE[4], PALETTE[1]])
    gid = style.line(arm.rule)["gid"]
    for i, layer in enumerate(arm.layers.names):
        named = count <= _NAMED_LAYERS or i in (0, count - 1)
        look: dict[str, Any] = {"color": to_hex(colours(i / max(count - 1, 1))), "linewidth": 1.1, "gid": gid}
        axis.plot(arm.layers.position, values[:, i], label=layer if named else None, **look)
    return values
