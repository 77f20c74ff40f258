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
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ebbflow.core.units import Seconds, format_seconds
from ebbflow.errors import ConfigError, PlanError
from ebbflow.plan.policies import GrowingPolicy
from ebbflow.simulate.fleet import rented
from ebbflow.simulate.grow import Phases, walk_growing
from ebbflow.simulate.legs import Legs, Runs, Walk, Work
from ebbflow.simulate.prices import FlatPrice, cost, cost_over_time
from ebbflow.simulate.recovery import Ideal
from ebbflow.simulate.scenario import Scenario
from ebbflow.simulate.stepmodel import StepModel
from ebbflow.simulate.stretches import GrowingStretches, Steps, Stretches, prepare
from ebbflow.simulate.walk import walk
from ebbflow.traces import Trace

__all__ = ["BREAKDOWN", "Simulation", "on_demand", "simulate"]

Floats = npt.NDArray[np.float64]
_NONE = Seconds(0.0)
_MOST_STRETCHES = 20_000_000
BREAKDOWN = ("compute", "network", "waiting", "lost", "restart", "checkpoint")
"""Where the time goes; in this order everywhere."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What became of a scenario."""

    scenario: Scenario
    trace: Trace
    """The workers that were paid for."""
    stretches: Steps
    """The stretches of constant fleet and batch, as the runs of the walk number them."""
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
        return int(self.runs.counts @ self.runs.sizes)

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
        runs, of = self.runs, self.stretches
        # By stretch: steps in all, and samples in units of whole steps.
        steps = np.bincount(runs.legs, weights=runs.counts, minlength=len(of.sizes))
        made = np.bincount(runs.legs, weights=runs.counts * runs.sizes, minlength=len(of.sizes))
        filled = made / np.maximum(of.sizes, 1)
        spent = {
            name: float(
                np.einsum("i,i", empty, steps) + np.einsum("i,i", whole - empty, filled)
            )  # one thread, as `@` is not
            for name in ("compute", "network", "waiting")
            for whole, empty in [(getattr(of.whole, name), getattr(of.empty, name))]
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
    paid = base = rented(scenario.trace, offset=scenario.offset, max_workers=scenario.max_workers)
    needed = scenario.work.needed
    times, found = 1, prepare(scenario, base, rng)
    if scenario.repeat and (likely := _most(found.legs, scenario.work)) < needed:
        times = _rounds(1 + needed / max(likely, 1e-300)) if likely else 1
    while True:
        if times > 1:
            _refuse_endless(times, base, needed / times)
            paid = _repeated(scenario, times)
            found = prepare(scenario, paid, rng)
        steps, walked = _walked(scenario, paid, found, rng)
        if walked.done:
            return Simulation(scenario=scenario, trace=paid, stretches=steps, walk=walked)
        if not scenario.repeat or not walked.reference:
            raise PlanError(_too_short(scenario, paid, walked.reference / needed))
        times = max(times + 1, _rounds(1.02 * times * needed / walked.reference))


def _walked(scenario: Scenario, paid: Trace, found: Stretches, rng: np.random.Generator | None) -> tuple[Steps, Walk]:
    """The walk, and the stretches that its runs are numbered by."""
    policy = scenario.policy
    if not isinstance(policy, GrowingPolicy):
        return found, walk(found.legs, scenario.work)
    phases = Phases(
        policy=policy,
        ref_batch=scenario.ref_batch or policy.initial or 1,
        epoch_samples=scenario.samples,
        most=max(int(found.sizes.max()), 1),
    )
    growing = GrowingStretches(scenario, paid, rng)
    walked, used = walk_growing(phases, growing.part, growing.count, scenario.work)
    return Steps.joined([part.part(0, count) for part, count in used]), walked


def _most(legs: Legs, work: Work) -> float:
    """Reference samples that the stretches would give if no time were lost: never less than what they do give."""
    lengths = np.diff(legs.stops, prepend=0.0)
    return float((lengths / legs.seconds * work.worths(legs.samples)).sum())


def _rounds(requested: float) -> int:
    return math.ceil(min(requested, 1e18))


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
