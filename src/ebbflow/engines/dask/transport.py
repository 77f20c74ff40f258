"""Two gradient transports: through the driver, or among the workers."""

from __future__ import annotations

import io
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ebbflow.engines.allreduce import StepAllReduce, StepPart
from ebbflow.engines.base import Gradients
from ebbflow.engines.dask.cluster import DaskCluster, Message
from ebbflow.engines.dask.dask_worker import ApplyStep, FlatState, ReplicaBlueprint, WorkerFailure, WorkerTask
from ebbflow.engines.module_modes import ModuleModes
from ebbflow.engines.replica_step import LocalBatchNorm, needed_meter

__all__ = ["AllReduceTransport", "CentralizedTransport", "GradientTransport"]

_CONNECT_S = 30.0
"""How long workers may take to connect to each other. One that dies meanwhile closes no connection that others
notice."""

Tasks = Mapping[str, WorkerTask]
"""What each worker has to do in a step, by its address."""


class GradientTransport(Protocol):
    """How the gradients of the workers are added up."""

    def gradients(self, tasks: Tasks) -> Gradients | None:
        """The mean gradient of a step; None: a worker was lost, and nothing has happened."""

    def commit(self) -> None:
        """The step counts."""

    def applied(self, context: object) -> None:
        """The optimizer of this process has applied the step."""

    def sync(self) -> bool:
        """Bring the model of this process up to date; False: all workers that had it were lost."""

    def reload(self) -> None:
        """Model and optimizer of this process were replaced: the workers take them before the next step."""

    def regroup(self, workers: Sequence[str]) -> bool:
        """Let these workers compute the next steps; False: one was lost meanwhile."""


class _Caller:
    """What both transports share: calling workers, and what happens when one does not answer."""

    def __init__(self, cluster: DaskCluster) -> None:
        self.cluster = cluster

    def call(self, messages: Mapping[str, Message]) -> dict[str, Any] | None:
        """The answers of all workers, or None if one was lost; what a user's code raised there is raised here."""
        answers = self.cluster.call(messages)
        failures = {address: answer for address, answer in answers.items() if isinstance(answer, WorkerFailure)}
        for address, failure in failures.items():
            if failure.gone:
                self.cluster.lose(address)
            if failure.error is not None:
                failure.error.add_note(f"on the Dask worker {address}:\n{failure.text}")
                raise failure.error
        return None if failures else answers


class CentralizedTransport(_Caller):
    """Weights go out before a step, gradients of the workers come back, and this process adds them up.

    The model is in this process, so any worker may leave at any time. Data stay where they are.
    """

    def __init__(self, cluster: DaskCluster, blueprint: ReplicaBlueprint) -> None:
        super().__init__(cluster)
        self.model = blueprint.model
        self.batch_norm = LocalBatchNorm(self.model)
        self._modes = ModuleModes(self.model)
        self._modes.train()  # as the workers do, which have them from the blueprint
        self._state = FlatState(self.model)
        self._rows: Sequence[npt.NDArray[Any]] = ()
        self._combine = StepAllReduce(
            blueprint.trained,
            meter=needed_meter(blueprint.trained, blueprint.needs),
            sums=self.batch_norm.sums,
            all_reduce=self._add_rows,
        )

    def _add_rows(self, buffer: torch.Tensor) -> None:
        """This process takes part without samples; the messages of the workers came back as rows."""
        total = buffer.numpy()
        first, *rest = self._rows
        for row in rest:
            first = np.add(first, row, out=total)
        if not rest:
            np.copyto(total, first)

    def gradients(self, tasks: Tasks) -> Gradients | None:
        """Send the weights to all workers that have samples, and add up their rows."""
        weights = self._state.read()
        answers = self.call(
            {a: ("gradients", {"weights": weights, "task": task}) for a, task in tasks.items() if task.micro_batches}
        )
        if answers is None:
            return None
        self._rows = list(answers.values())
        self._modes.put_back()
        self.batch_norm.begin()
        gradients = self._combine(StepPart(batch=next(iter(tasks.values())).batch))
        self._rows = ()
        return gradients

    def commit(self) -> None:
        """Update the running statistics of batch norm."""
        self.batch_norm.commit()

    def applied(self, context: object) -> None:
        """Do nothing: the step was applied where the model is."""

    def sync(self) -> bool:
        """Do nothing: the model is here."""
        return True

    def reload(self) -> None:
        """Do nothing: the weights are sent before every step."""

    def regroup(self, workers: Sequence[str]) -> bool:
        """Do nothing: workers know nothing of each other."""
        return True


