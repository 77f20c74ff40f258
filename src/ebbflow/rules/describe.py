"""What a rule says about itself, read from its docstring: for `ebbflow rules show`, the cards and the tests.

The first line is the formula. A paragraph that begins with "Suits:" says when to choose the rule, one that begins with
"Example:" is a text to copy, for rules that cannot stand alone. All other paragraphs explain.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

from ebbflow.core.spec import Entry
from ebbflow.rules.base import Modifier, Rule

__all__ = ["NEEDS", "Description", "describe"]

NEEDS: Mapping[str, str] = {
    "moments": "noise and signal of the gradient, measured from two or more micro-batches a step",
    "layers": "the same of each layer",
}
"""What may be measured for a rule, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """A docstring in parts; each text is one line without line breaks."""

    formula: str
    explanation: tuple[str, ...]
    suits: str
    """Empty if the rule does not say."""
    example: str
    """The shortest text that uses it, if it does not give one itself."""
    needs: tuple[str, ...]
    """In words."""


def describe(entry: Entry[Rule | Modifier]) -> Description:
    """The parts of an entry's docstring.

    >>> from ebbflow.rules.registry import RULES, table
    >>> _ = table()
    >>> describe(RULES.entry("linear")).formula
    'm = B/B0: k times the batch, k times the rate.'
    >>> describe(RULES.entry("warmup")).example
    'linear+warmup(5ep)'
    """
    first, *rest = [" ".join(part.split()) for part in (inspect.getdoc(entry.make) or "").split("\n\n")]
    marked = {"Suits:": "", "Example:": ""}
    explanation = []
    for paragraph in rest:
        mark = next((mark for mark in marked if paragraph.startswith(mark)), None)
        if mark is None:
            explanation.append(paragraph)
        else:
            marked[mark] = paragraph.removeprefix(mark).strip()
    return Description(
        formula=first,
        explanation=tuple(explanation),
        suits=marked["Suits:"],
        example=marked["Example:"] or (entry.name if entry.kind == "rule" else f"linear+{entry.name}"),
        needs=tuple(NEEDS[need] for need in sorted(entry.needs, reverse=True)),
    )
