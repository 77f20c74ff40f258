"""Meters: they measure the gradients of the micro-batches of a step, from which noise and signal are estimated.

    meter = meter_for(list(model.parameters()), layers=False)
    meter.discard()                                    # a step of `batch` samples begins
    for x, y in micro_batches:
        weight = len(x) / batch
        (loss_fn(model(x), y) * weight).backward()
        meter.close_micro_batch(len(x), scale=weight)
    measurement = meter.finish(batch)                  # .grad is the mean gradient; the only host synchronisation

There are three. `HookMeter` measures each gradient in an autograd hook, on a CPU by a `dot` while the gradient is in
the cache; a second pass over all gradients costs several times more. It works in any training loop. The other two take
the gradients out of `.grad` and add them up themselves, for loops that own their gradients: `FusedMeter` with a few
fused kernels, for GPUs, where a Python hook per tensor costs more than all the arithmetic, and `FlatMeter` in one
vector, for small models on a CPU, where every call counts (20 us for four tensors). `meter_for` chooses.
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from ebbflow.errors import ConfigError
from ebbflow.moments.estimate import Measurement
from ebbflow.torch_api import foreach_add_, foreach_norm, foreach_zero_

__all__ = ["FlatMeter", "FusedMeter", "HookMeter", "Meter", "Tally", "as_real", "meter_for", "squared_norms"]

# The error of a float32 `dot` depends on the length and on the kernel that the CPU gets: 2e-7 to 6e-6 at 2^20 numbers,
# 2e-4 at 4 * 10^7. (linalg.vector_norm has an error of 4e-4 at 4 * 10^6 and of 7e-3 at 4 * 10^7.) Tensors above
# _ONE_DOT are therefore summed in rows of _ROW, all rows by one batched product, and the rows are added in float64: the
# error is below 1e-7 with every kernel, and it is as fast as one `dot` (0.37 ms for 3 * 10^6 numbers on one core).
_ONE_DOT = 1 << 17
_ROW = 1 << 14
_LOW_PRECISION = (torch.float16, torch.bfloat16)
_FLAT_LIMIT = 1 << 18
"""Most numbers in a model for `FlatMeter`: two vectors of them fit into the cache of a core."""
_CHECK_EVERY = 16
"""`HookMeter` checks `.grad` in that many steps at first, then in one step of as many."""


# -- squared norms -----------------------------------------------------------------------------------------------------


def squared_norms(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The squared norm of each tensor, as one vector on their device of at least float32. Does not synchronise."""
    if not gradients:
        return torch.zeros(0)
    if gradients[0].device.type == "cpu":
        return torch.tensor([_squared_norm(gradient) for gradient in gradients], dtype=torch.float64)
    return torch.stack([*_fused_norms(dict(enumerate(gradients))).values()]).square_()


