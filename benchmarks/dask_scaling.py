"""What it costs the workers that are there when the cluster grows from two to four: no step, and how long a pause."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch
from distributed import Client, LocalCluster
from torch import nn
from torch.nn import functional as F

from ebbflow.data.ledger import Ledger
from ebbflow.engines.dask import DaskEngine
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.run.flow import Flow

LOCAL, WIDTH, SAMPLES = 16, 512, 1_000_000


def fetch(indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(len(indices), WIDTH), torch.zeros(len(indices), dtype=torch.long)


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def grow(client: Client, transport: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    optimizer = ElasticOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), base_batch=32, epoch_samples=SAMPLES)
    with DaskEngine(
        model, fetch, loss, f"follow({LOCAL})", client=client, optimizer=optimizer, samples=SAMPLES,
        transport=transport, min_workers=2, max_workers=4, scale=True,
    ) as engine:  # fmt: skip
        flow = Flow(engine, optimizer, Ledger(samples=SAMPLES))
        lost, times, asked = 0, [], 0.0
        for _ in range(20):
            flow.run_step()
        asked, workers = time.perf_counter(), 2
        engine.request(4 * LOCAL)
        while workers < 4 and time.perf_counter() - asked < 120:
            began = time.perf_counter()
            row = flow.run_step()
            times.append(time.perf_counter() - began)
            lost += row is None
            workers = row.workers if row is not None else workers
        print(f"{transport:14}{time.perf_counter() - asked:>12.1f}{len(times):>8}{lost:>8}"
              f"{statistics.median(times) * 1e3:>14.0f}{max(times) * 1e3:>14.0f}")  # fmt: skip
        engine.request(2 * LOCAL)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0", host="127.0.0.1") as cluster,
        Client(cluster) as client,
    ):
        print("from two workers to four, while two train; to reach: no step lost")
        print(f"{'':14}{'s to four':>12}{'steps':>8}{'lost':>8}{'median, ms':>14}{'longest, ms':>14}")
        for transport in ("allreduce", "centralized"):
            grow(client, transport)
