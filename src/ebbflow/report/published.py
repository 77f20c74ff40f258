"""What a published value is: the score of a run, its steps, another score, or what it took to a target.

Study files and `study.json` say it in a text, `what`, which is read here and nowhere else:

    metric              the score that runs are compared by, in our units
    steps               the updates of a whole run
    epochs to 0.95      epochs until the first validation with a score of 0.95; also updates and seconds
    pixel_accuracy      another score in the validations of the record, by its name there
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ebbflow.errors import ConfigError

__all__ = ["NEVER", "PaperValue", "PublishedValue", "Quantity", "parse_quantity", "parse_value", "read_paper"]

NEVER: Literal["never"] = "never"
"""The value of a run that does not reach a target, in files and in tables."""

PublishedValue = float | Literal["never"]

_TO_TARGET = {"epochs": "epochs", "updates": "updates", "seconds": "time_s"}
"""What may stand before "to 0.95", and its name among the quantities of `targets.py`."""
_KNOWN = ("metric", "steps", *_TO_TARGET)
_EXPECTED = (
    "expected metric, steps, epochs to 0.95 (or updates, or seconds, to any score as recorded), or the name of another "
    "score of the record, such as pixel_accuracy"
)


@dataclass(frozen=True)
class Quantity:
    """What a published value is."""

    name: str
    """metric, steps, the name of a score; or epochs, updates or seconds, if there is a target."""
    target: float | None = None
    """The score to reach, as recorded."""

    def __str__(self) -> str:
        return self.name if self.target is None else f"{self.name} to {self.target:.12g}"

    @property
    def effort(self) -> str | None:
        """The name of this quantity among those that are measured to a target; None without one."""
        return None if self.target is None else _TO_TARGET[self.name]


def parse_quantity(text: Any, *, where: str) -> Quantity:
    """What a text such as "epochs to 0.95" stands for; `where` is the place of the text, for errors.

    >>> parse_quantity("seconds to 0.95", where="study.toml: paper")
    Quantity(name='seconds', target=0.95)
    """
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{where}: what is {text!r}; {_EXPECTED}")
    name, to, score = (part.strip() for part in text.partition(" to "))
    if not to:
        # Any other name may be that of a score, but hardly one that is almost a word with another meaning.
        if name not in ("metric", "steps") and (close := difflib.get_close_matches(name, _KNOWN, n=1, cutoff=0.8)):
            meant = f"{close[0]} to 0.95" if close[0] in _TO_TARGET else close[0]
            raise ConfigError(f"{where}: what is {text!r}; did you mean {meant!r}? {_EXPECTED}")
        return Quantity(name)
    if name not in _TO_TARGET:
        raise ConfigError(f"{where}: what is {text!r}; {name!r} to a target is unknown; {_EXPECTED}")
    try:
        target = float(score)
    except ValueError:
        target = math.nan
    if not math.isfinite(target):  # also a multiple such as 0.99x: a paper's baseline is not ours
        raise ConfigError(f"{where}: what is {text!r}; the target {score!r} is no score as recorded; {_EXPECTED}")
    return Quantity(name, target)


def parse_value(value: Any, quantity: Quantity, *, where: str) -> PublishedValue:
    """A published value: a finite number, or "never" for a target that was not reached."""
    if value == NEVER and quantity.target is not None:
        return NEVER
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        never = "" if quantity.target is None else f', or "{NEVER}" for a target that was not reached'
        raise ConfigError(f"{where} = {value!r}; expected a finite number{never}")
    return float(value)


@dataclass(frozen=True, kw_only=True)
class PaperValue:
    """The value that a paper reports for one cell of the grid."""

    workload: str
    trace: str
    rule: str
    value: PublishedValue
    source: str
    """Authors, year, table, and what was different in the paper."""
    what: str = "metric"
    """What the value is, as `parse_quantity` reads it."""

    @property
    def quantity(self) -> Quantity:
        """What the value is."""
        return parse_quantity(self.what, where=f"a published value of {self.rule} on {self.trace}")


def read_paper(config: Mapping[str, Any]) -> list[PaperValue]:
    """The published values in the configuration that `study.json` keeps."""
    entries = (entry for entry in config.get("paper") or () if isinstance(entry, Mapping))
    return [PaperValue(**entry) for entry in entries]
