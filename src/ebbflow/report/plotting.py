"""What all figures share: colours, fonts, panels, files, and long series made short enough to draw.

Every rule has one colour and one dash pattern, the same in every figure and on the page. The colours are those of Okabe
and Ito, which people with any kind of colour vision can distinguish; the dashes distinguish lines that lie on each
other or are printed in grey. Matplotlib is imported on first use and through its object interface only, so that it
keeps no global state.
"""

from __future__ import annotations

import copy
import io
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ebbflow.core.files import write_whole
from ebbflow.errors import OutputError
from ebbflow.report.results import ArmResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

__all__ = [
    "BAND",
    "DOTTED",
    "GRID",
    "INK",
    "MARKERS",
    "MUTED",
    "PALETTE",
    "Drawing",
    "RuleStyle",
    "WorkloadArms",
    "changes",
    "drawing_style",
    "envelope",
    "file_format",
    "legend",
    "log_if_wide",
    "outer_labels",
    "over_seeds",
    "panels",
    "save",
    "slug",
    "slugs",
    "smooth",
    "ticks_at_powers_of_two",
    "time_unit",
    "write_figure",
]

Array = npt.NDArray[np.float64]

_NO_METADATA: dict[str, dict[str, None]] = {
    "svg": {"Date": None, "Creator": None},
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
"""By the format of a file, what is kept out of it so that the same figure gives the same bytes, on any day."""
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d3f", "#7a7a7a")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (6, 1.6, 1.4, 1.6)), (0, (1.4, 1.4)))
MARKERS = "osD^vPX"
"""Shapes of points, so that points on each other can be told apart."""
_DASH = 4.0
"""Length of a dash of lines that lie on each other, in widths of a line."""
_NEAR = 0.006
"""Lines that are nearer than this fraction of the height of a panel lie on each other."""
_LEGEND_ROW = 0.2
"""Height of one row of the legend with the space below it, in inches."""
INK, MUTED, GRID, BAND = "#1f2328", "#59636e", "#d8dee5", "#9db2c8"
"""Text, secondary text, grid lines, and shading; the page replaces these colours in its dark scheme."""
DOTTED: dict[str, Any] = {"color": MUTED, "linewidth": 1, "linestyle": (0, (1, 2)), "zorder": 1}
"""How a line looks with which runs are compared: a target, or what the runs at the reference batch reach."""

_RC: Any = {
    "svg.hashsalt": "ebbflow",  # the same figure gives the same bytes
    "svg.fonttype": "none",  # text stays text, which is small, selectable and in the font of the page
    "text.parse_math": False,  # a name with two dollar signs is not a formula
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
    """One figure with its texts on the page."""

    stem: str
    """Name of the files, and anchor on the page."""
    kind: str
    """validation, scores, loss, batch, rate, trace, multiplier, ..., or the name of a statistic."""
    title: str
    caption: str
    figure: Figure
    workload: str = ""


@dataclass(frozen=True)
class RuleStyle:
    """The colour and dash pattern of each rule, by its position in the study; or of each trace."""

    rules: Sequence[str]
    kind: str = "rule"
    """rule or trace: what the lines stand for, by which the page tells them apart."""

    def line(self, rule: str) -> dict[str, Any]:
        """Keyword arguments for a line. By the gid the page finds all lines of a rule."""
        i = self.rules.index(rule)
        # The pattern is shifted by one each time the colours start again, so that pairs do not repeat soon.
        dash = _DASHES[(i + i // len(PALETTE)) % len(_DASHES)]
        return {"color": PALETTE[i % len(PALETTE)], "linestyle": dash, "label": rule, "gid": f"{self.kind}-{i}"}

    def marker(self, rule: str) -> str:
        """The shape of a rule's points."""
        return MARKERS[self.rules.index(rule) % len(MARKERS)]

    def fill(self, rule: str) -> dict[str, Any]:
        """Keyword arguments for a band."""
        i = self.rules.index(rule)
        return {"color": PALETTE[i % len(PALETTE)], "alpha": 0.16, "linewidth": 0, "gid": f"{self.kind}-{i}"}


@dataclass(frozen=True, kw_only=True)
class WorkloadArms:
    """The arms of one workload that have steps, and what their figures share."""

    workload: str
    name: str
    """The slug of the workload, for the names of files."""
    arms: Sequence[ArmResult]
    traces: Sequence[str]
    style: RuleStyle

    def on_trace(self, trace: str) -> list[ArmResult]:
        """The arms of one trace."""
        return [arm for arm in self.arms if arm.trace == trace]

    def drawing(self, kind: str, title: str, caption: str, figure: Figure, *, stem: str = "") -> Drawing:
        """A figure of this workload; the name of its files begins with `stem`, by default with the kind."""
        return Drawing(
            stem=f"{stem or kind}-{self.name}",
            kind=kind,
            title=title,
            caption=caption,
            figure=figure,
            workload=self.workload,
        )


@contextmanager
def drawing_style() -> Iterator[None]:
    """The matplotlib settings for making and writing figures; the user's own are restored afterwards."""
    import matplotlib

    with matplotlib.rc_context(_RC):
        yield


def panels(titles: Sequence[str], *, height: float = 2.5, sharey: bool = True) -> tuple[Figure, list[Axes]]:
    """A figure of fixed width with one panel per title, up to three in a row (four make a square)."""
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
    """Add one legend above all panels, in the order of the rules; none if no line has a label.

    Lines that lie on each other are drawn as dashes that alternate, and the legend names them. Each row after the first
    makes the figure higher, so that many or long names do not shrink the panels.
    """
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, copy.copy(handle))  # as it looks before `_separate`
    if not found:
        return
    note = textwrap.wrap(_separate(axes), 140)
    widest = max(map(len, found))
    columns = min(len(found), max(1, 130 // (widest + 8)))
    rows = math.ceil(len(found) / columns) - 1 + len(note)
    figure.set_figheight(figure.get_figheight() + _LEGEND_ROW * rows)
    figure.legend(
        list(found.values()),
        list(found),
        loc="outside upper left",
        ncols=columns,
        borderaxespad=0.2,
        columnspacing=1.6,
        title="\n".join(note) or None,
        title_fontsize=9,
        alignment="left",
    )


def _separate(axes: Sequence[Axes]) -> str:
    """Let lines of a panel that lie on each other show in turn; returns which do, in words."""
    together: dict[str, list[str]] = {}
    for axis in axes:
        rules: dict[str, Line2D] = {}
        for line in axis.lines:
            named = not str(line.get_label()).startswith("_")  # matplotlib's own names are those of no label
            if named and str(line.get_gid() or "").startswith(("rule-", "trace-")) and line.get_linestyle() != "None":
                rules.setdefault(str(line.get_label()), line)
        groups: list[list[str]] = []
        for name, line in rules.items():
            same = next((group for group in groups if _lie_on_each_other(axis, rules[group[0]], line)), None)
            if same is None:
                groups.append([name])
            else:
                same.append(name)
        for group in groups:
            for i, name in enumerate(group):
                if len(group) > 1:
                    rules[name].set_linestyle((-_DASH * i, (_DASH, _DASH * (len(group) - 1))))
                    rules[name].set_markersize(rules[name].get_markersize() + 3 * (len(group) - 1 - i))
            if len(group) > 1:
                together.setdefault(" = ".join(group), []).append(axis.get_title("left"))
    texts = [
        names + ("" if len(panels) == len(axes) else f" ({', '.join(panels)})") for names, panels in together.items()
    ]
    return f"On one line: {'; '.join(texts)}" if texts else ""


def _lie_on_each_other(axis: Axes, one: Line2D, other: Line2D) -> bool:
    """Whether two lines are hardly a width of a line apart, wherever both are drawn."""
    (x, y), (other_x, other_y) = (np.asarray(line.get_data(), dtype=np.float64) for line in (one, other))
    if not x.size or not other_x.size or not np.allclose([x[0], x[-1]], [other_x[0], other_x[-1]]):
        return False
    limits = np.asarray(axis.get_ylim())
    there = np.interp(x, other_x, other_y)
    if axis.get_yscale() == "log":
        y, there, limits = (np.log(np.maximum(values, 1e-300)) for values in (y, there, limits))
    good = np.isfinite(y) & np.isfinite(there)
    return bool(good.any() and np.max(np.abs(y - there)[good]) < _NEAR * abs(limits[1] - limits[0]))


def outer_labels(axes: Sequence[Axes], x: str, y: str) -> None:
    """Label the x axis of all panels, and the y axis of the first in each row; epochs are whole numbers."""
    from matplotlib.ticker import MaxNLocator

    for axis in axes:
        axis.set_xlabel(x)
        low, high = axis.get_xlim()
        if x == "epoch" and high - low > 1:
            axis.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True))
        if axis.get_subplotspec().is_first_col():  # type: ignore[union-attr]  # every panel is in a grid
            axis.set_ylabel(y)


def log_if_wide(axes: Sequence[Axes], drawn: Sequence[Array], *, wide: float) -> bool:
    """Make the y axis logarithmic if the positive values span more than the factor `wide`; True if they do."""
    values = np.concatenate([part.ravel() for part in drawn]) if drawn else np.empty(0)
    positive = values[np.isfinite(values) & (values > 0)]
    if not positive.size or positive.max() <= wide * positive.min():
        return False
    from matplotlib.ticker import LogLocator

    narrow = positive.max() < 1000 * positive.min()
    for axis in axes:
        axis.set_yscale("log")
        _plain_ticks(axis.yaxis)
        if narrow:  # powers of ten alone would leave an axis with one number, or none
            axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    return True


def time_unit(seconds: float) -> tuple[str, float]:
    """A unit for an axis that ends at so many seconds, and its length in seconds.

    >>> time_unit(90.0), time_unit(5000.0), time_unit(1e5), time_unit(1e6)
    (('seconds', 1.0), ('minutes', 60.0), ('hours', 3600.0), ('days', 86400.0))
    """
    for most, name, length in ((300.0, "seconds", 1.0), (3 * 3600.0, "minutes", 60.0), (3 * 86400.0, "hours", 3600.0)):
        if seconds <= most:
            return name, length
    return "days", 86400.0


def _plain_ticks(axis: Axis) -> None:
    """Write ticks as 0.01, not as powers of ten, without minor tick labels."""
    axis.set_major_formatter(lambda value, position: f"{value:g}")
    axis.set_minor_formatter("")


def ticks_at_powers_of_two(axis: Axis) -> None:
    """Plain ticks at powers of two, and at quarters between them where the axis has fewer than two powers."""
    from matplotlib.ticker import LogLocator

    _plain_ticks(axis)
    low, high = sorted(axis.get_view_interval())
    if low > 0 and math.floor(math.log2(high)) - math.ceil(math.log2(low)) < 1:
        axis.set_major_locator(LogLocator(base=2, subs=(1.0, 1.25, 1.5, 1.75)))


def save(figure: Figure, folder: Path, stem: str) -> tuple[Path, Path]:
    """Write the figure as SVG and as PNG (on white, for slides and papers). The same figure gives the same SVG."""
    svg, png = folder / f"{stem}.svg", folder / f"{stem}.png"
    write_figure(figure, svg, background="none")  # the page has its own, which may be dark
    figure.set_layout_engine("none")  # computing the layout again would take as long as drawing
    write_figure(figure, png)
    return svg, png


def file_format(path: Path) -> str:
    """What a figure is written as, svg, png or pdf, by the suffix of its file; OutputError for any other."""
    suffix = path.suffix.lower()
    if suffix[1:] not in _NO_METADATA:
        raise OutputError(f"{path}: a figure cannot be drawn as {suffix or 'a file without a suffix'}; "
                          f"expected {', '.join(f'.{kind}' for kind in _NO_METADATA)}")  # fmt: skip
    return suffix[1:]


def write_figure(figure: Figure, path: Path, *, background: str = "white") -> None:
    """Write the figure as its suffix says, completely or not at all. The same figure gives the same bytes."""
    kind, data = file_format(path), io.BytesIO()
    with drawing_style():
        figure.savefig(data, format=kind, dpi=200, facecolor=background, metadata=_NO_METADATA[kind])
    write_whole(path, data.getvalue())


def slug(text: str) -> str:
    """A name that can be used for files and anchors.

    >>> slug("digits-mlp(hidden=64)")
    'digits-mlp-hidden-64'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "x"


def slugs(names: Iterable[str]) -> dict[str, str]:
    """A slug for each name, all distinct.

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


# -- long series -------------------------------------------------------------------------------------------------------


def envelope(x: Array, y: Array, *, points: int = 800) -> tuple[Array, Array]:
    """At most about `points` points with the same extremes: the lowest and the highest point of each interval.

    >>> x = np.arange(1e5); y = np.zeros(100_000); y[77_777] = 5.0
    >>> short_x, short_y = envelope(x, y, points=100)
    >>> short_x.size <= 102, float(short_y.max())
    (True, 5.0)
    """
    if x.size <= points:
        return x, y
    bins = max(points // 2, 1)
    starts = np.linspace(0, x.size, bins, endpoint=False).astype(np.intp)
    stops = np.append(starts[1:], x.size)
    ranked = np.where(np.isnan(y), np.inf, y), np.where(np.isnan(y), -np.inf, y)
    low = [int(a + np.argmin(ranked[0][a:b])) for a, b in zip(starts, stops, strict=True)]
    high = [int(a + np.argmax(ranked[1][a:b])) for a, b in zip(starts, stops, strict=True)]
    keep = np.unique([0, *low, *high, x.size - 1])
    return x[keep], y[keep]


def changes(x: Array, y: Array) -> tuple[Array, Array]:
    """The points at which a step function changes, and its last point: exact when drawn with steps.

    >>> changes(np.arange(5.0), np.array([1.0, 1, 2, 2, 2]))
    (array([0., 2., 4.]), array([1., 2., 2.]))
    """
    if x.size < 3:
        return x, y
    keep = np.concatenate([[True], y[1:] != y[:-1]])
    keep[-1] = True
    return x[keep], y[keep]


def smooth(x: Array, y: Array, *, end: float, bins: int = 150) -> tuple[Array, Array]:
    """The mean of y in each of `bins` equal intervals of [0, end]; those without a finite value are left out.

    >>> smooth(np.array([0.1, 0.2, 0.9]), np.array([1.0, 3.0, 7.0]), end=1.0, bins=2)
    (array([0.25, 0.75]), array([2., 7.]))
    """
    good = np.isfinite(y) & np.isfinite(x)
    if not good.any() or end <= 0:
        return np.empty(0), np.empty(0)
    index = np.clip((x[good] / end * bins).astype(np.intp), 0, bins - 1)
    count = np.bincount(index, minlength=bins)
    total = np.bincount(index, weights=y[good], minlength=bins)
    filled = count > 0
    return ((np.arange(bins) + 0.5) * end / bins)[filled], total[filled] / count[filled]


def over_seeds(curves: Sequence[tuple[Array, Array]]) -> tuple[Array, Array, Array, Array]:
    """(x, mean, lowest, highest) where all curves have values, at the points of the longest; others are interpolated.

    >>> a = np.array([1.0, 2.0]), np.array([0.5, 0.75])
    >>> b = np.array([1.0, 2.0]), np.array([1.0, 0.25])
    >>> x, mean, low, high = over_seeds([a, b])
    >>> mean, low, high
    (array([0.75, 0.5 ]), array([0.5 , 0.25]), array([1.  , 0.75]))
    """
    curves = [(x[np.isfinite(y)], y[np.isfinite(y)]) for x, y in curves]
    curves = [(x, y) for x, y in curves if x.size]
    if not curves:
        empty = np.empty(0)
        return empty, empty, empty, empty
    longest = max((x for x, _ in curves), key=lambda x: x.size)
    start, stop = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    grid = longest[(longest >= start) & (longest <= stop)]
    values = np.array([np.interp(grid, x, y) for x, y in curves])
    return grid, values.mean(axis=0), values.min(axis=0), values.max(axis=0)
