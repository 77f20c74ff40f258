"""What the verbs share: where output goes, and how an answer is printed as JSON."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

__all__ = ["AsJson", "command_line", "err", "out", "print_json"]

out = Console(highlight=False)
"""Answers."""
err = Console(stderr=True, highlight=False)
"""Progress, notes and errors: never mixed into an answer that a script reads."""

AsJson = Annotated[bool, typer.Option("--json", help="Answer with JSON on standard output.")]


def print_json(value: Any) -> None:
    """One JSON document on standard output, and nothing else."""
    print(json.dumps(value, indent=2, allow_nan=False))


def command_line() -> str:
    """The command as the user typed it: goes into records and reports."""
    name = Path(sys.argv[0]).name
    program = ["python", "-m", "ebbflow"] if name == "__main__.py" else [name]
    return shlex.join([*program, *sys.argv[1:]])
