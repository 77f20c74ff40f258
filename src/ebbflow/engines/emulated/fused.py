"""Many virtual workers in one forward and backward pass: emulation at the speed of large batches.

A step of W workers is computed in a few *fused passes* of many micro-batches each. Samples see each other only in batch
norm, which therefore normalises each micro-batch with its own statistics (`grouped_batch_norm.py`); everything else of
a pass is one large batch. Noise and signal are measured from the passes: the estimators hold for gradients over any
number of samples (`moments/estimate.py`), so fewer and larger ones give the same numbers on average, with more scatter
per step."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from textwrap import shorten
from typing import Any

import torch

from ebbflow.core.spec import nearest
from ebbflow.core.wording import called
from ebbflow.data.ledger import MicroBatch
from ebbflow.engines.base import Engine, EngineParts, Faults, register_engine
from ebbflow.engines.batches import map_batch, tensors_in
from ebbflow.engines.captured import CapturedPasses, Count
from ebbflow.engines.emulated.compiled import CompiledPasses, Execution, PassShape
from ebbflow.engines.emulated.emulated_engine import EmulatedEngine, EmulatedStep, LoopEngine, Ranks
from ebbflow.engines.emulated.grouped_batch_norm import BatchNormMode, GroupedBatchNorm, unfusable
from ebbflow.engines.kept_buffers import KeptBuffers
from ebbflow.engines.loss_sum import LossSum, check_differentiable, loss_of, mean_over_samples
from ebbflow.engines.replica_step import (
    Fetch,
    Loss,
    ModelReset,
    Precision,
    fetch_seeded,
    needed_meter,
    trained_parameters,
)
from ebbflow.errors import ConfigError
from ebbflow.moments.meters import FlatMeter, FusedMeter, squared_norms
from ebbflow.plan.batch_plan import BatchPlan
from ebbflow.torch_api import compiler_error, foreach_mul_

__all__ = ["DEFAULT_FUSED_BATCH", "FusedEngine", "cut_into_passes"]

DEFAULT_FUSED_BATCH = {"cpu": 128, "cuda": 2048}
"""Samples of a fused pass, by device.

