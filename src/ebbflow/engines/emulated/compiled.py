"""The forward pass of a chunk, compiled for few shapes: the number of workers may change at every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import FunctionType

import torch

from ebbflow.engines.emulated.base import Loss
from ebbflow.engines.emulated.chunks import Chunk
from ebbflow.engines.emulated.grouped import GroupedBatchNorm

__all__ = ["Compiled"]

_PATIENCE = 20  # chunks of other shapes, computed without the compiler, before a graph is made for them

Run = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Compiled:
    """Three graphs at most: for the first shape that is seen, for all others, and for chunks of a single group.

    Compiling takes about as long as two thousand chunks, so a graph is made for other shapes only after they have
    turned up often enough; until then, and for the odd tail of an epoch, the model is run as it is. The graph for all
    others does not depend on the number and the size of the groups.
    """

    def __init__(self, model: torch.nn.Module, loss: Loss, batch_norm: GroupedBatchNorm) -> None:
        def run(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            batch_norm.groups = inputs.shape[0]
            return loss(model, inputs.flatten(0, 1), targets.flatten(0, 1))

        self._batch_norm = batch_norm
        self._plain: Run = run
        self._first: Run = torch.compile(_copy(run), dynamic=False)
        self._others: Run = torch.compile(_copy(run))
        self._shape: tuple[int, int] | None = None
        self._seen: Counter[bool] = Counter()

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """The mean loss of a chunk."""
        # Without batch norm groups mean nothing: any number of samples has one shape.
        shape = (chunk.groups, chunk.size) if self._batch_norm.layers else (chunk.samples, 1)
        inputs, targets = (tensor.reshape(*shape, *tensor.shape[1:]) for tensor in (inputs, targets))
        self._shape = self._shape or shape
        if shape == self._shape:
            return self._first(inputs, targets)
        single = shape[0] == 1
        self._seen[single] += 1
        if self._seen[single] <= _PATIENCE:
            return self._plain(inputs, targets)
        for tensor in (inputs, targets):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
            torch._dynamo.maybe_mark_dynamic(tensor, 1)
        return self._others(inputs, targets)


def _copy(function: Run) -> Run:
    """The same function with a code object of its own, by which the compiler keeps its graphs and limits their number.

    Without it all engines of a process would share them, and from the eighth on nothing would be compiled.
    """
    assert isinstance(function, FunctionType)
    return FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__
    )
