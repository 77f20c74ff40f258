"""Rows of Dask arrays for the workers that train: blocks stay where they are, the rows of a micro-batch travel.

Samples are dealt out in one random order over all blocks, so a micro-batch has rows of many. A worker asks each of
those that hold them, in one message, past the scheduler. A block that is lost with its worker is computed again by
Dask, and found where it is then."""

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
from distributed.protocol import to_serialize  # type: ignore[attr-defined]

from ebbflow.errors import DataError
from ebbflow.estimators.blocks import Blocks
from ebbflow.estimators.inputs import as_tensor

__all__ = ["RowFetch", "Rows", "by_block", "hold"]

Ints = npt.NDArray[np.int64]
Pair = tuple[npt.NDArray[Any], npt.NDArray[Any]]
"""Inputs and targets."""

_as_it_is: Any = to_serialize  # arrays travel without being copied into a pickle
_HANDLER = "ebbflow_rows"
_PATIENCE_S = 60.0
"""How long a block that was lost may take to be there again."""
_HERE: dict[str, Any] = {}
"""Workers of this process, by the address of their scheduler."""


def by_block(indices: Ints, starts: Ints) -> tuple[dict[int, Ints], Ints]:
    """(The rows of each block that these samples are, the place of each sample when the blocks' rows are joined).

    >>> wanted, back = by_block(np.array([12, 3, 11, 4]), np.array([0, 10]))
    >>> {block: rows.tolist() for block, rows in wanted.items()}, back.tolist()
    ({0: [3, 4], 1: [2, 1]}, [2, 0, 3, 1])
    """
    home = np.searchsorted(starts, indices, side="right") - 1
    order = np.argsort(home, kind="stable")
    blocks, firsts = np.unique(home[order], return_index=True)
    wanted = {
        int(block): indices[part] - starts[block]
        for block, part in zip(blocks, np.split(order, firsts[1:]), strict=True)
    }
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return wanted, back


def _choose(worker: Any, asked: Sequence[tuple[str, Ints]]) -> list[Pair] | None:
    """Rows of blocks that a worker holds; None if one of them is elsewhere by now."""
    try:
        held = [(worker.data[key], rows) for key, rows in asked]
    except KeyError:
        return None
    return [(inputs[rows], targets[rows]) for (inputs, targets), rows in held]


class Rows(WorkerPlugin):
    """Makes a worker, also one that arrives later, answer with rows of the blocks that it holds."""

    name = _HANDLER

    def setup(self, worker: Any) -> None:
        """Add the handler beside Dask's own."""

        async def answer(asked: Sequence[tuple[str, Ints]]) -> dict[str, Any]:
            # In a thread: a block may have to be read from the disk.
            rows = await asyncio.get_running_loop().run_in_executor(None, _choose, worker, asked)
            return {"status": "OK", "rows": _as_it_is(rows)}

        worker.handlers[_HANDLER] = answer
        _HERE[worker.scheduler.address] = worker


@dataclass
class RowFetch:
    """Fetches samples by their numbers from blocks that lie on the workers of a cluster; can be pickled."""

    scheduler: str
    keys: tuple[str, ...]
    """Of the blocks."""
    starts: Ints
    """The number of each block's first row."""
    _home: dict[int, str] = field(default_factory=dict, repr=False)
    """Where each block was when it was last looked for."""

    def __call__(self, indices: Ints) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of these samples, in this order."""
        wanted, back = by_block(indices, self.starts)
        found = self._fetch(wanted)
        inputs, targets = (np.concatenate([found[b][i] for b in wanted]) for i in (0, 1))
        for name, rows in (("X", inputs), ("y", targets)):
            if rows.dtype.kind == "f" and not np.isfinite(rows).all():
                raise DataError(f"{name} has a value that is NaN or infinite; expected numbers: fill it in first")
        return as_tensor(inputs[back]), as_tensor(targets[back])

    def _fetch(self, wanted: Mapping[int, Ints]) -> dict[int, Pair]:
        worker = _HERE[self.scheduler]
        found: dict[int, Pair] = {}
        until = time.monotonic() + _PATIENCE_S
        while missing := [b for b in wanted if b not in found]:
            asked = asyncio.run_coroutine_threadsafe(self._ask_all(worker, missing, wanted), worker.loop.asyncio_loop)
            for blocks, rows in asked.result():
                if rows is None:
                    for b in blocks:
                        del self._home[b]
                else:
                    found.update(zip(blocks, rows, strict=True))
            if len(found) < len(wanted):
                if time.monotonic() > until:
                    raise DataError(f"{len(missing)} blocks of the data are gone and do not come back; start anew")
                time.sleep(0.05)
        return found

    async def _ask_all(self, worker: Any, blocks: Sequence[int], wanted: Mapping[int, Ints]) -> list[Any]:
        """One message to each worker that holds some of the blocks; those that are nowhere for now are left out."""
        if lost := [b for b in blocks if b not in self._home]:
            where = await worker.scheduler.who_has(keys=[self.keys[b] for b in lost])
            self._home |= {b: min(where[self.keys[b]]) for b in lost if where.get(self.keys[b])}
        at: dict[str, list[int]] = {}
        for b in blocks:
            if b in self._home:
                at.setdefault(self._home[b], []).append(b)
        return await asyncio.gather(*(self._ask(worker, address, there, wanted) for address, there in at.items()))

    async def _ask(self, worker: Any, address: str, blocks: list[int], wanted: Mapping[int, Ints]) -> Any:
        asked = [(self.keys[b], wanted[b]) for b in blocks]
        if address == worker.address:
            return blocks, await asyncio.get_running_loop().run_in_executor(None, _choose, worker, asked)
        try:
            reply = await getattr(worker.rpc(address), _HANDLER)(asked=_as_it_is(asked))
        except (OSError, TimeoutError):  # the worker is gone
            return blocks, None
        return blocks, reply["rows"]


def hold(data: Blocks, client: Any) -> tuple[RowFetch, list[Any]]:
    """Compute the blocks where the cluster puts them; (how to fetch rows, what keeps the blocks alive).

    What the computation of a block raises is raised here.
    """
    client.register_plugin(Rows())
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
