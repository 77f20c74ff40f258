"""The rules by name, and their text form: `linear`, `power(0.75)`, `sqrt+warmup(5ep)`.

Every module of this package is imported when the registry is first asked, so a new rule needs no line anywhere else.
A user's own rules come from plugin files (`ebbflow train --plugin mine.py`) or from any module that was imported.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ebbflow import rules as _package
from ebbflow.core.spec import Entry, Registry, bind, parse_calls
from ebbflow.errors import SpecError
from ebbflow.rules.base import Chain, Modifier, Rule

__all__ = ["RULES", "make_rule", "register", "register_modifier", "table"]

RULES: Registry[Rule | Modifier] = Registry("rule")
MEASURABLE = frozenset({"moments", "layers"})
"""What a rule may need: noise and signal of the whole model, and of each layer."""


def register(
    name: str, *, cite: str = "", needs: Iterable[str] = (), exempt: Mapping[str, str] | None = None
) -> Callable[[Any], Any]:
    """Add a rule. `needs` is what must be measured for it ("moments", "layers"); `exempt` names laws that it need not
    pass, each with the reason."""
    return _register(name, "rule", cite, needs, exempt)


def register_modifier(
    name: str, *, cite: str = "", needs: Iterable[str] = (), exempt: Mapping[str, str] | None = None
) -> Callable[[Any], Any]:
    """Add a modifier, which stands behind a rule: `linear+NAME`."""
    return _register(name, "modifier", cite, needs, exempt)


def _register(
    name: str, kind: str, cite: str, needs: Iterable[str], exempt: Mapping[str, str] | None
) -> Callable[[Any], Any]:
    wanted = frozenset(needs)
    if not wanted <= MEASURABLE:
        raise SpecError(
            f"the {kind} {name!r} needs {', '.join(sorted(wanted - MEASURABLE))}, which nothing measures; "
            f"known are {', '.join(sorted(MEASURABLE))}"
        )

    def add(make: Any) -> Any:
        RULES.register(name, kind=kind, cite=cite, needs=wanted, exempt=exempt)(make)
        make.registered_needs = wanted
        return make

    return add


@functools.cache
def _load_all() -> None:
    for module in pkgutil.iter_modules(_package.__path__):
        importlib.import_module(f"{_package.__name__}.{module.name}")


def table() -> list[Entry[Rule | Modifier]]:
    """All entries, rules first."""
    _load_all()
    return sorted(RULES, key=lambda entry: (entry.kind != "rule", entry.name))


def make_rule(text: str | Rule) -> Rule:
    """The rule of a text; a rule that is one already is returned as it is.

    >>> make_rule("linear+warmup(5ep)").text
    'linear+warmup(5ep)'
    >>> make_rule("lineer")
    Traceback (most recent call last):
    ...
    ebbflow.errors.SpecError: unknown rule 'lineer'; did you mean 'linear'? Known: ...
    """
    if isinstance(text, Rule):
        return text
    _load_all()
    first, *rest = parse_calls(text)
    rule = bind(first, RULES.entry(first.name).make)
    if not isinstance(rule, Rule):
        raise SpecError(f"{text!r} starts with the modifier {first.name!r}; put a rule before it: linear+{first}")
    modifiers = []
    for call in rest:
        part = bind(call, RULES.entry(call.name).make)
        if not isinstance(part, Modifier):
            raise SpecError(
                f"{text!r} has {call.name!r}, a rule, behind a +; only modifiers stand there: "
                f"{', '.join(RULES.names('modifier'))}"
            )
        modifiers.append(part)
    return Chain(rule, tuple(modifiers), text="+".join(str(call) for call in (first, *rest)))
