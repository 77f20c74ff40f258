"""The two lines of Ebbflow for loops that have an optimizer and a DataLoader already."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from ebbflow.data.sampler import ElasticSampler
from ebbflow.errors import ConfigError
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.plan import BatchPlan, Policy, make_policy
from ebbflow.run.config import RunConfig
from ebbflow.run.planning import make_plan
from ebbflow.workloads import DatasetSource

__all__ = ["FrameworkSampler", "elastic_loop"]


_OF_A_TRACE = ("step_time", "offset", "on_change", "repeat")
_OF_THE_LOOP = {
    "batch_norm": "the model of this loop is computed as it is",
    "bn_follows_batch": "the model of this loop is computed as it is",
    "compile": "the loop compiles its model itself",
    "ema": "the loop keeps an average of its weights itself",
    "fused_batch": "every micro-batch of the loader is computed by itself",
    "label": "there is no record with a table",
    "loader_workers": "the DataLoader has num_workers",
    "precision": "the loop has its own autocast",
    "validate_every": "the loop validates by itself",
}
"""Settings of a Session that a loop cannot follow, and why."""


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
    whose batch is that of `policy`. What only a Session can follow (ema, precision, ...) is refused. `options`: what
    else an ElasticOptimizer takes.
    """
    if not isinstance(loader, DataLoader):
        raise ConfigError(f"the loader is a {type(loader).__name__}; expected a DataLoader of torch.utils.data")
    _check(optimizer, model, settings)
    source = DatasetSource.from_loader(loader, torch.device("cpu"), pairs=False)  # refuses what cannot be followed
    local_batch = loader.batch_size
    assert local_batch is not None, "a DataLoader without a batch size was refused"
    known = {"local_batch": local_batch, **settings}
    config = RunConfig.for_front_end("session", known, beside=("options",), workload=type(model).__name__)
    if config.ref_batch is None:
        raise ConfigError("base_batch is missing: at how many samples per step was the optimizer's rate tuned?")
    plan: Policy | BatchPlan = make_policy(config.policy, config.local_batch)
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
        on_nonfinite=config.on_nonfinite if "on_nonfinite" in settings else "ignore",
        tracker=config.tracker,
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
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        timeout=loader.timeout,
    )
    return made, elastic


def _check(optimizer: torch.optim.Optimizer, model: torch.nn.Module, settings: dict[str, Any]) -> None:
    """Refuse what would be ignored without a word."""
    for name, why in _OF_THE_LOOP.items():
        if name in settings:
            raise ConfigError(f"{name} is {settings[name]!r}, but {why}; leave it out")
    if "trace" not in settings:
        for name in _OF_A_TRACE:
            if name in settings:
                raise ConfigError(
                    f"{name} is {settings[name]!r}, but there is no trace; give trace=..., or leave it out"
                )
    owned = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in owned for group in optimizer.param_groups for parameter in group["params"]):
        raise ConfigError("no parameter of the optimizer belongs to the model; make it with model.parameters()")
