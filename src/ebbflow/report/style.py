"""What all figures share: colours, fonts, panels, and how they are written.

One colour and one dash pattern a rule, the same in every figure and on the page. The colours are those of Okabe and
Ito, which people with any kind of colour vision can tell apart; the dashes tell lines apart that lie on each other or
are printed in grey. Matplotlib is imported on first use, through its object interface only: no global state is left.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

__all__ = [
    "BAND",
    "GRID",
    "INK",
    "MUTED",
    "PALETTE",
    "Drawing",
    "RuleStyle",
    "drawing_style",
    "legend",
    "log_if_wide",
    "outer_labels",
    "panels",
    "plain_ticks",
    "save",
    "slug",
]

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d3f", "#7a7a7a")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (6, 1.6, 1.4, 1.6)), (0, (1.4, 1.4)))
_LEGEND_ROW = 0.2
"""Inches: a line of the legend's font and the space below it."""
INK, MUTED, GRID, BAND = "#1f2328", "#59636e", "#d8dee5", "#9db2c8"
"""Text, secondary text, lines of the grid, and the shading of a stretch: the page replaces them in the dark scheme."""

_RC: Any = {
    "svg.hashsalt": "ebbflow",  # the same figure gives the same bytes
    "svg.fonttype": "none",  # text stays text: small, selectable, in the font of the page
    "text.parse_math": False,  # a name with two dollar signs is a name
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9.5,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "lines.linewidth": 1.7,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "legend.handlelength": 2.4,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """One figure with what a page says about it."""

    stem: str
    """Name of its files, and its anchor on the page."""
    kind: str
    """validation, loss, batch, rate, trace, multiplier, or the name of a statistic."""
    title: str
    caption: str
    figure: Figure
    workload: str = ""


@dataclass(frozen=True)
class RuleStyle:
    """The look of each rule, by its place in the study's order."""

    rules: Sequence[str]

    def line(self, rule: str) -> dict[str, Any]:
        """Keywords for a line. The gid lets the page find all lines of a rule."""
        i = self.rules.index(rule)
        # The pattern moves on by one more each time the colours start again, so that pairs do not repeat soon.
        dash = _DASHES[(i + i // len(PALETTE)) % len(_DASHES)]
        return {"color": PALETTE[i % len(PALETTE)], "linestyle": dash, "label": rule, "gid": f"rule-{i}"}

    def fill(self, rule: str) -> dict[str, Any]:
        """Keywords for a band."""
        i = self.rules.index(rule)
        return {"color": PALETTE[i % len(PALETTE)], "alpha": 0.16, "linewidth": 0, "gid": f"rule-{i}"}


@contextmanager
def drawing_style() -> Iterator[None]:
    """The settings in which figures are made and written; the user's own are back afterwards."""
    import matplotlib

    with matplotlib.rc_context(_RC):
        yield


def panels(titles: Sequence[str], *, height: float = 2.5, sharey: bool = True) -> tuple[Figure, list[Axes]]:
    """A figure with one panel a title, up to three in a row (four make a square), of one width in all."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = 2 if len(titles) == 4 else min(len(titles), 3)
    rows = math.ceil(len(titles) / columns)
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, wspace=0.03, hspace=0.06)
    figure = Figure(figsize=(10.4, height * rows + 0.5), layout=layout)
    grid = figure.subplots(rows, columns, sharey=sharey, squeeze=False)
    axes = list(grid.flat)
    for spare in axes[len(titles) :]:
        spare.remove()
    for axis, title in zip(axes, titles, strict=False):
        axis.set_title(title)
    return figure, axes[: len(titles)]


def legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """One legend above all panels, in the order of the rules; none if no line has a name.

    Each row after the first makes the figure higher, so that many or long names leave the panels their size.
    """
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if not found:
        return
    widest = max(map(len, found))
    columns = min(len(found), max(1, 130 // (widest + 8)))
    figure.set_figheight(figure.get_figheight() + _LEGEND_ROW * (math.ceil(len(found) / columns) - 1))
    figure.legend(
        list(found.values()),
        list(found),
        loc="outside upper left",
        ncols=columns,
        borderaxespad=0.2,
        columnspacing=1.6,
    )


def outer_labels(axes: Sequence[Axes], x: str, y: str) -> None:
    """Label x on all panels, y on the first of each row only."""
    for axis in axes:
        axis.set_xlabel(x)
        if axis.get_subplotspec().is_first_col():  # type: ignore[union-attr]  # every panel is in a grid
            axis.set_ylabel(y)


def log_if_wide(axes: Sequence[Axes], drawn: Sequence[npt.NDArray[np.float64]], *, wide: float) -> bool:
    """A logarithmic axis where the positive values span more than a factor of `wide`; True if they do."""
    values = np.concatenate([part.ravel() for part in drawn]) if drawn else np.empty(0)
    positive = values[np.isfinite(values) & (values > 0)]
    if not positive.size or positive.max() <= wide * positive.min():
        return False
    for axis in axes:
        axis.set_yscale("log")
        plain_ticks(axis.yaxis)
    return True


def plain_ticks(axis: Axis) -> None:
    """Ticks as 0.01, not as powers of ten, and none between them."""
    axis.set_major_formatter(lambda value, position: f"{value:g}")
    axis.set_minor_formatter("")


def save(figure: Figure, folder: Path, stem: str) -> tuple[Path, Path]:
    """Write the figure as SVG and as PNG (on white, for slides and papers); the same figure gives the same SVG."""
    svg, png = folder / f"{stem}.svg", folder / f"{stem}.png"
    with drawing_style():
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
        figure.set_layout_engine("none")  # the layout is found; finding it again takes as long as drawing
        figure.savefig(png, format="png", dpi=200, facecolor="white", metadata={"Software": None})
    return svg, png


def slug(text: str) -> str:
    """A name for files and anchors.

    >>> slug("digits-mlp(hidden=64)")
    'digits-mlp-hidden-64'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "x"


def slugs(names: Iterable[str]) -> dict[str, str]:
    """A slug for each name, all different.

    >>> slugs(["mlp(8)", "mlp-8"])
    {'mlp(8)': 'mlp-8', 'mlp-8': 'mlp-8-2'}
    """
    found: dict[str, str] = {}
    for name in names:
        text = slug(name)
        while text in found.values():
            text += "-2"
        found[name] = text
    return found
