"""The worker's side: a replica of the model, and the handler through which the driver reaches it.

A replica belongs to one run and one worker, never to a task: whatever else the worker does at the same time, in however
many threads, only the run's own thread touches it. Messages between driver and workers use Dask's connections, with
Dask's security, but not the task graph of its scheduler: one task per step and worker would cost milliseconds that a
message does not.
"""

from __future__ import annotations

import asyncio
import io
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy.typing as npt
import torch
from distributed import get_worker

from ebbflow.core.key_store import KeyStore
from ebbflow.data.ledger import MicroBatch
from ebbflow.engines.allreduce import StepAllReduce, StepPart
from ebbflow.engines.base import Gradients
from ebbflow.engines.batches import move_batch
from ebbflow.engines.dask.distributed_api import (
    add_handler,
    dumps,
    get_address_host,
    loads,
    to_serialize,
    worker_threads,
)
from ebbflow.engines.process_group import PeerLost, ProcessGroup
from ebbflow.engines.replica_step import Fetch, Loss, Precision, ReplicaStep
from ebbflow.torch_api import foreach_copy_

__all__ = [
    "HANDLER",
    "ApplyStep",
    "DaskReplica",
    "FlatState",
    "ReplicaBlueprint",
    "WorkerFailure",
    "WorkerTask",
    "install",
]

HANDLER = "ebbflow"

_COMPUTING = threading.Lock()
"""Torch's random generators belong to the process: runs that share a worker take turns."""


# What driver and workers tell each other --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ReplicaBlueprint:
    """Everything that a worker needs to make a replica, except the data."""

    model: torch.nn.Module
    loss: Loss
    optimizer: Any
    """A RuleOptimizer over the model's parameters, where replicas apply the steps themselves; else None."""
    samples: int
    seed: int
    trained_numbers: tuple[int, ...]
    """Numbers of the trained parameters among the model's, in the optimizer's order."""
    needs: frozenset[str]
    """What must be measured: "moments", "layers", or nothing."""
    precision: Precision
    device: str

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """The parameters whose gradients are combined."""
        every = list(self.model.parameters())
        return [every[i] for i in self.trained_numbers]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerTask:
    """What one worker computes in an attempt at a step."""

    attempt: int
    epoch: int
    batch: int
    """Samples of the whole step."""
    micro_batches: tuple[MicroBatch, ...]
    """Empty: the worker is idle in this step."""
    measured: bool = True
    """Whether the step is measured, where the rule needs that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ApplyStep:
    """The attempt counts: apply its gradient. Sent with the next message; what is not applied is forgotten."""

    attempt: int
    context: Any
    """The optimizer's StepContext."""
    groups: tuple[dict[str, Any], ...]
    """Settings of the parameter groups as they are in the driver, where a user's scheduler may have changed them."""
    momenta: tuple[float | None, ...]
    """Momenta of the batch-norm layers, which may follow the batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFailure:
    """Why a worker has no answer."""

    text: str
    partner: bool = False
    """Another worker was lost; this one is well."""
    gone: bool = False
    """The worker did not answer at all."""
    error: BaseException | None = None
    """What the user's model, loss or data raised."""


