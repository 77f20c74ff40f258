"""How many samples and workers the steps of a fit have: from `batch_size` and the workers to a plan and a policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ebbflow.errors import ConfigError
from ebbflow.estimators.settings import whole_number, with_settings
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.plan import BatchPlan, make_policy
from ebbflow.plan.growing import workers_for
from ebbflow.plan.policies import FixedTotal, GrowingPolicy, Policy

__all__ = ["DEFAULT_BATCH", "Batches", "make_batches"]

DEFAULT_BATCH = 32
"""What a growing policy begins with where nobody says."""


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The steps of a fit."""

    plan: BatchPlan
    """What the emulated workers can do."""
    policy: Policy
    """What was asked for."""
    base_batch: int
    """The batch at which the learning rate holds: that of the first step, unless said otherwise."""
    local_batch: int
    """Samples that a worker takes at most."""
    text: str
    """How the batch was asked for, for the record."""

    @property
    def growing(self) -> GrowingPolicy | None:
        """The policy, if what a step wants changes while training."""
        return self.policy if isinstance(self.policy, GrowingPolicy) else None

    @property
    def micro_batch(self) -> int:
        """Samples of a micro-batch where noise is told from signal: that takes two, also where a worker is alone."""
        return max(1, self.local_batch // 2)

    def needs(self, optimizer: ElasticOptimizer) -> frozenset[str]:
        """What rule and policy need to have measured."""
        return optimizer.rule.needs | (self.growing.needs if self.growing is not None else frozenset())


def make_batches(
    batch_size: Any,
    settings: Mapping[str, Any],
    *,
    base_batch: int | None,
    local_batch: int | None,
    max_workers: int | None,
    samples: int,
) -> Batches:
    """`batch_size` is a number, the text of a policy, or a policy; `settings` are its `batch_size__` parameters.

    A number is the batch of every step. Workers take `local_batch` samples at most, by default the base batch; there
    are as many of them as the batch takes, but no more than `max_workers`: a policy that wants more is cut there and
    pays in the learning rate.
    """
    base = whole_number("base_batch", base_batch) if base_batch is not None else None
    local = whole_number("local_batch", local_batch) if local_batch is not None else None
    most = whole_number("max_workers", max_workers) if max_workers is not None else None
    if not isinstance(batch_size, str) and not hasattr(batch_size, "sizes"):
        if settings:
            raise ConfigError(
                f"batch_size is {batch_size!r}, which has no settings such as batch_size__{next(iter(settings))}; name "
                f"a policy: batch_size='geo'"
            )
        batch = samples if batch_size == -1 else whole_number("batch_size", batch_size)
        local = local or batch
        workers = min(workers_for(batch, local), most or batch)
        plan = BatchPlan.constant(workers, batch)
        fixed = FixedTotal(batch)
        return Batches(plan=plan, policy=fixed, base_batch=base or batch, local_batch=local, text=str(batch))
    text = with_settings(batch_size, settings) if isinstance(batch_size, str) else batch_size
    if settings and not isinstance(batch_size, str):
        raise ConfigError(
            f"batch_size is the policy {batch_size}, which brings its settings; leave "
            f"batch_size__{next(iter(settings))} out, or name the policy as text"
        )
    policy = make_policy(text, local_batch=local)
    if not isinstance(policy, GrowingPolicy):
        workers, batch = (int(value[0]) for value in policy.sizes(np.array([most or 1], np.int64)))
        plan = BatchPlan.constant(workers, batch)
        share = workers_for(batch, workers)
        return Batches(plan=plan, policy=policy, base_batch=base or batch, local_batch=share, text=str(policy))
    base = base or policy.initial or DEFAULT_BATCH
    local = policy.local_batch or base
    # Workers for a whole epoch in one step: more than that nobody can use.
    fleet = most or workers_for(samples, local)
    plan = BatchPlan.constant(fleet, fleet * local)
    return Batches(plan=plan, policy=policy, base_batch=base, local_batch=local, text=str(text))
