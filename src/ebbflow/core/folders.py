"""What an output folder holds, and whether another kind of run may write into it: it may not.

Runs, fleets, studies and tournaments have files of the same names (`record.jsonl`, `weights.pt`, `checkpoints/`), and
whoever reads a folder takes all that lies in it for one thing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from ebbflow.core.wording import called
from ebbflow.errors import ConfigError

__all__ = ["FolderKind", "check_folder"]

FolderKind = Literal["run", "session", "fleet", "study", "tournament"]
_WHAT: dict[FolderKind, str] = {
    "run": "a run of `ebbflow train`",
    "session": "a run of an ebbflow.Session",
    "fleet": "a job of `ebbflow launch`",
    "study": "a study of `ebbflow study`",
    "tournament": "a tournament of `ebbflow choose`",
}
_MARKS: tuple[tuple[str, FolderKind], ...] = (
    ("choose.json", "tournament"),
    ("study.json", "study"),
    ("arms", "study"),
    ("fleet.json", "fleet"),
    ("replicas", "fleet"),
)
"""What tells the kind of a folder by its mere presence."""


def check_folder(folder: Path, kind: FolderKind) -> None:
    """Refuse to write into a folder in which another kind of run lies, with a ConfigError that names what is there.

    Whether what lies there is the same run or another one of its kind, is decided by those who know its settings.
    """
    for name, found in _found(folder):
        if found != kind:
            raise ConfigError(
                f"{folder} holds {_WHAT[found]} ({name}), and {_WHAT[kind]} would mix its files with those; give "
                f"another {called('out')}, or move what lies there away"
            )


def _found(folder: Path) -> list[tuple[str, FolderKind]]:
    found = [(name, kind) for name, kind in _MARKS if (folder / name).exists()]
    record = _kind_of_record(folder / "record.jsonl")
    return found if record is None else [*found, ("record.jsonl", record)]


def _kind_of_record(path: Path) -> FolderKind | None:
    """What wrote a record; None if there is none, or if it was killed before it wrote its header."""
    try:
        with path.open("rb") as file:
            config: Any = json.loads(file.readline())["config"]
        if "live" in config:  # of a replica
            return "fleet"
        # `train` records the text of its trace or plan, and its task; a session has none of these.
        return "run" if "trace_text" in config or "task" in config else "session"
    except (OSError, ValueError, KeyError, TypeError):
        return None
