"""Batch norm of many workers in one forward pass: each group of samples is normalised with its own statistics.

This is the arithmetic of ghost batch norm (Hoffer et al. 2017, arXiv 1705.08741), used for what a fleet computes: a
group is one micro-batch of one worker."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.nn.functional as F
from torch.nn import SyncBatchNorm

from ebbflow.core.wording import called
from ebbflow.errors import ConfigError
from ebbflow.torch_api import (
    BatchNorm,
    check_input_dimensions,
    foreach_add_,
    foreach_copy_,
    foreach_lerp_,
    foreach_zero_,
)

__all__ = ["BatchNormMode", "GroupedBatchNorm", "unfusable"]

BatchNormMode = Literal["local", "sync", "frozen"]
"""Statistics of one worker's samples, of the whole step, or the running statistics, which then stay as they are."""


def unfusable(model: torch.nn.Module) -> str:
    """Why the workers of this model cannot share a forward pass; empty if they can."""
    for name, module in model.named_modules():
        if not isinstance(module, BatchNorm):
            continue
        if "forward" in vars(module) or type(module).forward not in (BatchNorm.forward, SyncBatchNorm.forward):
            return f"the layer {name or 'itself'} is a {type(module).__name__}, a batch norm with a forward of its own"
    return ""


def _depends_on_first_only(x: torch.Tensor, inputs: torch.Tensor, groups: int) -> bool:
    """Whether the first of `groups` equal parts of the rows depends on the first part of the inputs alone.

    False where that cannot be seen, because the inputs have no gradient, such as token numbers.
    """
    if not (inputs.requires_grad and x.requires_grad):
        return False
    rows = x[: len(x) // groups]
    # Each row has its own weight: a plain sum over what another batch norm has normalised is constant.
    weights = torch.linspace(1, 2, rows.numel(), dtype=rows.dtype, device=rows.device).view(rows.shape)
    (slope,) = torch.autograd.grad((rows * weights).sum(), inputs, retain_graph=True, allow_unused=True)
    return slope is not None and not bool(slope[len(inputs) // groups :].any())


class _GroupedLayer:
    """Replaces the forward pass of one layer while a step is computed."""

    def __init__(self, module: BatchNorm, shared: GroupedBatchNorm) -> None:
        self.module = module
        self.shared = shared
        # Mean over the groups in the latest call, which is the last one in a pass: what a worker's buffers would hold.
        self.mean = self.var = None
        if self.tracked:
            self.mean, self.var = (torch.zeros_like(buffer) for buffer in self.buffers)

    @property
    def tracked(self) -> bool:
        """Whether the layer keeps running statistics."""
        return self.module.running_mean is not None

    @property
    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The running mean and the running variance."""
        assert self.module.running_mean is not None and self.module.running_var is not None
        return self.module.running_mean, self.module.running_var

    @property
    def count(self) -> torch.Tensor:
        """Number of steps that the running statistics contain."""
        assert self.module.num_batches_tracked is not None
        return self.module.num_batches_tracked

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As in torch, but with the statistics of each group for its samples."""
        module, groups = self.module, self.shared.groups
        if not module.training:
            return type(module).forward(module, input)
        check_input_dimensions(module, input)
        if torch.compiler.is_compiling():
            return self._decomposed(input, groups)
        if groups == 1:
            return F.batch_norm(input, self.mean, self.var, module.weight, module.bias, True, 1.0, module.eps)
        self._check_rows(input, groups)
        return self._groups_as_channels(input, groups)

    def _check_rows(self, x: torch.Tensor, groups: int) -> None:
        """Refuse rows that cannot be attributed to workers: too few or too many of them, or in another order.

        A layer may get several rows per sample; those of one sample have to follow each other. In the checking pass
        this is seen from what the first worker's rows depend on."""
        traced = self.shared.traced_inputs
        if len(x) % groups == 0 and (
            traced is None or len(x) == len(traced) or _depends_on_first_only(x, traced, groups)
        ):
            return
        raise ConfigError(
            f"a {type(self.module).__name__} got {len(x)} rows of {groups} workers and cannot tell them apart: workers "
            f"cannot be fused where a forward pass drops or adds samples, or has rows in another order than the "
            f"samples; use the loop ({called('engine', 'loop')})"
        )

    def _groups_as_channels(self, x: torch.Tensor, groups: int) -> torch.Tensor:
        """One call of torch's batch norm with the groups as channels: two copies, but one kernel in each direction."""
        module, (samples, channels, *rest) = self.module, x.shape
        wide = x.reshape(groups, samples // groups, channels, *rest).transpose(0, 1)
        wide = wide.reshape(samples // groups, groups * channels, *rest)
        weight, bias = (p.repeat(groups) if p is not None else None for p in (module.weight, module.bias))
        mean, var = (s.new_zeros(groups * channels) if s is not None else None for s in (self.mean, self.var))
        out = F.batch_norm(wide, mean, var, weight, bias, True, 1.0, module.eps)
        if self.mean is not None and self.var is not None and mean is not None and var is not None:
            torch.mean(mean.view(groups, channels), 0, out=self.mean)
            torch.mean(var.view(groups, channels), 0, out=self.var)
        return out.view(samples // groups, groups, channels, *rest).transpose(0, 1).reshape(x.shape)

    def _decomposed(self, x: torch.Tensor, groups: int) -> torch.Tensor:
        """Plain arithmetic, which a compiler fuses with the operations before and after it.

        Sums run over the positions of a sample first, then over the samples of a group, forward and (by the `expand`)
        backward: the large sums then have one result per sample and channel, enough of them to fill a GPU. The running
        mean is subtracted before squares are added up, so that a variance much smaller than the squared mean is not
        lost in rounding errors.
        """
        module, (samples, channels, *rest) = self.module, x.shape
        places = [*range(2, x.dim())]
        ones = [1] * len(places)
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        if module.running_mean is not None:
            wide = wide - module.running_mean.view(channels, *ones)

        def mean(values: torch.Tensor) -> torch.Tensor:
            values = values.mean(places) if places else values
            return values.view(groups, samples // groups, channels).mean(1)

        def for_each_sample(values: torch.Tensor) -> torch.Tensor:
            expanded = values[:, None].expand(groups, samples // groups, channels)
            return expanded.reshape(samples, channels, *ones)

        first, second = mean(wide), mean(wide.square())
        var = (second - first.square()).clamp_min(0)
        scale = torch.rsqrt(var + module.eps)
        if module.weight is not None:
            scale = scale * module.weight
        offset = -first * scale
        if module.bias is not None:
            offset = offset + module.bias
        if self.mean is not None and self.var is not None and module.running_mean is not None:
            count = samples // groups * math.prod(rest)
            self.mean.copy_(first.detach().mean(0) + module.running_mean)
            self.var.copy_(var.detach().mean(0) * (count / (count - 1)))
        return (wide * for_each_sample(scale) + for_each_sample(offset)).to(x.dtype)


class GroupedBatchNorm:
    """Batch norm of a fused step; the model is changed only inside `installed`.

    When the step commits, the running statistics are blended once with the sample-weighted mean over the workers, as
    `LocalBatchNorm` of the reference does. Until then nothing of the model is written. A layer that is called several
    times in one forward pass counts with its last call. Never waits for the device.
    """

    def __init__(self, model: torch.nn.Module, mode: BatchNormMode) -> None:
        self.mode = mode
        self.groups = 1
        """Number of equal groups in the current forward pass."""
        self.traced_inputs: torch.Tensor | None = None
        """Inputs of the current forward pass, if it is to show whether rows can be attributed to workers."""
        if reason := unfusable(model):
            raise ConfigError(f"{reason}: workers cannot be fused; use the loop ({called('engine', 'loop')})")
        self.layers = [_GroupedLayer(module, self) for module in model.modules() if isinstance(module, BatchNorm)]
        self._tracked = [layer for layer in self.layers if layer.tracked]
        if mode == "frozen" and len(self._tracked) < len(self.layers):
            raise ConfigError(
                "batch norm cannot be frozen: a layer keeps no running statistics (track_running_stats=False)"
            )
        self._latest = [t for layer in self._tracked for t in (layer.mean, layer.var) if t is not None]
        self._sums = [torch.zeros_like(tensor) for tensor in self._latest]

    @property
    def sums(self) -> list[torch.Tensor]:
        """Mean and variance of each layer, summed over the passes so far; the same tensors in every step."""
        return self._sums

    def begin(self) -> None:
        """Forget what an earlier attempt at the step collected."""
        if self.mode == "frozen":
            for layer in self.layers:
                layer.module.eval()
        if self._tracked:
            foreach_zero_(self._sums)
            running = [buffer for layer in self._tracked for buffer in layer.buffers]
            foreach_copy_(self._latest, running)  # for a layer that is not called in this step

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The layers of the model normalise by groups inside this context."""
        for layer in self.layers:
            layer.module.forward = layer.forward  # type: ignore[method-assign]
        try:
            yield
        finally:
            for layer in self.layers:
                del layer.module.forward

    def collect(self, weight: float) -> None:
        """Add the statistics of the latest forward pass; `weight` is its part of the step's samples."""
        if self._tracked:
            foreach_add_(self._sums, self._latest, alpha=weight)

    @torch.no_grad()
    def commit(self) -> None:
        """Blend the mean over the workers into the running statistics, as one update."""
        moved: dict[float | None, list[tuple[_GroupedLayer, tuple[torch.Tensor, torch.Tensor]]]] = {}
        for layer, mean, var in zip(self._tracked, self._sums[::2], self._sums[1::2], strict=True):
            if layer.module.training:
                moved.setdefault(layer.module.momentum, []).append((layer, (mean, var)))
        for momentum, entries in moved.items():
            counts = [layer.count for layer, _ in entries]
            foreach_add_(counts, 1)
            running = [buffer for layer, _ in entries for buffer in layer.buffers]
            new = [tensor for _, pair in entries for tensor in pair]
            if momentum is not None:
                foreach_lerp_(running, new, momentum)
                continue
            # The mean of all steps, whose number only the device knows.
            for buffer, tensor, count in zip(running, new, (c for c in counts for _ in range(2)), strict=True):
                buffer.lerp_(tensor, 1 / count.to(tensor.dtype))

    def rollback(self) -> None:
        """Do nothing: the model's buffers were not written."""
