"""Requests to stop: Ctrl-C, or SIGTERM, which a cloud sends before it takes a machine away."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from time import monotonic
from types import FrameType
from typing import Any, Self

__all__ = ["StopSignal"]

_REPEATS_S = {signal.SIGTERM: 2.0, signal.SIGINT: 0.1, signal.SIGHUP: math.inf}
"""For how long after the first signal another one is taken for its repetition.

A scheduler that signals every process of a job and a launcher that passes on what it gets give two within
milliseconds, and so does Ctrl-C in a terminal if a parent in the same process group passes it on. Nobody presses Ctrl-C
twice within a tenth of a second. When a terminal is closed, both the shell and the system may say so."""


class StopSignal:
    """Notes the first signal, so that the work can end between two steps; a second one interrupts at once.

    A SIGTERM within two seconds after the first signal, or a SIGINT within a tenth of a second, is the same request
    once more and not a second one: schedulers and launchers pass signals on. A SIGHUP never interrupts.

    with StopSignal() as stop:
        while not stop.requested:
            one_step()
    """

    def __init__(self, *signals: signal.Signals) -> None:
        self.signals = signals or (signal.SIGINT, signal.SIGTERM)
        self.requested = False
        self._signalled_at: float | None = None
        self._before: dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None] = {}

    def _note(self, signum: int, frame: FrameType | None) -> None:
        now = monotonic()
        if self._signalled_at is None:
            self._signalled_at, self.requested = now, True
        elif now - self._signalled_at > _REPEATS_S.get(signal.Signals(signum), 0.0):
            raise KeyboardInterrupt

    def request(self) -> None:
        """Ask to stop without a signal; from any thread. The first signal after it does not interrupt."""
        self.requested = True

    def __enter__(self) -> Self:
        for number in self.signals:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
