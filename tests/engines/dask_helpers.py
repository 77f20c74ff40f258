"""What the tests of the Dask engine share: a cluster on loopback, and data that write down who asked for what."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from distributed import Client, LocalCluster

import ebbflow
from ebbflow.engines.base import EngineParts
from ebbflow.engines.dask import DaskEngine
from ebbflow.workloads import Task


@contextmanager
def local_client(workers: int, *, threads: int = 1, **options: Any) -> Iterator[Client]:
    """Worker processes on loopback; gone when the block ends."""
    with (
        LocalCluster(
            n_workers=workers,
            threads_per_worker=threads,
            processes=True,
            dashboard_address="127.0.0.1:0",  # any port: another cluster may have the usual one
            scheduler_kwargs={"dashboard": False},
            host="127.0.0.1",
            silence_logs=50,
            **options,
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


def trained_weights(task: Task, client: Client | None, **options: Any) -> torch.Tensor:
    """Return all weights after an epoch with two workers of two samples: of a Dask cluster, or in this process."""

    def on_dask(parts: EngineParts) -> DaskEngine:
        return DaskEngine(
            parts.model, parts.fetch, parts.loss, parts.plan, client=client, samples=parts.samples, seed=parts.seed,
            optimizer=parts.optimizer, needs=parts.needs, parameters=parts.parameters, **options,
        )  # fmt: skip

    with ebbflow.Session(
        task.model, torch.optim.SGD(task.model.parameters(), lr=1e-3, momentum=0.9), task.train, loss=task.loss,
        trace="0s:2 40s", rule="linear", base_batch=4, local_batch=2, epochs=1,
        engine="loop" if client is None else on_dask,
    ) as session:  # fmt: skip
        session.run()
        assert session.step == len(task.train) // 4
    return torch.cat([tensor.double().flatten() for tensor in task.model.state_dict().values()])


@dataclass
class Witnessed:
    """Samples that remember, in files of a folder, which of them were asked for, and by which process."""

    inputs: torch.Tensor
    targets: torch.Tensor
    folder: Path
    _read: dict[str, int] = field(default_factory=dict)

    def __call__(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        line = " ".join(map(str, indices.tolist())) + "\n"
        handle = os.open(self.folder / f"{os.getpid()}.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)
        return self.inputs[indices], self.targets[indices]

    def take(self) -> list[int]:
        """What was asked for since the last call, by all processes."""
        return sorted(index for indices in self.news().values() for index in indices)

    def news(self) -> dict[str, list[int]]:
        """By process, what was asked for since the last call."""
        found = {}
        for path in sorted(self.folder.glob("*.txt")):
            content = path.read_text()
            new = content[self._read.get(path.name, 0) :]
            self._read[path.name] = len(content)
            if new:
                found[path.stem] = [int(number) for number in new.split()]
        return found
