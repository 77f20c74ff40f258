"""Squared gradient norms, taken as the gradient is accumulated: the only autograd hooks in Ebbflow.

    meter = Meter(model.parameters(), layers=False)
    for x, y in micro-batches:
        loss_fn(model(x), y).backward()
        meter.close_piece(len(x))
    ...                                        # .grad now holds the mean gradient of the step
    measurement = meter.finish(batch)          # the one host synchronisation of the step

The hooks sit where autograd adds to `.grad`, so they see exactly what is added: the sum over all uses of a shared
parameter, after the user's own tensor hooks, and nothing of `torch.autograd.grad`. On a CPU each gradient is measured
at once, by a `dot` while it is in the cache; a second pass over all gradients costs several times more. On a GPU the
gradients of a micro-batch are kept until it is closed and measured by one fused kernel. Sums are in float32 at least.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ebbflow.errors import ConfigError
from ebbflow.moments.estimate import Measurement
from ebbflow.moments.norms import LOW_PRECISION, at_least_float32, norms, on_arrival, squared_norms

__all__ = ["Meter", "Tally", "check_complete", "check_parameters", "squared_norms"]

_ALWAYS_CHECKED = 16  # steps of which every one is checked; then one in as many


@dataclass(slots=True)
class _Closed:
    """A closed micro-batch."""

    weight: float
    """n_i, where the gradient that arrived is the mean; n_i over its scale otherwise."""
    scale: float
    squares: dict[int, Any]
    """By parameter, |g_i|^2; on a device the norm, as a tensor that nobody waits for."""
    watched: torch.Tensor | None
    """The watched parameter's gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What the micro-batches of a step come to; tensors on the device of the parameters, so that nothing waits for
    them."""

    samples: int
    micro_batches: int
    squares: torch.Tensor
    """Sum of n_i |g_i|^2, one entry a layer, or a single one."""
    mismatch: torch.Tensor
    """Squared relative difference between `.grad` and the mean of the micro-batches, in the watched tensor; one
    entry."""


class Meter:
    """Measures the micro-batches of a step and their mean, for the whole model or for each parameter tensor.

    A *micro-batch* is what arrived between two calls of `close_micro_batch`: the gradient of one backward pass, over
    samples of its own. Layers are the given parameters in the given order; a parameter that gets no gradient counts as
    zero. Freezing and unfreezing given parameters at any time is fine. Optimizers of any kind (`foreach`, `fused`) are
    not involved.

    *What it refuses*, with a ConfigError: a second gradient for the same parameter within a micro-batch (the squared
    norm of a sum is not the sum of squared norms); a `.grad` that is not the mean of the micro-batches when the step is
    finished (clipped, unscaled or left over from an earlier step), since noise and signal would be wrong; complex
    parameters; parameters on several devices; a micro-batch without any gradient (hooks are lost when a model is moved
    or cast).

    *Clipping* therefore comes after `finish`. With an optimizer that finishes inside its own step, clip in a hook of
    the inner optimizer: `inner.register_step_pre_hook(lambda *_: clip_grad_norm_(model.parameters(), 1.0))`.

    *Loss scaling.* `scale` says what the gradients are multiplied with; a GradScaler's `get_scale()`, and 1 after
    `unscale_`. A step whose gradients are not finite gives a Measurement with `finite` False; one that is skipped or
    lost is forgotten by `discard()`.

    The check of `.grad` watches one small tensor, in the first steps and then in one of 16; a change that leaves this
    tensor as it was goes unseen.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], *, layers: bool) -> None:
        """Prepare to measure the given parameters; `layers`: each of them, and not only their sum."""
        self.parameters = tuple(parameters)
        self.layers = layers
        self.device = check_parameters(self.parameters)
        self._on_cpu = self.device.type == "cpu"
        self._measures = [on_arrival(parameter) for parameter in self.parameters]
        self._watched = min(range(len(self.parameters)), key=lambda i: _suitability(self.parameters[i]))
        self._arrived: dict[
            int, Any
        ] = {}  # in the open micro-batch: squared norms, or gradients that are measured later
        self._seen: list[torch.Tensor] = []  # the watched parameter's gradient in the open micro-batch
        self._closed: list[_Closed] = []
        self._samples = 0
        self._steps = 0
        self._off: list[None] = []  # not empty: hooks do nothing
        # Autograd's nodes that add to .grad; nobody else keeps them alive.
        self._nodes = [_accumulator(parameter) for parameter in self.parameters]
        handles = [node.register_prehook(self._hook(i)) for i, node in enumerate(self._nodes)]
        self._unhook = weakref.finalize(self, _remove, handles)

    def _hook(self, index: int) -> Callable[[tuple[torch.Tensor | None, ...]], None]:
        # Closes over the containers, not over the meter, which could then never be collected.
        arrived, measure = self._arrived, self._measures[index]
        seen = self._seen if index == self._watched else None
        off = self._off
        shape = tuple(self.parameters[index].shape)

        def hook(gradients: tuple[torch.Tensor | None, ...]) -> None:
            gradient = gradients[0]
            if gradient is None or off:
                return
            if index in arrived:
                raise ConfigError(
                    f"parameter {index} of shape {shape} got a second gradient within one micro-batch, whose squared "
                    f"norm "
                    f"can no longer be told; add up the losses and call backward() once a micro-batch, or close the "
                    "micro-batch "
                    f"after each backward(). Where the step is given up, call discard()"
                )
            if gradient.requires_grad:  # create_graph=True: statistics are no part of the graph
                gradient = gradient.detach()
            arrived[index] = measure(gradient)
            if seen is not None and not gradient.is_sparse:
                seen.append(gradient)

        return hook

    @property
    def on(self) -> bool:
        """Whether steps are measured; set before the first micro-batch of a step. Off, closing a micro-batch does
        nothing."""
        return not self._off

    @on.setter
    def on(self, on: bool) -> None:
        self._off[:] = () if on else (None,)

    def close_micro_batch(self, samples: int, scale: float = 1.0) -> None:
        """The gradient that arrived since the last call was `scale` times the mean over `samples` samples.

        Does not wait for the device.
        """
        if self._off:
            return
        if samples < 1:
            raise ConfigError(f"a micro-batch of {samples} samples was closed; expected at least one")
        if not self._arrived:
            raise ConfigError(
                "a micro-batch was closed, but no gradient arrived in it; call backward() first. If it was called: "
                "was the "
                "model moved to a device or cast to another type after the Meter was made? Then make a new one"
            )
        squares = dict(self._arrived) if self._on_cpu else norms(self._arrived)
        self._closed.append(_Closed(samples / scale, scale, squares, self._seen.pop() if self._seen else None))
        self._arrived.clear()
        self._samples += samples

    def finish(self, batch: int, *, scale: float = 1.0) -> Measurement:
        """The step's measurement, when `.grad` holds `scale` times its mean gradient; opens the next step.

        Waits for the device, once.
        """
        check_complete(batch, self._samples)
        means, products = self._squares_of_grad(), self._products()
        known = self._read(means, products)
        mismatch, totals, micro_batches = self._mismatch(known, scale), self._totals(), len(self._closed)
        self.discard()
        self.check(mismatch)
        mean_sq = [total / batch for total in totals]
        sq_mean = [means.get(i, 0.0) / scale**2 for i in range(len(totals))]
        if not self.layers:
            mean_sq, sq_mean = [sum(mean_sq)], [sum(sq_mean)]
        return Measurement(batch=batch, micro_batches=micro_batches, mean_sq=tuple(mean_sq), sq_mean=tuple(sq_mean))

    def take(self, *, scale: float = 1.0) -> Tally:
        """What the micro-batches of the step come to, without waiting for the device; opens the next step.

        For those who combine the gradients of several ranks; `.grad` must hold `scale` times the mean of this rank's
        micro-batches. A rank without micro-batches has a tally of zeros.
        """
        products = self._products()
        mismatch = self._mismatch([] if products is None else list(products.unbind()), scale)
        if self._on_cpu:
            squares = torch.tensor(self._totals(), dtype=torch.float64)
        else:
            zero = torch.zeros((), device=self.device)
            squares = zero.expand(len(self.parameters)).clone()
            for micro_batch in self._closed:
                own = torch.stack([micro_batch.squares.get(i, zero) for i in range(len(self.parameters))])
                squares.addcmul_(own, own, value=micro_batch.weight / micro_batch.scale)
        if not self.layers:
            squares = squares.sum(0, keepdim=True)
        tally = Tally(
            samples=self._samples,
            micro_batches=len(self._closed),
            squares=squares,
            mismatch=torch.as_tensor(mismatch, dtype=squares.dtype, device=self.device).reshape(1),
        )
        self.discard()
        return tally

    @property
    def width(self) -> int:
        """Entries of a measurement: layers, or one."""
        return len(self.parameters) if self.layers else 1

    def _squares_of_grad(self) -> dict[int, Any]:
        gradients = {i: p.grad for i, p in enumerate(self.parameters) if p.grad is not None}
        if self._on_cpu:
            return {i: self._measures[i](gradient) for i, gradient in gradients.items()}
        return norms(gradients)

    def _read(self, means: dict[int, Any], products: torch.Tensor | None) -> list[float]:
        """Turn the norms on a device into squared numbers, in place, and return the products; waits, once."""
        if self._on_cpu:
            return [] if products is None else products.tolist()
        owners = [*(micro_batch.squares for micro_batch in self._closed), means]
        tensors = [norm for squares in owners for norm in squares.values()]
        vectors = [torch.stack(tensors), *([] if products is None else [products])]
        position = iter(torch.cat(vectors).tolist())
        for squares in owners:
            for index in squares:
                squares[index] = next(position) ** 2
        return list(position)

    def _totals(self) -> list[float]:
        """By parameter, the sum of n_i |g_i|^2."""
        totals = [0.0] * len(self.parameters)
        for micro_batch in self._closed:
            factor = micro_batch.weight / micro_batch.scale
            for index, square in micro_batch.squares.items():
                totals[index] += factor * square
        return totals

    def _products(self) -> torch.Tensor | None:
        """In the watched tensor: the first micro-batch's gradient times each micro-batch's, and times `.grad`."""
        self._steps += 1
        if self._steps > _ALWAYS_CHECKED and self._steps % _ALWAYS_CHECKED:
            return None
        gradient = self.parameters[self._watched].grad
        parts = [micro_batch.watched for micro_batch in self._closed if micro_batch.watched is not None]
        if not parts or gradient is None or gradient.is_sparse:
            return None
        stacked = at_least_float32(torch.stack([*parts, gradient.detach()]).flatten(1))
        return stacked @ stacked[0]

    def _mismatch(self, products: Sequence[Any], scale: float) -> Any:
        """(g_1 . (mean of the micro-batches - .grad))^2 over the mean of (g_1 . g_i)^2, in the watched tensor.

        Seen along g_1, since the mean always has a part along it. Relative to the micro-batches and not to their mean,
        since micro-batches may cancel and leave a mean that is smaller than its own rounding error. On floats and
        tensors alike."""
        if not products:
            return 0.0
        parts = [micro_batch for micro_batch in self._closed if micro_batch.watched is not None]
        *own, final = products
        expected = sum(micro_batch.weight * product for micro_batch, product in zip(parts, own, strict=True))
        size = sum(
            micro_batch.weight / micro_batch.scale * product**2 for micro_batch, product in zip(parts, own, strict=True)
        )
        return (expected - final * (self._samples / scale)) ** 2 / (size * self._samples + 1e-38)

    def check(self, mismatch: float) -> None:
        """Refuse a step whose `.grad` was not the mean of its micro-batches; `mismatch` is a tally's, read from the
        device."""
        tolerance = 5e-2 if self.parameters[self._watched].dtype in LOW_PRECISION else 1e-3
        if mismatch > tolerance**2:  # false for a NaN, which `Measurement.finite` reports
            raise ConfigError(
                "the gradient in .grad is not the mean of the step's micro-batches, so noise and signal cannot be "
                "told. "
                "Clip gradients after they are measured (inner.register_step_pre_hook), clear them between steps "
                "(zero_grad), and name the factor that a loss was multiplied with (scale)"
            )

    def discard(self) -> None:
        """Forget the micro-batches since the last finished step: it was skipped or lost."""
        self._arrived.clear()
        self._seen.clear()
        self._closed = []
        self._samples = 0

    def close(self) -> None:
        """Remove the hooks; they also go when nobody holds the meter any more."""
        self._unhook()
        self._nodes = []
        self.discard()

    def __enter__(self) -> Meter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _remove(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def check_complete(batch: int, closed: int) -> None:
    """Refuse to finish a step that is not the sum of its micro-batches."""
    if batch != closed:
        raise ConfigError(
            f"a step of {batch} samples was finished, but its micro-batches have {closed}; close every "
            "micro-batch with its own "
            f"number of samples, and discard() steps that are given up"
        )


def check_parameters(parameters: Sequence[torch.Tensor]) -> torch.device:
    """The device of the parameters, if they can be measured."""
    if not parameters:
        raise ConfigError("there are no parameters to measure; expected those that the optimizer trains")
    for index, parameter in enumerate(parameters):
        if not parameter.is_floating_point():
            raise ConfigError(
                f"parameter {index} of shape {tuple(parameter.shape)} is of type {parameter.dtype}; gradient "
                f"statistics are defined for real floating-point parameters: leave it out, or choose a rule that needs "
                f"no statistics"
            )
        if not parameter.is_leaf:
            raise ConfigError(f"parameter {index} of shape {tuple(parameter.shape)} is computed from others")
    devices = {parameter.device for parameter in parameters}
    if len(devices) > 1:
        raise ConfigError(
            f"the parameters are on several devices ({', '.join(sorted(map(str, devices)))}); gradient statistics need "
            f"a model on one: choose a rule that needs none"
        )
    if len({id(parameter) for parameter in parameters}) < len(parameters):
        raise ConfigError("a parameter was given twice; it would be measured twice")
    return devices.pop()


def _accumulator(parameter: torch.Tensor) -> Any:
    """Autograd's node that adds to `.grad`; of a frozen parameter too, which may be unfrozen later."""
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        return get_gradient_edge(parameter).node
    finally:
        if frozen:
            parameter.requires_grad_(False)


def _suitability(parameter: torch.Tensor) -> tuple[bool, bool, int]:
    """Order of preference for the watched tensor: trained, of a few numbers at least, small."""
    return not parameter.requires_grad, parameter.numel() < 8, parameter.numel()
