"""`simulate`: hours and dollars of a training on a trace, without training.

trace, cap, offset          who is there, and paid for
  v
policy, step model          how big each step is, and how long it takes
  v
recovery                    what a change of the fleet costs
  v
walk                        how many steps, and where the time goes
  v
price                       dollars
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ebbflow.errors import ConfigError, PlanError
from ebbflow.plan.growing import Growing
from ebbflow.plan.policies import Policy
from ebbflow.plan.steptime import ConstantStepTime
from ebbflow.sim.fleet import provisioned, rented
from ebbflow.sim.legs import Legs, Runs, Walk, Work
from ebbflow.sim.prices import FlatPrice, Price, cost, cost_over_time
from ebbflow.sim.recovery import Ideal, Recovery
from ebbflow.sim.stepmodel import Parts, StepModel, WholeStep
from ebbflow.sim.stragglers import Stragglers
from ebbflow.sim.walk import walk
from ebbflow.traces import Trace
from ebbflow.units import Seconds, format_seconds

__all__ = ["BREAKDOWN", "Scenario", "Simulation", "on_demand", "simulate"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_NONE = Seconds(0.0)
_EXACT = 2**53
"""Whole numbers up to here are exact as floats."""
_MOST_STRETCHES = 20_000_000
BREAKDOWN = ("compute", "network", "waiting", "lost", "restart", "checkpoint")
"""Where the time goes; in this order everywhere."""


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
    ref_batch: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.policy, Growing):
            raise ConfigError(f"the policy {self.policy} grows with training, which a simulation does not follow; use "
                              f"follow, fixed or capped, or ask `ebbflow plan`, which knows growing ones")  # fmt: skip
        if self.samples < 1 or self.epochs < 1:
            raise ConfigError(f"{self.epochs} epochs of {self.samples} samples are no training; expected at least one "
                              f"of each")  # fmt: skip
        if self.samples * self.epochs > _EXACT:
            raise ConfigError(f"{self.epochs:,} epochs of {self.samples:,} samples are more than 2^53 samples, beyond "
                              f"which numbers are not exact; count in larger units, such as sequences")  # fmt: skip
        if not self.noise_scale > 0 or self.ref_batch < 1:
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
            ref_batch=self.ref_batch,
        )


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What became of a scenario."""

    scenario: Scenario
    trace: Trace
    """The workers that were paid for."""
    legs: Legs
    """The stretches of constant fleet and batch."""
    workers: Ints
    """That took part, in each stretch."""
    whole: Parts
    """Of a whole step in each stretch."""
    empty: Parts
    """Of an empty step in each stretch."""
    walk: Walk

    @property
    def time_s(self) -> float:
        """From the start of training to the end of the last step."""
        return self.walk.time

    @cached_property
    def runs(self) -> Runs:
        """Runs of equal steps."""
        return self.walk.runs()

    @cached_property
    def steps(self) -> int:
        """That counted."""
        return int(self.runs.counts.sum())

    @cached_property
    def samples(self) -> int:
        """Of all steps that counted."""
        if not self.scenario.cut and self.scenario.noise_scale == math.inf:
            return self.scenario.samples * self.scenario.epochs
        return int((self.runs.counts * self.runs.sizes).sum())

    @cached_property
    def cost_usd(self) -> float:
        """For all workers until the last step ends."""
        return float(cost(self.trace, self.time_s, self.scenario.price, minimum=self.scenario.minimum_billing))

    @property
    def goodput(self) -> float:
        """Reference samples a second: what was needed, over the time it took."""
        return self.scenario.samples * self.scenario.epochs / self.time_s

    @property
    def mean_workers(self) -> float:
        """That were paid for, over time."""
        flat = cost_over_time(self.trace, np.array([self.time_s]), FlatPrice(3600.0))
        return float(flat[0]) / self.time_s

    @cached_property
    def breakdown(self) -> dict[str, float]:
        """Seconds by what they were spent on; they add up to the time."""
        runs, legs = self.runs, self.legs
        # By stretch: steps in all, and samples in units of whole steps.
        steps = np.bincount(runs.legs, weights=runs.counts, minlength=len(legs.stops))
        made = np.bincount(runs.legs, weights=runs.counts * runs.sizes, minlength=len(legs.stops))
        filled = made / np.maximum(legs.samples, 1)
        spent = {
            name: float((empty * steps + (whole - empty) * filled).sum())
            for name in ("compute", "network", "waiting")
            for whole, empty in [(getattr(self.whole, name), getattr(self.empty, name))]
        }
        walked = self.walk
        return {
            **spent,
            "waiting": spent["waiting"] + walked.waiting,
            "lost": walked.lost,
            "restart": walked.restart,
            "checkpoint": walked.checkpoint,
        }

    def cost_until(self, times: Floats) -> Floats:
        """USD spent up to each time, without what a minimum of billing adds."""
        return cost_over_time(self.trace, times, self.scenario.price)

    def as_json(self) -> dict[str, Any]:
        """The figures, by the names of `ebbflow simulate --json`."""
        return {
            "time_s": self.time_s,
            "cost_usd": self.cost_usd,
            "steps": self.steps,
            "samples": self.samples,
            "goodput": self.goodput,
            "breakdown": self.breakdown,
        }


