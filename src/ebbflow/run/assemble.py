"""From the settings of a run to the engine that computes it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, cast

import torch

from ebbflow.engines.emulated import FusedEngine, LoopEngine
from ebbflow.engines.emulated.base import EmulatedEngine
from ebbflow.engines.emulated.grouped import BatchNormMode, unfusable
from ebbflow.engines.emulated.ranks import Ranks
from ebbflow.engines.micro_batches import Precision
from ebbflow.errors import ConfigError
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.plan import BatchPlan
from ebbflow.run.config import RunConfig
from ebbflow.workloads import Task

__all__ = ["COMPILE_FROM", "idle_ranks", "loader_workers", "make_engine"]

COMPILE_FROM = 2_000_000
"""Samples of a run from which compiling pays on a GPU.

Measured on an H200 with ResNet-18 and 32x32 images in bf16: compiling takes 25 s, or 65 s where the workers change, and
saves 26 s a million samples.
"""


def make_engine(
    config: RunConfig,
    task: Task,
    plan: BatchPlan,
    optimizer: ElasticOptimizer,
    *,
    needs: frozenset[str],
    on_event: Callable[[str, str], None],
    ranks: Ranks | None = None,
) -> EmulatedEngine:
    """The engine of a resolved configuration; `needs` is what rule and policy want to have measured.

    `auto` fuses workers wherever the model allows: on a CPU, too, it is nowhere slower than the loop (measured on
    digits-mlp, digits-cnn and shakespeare-gpt with 1 to 16 workers).
    """
    shared: dict[str, Any] = {
        "samples": len(task.train),
        "seed": config.seed,
        "micro_batch": config.micro_batch,
        "needs": needs,
        "parameters": optimizer.layers,
        "precision": cast(Precision, config.precision),
        "ranks": ranks,
    }

    def fetch(indices: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return task.train.batch(indices, train=True)

    if config.engine == "loop" or (config.engine == "auto" and unfusable(task.model)):
        fused_only = {"chunk": config.chunk, "compile": config.compile, "batch_norm": config.batch_norm != "local"}
        if asked := [name for name, value in fused_only.items() if value]:
            raise ConfigError(f"{asked[0]} is a setting of the fused engine, but this run takes the loop; leave it out")
        return LoopEngine(task.model, fetch, task.require_loss(), plan, **shared)
    compile = config.compile
    if compile is None:
        compile = torch.device(config.device).type == "cuda" and optimizer.total_samples >= COMPILE_FROM
    return FusedEngine(
        task.model,
        fetch,
        task.require_loss(),
        plan,
        **shared,
        chunk=config.chunk,
        batch_norm=cast(BatchNormMode, config.batch_norm),
        compile=compile,
        on_event=on_event,
    )


def loader_workers(config: RunConfig) -> int:
    """Processes that read ahead for this one; torchrun says how many of its ranks share the machine."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    workers = config.with_loader_workers(cores=len(os.sched_getaffinity(0)), processes=ranks).loader_workers
    assert workers is not None
    return workers


def idle_ranks(engine: EmulatedEngine) -> str:
    """Which ranks never have anything to do, and what to do about it; empty if all of them work."""
    if engine.ranks is None:
        return ""
    most, world = engine.most_parts(), engine.ranks.world
    if most >= world:
        return ""
    smaller = ", or a smaller chunk" if isinstance(engine, FusedEngine) else ""
    return (
        f"no step has more than {most} parts to share, so that {world - most} of {world} ranks never compute; use "
        f"fewer ranks{smaller}"
    )
