"""The micro-batches of a step added up and measured without a hook: for loops that own their gradients and run on a
GPU.

    sums = Sums(model.parameters(), layers=False)
    sums.discard()                             # a step begins
    for x, y in micro-batches:
        loss_fn(model(x), y).backward()
        sums.close_piece(len(x))               # takes the gradient out of .grad
    measurement = sums.finish(batch)           # .grad holds the sum; the one host synchronisation of the step

A Python hook for each tensor, as `measure.Meter` has it, costs more on a GPU than all the arithmetic. Here a
micro-batch is three calls of fused kernels, whatever the number of tensors, and they can be part of a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ebbflow.errors import ConfigError
from ebbflow.moments.estimate import Measurement
from ebbflow.moments.measure import Tally, check_complete, check_parameters
from ebbflow.moments.norms import norms

__all__ = ["Sums"]


class Sums:
    """Adds up the micro-batches of a step and, unless told otherwise, measures each; a `Meter` without hooks.

    A *micro-batch* is what is in `.grad` when it is closed, of one backward pass or several. `.grad` must be empty
    before a step. Layers are the given parameters in the given order; a parameter that gets no gradient counts as zero,
    and its `.grad` stays empty. The sums lie in buffers that stay where they are from step to step; they are the
    `.grad` of a finished step until the next one begins. Costs the memory of one more gradient. Sparse gradients become
    dense ones."""

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], *, layers: bool = False, measured: bool = True
    ) -> None:
        """`layers`: measure each parameter, and not only their sum; `measured`: False adds up only."""
        self.parameters = tuple(parameters)
        self.layers = layers
        self.measured = measured
        self.on = True
        """Whether micro-batches are added up and measured; off, closing a micro-batch leaves its gradient in
        `.grad`."""
        self.device = check_parameters(self.parameters)
        double = any(p.dtype == torch.float64 for p in self.parameters)
        self._sums = [torch.zeros_like(p, requires_grad=False) for p in self.parameters]
        self._norms = torch.zeros(
            len(self.parameters), device=self.device, dtype=torch.float64 if double else torch.float32
        )
        """Of the latest micro-batch."""
        self._squares = torch.zeros(len(self.parameters), device=self.device, dtype=torch.float64)
        """Sum of n_i |g_i|^2 over the closed micro-batches."""
        self.touched: set[int] = set()
        """Parameters that had a gradient in this step."""
        self._samples = 0
        self._micro_batches = 0

    @property
    def width(self) -> int:
        """Entries of a measurement: layers, or one."""
        return len(self.parameters) if self.layers else 1

    def discard(self) -> None:
        """Begin a step, or begin it again. Does not wait for the device."""
        if self.on:
            torch._foreach_zero_(self._sums)
        self._squares.zero_()
        self.touched.clear()
        self._samples = self._micro_batches = 0

    @torch.no_grad()
    def add(self) -> frozenset[int]:
        """Take a gradient out of `.grad` and add it; the parameters that had one. May be captured in a CUDA graph."""
        arrived: dict[int, torch.Tensor] = {}
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                arrived[index] = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                parameter.grad = None
        if not arrived:
            raise ConfigError("a micro-batch was closed, but no gradient arrived in it; call backward() first")
        if self.measured:
            found = norms(arrived)
            if len(found) == len(self.parameters):
                torch.stack([*found.values()], out=self._norms)
            else:
                zero = torch.zeros((), device=self.device, dtype=self._norms.dtype)
                torch.stack([found.get(i, zero) for i in range(len(self.parameters))], out=self._norms)
        torch._foreach_add_([self._sums[i] for i in arrived], [*arrived.values()])
        self.touched.update(arrived)
        return frozenset(arrived)

    def weigh(self, samples: int, scale: float = 1.0) -> None:
        """What was added last was `scale` times the mean gradient over `samples` samples. Does not wait."""
        if samples < 1:
            raise ConfigError(f"a micro-batch of {samples} samples was closed; expected at least one")
        if self.measured:
            wide = self._norms.to(torch.float64)
            self._squares.addcmul_(wide, wide, value=samples / scale**2)
        self._samples += samples
        self._micro_batches += 1

    def close_micro_batch(self, samples: int, scale: float = 1.0) -> None:
        """The gradient in `.grad` is `scale` times the mean over `samples` samples: add it and measure it."""
        if not self.on:
            return
        self.add()
        self.weigh(samples, scale)

    def put_back(self) -> None:
        """Leave in `.grad` what adding up there would have left."""
        for index in self.touched:
            self.parameters[index].grad = self._sums[index]

    def finish(self, batch: int, *, scale: float = 1.0) -> Measurement:
        """The step's measurement, when the sums hold `scale` times its mean gradient; waits for the device, once."""
        check_complete(batch, self._samples)
        self.put_back()
        found = norms(dict(enumerate(self._sums)))
        means = torch.stack([*found.values()]).to(torch.float64).square_()
        numbers = torch.cat([self._squares, means]).tolist()
        mean_sq = [number / batch for number in numbers[: len(self.parameters)]]
        sq_mean = [number / scale**2 for number in numbers[len(self.parameters) :]]
        if not self.layers:
            mean_sq, sq_mean = [sum(mean_sq)], [sum(sq_mean)]
        return Measurement(
            batch=batch, micro_batches=self._micro_batches, mean_sq=tuple(mean_sq), sq_mean=tuple(sq_mean)
        )

    def take(self) -> Tally:
        """What the micro-batches of the step come to, without waiting for the device; `.grad` holds their sum."""
        self.put_back()
        squares = self._squares if self.layers else self._squares.sum(0, keepdim=True)
        return Tally(
            samples=self._samples,
            micro_batches=self._micro_batches,
            squares=squares,
            mismatch=torch.zeros_like(squares[:1]),
        )

    def check(self, mismatch: float) -> None:
        """Nobody else has touched these gradients: there is nothing to refuse."""