class AllReduceTransport(_Caller):
    """Replicas on the workers add up their gradients among themselves and apply the steps.

    This process follows only the learning rates and statistics. The decision to apply step k is sent with the request
    for step k + 1: a step is applied nowhere before all workers have reported its mean gradient. A new worker gets the
    state from another one. Should all workers be lost at once, the steps since the last `sync` are computed again on
    the next workers: the same samples, in the same steps."""

    def __init__(self, cluster: DaskCluster, blueprint: ReplicaBlueprint, *, timeout_s: float) -> None:
        super().__init__(cluster)
        self.blueprint = blueprint
        self._batch_norm = LocalBatchNorm(blueprint.model)
        connect_s = min(_CONNECT_S, timeout_s)
        self._secret = secrets.token_bytes(32)  # of the workers of this run, who learn it over Dask's own connections
        self._group_options = {
            "device": blueprint.device, "timeout_s": timeout_s, "connect_s": connect_s, "secret": self._secret,
        }  # fmt: skip
        self._connected: tuple[str, ...] = ()
        self._tasks: Sequence[WorkerTask] = ()
        self._holders: dict[str, int | None] = {}  # workers with the state of the last step, by number of arrival
        self._groups = 0
        self._attempt = -1
        self._momenta: tuple[float | None, ...] = ()
        self._apply: ApplyStep | None = None
        self._saved: bytes | None = None  # the state at the last sync; None: that of the blueprint
        self._since_saved: list[tuple[Sequence[WorkerTask], ApplyStep]] = []

    def gradients(self, tasks: Tasks) -> Gradients | None:
        """One message per worker: apply the previous step, compute this one."""
        present = {address: self.cluster.arrival(address) for address in tasks}
        if not (self._connected and present == self._holders) and not self.regroup(tuple(tasks)):
            return None
        self._tasks = list(tasks.values())
        self._attempt = self._tasks[0].attempt
        answers = self._step(tasks, self._apply)
        if answers is None:
            return None
        self._apply = None
        first: Gradients = answers[self._connected[0]]
        return first

    def _step(self, tasks: Tasks, apply: ApplyStep | None) -> dict[str, Any] | None:
        connected, self._connected = self._connected, ()  # unless all succeed, those left form a new group
        answers = self.call({a: ("step", {"apply": apply, "task": task}) for a, task in tasks.items()})
        if answers is not None:
            self._connected = connected
        return answers

    def commit(self) -> None:
        """Remember the momenta of batch norm, which hold for this step only."""
        self._momenta = tuple(layer.momentum for layer in self._batch_norm.layers)

    def applied(self, context: object) -> None:
        """Have all workers apply the step, with the next message."""
        groups = self.blueprint.optimizer.param_groups
        settings = tuple({key: value for key, value in group.items() if key != "params"} for group in groups)
        self._apply = ApplyStep(attempt=self._attempt, context=context, groups=settings, momenta=self._momenta)
        self._since_saved.append((self._tasks, self._apply))

    def reload(self) -> None:
        """Let no worker hold the state any more, so that the next group begins with that of this process."""
        buffer = io.BytesIO()
        state = {"model": self.blueprint.model.state_dict(), "optimizer": self.blueprint.optimizer.state_dict()}
        torch.save(state, buffer)
        self._saved, self._since_saved, self._apply = buffer.getvalue(), [], None
        self._connected, self._holders = (), {}

    def regroup(self, workers: Sequence[str]) -> bool:
        """Connect these workers in a new group; False if one was lost meanwhile."""
        self._connected = ()
        holders = [a for a in workers if a in self._holders and self._holders[a] == self.cluster.arrival(a)]
        ranks = [*holders, *(address for address in workers if address not in holders)]
        source = 0 if holders and len(holders) < len(ranks) else None
        if not holders and self._saved is not None:
            if self.call({ranks[0]: ("load_state", {"content": self._saved})}) is None:
                return False
            source = 0
        opened = self.call({ranks[0]: ("open_store", {"secret": self._secret})})
        if opened is None:
            return False
        host, port = opened[ranks[0]]
        self._groups += 1
        group = {"rendezvous": f"{host}:{port}/{self._groups}", "size": len(ranks), **self._group_options}
        applied = -1 if self._apply is None or not holders else self._apply.attempt
        answers = self.call(
            {
                address: ("join", {
                    "apply": self._apply if address in holders else None, "group": {**group, "rank": rank},
                    "source": source, "newcomer": address != ranks[0] if not holders else address not in holders,
                    "applied": applied,
                })
                for rank, address in enumerate(ranks)
            }
        )  # fmt: skip
        if answers is None:
            return False
        self._connected, self._holders = tuple(ranks), {address: self.cluster.arrival(address) for address in ranks}
        self._apply = None
        return True if holders else self._repeat_steps()

    def _repeat_steps(self) -> bool:
        """Compute the steps since the saved state again, on workers that have only that state."""
        workers = self._connected
        for tasks, apply in self._since_saved:
            if self._step(self._redistribute(tasks), self._apply) is None:
                self._holders, self._apply = {}, None  # once more, from the saved state
                for address in workers:
                    self.cluster.lose(address)  # those left are between that state and the present: they begin anew
                return False
            self._apply = apply
        return True

    def _redistribute(self, tasks: Sequence[WorkerTask]) -> dict[str, WorkerTask]:
        """The micro-batches of a step that other workers computed, for the present ones."""
        count = len(self._connected)
        shares = [task.micro_batches for task in tasks]
        dealt = [tuple(m for own in shares[i::count] for m in own) for i in range(count)]
        return {a: replace(tasks[0], micro_batches=own) for a, own in zip(self._connected, dealt, strict=True)}

    def sync(self) -> bool:
        """Take the state of a worker; only steps after it would have to be repeated."""
        if not self._since_saved:
            return True
        for address in self._connected:
            answers = self.call({address: ("state", {"apply": self._apply})})
            if answers is not None:
                content: bytes = answers[address]
                state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
                self.blueprint.model.load_state_dict(state["model"])
                optimizer = self.blueprint.optimizer
                # The rule has followed every step here, too, and has seen its loss, which no worker's rule has.
                optimizer.load_state_dict({**state["optimizer"], "rule_state": optimizer.rule_state})
                self._saved, self._since_saved = content, []
                return True
        self._connected = ()
        return False
