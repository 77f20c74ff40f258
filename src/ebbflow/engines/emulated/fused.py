"""Many virtual workers in one forward and backward pass: emulation at the speed of large batches.

A step of W workers of b samples is cut into a few *chunks* of many workers each. Samples do not see each other but in
batch norm, which therefore works on groups of one worker's samples (`grouped.py`); everything else of a chunk is one
large batch. The chunks are the micro-batches that noise and signal are measured from: the estimators hold for
micro-batches of any size (`moments/estimate.py`), so fewer and larger ones give the same numbers on average, with more
scatter in each step."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from ebbflow.core.spec import nearest
from ebbflow.data.ledger import Assignment, MicroBatch
from ebbflow.engines.base import Faults
from ebbflow.engines.emulated.base import EmulatedEngine, same_step
from ebbflow.engines.emulated.chunks import Chunk, cut
from ebbflow.engines.emulated.compiled import Compiled, Way
from ebbflow.engines.emulated.graphs import Graphs
from ebbflow.engines.emulated.grouped import BatchNormMode, GroupedBatchNorm
from ebbflow.engines.emulated.ranks import Ranks
from ebbflow.engines.emulated.step import Step
from ebbflow.engines.micro_batches import Fetch, Loss, Precision
from ebbflow.errors import ConfigError
from ebbflow.moments.meters import FlatMeter, FusedMeter, squared_norms
from ebbflow.plan.batch_plan import BatchPlan, StepSize

__all__ = ["DEFAULT_CHUNK", "FusedEngine"]

DEFAULT_CHUNK = {"cpu": 128, "cuda": 2048}
"""Samples of a chunk, by device.

