"""`simulate`: the hours and dollars of a training on a trace, without training; and the spread over many draws.

trace, limit, offset        which workers are available, and paid for        scenario.py
  v
policy, step model          the size and duration of each step               segments.py, step_models.py
  v
recovery                    what a change of the fleet costs                 recovery.py
  v
advance, skip               the number of steps, and where the time goes     advance.py, skip.py
  v
price                       dollars                                          prices.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ebbflow.core.spec import parse_call
from ebbflow.core.units import Seconds, format_seconds
from ebbflow.core.wording import called
from ebbflow.errors import ConfigError, PlanError
from ebbflow.plan.policies import GrowingPolicy
from ebbflow.simulate.advance import GrowthPhases, simulate_growing
from ebbflow.simulate.prices import FlatPrice, cost, cost_over_time
from ebbflow.simulate.recovery import Ideal
from ebbflow.simulate.scenario import Scenario, ScenarioSettings, TrainingWork, rented_trace
from ebbflow.simulate.segments import (
    GrowingSegments,
    Segments,
    SegmentSteps,
    SimulatedRuns,
    SimulatedSteps,
    fleet_segments,
)
from ebbflow.simulate.skip import simulate_segments
from ebbflow.simulate.step_models import StepModel, parse_step_time
from ebbflow.traces import GENERATORS, Trace

__all__ = [
    "BREAKDOWN", "Interval", "Simulation", "draw_simulations", "reseeded_simulations", "interval_of", "on_demand",
    "comparison_cluster", "reseeded", "simulate",
]  # fmt: skip

Floats = npt.NDArray[np.float64]
_NONE = Seconds(0.0)
_MOST_SEGMENTS = 20_000_000
BREAKDOWN = ("compute", "network", "waiting", "lost", "restart", "checkpoint")
"""What time is spent on, in this order everywhere."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The result of a scenario."""

    scenario: Scenario
    trace: Trace
    """The workers that were paid for."""
    segments: SegmentSteps
    """The segments of constant fleet and batch, by which the runs are numbered."""
    result: SimulatedSteps

    @property
    def time_s(self) -> float:
        """Seconds from the start of training to the end of the last step."""
        return self.result.time

    @cached_property
    def runs(self) -> SimulatedRuns:
        """All steps that count, as sequences of equal steps."""
        return self.result.runs()

    @cached_property
    def steps(self) -> int:
        """Steps that count."""
        return int(self.runs.counts.sum())

    @cached_property
    def samples(self) -> int:
        """Samples of all steps that count."""
        if not self.scenario.cut and self.scenario.noise_scale == math.inf:
            return self.scenario.samples * self.scenario.epochs
        return int(self.runs.counts @ self.runs.sizes)

    @cached_property
    def cost_usd(self) -> float:
        """USD for all workers until the last step ends."""
        return float(cost(self.trace, self.time_s, self.scenario.price, minimum=self.scenario.minimum_billing))

    @property
    def goodput(self) -> float:
        """Reference samples per second: the samples that were needed, divided by the time."""
        return self.scenario.samples * self.scenario.epochs / self.time_s

    @property
    def mean_workers(self) -> float:
        """Mean number of workers that were paid for, over time."""
        worker_seconds = cost_over_time(self.trace, np.array([self.time_s]), FlatPrice(3600.0))
        return float(worker_seconds[0]) / self.time_s

    @property
    def computing(self) -> float:
        """Fraction of the paid worker time that is computing; workers that take part in no step count as idle."""
        worker_seconds = float(np.einsum("i,i", self._step_seconds["compute"], self.segments.workers))
        return worker_seconds / (self.mean_workers * self.time_s)

    @cached_property
    def _step_seconds(self) -> dict[str, Floats]:
        """Seconds of the steps of each segment by what they were spent on."""
        runs, segments = self.runs, self.segments
        # For each segment: the number of steps, and the samples in units of whole steps.
        steps = np.bincount(runs.segments, weights=runs.counts, minlength=len(segments.samples))
        samples = np.bincount(runs.segments, weights=runs.counts * runs.sizes, minlength=len(segments.samples))
        filled = samples / np.maximum(segments.samples, 1)
        return {
            name: empty * steps + (whole - empty) * filled
            for name in ("compute", "network", "waiting")
            for whole, empty in [(getattr(segments.whole, name), getattr(segments.empty, name))]
        }

    @cached_property
    def breakdown(self) -> dict[str, float]:
        """Seconds of the job by what they were spent on; they add up to its time. For the workers see `computing`."""
        result = self.result
        spent = {name: float(seconds.sum()) for name, seconds in self._step_seconds.items()}
        return {
            **spent,
            "waiting": spent["waiting"] + result.waiting,
            "lost": result.lost,
            "restart": result.restart,
            "checkpoint": result.checkpoint,
        }

    def cost_until(self, times: Floats) -> Floats:
        """USD spent up to each time, without what a minimum of billing adds."""
        return cost_over_time(self.trace, times, self.scenario.price)

    def as_json(self) -> dict[str, Any]:
        """The figures, with the keys of `ebbflow simulate --json`."""
        return {
            "time_s": self.time_s,
            "cost_usd": self.cost_usd,
            "steps": self.steps,
            "samples": self.samples,
            "goodput": self.goodput,
            "breakdown": self.breakdown,
        }


