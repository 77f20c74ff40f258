"""What is simulated: a training, a fleet, a training system and a price.

`Scenario` holds the parts as objects. `ScenarioSettings` holds them as a user writes them, and makes the scenario; the
options of `ebbflow simulate`, `compare` and `whatif` are generated from its fields.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ebbflow.core.units import Seconds, parse_seconds
from ebbflow.core.wording import called
from ebbflow.errors import ConfigError
from ebbflow.plan.goodput import batch_candidates, efficiencies, efficiency
from ebbflow.plan.growing import Goodput, workers_for
from ebbflow.plan.policies import POLICIES, Drop, GrowingPolicy, Policy, make_policy, sizes_of
from ebbflow.simulate.prices import Price, make_price, read_prices
from ebbflow.simulate.profiles import read_noise_scale, read_profile
from ebbflow.simulate.recovery import RECOVERIES, Ideal, Recovery
from ebbflow.simulate.step_models import NETWORKS, STRAGGLERS, ComputeAndNetwork, StepModel, Stragglers, parse_step_time
from ebbflow.traces import Trace, load

__all__ = ["LARGEST_EXACT", "Scenario", "ScenarioSettings", "SettledGoodput", "TrainingWork", "rented_trace"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

LARGEST_EXACT = 2**53
"""Whole numbers up to this one are exact as floats."""
_NONE = Seconds(0.0)


@dataclass(frozen=True, kw_only=True)
class TrainingWork:
    """How much training is needed, and how much of it one step does.

    A step of B samples is worth B (phi + B0) / (phi + B) samples at the reference batch B0, where phi is the noise
    scale: the efficiency of Pollux (Qiao et al. 2021), which is AdaScale's gain divided by the batch ratio. One noise
    scale is used for the whole training, although it usually grows; `ebbflow whatif` shows how much depends on it.
    """

    epoch: int
    """Samples per epoch."""
    needed: float
    """Reference samples after which training ends."""
    cut: bool = True
    """Whether the last step of an epoch is cut to the samples that the epoch has left."""
    noise_scale: float = math.inf
    ref_batch: int = 1

    def worth(self, samples: int) -> float:
        """The reference samples that a step is worth; all of its samples up to the reference batch.

        >>> TrainingWork(epoch=1, needed=1, noise_scale=300, ref_batch=100).worth(500)  # 500 x 400 / 800
        250.0
        """
        return samples * efficiency(samples, noise_scale=self.noise_scale, ref_batch=self.ref_batch)

    def worths(self, samples: Ints) -> Floats:
        """`worth` for each of several steps, which may have no samples."""
        return samples * efficiencies(
            samples.astype(np.float64), noise_scale=self.noise_scale, ref_batch=self.ref_batch
        )


@dataclass(frozen=True, kw_only=True)
class SettledGoodput(Policy):
    """The policy `goodput` once it knows noise scale and step times: the best steps that the workers can do.

    In a simulation both are known and do not change, so that the batch is from the first step on where training would
    settle; growing from the reference batch to it is not simulated.
    """

    policy: Goodput
    model: StepModel
    """How long steps take, unless the policy was given times."""
    noise_scale: float
    ref_batch: int

    def sizes(self, workers: Ints) -> tuple[Ints, Ints]:
        """The workers that take part, and their samples; fewer workers than the first batch needs all take part."""
        there, local, highest = sizes_of(self.policy, workers)[1], self.policy.local_batch or 1, int(workers.max())
        first = min(self.policy.initial or self.ref_batch, max(highest, 1) * local)
        most = min(highest * local, self.policy.max_batch or highest * local)
        batches = np.array(batch_candidates(first, local_batch=local, most=most))
        fleets = np.array([workers_for(int(batch), local) for batch in batches])
        given = self.policy.given_times
        if given is None:
            seconds = self.model.breakdown(fleets, batches).total
        else:
            seconds = np.array([given.seconds(int(n), int(b)) for n, b in zip(fleets, batches, strict=True)])
        scores = [
            self.policy.score(int(b), int(n), float(s), noise_scale=self.noise_scale, ref_batch=self.ref_batch)
            for b, n, s in zip(batches, fleets, seconds, strict=True)
        ]
        best = np.maximum.accumulate(np.where(scores == np.maximum.accumulate(scores), np.arange(len(scores)), 0))
        fits = np.searchsorted(batches, there, side="right") - 1  # the largest candidate that the workers can do
        chosen = best[np.maximum(fits, 0)]
        whole = fits < 0
        return np.where(whole, workers, fleets[chosen]), np.where(whole, there, batches[chosen])


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A training, a fleet, a training system and a price."""

    trace: Trace
    policy: Policy
    model: StepModel
    samples: int
    """Samples per epoch."""
    epochs: int
    price: Price
    """The price of one worker of the trace."""
    recovery: Recovery = field(default_factory=Ideal)
    stragglers: Stragglers | None = None
    offset: Seconds = _NONE
    """The time in the trace at which training begins."""
    repeat: bool = False
    """Repeat the trace if it ends before the training."""
    max_workers: int | None = None
    """The largest number of workers to rent."""
    provisioning: Seconds = _NONE
    """Time from the arrival of a worker, from which on it is paid for, until it can compute."""
    minimum_billing: Seconds = _NONE
    """Time for which every worker is billed at least."""
    cut: bool = True
    """Each epoch ends with a smaller step; otherwise steps run across the ends of epochs."""
    noise_scale: float = math.inf
    """In samples. If it is finite, training ends when its steps are worth the epochs at the reference batch."""
    ref_batch: int | None = None
    """The batch at which the epochs are enough, and with which a growing policy begins."""

    def __post_init__(self) -> None:
        if isinstance(self.policy, GrowingPolicy):
            _check_growing(self.policy, self.ref_batch, self.noise_scale)
        if isinstance(self.policy, Drop) and self.noise_scale < math.inf:
            raise ConfigError(f"the policy {self.policy} counts the samples that a step covers, of which a noise scale "
                              f"would take the dropped ones for trained; leave the noise scale out")  # fmt: skip
        if self.samples < 1 or self.epochs < 1:
            raise ConfigError(f"{self.epochs} epochs of {self.samples} samples are no training; expected at least one "
                              f"of each")  # fmt: skip
        if self.samples * self.epochs > LARGEST_EXACT:
            raise ConfigError(f"{self.epochs:,} epochs of {self.samples:,} samples are more than 2^53 samples, beyond "
                              f"which numbers are not exact; count in larger units, such as sequences")  # fmt: skip
        if not self.noise_scale > 0 or (self.ref_batch is not None and self.ref_batch < 1):
            raise ConfigError(f"a noise scale of {self.noise_scale:g} at a reference batch of {self.ref_batch} samples "
                              f"is not possible; expected both above 0")  # fmt: skip

    @property
    def work(self) -> TrainingWork:
        """How much training is needed."""
        return TrainingWork(
            epoch=self.samples,
            needed=float(self.samples * self.epochs),
            cut=self.cut,
            noise_scale=self.noise_scale,
            ref_batch=self.ref_batch or 1,
        )

    @property
    def fleet_policy(self) -> Policy:
        """The policy by which steps are simulated: `goodput` is settled from the beginning."""
        if not isinstance(self.policy, Goodput):
            return self.policy
        return SettledGoodput(
            policy=self.policy, model=self.model, noise_scale=self.noise_scale, ref_batch=self.ref_batch or 1
        )


