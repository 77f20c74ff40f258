"""What `ebbflow train` shows while it trains: a progress bar on a terminal, and a plain line now and then elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Column

from ebbflow.cli.common import err, text_column
from ebbflow.record import StepRow, ValidationRow

__all__ = ["TrainProgress", "number_text", "values_that_fit"]

_BAR = 10
"""The bar is not made shorter than this by what stands before it."""
_FIRST_LINE_S, _LINE_EVERY_S = 5.0, 60.0


def number_text(value: float | None, digits: int) -> str:
    """A number with so many decimals, or, if that would be a row of digits, in the exponential form.

    >>> number_text(0.5, 3), number_text(1e300, 3), number_text(None, 3)
    ('0.500', '1.000e+300', 'nan')
    """
    if value is None:
        return "nan"
    return f"{value:.{digits}f}" if abs(value) < 1e9 else f"{value:.{digits}e}"


def values_that_fit(shown: Mapping[str, str], room: int) -> str:
    """The values with their names, as many as fit: the loss and the first score before the workers and other scores.

    >>> shown = {"workers": "400", "loss": "0.620", "accuracy": "0.9123", "ema_accuracy": "0.9200"}
    >>> values_that_fit(shown, 80)
    'workers 400  loss 0.620  accuracy 0.9123  ema_accuracy 0.9200'
    >>> values_that_fit(shown, 31)
    'loss 0.620  accuracy 0.9123'
    """
    first, *others = [name for name in shown if name not in ("workers", "loss")] or [""]
    chosen: set[str] = set()
    text = ""
    for name in ("loss", first, "workers", *others):
        parts = [f"{key} {value}" for key, value in shown.items() if key in {*chosen, name}]
        if len("  ".join(parts)) <= room:
            chosen.add(name)
            text = "  ".join(parts)
    return text


class TrainProgress:
    """Shows a run on standard error while it trains; its methods are those of `Callbacks`."""

    def __init__(self, folder: Path, *, silent: bool, quiet: bool) -> None:
        """`silent`: show nothing at all; `quiet`: no lines, only the bar of a terminal."""
        self.trains = False
        """Whether the run has begun to train: its data are read, and its folder is there."""
        terminal = err.is_terminal and not err.is_dumb_terminal  # a dumb one cannot draw a line again
        self._folder = folder
        self._tells = not (silent or quiet)
        self._lines = self._tells and not terminal
        kept = Column(no_wrap=True)  # the bar becomes shorter, and not what follows it
        self._bar = Progress(
            text_column("{task.description}"), BarColumn(), MofNCompleteColumn(table_column=kept),
            text_column("samples"), TimeRemainingColumn(table_column=kept),
            console=err, transient=True, disable=silent or not terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("preparing", total=None)
        self._shown: dict[str, str] = {}
        self._total = 0
        self._told_at, self._pause = time.monotonic(), _FIRST_LINE_S

    def __enter__(self) -> Self:
        # By default rich closes the standard output, too, and ends the process.
        setattr(err, "on_broken_pipe", self._nobody_reads)  # noqa: B010
        self._bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, trace)
        delattr(err, "on_broken_pipe")

    def _nobody_reads(self) -> None:
        err.quiet = True

    def _say(self, text: str) -> None:
        """Print a line. A run does not end because nobody reads it any longer, or the disk is full."""
        with contextlib.suppress(OSError):
            err.print(text, soft_wrap=True)

    def on_resume(self, step: int, epoch: float) -> None:
        """Say that a run goes on."""
        if self._tells:
            self._say(f"{self._folder} holds this run: it goes on after step {step:,}, epoch {epoch:.4g}")

    def on_start(self, done: int, total: int) -> None:
        """Begin to count."""
        self.trains, self._total = True, total
        self._told_at = time.monotonic()
        self._bar.update(self._task, total=total, completed=done)

    def on_step(self, row: StepRow) -> None:
        """Show a step; as a line if one is due."""
        self._shown["workers"] = f"{row.workers:3d}"
        self._shown["loss"] = number_text(row.loss, 3)
        self._describe()
        self._bar.update(self._task, completed=row.samples)
        now = time.monotonic()
        if self._lines and now - self._told_at >= self._pause:
            self._told_at, self._pause = now, min(2 * self._pause, _LINE_EVERY_S)  # a run of days is not to fill a file
            values = "  ".join(f"{name} {value.strip()}" for name, value in self._shown.items())
            share = f"{row.samples / self._total:.0%} of the samples" if self._total else f"{row.samples:,} samples"
            clock = time.strftime("%H:%M:%S")
            self._say(f"{clock} step {row.step + 1}  epoch {row.epoch}  {share}  {values}")

    def on_validation(self, row: ValidationRow) -> None:
        """Show the scores from here on."""
        for name, value in row.metrics.items():
            if name != "loss":
                self._shown[name] = number_text(value, 4)
        self._describe()

    def _describe(self) -> None:
        follows = len(f"  {self._total}/{self._total} samples 0:00:00 ") + _BAR
        self._bar.update(self._task, description=values_that_fit(self._shown, err.width - follows))
