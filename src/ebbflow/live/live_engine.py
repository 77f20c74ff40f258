"""The engine of a live fleet: every replica computes its micro-batches, and one all-reduce adds up everything.

    participants   form a quorum group; replicas that need the state begin to receive it
    gradients      backward over this replica's micro-batches; gradient, statistics, loss and batch norm in one message
    commit         True if the sum arrived here; all replicas on which it did have the same numbers, bit for bit

When a replica dies in the middle of the all-reduce, the sum may arrive at some of the others and not at all of them.
Those that have it commit the step; the others receive the state of one of them in the next quorum group
(`membership.py`). If nobody has it, the survivors keep what they have computed, and in the next attempt only the
micro-batches of the dead replica are computed again (`shares.py`).

A replica that receives the state hears the steps of the others meanwhile (`listening.py`). When the state is there, it
goes through these steps as through any other, except that their sums are there already.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ebbflow.data.ledger import Assignment, Ledger, MicroBatch, micro_batches_of
from ebbflow.engines.allreduce import StepAllReduce, StepPart
from ebbflow.engines.base import Engine, Gradients
from ebbflow.engines.kept_buffers import differing_buffers
from ebbflow.engines.loss_sum import LossSum
from ebbflow.engines.process_group import Fault, PeerLost, no_fault
from ebbflow.engines.replica_ranks import ReplicaSums
from ebbflow.engines.replica_step import Fetch, LoadedMicroBatch, Loss, Precision, ReplicaStep, micro_batch_seed
from ebbflow.engines.shards import ShardedStep
from ebbflow.live import equality
from ebbflow.live.agreement import fork_lineage
from ebbflow.live.connection import FleetConnection
from ebbflow.live.listening import Hear, HeardStep, Listener
from ebbflow.live.membership_events import ComputeStep, KeptPart
from ebbflow.live.shares import computing_ranks, share_micro_batches, usable_parts
from ebbflow.plan.batch_plan import StepSize
from ebbflow.plan.policies import Policy, sizes_of

__all__ = ["LiveEngine", "StepSizes", "by_policy"]

StepSizes = Callable[[int, int], tuple[int, int]]
"""(step, replicas) -> (workers, samples of the step). The replica of rank w mod replicas computes worker w."""


def by_policy(policy: Policy) -> StepSizes:
    """Every replica is a worker, and the policy says how many samples they take.

    >>> from ebbflow.plan.policies import Follow
    >>> by_policy(Follow(32))(0, 3)
    (3, 96)
    """

    def sizes(step: int, replicas: int) -> tuple[int, int]:
        workers, samples = sizes_of(policy, np.array([replicas]))
        return int(workers[0]), int(samples[0])

    return sizes


class LiveEngine(Engine):
    """Trains with the replicas that are there.

    Guarantees: after `commit` returned True, gradient, measurement, loss and batch-norm statistics have the same bits
    on every replica that committed; after False the model is what it was. Micro-batches, seeds and order are those of
    the emulated engines, so an emulated run with the same workers in each step computes the same to rounding. A step
    that is repeated because a replica was lost keeps its samples and its number of workers: it is computed as the
    larger fleet began it, and only what was lost is computed again.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        fetch: Fetch,
        connection: FleetConnection,
        sizes: StepSizes,
        *,
        samples: int,
        lineage: int,
        loss: Loss | None = None,
        seed: int = 0,
        micro_batch: int | None = None,
        needs: Collection[str] = (),
        parameters: Iterable[torch.nn.Parameter] | None = None,
        precision: Precision = "fp32",
        norm: bool = False,
        leaving: Callable[[], bool] = lambda: False,
        fault: Fault = no_fault,
        captured_samples: int = 0,
        on_event: Callable[[str, str], None] = lambda what, text: None,
    ) -> None:
        """`samples`: size of an epoch. `lineage`: of the state that the model has now. `loss`: None if the user's own
        loop does the backward passes. `micro_batch`: most samples in one backward pass, over all ranks of a
        replica. `norm`: whether the norm of the gradient is needed, which the ranks of a replica find together.
        `captured_samples`: as for `ReplicaStep`; replicas of one rank only. `on_event(what, text)`: writes an event
        into the record."""
        self.model = model
        self.connection = connection
        self.sizes = sizes
        self.micro_batch = micro_batch
        self._fetch, self._samples, self._seed = fetch, samples, seed
        self.lineage = lineage
        self.parent = lineage
        """The lineage before the last committed step."""
        self.left = False
        """Whether this replica has left the fleet, so that there is no next step."""
        self.last_of_all = False
        """Whether all replicas left in the last step, and this one is to save the state."""
        self._sharded: ShardedStep | None = None
        self._norm = norm
        settings: dict[str, Any] = {
            "samples": samples, "seed": seed, "precision": precision, "needs": needs, "parameters": parameters,
            "sends_in_last": self._sends_in_last, "before_last": self._overlap,
            "after_backward": lambda: fault("backward"),
        }  # fmt: skip
        shards: dict[str, Any] = {}
        if connection.ranks.size > 1:
            self._sharded = ShardedStep(model, self._fetch_next, loss, ranks=connection.ranks, **settings)
            found = self._sharded.gradients
            shards = {"sources": found.parameters, "collect": found.collect_one, "lengths": found.lengths}
        self._replica = self._sharded or ReplicaStep(
            model, self._fetch_next, loss, captured_samples=captured_samples, on_event=on_event, **settings
        )
        self._on_event, self._compared_buffers = on_event, False
        self._make_message = partial(
            StepAllReduce,
            self._replica.parameters,
            meter=self._replica.meter,
            sums=self._replica.batch_norm.sums,
            flags=("leaving", "lighthouse", "seconds", "timed", "weights", "differ"),
            norm=norm and self._sharded is None,
            **shards,
        )
        self._combine = self._make_message(begin=self._begin_sum)
        connection.begin_to_hear = self._begin_to_hear
        self._heard: HeardStep | None = None
        """The open step, if this replica has heard it."""
        self._have_state: frozenset[int] = frozenset()
        """Ranks that said in the last step that they have the state now."""
        self._weights: int | None = None
        """The number of the weights at the last comparison, as long as this replica takes part."""
        self._differ = False
        """Whether the sum of these numbers said that not all were the same."""
        self.fork: int | None = None
        """The lineage of the snapshot from which the next step goes on, if the run has just gone back to one."""
        self._leaving = leaving
        self._fault = fault
        self._began = time.monotonic()
        self._combined: float | None = None
        """When the previous step was combined; None where no step, or a lost one, came before."""
        self._quorum: ComputeStep | None = None
        self._still_listen: frozenset[int] = frozenset()
        """Ranks that did not have the state in the step before either."""
        self._size = (0, 0)
        """Workers and samples of the step, before a growing policy allows fewer."""
        self._assignment: Assignment | None = None
        self._micro_batches: tuple[MicroBatch, ...] = ()
        """All micro-batches of the open step, of all replicas."""
        self._earlier: tuple[int, ...] = ()
        """Numbers of the micro-batches that this replica has computed in an attempt before."""
        self._step_size = StepSize(workers=1, samples=1, time_s=0.0, duration_s=0.0)
        """The size of the open step."""
        self._fetches = 0
        """How many micro-batches of the open step were fetched, or are being fetched."""
        self._share: tuple[int, ...] = ()
        """Numbers of the micro-batches that this replica computes in this attempt."""
        self._kept: tuple[int, KeptPart] | None = None
        """What this replica has computed of a step that failed, and the lineage of the state before that step."""
        self._arrived = False
        self._in_last_pass = False
        self._failure = PeerLost()
        self._leavers: frozenset[int] = frozenset()

    # The three verbs ----------------------------------------------------------------------------------------------

    def participants(self, step: int) -> StepSize:
        """Form a quorum group for the next step, in which this replica has the state that counts, perhaps a later one.

        Waits while the lighthouse forms no quorum. Raises `LeftFleet` if this replica is told to leave meanwhile, and
        `TrainingFinished` if the others, or a checkpoint, turn out to have finished.
        """
        kept = self._kept[1] if self._kept is not None and self._kept[0] == self.lineage else None
        before = self._quorum
        self._quorum = quorum = self.connection.next_step(step, self.lineage, kept)
        self._still_listen = quorum.receiving & before.receiving if before is not None else frozenset()
        self._fault("quorum")
        parts = usable_parts(quorum.kept)
        if parts:
            first = next(iter(parts.values()))
            self._size = first.workers, first.samples
        else:
            self._size = self.sizes(quorum.step, len(computing_ranks(quorum)))
        now = time.monotonic() - self._began
        return StepSize(workers=self._size[0], samples=self._size[1], time_s=now, duration_s=0.0)

    def measure(self, on: bool) -> None:
        """Measure the coming steps or not: the same on all replicas, which decide it from the state they share."""
        self._replica.measure(on)

    def gradients(self, assignment: Assignment, size: StepSize) -> Gradients:
        """Forward and backward passes over this replica's micro-batches, then the sum over all replicas."""
        self.open(assignment, size)
        share = [self._micro_batches[number] for number in self._share]
        self._replica.compute(share, epoch=assignment.epoch, batch=assignment.batch, whole=assignment.batch)
        return self.combine()

    def commit(self) -> bool:
        """Whether the sum arrived here."""
        assert self._assignment is not None, "commit follows gradients"
        if not self._arrived:
            self._replica.pause()
            done = KeptPart(workers=self._size[0], samples=self._size[1], micro_batches=self._earlier + self._share)
            self._kept = (self.lineage, done) if done.micro_batches else None
            self.connection.failed(self._failure)
            return False
        self._kept = None
        if not self._compared_buffers and self._replica.samples:  # not in a step that this replica only hears
            self._compared_buffers = True
            if names := self._replica.buffers.changed():
                self._on_event("buffers differ", differing_buffers(names, "replica"))
        self._replica.commit()
        wanted = self._combine.flags["lighthouse"] > 0
        last = self.connection.committed(
            self._assignment, leaving=self._leavers, lighthouse_wanted=wanted, arrived=self._have_state,
            goes_on=self._assignment.stop + self._assignment.dropped < self._samples,  # else a validation may follow
        )  # fmt: skip
        self.parent = self.lineage if self.fork is None else self.fork
        self.lineage, self.fork = self.connection.membership.state.lineage, None
        self._fault("commit")
        if last is not None:
            self.left, self.last_of_all = True, last.save_state
        return True

    # A training loop of the user's own ----------------------------------------------------------------------------

    def open(self, assignment: Assignment, size: StepSize) -> None:
        """Begin a step, or go on with what this replica has kept of an earlier attempt."""
        quorum = self._quorum
        assert quorum is not None, "open follows participants"
        parts = usable_parts(quorum.kept)
        if self._kept is not None and quorum.rank in parts:
            self._replica.resume()
        else:
            self._kept = None
            self._replica.begin()
        self._assignment, self._arrived = assignment, False
        self._step_size, self._fetches = size, 0
        self._micro_batches = micro_batches_of(assignment, size, limit=self.micro_batch)
        self._earlier = self._kept[1].micro_batches if self._kept is not None else ()
        shares = share_micro_batches(self._micro_batches, computing_ranks(quorum), parts)
        self._share = shares.get(quorum.rank, ())  # none at the end of an epoch, or where the policy leaves it idle

    def micro_batches(self) -> Iterator[LoadedMicroBatch]:
        """The micro-batches of the open step that this replica computes now; one backward pass each."""
        assert self._assignment is not None, "micro_batches follows open"
        epoch, batch = self._assignment.epoch, self._assignment.batch
        share = [self._micro_batches[number] for number in self._share]
        return self._replica.load(share, epoch=epoch, batch=batch, whole=batch)

    def backward(self, loss: torch.Tensor | LossSum, micro_batch: LoadedMicroBatch) -> None:
        """Add the gradient of a micro-batch; `loss` is the mean over its samples, or a sum with its count."""
        self._replica.backward(loss, micro_batch)

    def _sends_in_last(self) -> bool:
        """Whether there is anybody to send gradients to while the last backward pass goes on."""
        assert self._quorum is not None
        return len(self._quorum.participants) > 1

    def _overlap(self) -> None:
        """The last backward pass of this replica begins: gradients may be sent while it goes on."""
        self._in_last_pass = True
        self._combine.overlap()

    def _begin_sum(self, part: torch.Tensor) -> Callable[[], None]:
        if self._heard is not None:
            part.copy_(self._heard.message[part.storage_offset() :][: part.numel()])
            return lambda: None
        point = "bucket" if self._in_last_pass else ""
        return self.connection.sums.begin(part, of_rank=self._of_rank(part), begun=lambda: self._fault(point))

    def _of_rank(self, part: torch.Tensor) -> int:
        """How many numbers of a part of the message are of this rank alone, if this replica has several."""
        gradient = self._sharded.gradients.numbers if self._sharded is not None else 0
        return min(part.numel(), max(0, gradient - int(part.storage_offset())))

    def abandon(self) -> None:
        """Give up the open step: the model is what it was before the step."""
        self._replica.abandon()
        self._combine.renew()
        self._kept = None

    def combine(self) -> Gradients:
        """Gradient, statistics, loss and batch norm of all replicas, weighted with the samples they are made of."""
        assert self._assignment is not None, "combine follows open"
        own = self._earlier + self._share
        samples, batch = sum(self._micro_batches[number].size for number in own), self._assignment.batch
        self._replica.check_complete(samples)
        self._in_last_pass = False
        if self.connection.listener is not None:
            return self._combine_heard(self.connection.listener)
        leaving, leads = self._leaving(), self.connection.ranks.leads
        if self._sharded is not None:
            self._sharded.gradients.collect()
        number = self._weights_number()
        now = time.monotonic()
        seconds, self._combined = now - self._combined if self._combined is not None else 0.0, now
        try:
            gradients = self._combine(
                StepPart(
                    loss=self._replica.loss,
                    micro_batches=len(own) if leads else 0,  # the ranks of a replica compute them together
                    samples=samples,
                    count=self._replica.count,
                    batch=batch,
                    scale=samples / batch or 1.0,
                ),
                leaving=float(leaving),
                lighthouse=float(self.connection.wants_lighthouse),
                seconds=seconds if leads else 0.0,
                timed=float(leads and seconds > 0),
                weights=float(number) if leads else 0.0,
                differ=float(self._differ),
            )
            self._earlier = self._share = ()  # what this replica computed is no longer there by itself
            sums = self.connection.sums
            self._leavers = self._who_leaves(leaving, sums) if self._combine.flags["leaving"] else frozenset()
            self._compare_weights(number)
            assert self._quorum is not None
            self._have_state = sums.confirm(self._quorum.receiving)
            self._fault("sum")
        except PeerLost as reason:
            self._failure = reason.with_traceback(None)  # which would keep the connections open, and the others waiting
            self._combined = None
            self._combine.renew()
            return Gradients(loss=math.nan, micro_batches=len(own))
        if self._sharded is not None:
            gradients = self._sharded.gradients.complete(gradients, norm=self._norm)
        self._arrived = True
        return self._timed(gradients)

    def _timed(self, gradients: Gradients) -> Gradients:
        # Clocks differ between replicas, which must decide alike: all use the mean of what was said.
        timed = self._combine.flags["timed"]
        return replace(gradients, seconds=self._combine.flags["seconds"] / timed if timed else None)

    # Steps that this replica hears ----------------------------------------------------------------------------------

    def _begin_to_hear(self, sums: ReplicaSums) -> Hear:
        """What takes part in steps of which this replica knows nothing, since it does not have the state before them.

        A thread of its own does this, with a message and sums of its own, while the training loop waits for the state
        or applies what was heard.
        """
        overheard = self._make_message(begin=lambda part: sums.begin(part, of_rank=self._of_rank(part)))
        device = self._replica.parameters[0].device
        stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

        def hear(listening: frozenset[int], caught_up: Callable[[], bool]) -> HeardStep:
            leaving = self._leaving()
            with torch.cuda.stream(stream):  # nothing without a GPU
                message = overheard.listen(leaving=float(leaving))
                leavers = self._who_leaves(leaving, sums) if overheard.flags["leaving"] else frozenset()
                if overheard.flags["differ"] > 0:
                    self._find_different(None, sums)
            arrived = sums.confirm(listening, has_state=caught_up())
            self._fault("hear")
            return HeardStep(message=message, leaving=leavers, arrived=arrived)

        return hear

    def _combine_heard(self, listener: Listener) -> Gradients:
        """What `combine` returned on the other replicas, in a step that this one has heard."""
        assert self._assignment is not None and not self._share
        try:
            self._heard = step = listener.next()
        except PeerLost as reason:
            self._failure = reason.with_traceback(None)
            return Gradients(loss=math.nan, micro_batches=0)
        if self.connection.rank in step.arrived:
            self.connection.listener = None
        try:
            gradients = self._combine(StepPart(batch=self._assignment.batch))
        finally:
            self._heard = None
        if self._sharded is not None:
            gradients = self._sharded.gradients.complete(gradients, norm=self._norm)
        self._leavers, self._have_state = step.leaving, step.arrived
        self._weights, self._combined, self._arrived = None, None, True
        return self._timed(gradients)

    def _weights_number(self) -> int:
        """The number of this replica's weights, in a step in which they are compared; else 0."""
        assert self._quorum is not None
        step, ranks = self._quorum.step, self.connection.ranks
        if step % equality.CHECK_EVERY:
            return 0
        if self._quorum.rank in self._quorum.receiving:
            self._weights = None
            return 0
        # Every rank says what it holds, also of what another rank owns.
        held = self._replica.parameters if self._sharded is None else self._sharded.gradients.parameters
        self._weights = equality.weights_number(held, step, gather=ranks.gather)
        return self._weights

    def _compare_weights(self, number: int) -> None:
        """Notice that the weights of replicas differ, and in the step after that, of which; that one is healed.

        Every replica sees whether the sum is that of equal numbers; at least one sees it, if they differ. It says so in
        the next step, so that all ask together. That step is lost for all of them.
        """
        assert self._quorum is not None
        said = self._combine.flags
        asked = said["differ"] > 0
        if number:
            self._differ = said["weights"] != number * len(computing_ranks(self._quorum))
        if asked:
            self._differ = False
            self._find_different(self._weights, self.connection.sums)

    def _find_different(self, weights: int | None, sums: ReplicaSums) -> None:
        """Find the ranks whose weights differ, by the number of each that has one; raises `PeerLost` if any do."""
        names, rank = self.connection.names, self.connection.rank
        numbers = torch.zeros(len(names), dtype=torch.float64, device=self._replica.parameters[0].device)
        if self.connection.ranks.leads and weights is not None:
            numbers[rank] = weights + 1.0
        sums.all_reduce(numbers)
        different = equality.different_ranks([int(one) - 1 if one else None for one in numbers.tolist()])
        if not different:
            return
        self._weights = None
        if rank in different:
            self.lineage = fork_lineage(self.lineage, rank)
            self.connection.weights_differ()
        raise PeerLost(
            f"the weights of {', '.join(names[rank] for rank in different)} differ from those of most replicas, "
            f"although all committed the same steps; it receives the state of the others. Something in its script or "
            f"on its machine changes weights in another way"
        )

    def _who_leaves(self, leaving: bool, sums: ReplicaSums) -> frozenset[int]:
        """Find the ranks that leave by one more, tiny all-reduce, in the rare step in which a replica leaves."""
        said = torch.zeros(len(self.connection.names), device=self._replica.parameters[0].device)
        said[self.connection.rank] = float(leaving)
        sums.all_reduce(said)
        return frozenset(rank for rank, leaves in enumerate(said.tolist()) if leaves)

    # Data -----------------------------------------------------------------------------------------------------------

    def upcoming(self) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """The fetches of this replica from the latest one on, if the participants and the batch stay what they are."""
        quorum, assignment, size = self._quorum, self._assignment, self._step_size
        if quorum is None or assignment is None:
            return
        share = [self._micro_batches[number] for number in self._share[max(0, self._fetches - 1) :]]
        ranks = [rank for rank in range(len(quorum.participants)) if rank not in self._still_listen]
        if quorum.receiving != self._still_listen or quorum.kept:  # who receives the state computes in the next step
            workers, samples = self.sizes(quorum.step + 1, len(ranks))
            size = replace(size, workers=workers, samples=samples)
        while share:
            for part in map(self._replica.part_of, share):
                seed = micro_batch_seed(self._seed, assignment.epoch, part.start)
                yield seed, self._replica.indices(assignment.epoch, part)
            ledger = Ledger(samples=self._samples, epoch=assignment.epoch, position=assignment.start).commit(assignment)
            assignment = ledger.assign(size.samples, size.dropped)
            micro_batches = micro_batches_of(assignment, size, limit=self.micro_batch)
            share = [micro_batches[i] for i in share_micro_batches(micro_batches, ranks, {})[quorum.rank]]

    def _fetch_next(self, indices: npt.NDArray[np.int64]) -> Any:
        self._fetches += 1
        return self._fetch(indices)

    # The run around the steps -------------------------------------------------------------------------------------

    def snapshot_taken(self) -> int:
        """The lineage of the snapshot."""
        return self.lineage

    def snapshot_loaded(self, known: int) -> None:
        """Begin another branch of the lineage at the snapshot.

        All replicas of the step do so, since all saw the same loss. The same samples in the same group must not give
        the lineage that the given-up steps had, so it depends on the state that was given up.
        """
        self.fork, self.lineage = known, fork_lineage(known, self.lineage)

    def autocast(self) -> AbstractContextManager[object]:
        """The model computes in the engine's precision inside."""
        return self._replica.autocast()

    def describe(self) -> dict[str, Any]:
        """How steps are computed, as JSON values: for the header of a record."""
        return {"engine": type(self).__name__}

    @property
    def established(self) -> bool:
        """Whether this replica has committed a step with this fleet since it started or received a state."""
        return self.connection.membership.state.established

    @property
    def first(self) -> bool:
        """Whether this replica is the first of its quorum group that has the state: it writes what is to be written
        once."""
        return self._quorum is not None and self._quorum.rank == computing_ranks(self._quorum)[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the participants of the last step, by rank."""
        return self._quorum.participants if self._quorum is not None else ()
