"""A loop of one's own with Hugging Face accelerate, on workers that come and go.

model, optimizer, loader = prepare(accelerator, model, optimizer, loader, trace="spot.csv", rule="sqrt", base_batch=32)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from ebbflow.errors import ConfigError
from ebbflow.integrations.elastic_loop import elastic_loop

__all__ = ["prepare"]


def prepare(
    accelerator: Any,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    **settings: Any,
) -> tuple[Any, Any, Any]:
    """Instead of `accelerator.prepare(model, optimizer, loader)`: the same three, whose steps follow a fleet.

    `settings`: those of `elastic_loop`. The loop stays as it is: one `optimizer.step()` per batch of the loader, which
    is a micro-batch of a step now; `accelerator.save_state` and `load_state` save and restore the position in the data.
    Afterwards `optimizer.optimizer` is the ElasticOptimizer, with `updates`, `finished`, `last` and `sampler`.

    Clip with `clip=` and accumulate with `micro_batch=` here: accelerate would do both per micro-batch, and is refused
    as soon as it does. A GradScaler (fp16) of accelerate would unscale every micro-batch; use bf16.
    """
    if accelerator.num_processes > 1:
        raise ConfigError(
            f"accelerate has started {accelerator.num_processes} processes, and would cut the batches into parts "
            f"itself; start them with torchrun and use ElasticSampler and ElasticOptimizer, or start one process"
        )
    if accelerator.scaler is not None:
        raise ConfigError("mixed_precision is 'fp16', whose scaler would unscale every micro-batch; use 'bf16'")
    made, elastic = elastic_loop(optimizer, loader, model=model, **settings)
    return tuple(accelerator.prepare(model, made, elastic))
