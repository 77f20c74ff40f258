"""What one step of an `ElasticOptimizer` did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ebbflow.moments.estimate import Moments
from ebbflow.rules.base import Scaling

__all__ = ["Update"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """What one step did."""

    lr_base: float
    """Rate of the schedule at the reference batch (first parameter group)."""
    lr: float
    """Rate that the step used; the mean over the layers where they differ; 0 if it was skipped."""
    multiplier: float
    """How much larger the step was than one at the reference batch, inside and outside the momentum together."""
    applied: bool = True
    """False: the gradient was not finite, and nothing has changed but the position."""
    stats: Mapping[str, float] = field(default_factory=dict)
    scaling: Scaling = Scaling()
    """What the rule said."""
    moments: Moments | None = None
    """What the rule heard."""
