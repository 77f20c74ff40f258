"""The noisy quadratic model as a workload: `ebbflow.nqm` gives its expected loss exactly, this samples it.

A finite data set that is visited exactly once an epoch would be drawn *without* replacement, and its mini-batches would
have less noise than the model's. So a sample here is a draw and not a row: each time it is fetched for training, its
noise comes fresh from torch's global generator, which engines seed before every micro-batch. The noise is therefore
independent from sample to sample and from epoch to epoch, and yet the same whenever the run is repeated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from ebbflow.errors import ConfigError
from ebbflow.nqm import NoisyQuadratic
from ebbflow.workloads.sources import Indices
from ebbflow.workloads.workload import Recipe, Task, register_workload

__all__ = ["NoiseSource", "Quadratic", "quadratic", "quadratic_task"]


class Quadratic(nn.Module):
    """1/2 sum h_i w_i^2 + noise . w for each vector of noise: its gradient is h_i w_i + noise_i."""

    half_curvature: Tensor
    """h_i / 2."""

    def __init__(self, model: NoisyQuadratic, start: float = 1.0) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.full((size,), start)) for size in model.layers)
        self.register_buffer("half_curvature", torch.tensor(model.curvature / 2, dtype=torch.float32), persistent=False)

    def forward(self, noise: Tensor) -> Tensor:
        """The loss of each sample."""
        weights = torch.cat(tuple(self.layers))
        return (noise + self.half_curvature * weights) @ weights


@dataclass(frozen=True, eq=False)
class NoiseSource:
    """Vectors of Gaussian noise with the given deviations; no noise unless for training."""

    deviation: Tensor
    samples: int

    def __len__(self) -> int:
        return self.samples

    def batch(self, indices: Indices, *, train: bool) -> tuple[Tensor, Tensor]:
        """Noise, drawn anew at each call when `train`, else zeros; the targets hold nothing."""
        shape = (len(indices), len(self.deviation))
        device = self.deviation.device
        noise = torch.randn(shape, device=device) * self.deviation if train else torch.zeros(shape, device=device)
        return noise, torch.zeros(len(indices), device=device)

    def to(self, device: torch.device) -> Self:
        """The same noise, drawn by the device's own generator."""
        return replace(self, deviation=self.deviation.to(device))


def _mean_loss(model: nn.Module, noise: Tensor, nothing: Tensor) -> Tensor:
    losses: Tensor = model(noise)
    return losses.mean()


def quadratic_task(model: NoisyQuadratic, recipe: Recipe, *, samples: int, start: float = 1.0) -> Task:
    """The task of any such model. Training starts at `start` in every coordinate, whatever the seed.

    Its training loss holds the noise, so it may be negative; the validation loss is exact.
    """
    deviation = torch.tensor(model.noise, dtype=torch.float32).sqrt()
    return Task(
        model=Quadratic(model, start),
        train=NoiseSource(deviation, samples),
        valid=NoiseSource(deviation, 1),
        recipe=recipe,
        loss=_mean_loss,
    )


# The rate is the best of the exact recursion for this recipe at the reference batch: docs/quadratic.md has the command.
# Expected loss at the end, from 2.372 (batch x ... of the reference batch, throughout):
#                        constant    sqrt     linear
#           x  1          0.0078     0.0078   0.0078
#           x  4          0.0853     0.0189   0.0083
#           x 12          0.3974     0.0727   0.0108
# A model for which linear diverges from x 4 on: quadratic(alpha=2, noise=0.1) at lr=1.
@register_workload(
    "quadratic",
    recipe=Recipe(
        ref_batch=8,
        local_batch=8,
        lr=0.03,
        optimizer="sgd(momentum=0.9)",
        schedule="cosine",
        epochs=8,
        metric="loss",
        higher_is_better=False,
    ),
    cite="Zhang et al. 2019, arXiv 1907.04164",
)
def quadratic(
    recipe: Recipe, dim: int = 64, alpha: float = 1.0, noise: float = 1.0, layers: int = 4, samples: int = 1024
) -> Task:
    """The noisy quadratic model, whose expected loss is known exactly."""
    if samples < 1:
        raise ConfigError(f"quadratic: samples is {samples}; expected the size of an epoch, 1 or more")
    model = NoisyQuadratic.power_law(dim=dim, alpha=alpha, noise=noise, layers=layers)
    return quadratic_task(model, recipe, samples=samples)
