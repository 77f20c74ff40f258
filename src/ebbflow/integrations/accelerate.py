"""A loop of one's own with Hugging Face accelerate, on workers that come and go.

model, optimizer, loader = prepare(accelerator, model, optimizer, loader, trace="spot.csv", rule="sqrt", base_batch=32)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.data import DataLoader

from ebbflow.core.extras import require
from ebbflow.errors import ConfigError
from ebbflow.integrations.elastic_loop import elastic_loop
from ebbflow.integrations.session_optimizer import ReferenceSteps
from ebbflow.optim.elastic import ElasticOptimizer

__all__ = ["prepare"]


def prepare(
    accelerator: Any,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    scheduler: Any = None,
    **settings: Any,
) -> tuple[Any, ...]:
    """Instead of `accelerator.prepare(model, optimizer, loader)`: the same three, whose steps follow a fleet.

    `settings`: those of `elastic_loop`. The loop stays as it is: one `optimizer.step()` per batch of the loader, which
    is a micro-batch of a step now, with as many samples as the loader had; `gradient_accumulation_steps` of them are a
    worker's batch. With a `scheduler` of torch there are four results: it counts reference steps (`ReferenceSteps`).
    `accelerator.clip_grad_norm_` clips the mean gradient of the step, over all parameters of the optimizer, and returns
    the norm of the latest one. A GradScaler (fp16) unscales that mean. Afterwards `optimizer.optimizer` is the
    ElasticOptimizer, with `updates`, `finished`, `last` and `sampler`.

    *Several processes* of `accelerate launch` share the workers of a trace, or are the workers, and compute what one
    process computes. The model is not wrapped in DistributedDataParallel: the optimizer combines the gradients.
    `accelerator.save_state` and `load_state` save and restore the position in the data, for any number of processes.

    Limits: DeepSpeed, FSDP, Megatron-LM and XLA are refused. `accelerator.optimizer_step_was_skipped` does not see the
    overflows of fp16; `optimizer.optimizer.last.applied` does.
    """
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise ConfigError(f"accelerate is set up for {kind}; expected one process, or several without sharding")
    reading = require("accelerate.data_loader", extra="transformers", needed_for="ebbflow.integrations.accelerate")
    scaler, batch = accelerator.scaler, loader.batch_size or 0  # without a batch size the loader is refused
    settings = {"local_batch": batch * accelerator.gradient_accumulation_steps, "micro_batch": batch, **settings}
    model = accelerator.prepare_model(model, evaluation_mode=accelerator.num_processes > 1)  # without DDP
    made, elastic = elastic_loop(optimizer, loader, model=model, options={"scaler": scaler}, **settings)
    accelerator.gradient_accumulation_steps = 1
    accelerator.clip_grad_norm_ = _Clipping(made)
    accelerator.scaler = None  # with it, accelerate's optimizer would unscale every micro-batch
    wrapped = accelerator.prepare_optimizer(made)
    accelerator.scaler = scaler
    ready = reading.prepare_data_loader(
        elastic, accelerator.device, num_processes=1, process_index=0, put_on_device=accelerator.device_placement
    )
    if scheduler is None:
        return model, wrapped, ready
    counting = ReferenceSteps(scheduler, made)
    accelerator.register_for_checkpointing(counting)
    return model, wrapped, ready, counting


class _Clipping:
    """`accelerator.clip_grad_norm_` for a step of several micro-batches."""

    def __init__(self, optimizer: ElasticOptimizer) -> None:
        self._optimizer = optimizer

    def __call__(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clip the mean gradient of the step when it is complete; the norm of the latest one, NaN before the first."""
        if norm_type != 2:
            raise ConfigError(f"clip_grad_norm_ has norm_type {norm_type}; expected 2")
        self._optimizer.clip = float(max_norm)
        last = self._optimizer.last
        return torch.tensor(last.stats.get("gradient_norm", math.nan) if last is not None else math.nan)
