"""The engine of a live fleet: every replica computes its micro-batches, and one all-reduce adds up everything.

    members     form a quorum group; replicas that need the state receive it now
    gradients   backward over this replica's micro-batches; gradient, statistics, loss and batch norm in one all-reduce
    commit      True if the sum arrived here; all replicas on which it did have the same numbers, bit for bit

When a replica dies in the middle of the all-reduce, the sum may arrive at some of the others and not at all of them.
Those that have it commit the step; the others receive the state of one of them in the next quorum group
(`membership.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ebbflow.data.ledger import Assignment, MicroBatch, micro_batches_of
from ebbflow.data.permutation import Permutation
from ebbflow.engines.allreduce import AllReduce
from ebbflow.engines.base import Engine, Gradients
from ebbflow.engines.batchnorm import LocalBatchNorm
from ebbflow.engines.micro_batches import Fetch, Loss, Precision, autocast, generators, micro_batch_seed
from ebbflow.engines.process_group import Fault, PeerLost, no_fault
from ebbflow.errors import ConfigError
from ebbflow.live.connection import FleetConnection
from ebbflow.live.membership_events import ComputeStep
from ebbflow.moments.choose import meter_for
from ebbflow.plan.plan import StepSize
from ebbflow.plan.policies import Policy

__all__ = ["LiveEngine", "LoadedMicroBatch", "Sizes", "by_policy"]

Sizes = Callable[[int, int], tuple[int, int]]
"""(step, replicas) -> (workers, samples of the step). The replica of rank w mod replicas computes worker w."""

_LOSS, _LEAVING, _RETURNING, _NUMBERS = 0, 1, 2, 3  # places of the riders before those of batch norm


def by_policy(policy: Policy) -> Sizes:
    """Every replica is a worker, and the policy says how many samples they take.

    >>> from ebbflow.plan.policies import Follow
    >>> by_policy(Follow(32))(0, 3)
    (3, 96)
    """

    def sizes(step: int, replicas: int) -> tuple[int, int]:
        workers, samples = policy.sizes(np.array([replicas]))
        return int(workers[0]), int(samples[0])

    return sizes


class LoadedMicroBatch(NamedTuple):
    """Samples of one backward pass."""

    inputs: Any
    targets: Any
    share: MicroBatch
    weight: float
    """Of this micro-batch's mean loss in the mean over this replica's samples."""


class LiveEngine(Engine):
    """Trains with the replicas that are there.

    Guarantees: after `commit` gave True, gradient, measurement, loss and batch-norm statistics have the same bits on
    every replica that committed; after False the model is what it was. Micro-batches, seeds and order are those of the
    emulated engines, so an emulated run with the same members in each step computes the same to rounding.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        fetch: Fetch,
        connection: FleetConnection,
        sizes: Sizes,
        *,
        samples: int,
        lineage: int,
        loss: Loss | None = None,
        seed: int = 0,
        micro_batch: int | None = None,
        needs: Collection[str] = (),
        parameters: Iterable[torch.nn.Parameter] | None = None,
        precision: Precision = "fp32",
        leaving: Callable[[], bool] = lambda: False,
        fault: Fault = no_fault,
    ) -> None:
        """`samples`: size of an epoch. `lineage`: of the state that the model has now. `loss`: None, if whoever uses
        the engine does the backward passes (`open`, `micro_batches`, `add_up`). `micro_batch`: at most so many samples
        together."""
        if precision == "fp16":
            raise ConfigError("precision is 'fp16', whose loss scale a fleet does not share; use bf16")
        self.model = model
        self.fetch = fetch
        self.connection = connection
        self.sizes = sizes
        self.samples = samples
        self.loss = loss
        self.seed = seed
        self.micro_batch = micro_batch
        self.precision = precision
        self.lineage = lineage
        self.parent = lineage
        """The lineage before the last committed step."""
        self.left = False
        """Whether this replica has left the fleet, so that there is no next step."""
        self.last_of_all = False
        """Whether all replicas left in the last step, and this one is to save the state."""
        trained = [*(parameters if parameters is not None else (p for p in model.parameters() if p.requires_grad))]
        wanted = not {"moments", "layers"}.isdisjoint(needs)
        self.meter = meter_for(trained, layers="layers" in needs) if wanted else None
        self._batch_norm = LocalBatchNorm(model)
        width = _NUMBERS + self._batch_norm.width
        self._combine = AllReduce(trained, meter=self.meter, riders=width, reduce=self._add_up)
        self._generators = generators(model)
        self._device_type = trained[0].device.type
        self._leaving = leaving
        self._fault = fault
        self._began = time.monotonic()
        self._order: tuple[int, Permutation] | None = None
        self._quorum: ComputeStep | None = None
        self._size: StepSize | None = None
        self._assignment: Assignment | None = None
        self._loss_sum: torch.Tensor | float = 0.0
        self._done = 0  # samples of this step that a backward pass was over
        self._arrived = False
        self._failure = ""
        self._says_leaving = False
        self._leavers: frozenset[int] = frozenset()
        self._lighthouse_wanted = False

    # The three verbs --------------------------------------------------------------------------------------------

    def members(self, step: int) -> StepSize:
        """Form a quorum group for the next step, in which this replica has the state that counts, perhaps a later one.

        Waits while the lighthouse forms no quorum. Raises `LeftFleet` if this replica is told to leave meanwhile, and
        `TrainingFinished` if the others, or a checkpoint, turn out to have finished.
        """
        self._quorum = self.connection.next_step(step, self.lineage)
        self._fault("quorum")
        workers, samples = self.sizes(self._quorum.step, len(self._quorum.participants))
        now = time.monotonic() - self._began
        self._size = StepSize(workers=workers, samples=samples, time_s=now, duration_s=0.0)
        return self._size

    def measure(self, on: bool) -> None:
        """Measure the upcoming steps or not: the same on all replicas, who decide it from the state they share."""
        if self.meter is not None:
            self.meter.on = on

    def gradients(self, assignment: Assignment, size: StepSize) -> Gradients:
        """Forward and backward passes over this replica's micro-batches, then everybody's sum."""
        if self.loss is None:
            raise ConfigError(
                "this engine was made without a loss: do the backward passes over `micro_batches` yourself"
            )
        self.open(assignment, size)
        for micro_batch in self.micro_batches():
            with self.autocast():
                loss = self.loss(self.model, micro_batch.inputs, micro_batch.targets)
            self.backward(loss, micro_batch)
        return self.add_up()

    def commit(self) -> bool:
        """Whether the sum arrived here."""
        assert self._assignment is not None, "commit follows gradients"
        if not self._arrived:
            self._batch_norm.rollback()
            self.model.zero_grad(set_to_none=True)
            self.connection.failed(self._failure)
            return False
        self._batch_norm.commit()
        last = self.connection.committed(
            self._assignment, leaving=self._leavers, lighthouse_wanted=self._lighthouse_wanted
        )
        self.parent, self.lineage = self.lineage, self.connection.membership.state.lineage
        self._fault("commit")
        if last is not None:
            self.left, self.last_of_all = True, last.save_state
        return True

    # The backward passes ----------------------------------------------------------------------------------------

    def open(self, assignment: Assignment, size: StepSize) -> None:
        """Begin a step, or begin it again: nothing of an earlier attempt is left."""
        self.model.train()
        self.model.zero_grad(set_to_none=True)
        self._batch_norm.begin()
        if self.meter is not None:
            self.meter.discard()
        self._assignment, self._size, self._arrived = assignment, size, False
        self._loss_sum, self._done = 0.0, 0

    def own_micro_batches(self) -> tuple[MicroBatch, ...]:
        """This replica's micro-batches of the open step; none at the tail of an epoch, or where the policy idles it."""
        assert self._quorum is not None
        replicas = len(self._quorum.participants)
        return tuple(share for share in self._all_micro_batches() if share.worker % replicas == self._quorum.rank)

    def _all_micro_batches(self) -> tuple[MicroBatch, ...]:
        assert self._assignment is not None and self._size is not None
        return micro_batches_of(self._assignment, self._size, limit=self.micro_batch)

    def micro_batches(self) -> Iterator[LoadedMicroBatch]:
        """This replica's micro-batches of the open step; the forward pass of each belongs before the next one is
        taken."""
        own = self.own_micro_batches()
        total = sum(share.size for share in own)
        assert self._assignment is not None
        for share in own:
            seed = micro_batch_seed(self.seed, self._assignment.epoch, share.start)
            for generator in self._generators:
                generator.manual_seed(seed)
            inputs, targets = self.fetch(self._indices(share))
            with self._batch_norm.micro_batch(share.size / self._assignment.batch):
                yield LoadedMicroBatch(inputs, targets, share, share.size / total)
            self._fault("backward")

    def backward(self, loss: torch.Tensor, micro_batch: LoadedMicroBatch) -> None:
        """Add a micro-batch's gradient; `loss` is the mean over its samples."""
        weighted = loss * micro_batch.weight
        weighted.backward()  # type: ignore[no-untyped-call]
        if self.meter is not None:
            self.meter.close_micro_batch(micro_batch.share.size, micro_batch.weight)
        self._loss_sum = self._loss_sum + weighted.detach()
        self._done += micro_batch.share.size

    def _indices(self, share: MicroBatch) -> npt.NDArray[np.int64]:
        assert self._assignment is not None
        epoch = self._assignment.epoch
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, Permutation(self.samples, self.seed, epoch))
        return self._order[1].indices(share.start, share.stop)

    def autocast(self) -> AbstractContextManager[object]:
        """The model computes in the engine's precision inside."""
        return autocast(self.precision, self._device_type)

    # The sum ----------------------------------------------------------------------------------------------------

    def add_up(self) -> Gradients:
        """Everybody's gradient, statistics and loss, weighted with the samples they are made of."""
        assert self._assignment is not None
        batch = self._assignment.batch
        own = self.own_micro_batches()
        samples = sum(share.size for share in own)
        if self._done != samples:
            raise ConfigError(
                f"this replica's part of the step has {samples} samples, but backward() was called for {self._done}; "
                f"call it once for each micro-batch, with the mean loss over its samples"
            )
        riders = self._combine.riders
        riders[_LOSS] = self._loss_sum * (samples / batch)
        self._says_leaving = self._leaving()
        riders[_LEAVING] = float(self._says_leaving)
        riders[_RETURNING] = float(self.connection.wants_lighthouse)
        riders[_NUMBERS:].copy_(self._batch_norm.pack())
        try:
            measurement = self._combine(samples=samples, batch=batch)
            riders = self._combine.riders
            loss, leaving, returning = riders[:_NUMBERS].tolist()
            self._leavers = self._who_leaves() if leaving else frozenset()
            self._fault("sum")
        except PeerLost as reason:
            self._failure = str(reason)
            self._combine.renew()
            return Gradients(loss=float("nan"), micro_batches=len(own))
        self._batch_norm.unpack(riders[_NUMBERS:])
        self._lighthouse_wanted = bool(returning)
        self._arrived = True
        return Gradients(loss=loss, micro_batches=len(self._all_micro_batches()), measurement=measurement)

    def _add_up(self, tensor: torch.Tensor) -> None:
        self.connection.all_reduce(tensor)

    # Membership -------------------------------------------------------------------------------------------------------

    @property
    def established(self) -> bool:
        """Whether this replica has committed a step with this fleet since it started or received a state."""
        return self.connection.membership.state.established

    @property
    def first(self) -> bool:
        """Whether this replica has rank 0 in its quorum group: the one that writes what is to be written once."""
        return self._quorum is not None and self._quorum.rank == 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the participants of the last step, by rank."""
        return self._quorum.participants if self._quorum is not None else ()

    def _who_leaves(self) -> frozenset[int]:
        """Find the ranks that leave by one more, tiny all-reduce, in the rare step in which a replica leaves."""
        assert self._quorum is not None
        said = torch.zeros(len(self._quorum.participants), device=self._combine.riders.device)
        said[self._quorum.rank] = float(self._says_leaving)
        self._add_up(said)
        return frozenset(rank for rank, leaves in enumerate(said.tolist()) if leaves)
