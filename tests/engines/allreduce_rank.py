"""One rank of the all-reduce tests: `python allreduce_rank.py RANK WORLD STORE OUT`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ebbflow.engines.allreduce import AllReduce
from ebbflow.moments.meters import HookMeter

STEPS = ((5, 3, 4, 2), (6,), (2, 2, 3), (1, 7))
"""Sizes of the micro-batches of each step; micro-batch i is for rank i mod world, so in the second step only one rank
works."""


def train(rank: int, world: int, *, layers: bool) -> dict[str, Any]:
    """A few steps of SGD; what was measured, and the weights in the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    meter = HookMeter(model.parameters(), layers=layers)
    combine = AllReduce(model.parameters(), meter=meter)
    generator = torch.Generator().manual_seed(1)
    measured = []
    for sizes in STEPS:
        micro_batches = [
            (torch.randn(n, 6, generator=generator), torch.randint(3, (n,), generator=generator)) for n in sizes
        ]
        own = [micro_batch for i, micro_batch in enumerate(micro_batches) if i % world == rank]
        samples = sum(len(x) for x, _ in own)
        optimizer.zero_grad()
        for x, y in own:
            (F.cross_entropy(model(x), y) * len(x) / samples).backward()
            meter.close_micro_batch(len(x), scale=len(x) / samples)
        measurement = combine(samples=samples, batch=sum(sizes))
        assert measurement is not None
        measured.append(asdict(measurement))
        optimizer.step()
    return {"measured": measured, "weights": nn.utils.parameters_to_vector(model.parameters()).tolist()}


if __name__ == "__main__":
    rank, world, store, out = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    torch.save([train(int(rank), int(world), layers=layers) for layers in (False, True)], out)
    dist.barrier()
    dist.destroy_process_group()
