"""Two ways to bring the parts of a gradient together: through the driver, or among the workers."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ebbflow.engines.allreduce import AllReduce
from ebbflow.engines.base import Gradients
from ebbflow.engines.batchnorm import LocalBatchNorm
from ebbflow.engines.dask.cluster import Cluster, Message
from ebbflow.engines.dask.replica import RIDERS, Blueprint, FlatState, Report, Settle, Work
from ebbflow.engines.dask.service import Failure

__all__ = ["AmongWorkers", "Carry", "ThroughDriver"]

_CONNECT_S = 30.0
"""How long members may take to find each other. One that dies meanwhile closes no connection that others wait on."""

Parts = Mapping[str, Work]
"""What each member of a step has to do, by its address."""


class Carry(Protocol):
    """How gradients travel."""

    def gradients(self, parts: Parts) -> Gradients | None:
        """The mean gradient over the parts; None: a worker was lost, and nothing has happened."""

    def commit(self) -> None:
        """The step counts."""

    def applied(self, context: object) -> None:
        """The optimizer of this process made the step."""

    def sync(self) -> bool:
        """Bring the model of this process up to date; False: all who had it were lost, and must be made anew."""

    def regroup(self, members: Sequence[str]) -> bool:
        """Make these workers the members; False: one was lost on the way."""


class _Asking:
    """What both ways share: the cluster, and what becomes of an answer that is none."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def ask(self, messages: Mapping[str, Message]) -> dict[str, Any] | None:
        """The answers of all, or None if a worker was lost; what a user's code raised over there is raised here."""
        answers = self.cluster.call(messages)
        failures = {address: answer for address, answer in answers.items() if isinstance(answer, Failure)}
        for address, failure in failures.items():
            if failure.gone:
                self.cluster.lose(address)
            if failure.error is not None:
                failure.error.add_note(f"on the Dask worker {address}:\n{failure.text}")
                raise failure.error
        return None if failures else answers


class ThroughDriver(_Asking):
    """Centralized: weights go out before a step, parts of the gradient come back, and this process adds them up.

    The model lives here, so any worker may leave at any time. Data stay where they are.
    """

    def __init__(self, cluster: Cluster, blueprint: Blueprint) -> None:
        super().__init__(cluster)
        self.model = blueprint.model
        self.batch_norm = LocalBatchNorm(self.model)
        self._state = FlatState(self.model)
        self._rows: Sequence[npt.NDArray[Any]] = ()
        self.combine = AllReduce(
            blueprint.trained,
            meter=blueprint.meter(),
            riders=RIDERS + self.batch_norm.width,
            reduce=self._add_up,
        )

    def _add_up(self, buffer: torch.Tensor) -> None:
        """This process is a rank without samples; the others' rows came by message."""
        total = buffer.numpy()
        first, *rest = self._rows
        for row in rest:
            first = np.add(first, row, out=total)
        if not rest:
            np.copyto(total, first)

    def gradients(self, parts: Parts) -> Gradients | None:
        """Weights to all who have samples, their rows back."""
        weights = self._state.read()
        answers = self.ask(
            {a: ("gradients", {"weights": weights, "work": work}) for a, work in parts.items() if work.micro_batches}
        )
        if answers is None:
            return None
        self._rows = list(answers.values())
        self.model.train()
        self.batch_norm.begin()
        measurement = self.combine(samples=0, batch=next(iter(parts.values())).batch)
        self._rows = ()
        self.batch_norm.unpack(self.combine.riders[RIDERS:])
        loss, micro_batches = self.combine.riders[:RIDERS].tolist()
        return Gradients(loss=loss, micro_batches=round(micro_batches), measurement=measurement)

    def commit(self) -> None:
        """Running statistics move."""
        self.batch_norm.commit()

    def applied(self, context: object) -> None:
        """The step was made here, where the model is."""

    def sync(self) -> bool:
        """Nothing to do: the model is here."""
        return True

    def regroup(self, members: Sequence[str]) -> bool:
        """Nothing to do: members know nothing of each other."""
        return True


