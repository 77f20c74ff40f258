"""What a rule or modifier does, as numbers to draw.

A rule is shown as its multiplier against the batch ratio, one line for each level of noise if it listens to the noise.
A modifier is about time, so it is shown over a run whose batch is 8, then 1, then 8 times the reference batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ebbflow.core.spec import Entry, parse_calls
from ebbflow.moments.estimate import Moments
from ebbflow.rules.base import Modifier, Rule, Scaling, StepContext
from ebbflow.rules.describe import describe
from ebbflow.rules.registry import make_rule

__all__ = ["Curves", "curves"]

NOISE = (0.1, 1.0, 10.0, 100.0)
"""Noise scale over reference batch."""
_REF_BATCH = 1024
_EPOCHS = 30
_PHASES = ((8, 192), (1, 96), (8, 192))
"""(batch ratio, steps) of the run that shows a modifier."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curves:
    """Lines over one axis; all values are positive."""

    title: str
    x_label: str
    x: tuple[float, ...]
    lines: Mapping[str, tuple[float, ...]]
    """Label -> one value for each x."""
    log_x: bool


def curves(entry: Entry[Rule | Modifier], *, points: int = 65) -> Curves:
    """The lines of a rule (at `points` batch ratios from 1/4 to 64) or of a modifier (over the steps of a run)."""
    text = describe(entry).example
    return _over_ratio(text, points) if entry.kind == "rule" else _over_steps(text)


def _over_ratio(text: str, points: int) -> Curves:
    ratios = tuple(2 ** (-2 + 8 * i / (points - 1)) for i in range(points))
    rule = make_rule(text)
    levels: dict[str, float] = {f"phi {phi:g}": phi for phi in NOISE} if rule.needs else {text: 1.0}
    return Curves(
        title=f"multiplier of {text}, with phi = noise scale/B0" if rule.needs else f"multiplier of {text}",
        x_label="batch ratio B/B0",
        x=ratios,
        lines={label: tuple(_settled(rule, ratio, phi) for ratio in ratios) for label, phi in levels.items()},
        log_x=True,
    )


def _moments(phi: float) -> Moments:
    """A model of two like layers."""
    noise = phi * _REF_BATCH
    return Moments(noise=noise, signal=1.0, layer_noise=(noise / 2,) * 2, layer_signal=(0.5,) * 2)


def _settled(rule: Rule, ratio: float, phi: float) -> float:
    """The multiplier late in a run, when a warm-up that the rule may have is over."""
    context = StepContext(
        step=100_000,
        batch=round(ratio * _REF_BATCH),
        ref_batch=_REF_BATCH,
        samples=10**9,
        epoch_samples=10**6,
        total_samples=2 * 10**9,
        moments=_moments(phi),
    )
    return rule.scale(context, rule.init())[0].multiplier


def _over_steps(text: str) -> Curves:
    alone = str(parse_calls(text)[0])
    plain, changed = _run(make_rule(alone)), _run(make_rule(text))
    lines = {alone: [scaling.multiplier for scaling in plain]}
    rates = [sum(scaling.layers) / len(scaling.layers) for scaling in changed]
    lines[f"{text}: rate"] = rates
    # Other things that a scaling holds are drawn where the modifier uses them.
    gradient = [scaling.multiplier / rate for scaling, rate in zip(changed, rates, strict=True)]
    decay = [scaling.weight_decay for scaling in changed]
    lines |= {f"{text}: {what}": y for what, y in (("gradient", gradient), ("decay", decay)) if _differs(y)}
    return Curves(
        title=f"multipliers of {text} over a run whose batch is 8, 1 and 8 times B0",
        x_label="step",
        x=tuple(float(step) for step in range(len(plain))),
        lines={label: tuple(y) for label, y in lines.items()},
        log_x=False,
    )


def _differs(values: Iterable[float]) -> bool:
    return any(abs(value - 1) > 1e-9 for value in values)


def _run(rule: Rule) -> list[Scaling]:
    total = sum(ratio * steps for ratio, steps in _PHASES) * _REF_BATCH
    scalings: list[Scaling] = []
    state, samples = rule.init(), 0
    for ratio in (ratio for ratio, steps in _PHASES for _ in range(steps)):
        context = StepContext(
            step=len(scalings),
            batch=ratio * _REF_BATCH,
            ref_batch=_REF_BATCH,
            samples=samples,
            epoch_samples=total // _EPOCHS,
            total_samples=total,
            moments=_moments(1.0),
        )
        scaling, state = rule.scale(context, state)
        scalings.append(scaling)
        samples += context.batch
    return scalings
