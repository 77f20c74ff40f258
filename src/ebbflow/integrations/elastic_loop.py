"""The two lines of Ebbflow for loops that have an optimizer and a DataLoader already."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from ebbflow.data.sampler import ElasticSampler
from ebbflow.errors import ConfigError
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.plan import BatchPlan
from ebbflow.run.config import RunConfig
from ebbflow.run.planning import make_plan
from ebbflow.workloads import DatasetSource

__all__ = ["FrameworkSampler", "elastic_loop"]


class FrameworkSampler(ElasticSampler):
    """An ElasticSampler in a framework whose loaders count the epochs themselves, anew after every start.

    The position of the sampler, which a saved state restores, is the one that counts.
    """

    def set_epoch(self, epoch: int) -> None:
        """Nothing happens: the sampler goes on to the next epoch by itself."""


def elastic_loop(
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    *,
    model: torch.nn.Module,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[ElasticOptimizer, DataLoader[Any]]:
    """An ElasticOptimizer, and a DataLoader of the same samples that gives out the micro-batches of its steps.

    `loader`: its data set, `batch_size`, `collate_fn` and workers are used; with a sampler of its own it is refused.
    `settings`: those of a `Session`: base_batch, rule, schedule, clip, ...; with `trace` (and `epochs`, how long it is
    followed) the workers are virtual ones, and without it they are the ranks of `torch.distributed` that there are,
    whose batch is that of `policy`. `options`: what else an ElasticOptimizer takes.
    """
    source = DatasetSource.from_loader(loader, torch.device("cpu"), pairs=False)  # refuses what cannot be followed
    local_batch = loader.batch_size
    assert local_batch is not None, "a DataLoader without a batch size was refused"
    known = {"local_batch": local_batch, **settings}
    config = RunConfig.for_front_end("session", known, workload=type(model).__name__)
    if config.ref_batch is None:
        raise ConfigError("base_batch is missing: at how many samples per step was the optimizer's rate tuned?")
    plan: str | BatchPlan = config.policy if "(" in config.policy else f"{config.policy}({config.local_batch})"
    if "trace" in settings or "plan" in settings:
        if config.epochs is None:
            raise ConfigError("epochs is missing: for how many passes over the data is the trace followed?")
        plan, _ = make_plan(config, len(source))
    sampler = FrameworkSampler(len(source), plan, local_batch=config.micro_batch or local_batch, seed=config.seed)
    made = ElasticOptimizer(
        optimizer,
        config.rule,
        base_batch=config.ref_batch,
        sampler=sampler,
        schedule=config.schedule,
        epochs=config.epochs,
        memory_steps=config.memory_steps,
        measure_every=config.measure_every,
        clip=config.clip,
        model=model,
        **(options or {}),
    )
    elastic: DataLoader[Any] = DataLoader(
        loader.dataset,
        batch_sampler=sampler,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        persistent_workers=loader.persistent_workers,
        prefetch_factor=loader.prefetch_factor,
    )
    return made, elastic
