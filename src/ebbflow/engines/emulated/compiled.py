"""The forward pass of a chunk, compiled for few shapes: the number of workers may change at every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import FunctionType
from typing import Literal

import torch

from ebbflow.engines.emulated.chunks import Chunk
from ebbflow.engines.emulated.grouped import GroupedBatchNorm
from ebbflow.engines.micro_batches import Loss

__all__ = ["Compiled", "Way"]

Way = Literal["usual", "others", "plain"]
"""How a chunk is computed: by the graph for the usual shape, by the one for all others, or as it is."""

_PATIENCE = 500
"""Chunks of other shapes, computed as they are, before a graph is made for them.

On an H200, with ResNet-18 and 2,048 samples, making it takes 40 s, and a chunk computed as it is takes 55 ms longer: it
pays after 700 (later where such chunks are replayed from a CUDA graph, which was not measured). An epoch's tail alone
does not get there in most runs, a changing number of workers soon does.
"""

Run = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Compiled:
    """Three graphs at most: for the usual shape, for all others, and for chunks of a single group.

    A graph is made for other shapes only after they have turned up often enough; until then, and for the odd tail of
    an epoch, the model is run as it is. The graph for all others does not depend on the number and the size of the
    groups.
    """

    def __init__(self, model: torch.nn.Module, loss: Loss, batch_norm: GroupedBatchNorm, usual: Chunk) -> None:
        """`usual`: the chunk that most of the run's samples are in."""

        def run(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            batch_norm.groups = inputs.shape[0]
            return loss(model, inputs.flatten(0, 1), targets.flatten(0, 1))

        self._batch_norm = batch_norm
        self._runs: dict[Way, Run] = {
            "plain": run,
            "usual": torch.compile(_copy(run), dynamic=False),
            "others": torch.compile(_copy(run)),
        }
        self._usual = self._shape(usual)
        self._seen: Counter[bool] = Counter()

    def way(self, chunk: Chunk) -> Way:
        """How the next chunk, which is this one, is to be computed."""
        shape = self._shape(chunk)
        if shape == self._usual:
            return "usual"
        single = shape[0] == 1  # which the compiler takes for a constant
        self._seen[single] += 1
        return "others" if self._seen[single] > _PATIENCE else "plain"

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor, chunk: Chunk, way: Way) -> torch.Tensor:
        """The mean loss of a chunk."""
        shape = self._shape(chunk)
        inputs, targets = (tensor.reshape(*shape, *tensor.shape[1:]) for tensor in (inputs, targets))
        if way == "others":
            for tensor in (inputs, targets):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
                torch._dynamo.maybe_mark_dynamic(tensor, 1)
        return self._runs[way](inputs, targets)

    def _shape(self, chunk: Chunk) -> tuple[int, int]:
        # Without batch norm groups mean nothing: any number of samples has one shape.
        return (chunk.groups, chunk.size) if self._batch_norm.layers else (chunk.samples, 1)


def _copy(function: Run) -> Run:
    """The same function with a code object of its own, by which the compiler keeps its graphs and limits their number.

    Without it all engines of a process would share them, and from the eighth on nothing would be compiled.
    """
    assert isinstance(function, FunctionType)
    return FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__
    )
