"""The pages of docs/rules: one card a rule or modifier, and an index, all from the registry."""

from __future__ import annotations

from collections.abc import Sequence

from ebbflow.cli.rules_plot import chart
from ebbflow.core.spec import Entry
from ebbflow.rules.base import Modifier, Rule
from ebbflow.rules.curves import curves
from ebbflow.rules.describe import describe

__all__ = ["cards"]

_MADE = "<!-- Made by `ebbflow rules cards docs/rules` from the docstrings: change those. -->"


def cards(entries: Sequence[Entry[Rule | Modifier]]) -> dict[str, str]:
    """File name -> text: README.md and NAME.md for each entry."""
    pages = {f"{entry.name}.md": _card(entry) for entry in entries}
    return {"README.md": _index(entries), **pages}


def _card(entry: Entry[Rule | Modifier]) -> str:
    about = describe(entry)
    parts = [_MADE, f"# {entry.name}", f"> {_markdown(about.formula)}", *map(_markdown, about.explanation)]
    if about.suits:
        parts.append(f"**Suits:** {_markdown(about.suits)}")
    rows = [
        ("kind", entry.kind),
        ("example", f"`{about.example}`"),
        ("needs", "; ".join(about.needs) or "nothing but the batch size"),
        ("source", entry.cite or "not published"),
    ]
    parts.append("\n".join(["| | |", "|:--|:--|", *(f"| {name} | {_cell(value)} |" for name, value in rows)]))
    if entry.parameters:
        table = ["| argument | default | meaning |", "|:--|:--|:--|"]
        table += [f"| `{name}` | {default or 'required'} | {_cell(doc)} |" for name, default, doc in entry.parameters]
        parts.append("\n".join(table))
    parts.append(f"```text\n{chart(curves(entry))}\n```")
    return "\n\n".join(parts) + "\n"


def _index(entries: Sequence[Entry[Rule | Modifier]]) -> str:
    parts = [
        _MADE,
        "# Rules and modifiers",
        "A rule says what becomes of the learning rate when the batch is not the reference batch. Modifiers stand "
        "behind a rule and change what it says, from left to right: `adascale+warmup(5ep)`.",
    ]
    for kind, title in (("rule", "Rules"), ("modifier", "Modifiers")):
        lines = [f"## {title}", "", "| name | what it does | source |", "|:--|:--|:--|"]
        lines += [
            f"| [{entry.name}]({entry.name}.md) | {_cell(_markdown(describe(entry).formula))} | {_cell(entry.cite)} |"
            for entry in entries
            if entry.kind == kind
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _markdown(text: str) -> str:
    """Stars and underscores of a formula are meant as they stand."""
    parts = text.split("`")  # outside and inside of code, in turn
    parts[::2] = [part.replace("*", r"\*").replace("_", r"\_").replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", r"\|")
