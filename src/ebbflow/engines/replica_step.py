"""What one process does with its micro-batches of a step: seed, fetch, batch norm, autocast, weighted backward,
statistics.

The loop engine, the replicas of a live fleet and the workers of a Dask cluster all compute a step with this class, so
that they compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ebbflow.data.ledger import MicroBatch
from ebbflow.data.permutation import Permutation
from ebbflow.engines.batches import as_pair
from ebbflow.engines.captured import CapturedPasses, Count
from ebbflow.engines.kept_buffers import KeptBuffers
from ebbflow.engines.loss_sum import LossSum, check_differentiable, loss_of, mean_over_samples
from ebbflow.engines.module_modes import ModuleModes
from ebbflow.errors import ConfigError
from ebbflow.moments.meters import FusedMeter, Meter, meter_for
from ebbflow.torch_api import BatchNorm, foreach_add_, foreach_copy_, foreach_lerp_

__all__ = [
    "Fetch", "LoadedMicroBatch", "LocalBatchNorm", "Loss", "ModelReset", "Precision", "ReplicaStep", "autocast",
    "fetch_seeded", "generators", "micro_batch_seed", "needed_meter", "trained_parameters",
]  # fmt: skip

Fetch = Callable[[npt.NDArray[np.int64]], Any]
"""(inputs, targets) of the samples with these numbers, on the model's device; anything else is inputs alone."""
Loss = Callable[[torch.nn.Module, Any, Any], torch.Tensor | LossSum]
"""Loss of the model over inputs and targets: the mean over the samples, or a sum with its count."""
Precision = Literal["fp32", "bf16", "fp16"]
"""Number format of forward and backward passes; weights, gradients and statistics keep the model's own type."""

_TYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_MASK = (1 << 64) - 1
_ADDED_AT_ONCE_BYTES = 1 << 28


def micro_batch_seed(seed: int, epoch: int, start: int) -> int:
    """The seed of dropout and augmentation for the micro-batch that starts at a position of an epoch.

    A function of the position alone (a splitmix64 mix of the three numbers): a resumed run, and one in which a step was
    lost and repeated, draw what an undisturbed run draws.
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

    They are seeded directly: `torch.manual_seed` formats and keeps a stack trace at every call where there is no GPU
    (2.13).
    """
    gpus = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    return [torch.default_generator, *(torch.cuda.default_generators[gpu.index or 0] for gpu in gpus)]


def fetch_seeded(
    fetch: Fetch, indices: npt.NDArray[np.int64], generators: Iterable[torch.Generator],
    *, seed: int, epoch: int, start: int, named: bool = True,
) -> tuple[Any, Any]:  # fmt: skip
    """Inputs and targets of the backward pass that starts at a position of an epoch; None if a batch has no targets.

    The generators are seeded before, so that what is drawn at random, here and in the pass, depends on the place alone.
    `named`: see `as_pair`.
    """
    own_seed = micro_batch_seed(seed, epoch, start)
    for generator in generators:
        generator.manual_seed(own_seed)
    return as_pair(fetch(indices), named=named)


def autocast(precision: Precision, device_type: str) -> AbstractContextManager[object]:
    """The model computes in the precision inside."""
    dtype = _TYPES[precision]
    return nullcontext() if dtype is None else torch.autocast(device_type, dtype=dtype)


def trained_parameters(
    model: torch.nn.Module, parameters: Iterable[torch.nn.Parameter] | None = None
) -> list[torch.nn.Parameter]:
    """The given parameters, in the optimizer's order; by default all of the model that require a gradient."""
    return [*(parameters if parameters is not None else (p for p in model.parameters() if p.requires_grad))]


def needed_meter(parameters: Sequence[torch.nn.Parameter], needs: Collection[str]) -> Meter | None:
    """The meter for what rule and policy need ("moments", "layers"); None if they need nothing."""
    if {"moments", "layers"}.isdisjoint(needs):
        return None
    return meter_for(parameters, layers="layers" in needs)


