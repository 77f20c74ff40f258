"""From an estimator's parameters to the parts of a fit: text forms joined with their `name__setting` parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ebbflow.core.spec import Call, nearest, parse_call
from ebbflow.errors import ConfigError

__all__ = ["choose", "whole_number", "with_settings"]


def with_settings(text: str, settings: Mapping[str, Any]) -> Call:
    """The call of a text form with these settings added; a setting replaces what the text says.

    >>> str(with_settings("geo(delay=5ep)", {"factor": 5, "delay": "60ep"}))
    'geo(delay=60ep, factor=5)'
    """
    call = parse_call(text)
    kwargs = dict(call.kwargs) | {name: str(value) for name, value in settings.items()}
    return Call(call.name, call.args, tuple(kwargs.items()))


def whole_number(name: str, value: Any, *, at_least: int = 1) -> int:
    """A parameter that counts something."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < at_least:
        raise ConfigError(f"{name} is {value!r}; expected a whole number of at least {at_least}")
    return int(value)


def choose(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """A parameter that is one of a few words."""
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}; {nearest(str(value), list(choices))}")
    return str(value)