def _fused_norms(gradients: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """The norm of each gradient as a tensor, by one fused kernel of the device."""
    if not gradients:
        return {}
    tensors = [*map(_dense, gradients.values())]
    double = any(tensor.dtype == torch.float64 for tensor in tensors)  # which torch refuses to narrow
    found = foreach_norm(tensors, 2, torch.float64 if double else torch.float32)
    return dict(zip(gradients, found, strict=True))


def _squared_norm(gradient: torch.Tensor) -> float:
    """The squared norm on a CPU, where reading a result costs nothing."""
    flat = _at_least_float32(_dense(gradient).flatten())
    if flat.numel() <= _ONE_DOT:
        return torch.dot(flat, flat).item()
    whole = flat.numel() // _ROW * _ROW
    rows, rest = flat[:whole].view(-1, 1, _ROW), flat[whole:]
    squares = torch.bmm(rows, rows.transpose(1, 2)).flatten()
    return math.fsum([*squares.tolist(), torch.dot(rest, rest).item()])


def _simple_squared_norm(gradient: torch.Tensor) -> float:
    """The same for a small tensor of full precision, with fewer calls."""
    if gradient.is_sparse:
        return _squared_norm(gradient)
    flat = gradient.flatten()
    return torch.dot(flat, flat).item()


def _at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _LOW_PRECISION else tensor


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """The numbers of a gradient; those of a sparse one with each row once."""
    return as_real(gradient.coalesce().values() if gradient.is_sparse else gradient)


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor; each complex one as two real ones."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


# -- the contract ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Sums over the micro-batches of one rank; tensors on the device of the parameters, so that nothing waits."""

    samples: float
    micro_batches: int
    squares: torch.Tensor
    """Sum of n_i |g_i|^2, one entry per layer, or a single one."""
    mismatch: torch.Tensor
    """Squared relative difference between `.grad` and the mean of the micro-batches, in one tensor; a single entry."""


class Meter(ABC):
    """Measures the micro-batches of a step, for the whole model or for each layer.

    A layer is one of the given parameters, in the given order; a parameter without a gradient counts as zero. A meter
    that is off (`on = False`) leaves the gradients alone, and closing a micro-batch does nothing.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], *, layers: bool = False) -> None:
        """Prepare to measure the given parameters together, or with `layers` each of them."""
        self.parameters = tuple(parameters)
        self.layers = layers
        self.device = _device_of(self.parameters)
        self.on = True
        """Whether the meter measures; set it before the first micro-batch of a step."""
        self._samples: float = 0
        self._micro_batches = 0

    @property
    def width(self) -> int:
        """Entries of a measurement: the number of layers, or one."""
        return len(self.parameters) if self.layers else 1

    @abstractmethod
    def close_micro_batch(self, samples: float, scale: float = 1.0) -> None:
        """End a micro-batch, whose gradient is `scale` times the mean over `samples` samples. Does not synchronise."""

    @abstractmethod
    def finish(self, batch: float, *, scale: float = 1.0) -> Measurement:
        """The measurement of a step of `batch` samples, of which `.grad` is `scale` times the mean gradient.

        Waits for the device, once.
        """

    @abstractmethod
    def take(self, *, scale: float = 1.0) -> Tally:
        """The sums over the micro-batches of this rank, for those who combine several ranks; `.grad` then holds `scale`
        times their mean. Does not synchronise."""

    @abstractmethod
    def resume(self) -> None:
        """Go on with the step whose sums were taken: the micro-batches that follow are added to those before."""

    def earlier(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """What the closed micro-batches of the step have added up for a parameter, if that is not in its `.grad`."""
        return None

    @abstractmethod
    def check(self, mismatch: float) -> None:
        """Raise a ConfigError if the mismatch of a tally shows that `.grad` was not the mean of the micro-batches."""

    @abstractmethod
    def discard(self) -> None:
        """Begin a step, or begin it again: forget the micro-batches since the last finished step."""

    def _count(self, samples: float) -> None:
        self._samples += samples
        self._micro_batches += 1

    def _check_complete(self, batch: float) -> None:
        if batch != self._samples:
            raise ConfigError(
                f"a step of {batch} samples was finished, but its micro-batches have {self._samples}; close every "
                f"micro-batch with its own number of samples, and discard() steps that are given up"
            )


def _check_samples(samples: float) -> None:
    if not samples > 0:
        raise ConfigError(f"a micro-batch of {samples} samples was closed; expected at least one")


def _device_of(parameters: Sequence[torch.Tensor]) -> torch.device:
    """The device of the parameters; a ConfigError if they cannot be measured."""
    if not parameters:
        raise ConfigError("there are no parameters to measure; expected those that the optimizer trains")
    for index, parameter in enumerate(parameters):
        if is_lazy(parameter):
            raise ConfigError(
                f"parameter {index} has no shape yet (of a LazyLinear, for example); call the model once with a batch "
                f"before the optimizer is made"
            )
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


def why_unmeasurable(parameters: Sequence[torch.Tensor]) -> str:
    """Why the gradients of these parameters cannot be measured, in words; empty if they can."""
    try:
        _device_of(parameters)
    except ConfigError as error:
        return str(error)
    return ""


# -- in any training loop ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Closed:
    """A closed micro-batch."""

    weight: float
    """n_i divided by the scale of the gradient."""
    scale: float
    squares: dict[int, Any]
    """|g_i|^2 by parameter; on a device the norm, as a tensor that nothing has waited for yet."""
    watched: torch.Tensor | None
    """The gradient of the watched parameter."""


class HookMeter(Meter):
    """A meter with autograd hooks, for loops in which `.grad` accumulates; the only autograd hooks in Ebbflow.

    A *micro-batch* is what arrived between two calls of `close_micro_batch`: the gradient of one backward pass. The
    hooks are called where autograd adds to `.grad`, so that they see exactly what is added: the sum over all uses of a
    shared parameter, after the user's own tensor hooks, and nothing of `torch.autograd.grad`. On a GPU the gradients of
    a micro-batch are kept until it is closed and measured by one fused kernel. Freezing and unfreezing parameters at
    any time is fine, and so is every kind of optimizer (`foreach`, `fused`).

    *Refused*, with a ConfigError: a second gradient for the same parameter within a micro-batch (the squared norm of a
    sum is not the sum of squared norms); a `.grad` that is not the mean of the micro-batches when the step is finished
    (clipped, unscaled or left from an earlier step), since noise and signal would be wrong; complex parameters;
    parameters on several devices; a micro-batch without any gradient (hooks are lost when a model is moved or cast).

    *Clipping* therefore comes after `finish`. With an optimizer that finishes inside its own step, clip in a hook of
    the inner optimizer: `inner.register_step_pre_hook(lambda *_: clip_grad_norm_(model.parameters(), 1.0))`.

    *Loss scaling.* `scale` is the factor of the gradients: a GradScaler's `get_scale()`, and 1 after `unscale_`. A step
    whose gradients are not finite gives a Measurement with `finite` False.

    The check of `.grad` looks at one small tensor, in the first 16 steps and then in one of 16; a change that leaves
    this tensor as it was is not noticed.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], *, layers: bool = False) -> None:
        super().__init__(parameters, layers=layers)
        self._on_cpu = self.device.type == "cpu"
        self._measures = [_on_arrival(parameter) for parameter in self.parameters]
        self._watched = min(range(len(self.parameters)), key=lambda i: _unsuitability(self.parameters[i]))
        # Of the open micro-batch, by parameter: squared norms, or gradients that are measured when it is closed.
        self._arrived: dict[int, Any] = {}
        self._seen: list[torch.Tensor] = []  # the watched parameter's gradient in the open micro-batch
        self._closed: list[_Closed] = []
        self._taken = False  # the sums of the step: the next micro-batch begins another one
        self._steps = 0
        # Autograd's nodes that add to .grad; nothing else keeps them alive.
        self._nodes = [_accumulator(parameter) for parameter in self.parameters]
        handles = [node.register_prehook(self._hook(i)) for i, node in enumerate(self._nodes)]
        self._unhook = weakref.finalize(self, _remove, handles)

    def _hook(self, index: int) -> Callable[[tuple[torch.Tensor | None, ...]], None]:
        # The hook has no strong reference to the meter, which could otherwise never be collected.
        meter = weakref.ref(self)
        arrived, measure = self._arrived, self._measures[index]
        seen = self._seen if index == self._watched else None
        shape = tuple(self.parameters[index].shape)

        def hook(gradients: tuple[torch.Tensor | None, ...]) -> None:
            gradient, owner = gradients[0], meter()
            if gradient is None or owner is None or not owner.on:
                return
            if index in arrived:
                raise ConfigError(
                    f"parameter {index} of shape {shape} got a second gradient within one micro-batch, whose squared "
                    f"norm is then not known; add up the losses and call backward() once per micro-batch, or close the "
                    f"micro-batch after each backward(). If the step is given up, call discard()"
                )
            if gradient.requires_grad:  # create_graph=True: statistics are no part of the graph
                gradient = gradient.detach()
            arrived[index] = measure(gradient)
            if seen is not None and not gradient.is_sparse:
                seen.append(gradient)

        return hook

    def close_micro_batch(self, samples: float, scale: float = 1.0) -> None:
        """End a micro-batch: what arrived since the last call is `scale` times the mean over `samples` samples."""
        if not self.on:
            return
        _check_samples(samples)
        if self._taken:
            self._forget_closed()
        if not self._arrived:
            raise ConfigError(
                "a micro-batch was closed, but no gradient arrived in it; call backward() first. If it was called: was "
                "the model moved to a device or cast to another type after the meter was made? Then make a new one"
            )
        self._count(samples)
        squares = dict(self._arrived) if self._on_cpu else _fused_norms(self._arrived)
        self._closed.append(_Closed(samples / scale, scale, squares, self._seen.pop() if self._seen else None))
        self._arrived.clear()

    def finish(self, batch: float, *, scale: float = 1.0) -> Measurement:
        """The measurement of the step, whose mean gradient times `scale` is in `.grad`; then the next step begins."""
        if self._taken:
            self._forget_closed()
        self._check_complete(batch)
        means, products = self._squares_of_grad(), self._products()
        known = self._read(means, products)
        mismatch, totals, micro_batches = self._mismatch(known, scale), self._totals(), self._micro_batches
        self.discard()
        self.check(mismatch)
        mean_sq = [total / batch for total in totals]
        sq_mean = [means.get(i, 0.0) / scale**2 for i in range(len(totals))]
        if not self.layers:
            mean_sq, sq_mean = [sum(mean_sq)], [sum(sq_mean)]
        return Measurement(batch=batch, micro_batches=micro_batches, mean_sq=tuple(mean_sq), sq_mean=tuple(sq_mean))

    def take(self, *, scale: float = 1.0) -> Tally:
        """The sums of this rank, if `.grad` holds `scale` times the mean of its micro-batches; then the next step
        begins, unless this one is resumed.

        A rank without micro-batches has a tally of zeros.
        """
        if self._taken:
            self._forget_closed()
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
            micro_batches=self._micro_batches,
            squares=squares,
            mismatch=torch.as_tensor(mismatch, dtype=squares.dtype, device=self.device).reshape(1),
        )
        self.drop_micro_batch()
        self._taken = True
        return tally

    def resume(self) -> None:
        """Go on with the step whose sums were taken."""
        self._taken = False

    def _squares_of_grad(self) -> dict[int, Any]:
        gradients = {i: p.grad for i, p in enumerate(self.parameters) if p.grad is not None}
        if self._on_cpu:
            return {i: self._measures[i](gradient) for i, gradient in gradients.items()}
        return _fused_norms(gradients)

    def _read(self, means: dict[int, Any], products: torch.Tensor | None) -> list[float]:
        """Turn the norms on a device into squared numbers, in place, and return the products. Synchronises, once."""
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
        """The sum of n_i |g_i|^2, by parameter."""
        totals = [0.0] * len(self.parameters)
        for micro_batch in self._closed:
            factor = micro_batch.weight / micro_batch.scale
            for index, square in micro_batch.squares.items():
                totals[index] += factor * square
        return totals

    def _products(self) -> torch.Tensor | None:
        """Products of the first micro-batch's gradient with each micro-batch's and with `.grad`, in the watched
        tensor."""
        self._steps += 1
        if self._steps > _CHECK_EVERY and self._steps % _CHECK_EVERY:
            return None
        gradient = self.parameters[self._watched].grad
        parts = [micro_batch.watched for micro_batch in self._closed if micro_batch.watched is not None]
        if not parts or gradient is None or gradient.is_sparse:
            return None
        stacked = _at_least_float32(torch.stack([*parts, gradient.detach()]).flatten(1))
        return stacked @ stacked[0]

    def _mismatch(self, products: Sequence[Any], scale: float) -> Any:
        """(g_1 . (mean of the micro-batches - .grad))^2 over the mean of (g_1 . g_i)^2, in the watched tensor.

        The difference is projected on g_1, since the mean always has a component along it. It is relative to the
        micro-batches and not to their mean, since micro-batches may cancel and leave a mean that is smaller than its
        own rounding error. Works on floats and on tensors.
        """
        if not products:
            return 0.0
        parts = [micro_batch for micro_batch in self._closed if micro_batch.watched is not None]
        *own, final = products
        pairs = list(zip(parts, own, strict=True))
        expected = sum(micro_batch.weight * product for micro_batch, product in pairs)
        size = sum(micro_batch.weight / micro_batch.scale * product**2 for micro_batch, product in pairs)
        return (expected - final * (self._samples / scale)) ** 2 / (size * self._samples + 1e-38)

    def check(self, mismatch: float) -> None:
        """Raise a ConfigError if `.grad` was not the mean of the micro-batches."""
        tolerance = 5e-2 if self.parameters[self._watched].dtype in _LOW_PRECISION else 1e-3
        if mismatch > tolerance**2:  # False for a NaN, which `Measurement.finite` reports
            raise ConfigError(
                "the gradient in .grad is not the mean of the step's micro-batches, so that noise and signal cannot be "
                "estimated. Clip gradients after they are measured (inner.register_step_pre_hook), clear them between "
                "steps (zero_grad), and give the factor that a loss was multiplied with (scale)"
            )

    def drop_micro_batch(self) -> None:
        """Forget what arrived since the last closed micro-batch."""
        self._arrived.clear()
        self._seen.clear()

    def discard(self) -> None:
        """Begin a step, or begin it again: forget the micro-batches since the last finished step."""
        self.drop_micro_batch()
        self._forget_closed()

    def _forget_closed(self) -> None:
        self._closed, self._taken = [], False
        self._samples = self._micro_batches = 0

    def close(self) -> None:
        """Remove the hooks. They are also removed when the meter is collected."""
        self._unhook()
        self._nodes = []
        self.discard()


