"""Gradients and statistics of a model that the ranks of a replica hold in shards.

A *shard* is what one rank holds of a parameter. Ranks may hold the same shard: all of them hold everything under
DistributedDataParallel, and tensor-parallel ranks hold the same layer norms. The first of these ranks owns the shard:
it alone measures its gradient and adds it up with the other replicas, and then gives the sum to the other holders, so
that each number counts once and all holders have the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ebbflow.data.ledger import MicroBatch
from ebbflow.engines.base import Gradients
from ebbflow.engines.loss_sum import LossSum
from ebbflow.engines.replica_ranks import ReplicaRanks, is_sharded, local_shard, samples_of_rank
from ebbflow.engines.replica_step import LoadedMicroBatch, ReplicaStep, trained_parameters
from ebbflow.moments.meters import FlatMeter, FusedMeter, squared_norms

__all__ = ["ShardedGradients", "ShardedStep", "as_shard", "describe_shards"]


class ShardedGradients:
    """The gradients of a sharded model as plain tensors, for a meter and an all-reduce that know nothing of shards.

    `local` has one plain parameter per parameter of the model: its `.grad` is this rank's shard of the gradient. Where
    another rank owns the shard it is empty, so that the ranks have the same layers in the same order.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], ranks: ReplicaRanks) -> None:
        self.parameters = tuple(parameters)
        self.ranks = ranks
        pieces = ranks.gather([_piece(parameter) for parameter in self.parameters])
        everywhere = [
            [tuple(r for r in range(ranks.size) if pieces[r][i] == own) for i, own in enumerate(pieces[rank])]
            for rank in range(ranks.size)
        ]
        holders = everywhere[ranks.rank]
        self._owned = [ranks.rank == each[0] for each in holders]
        shared = sorted({each for held in everywhere for each in held if len(each) > 1})
        groups = [(each, ranks.subgroup(each)) for each in shared]  # all ranks make all groups
        self._copied = [
            (each[0], group, [i for i, held in enumerate(holders) if held == each])
            for each, group in groups
            if ranks.rank in each
        ]
        shards = [local_shard(parameter).detach() for parameter in self.parameters]
        self.local = [
            torch.nn.Parameter(shard if owned else shard.new_empty(0), requires_grad=parameter.requires_grad)
            for shard, owned, parameter in zip(shards, self._owned, self.parameters, strict=True)
        ]
        self.numbers = sum(parameter.numel() for parameter in self.local)
        """How many numbers of the gradient this rank adds up with the other replicas."""
        self.lengths = [max(of_one) for of_one in zip(*ranks.gather([p.numel() for p in self.local]), strict=True)]
        """By parameter: the most numbers that any rank adds up, so that all ranks cut the same buckets."""

    def collect(self) -> None:
        """Move all gradients of the model into `local`, or add them to what is there."""
        for number in range(len(self.parameters)):
            self.collect_one(number)

    def collect_one(self, number: int) -> None:
        """Move the gradient of one parameter of the model into `local`, or add it to what is there."""
        parameter, local = self.parameters[number], self.local[number]
        if parameter.grad is not None:
            found = _divided_alike(parameter.grad, parameter)
            gradient = local_shard(found) if self._owned[number] else local.new_empty(0)
            local.grad = gradient if local.grad is None else local.grad.add_(gradient)
            parameter.grad = None

    def clear(self) -> None:
        """Forget the gradients in `local`."""
        for local in self.local:
            local.grad = None

    @torch.no_grad()
    def distribute(self) -> None:
        """Put the gradients in `local` back into the model, on the ranks that own a shard and on those with a copy."""
        found = [local.grad for local in self.local]
        for owner, group, indices in self._copied:
            present = [i for i in indices if found[i] is not None]  # the same on all holders
            if not present:
                continue
            shards = [local_shard(self.parameters[i]) for i in present]
            if self.ranks.rank == owner:
                vector = torch.cat([found[i].flatten() for i in present])  # type: ignore[union-attr]
            else:
                vector = torch.cat([torch.empty_like(shard).flatten() for shard in shards])
            dist.broadcast(vector, src=owner, group=group)
            for i, part, shard in zip(present, vector.split([s.numel() for s in shards]), shards, strict=True):  # type: ignore[no-untyped-call]
                found[i] = part.view_as(shard).to(shard.dtype)
        for parameter, local, gradient in zip(self.parameters, self.local, found, strict=True):
            local.grad = None
            parameter.grad = None if gradient is None else as_shard(gradient, parameter)

    def complete(self, gradients: Gradients, *, norm: bool) -> Gradients:
        """Put the gradients back, and make what was measured of them that of the whole model.

        `norm`: whether the norm of the mean gradient is needed, to clip it or to see whether it is finite.
        """
        measurement = gradients.measurement
        if measurement is not None:
            squares = torch.tensor(measurement.sq_mean, dtype=torch.float64)
            self.ranks.add_up(squares)
            # Every rank counted the passes, of which each is one of the replica.
            measurement = replace(measurement, sq_mean=tuple(squares.tolist()), micro_batches=gradients.micro_batches)
        elif norm:
            own = squared_norms([local.grad for local in self.local if local.grad is not None])
            square = own.sum().to("cpu", torch.float64).reshape(1)
            self.ranks.add_up(square)
            gradients = replace(gradients, norm=square.sqrt().item())
        self.distribute()
        return replace(gradients, measurement=measurement)