class ModelReset:
    """Puts a model into training mode, as `ModuleModes` does, and clears its gradients before a step.

    Faster than `model.train()` and `model.zero_grad()`, which visit every module: 1.3 ms per step for a ResNet-18.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.parameters = [*model.parameters()]
        self.modes = ModuleModes(model)

    def __call__(self) -> None:
        """Do it."""
        self.modes.train()
        for parameter in self.parameters:
            parameter.grad = None


class LocalBatchNorm:
    """Batch norm as a fleet has it: each worker normalises with its own samples; running statistics move once per step.

    The running statistics of a step are the sample-weighted mean over its micro-batches. While a micro-batch is
    computed, the momentum of every layer is 1, so that the layer's buffers hold the statistics of this micro-batch;
    they are summed, and `commit` blends the mean into the buffers of before the step. `rollback` restores those
    buffers. A layer that is called several times in one forward pass counts with its last call."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.layers = [m for m in model.modules() if isinstance(m, BatchNorm) and m.running_mean is not None]
        running = self._running(self.layers)
        self._flat, self._sums = _vectors_and_views(running)
        self._before = [torch.zeros_like(tensor) for tensor in running]
        self._counts = [torch.zeros_like(count) for count in self._counted(self.layers)]
        self._held = False  # the layers do not count their micro-batches
        self._counts_kept = False  # they do, and the counts of before the step are kept
        self._began = False

    @property
    def sums(self) -> list[torch.Tensor]:
        """Mean and variance of all layers, summed over the micro-batches so far: a vector of each type of numbers, the
        same tensors in every step."""
        return self._flat

    def begin(self) -> None:
        """Remember the buffers of before the step. Does not synchronise."""
        self._began, self._counts_kept = True, False
        if self.layers:
            foreach_copy_(self._before, self._running(self.layers))
            for vector in self._flat:
                vector.zero_()

    @contextmanager
    def held_counts(self) -> Iterator[None]:
        """A context in which the layers do not count their micro-batches, for passes in which nobody looks.

        `commit` sets the counts in any case. It saves an operator per layer and micro-batch.
        """
        if any(type(layer) not in _COUNT_IF_THEY_CAN for layer in self.layers):
            yield
            return
        held = [(buffers, buffers[_COUNT]) for buffers in map(_buffers, self.layers)]
        for buffers, _ in held:
            buffers[_COUNT] = None
        self._held = True
        try:
            yield
        finally:
            self._held = False
            for buffers, count in held:
                buffers[_COUNT] = count

    @contextmanager
    def micro_batch(self, weight: float) -> Iterator[None]:
        """Run the forward pass of one micro-batch inside; `weight` is its part of the step's samples."""
        if self.layers and not self._held and not self._counts_kept:
            foreach_copy_(self._counts, self._counted(self.layers))
            self._counts_kept = True
        momenta = [layer.momentum for layer in self.layers]
        for layer in self.layers:
            vars(layer)["momentum"] = 1.0  # as layer.momentum = 1.0, without what a module does to set an attribute
        try:
            yield
        finally:
            for layer, momentum in zip(self.layers, momenta, strict=True):
                vars(layer)["momentum"] = momentum
        trained = [number for number, layer in enumerate(self.layers) if layer.training]
        if trained:
            own = self._running(self.layers[number] for number in trained)
            foreach_add_([tensor for number in trained for tensor in _pair(self._sums, number)], own, alpha=weight)

    def commit(self) -> None:
        """Blend the mean over the micro-batches into the running statistics, as one update."""
        by_weight: dict[float, list[int]] = {}
        for number, layer in enumerate(self.layers):
            if layer.training:
                momentum = layer.momentum
                if momentum is None:  # it averages over all steps, and only then the number of them is read
                    before = self._counts[number] if self._counts_kept else self._counted([layer])[0]
                    momentum = 1.0 / (int(before) + 1)
                by_weight.setdefault(momentum, []).append(number)
        for weight, numbers in by_weight.items():
            layers = [self.layers[number] for number in numbers]
            old = [tensor for number in numbers for tensor in _pair(self._before, number)]
            foreach_lerp_(old, [tensor for number in numbers for tensor in _pair(self._sums, number)], weight)
            foreach_copy_(self._running(layers), old)
            if self._counts_kept:
                foreach_copy_(self._counted(layers), [self._counts[number] for number in numbers])
            foreach_add_(self._counted(layers), 1)
        self._began = False

    def rollback(self) -> None:
        """Put back the buffers of before the step, once; without a step there is nothing to put back."""
        began, self._began = self._began, False
        if began and self.layers:
            foreach_copy_(self._running(self.layers), self._before)
            if self._counts_kept:
                foreach_copy_(self._counted(self.layers), self._counts)

    def resume(self) -> None:
        """Go on with a step that was rolled back: its sums are added to."""
        self._began = True

    # From the dictionary of a module, since its own way to look for an attribute takes several times as long.

    @staticmethod
    def _running(layers: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
        """Mean and variance of each of the layers."""
        return [buffers[name] for buffers in map(_buffers, layers) for name in ("running_mean", "running_var")]

    @staticmethod
    def _counted(layers: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
        """The number of micro-batches of each of the layers."""
        return [buffers[_COUNT] for buffers in map(_buffers, layers)]


_COUNT = "num_batches_tracked"
_COUNT_IF_THEY_CAN = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
"""Layers that are known to do without a count; SyncBatchNorm, and a layer of the user's own, may not."""


def _buffers(layer: torch.nn.Module) -> dict[str, Any]:
    buffers: dict[str, Any] = vars(layer)["_buffers"]
    return buffers


def _pair(tensors: Sequence[torch.Tensor], number: int) -> Sequence[torch.Tensor]:
    """Mean and variance of a layer, among those of all layers."""
    return tensors[2 * number : 2 * number + 2]


def _vectors_and_views(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Zeros in one vector for each type and device, and views of these in the order and shapes of the tensors."""
    alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        alike.setdefault((tensor.dtype, tensor.device), []).append(index)
    vectors, views = [], dict[int, torch.Tensor]()
    for (dtype, device), indices in alike.items():
        sizes = [tensors[index].numel() for index in indices]
        vectors.append(torch.zeros(sum(sizes), dtype=dtype, device=device))
        parts = vectors[-1].split(sizes)  # type: ignore[no-untyped-call]
        views |= {index: part.view_as(tensors[index]) for index, part in zip(indices, parts, strict=True)}
    return vectors, [views[index] for index in range(len(tensors))]


class LoadedMicroBatch(NamedTuple):
    """A micro-batch whose samples are on the device."""

    inputs: Any
    targets: Any
    samples: int
    weight: float
    """What its loss is multiplied with before the backward pass."""
    last: bool = False
    """Whether it is the last one of this process in the step."""


def adds_at_once(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether gradients of micro-batches are better added up all at once than by autograd, tensor by tensor.

    On a GPU this is one kernel instead of one per tensor; but the gradient of a micro-batch then lies in memory beside
    the sum, which is worth it for small models only.
    """
    on_gpu = all(parameter.device.type == "cuda" for parameter in parameters)
    return on_gpu and sum(parameter.nbytes for parameter in parameters) <= _ADDED_AT_ONCE_BYTES


class AddedGradients:
    """The sum of the gradients of micro-batches, each of which is taken out of `.grad` after its backward pass.

    It is what autograd would have accumulated there, bit for bit.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._sums: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def take(self) -> None:
        """Take what is in `.grad`, and add it."""
        sums, more = [], []
        for index, parameter in enumerate(self._parameters):
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            earlier = self._sums.get(index)
            if earlier is None or earlier.is_sparse or gradient.is_sparse:
                self._sums[index] = gradient if earlier is None else earlier + gradient
            else:
                sums.append(earlier)
                more.append(gradient)
        if sums:
            foreach_add_(sums, more)

    def put_back(self) -> None:
        """Set `.grad` to the sum, and begin anew."""
        for index, gradient in self._sums.items():
            self._parameters[index].grad = gradient
        self._sums = {}


class ReplicaStep:
    """The forward and backward passes of one process over its micro-batches of a step.

    `begin` a step, then `compute` all micro-batches with the loss, or `load` them one by one and call `backward` for
    each. `.grad` then holds the mean gradient over this process's samples, `loss` their mean loss (both times their
    part of `whole`, see `load`), `count` what the step's sum is to be divided by (`loss_sum.py`), `meter` the squared
    norms, and `batch_norm` the sums of the running statistics. Torch's global generators are seeded before every
    micro-batch. A step may be paused and resumed with further micro-batches.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        fetch: Fetch,
        loss: Loss | None,
        *,
        samples: int,
        seed: int,
        precision: Precision = "fp32",
        needs: Collection[str] = (),
        parameters: Iterable[torch.nn.Parameter] | None = None,
        sends_in_last: Callable[[], bool] = lambda: False,
        before_last: Callable[[], None] = lambda: None,
        after_backward: Callable[[], None] = lambda: None,
        captured_samples: int = 0,
        on_event: Callable[[str, str], None] = lambda what, text: None,
    ) -> None:
        """`samples`: size of an epoch. `needs`: what to measure. `sends_in_last`: whether gradients are sent while the
        last backward pass of the step goes on; then `before_last` is called before it. `after_backward` is called after
        every micro-batch.

        `captured_samples`: micro-batches of up to so many samples that `compute` gets are replayed from CUDA graphs,
        but for those whose gradients are sent during the pass. `on_event(what, text)` says if that fails.
        """
        self.model = model
        self.parameters = trained_parameters(model, parameters)
        self.meter = needed_meter(self.parameters, needs)
        self.batch_norm = LocalBatchNorm(model)
        self.buffers = KeptBuffers(model)
        self.loss_function = loss
        self.loss: torch.Tensor | float = 0.0
        """Mean over the samples of this process, after their backward passes."""
        self.count: torch.Tensor | float = 0
        """What the losses of this process sum over; for means, its samples."""
        self.samples = 0
        """Samples of this step whose backward pass is done."""
        self._fetch = fetch
        self._seed = seed
        self._precision = precision
        self._device_type = self.parameters[0].device.type
        self._sends_in_last = sends_in_last
        self._before_last = before_last
        self._after_backward = after_backward
        self._sums: FusedMeter | None = None
        """Adds up the gradients of captured passes."""
        self._captured: CapturedPasses | None = None
        if captured_samples:
            measured = self.meter is not None
            self._sums = FusedMeter(self.parameters, layers="layers" in needs, measured=measured)
            self.meter = self._sums if measured else None
            self._captured = CapturedPasses(
                self._compute_pass, self._sums, samples=captured_samples,
                on_refused=lambda why: on_event("no CUDA graph", f"every kernel is launched on its own: {why}"),
            )  # fmt: skip
        self._generators = generators(model)
        self._reset = ModelReset(model)
        self._adds_at_once = adds_at_once(self._reset.parameters)
        self._order = lru_cache(maxsize=2)(lambda epoch: Permutation(samples, seed, epoch))  # this one and the next

    def measure(self, on: bool) -> None:
        """Whether the coming steps are measured, where anything is measured at all; captured passes always measure."""
        if self.meter is not None and self._captured is None:
            self.meter.on = on

    def begin(self) -> None:
        """Begin a step, or begin it again: nothing of an earlier attempt is left."""
        self._reset()
        self.batch_norm.begin()
        self.buffers.begin()
        for meter in self._meters():
            meter.discard()
        if self._captured is not None:
            self._captured.begin(self._reset.parameters, self._reset.modes.latest)
        self.loss, self.count, self.samples = 0.0, 0, 0

    def pause(self) -> None:
        """Give up the step for now: the model is what it was before it, and what was computed is kept for `resume`."""
        self.batch_norm.rollback()
        self.buffers.pause()

    def resume(self) -> None:
        """Go on with a step that was paused: its gradients, loss, statistics and buffers are added to."""
        self._reset.modes.train()
        self.batch_norm.resume()
        self.buffers.resume()
        for meter in self._meters():
            meter.resume()

    def _meters(self) -> list[Meter]:
        return [meter for meter in dict.fromkeys((self.meter, self._sums)) if meter is not None]

    def load(
        self, micro_batches: Sequence[MicroBatch], *, epoch: int, batch: int, whole: int | None = None
    ) -> Iterator[LoadedMicroBatch]:
        """The micro-batches one by one; call `backward` for each before the next. `batch`: samples of the whole step.

        Gradient and loss of a micro-batch are weighted with its part of `whole` samples: by default those of all these
        micro-batches, which makes them means.
        """
        own = whole if whole is not None else sum(micro_batch.size for micro_batch in micro_batches)
        for number, micro_batch in enumerate(micro_batches, start=1):
            inputs, targets = self._fetch_seeded(epoch, micro_batch)
            with self.batch_norm.micro_batch(micro_batch.size / batch):
                last = number == len(micro_batches)
                yield LoadedMicroBatch(inputs, targets, micro_batch.size, micro_batch.size / own, last)
            self._after_backward()

    def _fetch_seeded(self, epoch: int, micro_batch: MicroBatch) -> tuple[Any, Any]:
        indices = self.indices(epoch, micro_batch)
        return fetch_seeded(
            self._fetch, indices, self._generators, seed=self._seed, epoch=epoch, start=micro_batch.start,
            named=self.loss_function is not None,
        )  # fmt: skip

    def backward(self, loss: torch.Tensor | LossSum, micro_batch: LoadedMicroBatch) -> None:
        """Add the gradient of a micro-batch; `loss` is the mean over its samples, or a sum with its count."""
        weighted, count = self._run_backward(loss, micro_batch)
        if self.meter is not None:
            self.meter.close_micro_batch(micro_batch.samples, micro_batch.weight)
        self._add(weighted, count, micro_batch.samples)

    def _run_backward(self, loss: torch.Tensor | LossSum, micro_batch: LoadedMicroBatch) -> tuple[torch.Tensor, Count]:
        """The backward pass of a micro-batch; its weighted mean loss and what the loss sums over."""
        mean, count = mean_over_samples(loss, micro_batch.samples)
        check_differentiable(mean)
        weighted = mean * micro_batch.weight
        if self._sends(micro_batch):
            self._before_last()
        weighted.backward()  # type: ignore[no-untyped-call]
        return weighted.detach(), count

    def _sends(self, micro_batch: LoadedMicroBatch) -> bool:
        """Whether gradients are sent while the backward pass of this micro-batch goes on."""
        return micro_batch.last and self._sends_in_last()

    def _add(self, loss: torch.Tensor, count: Count, samples: int) -> None:
        self.loss = self.loss + loss
        self.count = self.count + count
        self.samples += samples

    def compute(self, micro_batches: Sequence[MicroBatch], *, epoch: int, batch: int, whole: int | None = None) -> None:
        """Forward and backward passes over all micro-batches, with the loss function; `whole`: see `load`."""
        if self.loss_function is None:
            raise ConfigError(
                "no loss was given, so the steps cannot be computed here; pass loss=, or use your own loop"
            )
        unmeasured = self._captured is None and (self.meter is None or not self.meter.on)
        adds = unmeasured and len(micro_batches) > 1 and self._adds_at_once
        added = AddedGradients(self._reset.parameters) if adds else None
        with self.batch_norm.held_counts():
            self._compute(self.load(micro_batches, epoch=epoch, batch=batch, whole=whole), added)
        if added is not None:
            added.put_back()

    def _compute(self, micro_batches: Iterable[LoadedMicroBatch], added: AddedGradients | None) -> None:
        assert self.loss_function is not None
        for micro_batch in micro_batches:
            if self._captured is not None and not self._sends(micro_batch):
                self._replay(micro_batch)
                continue
            if self._sums is not None and self.meter is None:
                self._sums.put_back()  # what is sent of a gradient is that of all micro-batches
            with self.autocast():
                loss = loss_of(self.loss_function, self.model, micro_batch.inputs, micro_batch.targets)
            if added is not None and self._sends(micro_batch):
                added.put_back()  # what is sent of a gradient is that of all micro-batches
                added = None
            self.backward(loss, micro_batch)
            if added is not None:
                added.take()
        if self._sums is not None and self.meter is None:
            self._sums.put_back()

    def _replay(self, micro_batch: LoadedMicroBatch) -> None:
        """Add the gradient of a micro-batch to the sums, from a CUDA graph if it has the shape of earlier ones."""
        assert self._captured is not None and self._sums is not None
        inputs, targets, samples, weight, _ = micro_batch
        loss, count = self._captured(inputs, targets, samples, weight)
        self._sums.weigh(samples, weight)
        self._add(loss * weight, count, samples)

    def _compute_pass(
        self, inputs: Any, targets: Any, samples: int, factor: torch.Tensor
    ) -> tuple[torch.Tensor, Count]:
        assert self.loss_function is not None
        with self.autocast():
            loss, count = mean_over_samples(loss_of(self.loss_function, self.model, inputs, targets), samples)
        check_differentiable(loss)
        (loss * factor).backward()  # type: ignore[no-untyped-call]
        return loss.detach(), count

    def commit(self) -> None:
        """The step counts: running statistics move once, and other buffers stay as its micro-batches left them."""
        self.batch_norm.commit()
        self.buffers.commit()

    def rollback(self) -> None:
        """The step does not count: all buffers are what they were before it; without a step nothing is done."""
        self.batch_norm.rollback()
        self.buffers.rollback()

    def abandon(self) -> None:
        """Give up the step: gradients of its micro-batches are forgotten, and so is what they did to buffers."""
        self.rollback()
        self.model.zero_grad(set_to_none=True)

    def check_complete(self, own: int) -> None:
        """Refuse a step of which a user's loop left out one of this process's samples, or counted one twice."""
        if self.samples != own:
            raise ConfigError(
                f"this process has {own} samples of the step, but backward() was called for {self.samples}; call it "
                f"exactly once for each micro-batch, with the mean loss over its samples"
            )

    def autocast(self) -> AbstractContextManager[object]:
        """The model computes in the replica's precision inside."""
        return autocast(self._precision, self._device_type)

    def part_of(self, micro_batch: MicroBatch) -> MicroBatch:
        """What this process computes of a micro-batch: all, where it is not one of several ranks."""
        return micro_batch

    def indices(self, epoch: int, micro_batch: MicroBatch) -> npt.NDArray[np.int64]:
        """Numbers of the samples of a micro-batch, which all processes agree on."""
        return self._order(epoch).indices(micro_batch.start, micro_batch.stop)