def _on_arrival(parameter: torch.Tensor) -> Callable[[torch.Tensor], Any]:
    """What a hook does with the gradients of this parameter.

    On a CPU it measures them while they are in the cache. On a device it keeps an alias until the micro-batch is
    closed: if the gradient itself were kept, autograd could not use it as the first `.grad` of a step, but copy it.
    """
    if parameter.device.type != "cpu":
        return torch.Tensor.detach
    simple = parameter.numel() <= _ONE_DOT and parameter.dtype not in _LOW_PRECISION
    return _simple_squared_norm if simple else _squared_norm


def _remove(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _accumulator(parameter: torch.Tensor) -> Any:
    """Autograd's node that adds to `.grad`; also of a frozen parameter, which may be unfrozen later."""
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        return get_gradient_edge(parameter).node
    finally:
        if frozen:
            parameter.requires_grad_(False)


def _unsuitability(parameter: torch.Tensor) -> tuple[bool, bool, int]:
    """Sort key for the choice of the watched tensor: trained tensors first, then those of 8 numbers or more, then
    small."""
    return not parameter.requires_grad, parameter.numel() < 8, parameter.numel()


# -- in loops that own their gradients ---------------------------------------------------------------------------------


class _AddingMeter(Meter):
    """A meter without hooks, which takes the gradient of a micro-batch out of `.grad` and adds it up itself.

    A *micro-batch* is whatever is in `.grad` when it is closed, from one backward pass or several. `.grad` must be
    empty before a step. The sums are in buffers that stay in place from step to step; they are the `.grad` of a
    finished step until the next one begins. A parameter without a gradient keeps an empty `.grad`. Sparse gradients
    become dense.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], *, layers: bool = False) -> None:
        super().__init__(parameters, layers=layers)
        self._sums: list[torch.Tensor] = []
        """Sum of the gradients of the closed micro-batches, by parameter."""
        self.touched: set[int] = set()
        """Numbers of the parameters that had a gradient in this step."""
        self._numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}

    def earlier(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The sum over the closed micro-batches, for a parameter that had a gradient in them."""
        number = self._numbers[id(parameter)]
        return self._sums[number] if number in self.touched else None

    def put_back(self) -> None:
        """Set `.grad` to what autograd would have accumulated there."""
        for index in self.touched:
            self.parameters[index].grad = self._sums[index]

    def resume(self) -> None:
        """Go on with the step whose sums were taken: its gradients are taken out of `.grad` again."""
        for index in self.touched:
            self.parameters[index].grad = None

    def check(self, mismatch: float) -> None:
        """Do nothing, since nobody else can have changed these gradients."""


class FusedMeter(_AddingMeter):
    """Adds up and measures micro-batches with three calls of fused kernels each, which can be part of a CUDA graph.

    Costs the memory of one more gradient.
    """

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], *, layers: bool = False, measured: bool = True
    ) -> None:
        """Prepare as every meter; with `measured=False` gradients are only added up."""
        super().__init__(parameters, layers=layers)
        self.measured = measured
        double = any(p.dtype == torch.float64 for p in self.parameters)
        self._sums = [torch.zeros_like(p, requires_grad=False) for p in self.parameters]
        self._norms = torch.zeros(
            len(self.parameters), device=self.device, dtype=torch.float64 if double else torch.float32
        )
        """Norms of the latest micro-batch, by parameter."""
        self._squares = torch.zeros(len(self.parameters), device=self.device, dtype=torch.float64)
        """Sum of n_i |g_i|^2 over the closed micro-batches, by parameter."""

    def discard(self) -> None:
        """Begin a step, or begin it again. Does not synchronise."""
        if self.on:
            foreach_zero_(self._sums)
        self._squares.zero_()
        self.touched.clear()
        self._samples = self._micro_batches = 0

    @torch.no_grad()
    def resume(self) -> None:
        """Go on with the step whose sums were taken; what else is in `.grad` is added to them."""
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None and parameter.grad is not self._sums[index]:
                self._sums[index].add_(parameter.grad)
                self.touched.add(index)
        super().resume()

    @torch.no_grad()
    def add(self) -> frozenset[int]:
        """Take a gradient out of `.grad` and add it; the numbers of the parameters that had one. Can be captured."""
        arrived: dict[int, torch.Tensor] = {}
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                arrived[index] = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                parameter.grad = None
        if not arrived:
            raise ConfigError("a micro-batch was closed, but no gradient arrived in it; call backward() first")
        if self.measured:
            found = _fused_norms(arrived)
            if len(found) == len(self.parameters):
                torch.stack([*found.values()], out=self._norms)
            else:
                zero = torch.zeros((), device=self.device, dtype=self._norms.dtype)
                torch.stack([found.get(i, zero) for i in range(len(self.parameters))], out=self._norms)
        foreach_add_([self._sums[i] for i in arrived], [*arrived.values()])
        self.touched.update(arrived)
        return frozenset(arrived)

    def weigh(self, samples: float, scale: float = 1.0) -> None:
        """Count what was added last as `scale` times the mean gradient over `samples` samples. Does not synchronise."""
        _check_samples(samples)
        self._count(samples)
        if self.measured:
            wide = self._norms.to(torch.float64)
            self._squares.addcmul_(wide, wide, value=samples / scale**2)

    def close_micro_batch(self, samples: float, scale: float = 1.0) -> None:
        """Add and measure the gradient in `.grad`, which is `scale` times the mean over `samples` samples."""
        if not self.on:
            return
        self.add()
        self.weigh(samples, scale)

    def finish(self, batch: float, *, scale: float = 1.0) -> Measurement:
        """The measurement of the step, if the sums are `scale` times its mean gradient. Synchronises, once."""
        self._check_complete(batch)
        self.put_back()
        means = torch.stack([*_fused_norms(dict(enumerate(self._sums))).values()]).to(torch.float64).square_()
        numbers = torch.cat([self._squares, means]).tolist()
        mean_sq = [number / batch for number in numbers[: len(self.parameters)]]
        sq_mean = [number / scale**2 for number in numbers[len(self.parameters) :]]
        if not self.layers:
            mean_sq, sq_mean = [sum(mean_sq)], [sum(sq_mean)]
        return Measurement(
            batch=batch, micro_batches=self._micro_batches, mean_sq=tuple(mean_sq), sq_mean=tuple(sq_mean)
        )

    def take(self, *, scale: float = 1.0) -> Tally:
        """The sums of this rank; `.grad` then holds the sum of its gradients. Does not synchronise."""
        self.put_back()
        squares = self._squares if self.layers else self._squares.sum(0, keepdim=True)
        return Tally(
            samples=self._samples,
            micro_batches=self._micro_batches,
            squares=squares,
            mismatch=torch.zeros_like(squares[:1]),
        )