class AmongWorkers(_Asking):
    """All-reduce: replicas add up their gradients among themselves and make the steps; here only their rates are kept.

    Whether a step counts rides with the message for the next one: only when all members have reported their mean
    gradient is it applied anywhere. Whoever joins gets the state from a member. Should all members be lost at once, the
    steps since the last `sync` are computed again on the next ones: the same samples, in the same steps.
    """

    def __init__(self, cluster: Cluster, blueprint: Blueprint, *, patience_s: float) -> None:
        super().__init__(cluster)
        self.blueprint = blueprint
        self._batch_norm = LocalBatchNorm(blueprint.model)
        connect_s = min(_CONNECT_S, patience_s)
        self._options = {"device": blueprint.device, "timeout_s": patience_s, "connect_s": connect_s}
        self._members: tuple[str, ...] = ()
        self._works: Sequence[Work] = ()
        self._holders: dict[str, int | None] = {}  # who has the state of the last step, by the number of its arrival
        self._groups = 0
        self._attempt = -1
        self._momenta: tuple[float | None, ...] = ()
        self._settle: Settle | None = None
        self._saved: bytes | None = None  # the state at the last sync; None: that of the blueprint
        self._since: list[tuple[Sequence[Work], Settle]] = []  # the steps after it

    def gradients(self, parts: Parts) -> Gradients | None:
        """One message a member: settle the step before, compute this one."""
        present = {address: self.cluster.arrival(address) for address in parts}
        if not (self._members and present == self._holders) and not self.regroup(tuple(parts)):
            return None
        self._works = list(parts.values())
        self._attempt = self._works[0].attempt
        answers = self._step(parts, self._settle)
        if answers is None:
            return None
        self._settle = None
        first: Report = answers[self._members[0]]
        return Gradients(
            loss=first.loss, micro_batches=first.micro_batches, measurement=first.measurement, norm=first.norm
        )

    def _step(self, parts: Parts, settle: Settle | None) -> dict[str, Any] | None:
        members, self._members = self._members, ()  # unless all goes well, whoever is left meets in a new group
        answers = self.ask({a: ("step", {"settle": settle, "work": work}) for a, work in parts.items()})
        if answers is not None:
            self._members = members
        return answers

    def commit(self) -> None:
        """Remember the momenta of batch norm, which hold for this step only."""
        self._momenta = tuple(layer.momentum for layer in self._batch_norm.layers)

    def applied(self, context: object) -> None:
        """All members shall make the step: with the next message."""
        groups = self.blueprint.optimizer.param_groups
        settings = tuple({key: value for key, value in group.items() if key != "params"} for group in groups)
        self._settle = Settle(attempt=self._attempt, context=context, groups=settings, momenta=self._momenta)
        self._since.append((self._works, self._settle))

    def regroup(self, members: Sequence[str]) -> bool:
        """A new group of these members; False if one was lost on the way."""
        self._members = ()
        kept = [a for a in members if a in self._holders and self._holders[a] == self.cluster.arrival(a)]
        ranks = [*kept, *(address for address in members if address not in kept)]
        source = 0 if kept and len(kept) < len(ranks) else None
        if not kept and self._saved is not None:
            if self.ask({ranks[0]: ("load_state", {"content": self._saved})}) is None:
                return False
            source = 0
        opened = self.ask({ranks[0]: ("open_store", {})})
        if opened is None:
            return False
        host, port = opened[ranks[0]]
        self._groups += 1
        group = {"rendezvous": f"{host}:{port}/{self._groups}", "size": len(ranks), **self._options}
        settled = -1 if self._settle is None or not kept else self._settle.attempt
        answers = self.ask(
            {
                address: ("join", {
                    "settle": self._settle if address in kept else None, "group": {**group, "rank": rank},
                    "source": source, "newcomer": address != ranks[0] if not kept else address not in kept,
                    "settled": settled,
                })
                for rank, address in enumerate(ranks)
            }
        )  # fmt: skip
        if answers is None:
            return False
        self._members, self._holders = tuple(ranks), {address: self.cluster.arrival(address) for address in ranks}
        self._settle = None
        return True if kept else self._repeat()

    def _repeat(self) -> bool:
        """Compute the steps since the saved state again, on members that have nothing but that."""
        members = self._members
        for works, settle in self._since:
            if self._step(self._deal(works), self._settle) is None:
                self._holders, self._settle = {}, None  # once more, from the saved state
                for address in members:
                    self.cluster.lose(address)  # those left are between that state and the present: they begin anew
                return False
            self._settle = settle
        return True

    def _deal(self, works: Sequence[Work]) -> dict[str, Work]:
        """The parts of a step that other members computed, for the present ones."""
        count = len(self._members)
        micro_batches = [work.micro_batches for work in works]
        dealt = [tuple(micro_batch for own in micro_batches[i::count] for micro_batch in own) for i in range(count)]
        one = works[0]
        return {address: replace(one, micro_batches=own) for address, own in zip(self._members, dealt, strict=True)}

    def sync(self) -> bool:
        """Take the state of a member; with it begins what would have to be repeated."""
        if not self._since:
            return True
        for address in self._members:
            answers = self.ask({address: ("state", {"settle": self._settle})})
            if answers is not None:
                content: bytes = answers[address]
                state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)
                self.blueprint.model.load_state_dict(state["model"])
                self.blueprint.optimizer.load_state_dict(state["optimizer"])
                self._saved, self._since = content, []
                return True
        self._members = ()
        return False
