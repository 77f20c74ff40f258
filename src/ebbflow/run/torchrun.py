"""Runs that torchrun started: which rank this process is, how the ranks find each other, agree and end together.

    torchrun --nproc-per-node 2 -m ebbflow train digits-mlp ...

Only rank 0 reads and writes files and prints. A failing rank sets a flag in the store; the others see it and exit
without a second error."""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ebbflow.engines.emulated import Ranks
from ebbflow.errors import ConfigError, RankLost
from ebbflow.torch_api import prefix_store

__all__ = ["RankGroup", "RankInfo", "joined", "rank_info"]

_TIMEOUT = datetime.timedelta(hours=1)  # the others wait while rank 0 validates
_FAILED = "failed"
_RUNS = itertools.count()  # a second run of a process must not find what the first one left in the store

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """What torchrun says about a process in its environment."""

    rank: int
    world: int
    local_rank: int
    """Number of this process among those of this machine."""


def rank_info(environ: Mapping[str, str]) -> RankInfo | None:
    """The rank of this process; None for a single process, whether torchrun started it or not.

    >>> rank_info({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    RankInfo(rank=1, world=2, local_rank=1)
    >>> rank_info({"RANK": "0", "WORLD_SIZE": "1"}), rank_info({})
    (None, None)
    """
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    try:
        rank, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        local_rank = int(environ.get("LOCAL_RANK", rank))
    except ValueError:
        found = ", ".join(f"{name}={environ.get(name)}" for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        raise ConfigError(f"the environment has {found}; expected the whole numbers that torchrun sets") from None
    return RankInfo(rank=rank, world=world, local_rank=local_rank) if world > 1 else None


class RankGroup:
    """The processes of a run; a single process is a group, too."""

    def __init__(self, here: RankInfo | None = None) -> None:
        self._here = here
        self.ranks = Ranks(here.rank, here.world) if here is not None else None

    @property
    def leads(self) -> bool:
        """Whether this process reads and writes files and prints."""
        return self._here is None or self._here.rank == 0

    def shared(self, make: Callable[[], Value]) -> Value:
        """What rank 0 makes, on every rank; it must be picklable."""
        if self._here is None:
            return make()
        box: list[Any] = [make() if self.leads else None]
        with _peers():
            dist.broadcast_object_list(box, src=0)
        value: Value = box[0]
        return value

    def device(self, asked: str) -> str:
        """The device of this rank; each rank has a GPU of its own."""
        if self._here is None or not asked.startswith("cuda"):
            return asked
        if asked != "cuda":
            raise ConfigError(f"device is {asked}, but each of several ranks takes a GPU of its own; use device cuda")
        found, needed = torch.cuda.device_count(), self._here.local_rank + 1
        if found < needed:
            raise ConfigError(
                f"rank {self._here.rank} needs GPU number {needed} of this machine, but torch sees {found}; start at "
                f"most {found} ranks (--nproc-per-node), or use device cpu"
            )
        return f"cuda:{self._here.local_rank}"

    def same_weights(self, model: torch.nn.Module) -> None:
        """Give every rank the weights and buffers of rank 0, and what modules keep by `get_extra_state`."""
        if self._here is None:
            return
        state = model.state_dict()
        dense = {
            name: value
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and value.layout == torch.strided
        }
        with _peers():
            for tensor in dense.values():
                dist.broadcast(tensor.detach(), src=0)
        if len(dense) < len(state):  # sparse tensors and extra state
            others = self.shared(lambda: {name: value for name, value in state.items() if name not in dense})
            model.load_state_dict(others, strict=False)


@contextmanager
def joined(device: str, environ: Mapping[str, str] = os.environ) -> Iterator[RankGroup]:
    """Join the ranks of this run for the duration of the context.

    An error inside is raised by the rank that has it first; on the others, which cannot go on either, it is a
    `RankLost` that need not be reported again. Where the process has initialised torch.distributed before, as
    frameworks do, its group is used as it is, and left as it is."""
    here = rank_info(environ)
    if here is None or dist.is_initialized():
        yield RankGroup(here)
        return
    with _helpful(here):
        store = prefix_store(f"ebbflow/{next(_RUNS)}", _store())
    try:
        group = RankGroup(here)
        _join(here, group.device(device), store)
        yield group
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt):
            # This rank can only end now; the SIGTERM that torchrun sends then must not cut off its error message.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        # Set the flag before this process ends and the others notice: they then report nothing.
        if _first(store) or isinstance(error, KeyboardInterrupt):
            raise
        raise RankLost("another rank has failed", reported=True) from error
    finally:
        with contextlib.suppress(Exception):  # a rank that is gone is no reason to fail
            dist.destroy_process_group()


@functools.cache
def _store() -> Any:
    """The store in which the ranks find each other; it must outlive a run, since rank 0 may serve it."""
    store, _, _ = next(rendezvous("env://", timeout=_TIMEOUT))
    return store


def _join(here: RankInfo, device: str, store: Any) -> None:
    backend = "nccl" if device.startswith("cuda") else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(device)
    with _helpful(here):
        dist.init_process_group(backend, store=store, rank=here.rank, world_size=here.world, timeout=_TIMEOUT)


@contextmanager
def _helpful(here: RankInfo) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"rank {here.rank} could not join the other {here.world - 1}: {reason}; start them with torchrun, and if "
            f"they do not find each other name the network interface, such as GLOO_SOCKET_IFNAME=lo on one machine"
        ) from error


def _first(store: Any) -> bool:
    """Whether no rank has failed before."""
    try:
        return bool(store.add(_FAILED, 1) == 1)
    except RuntimeError:  # the store went with torchrun or with rank 0
        return False


@contextmanager
def _peers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLost(f"another rank has ended ({str(error).strip().splitlines()[0]})") from error
