"""What a replica says of its job: what must be the same in all replicas, and what a checkpoint must agree with."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ebbflow._version import __version__
from ebbflow.engines.replica_ranks import ReplicaRanks
from ebbflow.engines.shards import describe_shards
from ebbflow.errors import CheckpointError, ConfigError, RecordError
from ebbflow.live.agreement import describe_difference
from ebbflow.live.equality import memory_formats, sample_digest, structure_digest
from ebbflow.live.protocol import ReplicaConfig
from ebbflow.optim.rule_optimizer import RuleOptimizer
from ebbflow.plan.policies import make_policy
from ebbflow.record import read_record
from ebbflow.run.config import RunConfig
from ebbflow.workloads.sources import Source

__all__ = ["check_job", "check_record", "describe_job", "describe_replica", "hyperparameters"]

_CHANGEABLE = {"epochs", "max_steps", "schedule", "clip", "policy", "micro_batch", "precision"}
"""What may differ from a checkpoint with `--allow-changes`, besides the hyperparameters of the optimizer."""


def describe_job(
    name: str,
    model: torch.nn.Module,
    optimizer: RuleOptimizer,
    config: RunConfig,
    *,
    samples: int,
    own_sizes: bool,
    max_steps: int | None,
    groups: Sequence[Mapping[str, Any]],
    ranks: ReplicaRanks,
) -> dict[str, str]:
    """What is the same for all replicas and checkpoints of a job: versions, shapes of the model, and the settings.

    `own_sizes`: the policy is a function of the user. `groups`: the hyperparameters before the first step.
    """
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    for name, value in state.items():
        if value.layout != torch.strided:
            raise ConfigError(
                f"{name} of the model is a sparse tensor, which replicas cannot send to each other; let it be dense "
                f"(to_dense()), or a buffer that every replica makes itself: register_buffer(..., persistent=False)"
            )
    shapes = "; ".join(f"{name} {tuple(value.shape)} {value.dtype}" for name, value in state.items())
    digest = hashlib.sha256(shapes.encode()).hexdigest()[:8]
    settings = {
        "job": name,
        "samples": samples,
        "epochs": config.epochs,
        "seed": config.seed,
        "rule": optimizer.rule,
        "base_batch": optimizer.base_batch,
        "optimizer": type(optimizer.inner).__name__,
        "policy": "own" if own_sizes else str(make_policy(config.policy, config.local_batch)),
        "micro_batch": config.micro_batch,
        "precision": config.precision,
        "max_steps": max_steps,
        **hyperparameters(groups),
        "schedule": optimizer.schedule,
        "clip": optimizer.clip,
    }
    if ranks.size > 1:
        settings["ranks"] = f"{ranks.size}, samples over {ranks.data_size}"
        settings["shards"] = describe_shards(model.parameters())
    return {
        "ebbflow": __version__,
        "torch": torch.__version__.partition("+")[0],
        "model": f"{len(state)} tensors, {sum(value.numel() for value in state.values())} numbers, shapes {digest}",
        **{name: str(value) for name, value in settings.items()},
    }


def describe_replica(
    fleet: ReplicaConfig,
    model: torch.nn.Module,
    optimizer: RuleOptimizer,
    data: Source,
    device: torch.device,
    config: RunConfig,
) -> dict[str, str]:
    """What else must be the same for all replicas that compute together; a checkpoint does not know of it."""
    if fleet.transport == "nccl" and device.type != "cuda":
        raise ConfigError(f"transport is 'nccl', but the model is on {device}; use gloo or auto, or move it to a GPU")
    auto = "nccl" if device.type == "cuda" else "gloo"
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),  # by which the code of a model is compiled
        "structure of the model": structure_digest(model),
        "memory formats": memory_formats(optimizer.layers),
        "data": sample_digest(data),
        "transport": auto if fleet.transport == "auto" else fleet.transport,
        # By these, every replica comes to its weights, buffers and averages from the same sums.
        "memory_steps": f"{optimizer.memory / optimizer.base_batch:g}",
        "measure_every": str(optimizer.measure_every),
        "on_nonfinite": optimizer.on_nonfinite,
        "ema": str(config.ema),
        "bn_follows_batch": str(config.bn_follows_batch),
        # Two groups must never train at the same time because one of them is content with fewer replicas.
        "min_replicas": str(fleet.min_replicas),
    }


def check_job(own: Mapping[str, str], saved: Mapping[str, str], origin: str, *, allow_changes: bool) -> str:
    """What is different in the job of a saved state, where that is allowed; CheckpointError where it is not.

    >>> own = {"rule": "sqrt", "epochs": "20"}
    >>> check_job(own, {"rule": "sqrt", "epochs": "20"}, "it", allow_changes=False)
    ''
    >>> check_job(own, {"rule": "sqrt", "epochs": "10"}, "it", allow_changes=True)
    "epochs is '20' here and '10' in the saved state"
    """
    # Checkpoints of earlier versions say less about their job.
    job = {**own, **{_renamed(key): value for key, value in saved.items()}}
    changed = {key for key in job if own.get(key) != job[key]}
    if not changed:
        return ""
    difference = describe_difference(own, job, "in the saved state")
    changeable = all(key in _CHANGEABLE or key.startswith("optimizer.") for key in changed)
    if not (changeable and allow_changes):
        advice = ", or accept the change with `ebbflow launch --allow-changes`" if changeable else ""
        raise CheckpointError(
            f"{origin} is of another job: {difference}; use the same settings, or another folder{advice}"
        )
    return difference


def check_record(own: Mapping[str, Any], path: Path, *, jobs_have: Collection[str], allow_changes: bool) -> None:
    """Raise CheckpointError if steps of another job are in a record.

    `own` is what a header would say of this job, and `jobs_have` is what of it says which job it is.
    """
    try:
        run = read_record(path)
    except RecordError:
        return
    if run.steps:
        keys = [key for key in jobs_have if key in run.header.config and key not in ("ebbflow", "torch")]
        job, saved = ({key: str(config[key]) for key in keys} for config in (own, run.header.config))
        check_job(job, saved, f"the record {path}", allow_changes=allow_changes)


def hyperparameters(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The hyperparameters of all parameter groups, by names such as optimizer.lr or, in a third group, optimizer.2.lr.

    A scheduler changes the rate and keeps the first one as initial_lr.

    >>> hyperparameters([{"lr": 0.05, "initial_lr": 0.1, "momentum": 0.9, "foreach": None}])
    {'optimizer.lr': 0.1, 'optimizer.momentum': 0.9}
    """
    found = {}
    for number, group in enumerate(groups):
        prefix = f"optimizer.{number}." if len(groups) > 1 else "optimizer."
        for name, value in {**group, "lr": group.get("initial_lr", group["lr"])}.items():
            if name != "initial_lr" and value is not None:
                found[prefix + name] = value.tolist() if isinstance(value, torch.Tensor) else value
    return found


def _renamed(key: str) -> str:
    """The present name of what a checkpoint says about its job; earlier versions wrote `piece`."""
    return "micro_batch" if key == "piece" else key
