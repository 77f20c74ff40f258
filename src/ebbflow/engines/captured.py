"""Whole passes as CUDA graphs: one launch instead of several hundred, so that the GPU never waits for Python.

Measured on an H200 (ResNet-18, bf16, 2,048 samples per step in two passes): the kernels of a step take 24 ms, launching
them one by one 30 ms.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ebbflow.moments.meters import FusedMeter
from ebbflow.torch_api import clear_failed_capture

__all__ = ["CapturedPasses", "ComputePass", "Count"]

_CAPTURE_AFTER = 2  # times that a pass was computed after which nothing is compiled or tuned any more
_MOST_GRAPHS = 64  # they share their memory, but each holds a few MB of its own

Count = torch.Tensor | float
ComputePass = Callable[[Any, Any, Any, torch.Tensor], tuple[torch.Tensor, Count]]
"""(inputs, targets, kind, factor) -> mean loss and count; leaves factor times the gradient in `.grad`."""


@contextmanager
def _fastest_convolutions() -> Iterator[None]:
    """Let cuDNN try its algorithms for every shape that it has not seen, and take the fastest from then on.

    That takes a second or so per shape, which pays only for shapes that occur again: those that are captured. Measured
    on an H200 (ResNet-18, bf16, passes of 2,048 samples): 6 % more images per second.
    """
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@dataclass(slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    touched: frozenset[int]
    """Parameters that get a gradient."""
    count: float | None
    """What the loss sums over; None where each replay computes it."""


class CapturedPasses:
    """Computes passes and adds their gradients to `sums`; a pass that occurs again is replayed from a CUDA graph.

    All that a pass reads and writes stays where it was when its graph was captured: parameters, the buffers of batch
    norm, the sums, and one buffer for the inputs of all passes. Random numbers are drawn anew at each replay, from the
    generator as it is seeded then. What Python decides in a forward pass is decided once, at the capture.
    """

    def __init__(
        self, compute: ComputePass, sums: FusedMeter, *, samples: int,
        on_refused: Callable[[str], None] = lambda reason: None,
    ) -> None:  # fmt: skip
        """`samples`: of the largest pass to be captured; larger ones are computed without a graph. `on_refused(reason)`
        is called when nothing is captured from now on."""
        self._compute = compute
        self._sums = sums
        self._samples = samples
        self._on_refused = on_refused
        self._pool = torch.cuda.graph_pool_handle()
        double = any(p.dtype == torch.float64 for p in sums.parameters)
        dtype = torch.float64 if double else torch.float32
        self._factor, self._loss, self._count = (torch.zeros((), device=sums.device, dtype=dtype) for _ in range(3))
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None
        self._graphs: OrderedDict[Hashable, _Graph] = OrderedDict()
        self._computed: Counter[Hashable] = Counter()
        self._trained: tuple[bool, ...] = ()
        self._modes: tuple[bool, ...] = ()
        self.refused = ""
        """Why nothing is captured any more; empty as long as it is."""

    def __len__(self) -> int:
        return len(self._graphs)

    def begin(self, parameters: Sequence[torch.nn.Parameter], modes: Sequence[bool] = ()) -> None:
        """Begin a step of a model with these parameters, of which others may be trained than in the step before.

        `modes`: whether each module is in training mode, which may have changed, too."""
        trained = tuple(parameter.requires_grad for parameter in parameters)
        if (trained, tuple(modes)) == (self._trained, self._modes):
            return
        self._trained, self._modes = trained, tuple(modes)
        self.clear()
        summed = {id(parameter) for parameter in self._sums.parameters}
        if any(parameter.requires_grad and id(parameter) not in summed for parameter in parameters):
            # Its gradient would be written where it was at the capture, and nobody reads it there.
            self._refuse("a parameter is trained that was not when the engine was made")

    def __call__(self, inputs: Any, targets: Any, kind: Hashable, factor: float) -> tuple[torch.Tensor, Count]:
        """The mean loss of a pass and its count; `factor` times its gradient is added to the sums.

        `kind`: passes of the same kind have inputs of the same shape, and do the same with them."""
        self._factor.fill_(factor)
        known = None
        if self._fits(kind, inputs, targets):
            buffers = self._copy_in(inputs, targets)
            if kind not in self._graphs:
                self._capture(*buffers, kind)
            known = self._graphs.get(kind)
        if known is None:
            self._computed[kind] += 1
            last = self._computed[kind] == _CAPTURE_AFTER and not self.refused and self._small(inputs, targets)
            with _fastest_convolutions() if last else nullcontext():  # the capture, which is next, uses what they found
                computed = self._compute(inputs, targets, kind, self._factor)
            self._sums.add()
            return computed
        self._graphs.move_to_end(kind)
        known.graph.replay()
        self._sums.touched |= known.touched
        return self._loss.clone(), self._count.clone() if known.count is None else known.count

    def clear(self) -> None:
        """Forget everything captured: the model, or what is trained of it, has changed."""
        self._graphs.clear()
        self._computed.clear()
        self._buffers = None
        self._pool = torch.cuda.graph_pool_handle()

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        self._on_refused(reason)

    def _fits(self, kind: Hashable, inputs: Any, targets: Any) -> bool:
        """Whether a pass can be replayed, or captured now, with these inputs in the buffers."""
        if not self._small(inputs, targets):
            return False
        if kind not in self._graphs and (self.refused or self._computed[kind] < _CAPTURE_AFTER):
            return False
        if self._buffers is None:
            self._buffers = (self._buffer(inputs), self._buffer(targets))
        return all(
            tensor.shape[1:] == buffer.shape[1:] and tensor.dtype == buffer.dtype
            for tensor, buffer in zip((inputs, targets), self._buffers, strict=True)
        )

    def _small(self, inputs: Any, targets: Any) -> bool:
        """Whether these are tensors that the buffers have room for."""
        plain = isinstance(inputs, torch.Tensor) and isinstance(targets, torch.Tensor)
        return plain and len(inputs) <= self._samples

    def _buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """Room for the rows of the largest pass, in the memory layout of this one."""
        last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
        layout = torch.channels_last if last else torch.contiguous_format
        shape = (self._samples, *tensor.shape[1:])
        return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device).contiguous(memory_format=layout)

    def _copy_in(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._buffers is not None
        x, y = (buffer[: len(inputs)] for buffer in self._buffers)
        x.copy_(inputs)
        y.copy_(targets)
        return x, y

    def _capture(self, inputs: torch.Tensor, targets: torch.Tensor, kind: Hashable) -> None:
        """Record the kernels of a pass; nothing is computed, and what the recording did to the sums is undone.

        Other threads may go on using the GPU meanwhile, as the one that pins prefetched samples does.
        """
        graph = torch.cuda.CUDAGraph()
        before, stream = set(self._sums.touched), torch.cuda.current_stream()
        try:
            # By default a call of any thread spoils the capture, and fails itself.
            recording = torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")
            with _fastest_convolutions(), recording:
                loss, count = self._compute(inputs, targets, kind, self._factor)
                self._loss.copy_(loss)
                if isinstance(count, torch.Tensor):
                    self._count.copy_(count)
                touched = self._sums.add()
        except RuntimeError as error:
            clear_failed_capture(self._pool, stream)
            for parameter in self._sums.parameters:
                parameter.grad = None
            if isinstance(error, torch.OutOfMemoryError):
                raise
            # A model that waits for the device in its forward pass, for instance. What the end of the capture says then
            # is only that something failed before.
            before_it = error.__context__
            self._refuse(_first_line(before_it if isinstance(before_it, RuntimeError) else error))
        else:
            fixed = None if isinstance(count, torch.Tensor) else count
            self._graphs[kind] = _Graph(graph, touched, fixed)
            if len(self._graphs) > _MOST_GRAPHS:
                self._graphs.popitem(last=False)
        finally:
            self._sums.touched = before


def _first_line(error: RuntimeError) -> str:
    """What an error says, in one line; its type if it says nothing."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