class FlatMeter(_AddingMeter):
    """Adds up and measures micro-batches in one vector, with a few calls per micro-batch and a cheap one per tensor.

    It is made for few numbers of one type on a CPU (`suits`). For large models hooks are better, since they measure
    each tensor while it is in the cache.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], *, layers: bool = False) -> None:
        super().__init__(parameters, layers=layers)
        sizes = [parameter.numel() for parameter in self.parameters]
        dtype = self.parameters[0].dtype
        self._sum, self._micro_batch = (torch.zeros(sum(sizes), dtype=dtype) for _ in range(2))
        self._parts = [(torch.split(vector, sizes), vector) for vector in (self._sum, self._micro_batch)]
        shapes = [parameter.shape for parameter in self.parameters]
        self._sums = [part.view(shape) for part, shape in zip(self._parts[0][0], shapes, strict=True)]
        self._zeros = [torch.zeros(size, dtype=dtype) for size in sizes]
        self._squares = [0.0] * self.width

    @staticmethod
    def suits(parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Whether a model of these parameters is small and simple enough."""
        known = list(parameters)
        return 0 < sum(parameter.numel() for parameter in known) <= _FLAT_LIMIT and FlatMeter.can_measure(known)

    @staticmethod
    def can_measure(parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Whether these parameters fit into one vector, of any length, on a CPU."""
        known = list(parameters)
        return {parameter.device.type for parameter in known} == {"cpu"} and (
            {parameter.dtype for parameter in known} in ({torch.float32}, {torch.float64})
        )

    def discard(self) -> None:
        """Begin a step, or begin it again."""
        self.touched.clear()
        self._squares = [0.0] * self.width
        self._samples = self._micro_batches = 0

    def close_micro_batch(self, samples: float, scale: float = 1.0) -> None:
        """Add and measure the gradient in `.grad`, which is `scale` times the mean over `samples` samples."""
        if not self.on:
            return
        _check_samples(samples)
        vectors, arrived = [], False
        for index, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            if gradient is None:
                vectors.append(self._zeros[index])
                continue
            parameter.grad = None
            arrived = True
            self.touched.add(index)
            if gradient.is_sparse or gradient.requires_grad:  # the latter after backward(create_graph=True)
                gradient = gradient.detach().to_dense()
            vectors.append(gradient.flatten())
        if not arrived:
            raise ConfigError("a micro-batch was closed, but no gradient arrived in it; call backward() first")
        parts, vector = self._parts[self._micro_batches > 0]  # the first one of a step is written into the sum itself
        torch.cat(vectors, out=vector)
        factor = samples / scale**2
        for index, square in enumerate(self._measure(parts, vector)):
            self._squares[index] += factor * square
        if self._micro_batches:
            self._sum.add_(vector)
        self._count(samples)

    def _measure(self, parts: Iterable[torch.Tensor], whole: torch.Tensor) -> list[float]:
        return [
            torch.dot(part, part).item() if part.numel() <= _FLAT_LIMIT else _squared_norm(part)
            for part in (parts if self.layers else (whole,))
        ]

    def finish(self, batch: float, *, scale: float = 1.0) -> Measurement:
        """The measurement of the step, if the sum is `scale` times its mean gradient."""
        self._check_complete(batch)
        self.put_back()
        mean_sq = tuple([square / batch for square in self._squares])
        sq_mean = tuple([square / scale**2 for square in self._measure(*self._parts[0])])
        return Measurement(batch=batch, micro_batches=self._micro_batches, mean_sq=mean_sq, sq_mean=sq_mean)

    def take(self, *, scale: float = 1.0) -> Tally:
        """The sums of this rank; `.grad` then holds the sum of its gradients."""
        self.put_back()
        squares = torch.tensor(self._squares, dtype=torch.float64)
        zero = torch.zeros_like(squares[:1])
        return Tally(samples=self._samples, micro_batches=self._micro_batches, squares=squares, mismatch=zero)


def meter_for(parameters: Sequence[torch.nn.Parameter], *, layers: bool) -> Meter:
    """The fastest meter for a loop that owns its gradients.

    On a GPU and in small models a hook per tensor costs more than the arithmetic. In large models on a CPU, a hook is
    called at the only time at which the gradient is in the cache.
    """
    _device_of(parameters)  # before they are asked for their sizes
    if FlatMeter.suits(parameters):
        return FlatMeter(parameters, layers=layers)
    if any(parameter.device.type != "cpu" for parameter in parameters):
        return FusedMeter(parameters, layers=layers)
    return HookMeter(parameters, layers=layers)