def simulate(scenario: Scenario, *, rng: np.random.Generator | None = None) -> Simulation:
    """Simulate a scenario. Without a generator stragglers cost their mean; with one they are drawn.

    A trace that is too short, or on which no step is ever completed, is a PlanError that says how far it reaches.
    """
    paid = base = rented_trace(scenario.trace, offset=scenario.offset, max_workers=scenario.max_workers)
    needed = scenario.work.needed
    times, segments = 1, fleet_segments(scenario, base, rng)
    if scenario.repeat and (most := _most_samples(segments, scenario.work)) < needed:
        times = _repetitions(1 + needed / max(most, 1e-300)) if most else 1
    while True:
        if times > 1:
            _refuse_endless(times, base, needed / times)
            # The first repetition lacks what lies before the offset.
            repeated = scenario.trace.repeat(times)
            paid = rented_trace(repeated, offset=scenario.offset, max_workers=scenario.max_workers)
            segments = fleet_segments(scenario, paid, rng)
        steps, result = _simulate_once(scenario, paid, segments, rng)
        if result.done:
            return Simulation(scenario=scenario, trace=paid, segments=steps, result=result)
        if not scenario.repeat or not result.reference:
            raise PlanError(_too_short(scenario, paid, result.reference / needed))
        times = max(times + 1, _repetitions(1.02 * times * needed / result.reference))


def _simulate_once(
    scenario: Scenario, paid: Trace, segments: Segments, rng: np.random.Generator | None
) -> tuple[SegmentSteps, SimulatedSteps]:
    """The result on this many repetitions of the trace, and the segments by which its runs are numbered."""
    policy = scenario.fleet_policy
    if not isinstance(policy, GrowingPolicy):
        return segments.steps, simulate_segments(segments, scenario.work)
    phases = GrowthPhases(
        policy=policy,
        ref_batch=scenario.ref_batch or policy.initial or 1,
        epoch_samples=scenario.samples,
        most=max(int(segments.steps.samples.max()), 1),
    )
    growing = GrowingSegments(scenario, paid, rng)
    result, used = simulate_growing(phases, growing.part, growing.count, scenario.work)
    return SegmentSteps.joined([part.steps.take(slice(count)) for part, count in used]), result


def _most_samples(segments: Segments, work: TrainingWork) -> float:
    """Reference samples that the segments would give if no time were lost: an upper bound."""
    lengths = np.diff(segments.stops, prepend=0.0)
    return float((lengths / segments.steps.seconds * work.worths(segments.steps.samples)).sum())


def _repetitions(wanted: float) -> int:
    return math.ceil(min(wanted, 1e18))


def _refuse_endless(times: int, base: Trace, each: float) -> None:
    if times * len(base.times) > _MOST_SEGMENTS or not math.isfinite(times * base.end):
        raise PlanError(f"the trace would have to be repeated {times:,} times; one round of {format_seconds(base.end)} "
                        f"gives {each:.3g} samples")  # fmt: skip


def _too_short(scenario: Scenario, paid: Trace, done: float) -> str:
    if not done:
        stats = paid.stats()
        return (
            f"no step is completed in the {format_seconds(paid.end)} of the trace (at most {stats.max} workers, a "
            f"change every {format_seconds(paid.end / (stats.changes + 1))}): steps and restarts take longer than the "
            f"fleet lasts"
        )
    return (
        f"the trace is too short: its {format_seconds(paid.end)} reach "
        f"{math.floor(done * scenario.epochs * 100) / 100:g} of {scenario.epochs} epochs; repeat it "
        f"({called('repeat', True)}), start it earlier or ask for fewer epochs"
    )