def simulate(scenario: Scenario, *, rng: np.random.Generator | None = None) -> Simulation:
    """Walk through the scenario. Without a generator stragglers cost their mean; with one they are drawn.

    A trace that is too short, or on which no step is ever completed, is a PlanError that says how far it reaches.
    """
    base = rented(scenario.trace, offset=scenario.offset, max_workers=scenario.max_workers)
    needed = scenario.work.needed
    times, found = 1, _prepare(scenario, base, rng)
    if scenario.repeat and (likely := _most(found)) < needed:
        times = _rounds(1 + needed / max(likely, 1e-300)) if likely else 1
    while True:
        if times > 1:
            _refuse_endless(times, base, needed / times)
            found = _prepare(scenario, _repeated(scenario, times), rng)
        walked = walk(found.legs, scenario.work)
        if walked.done:
            return replace(found, walk=walked)
        if not scenario.repeat or not walked.reference:
            raise PlanError(_too_short(scenario, found.trace, walked.reference / needed))
        times = max(times + 1, _rounds(1.02 * times * needed / walked.reference))


def _most(found: Simulation) -> float:
    """Reference samples that the stretches would give if no time were lost: never less than what they do give."""
    legs = found.legs
    lengths = np.diff(legs.stops, prepend=0.0)
    return float((lengths / legs.seconds * found.scenario.work.worths(legs.samples)).sum())


def _rounds(wanted: float) -> int:
    return math.ceil(min(wanted, 1e18))


def _refuse_endless(times: int, base: Trace, each: float) -> None:
    if times * len(base.times) > _MOST_STRETCHES or not math.isfinite(times * base.end):
        raise PlanError(f"the trace would have to be repeated {times:,} times; one round of {format_seconds(base.end)} "
                        f"gives {each:.3g} samples")  # fmt: skip


def _repeated(scenario: Scenario, times: int) -> Trace:
    """The trace so many times in a row, of which the first lacks what lies before the offset."""
    whole = scenario.trace.repeat(times)
    return rented(whole, offset=scenario.offset, max_workers=scenario.max_workers)


def _too_short(scenario: Scenario, paid: Trace, part: float) -> str:
    if not part:
        stats = paid.stats()
        return (
            f"no step is completed in the {format_seconds(paid.end)} of the trace (at most {stats.max} workers, a "
            f"change every {format_seconds(paid.end / (stats.changes + 1))}): steps and restarts take longer than the "
            f"fleet lasts"
        )
    return (
        f"the trace is too short: its {format_seconds(paid.end)} reach "
        f"{math.floor(part * scenario.epochs * 100) / 100:g} of {scenario.epochs} epochs; repeat it (--repeat), "
        f"start it earlier or ask for fewer epochs"
    )


def _prepare(scenario: Scenario, paid: Trace, rng: np.random.Generator | None) -> Simulation:
    """The stretches over the paid workers, not walked yet."""
    ready = provisioned(paid, scenario.provisioning)
    workers, samples = scenario.policy.sizes(ready.workers)
    if int(samples.max()) > _EXACT or int(samples.min()) < 0:  # beyond 2^63 a product of whole numbers turns negative
        raise ConfigError("a step has more than 2^53 samples; check the local batch and the number of workers")
    kept = np.flatnonzero(np.append(True, (workers[1:] != workers[:-1]) | (samples[1:] != samples[:-1])))
    workers, samples = workers[kept], samples[kept]
    stops = np.append(ready.times[kept][1:], ready.end)
    someone = np.maximum(workers, 1)
    whole, empty = scenario.model.parts(someone, samples), scenario.model.parts(someone, np.zeros_like(samples))
    if scenario.stragglers is not None:
        lengths = np.diff(stops, prepend=0.0)
        whole, empty = _slowed(scenario.stragglers, someone, whole, empty, lengths, rng)
    seconds = whole.total
    if not (np.isfinite(seconds).all() and (seconds[samples > 0] > 0).all()):
        raise ConfigError("the step model gives a time that is zero or not finite; check its times")
    constant = isinstance(scenario.model, WholeStep) and isinstance(scenario.model.step_time, ConstantStepTime)
    plan_like = constant and scenario.stragglers is None and scenario.recovery == Ideal()
    legs = Legs(
        stops=stops,
        samples=samples,
        seconds=seconds,
        empty=empty.total,
        reaction=scenario.recovery.react(workers, seconds),
        grid=float(seconds[0]) if plan_like else 0.0,
    )
    return Simulation(
        scenario=scenario, trace=paid, legs=legs, workers=workers, whole=whole, empty=empty, walk=Walk()
    )  # fmt: skip


def _slowed(
    stragglers: Stragglers, workers: Ints, whole: Parts, empty: Parts, lengths: Floats, rng: np.random.Generator | None
) -> tuple[Parts, Parts]:
    """The parts with the wait for the slowest worker; drawn, a stretch has the mean of its many steps."""
    mean, variance = stragglers.slowest(workers)
    if rng is not None:
        steps = np.maximum(lengths / np.maximum(whole.total, 1e-12), 1.0)
        mean = np.maximum(mean + np.sqrt(variance / steps) * rng.standard_normal(len(mean)), 1.0)
    return tuple(replace(parts, waiting=parts.waiting + parts.compute * (mean - 1.0)) for parts in (whole, empty))  # type: ignore[return-value]


def on_demand(scenario: Scenario, *, workers: int, usd_per_hour: float, model: StepModel | None = None) -> Simulation:
    """The same training on so many workers that nobody takes away, at the on-demand price."""
    if workers < 1:
        raise ConfigError(f"an on-demand cluster of {workers} workers; expected at least 1")
    steady = Trace(np.zeros(1), np.array([workers]), 86400.0, name=f"{workers} on demand")
    return simulate(
        replace(
            scenario, trace=steady, price=FlatPrice(usd_per_hour), recovery=Ideal(), offset=_NONE, repeat=True,
            max_workers=None, model=scenario.model if model is None else model,
        )
    )  # fmt: skip
