"""What it took to reach a target: epochs, updates and time until the first validation that is at least as good.

Ko et al. (2022, Table 1) compare rules by these numbers, with the score of the single worker as the target. A target is
a score as recorded, or a multiple of the score of the *baseline*: the runs whose every batch is the reference batch, a
single worker at the rate that was tuned for it. Speed-ups are over the same runs.

A run that never reaches the target is counted, and is in no mean.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ebbflow.errors import ConfigError
from ebbflow.report.published import PublishedValue
from ebbflow.report.results import ArmResult

__all__ = ["CLOCK", "QUANTITIES", "Target", "ToTarget", "at_reference_batch", "effort_to", "parse_target", "speed_ups"]

QUANTITIES = ("epochs", "updates", "samples", "time_s", "wall_s", "worker_hours")
"""What is measured of every run that reaches a target; simulated times come beside it, by the name of their clock."""

CLOCK = "clock:"
"""Prefix of the names of clocks among the `values` of `ToTarget`: a clock may have any name."""


@dataclass(frozen=True)
class Target:
    """A score to reach, or a multiple of the baseline's score."""

    value: float
    relative: bool = False

    def __str__(self) -> str:
        return f"{self.value:g}x" if self.relative else f"{self.value:g}"


def parse_target(text: str) -> Target:
    """A score as recorded ("0.95"), or a multiple of the baseline's ("0.99x").

    >>> parse_target("0.99x")
    Target(value=0.99, relative=True)
    """
    relative = text.strip().endswith("x")
    try:
        value = float(text.strip().removesuffix("x"))
    except ValueError:
        raise ConfigError(
            f"the target {text!r} is no score; write 0.95 for 95 % accuracy, or 0.99x for 99 % of the score at the "
            f"reference batch"
        ) from None
    return Target(value, relative)


@dataclass(frozen=True, kw_only=True)
class ToTarget:
    """What the runs of one cell took to a target."""

    asked: Target
    target: float
    """The score, as recorded."""
    runs: int
    """Runs that finished or diverged. A run that diverged counts as one that does not reach the target."""
    seeds: tuple[int, ...] = ()
    """The seeds that reach it."""
    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """One value per seed that reaches it: of `QUANTITIES`, and of each clock."""
    speed_ups: Mapping[str, float] = field(default_factory=dict)
    """The mean of the baseline divided by that of this cell, where every run of both reaches the target."""
    published: Mapping[str, PublishedValue] = field(default_factory=dict)
    """What a paper reports for this target, by the names of `QUANTITIES`."""
    sources: tuple[str, ...] = ()
    """The sources of what is published."""

    @property
    def reached(self) -> int:
        """How many runs reach it."""
        return len(self.seeds)

    def mean(self, name: str) -> float | None:
        """Mean over the runs that reach the target; None if none does, never infinity."""
        values = self.values.get(name)
        return statistics.fmean(values) if values else None

    def std(self, name: str) -> float | None:
        """Sample standard deviation over the runs that reach the target; None with fewer than two."""
        values = self.values.get(name, ())
        return statistics.stdev(values) if len(values) > 1 else None

    def as_json(self) -> dict[str, Any]:
        """The entry of `targets` in `ebbflow report --json`."""

        def numbers(name: str) -> dict[str, Any]:
            return {
                "mean": self.mean(name),
                "std": self.std(name),
                "values": list(self.values.get(name, ())),
                "speed_up": self.speed_ups.get(name),
            }

        clocks = [name for name in self.values if name not in QUANTITIES]
        return {
            "asked": str(self.asked),
            "target": self.target,
            "runs": self.runs,
            "reached": self.reached,
            "seeds": list(self.seeds),
            **{name: numbers(name) for name in QUANTITIES},
            "simulated": {name.removeprefix(CLOCK): numbers(name) for name in clocks},
            "published": dict(self.published),
        }


def effort_to(asked: Target, score: float, ended: Sequence[ArmResult], finished: Sequence[ArmResult]) -> ToTarget:
    """What the `finished` of the `ended` runs took to this score."""
    there = [(arm, i) for arm in finished if (i := arm.first_at(score)) is not None]
    columns: dict[str, Callable[[ArmResult, int], float]] = {
        "epochs": lambda arm, i: arm.epochs[i],
        "updates": lambda arm, i: arm.updates[i],
        "samples": lambda arm, i: arm.counts[i],
        "time_s": lambda arm, i: arm.times[i],
        "wall_s": lambda arm, i: arm.walls[i],
        "worker_hours": lambda arm, i: arm.worker_hours(arm.times[i]),
    }
    values = {name: tuple(float(take(arm, i)) for arm, i in there) for name, take in columns.items()}
    for name in dict.fromkeys(name for arm in ended for name in arm.simulated):
        values[CLOCK + name] = tuple(float(arm.simulated[name][i]) for arm, i in there)
    return ToTarget(
        asked=asked, target=score, runs=len(ended), seeds=tuple(arm.seed for arm, _ in there), values=values
    )


def at_reference_batch(arm: ArmResult) -> bool:
    """Whether the steps have the reference batch, except for smaller ones at the ends of epochs."""
    if not arm.steps or arm.ref_batch is None:
        return False
    batch = arm.columns["batch"]
    return bool(batch.max() == arm.ref_batch == np.median(batch))


def speed_ups(own: ToTarget, baseline: ToTarget | None) -> dict[str, float]:
    """How many times less than the baseline, for each quantity; empty unless every run of both reaches the target."""
    if baseline is None or own.reached < own.runs or baseline.reached < baseline.runs:
        return {}
    pairs = {name: (baseline.mean(name), own.mean(name)) for name in own.values}
    return {name: before / now for name, (before, now) in pairs.items() if before and now and math.isfinite(now)}
