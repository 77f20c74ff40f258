"""Fused passes by torch.compile: for few shapes, however often the number of workers changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Literal

import torch

from ebbflow.engines.emulated.grouped_batch_norm import GroupedBatchNorm
from ebbflow.engines.loss_sum import LossSum
from ebbflow.engines.replica_step import Loss
from ebbflow.torch_api import mark_dynamic

__all__ = ["CompiledPasses", "Execution", "PassShape"]

Execution = Literal["static", "dynamic", "eager"]
"""How a pass is computed: compiled for the usual shape, compiled for all other shapes, or not compiled."""

_COMPILE_AFTER = 500
"""Passes of other shapes that are computed uncompiled before a graph for them is compiled.

On an H200, with ResNet-18 and 2,048 samples, compiling takes 40 s and an uncompiled pass 55 ms longer: it pays after
700 passes (later where such passes are replayed from a CUDA graph, which was not measured). The end of an epoch alone
does not get there in most runs; a changing number of workers soon does.
"""


@dataclass(frozen=True, slots=True)
class PassShape:
    """Micro-batches of equal size that are computed in one pass."""

    count: int
    """Number of micro-batches."""
    size: int
    """Samples of each micro-batch."""

    samples: int = field(init=False, repr=False, compare=False)
    """Samples of the pass."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", self.count * self.size)


Run = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | LossSum]


class CompiledPasses:
    """At most three compiled graphs: for the usual shape, for all others, and for passes of a single micro-batch.

    A graph for other shapes is compiled only after they have occurred often enough; until then, and for the odd end of
    an epoch, the model runs uncompiled. That graph does not depend on the number and the size of the micro-batches.
    """

    def __init__(self, model: torch.nn.Module, loss: Loss, batch_norm: GroupedBatchNorm, usual: PassShape) -> None:
        """`usual`: the shape of the pass that most of the run's samples are in, as far as that is known."""

        def run(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | LossSum:
            batch_norm.groups = inputs.shape[0]
            return loss(model, inputs.flatten(0, 1), targets.flatten(0, 1))

        self._batch_norm = batch_norm
        self._runs: dict[Execution, Run] = {
            "static": torch.compile(_copy(run), dynamic=False),
            "dynamic": torch.compile(_copy(run)),
        }
        self.expect(usual)
        self._seen: Counter[bool] = Counter()

    def expect(self, usual: PassShape) -> None:
        """Compile a graph for this shape at its first pass; nothing was computed before."""
        self._usual = self._dimensions(usual)

    def execution(self, shape: PassShape) -> Execution:
        """How the next pass, which has this shape, is to be computed."""
        dimensions = self._dimensions(shape)
        if dimensions == self._usual:
            return "static"
        single = dimensions[0] == 1  # which the compiler treats as a constant
        self._seen[single] += 1
        return "dynamic" if self._seen[single] > _COMPILE_AFTER else "eager"

    def __call__(
        self, inputs: torch.Tensor, targets: torch.Tensor, shape: PassShape, execution: Execution
    ) -> torch.Tensor | LossSum:
        """The loss of a pass by one of the graphs; the engine itself computes those that are "eager"."""
        dimensions = self._dimensions(shape)
        inputs, targets = (tensor.reshape(*dimensions, *tensor.shape[1:]) for tensor in (inputs, targets))
        if execution == "dynamic":
            for tensor in (inputs, targets):
                mark_dynamic(tensor, 0, 1)
        return self._runs[execution](inputs, targets)

    def _dimensions(self, shape: PassShape) -> tuple[int, int]:
        # Without batch norm micro-batches make no difference: any number of samples has one shape.
        return (shape.count, shape.size) if self._batch_norm.layers else (shape.samples, 1)


def _copy(function: Run) -> Run:
    """The same function with a code object of its own, by which the compiler stores its graphs and limits their number.

    Without it all engines of a process would share them, and from the eighth on nothing would be compiled.
    """
    assert isinstance(function, FunctionType)
    return FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__
    )