def _check_growing(policy: GrowingPolicy, ref_batch: int | None, noise_scale: float) -> None:
    if isinstance(policy, Goodput):
        if noise_scale == math.inf or ref_batch is None:
            raise ConfigError(
                f"the policy {policy} follows the noise scale, which a simulation does not measure; give it, or a "
                f"record to take it from, with the reference batch: {called('noise_scale', 8000)} and "
                f"{called('ref_batch', 256)}"
            )
        if policy.local_batch is None:
            raise ConfigError(f"the policy {policy} lacks local_batch, the samples that a worker takes per step")
        return
    if not policy.passive:
        raise ConfigError(
            f"the policy {policy} grows by what training shows (losses, gradients), which a simulation does not have; "
            f"use one that grows by the position alone, geo or pada, with numbers that come near the batches of a "
            f"recorded run; or count the steps of such batches with ebbflow plan --plan FILE"
        )
    if policy.initial is None and ref_batch is None:
        raise ConfigError(
            f"the policy {policy} begins with the reference batch; give it ({called('ref_batch')}), or initial="
        )


def rented_trace(trace: Trace, *, offset: Seconds, max_workers: int | None) -> Trace:
    """The workers that are paid for: the trace from `offset` on, with at most `max_workers`."""
    if max_workers is not None and max_workers < 1:
        raise ConfigError(f"the fleet is limited to {max_workers} workers; expected at least 1")
    if not 0 <= offset < trace.end:
        raise ConfigError(f"the offset of {offset:g} s lies outside of the trace, which covers 0 to {trace.end:g} s")
    shifted = trace.shift(offset)
    return shifted if max_workers is None else shifted.clip(maximum=max_workers)


# -- a scenario as a user writes it ------------------------------------------------------------------------------------

