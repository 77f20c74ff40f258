"""Rows of Dask arrays for the workers that train: blocks stay where they are, the rows of a micro-batch are sent.

The order of the samples is random over all blocks, so a micro-batch has rows of many. A worker asks each worker that
holds some of them in one message, without the scheduler. A block that is lost with its worker is computed again by Dask
and looked up again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from dask.delayed import delayed
from distributed import wait
from distributed.diagnostics.plugin import WorkerPlugin

from ebbflow.engines.dask.distributed_api import add_handler, to_serialize
from ebbflow.errors import DataError
from ebbflow.estimators.dask_arrays import Blocks
from ebbflow.estimators.inputs import as_tensor

__all__ = ["RowFetch", "RowServer", "by_block", "hold"]

Ints = npt.NDArray[np.int64]
Pair = tuple[npt.NDArray[Any], npt.NDArray[Any]]
"""Inputs and targets."""

_HANDLER = "ebbflow_rows"
_TIMEOUT_S = 60.0
"""How long a lost block may take to be computed again."""
_HERE: dict[str, Any] = {}
"""Workers of this process, by the address of their scheduler."""


def by_block(indices: Ints, starts: Ints) -> tuple[dict[int, Ints], Ints]:
    """The rows of each block that these samples are, and the position of each sample when the rows are concatenated.

    >>> requested, back = by_block(np.array([12, 3, 11, 4]), np.array([0, 10]))
    >>> {block: rows.tolist() for block, rows in requested.items()}, back.tolist()
    ({0: [3, 4], 1: [2, 1]}, [2, 0, 3, 1])
    """
    home = np.searchsorted(starts, indices, side="right") - 1
    order = np.argsort(home, kind="stable")
    blocks, firsts = np.unique(home[order], return_index=True)
    requested = {
        int(block): indices[part] - starts[block]
        for block, part in zip(blocks, np.split(order, firsts[1:]), strict=True)
    }
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return requested, back


def _choose(worker: Any, asked: Sequence[tuple[str, Ints]]) -> list[Pair] | None:
    """Rows of blocks that a worker holds; None if it no longer holds one of them."""
    try:
        held = [(worker.data[key], rows) for key, rows in asked]
    except KeyError:
        return None
    return [(inputs[rows], targets[rows]) for (inputs, targets), rows in held]


class RowServer(WorkerPlugin):
    """Lets every worker, also one that arrives later, answer with rows of the blocks that it holds."""

    name = _HANDLER

    def setup(self, worker: Any) -> None:
        """Add a handler to those of Dask."""

        async def answer(asked: Sequence[tuple[str, Ints]]) -> dict[str, Any]:
            # In a thread: a block may have to be read from the disk.
            rows = await asyncio.get_running_loop().run_in_executor(None, _choose, worker, asked)
            return {"status": "OK", "rows": to_serialize(rows)}

        add_handler(worker, _HANDLER, answer)
        _HERE[worker.scheduler.address] = worker


@dataclass
class RowFetch:
    """Fetches samples by their numbers from blocks on the workers of a cluster. Can be pickled."""

    scheduler: str
    keys: tuple[str, ...]
    """Keys of the blocks."""
    starts: Ints
    """The number of each block's first row."""
    _home: dict[int, str] = field(default_factory=dict, repr=False)
    """Block -> address of the worker that held it when it was last looked up."""

    def __call__(self, indices: Ints) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of these samples, in this order."""
        requested, back = by_block(indices, self.starts)
        found = self._fetch(requested)
        inputs, targets = (np.concatenate([found[b][i] for b in requested]) for i in (0, 1))
        for name, rows in (("X", inputs), ("y", targets)):
            if rows.dtype.kind == "f" and not np.isfinite(rows).all():
                raise DataError(f"{name} has a value that is NaN or infinite; expected numbers: fill it in first")
        return as_tensor(inputs[back]), as_tensor(targets[back])

    def _fetch(self, requested: Mapping[int, Ints]) -> dict[int, Pair]:
        worker = _HERE[self.scheduler]
        found: dict[int, Pair] = {}
        until = time.monotonic() + _TIMEOUT_S
        while missing := [b for b in requested if b not in found]:
            asked = asyncio.run_coroutine_threadsafe(
                self._ask_all(worker, missing, requested), worker.loop.asyncio_loop
            )
            for blocks, rows in asked.result():
                if rows is None:
                    for b in blocks:
                        del self._home[b]
                else:
                    found.update(zip(blocks, rows, strict=True))
            if len(found) < len(requested):
                if time.monotonic() > until:
                    raise DataError(f"{len(missing)} blocks of the data are gone and do not come back; start anew")
                time.sleep(0.05)
        return found

    async def _ask_all(self, worker: Any, blocks: Sequence[int], requested: Mapping[int, Ints]) -> list[Any]:
        """One message to each worker that holds some of the blocks; blocks that no worker holds are left out."""
        if lost := [b for b in blocks if b not in self._home]:
            where = await worker.scheduler.who_has(keys=[self.keys[b] for b in lost])
            self._home |= {b: min(where[self.keys[b]]) for b in lost if where.get(self.keys[b])}
        at: dict[str, list[int]] = {}
        for b in blocks:
            if b in self._home:
                at.setdefault(self._home[b], []).append(b)
        return await asyncio.gather(*(self._ask(worker, address, there, requested) for address, there in at.items()))

    async def _ask(self, worker: Any, address: str, blocks: list[int], requested: Mapping[int, Ints]) -> Any:
        asked = [(self.keys[b], requested[b]) for b in blocks]
        if address == worker.address:
            return blocks, await asyncio.get_running_loop().run_in_executor(None, _choose, worker, asked)
        try:
            reply = await getattr(worker.rpc(address), _HANDLER)(asked=to_serialize(asked))
        except (OSError, TimeoutError):  # the worker is gone
            return blocks, None
        return blocks, reply["rows"]


def hold(data: Blocks, client: Any) -> tuple[RowFetch, list[Any]]:
    """Compute the blocks on the cluster; returns how to fetch their rows, and the futures that keep them alive.

    An error in the computation of a block is raised here.
    """
    client.register_plugin(RowServer())
    inputs, targets = (array.to_delayed().reshape(-1) for array in (data.X, data.y))
    pairs: Any = [delayed((x, y)) for x, y in zip(inputs, targets, strict=True)]  # so that they lie on one worker
    held = client.compute(pairs)
    wait(held)  # type: ignore[no-untyped-call]
    for future in held:
        if future.status == "error":
            raise future.exception()
    starts = np.append(0, np.cumsum(data.X.chunks[0])[:-1]).astype(np.int64)
    keys = tuple(future.key for future in held)
    return RowFetch(client.scheduler.address, keys, starts), held
