"""Pickling an `ElasticOptimizer`: to replicas in other processes, and inside of an estimator.

Torch's optimizers pickle their groups and states, which would lose rule, averages and position.
"""

from __future__ import annotations

from typing import Any

__all__ = ["rebuilt", "reduced"]


def reduced(optimizer: Any) -> tuple[Any, ...]:
    """For `__reduce__`: with the inner optimizer, without sampler and scaler, which belong to a process."""
    settings = {
        "base_batch": optimizer.base_batch,
        "schedule": optimizer.schedule,
        "epochs": optimizer.total_samples // optimizer.epoch_samples if optimizer.epoch_samples else None,
        "epoch_samples": optimizer.epoch_samples,
        "memory_steps": optimizer.memory / optimizer.base_batch,
        "measure_every": optimizer.measure_every,
        "clip": optimizer.clip,
        "on_nonfinite": optimizer.on_nonfinite,
    }
    state = {key: value for key, value in optimizer.state_dict().items() if key not in ("inner", "sampler")}
    return rebuilt, (type(optimizer), optimizer.inner, optimizer.rule, settings, state)


def rebuilt(kind: Any, inner: Any, rule: Any, settings: dict[str, Any], state: dict[str, Any]) -> Any:
    """What `reduced` took apart."""
    optimizer = kind(inner, rule, **settings)
    optimizer.load_state_dict({**state, "inner": inner.state_dict(), "sampler": None})
    return optimizer
