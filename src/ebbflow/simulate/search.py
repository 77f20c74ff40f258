"""Many scenarios: comparing fleets, the best setting for a deadline or a budget, and how sensitive the answer is."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ebbflow.core.units import Seconds, format_seconds
from ebbflow.core.wording import called
from ebbflow.errors import ConfigError, PlanError
from ebbflow.plan.goodput import BatchValue, FurtherWorker, further_worker, value_of
from ebbflow.plan.policies import Policy, computed_samples, make_policy, sizes_of
from ebbflow.plan.steptime import ConstantStepTime
from ebbflow.simulate.prices import ScaledPrice, usd_until
from ebbflow.simulate.scenario import LARGEST_EXACT, Scenario, ScenarioSettings
from ebbflow.simulate.simulation import Simulation, comparison_cluster, simulate
from ebbflow.simulate.step_models import StepBreakdown, StepModel, WholeStep

__all__ = [
    "Goal", "Outcome", "SearchResult", "Setting", "best_outcome", "check_step_time", "compare_fleets", "find_setting",
    "outcomes", "pareto", "round_to_cents", "sensitivity", "settings_grid", "worth_of_workers",
]  # fmt: skip

Ints = npt.NDArray[np.int64]
_MOST_SETTINGS = 1_000_000


def round_to_cents(usd: float) -> float:
    """Money as it is shown: of two settings that cost the same to the cent, the faster one is better."""
    return round(usd, 2)


def pareto(points: Sequence[tuple[float, float]]) -> list[bool]:
    """For each point, whether no other is at least as small in both coordinates and smaller in one.

    >>> pareto([(1, 5), (2, 2), (3, 3), (5, 1), (2, 2)])
    [True, True, False, True, True]
    """
    order = sorted(range(len(points)), key=lambda i: points[i])
    front, least, last = [False] * len(points), math.inf, (math.nan, math.nan)
    for i in order:
        if points[i][1] < least or points[i] == last:
            front[i], least, last = True, points[i][1], points[i]
    return front


# -- compare -----------------------------------------------------------------------------------------------------------


def compare_fleets(
    settings: ScenarioSettings, traces: Sequence[str], *, policies: Sequence[str], recoveries: Sequence[str],
    prices: Sequence[str] = (), progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> dict[str, Simulation]:  # fmt: skip
    """All combinations by name, and on-demand clusters if the settings have an on-demand price.

    `prices` holds one price for all traces, or one for each. Names begin with the trace; policy and recovery follow
    where there are several. `progress` wraps the sequence of combinations, to show how far the comparison is.
    """
    if len(prices) > 1 and len(prices) != len(traces):
        raise ConfigError(f"{len(prices)} spot prices for {len(traces)} traces; give one, or one for each trace")
    of_a_cluster = {
        called("on_demand_workers"): settings.on_demand_workers,
        called("on_demand_step_time"): settings.on_demand_step_time,
    }
    if settings.price is None and (given := [name for name, value in of_a_cluster.items() if value is not None]):
        raise ConfigError(
            f"{given[0]} is for an on-demand cluster, which is compared only if its workers have a price; give it, "
            f"such as {called('price', 2.48)}, or leave {given[0]} out"
        )
    each = list(prices) if len(prices) == len(traces) else [prices[0] if prices else None] * len(traces)
    fleets = [(trace, price, _fleet_name(trace, price, traces)) for trace, price in zip(traces, each, strict=True)]
    scenarios: dict[str, tuple[tuple[str, str], Scenario]] = {}
    for (trace, price, fleet), policy, recovery in itertools.product(fleets, policies, recoveries):
        words = [word for word, axis in ((policy, policies), (recovery, recoveries)) if len(set(axis)) > 1]
        name = " · ".join([fleet, *words])
        if name in scenarios:
            raise ConfigError(f"{name} is given twice; each trace, policy and recovery is compared once")
        scenario = replace(settings, policy=policy, recovery=recovery, spot_price=price).scenario(trace)
        scenarios[name] = (fleet, policy), scenario
    check_step_time([(name, scenario) for name, (_, scenario) in scenarios.items()])
    found: dict[str, Simulation] = {}
    clusters: dict[tuple[str, str], Simulation] = {}
    for name, (key, scenario) in progress([*scenarios.items()]):
        try:
            one = found[name] = simulate(scenario)
            _ = one.cost_usd  # computed here, so that the error for prices that end too early has the name
        except PlanError as error:
            raise PlanError(f"{name}: {error}") from None
        if settings.price is not None and key not in clusters:
            clusters[key] = comparison_cluster(one, settings)
    for (_, policy), cluster in clusters.items():  # traces with clusters of one size share a row
        label = f"{int(cluster.trace.workers[0])} on demand"
        found.setdefault(label if len(policies) == 1 else f"{label} · {policy}", cluster)
    return found


def _fleet_name(trace: str, price: str | None, traces: Sequence[str]) -> str:
    """The trace, without its folder if no other file has its name; with the price if it is compared at several."""
    same = {other for other in traces if Path(other).name == Path(trace).name}
    name = Path(trace).name if len(same) == 1 and Path(trace).exists() else trace
    return f"{name} at {price}" if price is not None and list(traces).count(trace) > 1 else name


# -- what if -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a user can choose."""

    max_workers: int | None
    """The largest number of workers to rent; None: all that the trace has."""
    local_batch: int | None
    policy: str

    def apply(self, scenario: Scenario) -> Scenario:
        """The scenario with this setting."""
        return replace(scenario, max_workers=self.max_workers, policy=_policy(self.policy, self.local_batch))

    def __str__(self) -> str:
        fleet = "all workers" if self.max_workers is None else f"at most {self.max_workers} workers"
        return f"{fleet}, {_policy(self.policy, self.local_batch)}"


