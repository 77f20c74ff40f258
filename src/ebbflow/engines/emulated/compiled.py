"""Fused passes by torch.compile and as CUDA graphs.

`CompiledPasses` compiles the forward pass for few shapes, however often the number of workers changes. `CapturedPasses`
replays a whole pass as one CUDA graph: one launch instead of several hundred, so that the GPU never waits for Python.
Measured on an H200 (ResNet-18, bf16, 2,048 samples per step in two passes): the kernels of a step take 24 ms, launching
them one by one 30 ms.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Literal

import torch

from ebbflow.engines.emulated.grouped_batch_norm import GroupedBatchNorm
from ebbflow.engines.loss_sum import LossSum
from ebbflow.engines.replica_step import Loss
from ebbflow.moments.meters import FusedMeter
from ebbflow.torch_api import mark_dynamic

__all__ = ["CapturedPasses", "CompiledPasses", "ComputePass", "Count", "Execution", "PassShape"]

Execution = Literal["static", "dynamic", "eager"]
"""How a pass is computed: compiled for the usual shape, compiled for all other shapes, or not compiled."""

_COMPILE_AFTER = 500
"""Passes of other shapes that are computed uncompiled before a graph for them is compiled.

On an H200, with ResNet-18 and 2,048 samples, compiling takes 40 s and an uncompiled pass 55 ms longer: it pays after
700 passes (later where such passes are replayed from a CUDA graph, which was not measured). The end of an epoch alone
does not get there in most runs; a changing number of workers soon does. """
_CAPTURE_AFTER = 2  # times that a pass was computed after which nothing is compiled or tuned any more
_MOST_GRAPHS = 64  # they share their memory, but each holds a few MB of its own


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
Count = torch.Tensor | float


class CompiledPasses:
    """At most three compiled graphs: for the usual shape, for all others, and for passes of a single micro-batch.

    A graph for other shapes is compiled only after they have occurred often enough; until then, and for the odd end of
    an epoch, the model runs uncompiled. That graph does not depend on the number and the size of the micro-batches.
    """

    def __init__(self, model: torch.nn.Module, loss: Loss, batch_norm: GroupedBatchNorm, usual: PassShape) -> None:
        """`usual`: the shape of the pass that most of the run's samples are in."""

        def run(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | LossSum:
            batch_norm.groups = inputs.shape[0]
            return loss(model, inputs.flatten(0, 1), targets.flatten(0, 1))

        self._batch_norm = batch_norm
        self._runs: dict[Execution, Run] = {
            "eager": run,
            "static": torch.compile(_copy(run), dynamic=False),
            "dynamic": torch.compile(_copy(run)),
        }
        self._usual = self._dimensions(usual)
        self._seen: Counter[bool] = Counter()

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
        """The loss of a pass."""
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


ComputePass = Callable[[Any, Any, PassShape, Execution, torch.Tensor], tuple[torch.Tensor, Count]]
"""(inputs, targets, shape, execution, factor) -> mean loss and count; leaves factor times the gradient in `.grad`."""


@dataclass(slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    touched: frozenset[int]
    """Parameters that get a gradient."""
    count: float | None
    """What the loss sums over; None where each replay computes it."""


class CapturedPasses:
    """Computes passes and adds their gradients to `sums`; a shape that occurs again is replayed from a CUDA graph.

    All that a pass reads and writes stays where it was when its graph was captured: parameters, the buffers of batch
    norm, the sums, and one buffer for the inputs of all shapes. Random numbers are drawn anew at each replay, from the
    generator as it is seeded then. What Python decides in a forward pass is decided once, at the capture.
    """

    def __init__(self, compute: ComputePass, sums: FusedMeter, *, samples: int) -> None:
        """`samples`: of the largest pass to be captured; larger ones are computed without a graph."""
        self._compute = compute
        self._sums = sums
        self._samples = samples
        self._pool = torch.cuda.graph_pool_handle()
        double = any(p.dtype == torch.float64 for p in sums.parameters)
        dtype = torch.float64 if double else torch.float32
        self._factor, self._loss, self._count = (torch.zeros((), device=sums.device, dtype=dtype) for _ in range(3))
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None
        self._graphs: OrderedDict[tuple[PassShape, Execution], _Graph] = OrderedDict()
        self._computed: Counter[tuple[PassShape, Execution]] = Counter()
        self.refused = ""
        """Why nothing is captured any more; empty as long as it is."""

    def __len__(self) -> int:
        return len(self._graphs)

    def __call__(
        self, inputs: Any, targets: Any, shape: PassShape, execution: Execution, factor: float
    ) -> tuple[torch.Tensor, Count]:
        """The mean loss of a pass and its count; `factor` times its gradient is added to the sums."""
        self._factor.fill_(factor)
        key = shape, execution
        if key in self._graphs or self._may_capture(key, inputs, targets):
            buffers = self._copy_in(inputs, targets)
            if key not in self._graphs:
                self._capture(*buffers, shape, execution)
        known = self._graphs.get(key)
        if known is None:
            self._computed[key] += 1
            computed = self._compute(inputs, targets, shape, execution, self._factor)
            self._sums.add()
            return computed
        self._graphs.move_to_end(key)
        known.graph.replay()
        self._sums.touched |= known.touched
        return self._loss.clone(), self._count.clone() if known.count is None else known.count

    def clear(self) -> None:
        """Forget everything captured: the model, or what is trained of it, has changed."""
        self._graphs.clear()
        self._computed.clear()
        self._buffers = None
        self._pool = torch.cuda.graph_pool_handle()

    def _may_capture(self, key: tuple[PassShape, Execution], inputs: Any, targets: Any) -> bool:
        plain = isinstance(inputs, torch.Tensor) and isinstance(targets, torch.Tensor)
        if self.refused or not plain or self._computed[key] < _CAPTURE_AFTER or len(inputs) > self._samples:
            return False
        if self._buffers is None:
            self._buffers = (self._buffer(inputs), self._buffer(targets))
        return all(
            tensor.shape[1:] == buffer.shape[1:] and tensor.dtype == buffer.dtype
            for tensor, buffer in zip((inputs, targets), self._buffers, strict=True)
        )

    def _buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        layout = torch.channels_last if tensor.dim() == 4 else torch.contiguous_format
        shape = (self._samples, *tensor.shape[1:])
        return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device).contiguous(memory_format=layout)

    def _copy_in(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._buffers is not None
        x, y = (buffer[: len(inputs)] for buffer in self._buffers)
        x.copy_(inputs)
        y.copy_(targets)
        return x, y

    def _capture(self, inputs: torch.Tensor, targets: torch.Tensor, shape: PassShape, execution: Execution) -> None:
        """Record the kernels of a pass; nothing is computed, and what the recording did to the sums is undone.

        Other threads may go on using the GPU meanwhile, as the one that pins prefetched samples does.
        """
        graph = torch.cuda.CUDAGraph()
        before = set(self._sums.touched)
        try:
            # By default a call of any thread spoils the capture, and fails itself.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                loss, count = self._compute(inputs, targets, shape, execution, self._factor)
                self._loss.copy_(loss)
                if isinstance(count, torch.Tensor):
                    self._count.copy_(count)
                touched = self._sums.add()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # a model that waits for the device in its forward pass, for instance
            self.refused = str(error).strip().splitlines()[0]
            for parameter in self._sums.parameters:
                parameter.grad = None
        else:
            fixed = None if isinstance(count, torch.Tensor) else count
            self._graphs[shape, execution] = _Graph(graph, touched, fixed)
            if len(self._graphs) > _MOST_GRAPHS:
                self._graphs.popitem(last=False)
        finally:
            self._sums.touched = before
