"""The default module of an estimator, and the loss of a module's output."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from ebbflow.errors import ConfigError

__all__ = ["DefaultMLP", "ModelLoss"]


class DefaultMLP(nn.Module):
    """Fully connected layers with ReLU between them, sized by the data: the module for `module=None`."""

    def __init__(self, *, features: int, outputs: int, hidden: Iterable[int] = (64,)) -> None:
        """`features` and `outputs` come from the data; `hidden` is set with `module__hidden=(128, 64)`."""
        super().__init__()
        if not isinstance(hidden, Iterable):
            raise ConfigError(
                f"module__hidden is {hidden!r}; expected the sizes of the hidden layers, such as (128, 64)"
            )
        sizes = [features, *hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise(sizes):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))

    def forward(self, x: Tensor) -> Tensor:
        """One row of outputs per sample: logits, or the values of a regression."""
        output: Tensor = self.layers(x)
        return output


@dataclass(frozen=True)
class ModelLoss:
    """The mean loss of a model over inputs and targets. Can be pickled, so that workers of a cluster compute it, too.

    If a module returns several values, the first one counts. Negative log likelihood gets the logarithm of the module's
    output, as in skorch. Where the module returns one column and the targets of a regression have no such dimension,
    the column is removed: torch would otherwise compare every target with every output."""

    criterion: nn.Module

    def __call__(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Forward pass and loss."""
        return self.of(model(inputs), targets)

    def of(self, output: Tensor | tuple[Tensor, ...], targets: Tensor) -> Tensor:
        """The loss of an output that has been computed."""
        if isinstance(output, tuple):
            output = output[0]
        if isinstance(self.criterion, nn.NLLLoss):
            output = torch.log(output + torch.finfo(output.dtype).eps)
        if targets.is_floating_point() and targets.dim() == 1 and output.dim() == 2 and output.shape[1] == 1:
            output = output.squeeze(1)
        loss: Tensor = self.criterion(output, targets)
        return loss
