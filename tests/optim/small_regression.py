"""A small regression in double precision, for the tests of the optimizer."""

from __future__ import annotations

import torch
from torch import nn

SAMPLES = 109  # prime; in steps of 24 a tail of 109 - 4 * 24 = 13 samples, in uneven micro-batches of 7 and 6


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return x, torch.randn(SAMPLES, 1, generator=generator, dtype=torch.float64)


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def weights(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])