On a CPU larger ones gain nothing (32 to 256 were measured on the small workloads). On an H200, with ResNet-18 and 32x32
images, 2,048 samples keep the GPU busy for longer than it takes to launch their kernels, and 1,024 do not.
"""

_LOG = logging.getLogger(__name__)
_GROW_AFTER = 2000  # steps without an overflow after which the loss scale of fp16 is doubled, as in torch's GradScaler


def cut_into_passes(sizes: Sequence[int], *, samples: int, at_least: int = 1) -> list[PassShape]:
    """Cut micro-batches, in their order, into fused passes of at most about `samples` samples.

    A pass holds whole micro-batches of one size, at least one. The passes of a step are as even as can be, so that few
    shapes occur. There are `at_least` of them where the step has that many micro-batches.

    >>> cut_into_passes([32] * 70, samples=1024)
    [PassShape(count=24, size=32), PassShape(count=23, size=32), PassShape(count=23, size=32)]
    >>> cut_into_passes([5, 5, 4], samples=1024)            # the end of an epoch
    [PassShape(count=2, size=5), PassShape(count=1, size=4)]
    >>> cut_into_passes([8, 8, 8], samples=1024, at_least=2)
    [PassShape(count=2, size=8), PassShape(count=1, size=8)]
    """
    runs = [(size, len(list(same))) for size, same in groupby(sizes)]
    passes = [-(-count // max(1, samples // size)) for size, count in runs]
    while sum(passes) < min(at_least, len(sizes)):
        widest = max(range(len(runs)), key=lambda i: runs[i][1] / passes[i])
        passes[widest] += 1
    return [PassShape(count, size) for (size, total), k in zip(runs, passes, strict=True) for count in _even(total, k)]


def _even(count: int, parts: int) -> list[int]:
    each, more = divmod(count, parts)
    return [each + 1] * more + [each] * (parts - more)


@dataclass(frozen=True, slots=True)
class _Prefetched:
    """The first fetch of the step that is expected next."""

    step: EmulatedStep
    start: int
    stop: int
    fetched: tuple[Any, Any]
    generator_states: list[torch.Tensor]
    """States of the generators after the fetch."""


class FusedEngine(EmulatedEngine):
    """Emulates the workers of a plan many at a time; the same results as `LoopEngine` to float tolerance.

    Guarantees: the sample-weighted mean gradient; local batch norm over the samples of each worker and one update of
    the running statistics per step, as in the reference; at least two passes where a rule needs statistics and the step
    has two micro-batches; a pass that does not fit into the memory of a GPU is halved, and the step computed again.
    Outside of `gradients` the model is as the user gave it, except that weights of convolutions are channels-last on a
    GPU.

    Limits: dropout and augmentation draw other numbers than the reference does, since generators are seeded once per
    pass; they do not depend on what happened before. `batch_norm="sync"` computes the whole step in one pass, so
    nothing can be measured and nothing cut. A batch norm with a forward pass of its own is refused, and so is one whose
    rows cannot be attributed to workers, for example because they come by time and then by sample; the first pass of
    several micro-batches shows that."""

    precisions: tuple[Precision, ...] = ("fp32", "bf16", "fp16")
    loss: Loss

    def __init__(
        self,
        model: torch.nn.Module,
        fetch: Fetch,
        loss: Loss,
        plan: BatchPlan,
        *,
        samples: int,
        seed: int = 0,
        micro_batch: int | None = None,
        faults: Faults | None = None,
        needs: Collection[str] = (),
        parameters: Iterable[torch.nn.Parameter] | None = None,
        precision: Precision = "fp32",
        ranks: Ranks | None = None,
        fused_batch: int | None = None,
        batch_norm: BatchNormMode = "local",
        compile: bool = False,
        on_event: Callable[[str, str], None] = lambda what, text: None,
    ) -> None:
        """`needs` and `parameters`: as for `LoopEngine`. `fused_batch`: samples of a fused pass; default: the fastest.

        `compile`: half a minute or so at the first step, two to four times the speed after it on a GPU.
        `on_event(what, text)` is called when a pass is halved, and when the model cannot be compiled or captured.
        """
        if batch_norm not in ("local", "sync", "frozen"):
            raise ConfigError(f"batch_norm is {batch_norm!r}; {nearest(batch_norm, ['local', 'sync', 'frozen'])}")
        if batch_norm == "sync" and needs:
            raise ConfigError(
                "synchronised batch norm computes a step in one micro-batch, and a rule that measures the noise of the "
                "gradient needs two: use local or frozen batch norm, or a rule that measures nothing, such as sqrt"
            )
        if batch_norm == "sync" and ranks is not None:
            raise ConfigError(
                "synchronised batch norm computes a step in one pass, which ranks cannot share: use local or frozen "
                "batch norm, or a single process"
            )
        super().__init__(
            model, fetch, loss, plan, samples=samples, seed=seed, micro_batch=micro_batch, faults=faults,
            precision=precision, ranks=ranks, on_event=on_event,
        )  # fmt: skip
        self.mode: BatchNormMode = batch_norm
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.fused_batch = self._asked = fused_batch or DEFAULT_FUSED_BATCH.get(device.type, DEFAULT_FUSED_BATCH["cpu"])
        self._channels_last = device.type == "cuda"
        if self._channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._scale = 2.0**16 if precision == "fp16" else 1.0
        self._since_overflow = 0
        trained = trained_parameters(model, parameters)
        self.meter = needed_meter(trained, needs)
        self._groups = self._batch_norm = GroupedBatchNorm(model, batch_norm)
        self._buffers = KeptBuffers(model)
        self._share_with_ranks(trained)
        self._reset = ModelReset(model)
        self._autocast = self.autocast()
        self._parameters = [*model.parameters()]
        self._compiled = CompiledPasses(model, loss, self._groups, self._usual_shape()) if compile else None
        self._first_is_usual = False
        """Whether the first pass says more about those to come than the plan does."""
        self._sums = self.meter if isinstance(self.meter, FusedMeter) else None
        self._captured: CapturedPasses | None = None
        self.prefetches = device.type != "cpu"
        """Whether the first samples of a step are fetched while the one before is computed."""
        self._prefetched: _Prefetched | None = None
        self._checked_rows = False
        """Whether batch norm was seen to get the rows of each worker separately, in a pass of several micro-batches."""
        if compile and device.type == "cuda":
            self._sums = self._sums or FusedMeter([p for p in self._parameters if p.requires_grad], measured=False)
            self._captured = CapturedPasses(
                self._compute, self._sums, samples=self.fused_batch, on_refused=self._on_no_graph
            )
            self._always_measures = True  # captured passes contain the measuring

    # The contract -------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """How workers are emulated, as JSON values: for the header of a record."""
        compiled = self._compiled is not None
        return super().describe() | {"chunk": self.fused_batch, "batch_norm": self.mode, "compiled": compiled}

    def state_dict(self) -> dict[str, Any]:
        """The loss scale of fp16, the steps since its last overflow, and whether the rows have been checked."""
        return {"scale": self._scale, "since_overflow": self._since_overflow, "tried": self._checked_rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the loss scale of `state`; a run that saved none begins with a new one."""
        self._scale = float(state.get("scale", self._scale))
        self._since_overflow = int(state.get("since_overflow", 0))
        self._checked_rows = bool(state.get("tried", False))  # the state may be that of another engine

    _more_parts = ", or a smaller fused_batch"

    # Cutting a step into passes -----------------------------------------------------------------------------------

    def _parts(self, micro_batches: Sequence[MicroBatch]) -> tuple[list[Sequence[MicroBatch]], list[int]]:
        """One part per pass, dealt out to the ranks as if it were a worker.

        Where noise is measured, the passes are those of a single process, so that the measurement does not depend on
        the ranks. Otherwise there is a pass for every rank, if there are enough micro-batches."""
        at_least = 2 if self.meter is not None else self.ranks.world if self.ranks is not None else 1
        sizes = [micro_batch.stop - micro_batch.start for micro_batch in micro_batches]
        if self.mode == "sync":
            counts = [len(sizes)]
        else:
            counts = [shape.count for shape in cut_into_passes(sizes, samples=self._asked, at_least=at_least)]
        stops = [*accumulate(counts)]
        parts = [micro_batches[stop - count : stop] for stop, count in zip(stops, counts, strict=True)]
        return parts, list(range(len(parts)))

    def request(self, samples: int) -> None:
        """Called before the steps of a growing policy: the plan has the whole fleet, which only late steps use."""
        self._first_is_usual = self._current is None

    def _usual_shape(self) -> PassShape:
        """The shape of the pass that most of the plan's samples are in."""
        steps: Counter[tuple[int, int]] = Counter()
        for run in self.plan.runs():
            steps[run.workers, run.samples] += (run.stop if run.stop is not None else run.first + 10**9) - run.first
        samples: Counter[PassShape] = Counter()
        for (workers, batch), times in steps.items():
            for part in self._parts(self._planned(workers, batch))[0]:
                shape = PassShape(len(part), part[0].size) if self.mode != "sync" else PassShape(1, batch)
                samples[shape] += shape.samples * times
        return samples.most_common(1)[0][0]

    def _passes(self, step: EmulatedStep) -> list[tuple[int, int, PassShape]]:
        """Start, stop and shape of each pass: the step's parts, or smaller ones where the memory did not suffice."""
        if self.mode == "sync":
            return [(step.assignment.start, step.assignment.stop, PassShape(1, step.batch))]
        passes = []
        for part in step.parts:
            start, size = part[0].start, part[0].stop - part[0].start
            shapes = [PassShape(len(part), size)]
            if self.fused_batch < self._asked:
                shapes = cut_into_passes([size] * len(part), samples=self.fused_batch)
            for shape in shapes:
                stop = start + shape.count * size
                passes.append((start, stop, shape))
                start = stop
        return passes

    def _fetches(self, step: EmulatedStep) -> list[tuple[int, int]]:
        return [(start, stop) for start, stop, _ in self._passes(step)]

    # Fetching -----------------------------------------------------------------------------------------------------

    def _prefetch(self, step: EmulatedStep) -> None:
        """Fetch the first samples of the next step while the device is busy with this one.

        A guess: where the next step turns out to be another one, nothing of this is used.
        """
        self._prefetched = self._expected = None
        expected = self._expected_after(step) if self._as_expected else None
        if expected is None:
            return
        upcoming = self._make_step(step.number + 1, *expected)
        if not upcoming.batch:  # other ranks compute all of it
            return
        start, stop = self._fetches(upcoming)[0]
        fetched = self._fetch(upcoming, start, stop)
        states = [generator.get_state() for generator in self._generators]
        self._expected = upcoming
        self._prefetched = _Prefetched(upcoming, start, stop, fetched, states)

    def _fetch(self, step: EmulatedStep, start: int, stop: int) -> tuple[Any, Any]:
        ready = self._prefetched
        if ready is not None and ready.step is step and (ready.start, ready.stop) == (start, stop):
            for generator, state in zip(self._generators, ready.generator_states, strict=True):
                generator.set_state(state)
            return ready.fetched
        self._fetched = (step, start)
        indices, epoch = step.samples(start, stop), step.assignment.epoch
        return fetch_seeded(self.fetch, indices, self._generators, seed=self.seed, epoch=epoch, start=start)

    # Computing ----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._reset()
        self._groups.begin()
        self._buffers.begin()
        if self.meter is not None:
            self.meter.discard()  # of a step that an exception cut short
        if self._sums is not None and self._sums is not self.meter:
            self._sums.discard()
        if self._captured is not None:
            self._captured.begin(self._parameters, self._reset.modes.latest)

    def _on_no_graph(self, reason: str) -> None:
        self._report("no CUDA graph", f"every kernel is launched on its own: {reason}")

    def _backward(self, step: EmulatedStep) -> tuple[torch.Tensor | float, int, torch.Tensor | float]:
        """All passes of a step; again with smaller ones where the memory does not suffice."""
        scale = self._scale
        while True:
            passes = self._passes(step)
            try:
                with self._groups.installed():
                    total, count = self._run(step, passes)
            except torch.OutOfMemoryError as error:
                self._halve_passes([shape for _, _, shape in passes], error)
            else:
                if self._unscale(scale, step.batch, count):
                    return total, len(passes), count
            self._buffers.rollback()
            self._begin()

    def _run(self, step: EmulatedStep, passes: list[tuple[int, int, PassShape]]) -> tuple[torch.Tensor | float, Count]:
        """The mean loss of the passes, and what it sums over."""
        total: torch.Tensor | float = 0.0
        counted: Count = 0
        whole = step.assignment.stop - step.assignment.start
        for start, stop, shape in passes:
            inputs, targets = self._fetch(step, start, stop)
            if self._channels_last and isinstance(inputs, torch.Tensor) and inputs.dim() == 4:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            weight = (stop - start) / step.batch
            loss, count = self._pass(inputs, targets, shape, weight * self._scale)
            total, counted = total + loss * weight, counted + count
            self._groups.collect((stop - start) / whole)
        adder = self._sums or self.meter
        if isinstance(adder, (FusedMeter, FlatMeter)):
            adder.put_back()
        if self.prefetches:
            self._prefetch(step)
        return total, counted

    def _pass(self, inputs: Any, targets: Any, shape: PassShape, factor: float) -> tuple[torch.Tensor, Count]:
        """The mean loss of a pass and its count; `factor` times its gradient is added to that of the step."""
        if self._first_is_usual and self._compiled is not None:
            self._compiled.expect(shape)
        self._first_is_usual = False
        if not self._checked_rows and shape.count > 1 and self._groups.layers:
            return self._checking_pass(inputs, targets, shape, factor)
        plain = isinstance(inputs, torch.Tensor) and isinstance(targets, torch.Tensor)
        execution = self._compiled.execution(shape) if self._compiled is not None and plain else "eager"
        return self._add_gradient(inputs, targets, shape, execution, factor)

    def _add_gradient(
        self, inputs: Any, targets: Any, shape: PassShape, execution: Execution, factor: float
    ) -> tuple[torch.Tensor, Count]:
        if self._captured is not None and self._sums is not None:
            computed = self._captured(inputs, targets, (shape, execution), factor)
            self._sums.weigh(shape.samples, factor)
            return computed
        computed = self._compute(inputs, targets, (shape, execution), factor)
        if self.meter is not None:
            self.meter.close_micro_batch(shape.samples, factor)
        return computed

    def _checking_pass(self, inputs: Any, targets: Any, shape: PassShape, factor: float) -> tuple[torch.Tensor, Count]:
        """The first pass of several micro-batches, uncompiled: it shows whether each batch norm can separate them."""
        rows = [tensor for tensor in tensors_in(inputs) if tensor.dim() and len(tensor) == shape.samples]
        if not rows:
            raise ConfigError(
                f"the inputs are a {type(inputs).__name__} without a tensor of {shape.samples} rows, so batch norm "
                f"cannot be seen to separate the workers; use the loop ({called('engine', 'loop')})"
            )
        chosen = next((tensor for tensor in rows if tensor.is_floating_point()), rows[0])
        traced = chosen.detach().requires_grad_(chosen.is_floating_point())
        # A copy of it, since a model may change its inputs.
        inputs = map_batch(inputs, lambda value: traced.clone() if value is chosen else value)
        self._groups.traced_inputs = traced
        try:
            computed = self._add_gradient(inputs, targets, shape, "eager", factor)
        finally:
            self._groups.traced_inputs = None
        self._checked_rows = True
        return computed

    def _compute(
        self, inputs: Any, targets: Any, kind: tuple[PassShape, Execution], factor: torch.Tensor | float
    ) -> tuple[torch.Tensor, Count]:
        shape, execution = kind
        loss, count = mean_over_samples(self._forward(inputs, targets, shape, execution), shape.samples)
        check_differentiable(loss)
        (loss * factor).backward()  # type: ignore[no-untyped-call]
        return loss.detach(), count

    def _forward(self, inputs: Any, targets: Any, shape: PassShape, execution: Execution) -> torch.Tensor | LossSum:
        self._groups.groups = shape.count
        with self._autocast:
            if self._compiled is not None and execution != "eager":
                try:
                    return self._compiled(inputs, targets, shape, execution)
                except compiler_error() as error:
                    self._compiled = None
                    reason = " ".join(str(error).split())  # the first of its lines may be the type of the error only
                    self._report("not compiled", f"the model runs as it is: {shorten(reason, 200, placeholder=' ...')}")
            return loss_of(self.loss, self.model, inputs, targets)

    def _halve_passes(self, shapes: list[PassShape], error: torch.OutOfMemoryError) -> None:
        """Use smaller passes after the memory did not suffice for the largest one."""
        largest = max(shapes, key=lambda shape: shape.samples)
        if largest.count == 1:
            whole = "the whole step, which synchronised batch norm needs," if self.mode == "sync" else "one worker's"
            raise ConfigError(
                f"{whole} {largest.size} samples do not fit into the memory of the device: use a smaller local batch "
                f"or micro-batch, a smaller model, or precision bf16"
            ) from error
        self.fused_batch = largest.samples // 2
        self._report(
            "out of memory", f"{largest.samples} samples did not fit; from now on at most {self.fused_batch} at a time"
        )
        if self._captured is not None:
            self._captured.clear()
        if self._device_type == "cuda":
            torch.cuda.empty_cache()

    def _unscale(self, before: float, samples: int, count: Count) -> bool:
        """Take the loss scale of fp16 out of the gradients; False where it was too large and the step must be repeated.

        A gradient that is not finite even at scale 1 is left as it is, for the optimizer to judge. No scale was too
        large for it, so the next step begins with the scale of `before` again. A sum over many boxes or pixels is
        divided by their count only after the step, so that its scale may be as much smaller.
        """
        if self.precision != "fp16":
            return True
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if not math.isfinite(squared_norms(gradients).sum().item()):
            self._since_overflow = 0
            too_large = self._scale * float(count) > min(samples, float(count))
            self._scale = self._scale / 2 if too_large else before
            return not too_large
        foreach_mul_(gradients, 1 / self._scale)
        self._since_overflow += 1
        if self._since_overflow == _GROW_AFTER:
            self._scale, self._since_overflow = self._scale * 2, 0
        return True

    def _report(self, what: str, text: str) -> None:
        _LOG.warning("%s: %s", what, text)
        self.on_event(what, text)


