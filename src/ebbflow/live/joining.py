"""`join`: from a model, an optimizer and data to a replica of the fleet that the environment names."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sized
from typing import Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel

from ebbflow.engines.micro_batches import Loss, Precision
from ebbflow.errors import ConfigError
from ebbflow.live.engine import Sizes
from ebbflow.live.fleet import Fleet, OnEpoch
from ebbflow.live.protocol import ReplicaConfig
from ebbflow.live.state import Stateful
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.record import StepRow
from ebbflow.workloads.sources import DatasetSource

__all__ = ["join"]


def join(
    model: torch.nn.Module,
    optimizer: ElasticOptimizer | torch.optim.Optimizer,
    data: Any,
    *,
    epochs: int,
    local_batch: int | None = None,
    rule: str = "linear",
    base_batch: int | None = None,
    schedule: str | None = None,
    policy: str | Sizes = "follow",
    loss: Loss | None = None,
    seed: int = 0,
    micro_batch: int | None = None,
    precision: Precision = "fp32",
    ema: float | None = None,
    extras: Mapping[str, Stateful] | None = None,
    notice: Callable[[], bool] | None = None,
    on_commit: Callable[[StepRow], None] | None = None,
    on_epoch: OnEpoch | None = None,
    checkpoint_every_s: float = 60.0,
    describe: Mapping[str, Any] | None = None,
    lighthouse: str | None = None,
    replica: str | None = None,
    folder: str | os.PathLike[str] | None = None,
    job: str | None = None,
    bind: str | None = None,
) -> Fleet:
    """Join the fleet that `ebbflow launch` named in the environment; use the result in a `with`, and iterate over it.

    `optimizer`: an `ElasticOptimizer` without a sampler, or any optimizer of torch, whose rates were tuned at
    `base_batch` samples and follow the batch by `rule`. `data`: a map-style data set of (input, target) pairs, or a
    source with `batch(indices, train=True)`. `local_batch`: samples of a replica in a step; `micro_batch`: at most so
    many in one backward pass; `policy`: how the batch follows the replicas, by name or as a function (step, replicas)
    -> (workers, samples). `loss(model, x, y)`: for `fleet.run()`, which needs no loop. `extras`: whatever else belongs
    to the state, by name, with `state_dict` and `load_state_dict`. `notice`: asked before every step whether this
    machine is about to be taken away. `on_epoch(epoch)`: called after every epoch on every replica; what it returns
    goes into the record. The last five are what the environment says unless given."""
    if isinstance(model, DistributedDataParallel):
        raise ConfigError(
            "the model is wrapped in DistributedDataParallel; a fleet adds up the gradients: give model.module"
        )
    settings = ReplicaConfig.from_environment(lighthouse=lighthouse, replica=replica, folder=folder, job=job, bind=bind)
    source = data if hasattr(data, "batch") else DatasetSource(data, next(model.parameters()).device)
    samples = len(cast(Sized, source))
    if not isinstance(optimizer, ElasticOptimizer):
        if base_batch is None:
            raise ConfigError("base_batch is missing: at how many samples a step was the optimizer's rate tuned?")
        optimizer = ElasticOptimizer(
            optimizer, rule, base_batch=base_batch, schedule=schedule, epochs=epochs, epoch_samples=samples
        )
    elif optimizer.sampler is not None:
        raise ConfigError("the ElasticOptimizer has a sampler of its own; a fleet deals out the samples: leave it out")
    return Fleet(
        model,
        optimizer,
        lambda indices: source.batch(indices, train=True),
        settings,
        samples=samples,
        epochs=epochs,
        policy=policy,
        local_batch=local_batch,
        loss=loss,
        seed=seed,
        micro_batch=micro_batch,
        precision=precision,
        ema=ema,
        extras=extras or {},
        notice=notice,
        on_commit=on_commit,
        on_epoch=on_epoch,
        checkpoint_every_s=checkpoint_every_s,
        describe=describe or {},
    )
