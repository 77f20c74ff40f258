"""Quantities with units: durations in seconds, amounts of training, samples and dollars.

Two kinds of quantities are parsed from text. A *duration* is time on a clock ("90s", "1.5h", "1h30m"). A *span* is an
amount of training ("5ep", "1000steps", "64000samples"); its steps are steps of the reference batch, so that a span is
the same number of samples whatever the workers do.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from operator import index
from typing import Any, Literal, NewType

from ebbflow.errors import ConfigError, InputError, UnitError

__all__ = [
    "MOST_SAMPLES", "MOST_SEED", "Samples", "Seconds", "Span", "Usd", "format_seconds", "parse_seconds", "parse_span",
    "plural", "whole_number",
]  # fmt: skip

Seconds = NewType("Seconds", float)
Samples = NewType("Samples", int)
Usd = NewType("Usd", float)

MOST_SAMPLES = 1 << 40
"""Largest number of samples in an epoch or a step; sums of them over many epochs fit into 64 bits."""
MOST_SEED = (1 << 63) - 1
"""Largest seed that torch takes."""

SpanUnit = Literal["ep", "steps", "samples"]

_SECONDS_PER: dict[str, float] = {
    "us": 1e-6, "ms": 1e-3,
    "s": 1.0, "sec": 1.0,
    "m": 60.0, "min": 60.0,
    "h": 3600.0, "d": 86400.0,
}  # fmt: skip
_SPAN_UNITS: dict[str, SpanUnit] = {
    "ep": "ep", "epoch": "ep", "epochs": "ep",
    "step": "steps", "steps": "steps",
    "sample": "samples", "samples": "samples",
}  # fmt: skip
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_PART = re.compile(rf"({_NUMBER})\s*([a-zA-Z]*)\s*")


def _parts(text: str, what: str, example: str) -> list[tuple[float, str]]:
    stripped = text.strip()
    found = [(float(m[1]), m[2]) for m in _PART.finditer(stripped)]
    if not found or "".join(m[0] for m in _PART.finditer(stripped)) != stripped:
        raise UnitError(f"{what} {text!r} is not a number with a unit; write for example {example}")
    return found


def parse_seconds(text: str) -> Seconds:
    """Parse a duration such as "0.6s", "600ms", "1.5h" or "1h30m"; a number without a unit is refused.

    >>> parse_seconds("1h30m")
    5400.0
    >>> parse_seconds("0.6")
    Traceback (most recent call last):
    ...
    ebbflow.errors.UnitError: duration '0.6' has no unit; write 0.6s, 0.6min or 0.6h
    """
    parts, total = _parts(text, "duration", "90s, 5min or 3h"), 0.0
    for value, unit in parts:
        if not unit:
            raise UnitError(f"duration {text!r} has no unit; write {value:g}s, {value:g}min or {value:g}h")
        if unit not in _SECONDS_PER:
            raise UnitError(f"duration {text!r} has the unknown unit {unit!r}; known are {', '.join(_SECONDS_PER)}")
        total += value * _SECONDS_PER[unit]
    if not math.isfinite(total) or min(value for value, _ in parts) < 0:  # 1h-30m is a mistake, not half an hour
        raise UnitError(f"duration {text!r} is {total:g} s; it must be finite and not negative, in all its parts")
    return Seconds(total)


@dataclass(frozen=True, slots=True)
class Span:
    """An amount of training: a number of epochs, of reference steps or of samples."""

    value: float
    unit: SpanUnit

    def samples(self, *, epoch_samples: int, ref_batch: int) -> float:
        """The span in samples, for an epoch and a reference batch of the given sizes.

        >>> Span(5, "ep").samples(epoch_samples=50_000, ref_batch=128)
        250000
        """
        per = {"ep": epoch_samples, "steps": ref_batch, "samples": 1}[self.unit]
        if self.unit == "ep" and epoch_samples <= 0:
            raise UnitError(f"{self} is counted in epochs, but the size of an epoch is not known; give it in samples")
        return self.value * per

    def __str__(self) -> str:
        return f"{self.value:.15g}{self.unit}"  # :g would round 1234567samples


def parse_span(text: str) -> Span:
    """Parse a span such as "5ep", "1000steps" or "64000samples"; a number without a unit is refused.

    >>> parse_span("5ep")
    Span(value=5.0, unit='ep')
    >>> parse_span("5")
    Traceback (most recent call last):
    ...
    ebbflow.errors.UnitError: '5' has no unit; write 5ep (epochs), 5steps (steps of the reference batch) or 5samples
    """
    parts = _parts(text, "span", "5ep, 1000steps or 64000samples")
    value, unit = parts[0]
    if len(parts) == 1 and not unit:
        raise UnitError(
            f"{text!r} has no unit; write {value:g}ep (epochs), {value:g}steps (steps of the reference batch) "
            f"or {value:g}samples"
        )
    if len(parts) > 1 or unit not in _SPAN_UNITS:
        raise UnitError(
            f"{text!r} is not an amount of training; write for example 5ep (epochs), 1000steps (steps of the "
            f"reference batch) or 64000samples"
        )
    if not math.isfinite(value) or value < 0:
        raise UnitError(f"{text!r} must be finite and not negative")
    return Span(value, _SPAN_UNITS[unit])


def format_seconds(seconds: float) -> str:
    """A duration with a suitable unit, for printing.

    >>> format_seconds(0.25), format_seconds(75), format_seconds(11302), format_seconds(200000)
    ('250 ms', '75.0 s', '188.4 min', '55.6 h')
    """
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 5 * 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def plural(count: int, noun: str) -> str:
    """The singular or plural of a noun for this count.

    >>> plural(1, "death"), plural(0, "death")
    ('death', 'deaths')
    """
    return noun if count == 1 else noun + "s"


def whole_number(
    value: Any, name: str, *, least: int = 1, most: int | None = MOST_SAMPLES, error: type[InputError] = ConfigError
) -> int:
    """An argument as an int, also one of NumPy; anything but a whole number from `least` to `most` is an `error`.

    >>> whole_number("x", "rank", least=0, most=3)
    Traceback (most recent call last):
    ...
    ebbflow.errors.ConfigError: rank is 'x'; expected a whole number from 0 to 3
    """
    try:
        number = index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least or (most is not None and number > most):
        limit = "up" if most is None else f"to {most:,}"
        raise error(f"{name} is {value!r}; expected a whole number from {least} {limit}")
    return number
