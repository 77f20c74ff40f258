"""From a scenario to stretches of constant fleet: how big their steps are, how long, and what ends them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ebbflow.errors import ConfigError
from ebbflow.plan.steptime import ConstantStepTime
from ebbflow.simulate.fleet import different, provisioned
from ebbflow.simulate.grow import limited
from ebbflow.simulate.legs import Legs
from ebbflow.simulate.recovery import Ideal
from ebbflow.simulate.scenario import EXACT, Scenario
from ebbflow.simulate.stepmodel import Parts, WholeStep
from ebbflow.simulate.stragglers import Stragglers
from ebbflow.traces import Trace

__all__ = ["GrowingStretches", "Steps", "Stretches", "prepare"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What the steps of each stretch are like."""

    workers: Ints
    """That take part."""
    sizes: Ints
    """Samples of a whole step."""
    whole: Parts
    """Of a whole step."""
    empty: Parts
    """Of an empty step."""

    @classmethod
    def joined(cls, parts: Sequence[Steps]) -> Steps:
        """One after the other."""
        return cls(
            workers=np.concatenate([one.workers for one in parts]),
            sizes=np.concatenate([one.sizes for one in parts]),
            whole=Parts.joined([one.whole for one in parts]),
            empty=Parts.joined([one.empty for one in parts]),
        )


@dataclass(frozen=True, kw_only=True)
class Stretches(Steps):
    """Stretches that have not been walked yet."""

    legs: Legs

    def part(self, first: int, stop: int) -> Stretches:
        """From one stretch up to but without another."""
        within = slice(first, stop)
        return Stretches(
            workers=self.workers[within],
            sizes=self.sizes[within],
            whole=self.whole.take(within),
            empty=self.empty.take(within),
            legs=self.legs.part(first, stop),
        )


def prepare(scenario: Scenario, paid: Trace, rng: np.random.Generator | None) -> Stretches:
    """The stretches over the paid workers; of a growing batch what the workers could do in them."""
    ready = provisioned(paid, scenario.provisioning)
    return _stretches(scenario, ready.workers, ready.times, ready.end, rng)


class GrowingStretches:
    """The stretches of a batch that grows, made for the part of the trace and the wish that are asked for.

    Neighbours that mean the same step are not joined: whether they do depends on the wish.
    """

    def __init__(self, scenario: Scenario, paid: Trace, rng: np.random.Generator | None) -> None:
        self.scenario, self.rng = scenario, rng
        self.ready = provisioned(paid, scenario.provisioning)
        self.count = len(self.ready.times)

    def part(self, requested: int, first: int, stop: int) -> Stretches:
        """From one stretch up to but without another, in steps of at most `requested` samples."""
        low, high = max(first - 1, 0), min(stop + 1, self.count)  # what a change costs is seen from both sides
        end = self.ready.end if high == self.count else float(self.ready.times[high])
        counts, times = self.ready.workers[low:high], self.ready.times[low:high]
        return _stretches(self.scenario, counts, times, end, self.rng, requested=requested).part(
            first - low, stop - low
        )


def _stretches(
    scenario: Scenario, counts: Ints, times: Floats, end: float, rng: np.random.Generator | None, *,
    requested: int | None = None,
) -> Stretches:  # fmt: skip
    """Of so many workers from each of the times on. `requested`: no step has more samples, and neighbours stay
    apart."""
    levels, level = different(counts)  # a step is worked out once for each size of the fleet
    workers, samples = scenario.policy.sizes(levels)
    if requested is not None:
        workers, samples = limited(workers, samples, requested)
    if int(samples.max()) > EXACT or int(samples.min()) < 0:  # beyond 2^63 a product of whole numbers turns negative
        raise ConfigError("a step has more than 2^53 samples; check the local batch and the number of workers")
    someone = np.maximum(workers, 1)
    whole, empty = scenario.model.parts(someone, samples), scenario.model.parts(someone, np.zeros_like(samples))
    if not (np.isfinite(whole.total).all() and (whole.total[samples > 0] > 0).all()):
        raise ConfigError("the step model gives a time that is zero or not finite; check its times")
    if requested is None:
        same = (workers[level][1:] == workers[level][:-1]) & (samples[level][1:] == samples[level][:-1])
        kept = np.append(True, ~same)
        times, level = times[kept], level[kept]
    stops = np.append(times[1:], end)
    workers, samples, whole, empty = workers[level], samples[level], whole.take(level), empty.take(level)
    if scenario.stragglers is not None:
        whole, empty = _slowed(scenario.stragglers, np.maximum(workers, 1), whole, empty, stops - times, rng)
    seconds = np.where(samples > 0, whole.total, 1.0)  # where nobody is there a step may take no time: any will do
    constant = isinstance(scenario.model, WholeStep) and isinstance(scenario.model.step_time, ConstantStepTime)
    plan_like = constant and scenario.stragglers is None and scenario.recovery == Ideal()
    legs = Legs(
        stops=stops,
        samples=samples,
        seconds=seconds,
        empty=empty.total,
        reaction=scenario.recovery.react(workers, seconds),
        grid=float(whole.total[0]) if plan_like else 0.0,
    )
    return Stretches(legs=legs, workers=workers, sizes=samples, whole=whole, empty=empty)


def _slowed(
    stragglers: Stragglers, workers: Ints, whole: Parts, empty: Parts, lengths: Floats, rng: np.random.Generator | None
) -> tuple[Parts, Parts]:
    """The parts with the wait for the slowest worker; drawn, a stretch has the mean of its many steps."""
    mean, variance = stragglers.slowest(workers)
    if rng is not None:
        steps = np.maximum(lengths / np.maximum(whole.total * mean, 1e-12), 1.0)
        mean = _drawn(mean, variance / steps, steps, rng)
    return tuple(replace(parts, waiting=parts.waiting + parts.compute * (mean - 1.0)) for parts in (whole, empty))  # type: ignore[return-value]


def _drawn(mean: Floats, variance: Floats, steps: Floats, rng: np.random.Generator) -> Floats:
    """Factors by which stretches of so many steps are slower, such that trainings are right on average.

    A stretch of length L that is slow has fewer steps, not a longer time, so it is their number n that must be right.
    The last one ends somewhere within a step after the stretch: a factor f gives (L - step E[f] / 2) / (step f) + 1/2
    steps. With ln f normal, of variance ln(1 + v) where v is the relative variance, the `drift` makes that n on
    average. A factor may then be below 1 where steps are few; cut off there, all together would be too slow.
    In a stretch no longer than a step each step has a draw of its own, with the mean and the variance of one step.
    """
    relative = np.log1p(variance / mean**2)
    drift = relative / 2 - np.log1p(np.expm1(relative) / (2 * steps))
    several = mean * np.exp(np.sqrt(relative) * rng.standard_normal(len(mean)) + drift)
    above = mean - 1.0
    some = (above > 0) & (variance > 0)
    scale = np.divide(variance, above, out=np.ones_like(mean), where=some)
    single = 1.0 + np.where(some, rng.gamma(np.where(some, above / scale, 1.0), scale), above)
    return np.where(steps > 1, several, single)
