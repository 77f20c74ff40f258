"""Which of many settings: the cheapest before a deadline, the fastest within a budget, and what the answer hangs on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ebbflow.core.units import Seconds, format_seconds
from ebbflow.errors import ConfigError, PlanError
from ebbflow.plan.policies import Policy, make_policy
from ebbflow.plan.steptime import ConstantStepTime
from ebbflow.simulate.prices import ScaledPrice
from ebbflow.simulate.scenario import Scenario
from ebbflow.simulate.simulate import simulate
from ebbflow.simulate.stepmodel import Parts, StepModel, WholeStep

__all__ = ["Goal", "Outcome", "Setting", "best", "outcomes", "pareto", "sensitivity", "to_the_cent"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What can be chosen."""

    max_workers: int | None
    """Rent no more than so many; None: all that the trace has."""
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
    """Read once, not for each of the many settings that share it."""
    return make_policy(text, local_batch=local_batch)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a setting, or a variation of one, comes to."""

    name: str
    time_s: float
    cost_usd: float
    setting: Setting | None = None


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The cheapest before a deadline (seconds), or the fastest within a budget (USD)."""

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
        """What is to be small: cost under a deadline, to the cent, for nobody waits for less; time under a budget."""
        if self.deadline is not None:
            return to_the_cent(outcome.cost_usd), outcome.time_s, outcome.cost_usd
        return outcome.time_s, outcome.cost_usd

    def refuse(self, found: Sequence[Outcome]) -> str:
        """Why no setting will do, and the best that can be had."""
        if self.deadline is not None:
            closest = min(found, key=lambda one: (one.time_s, one.cost_usd))
            wish, what = f"ends within {format_seconds(self.deadline)}", "the fastest"
        else:
            closest = min(found, key=lambda one: (one.cost_usd, one.time_s))
            wish, what = f"costs at most {self.budget:,.2f} USD", "the cheapest"
        return (
            f"none of {len(found):,} settings {wish}; {what} takes {format_seconds(closest.time_s)} and costs "
            f"{closest.cost_usd:,.2f} USD: {closest.name}"
        )


def outcomes(scenario: Scenario, settings: Iterable[Setting]) -> Iterator[Outcome | PlanError]:
    """What each setting comes to, in order; one for which the trace or the prices are too short gives the error."""
    for setting in settings:
        try:
            found = simulate(setting.apply(scenario))
            outcome = Outcome(name=str(setting), setting=setting, time_s=found.time_s, cost_usd=found.cost_usd)
        except PlanError as error:
            yield error
        else:
            yield outcome


def best(found: Sequence[Outcome], goal: Goal) -> Outcome:
    """The best outcome within the limit, or a PlanError that says the best that can be had."""
    if not found:
        raise PlanError("no setting comes to an end on this trace; repeat it (--repeat) or ask for fewer epochs")
    within = [one for one in found if goal.met(one)]
    if not within:
        raise PlanError(goal.refuse(found))
    return min(within, key=goal.order)


def to_the_cent(usd: float) -> float:
    """Money as it is shown: of two settings that cost the same to the cent, the faster one is better."""
    return round(usd, 2)


def pareto(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Whether no other point is at least as good in both coordinates and better in one; small is good.

    >>> pareto([(1, 5), (2, 2), (3, 3), (5, 1), (2, 2)])
    [True, True, False, True, True]
    """
    order = sorted(range(len(points)), key=lambda i: points[i])
    front, least, last = [False] * len(points), float("inf"), (float("nan"), float("nan"))
    for i in order:
        if points[i][1] < least or points[i] == last:
            front[i], least, last = True, points[i][1], points[i]
    return front


@dataclass(frozen=True)
class _Scaled:
    """A step model whose times are all multiplied."""

    model: StepModel
    factor: float

    def parts(self, workers: Ints, samples: Ints) -> Parts:
        found = self.model.parts(workers, samples)
        return Parts(
            compute=found.compute * self.factor,
            network=found.network * self.factor,
            waiting=found.waiting * self.factor,
        )


def _scaled(model: StepModel, factor: float) -> StepModel:
    """A constant step time stays one: only then are steps on a grid, as in a plan."""
    if isinstance(model, WholeStep) and isinstance(model.step_time, ConstantStepTime):
        return WholeStep(ConstantStepTime(Seconds(model.step_time.step * factor)))
    return _Scaled(model, factor)


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
    if scenario.noise_scale < float("inf"):
        variations += [
            ("half the noise scale", lambda: replace(scenario, noise_scale=scenario.noise_scale / 2)),
            ("twice the noise scale", lambda: replace(scenario, noise_scale=scenario.noise_scale * 2)),
        ]
    for part in (0.25, 0.5, 0.75):
        later = scenario.offset + part * (scenario.trace.end - scenario.offset)
        variations.append(
            (
                f"begun {format_seconds(later)} into the trace",
                lambda later=later: replace(scenario, offset=later, repeat=True),  # type: ignore[misc]
            )
        )
    found = []
    for name, vary in variations:
        try:
            result = simulate(vary())
            outcome = Outcome(name=name, time_s=result.time_s, cost_usd=result.cost_usd)
        except PlanError:
            outcome = Outcome(name=name, time_s=float("inf"), cost_usd=float("inf"))
        found.append(outcome)
    return found
