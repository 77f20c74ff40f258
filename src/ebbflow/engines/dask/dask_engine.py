"""The engine on a Dask cluster, as the driver sees it."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from distributed import Client

from ebbflow.core.spec import nearest
from ebbflow.core.units import format_seconds
from ebbflow.data.ledger import Assignment, MicroBatch, micro_batches_of
from ebbflow.engines.allreduce import check_dense
from ebbflow.engines.base import Engine, Faults, Gradients
from ebbflow.engines.dask.cluster import DaskCluster
from ebbflow.engines.dask.dask_worker import ReplicaBlueprint, WorkerTask
from ebbflow.engines.dask.distributed_api import dumps
from ebbflow.engines.dask.transport import AllReduceTransport, CentralizedTransport, GradientTransport
from ebbflow.engines.replica_step import Fetch, Loss, Precision, autocast, trained_parameters
from ebbflow.errors import ConfigError, DataError
from ebbflow.plan.batch_plan import BatchPlan, StepSize
from ebbflow.plan.growing import workers_for
from ebbflow.plan.policies import FixedTotal, GrowingPolicy, Policy, make_policy, sizes_of

__all__ = ["TRANSPORTS", "DaskEngine", "TransportName"]

TransportName = Literal["allreduce", "centralized"]
TRANSPORTS = ("allreduce", "centralized")

_REPORT_EVERY_S = 10.0


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
    samples are assigned again.

    *Gradient transport.* "allreduce": every worker has a replica that applies the steps itself; gradients travel among
    the workers (gloo, or NCCL on GPUs), so workers must reach each other. The model in this process is brought up to
    date only by `sync`, which is called before validation, before a state is saved and at the end of the run.
    "centralized": the model is here; weights go out and gradients come back with every step, over Dask's connections.
    Slower, and the only way where something in this process must see or change every gradient.

    *Limits.* Model, loss and data are pickled once. Data that do not fit into a worker's memory must be read by sample
    number from wherever they are.
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
        transport: TransportName = "allreduce",
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
        timeout_s: float = 600.0,
        direct: bool = True,
        on_event: Callable[[str, str], None] = lambda what, text: None,
    ) -> None:
        """`data`: a function from sample numbers to (inputs, targets), or to inputs alone; sent once to each worker.

        `plan`: a batch plan, whose virtual workers share the real ones; or a policy, which is given the number of real
        ones. A growing policy is also given to the Flow. `optimizer`: the RuleOptimizer of the Flow, for
        "allreduce". `samples`: size of an epoch. `min_workers`: steps wait for that many, at most `wait_s` seconds;
        `max_workers`: no more take part. `scale`: ask the cluster for as many workers as the batch needs, between the
        two. `micro_batch`, `needs`, `parameters`, `precision`: as for the emulated engines. `device`: of the workers'
        models. `timeout_s`: how long replicas wait for each other. `direct`: whether this process reaches the workers;
        if not, messages go through the scheduler. `on_event(what, text)` is called when the fleet changes."""
        if transport not in TRANSPORTS:
            raise ConfigError(f"transport is {transport!r}; {nearest(transport, list(TRANSPORTS))}")
        if transport == "allreduce" and optimizer is None:
            raise ConfigError("replicas apply the steps themselves: give optimizer=, or transport='centralized'")
        if min_workers < 1 or (max_workers is not None and max_workers < min_workers):
            raise ConfigError(f"min_workers={min_workers}, max_workers={max_workers}; expected 1 <= min <= max")
        check_dense(model)
        self.model, self.samples, self.seed, self.micro_batch = model, samples, seed, micro_batch
        self.transport_name, self.precision, self.device = transport, precision, device
        self.min_workers, self.max_workers, self.scale = min_workers, max_workers, scale
        self.wait_s, self.on_event = wait_s, on_event
        self.faults = faults or Faults()
        self.plan = plan if isinstance(plan, BatchPlan) else make_policy(plan)
        self.replicated = transport == "allreduce"
        number = {id(parameter): i for i, parameter in enumerate(model.parameters())}
        blueprint = ReplicaBlueprint(
            model=model,
            loss=loss,
            optimizer=optimizer if self.replicated else None,
            samples=samples,
            seed=seed,
            trained_numbers=tuple(number[id(parameter)] for parameter in trained_parameters(model, parameters)),
            needs=frozenset(needs),
            precision=precision,
            device=device,
        )
        self.cluster = DaskCluster(
            client, uuid.uuid4().hex, blueprint=_pickled(blueprint, "the model, the loss or the optimizer"),
            data=_pickled(data, "the data set"), direct=direct, on_event=on_event,
        )  # fmt: skip
        self.transport: GradientTransport = (
            AllReduceTransport(self.cluster, blueprint, timeout_s=timeout_s)
            if self.replicated
            else CentralizedTransport(self.cluster, blueprint)
        )
        self._workers: list[str] = []
        self._scaled_to: int | None = None
        self._requested = samples
        self._attempts = 0
        self._measuring = True
        self._step = 0
        self._computed = False
        self._answered: float | None = None
        """When the workers had computed the previous step; None where no step, or a lost one, came before."""
        self._began = time.monotonic()
        self._clock_s = 0.0
        """When the latest step was applied, counted from the beginning of the run, also if it is continued here."""
        self._given_up = False
        """Whether workers were waited for in vain; the state of the latest steps is then not waited for once more."""
        if scale:
            self._scale_to(min_workers)

    # -- the fleet -------------------------------------------------------------------------------------------------

    def request(self, samples: int) -> None:
        """Ask the cluster for the workers that a step of `samples` samples needs, if it may be scaled."""
        self._requested = samples
        if self.scale and not isinstance(self.plan, BatchPlan) and not _unlimited(self.plan):
            local = int(sizes_of(self.plan, np.ones(1, np.int64))[1][0])
            self._scale_to(workers_for(samples, local))

    def _scale_to(self, workers: int) -> None:
        target = max(self.min_workers, min(workers, self.max_workers or workers))
        if target != self._scaled_to:
            self._scaled_to = target
            self.on_event("scale", f"to {target} workers")
            self.cluster.scale(target)

    def participants(self, step: int) -> StepSize:
        """The workers that are there, and what plan or policy makes of them; waits for `min_workers`."""
        self._step = step
        if isinstance(self.plan, BatchPlan):
            planned = self.faults.present(step, self.plan.at(step))
            if self.scale:
                self._scale_to(planned.workers)
            self._workers = self._present()
            return planned
        self._workers = self._present()
        policy = FixedTotal(self._requested) if _unlimited(self.plan) else self.plan
        workers, samples = sizes_of(policy, np.array([len(self._workers)], np.int64))
        now = time.monotonic() - self._began
        size = StepSize(workers=int(workers[0]), samples=int(samples[0]), time_s=round(now, 6), duration_s=0.0)
        return self.faults.present(step, size)

    def _present(self) -> list[str]:
        """The workers that are there, as soon as they are enough."""
        self._given_up = True  # however the waiting ends, should it end without them
        there = self._wait_for_workers()
        self._given_up = False
        return there[: self.max_workers]

    def _wait_for_workers(self) -> list[str]:
        began = reported = time.monotonic()
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
            if time.monotonic() - reported > _REPORT_EVERY_S:
                reported = time.monotonic()
                self.on_event("waiting", f"{len(there)} of {self.min_workers} workers, {format_seconds(waited)}")
            time.sleep(0.02)
            there = self.cluster.look()
        return there

    # -- the step --------------------------------------------------------------------------------------------------

    def measure(self, on: bool) -> None:
        """Have the workers measure the coming steps, or not."""
        self._measuring = on

    def gradients(self, assignment: Assignment, size: StepSize) -> Gradients:
        """Backward passes over the samples on all workers; if one of them is lost, `commit` returns False."""
        self._attempts += 1
        answer = self.transport.gradients(self._tasks(assignment, size))
        self._computed = answer is not None
        before, self._answered = self._answered, time.monotonic() if answer is not None else None
        if answer is None:
            return Gradients(loss=math.nan, micro_batches=0)
        if before is None or self._answered is None or isinstance(self.plan, BatchPlan):
            return answer
        return replace(answer, seconds=self._answered - before)

    def _tasks(self, assignment: Assignment, size: StepSize) -> dict[str, WorkerTask]:
        """What each worker computes: virtual worker v of the step belongs to real worker v mod workers."""
        dealt: list[list[MicroBatch]] = [[] for _ in self._workers]
        for micro_batch in micro_batches_of(assignment, size, limit=self.micro_batch):
            dealt[micro_batch.worker % len(dealt)].append(micro_batch)
        return {
            address: WorkerTask(
                attempt=self._attempts,
                epoch=assignment.epoch,
                batch=assignment.batch,
                micro_batches=tuple(own),
                measured=self._measuring,
            )
            for address, own in zip(self._workers, dealt, strict=True)
        }

    def commit(self) -> bool:
        """Whether all workers returned their part."""
        if not self._computed or self.faults.strike(self._step):
            return False
        self.transport.commit()
        return True

    def applied(self, context: object) -> None:
        """Have the replicas apply the same step, with the next message."""
        self.transport.applied(context)
        self._clock_s = time.monotonic() - self._began

    # -- the run around the steps ----------------------------------------------------------------------------------

    def sync(self) -> None:
        """Bring the model and optimizer of this process up to date."""
        while not self.transport.sync():
            if self._given_up:
                raise ConfigError("no worker is left that has the state of the latest steps, nor one to compute them")
            self.transport.regroup(self._present())

    def state_dict(self) -> dict[str, Any]:
        """How late it is: the clock of a run that is continued goes on."""
        return {"clock_s": self._clock_s}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Model and optimizer of this process have another state now: replicas begin with it."""
        self._clock_s = max(self._clock_s, float(state.get("clock_s", 0.0)))
        self._began = min(self._began, time.monotonic() - self._clock_s)
        self.transport.reload()

    def snapshot_loaded(self, known: Any) -> None:
        """Have the replicas take the model and optimizer of this process before the next step."""
        self.transport.reload()

    def autocast(self) -> AbstractContextManager[object]:
        """The model computes in the engine's precision inside."""
        return autocast(self.precision, torch.device(self.device).type)

    def describe(self) -> dict[str, Any]:
        """How steps are computed, as JSON values: for the header of a record."""
        return {
            "engine": type(self).__name__,
            "carry": self.transport_name,
            "precision": self.precision,
            "min_workers": self.min_workers,
            "max_workers": self.max_workers,
            "scale": self.scale,
        }

    def close(self) -> None:
        """Remove the replicas; the cluster goes on. Does not bring the model up to date: that is `sync`."""
        self.cluster.close()


def _unlimited(policy: Policy) -> bool:
    """Whether a growing policy sets no limit per worker: then all workers share the requested batch."""
    return isinstance(policy, GrowingPolicy) and policy.local_batch is None


def _pickled(value: Any, what: str) -> bytes:
    try:
        pickled: bytes = dumps(value)
        return pickled
    except Exception as error:
        kind = DataError if what == "the data set" else ConfigError
        raise kind(
            f"{what} cannot be pickled and sent to the workers ({type(error).__name__}: {error}); keep open files, "
            f"locks, hooks and generators out of it, or make them when they are first used"
        ) from error
