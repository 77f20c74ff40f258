"""What statistics cost over the same all-reduce without them: two processes, gloo over loopback, 10.5M parameters.

Each process computes its gradient in two micro-batches of a few samples, so that the exchange weighs as much as it can;
then `AllReduce` combines the gradients, with and without a meter. They alternate in the same processes; the ratio is
the median over turns of four steps. Printed for the whole step and for the exchange alone, as it ships (in the long run
one step in four is measured here) and with every step measured, as in the first 1000 reference steps of a run."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

from ebbflow.engines.allreduce import AllReduce
from ebbflow.moments.meters import HookMeter

WORLD, PIECES, SIZE, WIDTH = 2, 2, 32, 1024
SPAN = 4  # steps of which one is measured: the batch is four reference batches of 32, the memory a thousand


class Trainer:
    """One replica, that combines its gradients with or without statistics."""

    def __init__(self, *, every: int | None) -> None:
        """`every`: measure one step in so many; None: none, and without a meter."""
        torch.manual_seed(0)
        hidden = [layer for _ in range(10) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        self.model = nn.Sequential(*hidden, nn.Linear(WIDTH, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.every = every
        self.meter = HookMeter(self.model.parameters(), layers=False) if every is not None else None
        self.combine = AllReduce(self.model.parameters(), meter=self.meter)

    def step(self, number: int, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
        """Seconds of the whole step and of the exchange."""
        if self.meter is not None and self.every is not None:
            self.meter.on = number % self.every == 0
        dist.barrier()
        began = time.perf_counter()
        self.optimizer.zero_grad()
        for _ in range(PIECES):
            (F.cross_entropy(self.model(x), y) / PIECES).backward()
            if self.meter is not None:
                self.meter.close_micro_batch(SIZE, 1 / PIECES)
        dist.barrier()  # the exchange is timed from when both have their gradients
        computed = time.perf_counter()
        self.combine(samples=PIECES * SIZE, batch=WORLD * PIECES * SIZE)
        combined = time.perf_counter()
        self.optimizer.step()
        return time.perf_counter() - began, combined - computed


def turn(trainers: dict[str, Trainer], x: torch.Tensor, y: torch.Tensor) -> dict[str, tuple[float, float]]:
    """Seconds of four steps of each and of their exchanges; they alternate step by step."""
    steps = [{name: trainer.step(i, x, y) for name, trainer in trainers.items()} for i in range(SPAN)]
    return {name: (sum(s[name][0] for s in steps), sum(s[name][1] for s in steps)) for name in trainers}


def rank(number: int, store: str, turns: int) -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=WORLD)
    x, y = torch.randn(SIZE, WIDTH), torch.randint(10, (SIZE,))
    trainers = {"without": Trainer(every=None), "as it ships": Trainer(every=SPAN), "every step": Trainer(every=1)}
    turns_of = [turn(trainers, x, y) for _ in range(turns + 1)][1:]
    if number == 0:
        size = sum(parameter.numel() for parameter in trainers["without"].model.parameters())
        print(f"{WORLD} gloo processes, {size / 1e6:.1f}M parameters, {PIECES} micro-batches of {SIZE} each")
        print(f"{'ms':24}" + "".join(f"{name:>14}{'ratio':>8}" for name in trainers))
        for part, title in enumerate(("step", "all-reduce alone")):
            line = f"{title:24}"
            for name in trainers:
                ratio = statistics.median(one[name][part] / one["without"][part] for one in turns_of)
                line += f"{statistics.median(one[name][part] for one in turns_of) / SPAN * 1e3:>14.1f}{ratio:>8.3f}"
            print(line)
        print("to reach: 1.03 for the step")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        turns = int(sys.argv[1]) if len(sys.argv) > 1 else 30
        mp.spawn(rank, args=(str(Path(folder) / "store"), turns), nprocs=WORLD)
