"""The ranks of one replica: the processes of a torchrun group that train one copy of the model together.

Inside a replica the model is sharded by FSDP2 (`fully_shard`) or tensor parallelism, or copied by
DistributedDataParallel; torch adds up the gradients of a backward pass there. Across replicas, rank r talks with rank r
of the others about the shards that it holds. Rank 0 leads: it speaks the membership protocol, reads and writes files,
and tells the others what was decided. A rank that dies ends its replica: whoever waits for it gets a `RankLost`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ebbflow.data.ledger import MicroBatch
from ebbflow.engines.process_group import BackendFailed, PeerLost, ProcessGroup
from ebbflow.errors import ConfigError, RankLost

__all__ = ["ReplicaRanks", "ReplicaSums", "is_sharded", "local_shard", "replica_ranks", "samples_of_rank"]

_SHORT = 2048  # bytes of the first message of a shared value
_TIMEOUT = timedelta(days=30)  # ranks wait for rank 0, which may wait for the fleet; a dead one is noticed at once

Value = TypeVar("Value")


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, of which this process holds a part."""
    return hasattr(tensor, "to_local")  # the class itself takes long to import


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor: the shard of a DTensor, and of any other tensor all of it."""
    dtensor: Any = tensor
    found: torch.Tensor = dtensor.to_local() if is_sharded(tensor) else tensor
    return found


class ReplicaRanks:
    """The ranks of this replica; a single process is one, too, and communicates with nobody.

    All ranks call the methods that communicate in the same order. Each raises `RankLost` if another rank has ended.
    """

    def __init__(
        self,
        *,
        data_rank: int = 0,
        data_size: int = 1,
        group: dist.ProcessGroup | None = None,
        hooks_see_sums: bool = True,
    ) -> None:
        """`group`: a gloo group of all ranks. `data_rank` of `data_size`: which part of the samples this rank gets."""
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1
        self.data_rank, self.data_size = data_rank, data_size
        self.hooks_see_sums = hooks_see_sums
        """Whether a gradient is that of the whole replica when the hooks of its parameter are called."""
        self._group = group
        self._groups: list[dist.ProcessGroup] = [] if group is None else [group]
        self._messages = 0
        self.counts = self.gather(data_rank).index(data_rank) == self.rank
        """Whether this rank is the first of those with the same samples, so that it counts their loss."""

    @property
    def leads(self) -> bool:
        """Whether this process speaks for the replica, reads and writes files, and prints."""
        return self.rank == 0

    def share(self, value: Value) -> Value:
        """The `value` of rank 0, on every rank; it must be picklable."""
        if self._group is None:
            return value
        # Most values fit into the first message, beside their length; torch's own function takes two for any value.
        data = pickle.dumps(value) if self.leads else b""
        head = torch.zeros(_SHORT, dtype=torch.uint8)
        body = b"".join((len(data).to_bytes(8, "big"), data))
        head[: len(body[:_SHORT])] = torch.frombuffer(bytearray(body[:_SHORT]), dtype=torch.uint8)
        self._broadcast(head)
        received = head.numpy().tobytes()
        length = int.from_bytes(received[:8], "big")
        rest = torch.zeros(max(0, length + 8 - _SHORT), dtype=torch.uint8)
        if len(rest):
            if self.leads:
                rest = torch.frombuffer(bytearray(body[_SHORT:]), dtype=torch.uint8)
            self._broadcast(rest)
        shared: Value = pickle.loads((received + rest.numpy().tobytes())[8 : 8 + length])
        return shared

    def _broadcast(self, tensor: torch.Tensor) -> None:
        self._messages += 1
        with _peers():
            dist.broadcast(tensor, src=0, group=self._group)

    def gather(self, value: Value) -> list[Value]:
        """The values of all ranks, on every rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.size
        self._messages += 1
        with _peers():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def add_up(self, tensor: torch.Tensor) -> None:
        """Replace a small tensor by its sum over the ranks, with the same bits on each."""
        if self._group is not None and tensor.numel():
            host = tensor.cpu()  # the group is gloo's, whatever device computes; on a CPU this is the tensor itself
            self._messages += 1
            with _peers():
                dist.all_reduce(host, group=self._group)
            tensor.copy_(host)

    def all_agree(self, flag: bool) -> bool:
        """Whether the flag is set on all ranks."""
        votes = torch.tensor([float(flag)])
        self.add_up(votes)
        return votes.item() == self.size

    def in_thread(self, before: ReplicaRanks | None = None, *, ended: bool = False) -> ReplicaRanks:
        """The same ranks over connections of their own, for another thread on each; all ranks call this.

        Connections are kept until the replica ends. So those of the thread `before` are used again, if that has `ended`
        on all ranks, and after the same messages: then no rank still waits there for one that will not come.
        """
        said = self.gather(before._messages if before is not None and ended else None)
        if before is not None and said[0] is not None and len({*said}) == 1:
            return before
        group = self.another_group()
        if group is None:
            return self
        return ReplicaRanks(
            data_rank=self.data_rank, data_size=self.data_size, group=group, hooks_see_sums=self.hooks_see_sums
        )

    def subgroup(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """A group of some ranks, for tensors on their device; all ranks call this. None stands for all."""
        return None if len(ranks) == self.size else self._kept(dist.new_group(list(ranks)))

    def another_group(self) -> dist.ProcessGroup | None:
        """Another gloo group of all ranks, for a thread of its own; all ranks call this. None for a single process."""
        return None if self._group is None else self._kept(dist.new_group(backend="gloo", timeout=_TIMEOUT))

    def _kept(self, group: Any) -> dist.ProcessGroup:
        self._groups.append(group)
        return self._groups[-1]

    def close(self) -> None:
        """End all groups that were made here; torch's default group stays.

        torch may abort a process that ends with a group which is still referred to.
        """
        for group in self._groups:
            with contextlib.suppress(RuntimeError, ValueError):
                dist.destroy_process_group(group)
        self._groups, self._group = [], None

    def check_same(self, described: Mapping[str, str]) -> None:
        """Refuse ranks that run other code, or hold other shards, than rank 0."""
        everybody = self.gather(dict(described))
        for rank, other in enumerate(everybody):
            for key in {**everybody[0], **other}:
                if other.get(key) != everybody[0].get(key):
                    raise ConfigError(
                        f"the ranks of this replica differ: {key} is {everybody[0].get(key)!r} on rank 0 and "
                        f"{other.get(key)!r} on rank {rank}; start all ranks with the same script and settings, and "
                        f"shard the model in the same way on each"
                    )


@contextmanager
def _peers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0][:200]
        raise RankLost(f"another rank of this replica has ended ({reason})", reported=True) from error


