"""From `batch_size` and the number of workers to the plan and the policy of a fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ebbflow.core.spec import parse_call
from ebbflow.core.units import whole_number
from ebbflow.errors import ConfigError
from ebbflow.plan import BatchPlan, make_policy
from ebbflow.plan.growing import workers_for
from ebbflow.plan.policies import POLICIES, FixedTotal, GrowingPolicy, Policy, sizes_of

__all__ = ["DEFAULT_BATCH", "FitBatches", "make_batches"]

DEFAULT_BATCH = 32
"""What a growing policy begins with where nothing else is said."""


@dataclass(frozen=True, kw_only=True)
class FitBatches:
    """Workers and samples of the steps of a fit."""

    plan: BatchPlan
    """What the emulated workers can do."""
    policy: Policy
    base_batch: int
    """The batch at which the learning rate was tuned: that of the first step, unless said otherwise."""
    local_batch: int
    """Most samples of one worker per step."""
    text: str
    """How the batch was asked for, for the record."""

    @property
    def growing(self) -> GrowingPolicy | None:
        """The policy, if the batch grows."""
        return self.policy if isinstance(self.policy, GrowingPolicy) else None

    @property
    def batch(self) -> int:
        """Samples of the steps, where the batch does not grow."""
        return int(self.plan.samples[0])

    @property
    def measured_micro_batch(self) -> int:
        """Micro-batch where noise is measured: that takes two micro-batches, also where there is a single worker."""
        return max(1, self.local_batch // 2)


def make_batches(
    batch_size: Any,
    settings: Mapping[str, Any],
    *,
    base_batch: int | None,
    local_batch: int | None,
    max_workers: int | None,
    samples: int,
) -> FitBatches:
    """`batch_size` is a number, the text of a policy, or a policy; `settings` are its `batch_size__` parameters.

    A number is the batch of every step. A worker takes at most `local_batch` samples, by default the base batch. There
    are as many workers as the batch needs, but no more than `max_workers`; a policy that requests more is cut there,
    and the learning rate is reduced for it."""
    base = whole_number(base_batch, "base_batch") if base_batch is not None else None
    local = whole_number(local_batch, "local_batch") if local_batch is not None else None
    most = whole_number(max_workers, "max_workers") if max_workers is not None else None
    if not isinstance(batch_size, str) and not hasattr(batch_size, "sizes"):
        if settings:
            raise ConfigError(
                f"batch_size is {batch_size!r}, which has no settings such as batch_size__{next(iter(settings))}; name "
                f"a policy: batch_size='geo'"
            )
        batch = samples if batch_size == -1 else whole_number(batch_size, "batch_size")
        local = local or batch
        workers = min(workers_for(batch, local), most or batch)
        plan, fixed = BatchPlan.constant(workers, batch), FixedTotal(batch)
        return FitBatches(plan=plan, policy=fixed, base_batch=base or batch, local_batch=local, text=str(batch))
    text = batch_size
    if isinstance(batch_size, str):
        text = POLICIES.with_arguments(parse_call(batch_size), {name: str(value) for name, value in settings.items()})
    if settings and not isinstance(batch_size, str):
        raise ConfigError(
            f"batch_size is the policy {batch_size}, which has its settings already; leave "
            f"batch_size__{next(iter(settings))} out, or name the policy as text"
        )
    policy = make_policy(text, local_batch=local)
    if not isinstance(policy, GrowingPolicy):
        workers, batch = (int(value[0]) for value in sizes_of(policy, np.array([most or 1], np.int64)))
        plan, local = BatchPlan.constant(workers, batch), workers_for(batch, workers)
        return FitBatches(plan=plan, policy=policy, base_batch=base or batch, local_batch=local, text=str(policy))
    base = base or policy.initial or DEFAULT_BATCH
    local = policy.local_batch or base
    fleet = most or workers_for(samples, local)  # enough for a whole epoch in one step: more cannot be used
    plan = BatchPlan.constant(fleet, fleet * local)
    return FitBatches(plan=plan, policy=policy, base_batch=base, local_batch=local, text=str(text))
