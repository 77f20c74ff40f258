"""What every engine does with one micro-batch of a step: fetch its samples, seed it, compute in a precision."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Fetch", "Loss", "Precision", "autocast", "generators", "micro_batch_seed"]

Fetch = Callable[[npt.NDArray[np.int64]], tuple[torch.Tensor, torch.Tensor]]
"""Inputs and targets of the samples with these indices, on the model's device."""
Loss = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
"""Mean loss of the model over inputs and targets."""
Precision = Literal["fp32", "bf16", "fp16"]
"""What forward and backward passes compute in; weights, gradients and statistics are in the model's own type."""

_TYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

_MASK = (1 << 64) - 1


def micro_batch_seed(seed: int, epoch: int, start: int) -> int:
    """The seed of dropout and augmentation for the micro-batch that starts at a position of an epoch.

    A function of the position alone (a splitmix64 mix of the three numbers): a resumed run, or one in which a step
    was lost and repeated, draws what an undisturbed run draws.
    """
    value = 0
    for part in (seed, epoch, start):
        value = (value + part + 0x9E3779B97F4A7C15) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        value ^= value >> 31
    return value >> 1  # torch takes seeds below 2**63 on every platform


def generators(model: torch.nn.Module) -> list[torch.Generator]:
    """The generators that dropout and augmentation draw from: the CPU's, and those of the GPUs the model is on.

    Not `torch.manual_seed`, which without a GPU formats and keeps a stack trace for every call (2.13).
    """
    gpus = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    return [torch.default_generator, *(torch.cuda.default_generators[gpu.index or 0] for gpu in gpus)]


def autocast(precision: Precision, device_type: str) -> AbstractContextManager[object]:
    """The model computes in the precision inside."""
    dtype = _TYPES[precision]
    return nullcontext() if dtype is None else torch.autocast(device_type, dtype=dtype)