class FlatState:
    """Weights and buffers of a model that are real or complex numbers, in one row: what the driver sends to all workers
    before a step. Integers and sparse tensors, which no step trains, stay as they were when the model was sent.

    The row is allocated once and written again each time: new memory costs more than the copy.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._tensors = _numbers(model)
        dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in self._tensors) else torch.float32
        self._row = torch.empty(sum(tensor.numel() for tensor in self._tensors), dtype=dtype)
        self._views = self._split(self._row)

    def _split(self, row: torch.Tensor) -> list[torch.Tensor]:
        parts = row.split([tensor.numel() for tensor in self._tensors])  # type: ignore[no-untyped-call]
        return [part.view(tensor.shape) for part, tensor in zip(parts, self._tensors, strict=True)]

    def read(self) -> npt.NDArray[Any]:
        """The row as the model is now; valid until the next call."""
        with torch.no_grad():
            foreach_copy_(self._views, self._tensors)
        return self._row.numpy()

    def write(self, row: npt.NDArray[Any]) -> None:
        """Give the model what `read` returned for the same model in another process."""
        received = torch.frombuffer(row.data, dtype=self._row.dtype)
        with torch.no_grad():
            foreach_copy_(self._tensors, self._split(received))


def _numbers(model: torch.nn.Module) -> list[torch.Tensor]:
    """What a step may change, as real numbers in the memory of the model."""
    found = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.layout == torch.strided]
    real = [torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor for tensor in found]
    return [tensor for tensor in real if tensor.is_floating_point()]


# The replica ------------------------------------------------------------------------------------------------------


class DaskReplica:
    """A model that computes its micro-batches of each step and, in a group, applies the step, too."""

    def __init__(self, blueprint: ReplicaBlueprint, fetch: Fetch) -> None:
        self.blueprint = blueprint
        self.group: ProcessGroup | None = None
        self.model = blueprint.model.to(blueprint.device)

        def to_device(indices: Any) -> Any:
            return move_batch(fetch(indices), blueprint.device)

        self._step = ReplicaStep(
            self.model, to_device, blueprint.loss, samples=blueprint.samples, seed=blueprint.seed,
            precision=blueprint.precision, needs=blueprint.needs, parameters=blueprint.trained,
        )  # fmt: skip
        self.batch_norm = self._step.batch_norm
        self._all_reduce: Callable[[torch.Tensor], None] = lambda buffer: None
        self._combine = StepAllReduce(
            blueprint.trained,
            meter=self._step.meter,
            sums=self.batch_norm.sums,
            all_reduce=lambda buffer: self._all_reduce(buffer),
            norm=blueprint.optimizer is not None and blueprint.optimizer.needs_norm,
        )
        self._state: FlatState | None = None
        self._applied = -1
        self._open: tuple[int, Gradients] | None = None
        """The attempt whose gradient is in `.grad`, as long as it has not been applied or forgotten."""

    @classmethod
    def load(cls, blueprint: bytes, data: bytes) -> DaskReplica:
        """A replica from what the driver pickled."""
        return cls(loads(blueprint), loads(data))

    def gradients(self, weights: npt.NDArray[Any], task: WorkerTask) -> npt.NDArray[Any]:
        """Centralized transport: the driver's weights in, the message of this worker's part out."""
        self._state = self._state or FlatState(self.model)
        self._state.write(weights)
        self._compute(task)
        message = self._combine.message(self._part(task)).cpu().numpy()
        self._step.rollback()  # the driver has the model
        return message

    def step(self, apply: ApplyStep | None, task: WorkerTask) -> Gradients:
        """In a group: apply the previous step, if it counts, and compute the next one up to its mean gradient."""
        assert self.group is not None
        self.apply(apply)
        self._all_reduce = self.group.all_reduce
        self._compute(task)
        # The driver decides alike on clipping and skipping and has no gradient to look at: it is told the norm, and the
        # slopes that its rule follows, too.
        gradients = replace(self._combine(self._part(task)), slopes=self.blueprint.optimizer.slopes())
        self._open = (task.attempt, gradients)
        return gradients

    def apply(self, step: ApplyStep | None) -> None:
        """Apply the open attempt, once, if `step` is about it; forget it otherwise."""
        if step is not None and step.attempt > self._applied:
            assert self._open is not None and step.attempt == self._open[0], "only a computed attempt can be applied"
            gradients = self._open[1]
            for group, settings in zip(self.blueprint.optimizer.param_groups, step.groups, strict=True):
                group.update(settings)
            for layer, momentum in zip(self.batch_norm.layers, step.momenta, strict=True):
                layer.momentum = momentum
            update = self.blueprint.optimizer.update(
                step.context, gradients.measurement, norm=gradients.norm, slopes=gradients.slopes
            )
            if update.applied:
                self._step.commit()
            else:  # a skipped step leaves no trace in the buffers either
                self._step.rollback()
            self._applied = step.attempt
        else:
            self._step.rollback()
        self._open = None

    def _compute(self, task: WorkerTask) -> None:
        """Backward passes over the worker's micro-batches."""
        step = self._step
        self._open = None
        step.measure(task.measured)
        step.begin()
        try:
            with _COMPUTING:
                step.compute(task.micro_batches, epoch=task.epoch, batch=task.batch)
        except BaseException:
            step.abandon()
            raise
        step.batch_norm.rollback()  # the micro-batches left their own statistics in the buffers

    def _part(self, task: WorkerTask) -> StepPart:
        """What this worker has computed of the step."""
        step, passes = self._step, len(task.micro_batches)
        return StepPart(loss=step.loss, micro_batches=passes, samples=step.samples, count=step.count, batch=task.batch)

    # The group ----------------------------------------------------------------------------------------------------

    def join(
        self, apply: ApplyStep | None, group: ProcessGroup, *, source: int | None, newcomer: bool, applied: int
    ) -> None:
        """Enter a new group; newcomers take the state of its rank `source`, if it is not None."""
        self.apply(apply)
        self.leave()
        self._combine.renew()  # a collective that was abandoned may still write into the old buffer
        self.group = group
        group.connect()
        if source is not None:
            content = group.broadcast(self.state() if group.rank == source else b"", source)
            if newcomer:
                self.load_state(content)
        self._applied = applied

    def leave(self) -> None:
        """Close the group, from any thread: workers that wait for this one stop waiting."""
        group, self.group = self.group, None
        if group is not None:
            group.close()

    def state(self, apply: ApplyStep | None = None) -> bytes:
        """Model and optimizer, as `torch.save` writes them."""
        self.apply(apply)
        buffer = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "optimizer": self.blueprint.optimizer.state_dict()}, buffer)
        return buffer.getvalue()

    def load_state(self, content: bytes) -> None:
        """Take what `state` of another worker returned. Reading it executes nothing."""
        self._step.rollback()
        state = torch.load(io.BytesIO(content), map_location=self.blueprint.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.blueprint.optimizer.load_state_dict(state["optimizer"])
        self._open = None  # what was computed before belongs to another state


# The handler ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _RunOnWorker:
    """The replica of one run on this worker, and the only thread that touches it."""

    host: str
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "ebbflow"))
    replica: DaskReplica | None = None
    store: KeyStore | None = None

    def start(self, *, blueprint: bytes, data: bytes, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(True)  # denormal numbers late in training slow a CPU down several times
        self.replica = DaskReplica.load(blueprint, data)

    def gradients(self, *, weights: Any, task: WorkerTask) -> Any:
        return self._replica.gradients(weights, task)

    def step(self, *, apply: ApplyStep | None, task: WorkerTask) -> Any:
        return self._replica.step(apply, task)

    def open_store(self, *, secret: bytes) -> tuple[str, int]:
        self._close_store()
        self.store = KeyStore(self.host, secret)
        return self.host, self.store.port

    def _close_store(self) -> None:
        """Close a store whose group was never formed."""
        if self.store is not None:
            self.store.close()
        self.store = None

    def join(self, *, apply: ApplyStep | None, group: dict[str, Any], **options: Any) -> None:
        store, self.store = self.store, None
        made = ProcessGroup(host=self.host, store=store if group["rank"] == 0 else None, **group)
        self._replica.join(apply, made, **options)

    def state(self, *, apply: ApplyStep | None) -> bytes:
        return self._replica.state(apply)

    def load_state(self, *, content: bytes) -> None:
        self._replica.load_state(content)

    def stop(self) -> None:
        self._close_store()
        if self.replica is not None:
            self.replica.leave()
        self.replica = None

    @property
    def _replica(self) -> DaskReplica:
        if self.replica is None:
            raise RuntimeError("this worker has no replica of the run; was it restarted?")
        return self.replica

    def answer(self, what: str, arguments: dict[str, Any]) -> Any:
        """Carry out a message in the replica's thread; an error is an answer, too."""
        try:
            return getattr(self, what)(**arguments)
        except PeerLost as error:
            self._replica.leave()  # workers that wait for this one are told in turn
            return WorkerFailure(text=str(error), partner=True)
        except Exception as error:  # whatever a user's model raises belongs to the user, in the driver
            if self.replica is not None:
                self.replica.leave()
            return WorkerFailure(text="".join(traceback.format_exception(error)), error=_portable(error))


def _portable(error: Exception) -> Exception:
    """The error itself if it can be pickled, else its type and text."""
    try:
        loads(dumps(error))
    except Exception:  # one that holds a lock, or whose class needs more arguments than it keeps
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


_RUNS: dict[tuple[str, str], _RunOnWorker] = {}
"""By the run and the address of the worker: several workers may share a process."""


def _host(address: str) -> str:
    """The address on which a worker listens for its partners; those that share a process need no network."""
    return "127.0.0.1" if address.startswith("inproc://") else get_address_host(address)


async def _handle(run: str, what: str, arguments: dict[str, Any], address: str) -> dict[str, Any]:
    there = _RUNS.setdefault((run, address), _RunOnWorker(_host(address)))
    answer = await asyncio.get_running_loop().run_in_executor(there.thread, there.answer, what, arguments)
    if what == "stop":
        _RUNS.pop((run, address), None)
        there.thread.shutdown(wait=False)
    return {"status": "OK", "answer": to_serialize(answer)}


def install() -> int:
    """A Dask task: make this worker answer to drivers; returns the number of threads that it may compute with."""
    worker = get_worker()
    address = str(worker.address)

    async def handle(run: str, what: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return await _handle(run, what, arguments, address)

    add_handler(worker, HANDLER, handle)
    return worker_threads(worker)
