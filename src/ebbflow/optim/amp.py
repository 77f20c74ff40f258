"""What a GradScaler sees of a step that was accumulated from micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["CompleteStep"]


class CompleteStep:
    """Looks like an optimizer to a GradScaler, which unscales the gradients and calls `step` if all are finite.

    So nothing but the scaler's public behaviour is relied on: the scale grows after steps and not after micro-batches,
    and an infinite gradient lowers it once."""

    def __init__(self, groups: list[dict[str, Any]], update: Callable[[], None]) -> None:
        self.param_groups = groups
        self._update = update
        self._called = False

    def step(self) -> None:
        """Called by the scaler, after it has unscaled the gradients."""
        self._called = True
        self._update()

    def run(self, scaler: torch.amp.GradScaler) -> bool:
        """Step and adjust the scale; False if the step was skipped."""
        scaler.step(self)  # type: ignore[arg-type]
        scaler.update()
        return self._called
