"""Drawings of a rule: as text for a terminal, as a figure for a paper."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING

from ebbflow.core.files import write_whole
from ebbflow.errors import OutputError

if TYPE_CHECKING:
    from ebbflow.rules.curves import Curves

__all__ = ["chart", "figure"]

_MARKS = "·+xo"
_SUFFIXES = (".svg", ".png", ".pdf")


def chart(curves: Curves, *, width: int = 80, height: int = 13) -> str:
    """The lines as text, on a logarithmic scale from below to above, at most `width` columns wide."""
    margin = 5
    columns = width - margin
    low, high = _bounds(curves)
    cells = [[" "] * columns for _ in range(height)]
    for mark, y in zip(_MARKS, curves.lines.values(), strict=False):
        for column in range(columns):
            at = round(column / (columns - 1) * (len(curves.x) - 1))
            row = round((math.log2(y[at]) - low) / (high - low) * (height - 1))
            cells[height - 1 - min(max(row, 0), height - 1)][column] = mark
    labels = _labels(low, high, height)
    lines = [curves.title]
    for row, cell in enumerate(cells):
        label = labels.get(height - 1 - row, "")
        lines.append(f"{label:>{margin - 2}} {'┤' if label else '│'}{''.join(cell)}".rstrip())
    lines.append(" " * (margin - 1) + "└" + "─" * columns)
    lines.append(" " * margin + _ticks(curves, columns))
    legend = [f"{mark} {label}" for mark, label in zip(_MARKS, curves.lines, strict=False)]
    lines.append(" " * margin + "   ".join([curves.x_label, *(legend if len(legend) > 1 else [])]))
    return "\n".join(lines)


def _bounds(curves: Curves) -> tuple[int, int]:
    """Powers of two that hold all values, at least an octave."""
    values = [value for y in curves.lines.values() for value in y]
    low, high = math.floor(math.log2(min(values)) + 1e-9), math.ceil(math.log2(max(values)) - 1e-9)
    return low, max(high, low + 1)


def _power(exponent: int) -> str:
    """2^exponent for people: 1/4, 1, 64."""
    return str(2**exponent) if exponent >= 0 else f"1/{2**-exponent}"


def _labels(low: int, high: int, height: int) -> dict[int, str]:
    """Row from below -> label: each power of two that lies on a row of its own, or every second one."""
    every = 1 if high - low < height / 2 else 2
    return {round((e - low) / (high - low) * (height - 1)): _power(e) for e in range(low, high + 1) if e % every == 0}


def _ticks(curves: Curves, columns: int) -> str:
    """Values of x under their columns."""
    first, last = curves.x[0], curves.x[-1]
    if curves.log_x:
        begin, end = math.log2(first), math.log2(last)
        places = [((e - begin) / (end - begin), _power(e)) for e in range(round(begin), round(end) + 1)]
    else:
        places = [(part / 5, f"{first + part / 5 * (last - first):.0f}") for part in range(6)]
    line = [" "] * columns
    for part, text in places:
        at = min(round(part * (columns - 1)), columns - len(text))
        line[at : at + len(text)] = text
    return "".join(line)


def figure(curves: Curves, path: Path) -> None:
    """The same lines as a figure; the suffix of the file decides on the format."""
    if path.suffix not in _SUFFIXES:
        raise OutputError(f"{path}: a figure is written as {', '.join(_SUFFIXES)}; name the file accordingly")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    low, high = _bounds(curves)
    with rc_context({"svg.hashsalt": "ebbflow", "svg.fonttype": "none"}):  # the same rule gives the same bytes
        drawing = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = drawing.add_subplot()
        for label, y in curves.lines.items():
            axes.plot(curves.x, y, label=label)
        axes.set_yscale("log", base=2)
        powers = range(low, high + 1)
        axes.set_yticks([2.0**e for e in powers], [_power(e) for e in powers])
        if curves.log_x:
            axes.set_xscale("log", base=2)
            powers = range(round(math.log2(curves.x[0])), round(math.log2(curves.x[-1])) + 1)
            axes.set_xticks([2.0**e for e in powers], [_power(e) for e in powers])
        axes.minorticks_off()
        axes.set_xlabel(curves.x_label)
        axes.set_title(curves.title, fontsize="medium")
        axes.grid(alpha=0.3)
        if len(curves.lines) > 1:
            axes.legend(frameon=False)
        data = io.BytesIO()
        drawing.savefig(data, format=path.suffix[1:], metadata={"Date": None} if path.suffix == ".svg" else None)
    write_whole(path, data.getvalue())