# -- beside a cluster on demand ----------------------------------------------------------------------------------------


def on_demand(scenario: Scenario, *, workers: int, usd_per_hour: float, model: StepModel | None = None) -> Simulation:
    """The same training on a constant number of workers at the on-demand price; `model` replaces the step model."""
    if workers < 1:
        raise ConfigError(f"an on-demand cluster of {workers} workers; expected at least 1")
    steady = Trace(np.zeros(1), np.array([workers]), 86400.0, name=f"{workers} on demand")
    return simulate(
        replace(
            scenario, trace=steady, price=FlatPrice(usd_per_hour), recovery=Ideal(), offset=_NONE, repeat=True,
            max_workers=None, model=scenario.model if model is None else model,
        )
    )  # fmt: skip


def comparison_cluster(spot: Simulation, settings: ScenarioSettings) -> Simulation:
    """The on-demand cluster to compare a simulation with; by default it has the mean number of workers of that one."""
    if settings.price is None:
        raise ConfigError(
            f"give the on-demand price of a worker to compare with: {called('price', 2.48)} (USD per hour)"
        )
    step_time = settings.on_demand_step_time
    return on_demand(
        spot.scenario,
        workers=settings.on_demand_workers or max(1, int(spot.mean_workers + 0.5)),
        usd_per_hour=settings.price,
        model=None if step_time is None else parse_step_time(step_time),
    )


# -- Monte Carlo: the same scenario with other draws of trace and stragglers -------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The mean of all draws, and the interval that holds the middle nine tenths of them."""

    mean: float
    low: float
    """One twentieth of the draws lies below."""
    high: float
    """One twentieth of the draws lies above."""


def interval_of(values: Sequence[float]) -> Interval:
    """The interval of one or more values.

    >>> interval_of([1.0, 2.0, 3.0])
    Interval(mean=2.0, low=1.1, high=2.9)
    """
    array = np.asarray(values, dtype=np.float64)
    low, high = np.quantile(array, [0.05, 0.95])
    return Interval(mean=float(array.mean()), low=round(float(low), 12), high=round(float(high), 12))


def reseeded(text: str, seed: int) -> str:
    """The text of a trace generator with another seed; a text without a seed (a file, a constant fleet) is unchanged.

    >>> reseeded("poisson(8, seed=3)", 5), reseeded("constant(8)", 5), reseeded("spot.csv", 5)
    ('poisson(8, seed=5)', 'constant(8)', 'spot.csv')
    >>> reseeded("gcp-a100-like(3, 5h)", 5)
    'gcp-a100-like(5, 5h)'
    """
    try:
        call = parse_call(text)
    except ValueError:  # a file, or the changes themselves
        return text
    names = [name for name, _, _ in GENERATORS.entry(call.name).parameters] if call.name in GENERATORS else []
    return str(GENERATORS.with_arguments(call, {"seed": str(seed)})) if "seed" in names else text


def draw_simulations(scenario_of: Callable[[int], Scenario], seeds: int) -> Iterator[Simulation]:
    """One simulation per seed: of the scenario that the seed gives, with stragglers drawn by the seed."""
    if seeds < 1:
        raise ConfigError(f"{seeds} seeds; expected at least 1")
    for seed in range(seeds):
        try:
            # Not the seed alone, which draws the trace: stragglers must be independent of the trace.
            yield simulate(scenario_of(seed), rng=np.random.default_rng((seed, 1)))
        except PlanError as error:
            raise PlanError(f"seed {seed}: {error}") from None


def reseeded_simulations(settings: ScenarioSettings, trace: str, seeds: int) -> Iterator[Simulation]:
    """Simulations with other seeds of the trace's generator and of the stragglers; refused if there is no chance."""
    if settings.stragglers is None and reseeded(trace, 0) == reseeded(trace, 1):
        raise ConfigError(
            f"{called('seeds')} draws nothing here: the trace has no seed and there are no stragglers; give a "
            f"generator such as 'poisson(8)', or {called('stragglers', 'lognormal(0.1)')}"
        )
    return draw_simulations(lambda seed: settings.scenario(reseeded(trace, seed)), seeds)
