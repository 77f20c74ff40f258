"""`choice.toml`: the rule and base rate that `ebbflow choose` found, with what they were chosen for.

rule = "adascale+statewarmup(0.05)"
lr = 0.24                                   # base learning rate, at the reference batch
decided_by = "tournament"                   # or "fallback": nothing was decided, and `note` says why
note = ""

[source]                                    # workload, trace, optimizer, reference batch, length, cost
[[ranking]]                                 # all candidates, best first
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ebbflow.core.files import read_text, write_whole
from ebbflow.errors import ConfigError

__all__ = ["Choice", "read_choice", "write_choice"]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A rule and a base rate, and where they come from."""

    rule: str
    lr: float
    """Base learning rate, at the reference batch of the source."""
    decided_by: Literal["tournament", "fallback"] = "tournament"
    note: str = ""
    """Why it is the fallback; empty for the result of a tournament."""
    source: Mapping[str, Any] = field(default_factory=dict)
    """What it was chosen for: workload, trace, trace_sha256, optimizer, ref_batch, epochs, ..."""
    ranking: Sequence[Mapping[str, Any]] = ()
    """All candidates with their scores, best first."""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of a run that the choice stands for."""
        return {"rule": self.rule, "lr": self.lr}


def read_choice(path: Path | str) -> Choice:
    """Read a choice; whatever is wrong with the file is a ConfigError that names it."""
    path = Path(path)
    try:
        values = tomllib.loads(read_text(path, error=ConfigError))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}; expected a choice.toml that `ebbflow choose` wrote") from None
    rule, lr = values.get("rule"), values.get("lr")
    if not isinstance(rule, str) or isinstance(lr, bool) or not isinstance(lr, int | float) or not lr > 0:
        raise ConfigError(
            f"{path}: rule is {rule!r} and lr is {lr!r}; expected a rule as a text and a base rate above 0, as "
            f"`ebbflow choose` writes them"
        )
    return Choice(
        rule=rule,
        lr=lr,
        decided_by="fallback" if values.get("decided_by") == "fallback" else "tournament",
        note=str(values.get("note", "")),
        source=values.get("source", {}),
        ranking=tuple(values.get("ranking", ())),
    )


def write_choice(choice: Choice, path: Path) -> None:
    """Write a choice completely, or leave what was there before. Entries that are None are left out."""
    first = {"rule": choice.rule, "lr": choice.lr, "decided_by": choice.decided_by, "note": choice.note}
    tables = [("[source]", choice.source), *(("[[ranking]]", row) for row in choice.ranking)]
    lines = ["# Written by `ebbflow choose`; `train`, `study` and `launch` take it with --choice.", *_entries(first)]
    for title, table in tables:
        lines += ["", title, *_entries(table)]
    write_whole(path, ("\n".join(lines) + "\n").encode())


def _entries(table: Mapping[str, Any]) -> list[str]:
    """Entries as TOML: texts, numbers, truth values and lists of them are written there as in JSON."""
    return [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in table.items() if value is not None]
