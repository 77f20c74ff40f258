"""Moving averages of weights and of batch-norm statistics, with a memory that is counted in samples.

An average that is multiplied by rho per reference step is multiplied by rho^S in a step of S = B/B0 reference batches
(Busbridge et al. 2023, arXiv 2307.13813), so that it does not depend on the history of workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from ebbflow.engines.kept_buffers import KeptBuffers
from ebbflow.errors import ConfigError
from ebbflow.torch_api import BatchNorm, foreach_lerp_

__all__ = ["RunningStatistics", "WeightAverage", "averaging_dtype"]

WINDOW = 1000
"""Smallest number of samples over which batch-norm statistics should be averaged."""


def averaging_dtype(weight: torch.Tensor) -> torch.dtype:
    """The type in which an average of a weight is kept: float32 for those that have fewer bits.

    In bfloat16 the thousandth part of a difference that is added to a number of the same size is rounded away.
    """
    return torch.float32 if weight.is_floating_point() and weight.element_size() < 4 else weight.dtype


class WeightAverage:
    """The moving average of a model's weights: a <- rho^S a + (1 - rho^S) w after each step.

    It begins with the initial weights, as in the paper. It is kept in float32 where the weights have fewer bits, and
    rounded where it is put into the model. Integers among the parameters are copied. Buffers are not averaged, since
    batch-norm statistics are averages already.
    """

    def __init__(self, model: torch.nn.Module, rho: float) -> None:
        if not 0 < rho < 1:
            raise ConfigError(f"ema is {rho:g}; expected the part kept in a reference step, such as 0.999")
        self.rho = rho
        self._weights = dict(model.named_parameters())
        self._average = {
            name: weight.detach().to(averaging_dtype(weight), copy=True) for name, weight in self._weights.items()
        }

    @torch.no_grad()
    def update(self, ratio: float) -> None:
        """Add the weights after a step of `ratio` reference batches."""
        part = 1 - self.rho**ratio
        alike: list[str] = []
        for name, average in self._average.items():
            weight = self._weights[name]
            if not (weight.is_floating_point() or weight.is_complex()):
                average.copy_(weight)
            elif weight.dtype != average.dtype:
                average.lerp_(weight.to(average.dtype), part)  # one by one: a copy of a weight, not of all
            else:
                alike.append(name)
        if alike:
            foreach_lerp_([self._average[name] for name in alike], [self._weights[name] for name in alike], part)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """A context in which the model has the averaged weights."""
        own = {name: weight.detach().clone() for name, weight in self._weights.items()}
        self._write(self._average)
        try:
            yield
        finally:
            self._write(own)

    @torch.no_grad()
    def _write(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, weight in self._weights.items():
            weight.copy_(values[name])

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The averaged weights, by name, in the types in which they are kept."""
        return dict(self._average)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore what `state_dict` returned."""
        for name, average in self._average.items():
            average.copy_(state[name])


class RunningStatistics:
    """The batch-norm statistics and other buffers of a model, over steps of any size, some of which may be skipped.

    With `follow`, torch's momentum p (the weight of the new value) becomes 1 - (1 - p)^S for a step of S reference
    batches. If that would average over fewer than about 1000 samples, it is limited to B/1000, or to p if that is
    larger. Layers with a momentum of None, which weigh all steps equally, are not changed. The momentum is restored
    after each step. With `undoable`, all buffers of before a step are kept, so that `undo` can restore them.
    """

    def __init__(self, model: torch.nn.Module, *, follow: bool, undoable: bool) -> None:
        layers = [m for m in model.modules() if isinstance(m, BatchNorm) and m.running_mean is not None]
        self._followed = [(m, m.momentum) for m in layers if follow and m.momentum is not None]
        self._buffers = KeptBuffers(model, batch_norm=True) if undoable else None

    @contextmanager
    def step(self, batch: int, ref_batch: int) -> Iterator[None]:
        """A context in which a step is computed and committed; `undo` is possible until the next step."""
        if self._buffers is not None:
            self._buffers.begin()
        for layer, momentum in self._followed:
            layer.momentum = _momentum(momentum, batch, ref_batch)
        try:
            yield
        finally:
            for layer, momentum in self._followed:
                layer.momentum = momentum

    def undo(self) -> None:
        """Restore the buffers of before the latest step, which was skipped; its activations may not be finite."""
        if self._buffers is not None:
            self._buffers.rollback()


def _momentum(p: float, batch: int, ref_batch: int) -> float:
    """The weight of the new value in a step of `batch` samples.

    >>> _momentum(0.1, 32, 32), round(_momentum(0.1, 2048, 1024), 6), _momentum(0.1, 512, 32)
    (0.1, 0.19, 0.512)
    """
    if batch == ref_batch:
        return p
    return float(min(1 - (1 - p) ** (batch / ref_batch), max(p, batch / WINDOW)))