_TRAINING, _STEP, _FLEET, _MONEY = "The training", "How long a step takes", "The fleet", "Money"


def _setting(group: str, doc: str, default: Any = dataclasses.MISSING, *, minimum: int | None = None) -> Any:
    """A field with what the command shows of it: its group of options, its help text and its least value."""
    return field(default=default, metadata={"group": group, "doc": doc, "minimum": minimum})


@dataclass(frozen=True, kw_only=True)
class ScenarioSettings:
    """A scenario as a user writes it: times, models and policies as text.

    >>> settings = ScenarioSettings(samples=1000, epochs=1, local_batch=10, step_time="1s", spot_price="3.6")
    >>> settings.scenario("0s:4 10s:2 1h").policy
    Follow(local_batch=10)
    """

    samples: int = _setting(_TRAINING, "Samples per epoch.", minimum=1)
    epochs: int = _setting(_TRAINING, "Epochs to train.", minimum=1)
    local_batch: int | None = _setting(_TRAINING, "Samples that one worker takes per step.", None, minimum=1)
    policy: str = _setting(_TRAINING, f"How the batch follows the workers: {', '.join(POLICIES.names())}.", "follow")
    noise_scale: str | None = _setting(
        _TRAINING, "Noise scale in samples, or a record to take it from: gives time and cost to accuracy.", None
    )
    ref_batch: int | None = _setting(
        _TRAINING, "Batch at which the epochs are enough, and with which growing policies begin.", None
    )
    across_epochs: bool = _setting(_TRAINING, "Let steps run across epoch ends instead of cutting them there.", False)

    step_time: str | None = _setting(_STEP, "A measured time such as 0.6s, or one by workers: '1:0.5s 8:0.62s'.", None)
    profile: Path | None = _setting(_STEP, "A step model that ebbflow profile wrote.", None)
    compute_step: str | None = _setting(_STEP, "Computing time per step, whatever its samples, such as 20ms.", None)
    compute_sample: str | None = _setting(_STEP, "Computing time per sample of one worker, such as 4.5ms.", None)
    network: str | None = _setting(
        _STEP, f"{', '.join(NETWORKS.names())}: ring(megabytes=102, gbps=25, latency=50us).", None
    )
    overlap: float = _setting(_STEP, "Fraction of the computing that hides the network, 0 to 1.", 0.0)
    loading: str = _setting(_STEP, "Time to read one sample, in the background.", "0s")
    micro_batch: int | None = _setting(_STEP, "Samples that fit into a worker at once; more are accumulated.", None)
    emulated: bool = _setting(_STEP, "One machine computes for all workers: the time of an emulated run.", False)
    stragglers: str | None = _setting(
        _STEP, f"{', '.join(STRAGGLERS.names())}: lognormal(0.1), rare(0.01, factor=3).", None
    )

    recovery: str = _setting(
        _FLEET, f"What a change costs: {', '.join(RECOVERIES.names())}, such as step(detect=1s).", "ideal"
    )
    offset: str = _setting(_FLEET, "Begin at this time of the trace, such as 30min.", "0s")
    repeat: bool = _setting(_FLEET, "Repeat the trace until the training is done.", False)
    max_workers: int | None = _setting(_FLEET, "Largest number of workers to rent.", None, minimum=1)
    provisioning: str = _setting(_FLEET, "Time from a worker's arrival, when it is paid, to its first step.", "0s")
    format: str | None = _setting(_FLEET, "Format of the trace file, if it cannot be detected.", None)

    spot_price: str | None = _setting(
        _MONEY, "USD per hour of one worker of the trace, or a price model of a plugin.", None
    )
    price_history: Path | None = _setting(_MONEY, "Prices over time instead: a file time_s,zone,usd_per_hour.", None)
    zone: str | None = _setting(_MONEY, "Use the prices of one zone. Default: the mean of all zones.", None)
    price_offset: str = _setting(_MONEY, "Time in the price history at which training begins.", "0s")
    minimum_billing: str = _setting(_MONEY, "Time for which every worker is billed at least, such as 60s.", "0s")
    price: float | None = _setting(_MONEY, "USD per hour of one worker on demand.", None)
    on_demand_workers: int | None = _setting(
        _MONEY, "Size of the on-demand cluster. Default: the mean number of workers of the trace.", None, minimum=1
    )
    on_demand_step_time: str | None = _setting(_MONEY, "Step time of the on-demand cluster, if it differs.", None)

    def scenario(self, trace: str | Path) -> Scenario:
        """The scenario on a trace, which is a file or the text of a generator."""
        if self.noise_scale is not None and self.ref_batch is None:
            raise ConfigError(
                f"{called('noise_scale')} needs {called('ref_batch')}: the batch at which the epochs asked for are "
                f"enough"
            )
        fleet, model = load(trace, format=self.format), self.step_model()
        if getattr(model, "serial", False) and not self.emulated and min(fleet.stats().max, self.max_workers or 2) > 1:
            raise ConfigError(
                f"{self.profile} is of emulated workers: one machine computed for all of them, so that a step takes "
                f"longer the more there are. For a fleet, measure one worker (ebbflow profile WORKLOAD) or fit a live "
                f"job (--from); for the time of an emulated run, add {called('emulated', True)}"
            )
        return Scenario(
            trace=fleet,
            policy=make_policy(self.policy, self.local_batch),
            model=model,
            samples=self.samples,
            epochs=self.epochs,
            price=self.worker_price(),
            recovery=RECOVERIES.make(self.recovery),
            stragglers=None if self.stragglers is None else STRAGGLERS.make(self.stragglers),
            offset=parse_seconds(self.offset),
            repeat=self.repeat,
            max_workers=self.max_workers,
            provisioning=parse_seconds(self.provisioning),
            minimum_billing=parse_seconds(self.minimum_billing),
            cut=not self.across_epochs,
            noise_scale=math.inf if self.noise_scale is None else read_noise_scale(self.noise_scale),
            ref_batch=self.ref_batch,
        )

    def check_ref_batch(self, policies: Iterable[str]) -> None:
        """Refuse a reference batch on which nothing depends, whichever of the policies is simulated."""
        if self.ref_batch is None or self.noise_scale is not None:
            return
        if not any(isinstance(make_policy(text, self.local_batch or 1), GrowingPolicy) for text in policies):
            raise ConfigError(
                f"{called('ref_batch', self.ref_batch)} would change nothing: it is the batch at which the epochs "
                f"are enough where the noise scale is known, and with which growing policies begin; add "
                f"{called('noise_scale')} or a growing policy, or leave it out"
            )

    def step_model(self) -> StepModel:
        """The step model: a measured step time, a profile, or times for computing and network."""
        given = [self.step_time is not None, self.profile is not None, bool(self.compute_step or self.compute_sample)]
        if sum(given) != 1:
            raise ConfigError(
                f"say how long a step takes in one way: {called('step_time', '0.6s')}, {called('profile', 'FILE')} "
                f"(ebbflow profile writes it) or {called('compute_step')} and {called('compute_sample')}"
            )
        if self.step_time is not None:
            without_effect = {
                called("network"): self.network is not None,
                called("overlap"): self.overlap != 0,
                called("loading"): self.loading != "0s",
                called("micro_batch"): self.micro_batch is not None,
                called("emulated"): self.emulated,
            }
            if any(without_effect.values()):
                found = " and ".join(name for name, is_given in without_effect.items() if is_given)
                raise ConfigError(
                    f"{called('step_time')} is the time of the whole step; {found} would change nothing. Leave it out, "
                    f"or give {called('profile')} or {called('compute_sample')} instead of {called('step_time')}"
                )
            return parse_step_time(self.step_time)
        if self.profile is not None:
            base = read_profile(self.profile)
        else:
            base = ComputeAndNetwork(
                per_step=parse_seconds(self.compute_step or "0s"), per_sample=parse_seconds(self.compute_sample or "0s")
            )
        return dataclasses.replace(
            base,
            network=base.network if self.network is None else NETWORKS.make(self.network),
            overlap=self.overlap,
            loading=parse_seconds(self.loading),
            micro_batch=base.micro_batch if self.micro_batch is None else self.micro_batch,
            serial=base.serial or self.emulated,
        )

    def worker_price(self) -> Price:
        """The price of one worker of the trace."""
        if self.price_history is not None and self.spot_price is None:
            return read_prices(self.price_history, zone=self.zone, offset=parse_seconds(self.price_offset))
        if self.spot_price is not None and self.price_history is None:
            of_a_history = {
                called("zone"): self.zone is not None, called("price_offset"): parse_seconds(self.price_offset) > 0,
            }  # fmt: skip
            if given := [option for option, value in of_a_history.items() if value]:
                raise ConfigError(
                    f"{given[0]} is for a price history, and {called('spot_price')} is a price for all zones and "
                    f"times: leave it out, or give {called('price_history')} instead of {called('spot_price')}"
                )
            return make_price(self.spot_price)
        raise ConfigError(
            f"give the price of a worker: {called('spot_price', 0.744)} (USD per hour) or "
            f"{called('price_history', 'FILE')}, one of the two; {called('spot_price', 0)} if money does not matter"
        )
