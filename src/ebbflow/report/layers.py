"""Figures of what layer-wise rules do with each layer: one panel a rule and trace, one line a layer.

The gradient variance of each layer over the epochs is Figure 3 of Ko et al. (2022); when layers end their warm-up,
their Figure 7, is the statistic `warming`. A new figure is one line of `LAYER_FIGURES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ebbflow.report.results import ArmResult, LayerCurves
from ebbflow.report.style import (
    PALETTE,
    Drawing,
    RuleStyle,
    drawing_style,
    legend,
    log_if_wide,
    outer_labels,
    panels,
)
from ebbflow.rules.noise_rules import gain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["LAYER_FIGURES", "LayerFigure", "gradient_variance", "layer_figures"]

Array = npt.NDArray[np.float64]

_NAMED = 10
"""Up to so many layers the legend names each, else the first and the last."""


def gradient_variance(curves: LayerCurves, ref_batch: int) -> Array:
    """What Ko et al. (2022, eq. 4) call the gradient variance of a layer: 1 (all signal) to B/B0 (all noise).

    It is the gain of the layer at the batch of the step, from the averages of noise and signal; NaN where they are.
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
    """From the curves and the reference batch: one row a recorded step, one column a layer."""


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
        caption="What the rate of each layer was multiplied with, warm-up and ramp included.",
    ),
)  # fmt: skip


def layer_figures(
    arms: Sequence[ArmResult], traces: Sequence[str], style: RuleStyle, workload: str, name: str
) -> Iterator[Drawing]:
    """The figures of `LAYER_FIGURES`, of the arms that have rows of layers; none if there are no such arms."""
    shown: dict[str, ArmResult] = {}
    for rule in style.rules:
        for trace in traces:
            mine = [arm for arm in arms if (arm.rule, arm.trace) == (rule, trace) and arm.layers and arm.ref_batch]
            if mine:
                shown[f"{rule}, {trace}"] = max(mine, key=lambda arm: arm.steps)
    if not shown:
        return
    for what in LAYER_FIGURES:
        with drawing_style():
            drawing = _draw(what, shown, style, workload, name)
        yield drawing


def _draw(what: LayerFigure, shown: dict[str, ArmResult], style: RuleStyle, workload: str, name: str) -> Drawing:
    figure, axes = panels(list(shown), height=2.4)
    drawn = [_lines(axis, arm, what, style) for axis, arm in zip(axes, shown.values(), strict=True)]
    log_if_wide(axes, drawn, wide=50)
    outer_labels(axes, "epoch", what.label)
    legend(figure, axes)
    return Drawing(
        stem=f"{what.kind}-{name}",
        kind=what.kind,
        title=what.title,
        caption=f"{what.caption} One line a parameter tensor, from blue (nearest the input) to orange. One seed.",
        figure=figure,
        workload=workload,
    )


def _lines(axis: Axes, arm: ArmResult, what: LayerFigure, style: RuleStyle) -> Array:
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    assert arm.layers is not None and arm.ref_batch is not None  # layer_figures chose those that have both
    values = what.values(arm.layers, arm.ref_batch)
    count = len(arm.layers.names)
    colours = LinearSegmentedColormap.from_list("depth", [PALETTE[0], PALETTE[5], PALETTE[4], PALETTE[1]])
    gid = style.line(arm.rule)["gid"]
    for i, layer in enumerate(arm.layers.names):
        named = count <= _NAMED or i in (0, count - 1)
        look: dict[str, Any] = {"color": to_hex(colours(i / max(count - 1, 1))), "linewidth": 1.1, "gid": gid}
        axis.plot(arm.layers.position, values[:, i], label=layer if named else None, **look)
    return values
