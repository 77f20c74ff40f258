"""Batch norm as a fleet has it: each worker normalises with its own samples; running statistics move once a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["LocalBatchNorm"]


class LocalBatchNorm:
    """Running statistics of a step = the sample-weighted mean over its micro-batches, applied once, when the step
    commits.

    While a micro-batch runs, the momentum of every layer is 1, so that the layer's buffers hold just this micro-batch's
    statistics; they are collected, and the buffers of before the step are what the mean is blended into. Until
    `commit` nothing is lost: `rollback` restores the buffers. A layer that is called several times in one forward
    pass counts with its last call.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.layers = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
        self._before: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self._sums = [(torch.zeros_like(m.running_mean), torch.zeros_like(m.running_var)) for m in self.layers]  # type: ignore[arg-type]

    @property
    def sums(self) -> list[torch.Tensor]:
        """Mean and variance of each layer, summed over the micro-batches so far; the same tensors in every step."""
        return [tensor for pair in self._sums for tensor in pair]

    def begin(self) -> None:
        """Remember the buffers of before the step."""
        self._before = [
            (layer.running_mean.clone(), layer.running_var.clone(), int(layer.num_batches_tracked))  # type: ignore[union-attr, arg-type]
            for layer in self.layers
        ]
        for tensor in self.sums:
            tensor.zero_()

    @contextmanager
    def micro_batch(self, weight: float) -> Iterator[None]:
        """Run the forward pass of one micro-batch inside; `weight` is its share of the step's samples."""
        momenta = [layer.momentum for layer in self.layers]
        for layer in self.layers:
            layer.momentum = 1.0
        try:
            yield
        finally:
            for layer, momentum in zip(self.layers, momenta, strict=True):
                layer.momentum = momentum
        for layer, (mean, var) in zip(self.layers, self._sums, strict=True):
            if layer.training:
                mean.add_(layer.running_mean, alpha=weight)  # type: ignore[arg-type]
                var.add_(layer.running_var, alpha=weight)  # type: ignore[arg-type]

    def commit(self) -> None:
        """Blend the mean of the micro-batches into the running statistics, as one update."""
        for layer, (old_mean, old_var, count), (mean, var) in zip(self.layers, self._before, self._sums, strict=True):
            if not layer.training:
                continue
            share = layer.momentum if layer.momentum is not None else 1.0 / (count + 1)
            layer.running_mean.copy_(old_mean.lerp_(mean, share))  # type: ignore[union-attr]
            layer.running_var.copy_(old_var.lerp_(var, share))  # type: ignore[union-attr]
            layer.num_batches_tracked.fill_(count + 1)  # type: ignore[union-attr]

    def rollback(self) -> None:
        """Put the buffers of before the step back."""
        for layer, (mean, var, count) in zip(self.layers, self._before, strict=True):
            layer.running_mean.copy_(mean)  # type: ignore[union-attr]
            layer.running_var.copy_(var)  # type: ignore[union-attr]
            layer.num_batches_tracked.fill_(count)  # type: ignore[union-attr]

    def pack(self) -> torch.Tensor:
        """The weighted sums over this process's micro-batches in one row, to be added up over the processes of a
        step."""
        if not self._sums:
            return torch.zeros(0)
        return torch.cat([part.flatten() for pair in self._sums for part in pair])

    def unpack(self, sums: torch.Tensor) -> None:
        """Take what the processes' rows add up to; `commit` then blends in the mean over all of them."""
        parts = iter(sums.split([part.numel() for pair in self._sums for part in pair]))  # type: ignore[no-untyped-call]
        for pair in self._sums:
            for part in pair:
                part.copy_(next(parts))

    @property
    def width(self) -> int:
        """Entries of a packed row."""
        return sum(layer.running_mean.numel() + layer.running_var.numel() for layer in self.layers)  # type: ignore[union-attr, misc]