def replica_ranks(
    model: torch.nn.Module, data_mesh: Any = None, environ: Mapping[str, str] = os.environ
) -> ReplicaRanks:
    """The ranks with which this process trains a model, by torch's default process group; often it is the only one.

    `data_mesh`: the one-dimensional DeviceMesh over which the samples are divided. By default these are all ranks if
    the model is wrapped by FSDP2 or DistributedDataParallel, and none if it is tensor parallel only.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        if int(environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in environ:
            raise ConfigError(
                f"this process is one of {environ['WORLD_SIZE']} ranks (WORLD_SIZE), but they are not connected: call "
                f"torch.distributed.init_process_group() and shard the model (fully_shard) before joining, or start "
                f"one process per replica"
            )
        return ReplicaRanks()
    size = dist.get_world_size()
    if data_mesh is None:
        data_rank, data_size = (dist.get_rank(), size) if _divides_samples(model, size) else (0, 1)
    elif data_mesh.ndim != 1:
        raise ConfigError(f"data_mesh has {data_mesh.ndim} dimensions; expected one, such as mesh['dp']")
    else:
        data_rank, data_size = data_mesh.get_local_rank(), data_mesh.size()
    if data_size > 1 and not _is_wrapped(model):
        raise ConfigError(
            f"the samples are divided over {data_size} ranks, but nothing adds up their gradients inside the replica: "
            f"wrap the model by torch.distributed.fsdp.fully_shard or DistributedDataParallel"
        )
    group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
    # DistributedDataParallel adds up gradients after these hooks; FSDP2 calls them when it has done so.
    hooks_see_sums = not any(isinstance(module, DistributedDataParallel) for module in model.modules())
    return ReplicaRanks(data_rank=data_rank, data_size=data_size, group=group, hooks_see_sums=hooks_see_sums)


def _is_wrapped(model: torch.nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, DistributedDataParallel) or any(isinstance(m, FSDPModule) for m in model.modules())


def _divides_samples(model: torch.nn.Module, size: int) -> bool:
    """Whether every rank gets samples of its own, where that follows from the model."""
    meshes = {parameter.device_mesh for parameter in model.parameters() if is_sharded(parameter)}  # type: ignore[attr-defined]
    if any(mesh.ndim != 1 or mesh.size() != size for mesh in meshes):
        raise ConfigError(
            f"the model is sharded over several meshes, or over a mesh of several dimensions, so that it is not clear "
            f"which of the {size} ranks get the same samples; give the mesh over which samples are divided, such as "
            f"data_mesh=mesh['dp']"
        )
    return _is_wrapped(model) or not meshes


# Sums -----------------------------------------------------------------------------------------------------------------


class ReplicaSums:
    """Sums over the replicas of a group, each of which may have several ranks.

    Of replicas of several ranks, the first `of_rank` numbers of a tensor are of this rank alone, and are added up with
    the same rank of the other replicas. The rest is added up over the ranks first, then by rank 0 over the replicas,
    and given to all ranks.

    A message may be sent in parts, of which the last one has numbers that are not of one rank alone. Which ranks notice
    that a peer is lost, and in which part, is chance: so a failure is kept until the ranks tell each other, when the
    last part has come. Then all ranks have the sum, or all raise the same `PeerLost`: that of the first rank on which
    the backend failed, or else of the first that lost its peer.
    """

    def __init__(self, ranks: ReplicaRanks, group: ProcessGroup) -> None:
        """`group`: this rank, and its peers in other replicas."""
        self.ranks = ranks
        self._group = group
        self._lost: PeerLost | None = None  # what this rank has to tell the others; the group is of no use any more

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a tensor, of which nothing is of this rank alone, by its sum."""
        self.begin(tensor)()

    def begin(
        self, tensor: torch.Tensor, *, of_rank: int = 0, begun: Callable[[], None] = lambda: None
    ) -> Callable[[], None]:
        """Begin to replace a tensor by its sum; the result waits for it. All processes begin theirs in the same order.

        Does not wait for other replicas; nor, if all numbers are `of_rank`, for other ranks, so that a backward pass
        may call it. The sums of earlier parts are waited for before that of the last one. `begun` is called when the
        tensor is on its way; a `PeerLost` that it raises counts as one of the sum.
        """
        if self.ranks.size > 1 and of_rank < tensor.numel():
            return self._begin_last_part(tensor, of_rank)
        return self._begin_part(tensor, begun)

    def _begin_part(self, tensor: torch.Tensor, begun: Callable[[], None] = lambda: None) -> Callable[[], None]:
        """Begin a sum with the peers of this rank; with several ranks, a `PeerLost` is kept and not raised."""
        if self._lost is not None:
            return lambda: None
        try:
            wait = self._group.begin_all_reduce(tensor)
            begun()
        except PeerLost as error:
            self._keep(error)
            return lambda: None

        def wait_for_part() -> None:
            if self._lost is None:  # else waiting for another sum would only take longer
                try:
                    wait()
                except PeerLost as error:
                    self._keep(error)

        return wait_for_part

    def _keep(self, error: PeerLost) -> None:
        if self.ranks.size == 1:
            raise error
        self._lost = error.with_traceback(None)  # which would keep the connections open

    def _begin_last_part(self, tensor: torch.Tensor, of_rank: int) -> Callable[[], None]:
        ranks, of_replica = self.ranks, tensor[of_rank:]
        ranks.add_up(of_replica)
        with_peers = tensor if ranks.leads else tensor[:of_rank]
        wait = self._begin_part(with_peers) if with_peers.numel() else lambda: None

        def wait_for_all() -> None:
            wait()
            # One message says whether any rank has lost its peer, and what rank 0 has received.
            said, lost = tensor.new_zeros(of_replica.numel() + 1), self._lost
            if lost is not None:
                said[-1] = 1.0
            elif ranks.leads:
                said[:-1] = of_replica
            ranks.add_up(said)
            if said[-1] > 0:
                raise self._agreed(lost)
            of_replica.copy_(said[:-1])

        return wait_for_all

    def _agreed(self, lost: PeerLost | None) -> PeerLost:
        """The failure that all ranks report, some of which have one."""
        own = None if lost is None else (isinstance(lost, BackendFailed), str(lost))
        failures = [failure for failure in self.ranks.gather(own) if failure is not None]
        failures.sort(key=lambda failure: not failure[0])  # those of the backend first
        backend, words = failures[0]
        return (BackendFailed if backend else PeerLost)(words)

    def confirm(self, listening: frozenset[int] = frozenset(), *, has_state: bool = True) -> frozenset[int]:
        """Wait until all participants of a step have its sum; of those that listened, the ranks that have the state.

        Whoever committed a step before could be the only one that has it: it would have to be repeated if that replica
        then died, or were taken for dead. A replica of several ranks has the state when all its ranks have it.
        """
        if not listening:
            if self.ranks.size == 1:
                self._group.barrier()
            else:
                self.all_reduce(torch.zeros(1))
            return frozenset()
        said = torch.zeros(self._group.size)
        said[self._group.rank] = float(has_state)
        self.all_reduce(said)
        return frozenset(rank for rank in listening if said[rank] == self.ranks.size)


# Samples --------------------------------------------------------------------------------------------------------------


def samples_of_rank(micro_batch: MicroBatch, rank: int, ranks: int, *, least: int = 1) -> tuple[MicroBatch, bool]:
    """Divide a micro-batch evenly over ranks, each with at least so many samples: what one rank computes of it, and
    whether that counts.

    Every rank takes part in every pass, since the passes communicate. One that has no samples computes the whole
    micro-batch, which is then small, and this counts nothing.

    >>> seven, three = MicroBatch(worker=0, start=10, stop=17), MicroBatch(worker=0, start=10, stop=13)
    >>> [samples_of_rank(seven, rank, 2)[0].size for rank in range(2)]
    [3, 4]
    >>> [samples_of_rank(three, rank, 2, least=2)[1] for rank in range(2)]
    [True, False]
    """
    active = min(ranks, max(1, micro_batch.size // least))
    if rank >= active:
        return micro_batch, False
    start, stop = (micro_batch.start + micro_batch.size * index // active for index in (rank, rank + 1))
    return replace(micro_batch, start=start, stop=stop), True
