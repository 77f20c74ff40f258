"""The gradients of a step under way in a user's own loop: kept outside of `.grad`, watched for changes, unscaled."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ebbflow.optim.apply import scale_gradients
from ebbflow.torch_api import foreach_add_

__all__ = ["OpenGradients", "UnscaledStep", "WatchedGradients"]


@dataclass(slots=True)
class OpenGradients:
    """The gradients that a step under way has taken out of `.grad`."""

    sums: dict[torch.nn.Parameter, torch.Tensor] = field(default_factory=dict)
    """Sum of the micro-batches' gradients, in units of the first one's weight."""
    unit: float = 0.0
    weight: float = 0.0
    """Sum of the weights."""
    samples: int = 0
    rates: list[float] = field(default_factory=list)
    """Learning rates at the first micro-batch."""

    def add(
        self, gradients: dict[torch.nn.Parameter, torch.Tensor], *, factor: float, weight: float, samples: int
    ) -> None:
        """Add a micro-batch of the given weight, whose mean gradient is `factor` times the given one."""
        self.samples += samples
        if not weight:
            return
        self.weight += weight
        if not self.sums:
            self.sums, self.unit = gradients, weight * factor
            return
        share = weight * factor / self.unit
        both = [p for p in gradients if p in self.sums]
        if any(gradients[p].is_sparse or self.sums[p].is_sparse for p in both):
            for p in both:
                self.sums[p] = self.sums[p] + gradients[p] * share
        elif both:
            foreach_add_([self.sums[p] for p in both], [gradients[p] for p in both], alpha=share)
        self.sums |= {p: gradient * share for p, gradient in gradients.items() if p not in self.sums}

    def put_back(self) -> None:
        """Write the mean over the micro-batches into `.grad`."""
        for parameter, gradient in self.sums.items():
            parameter.grad = gradient
        scale_gradients(list(self.sums), self.unit / self.weight)


@dataclass(frozen=True, slots=True)
class _Arrived:
    """A gradient as autograd has written it."""

    gradient: torch.Tensor
    version: int
    """Torch's counter of in-place changes."""
    entries: torch.Tensor | None
    """Copy of the first entries."""

    @classmethod
    def of(cls, gradient: torch.Tensor) -> _Arrived:
        return cls(gradient, gradient._version, None if gradient.is_sparse else _first_entries(gradient).clone())

    def differs(self, gradient: torch.Tensor | None, *, thoroughly: bool) -> bool:
        """Whether `.grad` is something else now; `thoroughly`: even if torch counts no change.

        In-place operations that change nothing are none of our business: transformers' Trainer clips at an infinite
        norm in order to log the norm. A gradient that is not finite is left to `on_nonfinite`.
        """
        if gradient is not self.gradient:
            return True
        if gradient._version == self.version and not thoroughly:  # the usual case, in which no device waits
            return False
        if self.entries is None:
            return True
        entries = _first_entries(gradient)
        return bool(((entries != self.entries) & entries.isfinite()).any())


def _first_entries(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.detach().reshape(-1)[:4096]


class WatchedGradients:
    """Notices that gradients were changed after autograd had written them, in the first and the last tensor."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._seen: dict[torch.nn.Parameter, _Arrived] = {}
        seen = self._seen

        def arrived(parameter: torch.Tensor) -> None:
            assert isinstance(parameter, torch.nn.Parameter) and parameter.grad is not None
            seen[parameter] = _Arrived.of(parameter.grad)

        watched = {id(parameter): parameter for parameter in (*trained[:1], *trained[-1:])}.values()
        handles = [parameter.register_post_accumulate_grad_hook(arrived) for parameter in watched]  # type: ignore[no-untyped-call]
        weakref.finalize(self, _remove_hooks, handles)

    def changed(self, *, thoroughly: bool = False) -> bool:
        """Whether a gradient is not the one that arrived; then the next micro-batch begins."""
        seen = dict(self._seen)
        self.forget()
        return any(arrived.differs(parameter.grad, thoroughly=thoroughly) for parameter, arrived in seen.items())

    def forget(self) -> None:
        """Begin with the next micro-batch, whatever has arrived."""
        self._seen.clear()


def _remove_hooks(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()


class UnscaledStep:
    """Stands in for an optimizer: a GradScaler unscales the gradients of its groups and calls `step` if all are finite.

    This relies on nothing but the public behaviour of a scaler: the scale grows after steps and not after
    micro-batches, and a gradient that is not finite lowers it once.
    """

    def __init__(self, groups: list[dict[str, Any]], update: Callable[[], None]) -> None:
        self.param_groups = groups
        self._update = update
        self._called = False

    def step(self) -> None:
        """Called by the scaler after it has unscaled the gradients."""
        self._called = True
        self._update()

    def run(self, scaler: torch.amp.GradScaler) -> bool:
        """Step and adjust the scale; False if the step was skipped."""
        scaler.step(self)  # type: ignore[arg-type]
        scaler.update()
        return self._called