On a CPU larger ones gain nothing (32 to 256 were measured on the small workloads); on an H200, with ResNet-18 and 32x32
images, 2,048 keep the GPU busy for longer than it takes to launch them, and 1,024 do not.
"""

_LOG = logging.getLogger(__name__)
_GROW_AFTER = 2000  # steps without an overflow after which the loss scale of fp16 is doubled, as in torch's GradScaler


@dataclass(frozen=True, slots=True)
class _Ahead:
    """What was fetched for the step that should come next."""

    step: Step
    range: tuple[int, int]
    """The positions that were fetched."""
    fetched: tuple[torch.Tensor, torch.Tensor]
    states: list[torch.Tensor]
    """Of the generators, after the fetch."""


class FusedEngine(EmulatedEngine):
    """Emulates the workers of a plan many at a time; the same results as `LoopEngine` to float tolerance.

    Guarantees: the sample-weighted mean gradient; local batch norm over each worker's own samples and one update of
    the running statistics a step, as in the reference; at least two chunks where a rule needs statistics and the step
    has two groups; a chunk that does not fit into the memory of a GPU is halved, and the step computed again. Outside
    of `gradients` the model is as the user gave it, except that weights of convolutions lie channels-last on a GPU.

    Limits: dropout and augmentation draw other numbers than the reference does, since they are seeded once a chunk;
    they do not depend on what happened before. `batch_norm="sync"` takes the whole step in one pass, so that nothing
    can be measured and nothing cut. A batch norm with a forward pass of its own is refused, and so is one that gets
    rows which cannot be told apart by worker, as the first chunk of several workers shows: by time and then by sample,
    for instance.
    """

    precisions: tuple[Precision, ...] = ("fp32", "bf16", "fp16")
    _batch_norm: GroupedBatchNorm

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
        chunk: int | None = None,
        batch_norm: BatchNormMode = "local",
        compile: bool = False,
        on_event: Callable[[str, str], None] = lambda what, text: None,
        ranks: Ranks | None = None,
    ) -> None:
        """`chunk`: samples of one backward pass; by default what is fastest on the device. `micro_batch`: of one group.

        `compile`: half a minute or so at the first step, two to four times the speed after it on a GPU.
        `on_event(what, text)` is told of a chunk that was halved and of a model that cannot be compiled.
        """
        if batch_norm not in ("local", "sync", "frozen"):
            raise ConfigError(f"batch_norm is {batch_norm!r}; {nearest(batch_norm, ['local', 'sync', 'frozen'])}")
        if batch_norm == "sync" and needs:
            raise ConfigError(
                "synchronised batch norm makes a step one micro-batch, and a rule that measures the noise of the "
                "gradient "
                "needs two: use local or frozen batch norm, or a rule that measures nothing, such as linear or sqrt"
            )
        if batch_norm == "sync" and ranks is not None:
            raise ConfigError(
                "synchronised batch norm takes a step in one pass, which ranks cannot share: use local or frozen batch "
                "norm, or a single process"
            )
        self.mode: BatchNormMode = batch_norm
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.chunk = self._asked = chunk or DEFAULT_CHUNK.get(device.type, DEFAULT_CHUNK["cpu"])
        self.on_event = on_event
        self._channels_last = device.type == "cuda"
        if self._channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._scale = 2.0**16 if precision == "fp16" else 1.0
        self._since_overflow = 0
        super().__init__(
            model, fetch, loss, plan, samples=samples, seed=seed, micro_batch=micro_batch, faults=faults, needs=needs,
            parameters=parameters, precision=precision, ranks=ranks,
        )  # fmt: skip
        self._compiled = Compiled(model, loss, self._batch_norm, self._usual_chunk()) if compile else None
        self._sums = self.meter if isinstance(self.meter, FusedMeter) else None
        self._graphs: Graphs | None = None
        self._trained: tuple[bool, ...] = ()
        self.prefetches = device.type != "cpu"
        """Whether the first samples of a step are fetched while the one before is computed."""
        self._ahead: _Ahead | None = None
        self._tried = False
        """Whether batch norm was seen to get the rows of each worker apart, in a chunk of several."""
        if compile and device.type == "cuda":
            trained = [p for p in model.parameters() if p.requires_grad]
            self._sums = self._sums or FusedMeter(trained, measured=False)
            self._graphs = Graphs(self._compute, self._sums, samples=self.chunk)

    def describe(self) -> dict[str, Any]:
        """How workers are emulated, as JSON: what a record's header keeps."""
        compiled = self._compiled is not None
        return super().describe() | {"chunk": self.chunk, "batch_norm": self.mode, "compiled": compiled}

    def state(self) -> dict[str, float]:
        """The loss scale of fp16, the steps that it has suited, and whether the model has been tried."""
        return {"scale": self._scale, "since_overflow": self._since_overflow, "tried": self._tried}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on with the loss scale of `state`; that of a run which kept none begins anew."""
        self._scale = float(state.get("scale", self._scale))
        self._since_overflow = int(state.get("since_overflow", 0))
        self._tried = bool(state.get("tried", True))

    def measure(self, on: bool) -> None:
        """Measure the upcoming steps or not; captured chunks, which have the measuring in them, always do."""
        super().measure(on or self._graphs is not None)

    def _make_batch_norm(self) -> GroupedBatchNorm:
        return GroupedBatchNorm(self.model, self.mode)

    def _begin(self) -> None:
        super()._begin()
        if self._sums is not None and self._sums is not self.meter:
            self._sums.discard()
        if self._graphs is not None and self._trained != (trained := tuple(p.requires_grad for p in self._parameters)):
            self._trained = trained
            self._graphs.clear()
            assert self._sums is not None
            summed = {id(p) for p in self._sums.parameters}
            if any(p.requires_grad and id(p) not in summed for p in self._parameters):
                # Its gradient would be written where it lay at the capture, and nobody looks there.
                self._graphs.refused = "a parameter is trained that was not when the engine was made"
                self._tell("no CUDA graph", f"every kernel is launched on its own: {self._graphs.refused}")

    def _backward(self, step: Step) -> tuple[torch.Tensor | float, int]:
        """All chunks of a step; again with smaller ones where the memory does not suffice."""
        scale = self._scale
        while True:
            chunks = self._cut(step)
            try:
                with self._batch_norm.installed():
                    total = self._pass(step, chunks)
            except torch.OutOfMemoryError as error:
                self._shrink(chunks, error)
            else:
                if self._unscaled(scale):
                    return total, len(chunks)
            self._begin()

    def _parts(self, groups: Sequence[MicroBatch]) -> tuple[list[Sequence[MicroBatch]], list[int]]:
        """A chunk a part, dealt out to the ranks as if it were a worker.

        Where noise is measured, and micro-batches therefore count, they are what one process would have; otherwise
        there is a chunk for every rank, if there are enough groups."""
        at_least = 2 if self.meter is not None else self.ranks.world if self.ranks is not None else 1
        sizes = [group.size for group in groups]
        chunks = cut(sizes, samples=self._asked, at_least=at_least) if self.mode != "sync" else [Chunk(len(sizes), 0)]
        stops = [*accumulate(chunk.groups for chunk in chunks)]
        parts = [groups[stop - chunk.groups : stop] for stop, chunk in zip(stops, chunks, strict=True)]
        return parts, list(range(len(parts)))

    def _usual_chunk(self) -> Chunk:
        """The chunk that most of the plan's samples are in."""
        steps: Counter[tuple[int, int]] = Counter()
        for run in self.plan.runs():
            steps[run.workers, run.samples] += (run.stop if run.stop is not None else run.first + 10**9) - run.first
        samples: Counter[Chunk] = Counter()
        for (workers, batch), times in steps.items():
            parts, _ = self._parts(self._groups(Assignment(0, 0, batch), workers, batch))
            for part in parts:
                chunk = Chunk(len(part), part[0].size) if self.mode != "sync" else Chunk(1, batch)
                samples[chunk] += chunk.samples * times
        return samples.most_common(1)[0][0]

    def _cut(self, step: Step) -> list[Chunk]:
        """The step's parts, or smaller chunks of them where the memory has turned out not to suffice."""
        if self.mode == "sync":
            return [Chunk(1, step.batch)]
        return [chunk for part in step.parts for chunk in cut([g.size for g in part], samples=self.chunk)]

    def _micro_batches(self, step: Step) -> list[int]:
        return [chunk.samples for chunk in self._cut(step)]

    def _build_step(self, number: int, assignment: Assignment, size: StepSize) -> Step:
        ahead = self._ahead.step if self._ahead is not None else None
        if ahead is not None and same_step((ahead.whole, ahead.size), (assignment, size)):
            return ahead
        return super()._build_step(number, assignment, size)

    def _look_ahead(self, step: Step) -> None:
        """Fetch the first samples of the next step while the device is busy with this one.

        A guess: where the next step turns out to be another one, nothing of this is used.
        """
        self._ahead = None
        expected = self._expected_after(step) if self._foreseen else None
        if expected is None:
            return
        upcoming = self._build_step(step.number + 1, *expected)
        if not upcoming.batch:  # other ranks compute all of it
            return
        start, stop = upcoming.start, upcoming.start + self._micro_batches(upcoming)[0]
        fetched = self._fetch(upcoming, start, stop)
        states = [generator.get_state() for generator in self._generators]
        self._ahead = _Ahead(upcoming, (start, stop), fetched, states)

    def _fetch(self, step: Step, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        ahead = self._ahead
        if ahead is None or ahead.step is not step or ahead.range != (start, stop):
            return super()._fetch(step, start, stop)
        for generator, state in zip(self._generators, ahead.states, strict=True):
            generator.set_state(state)
        return ahead.fetched

    def _pass(self, step: Step, chunks: list[Chunk]) -> torch.Tensor | float:
        total: torch.Tensor | float = 0.0
        start = step.start
        for chunk in chunks:
            inputs, targets = self._fetch(step, start, start + chunk.samples)
            if self._channels_last and inputs.dim() == 4:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            weight = chunk.samples / step.batch
            total += self._chunk(inputs, targets, chunk, weight * self._scale) * weight
            self._batch_norm.collect(weight)
            start += chunk.samples
        adder = self._sums or self.meter
        if isinstance(adder, (FusedMeter, FlatMeter)):
            adder.put_back()
        if self.prefetches:
            self._look_ahead(step)
        return total

    def _chunk(self, inputs: torch.Tensor, targets: torch.Tensor, chunk: Chunk, factor: float) -> torch.Tensor:
        """The mean loss of a chunk; `factor` times its gradient goes where those of the step are added up."""
        if not self._tried and chunk.groups > 1 and self._batch_norm.layers:
            return self._trial(inputs, targets, chunk, factor)
        way = self._compiled.way(chunk) if self._compiled is not None else "plain"
        return self._added(inputs, targets, chunk, way, factor)

    def _added(
        self, inputs: torch.Tensor, targets: torch.Tensor, chunk: Chunk, way: Way, factor: float
    ) -> torch.Tensor:
        """The mean loss of a chunk that is computed in this way; its gradient is added."""
        if self._graphs is not None and self._sums is not None:
            refused = self._graphs.refused
            loss = self._graphs(inputs, targets, chunk, way, factor)
            if self._graphs.refused != refused:
                self._tell("no CUDA graph", f"every kernel is launched on its own: {self._graphs.refused}")
            self._sums.weigh(chunk.samples, factor)
            return loss
        loss = self._compute(inputs, targets, chunk, way, factor)
        if self.meter is not None:
            self.meter.close_micro_batch(chunk.samples, factor)
        return loss

    def _trial(self, inputs: torch.Tensor, targets: torch.Tensor, chunk: Chunk, factor: float) -> torch.Tensor:
        """The first chunk of several groups, computed as it is: shows whether each batch norm can tell them apart."""
        trial = inputs.detach().requires_grad_(inputs.is_floating_point())
        self._batch_norm.trial = trial
        try:
            loss = self._added(trial.clone(), targets, chunk, "plain", factor)  # which a model may change in place
        finally:
            self._batch_norm.trial = None
        self._tried = True
        return loss

    def _compute(
        self, inputs: torch.Tensor, targets: torch.Tensor, chunk: Chunk, way: Way, factor: torch.Tensor | float
    ) -> torch.Tensor:
        loss = self._forward(inputs, targets, chunk, way)
        (loss * factor).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _forward(self, inputs: torch.Tensor, targets: torch.Tensor, chunk: Chunk, way: Way) -> torch.Tensor:
        self._batch_norm.groups = chunk.groups
        with self.autocast():
            if self._compiled is not None:
                try:
                    return self._compiled(inputs, targets, chunk, way)
                except torch._dynamo.exc.TorchDynamoException as error:
                    self._compiled = None
                    self._tell("not compiled", f"the model runs as it is: {str(error).strip().splitlines()[0]}")
            return self.loss(self.model, inputs, targets)

    def _shrink(self, chunks: list[Chunk], error: torch.OutOfMemoryError) -> None:
        """Halve the chunk after the memory did not suffice for the largest one."""
        largest = max(chunks, key=lambda chunk: chunk.samples)
        if largest.groups == 1:
            whole = "the whole step, which synchronised batch norm needs," if self.mode == "sync" else "one worker's"
            raise ConfigError(
                f"{whole} {largest.size} samples do not fit into the memory of the device: use a smaller local batch "
                f"or micro-batch, a smaller model, or precision bf16"
            ) from error
        self.chunk = largest.samples // 2
        self._tell(
            "out of memory", f"{largest.samples} samples did not fit; from now on at most {self.chunk} at a time"
        )
        if self._graphs is not None:
            self._graphs.clear()
        if self._device_type == "cuda":
            torch.cuda.empty_cache()

    def _unscaled(self, before: float) -> bool:
        """Take the loss scale of fp16 out of the gradients; False where it was too large and the step must be repeated.

        A gradient that is not finite even without a scale is left as it is, for the optimizer to judge. No scale was
        too large for it, so that the next step has the one of `before` again.
        """
        if self.precision != "fp16":
            return True
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if not math.isfinite(squared_norms(gradients).sum().item()):
            self._since_overflow = 0
            too_large = self._scale > 1
            self._scale = self._scale / 2 if too_large else before
            return not too_large
        torch._foreach_mul_(gradients, 1 / self._scale)
        self._since_overflow += 1
        if self._since_overflow == _GROW_AFTER:
            self._scale, self._since_overflow = self._scale * 2, 0
        return True

    def _tell(self, what: str, text: str) -> None:
        _LOG.warning("%s: %s", what, text)
        self.on_event(what, text)
