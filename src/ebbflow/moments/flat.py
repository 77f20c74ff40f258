"""`Sums` for small models on a CPU, where every call counts: the gradient of a micro-batch is one vector.

A few calls a micro-batch and a cheap one a tensor (20 us for four tensors), where hooks cost a Python call for each.
For large models it is the other way round: there a tensor is best measured when it arrives, while it is in the cache.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ebbflow.errors import ConfigError
from ebbflow.moments.estimate import Measurement
from ebbflow.moments.measure import Tally, check_complete, check_parameters

__all__ = ["FlatSums"]

_LARGEST = 1 << 18
"""Numbers in a model that is small: two vectors of them stay in the cache of a core."""


class FlatSums:
    """Adds up and measures the micro-batches of a step, without hooks; see `Sums`, whose guarantees it shares.

    `suits` says for which parameters it is made: few numbers, of one type, on a CPU.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], *, layers: bool = False) -> None:
        self.parameters = tuple(parameters)
        self.layers = layers
        self.on = True
        self.device = check_parameters(self.parameters)
        sizes = [parameter.numel() for parameter in self.parameters]
        dtype = self.parameters[0].dtype
        self._sum, self._micro_batch = (torch.zeros(sum(sizes), dtype=dtype) for _ in range(2))
        self._parts = [(torch.split(vector, sizes), vector) for vector in (self._sum, self._micro_batch)]
        shapes = [parameter.shape for parameter in self.parameters]
        self._views = [part.view(shape) for part, shape in zip(self._parts[0][0], shapes, strict=True)]
        self._nothing = [torch.zeros(size, dtype=dtype) for size in sizes]
        self.touched: set[int] = set()
        self._squares = [0.0] * self.width
        self._samples = 0
        self._micro_batches = 0

    @staticmethod
    def suits(parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Whether a model of these parameters is small and plain enough."""
        known = list(parameters)
        return (
            0 < sum(parameter.numel() for parameter in known) <= _LARGEST
            and {parameter.device.type for parameter in known} == {"cpu"}
            and {parameter.dtype for parameter in known} in ({torch.float32}, {torch.float64})
        )

    @property
    def width(self) -> int:
        """Entries of a measurement: layers, or one."""
        return len(self.parameters) if self.layers else 1

    def discard(self) -> None:
        """Begin a step, or begin it again."""
        self.touched.clear()
        self._squares = [0.0] * self.width
        self._samples = self._micro_batches = 0

    def close_micro_batch(self, samples: int, scale: float = 1.0) -> None:
        """The gradient in `.grad` is `scale` times the mean over `samples` samples: add it and measure it."""
        if not self.on:
            return
        if samples < 1:
            raise ConfigError(f"a micro-batch of {samples} samples was closed; expected at least one")
        vectors, arrived = [], False
        for index, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            if gradient is None:
                vectors.append(self._nothing[index])
                continue
            parameter.grad = None
            arrived = True
            self.touched.add(index)
            if gradient.is_sparse or gradient.requires_grad:  # the latter after backward(create_graph=True)
                gradient = gradient.detach().to_dense()
            vectors.append(gradient.flatten())
        if not arrived:
            raise ConfigError("a micro-batch was closed, but no gradient arrived in it; call backward() first")
        parts, vector = self._parts[self._micro_batches > 0]  # the first micro-batch of a step begins the sum
        torch.cat(vectors, out=vector)
        factor = samples / scale**2
        for index, square in enumerate(self._measure(parts, vector)):
            self._squares[index] += factor * square
        if self._micro_batches:
            self._sum.add_(vector)
        self._samples += samples
        self._micro_batches += 1

    def _measure(self, parts: Iterable[torch.Tensor], whole: torch.Tensor) -> list[float]:
        return [torch.dot(part, part).item() for part in (parts if self.layers else (whole,))]

    def put_back(self) -> None:
        """Leave in `.grad` what adding up there would have left."""
        for index in self.touched:
            self.parameters[index].grad = self._views[index]

    def finish(self, batch: int, *, scale: float = 1.0) -> Measurement:
        """The step's measurement, when the sum holds `scale` times its mean gradient."""
        check_complete(batch, self._samples)
        self.put_back()
        mean_sq = tuple([square / batch for square in self._squares])
        sq_mean = tuple([square / scale**2 for square in self._measure(*self._parts[0])])
        return Measurement(batch=batch, micro_batches=self._micro_batches, mean_sq=mean_sq, sq_mean=sq_mean)

    def take(self) -> Tally:
        """What the micro-batches of the step come to; `.grad` holds their sum."""
        self.put_back()
        squares = torch.tensor(self._squares, dtype=torch.float64)
        nothing = torch.zeros_like(squares[:1])
        return Tally(samples=self._samples, micro_batches=self._micro_batches, squares=squares, mismatch=nothing)

    def check(self, mismatch: float) -> None:
        """Nobody else has touched these gradients: there is nothing to refuse."""
