"""Drawings of a trace: as text for a terminal, and as a figure file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ebbflow.core.units import Seconds
from ebbflow.report.plotting import PALETTE, drawing_style, file_format, write_figure
from ebbflow.traces.availability import Trace

__all__ = ["chart", "figure"]

_BLOCKS = " ▁▂▃▄▅▆▇█"


def chart(trace: Trace, *, width: int = 80, height: int = 12) -> str:
    """The trace as lines of text of at most `width` columns.

    A column shows the mean count of its part of the time, to an eighth of a line; a column without workers is empty.

    >>> print(chart(Trace.parse("0min:4 60min:2 90min:6 120min"), width=40, height=3))
    6 ┤                            █████████
      │██████████████████▄        ▄█████████
      │█████████████████████████████████████
    0 └─────────────────────────────────────
       0        30       60       90     min
    """
    stats = trace.stats()
    margin = len(str(stats.max)) + 2
    columns = max(width - margin, 8)
    edges = np.linspace(0, trace.end, columns + 1)
    areas = np.array([trace.integral(stop=Seconds(edge)) for edge in edges])
    means = np.diff(areas) / np.diff(edges)
    eighths = np.round(means / max(stats.max, 1) * height * 8).astype(int)
    eighths[(means > 0) & (eighths == 0)] = 1  # a column with few workers is not empty
    lines = []
    for row in range(height):
        below = 8 * (height - 1 - row)
        label = str(stats.max) if row == 0 else str(round(stats.max / 2)) if height > 6 and row == height // 2 else ""
        bar = "".join(_BLOCKS[level] for level in np.clip(eighths - below, 0, 8))
        lines.append(f"{label:>{margin - 2}} {'┤' if label else '│'}{bar}".rstrip())
    lines.append(f"{0:>{margin - 2}} └" + "─" * columns)
    lines.append(" " * margin + _time_labels(trace.end, columns))
    return "\n".join(lines)


def _time_labels(end: float, columns: int) -> str:
    """Round times, each below its column, and the unit at the right end."""
    per, unit = _unit(end)
    step = _round_step(end / per / max(columns / 9, 2))
    line = [" "] * columns
    for value in np.arange(0, end / per, step):
        text = f"{value:g}"
        at = int(value * per / end * columns)
        if at + len(text) < columns - len(unit):
            line[at : at + len(text)] = text
    line[columns - len(unit) :] = unit
    return "".join(line)


def _unit(end: float) -> tuple[float, str]:
    return (1.0, "s") if end < 300 else (60.0, "min") if end < 5 * 3600 else (3600.0, "h")


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 3, 5, 10, 20, 30, 50, ... (times any power of ten) that is not below `least`."""
    power = 10.0 ** np.floor(np.log10(least))
    return float(next(power * factor for factor in (1, 2, 3, 5, 10) if power * factor >= least * (1 - 1e-9)))


def figure(trace: Trace, path: Path | str) -> None:
    """Draw the trace into an SVG, PNG or PDF file; the suffix decides. It is written completely or not at all."""
    path = Path(path)
    file_format(path)  # before anything is drawn
    from matplotlib.figure import Figure  # takes half a second, and most commands draw nothing

    per, unit = _unit(trace.end)
    times, counts = np.append(trace.times, trace.end) / per, np.append(trace.workers, trace.workers[-1])
    with drawing_style():
        drawing = Figure(figsize=(6.4, 2.4), layout="constrained")
        axes = drawing.add_subplot()
        axes.fill_between(times, counts, step="post", alpha=0.25, linewidth=0, color=PALETTE[0])
        axes.step(times, counts, where="post", linewidth=1.2, color=PALETTE[0])
        axes.set(xlabel=f"time ({unit})", ylabel="workers", title=trace.name, xlim=(0, times[-1]), ylim=(0, None))
    write_figure(drawing, path)
