"""The default module of an estimator, and the loss of a module's output."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from ebbflow.engines.loss_sum import LossSum
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
    """The loss of a model over inputs and targets. Can be pickled, so that workers of a cluster compute it, too.

    It is the mean of the criterion. Torch's cross-entropy and negative log likelihood of classes divide by the weights
    of the targets that are not ignored, and parts of a step differ in them: such a loss is given to the engine as a sum
    with its count.

    If a module returns several values, the first one counts. Negative log likelihood gets the logarithm of the module's
    output, as in skorch. Where the module returns one column and the targets of a regression have no such dimension,
    the column is removed: torch would otherwise compare every target with every output."""

    criterion: nn.Module

    def __call__(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor | LossSum:
        """Forward pass and loss of a part of a step."""
        return self.in_step(model(inputs), targets)

    def in_step(self, output: Tensor | tuple[Tensor, ...], targets: Tensor) -> Tensor | LossSum:
        """The loss of an output that is a part of a step: the mean over its samples, or a sum with its count."""
        criterion = getattr(self.criterion, "_orig_mod", self.criterion)  # what torch.compile was given
        if not _divides_by_weights(criterion, targets):
            return self.of(output, targets)
        comparable, weight, ignored = self._comparable(output, targets), criterion.weight, criterion.ignore_index
        if isinstance(criterion, nn.NLLLoss):
            total = functional.nll_loss(comparable, targets, weight, ignore_index=ignored, reduction="sum")
        else:
            total = functional.cross_entropy(
                comparable,
                targets,
                weight,
                ignore_index=ignored,
                reduction="sum",
                label_smoothing=criterion.label_smoothing,
            )
        return LossSum(total, _sum_of_weights(criterion, targets))

    def of(self, output: Tensor | tuple[Tensor, ...], targets: Tensor) -> Tensor:
        """The mean loss of an output, as the criterion computes it."""
        loss: Tensor = self.criterion(self._comparable(output, targets), targets)
        return loss

    def _comparable(self, output: Tensor | tuple[Tensor, ...], targets: Tensor) -> Tensor:
        """What the criterion compares with the targets."""
        if isinstance(output, tuple):
            output = output[0]
        if isinstance(self.criterion, nn.NLLLoss):
            output = torch.log(output + torch.finfo(output.dtype).eps)
        if targets.is_floating_point() and targets.dim() == 1 and output.dim() == 2 and output.shape[1] == 1:
            output = output.squeeze(1)
        return output


def _divides_by_weights(criterion: nn.Module, targets: Tensor) -> TypeGuard[nn.CrossEntropyLoss | nn.NLLLoss]:
    """Whether the criterion divides by the weights of the targets that are not ignored.

    Torch's losses of classes do, unless the targets are probabilities: of these torch takes the mean over the samples,
    also with weights of the classes. A subclass with a forward pass of its own may divide by anything else.
    """
    by_weights = type(criterion).forward in (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)
    return by_weights and criterion.reduction == "mean" and not targets.is_floating_point()


def _sum_of_weights(criterion: nn.CrossEntropyLoss | nn.NLLLoss, targets: Tensor) -> Tensor:
    """The number of targets that are not ignored, or the sum of the weights of their classes."""
    ignored = torch.eq(targets, criterion.ignore_index)
    if criterion.weight is None:
        return ignored.numel() - ignored.sum()
    classes = targets.masked_fill(ignored, 0)  # the index that is ignored need not be that of a class
    return criterion.weight[classes].masked_fill(ignored, 0).sum()
