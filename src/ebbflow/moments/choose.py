"""Which of the three meters suits a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ebbflow.moments.flat import FlatSums
from ebbflow.moments.measure import Meter
from ebbflow.moments.sums import Sums

__all__ = ["AnyMeter", "meter_for"]

AnyMeter = Meter | Sums | FlatSums
"""They share `on`, `close_micro_batch`, `finish`, `take`, `check` and `discard`."""


def meter_for(parameters: Sequence[torch.nn.Parameter], *, layers: bool) -> AnyMeter:
    """The cheapest meter for a loop that owns its gradients.

    A hook for each tensor costs more than the arithmetic on a GPU, and in small models; in large ones on a CPU it
    comes at the only moment at which a gradient is in the cache.
    """
    if FlatSums.suits(parameters):
        return FlatSums(parameters, layers=layers)
    if any(parameter.device.type != "cpu" for parameter in parameters):
        return Sums(parameters, layers=layers)
    return Meter(parameters, layers=layers)
