"""Losses that are divided by something else than the number of samples: matched boxes, valid pixels, tokens.

A micro-batch cannot divide by that number itself: one with few boxes would weigh as much as one with many, and the
gradient would depend on how the step is shared. It returns the sum and the count, and the step divides once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ebbflow.engines.base import Gradients
from ebbflow.errors import ConfigError
from ebbflow.moments.estimate import Measurement
from ebbflow.torch_api import foreach_mul_

__all__ = ["LossSum", "check_differentiable", "check_scalar", "loss_of", "mean_over_samples", "normalise", "rescaled"]

_ONE_VALUE = "Expected more than 1 value per channel when training"  # how the message of torch's batch norm begins


class LossSum(NamedTuple):
    """The loss of a micro-batch as a sum, and the number of what it sums over.

    Loss and gradient of a step are the sum of all totals divided by the sum of all counts, however the step is cut into
    micro-batches and shared by workers. A step that counts nothing is divided by 1: its total should be 0.
    """

    total: torch.Tensor
    """One number with a gradient."""
    count: torch.Tensor | float  # type: ignore[assignment]  # no LossSum is searched as a tuple
    """Boxes, pixels, tokens: 0 or more, and not a function of the weights."""


def loss_of(
    loss: Callable[[torch.nn.Module, Any, Any], torch.Tensor | LossSum],
    model: torch.nn.Module,
    inputs: Any,
    targets: Any,
) -> torch.Tensor | LossSum:
    """Return the loss of a micro-batch; one that is too small for a batch norm raises ConfigError, which says so."""
    try:
        return loss(model, inputs, targets)
    except ValueError as error:
        if not str(error).startswith(_ONE_VALUE):
            raise
        shape = f", and inputs have the shape {tuple(inputs.shape)}" if isinstance(inputs, torch.Tensor) else ""
        raise ConfigError(
            f"a batch norm gets a single value per channel, which has no variance ({error}{shape}); expected two or "
            f"more: use a larger local_batch, or micro_batch if it is given, or larger inputs"
        ) from error


def check_scalar(loss: object) -> None:
    """Refuse a loss that is not one number, or not a sum with one count."""
    if isinstance(loss, LossSum):
        count = loss.count
        if isinstance(count, torch.Tensor) and count.numel() != 1:
            raise ConfigError(f"the count of the loss has the shape {tuple(count.shape)}; expected one number")
        loss = loss.total
    if not isinstance(loss, torch.Tensor):
        raise ConfigError(f"the loss is of type {type(loss).__name__}; expected a tensor with one number, or a LossSum")
    if loss.numel() != 1:
        raise ConfigError(
            f"the loss has the shape {tuple(loss.shape)}; expected one number, the mean over the samples of the "
            f"micro-batch: use reduction='mean', or loss.mean()"
        )


def check_differentiable(loss: torch.Tensor) -> None:
    """Refuse a loss from which no gradient can be computed."""
    if loss.is_complex():
        raise ConfigError(
            f"the loss is of type {loss.dtype}; expected a real number: take its real part, or loss.abs()"
        )
    if not loss.requires_grad:
        raise ConfigError(
            f"the loss, of type {loss.dtype}, does not depend on a trained parameter; leave out .detach(), .item(), "
            f"torch.no_grad() and argmax where it is computed, and do not freeze all that it uses"
        )


def mean_over_samples(loss: torch.Tensor | LossSum, samples: int) -> tuple[torch.Tensor, torch.Tensor | float]:
    """The loss per sample of a micro-batch, and its count; of a mean over the samples the count is their number.

    Micro-batches are added up by their samples in either case. The step then multiplies by samples/count, once, which
    is 1 for a mean over the samples (`normalise`). A loss that is not one number is refused.
    """
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss, samples
    check_scalar(loss)
    assert isinstance(loss, LossSum)
    count = loss.count
    return loss.total / samples, count.detach() if isinstance(count, torch.Tensor) else float(count)


def normalise(
    gradients: Gradients, parameters: Iterable[torch.nn.Parameter], *, count: torch.Tensor | float, batch: int
) -> Gradients:
    """Turn the sample-weighted mean of a whole step of `batch` samples into the sum divided by the count.

    Multiplies `.grad` of the parameters in place; loss and measurement are of the same gradient.
    """
    counted = float(count)
    if counted == batch:  # a mean over the samples
        return gradients
    if counted < 0:
        raise ConfigError(f"the counts of the step's losses add up to {counted:g}; expected 0 or more")
    factor = batch / counted if counted != 0 else float(batch)
    foreach_mul_([parameter.grad for parameter in parameters if parameter.grad is not None], factor)
    return rescaled(gradients, factor)


def rescaled(gradients: Gradients, factor: float) -> Gradients:
    """What is known about the gradients of a step, if the loss is multiplied by a factor; `.grad` stays as it is."""
    return replace(
        gradients,
        loss=gradients.loss * factor,
        measurement=_times(gradients.measurement, factor**2) if gradients.measurement is not None else None,
        norm=gradients.norm * factor if gradients.norm is not None else None,
    )


def _times(measured: Measurement, factor: float) -> Measurement:
    return replace(
        measured,
        mean_sq=tuple(square * factor for square in measured.mean_sq),
        sq_mean=tuple(square * factor for square in measured.sq_mean),
    )
