"""What an update costs on a Dask cluster beyond the computation: 11M parameters, two workers.

Ours both ways, beside plain gloo in two processes (the limit) and the data flow of AdaDamp (Holt and Sievert 2021): the
model pickled to a task for each worker, gradients back as tensors by name. The time of forward and backward passes, in
two processes at once, is measured in the same run and taken off; the optimizer's step belongs to the update.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from distributed import Client, LocalCluster, get_worker
from torch import nn
from torch.nn import functional as F

from ebbflow.data.ledger import Ledger
from ebbflow.engines.dask import DaskEngine
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.run.flow import Flow

WORKERS, LOCAL, WIDTH, SAMPLES, TURNS = 2, 16, 1024, 1_000_000, 3


def make_model() -> nn.Module:
    torch.manual_seed(0)
    hidden = [layer for _ in range(10) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 10))


def fetch(indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(len(indices), WIDTH), torch.zeros(len(indices), dtype=torch.long)


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def mean_ms(step: Callable[[], Any], turns: int) -> float:
    began = time.perf_counter()
    for _ in range(turns):
        step()
    return (time.perf_counter() - began) / turns * 1e3


def kept(name: str, make: Callable[[], Any]) -> Any:
    """On a worker: what was made in an earlier round."""
    worker: Any = get_worker()
    if not hasattr(worker, name):
        torch.set_num_threads(1)
        setattr(worker, name, make())
    return getattr(worker, name)


def computation(turns: int) -> float:
    """A task: milliseconds of forward and backward passes alone."""
    model, (x, y) = kept("plain_model", make_model), fetch(np.arange(LOCAL))

    def step() -> None:
        model.zero_grad()
        loss(model, x, y).backward()

    return mean_ms(step, turns)


def plain_gloo(rank: int, store: str, turns: int) -> float:
    """A task: the same with one all-reduce and the optimizer's step, as a script without Dask would do it."""

    def connect() -> Any:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORKERS)
        model = make_model()
        sizes = [p.numel() for p in model.parameters()]
        return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), sizes, torch.zeros(sum(sizes))

    model, optimizer, sizes, flat = kept("plain_gloo", connect)
    x, y = fetch(np.arange(LOCAL))

    def step() -> None:
        optimizer.zero_grad()
        loss(model, x, y).backward()
        torch.cat([p.grad.flatten() for p in model.parameters()], out=flat)
        dist.all_reduce(flat)
        for p, part in zip(model.parameters(), flat.split(sizes), strict=True):
            p.grad = part.view_as(p).div_(WORKERS)
        optimizer.step()

    return mean_ms(step, turns)


def gradients_by_name(model: nn.Module, indices: np.ndarray) -> dict[str, torch.Tensor]:
    """AdaDamp's task: it gets the whole model and returns a gradient a parameter."""
    model.zero_grad()
    loss(model, *fetch(indices)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def adadamp(client: Client) -> Callable[[], None]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        sent = client.scatter(model, broadcast=True, hash=False)
        tasks = [client.submit(gradients_by_name, sent, np.arange(LOCAL), pure=False) for _ in range(WORKERS)]
        found = client.gather(tasks)
        for name, p in model.named_parameters():
            p.grad = sum(each[name] for each in found) / WORKERS
        optimizer.step()

    return step


def ours(client: Client, transport: Any, stack: ExitStack) -> Callable[[], Any]:
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    optimizer = ElasticOptimizer(inner, "linear", base_batch=WORKERS * LOCAL, epoch_samples=SAMPLES)
    engine = stack.enter_context(
        DaskEngine(
            model, fetch, loss, f"follow({LOCAL})", client=client, optimizer=optimizer, samples=SAMPLES,
            transport=transport, min_workers=WORKERS,
        )
    )  # fmt: skip
    return Flow(engine, optimizer, Ledger(samples=SAMPLES)).run_step


def main(rounds: int) -> None:
    """Rounds in which all take turns, so that a busy machine is busy for all; medians of their differences."""
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(
            n_workers=WORKERS, threads_per_worker=1, dashboard_address="127.0.0.1:0", host="127.0.0.1"
        ) as local,
        Client(local) as client,
        ExitStack() as stack,
    ):
        addresses = list(client.nthreads())

        def on_both(task: Callable[..., float], *arguments: Any) -> float:
            ranks = [(rank, *arguments) if arguments else () for rank in range(WORKERS)]
            return max(client.gather([
                client.submit(task, *given, TURNS, workers=[address], pure=False)
                for address, given in zip(addresses, ranks, strict=True)
            ]))  # fmt: skip

        steps = {transport: ours(client, transport, stack) for transport in ("allreduce", "centralized")}
        steps["adadamp"] = adadamp(client)
        table: dict[str, list[float]] = {}
        for number in range(rounds + 1):
            alone = on_both(computation)
            row = {"gloo": on_both(plain_gloo, str(Path(folder) / "store"))}
            row |= {name: mean_ms(step, TURNS) for name, step in steps.items()}
            if number:  # the first round is for warming up
                table.setdefault("alone", []).append(alone)
                for name, took in row.items():
                    table.setdefault(name, []).append(took - alone)
    beyond = {name: statistics.median(values) for name, values in table.items()}
    size = sum(p.numel() for p in make_model().parameters())
    print(f"{WORKERS} Dask workers, {size / 1e6:.1f}M parameters; forward and backward alone {beyond['alone']:.0f} ms")
    print(f"{'':26}{'ms beyond it':>14}{'of gloo':>10}{'of AdaDamp':>12}{'to reach':>16}")
    for name, title, aim in (
        ("gloo", "plain gloo, no Dask", ""),
        ("allreduce", "allreduce", "45 ms"),
        ("centralized", "centralized", "0.6 of AdaDamp"),
        ("adadamp", "AdaDamp's data flow", ""),
    ):
        own = beyond[name]
        print(f"{title:26}{own:>14.0f}{own / beyond['gloo']:>10.2f}{own / beyond['adadamp']:>12.2f}{aim:>16}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
