"""What is simulated: a training, a fleet, a system and a price."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ebbflow.core.units import Seconds
from ebbflow.errors import ConfigError
from ebbflow.plan.policies import GrowingPolicy, Policy
from ebbflow.simulate.legs import Work
from ebbflow.simulate.prices import Price
from ebbflow.simulate.recovery import Ideal, Recovery
from ebbflow.simulate.stepmodel import StepModel
from ebbflow.simulate.stragglers import Stragglers
from ebbflow.traces import Trace

__all__ = ["EXACT", "Scenario"]

EXACT = 2**53
"""Whole numbers up to here are exact as floats."""
_NONE = Seconds(0.0)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A training, a fleet, a system and a price."""

    trace: Trace
    policy: Policy
    model: StepModel
    samples: int
    """Of an epoch."""
    epochs: int
    price: Price
    """Of one worker that the trace gives."""
    recovery: Recovery = field(default_factory=Ideal)
    stragglers: Stragglers | None = None
    offset: Seconds = _NONE
    """Where in the trace training begins."""
    repeat: bool = False
    """Play the trace again when it ends too early."""
    max_workers: int | None = None
    """Rent no more than so many."""
    provisioning: Seconds = _NONE
    """A worker is paid for from its arrival and computes so much later."""
    minimum_billing: Seconds = _NONE
    cut: bool = True
    """Each epoch ends with a smaller step; else steps run across epoch ends."""
    noise_scale: float = math.inf
    """In samples; then training ends not with the last epoch but when what was done is worth the epochs at the
    reference batch."""
    ref_batch: int | None = None
    """The batch at which the epochs would do, and with which a growing policy begins; None: not given."""

    def __post_init__(self) -> None:
        if isinstance(self.policy, GrowingPolicy):
            _check_growing(self.policy, self.ref_batch)
        if self.samples < 1 or self.epochs < 1:
            raise ConfigError(f"{self.epochs} epochs of {self.samples} samples are no training; expected at least one "
                              f"of each")  # fmt: skip
        if self.samples * self.epochs > EXACT:
            raise ConfigError(f"{self.epochs:,} epochs of {self.samples:,} samples are more than 2^53 samples, beyond "
                              f"which numbers are not exact; count in larger units, such as sequences")  # fmt: skip
        if not self.noise_scale > 0 or (self.ref_batch is not None and self.ref_batch < 1):
            raise ConfigError(f"a noise scale of {self.noise_scale:g} at a reference batch of {self.ref_batch} samples "
                              f"is not possible; expected both above 0")  # fmt: skip

    @property
    def work(self) -> Work:
        """What is to be done."""
        return Work(
            epoch=self.samples,
            needed=float(self.samples * self.epochs),
            cut=self.cut,
            noise_scale=self.noise_scale,
            ref_batch=self.ref_batch or 1,
        )


def _check_growing(policy: GrowingPolicy, ref_batch: int | None) -> None:
    if not policy.passive:
        raise ConfigError(
            f"the policy {policy} grows by what training shows (losses, gradients), which a simulation does not have; "
            f"use one that grows by the position alone, geo or pada, with numbers that come near the batches of a "
            f"recorded run; or count the steps of such batches with ebbflow plan --batches"
        )
    if policy.initial is None and ref_batch is None:
        raise ConfigError(f"the policy {policy} begins with the reference batch; give it (--ref-batch), or initial=")
