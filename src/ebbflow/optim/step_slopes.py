"""How steep the loss is along a step: where the step began, and where it ended, which the next gradient shows.

If the slope at the end is nearly that of the beginning, a longer step would have gained more; if it has changed its
sign, the step went beyond the lowest point on its way. No backward pass is needed for it: every gradient is also the
gradient at the end of the step before it, and of other samples, so that its noise has nothing to do with that step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ebbflow.moments.meters import as_real
from ebbflow.torch_api import foreach_add_, foreach_copy_, foreach_mul_

__all__ = ["StepSlopes"]


class StepSlopes:
    """Measures the slopes along the steps of an optimizer, from the gradients and weights in this process.

    It holds one copy of the weights: the latest step. Sums are taken in double precision, so that processes with the
    same gradients and weights find the same slopes even if their sums are ordered differently.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = parameters
        self._step: list[torch.Tensor] | None = None
        self._slope = 0.0

    @property
    def available(self) -> bool:
        """Whether gradients are here, and whole: not with replicas elsewhere, and not a shard of them."""
        whole = not any(hasattr(parameter, "to_local") for parameter in self.parameters)
        return whole and any(parameter.grad is not None for parameter in self.parameters)

    def measure(self) -> tuple[float, float] | None:
        """The slopes along the latest step, where it began and where it ended; `.grad` is the gradient at its end.

        None before the first step, and where no gradient is available.
        """
        if self._step is None or not self.available:
            return None
        return self._slope, self._along(self._step)

    def begin(self) -> None:
        """Called before a step is applied."""
        if not self.available:
            self.forget()
            return
        weights = [parameter.detach() for parameter in self.parameters]
        if self._step is None:
            self._step = [torch.empty_like(weight) for weight in weights]
        foreach_copy_(self._step, weights)

    def end(self, *, clipped: float = 1.0) -> None:
        """Called after it was applied, with gradients that were multiplied by `clipped` before."""
        if self._step is None:
            return
        foreach_mul_(self._step, -1.0)
        foreach_add_(self._step, [parameter.detach() for parameter in self.parameters])
        self._slope = self._along(self._step) / clipped

    def forget(self) -> None:
        """Go on as before the first step."""
        self._step, self._slope = None, 0.0

    def _along(self, step: list[torch.Tensor]) -> float:
        """The product of the gradient and a step."""
        products = [
            torch.sum(_single(as_real(parameter.grad)) * as_real(part), dtype=torch.float64)
            for parameter, part in zip(self.parameters, step, strict=True)
            if parameter.grad is not None
        ]
        if len({product.device for product in products}) > 1:
            products = [product.cpu() for product in products]
        return float(torch.stack(products).sum())  # one synchronisation with the device

    def state_dict(self) -> dict[str, Any] | None:
        """The latest step, and the slope where it began."""
        return None if self._step is None else {"step": list(self._step), "slope": self._slope}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore what `state_dict` returned."""
        self.forget()
        if state is not None:
            pairs = zip(state["step"], self.parameters, strict=True)
            self._step = [part.to(parameter.device, copy=True) for part, parameter in pairs]
            self._slope = float(state["slope"])


def _single(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient in single precision or better."""
    return gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
