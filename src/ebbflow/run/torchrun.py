"""Started by torchrun: which of the processes this is, and how they find each other, agree and end together.

    torchrun --nproc-per-node 2 -m ebbflow train digits-mlp ...

Rank 0 reads and writes all files of the run and speaks to the user; the others compute. An error on any rank ends all
of them, and one of them says why.
"""

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

from ebbflow.engines.emulated.ranks import Ranks, same_on_all
from ebbflow.errors import ConfigError, RankLost

__all__ = ["Group", "Place", "joined", "place"]

_PATIENCE = datetime.timedelta(hours=1)  # the others wait while rank 0 validates
_FAILED = "failed"
_RUNS = itertools.count()  # of this process: a second run must not find what the first one left in the store

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What torchrun says of a process in its environment."""

    rank: int
    world: int
    local_rank: int
    """Among the ranks of this machine."""


def place(environ: Mapping[str, str]) -> Place | None:
    """The place of a process among several; None for one that is alone, started by torchrun or not.

    >>> place({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    Place(rank=1, world=2, local_rank=1)
    >>> place({"RANK": "0", "WORLD_SIZE": "1"}), place({})
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
    return Place(rank=rank, world=world, local_rank=local_rank) if world > 1 else None


class Group:
    """The processes of a run; one that is alone is a group too."""

    def __init__(self, here: Place | None = None) -> None:
        self._here = here
        self.ranks = Ranks(here.rank, here.world) if here is not None else None

    @property
    def leads(self) -> bool:
        """Whether this process reads and writes files and speaks."""
        return self._here is None or self._here.rank == 0

    def shared(self, make: Callable[[], Value]) -> Value:
        """What rank 0 makes, on every rank; it must be something that can be pickled."""
        if self._here is None:
            return make()
        box: list[Any] = [make() if self.leads else None]
        with _peers():
            dist.broadcast_object_list(box, src=0)
        value: Value = box[0]
        return value

    def device(self, asked: str) -> str:
        """The device of this rank: each has a GPU of its own."""
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
        """Give every rank the weights and buffers of rank 0."""
        if self._here is not None:
            with _peers():
                same_on_all(model.state_dict().values())


@contextmanager
def joined(device: str, environ: Mapping[str, str] = os.environ) -> Iterator[Group]:
    """The group of this process, joined for as long as the context lasts.

    An error inside is raised by the rank that has it first; on the others, which cannot go on either, it is a
    `RankLost` that need not be told again.
    """
    here = place(environ)
    if here is None:
        yield Group()
        return
    with _helpful(here):
        store = dist.PrefixStore(f"ebbflow/{next(_RUNS)}", _store())  # type: ignore[attr-defined]
    try:
        group = Group(here)
        _join(here, group.device(device), store)
        yield group
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt):
            # This rank can only end now; the SIGTERM that torchrun sends then must not cut off what it has to say.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        # Before this process ends and the others notice: whoever comes later has nothing to tell.
        if _first(store) or isinstance(error, KeyboardInterrupt):
            raise
        raise RankLost("another rank has failed", reported=True) from error
    finally:
        with contextlib.suppress(Exception):  # a rank that is gone is no reason to fail
            dist.destroy_process_group()


@functools.cache
def _store() -> Any:
    """Where the ranks find each other; it must outlive a run, since rank 0 may be the one that serves it."""
    store, _, _ = next(rendezvous("env://", timeout=_PATIENCE))
    return store


def _join(here: Place, device: str, store: Any) -> None:
    backend = "nccl" if device.startswith("cuda") else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(device)
    with _helpful(here):
        dist.init_process_group(backend, store=store, rank=here.rank, world_size=here.world, timeout=_PATIENCE)


@contextmanager
def _helpful(here: Place) -> Iterator[None]:
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
        raise RankLost(f"another rank has gone ({str(error).strip().splitlines()[0]})") from error