@lru_cache(maxsize=4096)
def _policy(text: str, local_batch: int | None) -> Policy:
    """A policy, parsed once for all settings that share it."""
    return make_policy(text, local_batch=local_batch)


def settings_grid(
    max_workers: Sequence[int | None], local_batches: Sequence[int | None], policies: Sequence[str]
) -> list[Setting]:
    """All combinations; None leaves the workers, or the local batch, as the scenario has them."""
    count = len(max_workers) * len(local_batches) * len(policies)
    if count > _MOST_SETTINGS:
        raise ConfigError(f"{count:,} settings are too many; expected at most {_MOST_SETTINGS:,}")
    return [
        Setting(max_workers=workers, local_batch=local, policy=policy)
        for policy, local, workers in itertools.product(policies, local_batches, max_workers)
    ]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Time and cost of a setting, or of a variation of one; infinite if it does not come to an end."""

    name: str
    time_s: float
    cost_usd: float
    setting: Setting | None = None

    def as_json(self) -> dict[str, Any]:
        """The outcome as `ebbflow whatif --json` prints it."""
        setting = {} if self.setting is None else {"setting": dataclasses.asdict(self.setting)}
        finite = math.isfinite(self.time_s)
        return {
            "name": self.name,
            **setting,
            "time_s": self.time_s if finite else None,
            "cost_usd": self.cost_usd if finite else None,
        }


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The cheapest setting within a deadline (seconds), or the fastest within a budget (USD)."""

    deadline: float | None = None
    budget: float | None = None

    def __post_init__(self) -> None:
        if (self.deadline is None) == (self.budget is None):
            raise ConfigError("give a deadline (the cheapest setting that ends before it) or a budget (the fastest "
                              "that costs no more), one of the two")  # fmt: skip
        limit = self.deadline if self.deadline is not None else self.budget
        assert limit is not None
        if not limit > 0:
            raise ConfigError(f"a limit of {limit:g} cannot be met; expected a deadline or a budget above 0")

    def met(self, outcome: Outcome) -> bool:
        """Whether the outcome is within the limit."""
        if self.deadline is not None:
            return outcome.time_s <= self.deadline
        assert self.budget is not None
        return outcome.cost_usd <= self.budget

    def order(self, outcome: Outcome) -> tuple[float, ...]:
        """What should be small: the cost in whole cents within a deadline, the time within a budget."""
        if self.deadline is not None:
            return round_to_cents(outcome.cost_usd), outcome.time_s, outcome.cost_usd
        return outcome.time_s, outcome.cost_usd

    def refusal(self, found: Sequence[Outcome]) -> str:
        """Why no setting meets the goal, and the one that comes closest."""
        if self.deadline is not None:
            closest = min(found, key=lambda one: (one.time_s, one.cost_usd))
            limit, what = f"ends within {format_seconds(self.deadline)}", "the fastest"
        else:
            closest = min(found, key=lambda one: (one.cost_usd, one.time_s))
            limit, what = f"costs at most {self.budget:,.2f} USD", "the cheapest"
        return (
            f"none of {len(found):,} settings {limit}; {what} takes {format_seconds(closest.time_s)} and costs "
            f"{closest.cost_usd:,.2f} USD: {closest.name}"
        )


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The best setting for a goal, what the answer depends on, and the alternatives."""

    goal: Goal
    best: Outcome
    variations: list[Outcome]
    """The best setting with one assumption changed at a time."""
    front: list[Outcome]
    """The settings than which no other is both faster and cheaper, the fastest first."""
    tried: int
    ended: int
    """Settings that came to an end on the trace and within the prices."""
    worth: list[FurtherWorker]
    """What a further worker is worth at several sizes of the fleet (`worth_of_workers`)."""

    def as_json(self) -> dict[str, Any]:
        """What `ebbflow whatif --json` prints."""
        return {
            **self.best.as_json(),
            "goal": {"deadline_s": self.goal.deadline, "budget_usd": self.goal.budget},
            "settings": {"tried": self.tried, "ended": self.ended},
            "sensitivity": [{**one.as_json(), "met": self.goal.met(one)} for one in self.variations],
            "pareto": [one.as_json() for one in self.front],
            "worth": [dataclasses.asdict(one) for one in self.worth],
        }


def find_setting(
    scenario: Scenario, settings: Sequence[Setting], goal: Goal,
    *, progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> SearchResult:  # fmt: skip
    """Try all settings and choose the best; a PlanError says what comes closest if none meets the goal.

    `progress` wraps the outcomes, to show how far the search is.
    """
    fleets = [setting.max_workers or LARGEST_EXACT for setting in settings]  # the ends of a long list are enough
    some = [one for one, fleet in zip(settings, fleets, strict=True) if fleet in (min(fleets), max(fleets))]
    check_step_time([(str(setting), setting.apply(scenario)) for setting in some])
    results: list[Outcome | PlanError] = list(progress(outcomes(scenario, settings)))
    found = [one for one in results if isinstance(one, Outcome)]
    if not found and results:
        many = f"none of {len(results):,} settings comes to an end; the first: " if len(results) > 1 else ""
        raise PlanError(f"{many}{results[0]}")
    best = best_outcome(found, goal)
    assert best.setting is not None
    in_front = pareto([(one.time_s, round_to_cents(one.cost_usd)) for one in found])
    return SearchResult(
        goal=goal,
        best=best,
        variations=sensitivity(best.setting.apply(scenario)),
        front=sorted(itertools.compress(found, in_front), key=lambda one: one.time_s),
        tried=len(settings),
        ended=len(found),
        worth=worth_of_workers(best.setting.apply(scenario), until=best.time_s),
    )


def check_step_time(scenarios: Sequence[tuple[str, Scenario]]) -> None:
    """Refuse scenarios with different local batches and one constant step time, which makes a larger batch free.

    The largest worker batches on the trace are compared: smaller ones, by a policy that limits the batch, take no
    longer than the measured step.
    """
    found: dict[int, str] = {}
    for name, scenario in scenarios:
        if isinstance(scenario.model, WholeStep) and isinstance(scenario.model.step_time, ConstantStepTime):
            levels = np.unique(np.minimum(scenario.trace.workers, scenario.max_workers or LARGEST_EXACT))
            workers, samples = sizes_of(scenario.policy, levels)
            computed = computed_samples(scenario.policy, workers, samples)
            largest = int((-(-computed // np.maximum(workers, 1))).max())
            found.setdefault(largest, name)
    if len(found) > 1:
        (low, one), *_, (high, other) = sorted(found.items())
        raise ConfigError(
            f"a step time was measured with one local batch, but a worker takes {low} samples in {one!r} and {high} in "
            f"{other!r}; the larger batch would cost nothing. Give {called('profile')} (ebbflow profile measures "
            f"several local batches), or {called('compute_step')} and {called('compute_sample')}; or ask for one local "
            f"batch at a time"
        )


def outcomes(scenario: Scenario, settings: Iterable[Setting]) -> Iterator[Outcome | PlanError]:
    """The outcome of each setting, in order; the error if the trace or the prices are too short for it."""
    for setting in settings:
        try:
            found = simulate(setting.apply(scenario))
            outcome = Outcome(name=str(setting), setting=setting, time_s=found.time_s, cost_usd=found.cost_usd)
        except PlanError as error:
            yield error
        else:
            yield outcome


def best_outcome(found: Sequence[Outcome], goal: Goal) -> Outcome:
    """The best outcome within the limit, or a PlanError that says what comes closest."""
    if not found:
        raise PlanError(
            f"no setting comes to an end on this trace; repeat it ({called('repeat', True)}) or ask for fewer epochs"
        )
    within = [one for one in found if goal.met(one)]
    if not within:
        raise PlanError(goal.refusal(found))
    return min(within, key=goal.order)


# -- what a worker is worth --------------------------------------------------------------------------------------------


def worth_of_workers(scenario: Scenario, *, until: float) -> list[FurtherWorker]:
    """What one further worker is worth with 1, 2, 4, ... workers, up to the largest fleet of the scenario.

    Nothing without a noise scale. All workers are paid, at their mean price over the first `until` seconds. A growing
    policy counts with the largest batch that the workers can do.
    """
    if scenario.noise_scale == math.inf:
        return []
    most = min(scenario.trace.stats().max, scenario.max_workers or LARGEST_EXACT)
    rented = np.array(sorted({*itertools.takewhile(lambda n: n < most, (2**k for k in range(63))), most}))
    price = float(usd_until(scenario.price, np.array([until]))[0]) / until * 3600

    def values(fleets: Ints) -> Iterator[BatchValue]:
        workers, samples = sizes_of(scenario.fleet_policy, fleets)
        spent = scenario.model.breakdown(workers, samples)
        slowest = 1.0 if scenario.stragglers is None else scenario.stragglers.slowest(workers)[0]
        seconds = spent.total + spent.compute * (slowest - 1.0)
        for count, batch, time in zip(fleets.tolist(), samples.tolist(), seconds.tolist(), strict=True):
            yield value_of(
                count, batch, time, noise_scale=scenario.noise_scale, ref_batch=scenario.ref_batch or 1, price=price
            )

    return [further_worker(now, more) for now, more in zip(values(rented), values(rented + 1), strict=True)]


# -- sensitivity -------------------------------------------------------------------------------------------------------


def sensitivity(scenario: Scenario, *, share: float = 0.1) -> list[Outcome]:
    """The scenario with one thing changed at a time: steps, price, fleet, noise scale, beginning."""
    up, down = 1 + share, 1 - share
    percent = f"{share:.0%}"
    variations: list[tuple[str, Callable[[], Scenario]]] = [
        (f"steps {percent} slower", lambda: replace(scenario, model=_scaled(scenario.model, up))),
        (f"steps {percent} faster", lambda: replace(scenario, model=_scaled(scenario.model, down))),
        (f"price {percent} higher", lambda: replace(scenario, price=ScaledPrice(scenario.price, up))),
        (f"price {percent} lower", lambda: replace(scenario, price=ScaledPrice(scenario.price, down))),
        (f"fleet {percent} smaller", lambda: replace(scenario, trace=scenario.trace.scale(workers=down))),
        (f"fleet {percent} larger", lambda: replace(scenario, trace=scenario.trace.scale(workers=up))),
    ]
    if scenario.noise_scale < math.inf:
        variations += [
            ("half the noise scale", lambda: replace(scenario, noise_scale=scenario.noise_scale / 2)),
            ("twice the noise scale", lambda: replace(scenario, noise_scale=scenario.noise_scale * 2)),
        ]
    for part in (0.25, 0.5, 0.75):
        later = scenario.offset + part * (scenario.trace.end - scenario.offset)
        variations.append(
            (
                f"begun {format_seconds(later)} into the trace",
                lambda later=later: replace(scenario, offset=later),  # type: ignore[misc]
            )
        )
    found = []
    for name, vary in variations:
        try:
            result = simulate(vary())
            outcome = Outcome(name=name, time_s=result.time_s, cost_usd=result.cost_usd)
        except PlanError:
            outcome = Outcome(name=name, time_s=math.inf, cost_usd=math.inf)
        found.append(outcome)
    return found


@dataclass(frozen=True)
class _ScaledModel:
    """A step model whose times are all multiplied by a factor."""

    model: StepModel
    factor: float

    def breakdown(self, workers: Ints, samples: Ints) -> StepBreakdown:
        found = self.model.breakdown(workers, samples)
        return StepBreakdown(
            compute=found.compute * self.factor,
            network=found.network * self.factor,
            waiting=found.waiting * self.factor,
        )


def _scaled(model: StepModel, factor: float) -> StepModel:
    """A constant step time stays one: only then are steps on a grid, as in a plan."""
    if isinstance(model, WholeStep) and isinstance(model.step_time, ConstantStepTime):
        return WholeStep(ConstantStepTime(Seconds(model.step_time.step * factor)))
    return _ScaledModel(model, factor)
