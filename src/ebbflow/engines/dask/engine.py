"""The engine on a Dask cluster, as the driver sees it."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import torch
from distributed import Client
from distributed.protocol.pickle import dumps

from ebbflow.core.spec import nearest
from ebbflow.core.units import format_seconds
from ebbflow.data.ledger import Assignment, micro_batches_of
from ebbflow.engines.base import Engine, Faults, Gradients
from ebbflow.engines.dask.carry import AmongWorkers, Carry, ThroughDriver
from ebbflow.engines.dask.cluster import Cluster
from ebbflow.engines.dask.replica import Blueprint, Work
from ebbflow.engines.micro_batches import Fetch, Loss, Precision, autocast
from ebbflow.errors import ConfigError, DataError
from ebbflow.plan.batch_plan import BatchPlan, StepSize
from ebbflow.plan.growing import workers_for
from ebbflow.plan.policies import GrowingPolicy, Policy, make_policy

__all__ = ["CARRIES", "CarryName", "DaskEngine"]

CarryName = Literal["allreduce", "centralized"]
CARRIES = ("allreduce", "centralized")

_TELL_EVERY_S = 10.0


class DaskEngine(Engine):
    """Computes steps on the workers of a Dask cluster.

        with LocalCluster(n_workers=4) as cluster, Client(cluster) as client:
            with DaskEngine(model, data, loss, "follow(32)", client=client, optimizer=optimizer, samples=n) as engine:
                flow = Flow(engine, optimizer, Ledger(samples=n))
                while flow.ledger.epoch < epochs:
                    flow.run_step()
            ...                                # leaving the engine brings the model up to date

    Guarantees: the gradient is that of one process, to rounding, for any number of workers, threads and other tasks on
    them; workers that arrive take part from the next step on; a worker that vanishes costs the step it was in, whose
    samples go back. The model of a worker belongs to the run, not to a task.

    *Carrying gradients.* "allreduce": every worker has a replica that makes the steps itself; gradients travel among
    the workers (gloo, or NCCL on GPUs), so that workers must reach each other. The model in this process is brought up
    to date by `sync` only, which is called before validation and when the engine is closed. "centralized": the model is
    here; weights go out and gradients come back with every step, over Dask's connections. Slower, and the only way
    where something here must see or change every gradient.

    *Limits.* The loss must be a mean over samples. Model, loss and data are pickled, once; data that do not fit into a
    worker's memory must be read by number from wherever they are.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        data: Fetch,
        loss: Loss,
        plan: BatchPlan | Policy | str,
        *,
        client: Client,
        samples: int,
        seed: int = 0,
        optimizer: Any = None,
        carry: CarryName = "allreduce",
        min_workers: int = 1,
        max_workers: int | None = None,
        scale: bool = False,
        micro_batch: int | None = None,
        needs: Collection[str] = (),
        parameters: Iterable[torch.nn.Parameter] | None = None,
        precision: Precision = "fp32",
        device: str = "cpu",
        faults: Faults | None = None,
        wait_s: float = 300.0,
        patience_s: float = 600.0,
        direct: bool = True,
        on_event: Callable[[str, str], None] = lambda what, text: None,
    ) -> None:
        """`data`: a function from sample numbers to (inputs, targets); pickled, and sent once to each worker.

        `plan`: a batch plan, whose workers share the real ones; or a policy, which is told how many real ones there
        are. A growing policy is also given to the Flow. `optimizer`: the ElasticOptimizer of the Flow, for "allreduce".
        `samples`: size of an epoch. `min_workers`: steps wait for so many, at most `wait_s` seconds; `max_workers`: no
        more take part. `scale`: ask the cluster for as many workers as the batch needs, between the two. `micro_batch`,
        `needs`, `parameters`, `precision`: as for the emulated engines. `device`: of the workers' models. `patience_s`:
        how long replicas wait for each other. `direct`: whether this process reaches the workers; if not, messages go
        through the scheduler. `on_event`: told what happens to the fleet.
        """
        if carry not in CARRIES:
            raise ConfigError(f"carry is {carry!r}; {nearest(carry, list(CARRIES))}")
        if carry == "allreduce" and optimizer is None:
            raise ConfigError("replicas make the steps themselves: give optimizer=, or carry='centralized'")
        if min_workers < 1 or (max_workers is not None and max_workers < min_workers):
            raise ConfigError(f"min_workers={min_workers}, max_workers={max_workers}; expected 1 <= min <= max")
        self.model, self.samples, self.seed, self.micro_batch = model, samples, seed, micro_batch
        self.carry_name, self.precision, self.device = carry, precision, device
        self.min_workers, self.max_workers, self.scale = min_workers, max_workers, scale
        self.wait_s, self.on_event = wait_s, on_event
        self.faults = faults or Faults()
        self.plan = plan if isinstance(plan, BatchPlan) else _as_policy(plan, samples)
        self.replicated = carry == "allreduce"
        trained = [*(parameters if parameters is not None else (p for p in model.parameters() if p.requires_grad))]
        number = {id(parameter): i for i, parameter in enumerate(model.parameters())}
        blueprint = Blueprint(
            model=model,
            loss=loss,
            optimizer=optimizer if self.replicated else None,
            samples=samples,
            seed=seed,
            measured=tuple(number[id(parameter)] for parameter in trained),
            statistics=not {"moments", "layers"}.isdisjoint(needs),
            layers="layers" in needs,
            precision=precision,
            device=device,
        )
        self.cluster = Cluster(
            client, uuid.uuid4().hex, blueprint=_pickled(blueprint, "the model, the loss or the optimizer"),
            data=_pickled(data, "the data set"), direct=direct, on_event=on_event,
        )  # fmt: skip
        self.carry: Carry = (
            AmongWorkers(self.cluster, blueprint, patience_s=patience_s)
            if self.replicated
            else ThroughDriver(self.cluster, blueprint)
        )
        self._members: list[str] = []
        self._target: int | None = None
        self._attempts = 0
        self._measuring = True
        self._step = 0
        self._computed = False
        self._began = time.monotonic()
        if scale:
            self._hire(min_workers)

    # -- the fleet -------------------------------------------------------------------------------------------------

    def want(self, samples: int) -> None:
        """Ask the cluster for the workers that a step of so many samples needs, if it may be scaled."""
        if self.scale and not isinstance(self.plan, BatchPlan):
            local = int(self.plan.sizes(np.ones(1, np.int64))[1][0])
            self._hire(workers_for(samples, local))

    def _hire(self, workers: int) -> None:
        target = max(self.min_workers, min(workers, self.max_workers or workers))
        if target != self._target:
            self._target = target
            self.on_event("scale", f"to {target} workers")
            self.cluster.scale(target)

    def members(self, step: int) -> StepSize:
        """The workers that are there, and what plan or policy makes of them; waits for `min_workers`."""
        self._step = step
        if isinstance(self.plan, BatchPlan):
            planned = self.faults.present(step, self.plan.at(step))
            if self.scale:
                self._hire(planned.workers)
            self._members = self._present()
            return planned
        self._members = self._present()
        workers, samples = self.plan.sizes(np.array([len(self._members)], np.int64))
        now = time.monotonic() - self._began
        size = StepSize(workers=int(workers[0]), samples=int(samples[0]), time_s=round(now, 6), duration_s=0.0)
        return self.faults.present(step, size)

    def _present(self) -> list[str]:
        began = told = time.monotonic()
        there = self.cluster.look()
        while len(there) < self.min_workers:
            waited = time.monotonic() - began
            if self.cluster.problems and not self.cluster.starting:
                address, problem = next(iter(self.cluster.problems.items()))
                raise ConfigError(f"the Dask worker {address} {problem}")
            if waited > self.wait_s:
                raise ConfigError(
                    f"{len(there)} of at least {self.min_workers} workers came within {format_seconds(self.wait_s)}; "
                    f"start more (cluster.scale), ask for fewer (min_workers), or wait longer (wait_s)"
                )
            if time.monotonic() - told > _TELL_EVERY_S:
                told = time.monotonic()
                self.on_event("waiting", f"{len(there)} of {self.min_workers} workers, {format_seconds(waited)}")
            time.sleep(0.02)
            there = self.cluster.look()
        return there[: self.max_workers]

    # -- the step --------------------------------------------------------------------------------------------------

    def measure(self, on: bool) -> None:
        """Have the workers measure the upcoming steps, or not."""
        self._measuring = on

    def gradients(self, assignment: Assignment, size: StepSize) -> Gradients:
        """Backward over the samples on all members; if one of them is lost, `commit` says so."""
        self._attempts += 1
        answer = self.carry.gradients(self._parts(assignment, size))
        self._computed = answer is not None
        return answer or Gradients(loss=math.nan, micro_batches=0)

    def _parts(self, assignment: Assignment, size: StepSize) -> dict[str, Work]:
        """What each member does: worker v of the step is member v mod members."""
        dealt: list[list[tuple[int, int]]] = [[] for _ in self._members]
        for part in micro_batches_of(assignment, size, limit=self.micro_batch):
            dealt[part.worker % len(dealt)].append((part.start, part.stop))
        return {
            address: Work(
                attempt=self._attempts,
                epoch=assignment.epoch,
                batch=assignment.batch,
                micro_batches=tuple(own),
                measured=self._measuring,
            )
            for address, own in zip(self._members, dealt, strict=True)
        }

    def commit(self) -> bool:
        """Whether all members gave their part."""
        if not self._computed or self.faults.strike(self._step):
            return False
        self.carry.commit()
        return True

    def applied(self, context: object) -> None:
        """Replicas make the same step with the next message."""
        self.carry.applied(context)

    # -- the rest --------------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Bring model and optimizer of this process up to date."""
        while not self.carry.sync():
            self.carry.regroup(self._present())

    def autocast(self) -> AbstractContextManager[object]:
        """The model computes in the engine's precision inside."""
        return autocast(self.precision, torch.device(self.device).type)

    def describe(self) -> dict[str, Any]:
        """How steps are computed, as JSON: what a record's header keeps."""
        return {
            "engine": type(self).__name__,
            "carry": self.carry_name,
            "precision": self.precision,
            "min_workers": self.min_workers,
            "max_workers": self.max_workers,
            "scale": self.scale,
        }

    def close(self) -> None:
        """Remove the replicas; the cluster goes on. Does not bring the model up to date: that is `sync`."""
        self.cluster.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.sync()
        finally:
            self.close()


def _as_policy(policy: Policy | str, samples: int) -> Policy:
    """The policy; one that grows without saying how much a worker can take has no limit but the epoch."""
    made = make_policy(policy)
    if isinstance(made, GrowingPolicy) and made.local_batch is None:
        return replace(made, local_batch=samples)
    return made


def _pickled(value: Any, what: str) -> bytes:
    try:
        pickled: bytes = dumps(value)  # type: ignore[no-untyped-call]
        return pickled
    except Exception as error:
        kind = DataError if what == "the data set" else ConfigError
        raise kind(
            f"{what} cannot be pickled and sent to the workers ({type(error).__name__}: {error}); keep open files, "
            f"locks, hooks and generators out of it, or make them when they are first used"
        ) from error
