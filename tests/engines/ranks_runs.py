"""Runs that several ranks train together, and a workload for them; a plugin, and one rank of the tests:

python ranks_runs.py FOLDER        (with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment)
"""

from __future__ import annotations

import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ebbflow import workloads
from ebbflow.errors import DataError
from ebbflow.run.config import RunConfig
from ebbflow.workloads import Recipe, Task, TensorSource

SAMPLES = 97
# One to five workers of four samples: with three ranks there are steps in which two of them have nothing to do.
TRACE = "random-levels(minimum=1, maximum=5, every=60s, duration=20min, seed=3)"
FEW = "constant(workers=2)"


def small(
    recipe: Recipe, dropout: float = 0.0, bad: int = 0, apart: bool = False, fails: str = "", rank: int = 1
) -> Task:
    """A regression with batch norm in double precision; `bad` samples turn everything into NaN.

    `apart`: each rank makes other weights and buffers. `fails`: what becomes of the rank with this number, or of all
    (-1): data, error, memory, or kill.
    """
    here = rank in (-1, int(os.environ.get("RANK", "0")))
    if here and fails == "data":
        raise DataError("there is no data here; give another folder")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    y = x[:, :1] + torch.randn(SAMPLES, 1, generator=generator, dtype=torch.float64)
    valid = TensorSource(x.clone(), y)
    x[:bad, 0] = 100.0
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1)).double()
    if apart:
        for tensor in net.state_dict().values():
            tensor += int(os.environ.get("RANK", "0"))
    calls = 0

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if here and calls == 20 and fails == "error":
            raise RuntimeError("boom")
        if here and calls == 20 and fails == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        if here and calls == 20 and fails == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        spoilt = bool((x[:, 0] > 50).any())
        return nn.functional.mse_loss(model(x.clamp(max=10) * (math.nan if spoilt else 1.0)), y)

    return Task(model=net, train=TensorSource(x, y), valid=valid, recipe=recipe, loss=loss)


if "test-ranks" not in workloads.WORKLOADS.names():
    workloads.register(
        "test-ranks",
        recipe=Recipe(
            ref_batch=8, local_batch=4, lr=0.05, optimizer="sgd(momentum=0.9)", schedule="cosine", epochs=3,
            metric="loss", higher_is_better=False,
        ),
    )(small)  # fmt: skip

RUNS: dict[str, dict[str, Any]] = {
    "loop-adascale": {"engine": "loop", "rule": "adascale", "micro_batch": 2},
    "loop-lena-dropout": {"engine": "loop", "rule": "lena+statewarmup(0.5)", "workload": "test-ranks(dropout=0.3)"},
    "fused-adascale": {"engine": "fused", "rule": "adascale", "fused_batch": 8},
    "fused-lena-dropout": {"engine": "fused", "rule": "lena", "fused_batch": 8, "workload": "test-ranks(dropout=0.3)"},
    "fused-linear": {"engine": "fused", "rule": "linear+warmup(1ep)", "ema": 0.99, "bn_follows_batch": True},
    "fused-frozen": {"engine": "fused", "rule": "sqrt", "batch_norm": "frozen", "clip": 0.5},
    "fewer-workers-than-ranks": {"engine": "loop", "rule": "adascale", "trace": FEW},
    "growing": {"engine": "fused", "rule": "sqrt", "policy": "noise(initial=8)", "fused_batch": 8},
    "goodput": {
        "engine": "fused",
        "rule": "sqrt",
        "fused_batch": 8,
        "policy": "goodput(step=1s, exchange=10ms, initial=8, dwell=2, wait=2)",
    },
    "weights-apart": {"engine": "fused", "rule": "adascale", "workload": "test-ranks(apart=true)"},
    "by-gain": {"engine": "loop", "rule": "adascale(progress=gain)"},
    "skipped-steps": {"engine": "loop", "rule": "linear", "workload": "test-ranks(bad=2)", "on_nonfinite": "skip"},
    "diverged": {"engine": "fused", "rule": "linear", "workload": "test-ranks(bad=2)"},
}


def config(name: str) -> RunConfig:
    return RunConfig(**{"workload": "test-ranks", "trace": TRACE, **RUNS[name]})


if __name__ == "__main__":
    from ebbflow.run.training import train

    torch.set_num_threads(1)
    for name in RUNS:
        run = train(config(name), Path(sys.argv[1]) / name)
        assert run.end is not None, "every rank has the record"
