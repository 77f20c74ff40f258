"""Chance by seeds: the same scenario with other draws of trace and stragglers, and the interval of what comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ebbflow.core.spec import Call, parse_call
from ebbflow.errors import ConfigError, PlanError
from ebbflow.simulate.scenario import Scenario
from ebbflow.simulate.simulate import Simulation, simulate
from ebbflow.traces import GENERATORS

__all__ = ["Interval", "draws", "interval", "reseeded"]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The mean, and the middle nine tenths of all draws."""

    mean: float
    low: float
    """A twentieth of the draws lie below."""
    high: float
    """A twentieth of the draws lie above."""


def interval(values: Sequence[float]) -> Interval:
    """Of at least one value.

    >>> interval([1.0, 2.0, 3.0])
    Interval(mean=2.0, low=1.1, high=2.9)
    """
    array = np.asarray(values, dtype=np.float64)
    low, high = np.quantile(array, [0.05, 0.95])
    return Interval(mean=float(array.mean()), low=round(float(low), 12), high=round(float(high), 12))


def reseeded(text: str, seed: int) -> str:
    """The text of a trace generator with another seed; what has no seed (a file, a constant fleet) stays as it is.

    >>> reseeded("poisson(8, seed=3)", 5), reseeded("constant(8)", 5), reseeded("spot.csv", 5)
    ('poisson(8, seed=5)', 'constant(8)', 'spot.csv')
    >>> reseeded("gcp-a100-like(3, 5h)", 5)
    'gcp-a100-like(5, 5h)'
    """
    try:
        call = parse_call(text)
    except ValueError:  # a file, or the changes themselves
        return text
    if call.name not in GENERATORS or "seed" not in {name for name, _, _ in GENERATORS.entry(call.name).parameters}:
        return text
    names = [name for name, _, _ in GENERATORS.entry(call.name).parameters]
    at = names.index("seed")
    if at < len(call.args):
        return str(Call(call.name, (*call.args[:at], str(seed), *call.args[at + 1 :]), call.kwargs))
    kwargs = tuple((key, value) for key, value in call.kwargs if key != "seed")
    return str(Call(call.name, call.args, (*kwargs, ("seed", str(seed)))))


def draws(scenario_of: Callable[[int], Scenario], seeds: int, *, first: int = 0) -> Iterator[Simulation]:
    """One simulation a seed: the scenario that it gives, with stragglers drawn by it."""
    if seeds < 1:
        raise ConfigError(f"{seeds} seeds; expected at least 1")
    for seed in range(first, first + seeds):
        try:
            # Not the seed alone: the trace is drawn by that, and stragglers shall not follow it.
            yield simulate(scenario_of(seed), rng=np.random.default_rng((seed, 1)))
        except PlanError as error:
            raise PlanError(f"seed {seed}: {error}") from None
