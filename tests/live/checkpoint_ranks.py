"""What the ranks of a replica run in the tests of checkpoints."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ebbflow.engines.replica_ranks import ReplicaRanks
from ebbflow.live.checkpoints import Checkpoints
from live.buckets import BUCKET, bucket_hangs

Events = list[tuple[str, str]]


@contextmanager
def joined(rank: int, ranks: int, rendezvous: str, place: str) -> Iterator[tuple[Checkpoints, Events]]:
    """The checkpoints of a replica, and what is said about them."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    group = ReplicaRanks(data_rank=rank, data_size=ranks, group=dist.new_group(backend="gloo"))
    heard: Events = []
    yield Checkpoints(place, on_event=lambda what, text: heard.append((what, text)), ranks=group), heard
    group.close()
    dist.destroy_process_group()


def state(step: int, ranks: int, numbers: int = 8) -> dict[str, Any]:
    """A state with one tensor, of which each rank has a shard."""
    whole = torch.full((numbers,), float(step))
    return {"step": step, "model": {"w": distribute_tensor(whole, init_device_mesh("cpu", (ranks,)), [Shard(0)])}}


def save_while_it_hangs(rank: int, ranks: int, rendezvous: str, folder: str, answers: Any) -> None:
    """Save once before the bucket hangs, three times meanwhile and once afterwards."""
    with joined(rank, ranks, rendezvous, f"{BUCKET}{folder}/job") as (store, heard):
        store.save(state(1, ranks), step=1, lineage=1)
        store.wait()
        dist.barrier()
        with bucket_hangs(Path(folder) / f"rank{rank}"):
            for step in (2, 3, 4):
                store.save(state(step, ranks), step=step, lineage=step)
            heard_meanwhile = list(heard)
            dist.barrier()
        store.wait()
        store.save(state(5, ranks), step=5, lineage=5)
        store.wait()
    answers.put((rank, heard_meanwhile, heard))


def save_without_memory(rank: int, ranks: int, rendezvous: str, folder: str, answers: Any) -> None:
    """Save three times; the second time, rank 1 has no memory for the copy."""
    with joined(rank, ranks, rendezvous, folder) as (store, heard):
        copied = store._copies.copied

        def fail(state: Any) -> Any:
            raise MemoryError("no memory for 3 GB")

        for step in (1, 2, 3):
            store._copies.copied = fail if (rank, step) == (1, 2) else copied  # type: ignore[method-assign]
            store.save(state(step, ranks), step=step, lineage=step)
            store.wait()
    answers.put((rank, heard))


def save_on_a_full_disk(rank: int, ranks: int, rendezvous: str, folder: str, answers: Any) -> None:
    """Save three times; the second time, the system writes no more for rank 1, as if its disk were full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with joined(rank, ranks, rendezvous, folder) as (store, heard):
        for step in (1, 2, 3):
            _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000 if (rank, step) == (1, 2) else most, most))
            store.save(state(step, ranks, numbers=100_000), step=step, lineage=step)
            store.wait()
            dist.barrier()
            if step == 2:
                files = sorted(path.name for path in Path(folder).iterdir())
                dist.barrier()
    answers.put((rank, heard, files))
