"""Requests to stop: Ctrl-C, or SIGTERM, which a cloud sends before it takes a machine away."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["StopSignal"]


class StopSignal:
    """Notes the first signal, so that the work can end between two steps; a second signal interrupts at once.

    with StopSignal() as stop:
        while not stop.requested:
            one_step()
    """

    def __init__(self, *signals: signal.Signals) -> None:
        self.signals = signals or (signal.SIGINT, signal.SIGTERM)
        self.requested = False
        self._signalled = False
        self._before: dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None] = {}

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self._signalled:
            raise KeyboardInterrupt
        self._signalled = self.requested = True

    def request(self) -> None:
        """Ask to stop without a signal; from any thread. The first signal after it does not interrupt."""
        self.requested = True

    def __enter__(self) -> Self:
        for number in self.signals:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