def _piece(parameter: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """Which shard this rank holds: its coordinate in each dimension of the mesh by which the tensor is divided."""
    if not is_sharded(parameter):
        return ()
    dtensor: Any = parameter
    where = dtensor.device_mesh.get_coordinate()
    return tuple((i, where[i]) for i, placement in enumerate(dtensor.placements) if not placement.is_replicate())


def _divided_alike(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A gradient that is divided as its parameter is.

    The ranks of a sequence-parallel layer have parts of a sum. They add them up here, in the middle of a backward pass
    perhaps, in the order of the buckets: this is the same on all of them, as that of the pass itself is.
    """
    found: Any = gradient
    like: Any = parameter
    if is_sharded(found) and found.placements != like.placements:
        found = found.redistribute(placements=like.placements)
    divided: torch.Tensor = found
    return divided


def describe_shards(parameters: Iterable[torch.Tensor]) -> str:
    """How a model is divided, in few words: the same on all ranks of all replicas that fit together."""
    kinds: dict[str, int] = {}
    for parameter in parameters:
        dtensor: Any = parameter
        kind = f"{dtensor.placements} over {tuple(dtensor.device_mesh.shape)}" if is_sharded(parameter) else "whole"
        kinds[kind] = kinds.get(kind, 0) + 1
    return ", ".join(f"{count} tensors {kind}" for kind, count in kinds.items())


# A step ---------------------------------------------------------------------------------------------------------------


class ShardedStep(ReplicaStep):
    """The passes of one rank over the micro-batches of its replica.

    The ranks divide each micro-batch. Torch averages their gradients in every pass, so that a loss is multiplied with
    the number of ranks and with this rank's part of the samples: what arrives in `.grad` is the gradient of the whole
    micro-batch, and its squared norm, summed over the shards, is what the unsharded model would show.
    """

    def __init__(
        self,
        *arguments: Any,
        ranks: ReplicaRanks,
        needs: Collection[str] = (),
        parameters: Iterable[torch.nn.Parameter] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, parameters=parameters, **settings)
        self.ranks = ranks
        self.gradients = ShardedGradients(trained_parameters(self.model, parameters), ranks)
        self.parameters = self.gradients.local
        if not {"moments", "layers"}.isdisjoint(needs):
            meter = FlatMeter if FlatMeter.can_measure(self.parameters) else FusedMeter  # both without hooks
            self.meter = meter(self.parameters, layers="layers" in needs)
        self._adds_at_once = False  # what is in .grad may be a part of a bucket that torch uses again
        self._pass: tuple[int, float] = (0, 0.0)  # samples of the replica in the open pass; their part of the step's
        self._counted = False

    def begin(self) -> None:
        """Begin a step, or begin it again: nothing of an earlier attempt is left."""
        super().begin()
        self.gradients.clear()

    def _divided(self, micro_batch: MicroBatch) -> tuple[MicroBatch, bool]:
        least = 2 if self.batch_norm.layers else 1
        return samples_of_rank(micro_batch, self.ranks.data_rank, self.ranks.data_size, least=least)

    def part_of(self, micro_batch: MicroBatch) -> MicroBatch:
        """What this rank computes of a micro-batch."""
        return self._divided(micro_batch)[0]

    def load(
        self, micro_batches: Sequence[MicroBatch], *, epoch: int, batch: int, whole: int | None = None
    ) -> Iterator[LoadedMicroBatch]:
        """This rank's samples of the replica's micro-batches; call `backward` for each before the next."""
        ranks = self.ranks
        own = whole if whole is not None else sum(micro_batch.size for micro_batch in micro_batches)
        for number, micro_batch in enumerate(micro_batches, start=1):
            part, active = self._divided(micro_batch)
            self._pass = micro_batch.size, micro_batch.size / own
            self._counted = active and ranks.counts
            inputs, targets = self._fetch_seeded(epoch, part)
            with self.batch_norm.micro_batch(part.size / batch if self._counted else 0.0):
                weight = ranks.data_size * part.size / own if active else 0.0
                yield LoadedMicroBatch(inputs, targets, part.size, weight, number == len(micro_batches))
            self._after_backward()

    def backward(self, loss: torch.Tensor | LossSum, micro_batch: LoadedMicroBatch) -> None:
        """Add the gradient of a micro-batch; `loss` is the mean over this rank's samples, or a sum with its count."""
        weighted, count = self._run_backward(loss, micro_batch)
        samples, weight = self._pass
        if self.meter is not None and self.meter.on:
            self.gradients.collect()
            self.meter.close_micro_batch(samples, weight)
        if self._counted:
            self.loss = self.loss + weighted / self.ranks.data_size
            self.count = self.count + count
        self.samples += samples

    def _sends(self, micro_batch: LoadedMicroBatch) -> bool:
        """Whether gradients are sent while the backward pass of this micro-batch goes on."""
        return self.ranks.hooks_see_sums and super()._sends(micro_batch)

    def abandon(self) -> None:
        """Give up the step: gradients of its micro-batches are forgotten, and so is what they did to buffers."""
        super().abandon()
        self.gradients.clear()


def as_shard(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A DTensor that is divided like another one, from this rank's shard; a plain tensor if the other one is."""
    if not is_sharded(like):
        return local
    from torch.distributed.tensor import DTensor

    dtensor: Any = like
    return DTensor.from_local(
        local, dtensor.device_mesh, dtensor.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
