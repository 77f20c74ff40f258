"""The worker's side: one replica of the model a run and worker, used by one thread.

A replica belongs to a run and to a worker, never to a task: whatever else the worker does at the same time, in however
many threads, nobody but the run's own thread touches it. That is what makes gradients right when tasks share a worker.
"""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from distributed.protocol.pickle import loads

from ebbflow.data.permutation import Permutation
from ebbflow.engines.allreduce import AllReduce
from ebbflow.engines.batchnorm import LocalBatchNorm
from ebbflow.engines.micro_batches import Fetch, Loss, Precision, autocast, generators, micro_batch_seed
from ebbflow.engines.process_group import ProcessGroup
from ebbflow.moments.choose import AnyMeter, meter_for
from ebbflow.moments.estimate import Measurement
from ebbflow.moments.norms import squared_norms

__all__ = ["RIDERS", "Blueprint", "FlatState", "Replica", "Report", "Settle", "Work", "load_flat"]

RIDERS = 2
"""Numbers that ride behind a gradient: the loss and the micro-batches; the sums of batch norm follow."""

_COMPUTING = threading.Lock()
"""Torch's random generators belong to the process: runs that share a worker take turns."""


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """All that a worker needs to make a replica, but the data."""

    model: torch.nn.Module
    loss: Loss
    optimizer: Any
    """An ElasticOptimizer over the model's parameters, where replicas step themselves; else None."""
    samples: int
    seed: int
    measured: tuple[int, ...]
    """Numbers of the trained parameters among the model's, in the optimizer's order."""
    statistics: bool
    layers: bool
    precision: Precision
    device: str

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """The parameters whose gradients are combined."""
        every = list(self.model.parameters())
        return [every[i] for i in self.measured]

    def meter(self) -> AnyMeter | None:
        """What measures them, if anything is to be measured."""
        return meter_for(self.trained, layers=self.layers) if self.statistics else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One member's part of an attempt at a step."""

    attempt: int
    epoch: int
    batch: int
    """Samples of the whole step."""
    micro_batches: tuple[tuple[int, int], ...]
    """(start, stop) positions in the epoch's order; none: the member is idle in this step."""
    measured: bool = True
    """Whether the step is measured, where the rule needs that."""

    @property
    def samples(self) -> int:
        """Samples of this member."""
        return sum(stop - start for start, stop in self.micro_batches)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settle:
    """The attempt counts: apply its gradient. It rides with the next message; what is not settled is forgotten."""

    attempt: int
    context: Any
    """The optimizer's StepContext."""
    groups: tuple[dict[str, Any], ...]
    """Settings of the parameter groups as they are in the driver, where a user's scheduler may have changed them."""
    momenta: tuple[float | None, ...]
    """Of the batch-norm layers, which may follow the batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a member says of its part."""

    loss: float
    micro_batches: int
    measurement: Measurement | None = None
    norm: float | None = None
    """Of the mean gradient, where the optimizer looks at it and the step is not measured."""