# By name ----------------------------------------------------------------------------------------------------------

COMPILE_FROM = 2_000_000
"""Samples of a run from which compiling pays on a GPU.

Measured on an H200 with ResNet-18 and 32x32 images in bf16: compiling takes 25 s, or 65 s where the workers change, and
saves 26 s per million samples.
"""


def _common(parts: EngineParts) -> dict[str, Any]:
    return {
        "samples": parts.samples,
        "seed": parts.seed,
        "micro_batch": parts.config.micro_batch,
        "needs": parts.needs,
        "parameters": parts.parameters,
        "precision": parts.config.precision,
        "ranks": parts.ranks,
        "on_event": parts.on_event,
    }


def _planned(parts: EngineParts) -> BatchPlan:
    if parts.plan is None:
        raise ConfigError("an emulated engine follows a plan, and there is none; give a trace")
    return parts.plan


@register_engine("loop", measures=True)
def make_loop(parts: EngineParts) -> Engine:
    """Virtual workers one after another: the reference."""
    config = parts.config
    fused_only = {
        "fused_batch": config.fused_batch,
        "compile": config.compile,
        "batch_norm": config.batch_norm != "local",
    }
    if asked := [name for name, value in fused_only.items() if value]:
        raise ConfigError(f"{asked[0]} is a setting of the fused engine, but this run uses the loop; leave it out")
    return LoopEngine(parts.model, parts.fetch, parts.loss, _planned(parts), **_common(parts))


@register_engine("fused", measures=True)
def make_fused(parts: EngineParts) -> Engine:
    """Many virtual workers in one pass."""
    if parts.loss is None:
        raise ConfigError("the fused engine computes the backward passes itself: give loss=, or use engine='loop'")
    compile = parts.config.compile
    if compile is None:
        on_gpu = any(parameter.device.type == "cuda" for parameter in parts.parameters)
        compile = on_gpu and parts.optimizer.total_samples >= COMPILE_FROM
    return FusedEngine(
        parts.model,
        parts.fetch,
        parts.loss,
        _planned(parts),
        **_common(parts),
        fused_batch=parts.config.fused_batch,
        batch_norm=parts.config.batch_norm,
        compile=compile,
    )


@register_engine("auto", measures=True)
def make_auto(parts: EngineParts) -> Engine:
    """Fused where the model allows, else the loop.

    On a CPU, too, fused is nowhere slower than the loop (digits-mlp, digits-cnn and shakespeare-gpt, 1 to 16 workers).
    """
    return make_loop(parts) if parts.loss is None or unfusable(parts.model) else make_fused(parts)