class FlatState:
    """Weights and floating-point buffers in one row: what the driver sends to all workers before a step.

    The row is made once and written anew each time: memory that is new costs more than the copy.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._tensors = _floating(model)
        dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in self._tensors) else torch.float32
        self._row = torch.empty(sum(tensor.numel() for tensor in self._tensors), dtype=dtype)
        parts = self._row.split([tensor.numel() for tensor in self._tensors])  # type: ignore[no-untyped-call]
        self._places = [part.view(tensor.shape) for part, tensor in zip(parts, self._tensors, strict=True)]

    def read(self) -> npt.NDArray[Any]:
        """The row as the model is now; valid until the next call."""
        with torch.no_grad():
            torch._foreach_copy_(self._places, self._tensors)
        return self._row.numpy()


def load_flat(model: torch.nn.Module, row: npt.NDArray[Any]) -> None:
    """Take what a FlatState of the same model read."""
    tensors = _floating(model)
    whole = torch.frombuffer(row.data, dtype=_DTYPES[row.dtype.name])
    parts = whole.split([tensor.numel() for tensor in tensors])  # type: ignore[no-untyped-call]
    with torch.no_grad():
        torch._foreach_copy_(tensors, [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)])


_DTYPES = {"float32": torch.float32, "float64": torch.float64}


def _floating(model: torch.nn.Module) -> list[torch.Tensor]:
    return [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]


@dataclass(eq=False)
class Replica:
    """A model that computes its part of each step, and in a group applies the step, too."""

    blueprint: Blueprint
    fetch: Fetch
    group: ProcessGroup | None = None
    _settled: int = -1
    _open: int | None = None
    """The attempt whose gradient is in `.grad`, as long as nobody has said whether it counts."""
    _measurement: Measurement | None = None
    _norm: float | None = None
    _order: tuple[int, Permutation] | None = None

    @classmethod
    def load(cls, blueprint: bytes, data: bytes) -> Replica:
        """From what the driver pickled."""
        return cls(loads(blueprint), loads(data))  # type: ignore[no-untyped-call]

    def __post_init__(self) -> None:
        self.model = self.blueprint.model.to(self.blueprint.device)
        self.meter = self.blueprint.meter()
        self.batch_norm = LocalBatchNorm(self.model)
        self.combine = AllReduce(
            self.blueprint.trained,
            meter=self.meter,
            riders=RIDERS + self.batch_norm.width,
            reduce=lambda buffer: self._reduce(buffer),
        )
        self._reduce: Callable[[torch.Tensor], None] = lambda buffer: None
        self._generators = generators(self.model)

    # -- one step --------------------------------------------------------------------------------------------------

    def gradients(self, weights: npt.NDArray[Any], work: Work) -> npt.NDArray[Any]:
        """Centralized: the driver's weights in, this member's part of the mean gradient and its statistics out."""
        load_flat(self.model, weights)
        rows: list[torch.Tensor] = []
        self._reduce = rows.append
        self._compute(work)
        return rows[0].cpu().numpy()

    def step(self, settle: Settle | None, work: Work) -> Report:
        """In a group: apply the step before, if it counts, and compute the next one up to its mean gradient."""
        assert self.group is not None
        self.settle(settle)
        self._reduce = self.group.all_reduce
        self._open, self._measurement, self._norm = None, None, None
        self._measurement = self._compute(work)
        optimizer = self.blueprint.optimizer
        if self._measurement is None and (optimizer.clip is not None or optimizer.on_nonfinite != "ignore"):
            # The driver decides alike on clipping and skipping, and has no gradient to look at.
            gradients = [parameter.grad for parameter in optimizer.layers if parameter.grad is not None]
            self._norm = math.sqrt(float(squared_norms(gradients).sum()))
        self.batch_norm.unpack(self.combine.riders[RIDERS:])
        self._open = work.attempt
        loss, micro_batches = self.combine.riders[:RIDERS].tolist()
        return Report(loss=loss, micro_batches=round(micro_batches), measurement=self._measurement, norm=self._norm)

    def settle(self, settle: Settle | None) -> None:
        """Apply the open attempt if this is what `settle` says, and once only; forget it otherwise."""
        if settle is not None and settle.attempt > self._settled:
            assert settle.attempt == self._open, "an attempt is settled that this replica has not computed"
            for group, settings in zip(self.blueprint.optimizer.param_groups, settle.groups, strict=True):
                group.update(settings)
            for layer, momentum in zip(self.batch_norm.layers, settle.momenta, strict=True):
                layer.momentum = momentum
            update = self.blueprint.optimizer.update(settle.context, self._measurement, norm=self._norm)
            if update.applied:
                self.batch_norm.commit()
            else:  # a skipped step leaves no trace in the running statistics either
                self.batch_norm.rollback()
            self._settled = settle.attempt
        elif self._open is not None:
            self.batch_norm.rollback()
        self._open = None

    def _compute(self, work: Work) -> Measurement | None:
        """Backward passes over the member's micro-batches, and their combination."""
        self.model.train()
        self.model.zero_grad(set_to_none=True)
        self.batch_norm.begin()
        if self.meter is not None:
            self.meter.on = work.measured
            self.meter.discard()
        with _COMPUTING:
            loss = sum((self._micro_batch(work, start, stop) for start, stop in work.micro_batches), start=0.0)
        riders = self.combine.riders
        riders[0], riders[1] = loss * work.samples / work.batch, len(work.micro_batches)
        if self.batch_norm.width:
            riders[RIDERS:].copy_(self.batch_norm.pack())
            self.batch_norm.rollback()  # the micro-batches left their own statistics in the buffers
        return self.combine(samples=work.samples, batch=work.batch)

    def _micro_batch(self, work: Work, start: int, stop: int) -> float | torch.Tensor:
        seed = micro_batch_seed(self.blueprint.seed, work.epoch, start)
        for generator in self._generators:
            generator.manual_seed(seed)
        inputs, targets = self.fetch(self._indices(work.epoch, start, stop))
        inputs, targets = (part.to(self.blueprint.device) for part in (inputs, targets))
        weight = (stop - start) / work.samples
        with (
            self.batch_norm.micro_batch((stop - start) / work.batch),
            autocast(self.blueprint.precision, torch.device(self.blueprint.device).type),
        ):
            loss = self.blueprint.loss(self.model, inputs, targets) * weight
        loss.backward()  # type: ignore[no-untyped-call]
        if self.meter is not None:
            self.meter.close_micro_batch(stop - start, weight)
        return loss.detach()

    def _indices(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, Permutation(self.blueprint.samples, self.blueprint.seed, epoch))
        return self._order[1].indices(start, stop)

    # -- the group -------------------------------------------------------------------------------------------------

    def join(
        self, settle: Settle | None, group: ProcessGroup, *, source: int | None, newcomer: bool, settled: int
    ) -> None:
        """Enter a new group; newcomers take the state of its member `source`, if it is not None."""
        self.settle(settle)
        self.leave()
        self.combine.renew()  # a collective that was given up may still write into the old buffer
        self.group = group
        group.connect()
        if source is not None:
            content = group.broadcast(self.state() if group.rank == source else b"", source)
            if newcomer:
                self.load_state(content)
        self._settled = settled

    def leave(self) -> None:
        """Close the group, from whichever thread: whoever waits for a partner stops waiting."""
        group, self.group = self.group, None
        if group is not None:
            group.close()

    def state(self, settle: Settle | None = None) -> bytes:
        """Model and optimizer, as `torch.save` writes them."""
        self.settle(settle)
        optimizer = self.blueprint.optimizer
        buffer = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
        return buffer.getvalue()

    def load_state(self, content: bytes) -> None:
        """Take what `state` of another member gave."""
        state = torch.load(io.BytesIO(content), map_location=self.blueprint.device, weights_only=False)
        self.model.load_state_dict(state["model"])
        self.blueprint.optimizer.load_state_dict(state["optimizer"])
        self._open = None  # what was computed before belongs to another state
