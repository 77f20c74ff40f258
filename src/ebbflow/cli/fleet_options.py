"""The options that `launch`, `replay` and `lighthouse` share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ebbflow.core.units import parse_seconds
from ebbflow.errors import ConfigError
from ebbflow.live.supervisor import Outcome

__all__ = [
    "EXIT_CODES", "PASS_THROUGH", "Command", "Gpus", "Grace", "Heartbeat", "JobName", "MaxFailures",
    "MinReplicas", "Out", "Workload", "milliseconds", "positive", "with_plugins",
]  # fmt: skip

PASS_THROUGH = {"ignore_unknown_options": True}
"""Unknown options are passed to the script."""
EXIT_CODES: dict[Outcome, int] = {"finished": 0, "left": 130, "stopped": 130, "failed": 1}
"""130, as shells use it, says that the job was interrupted and can be continued."""

Command = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SCRIPT [ARGS]...",
        help="A Python script (or -m MODULE) and its arguments. Options that are not listed here are passed to it, and "
        "so is everything behind --.",
    ),
]
Workload = Annotated[
    str | None,
    typer.Option(
        help="Instead of a script: the ready-made replica on this workload; its options (--rule, ...) follow.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", help="Folder for logs, records and checkpoints; by default runs/ and the job's name."),
]
JobName = Annotated[str | None, typer.Option("--job", help="Name of the job; by default the name of the script.")]
MinReplicas = Annotated[int, typer.Option(help="Training waits while there are fewer replicas.")]
Heartbeat = Annotated[str, typer.Option(help="A replica without a heartbeat for this long is dead.")]
Grace = Annotated[str, typer.Option(help="How long a replica may take to leave before it is killed.")]
MaxFailures = Annotated[
    int, typer.Option(help="Give a replica up after this many deaths in a row without a committed step.")
]
Gpus = Annotated[int, typer.Option(help="GPUs per replica; 0 leaves CUDA_VISIBLE_DEVICES alone.")]


def with_plugins(command: Sequence[str], plugins: Sequence[str], *, workload: str | None) -> list[str]:
    """The command, and, for the ready-made replica, the plugin files that it is to load."""
    return [*command, *(part for file in plugins for part in ("--plugin", file) if workload is not None)]


def milliseconds(text: str) -> int:
    """Parse a duration as whole milliseconds, at least one."""
    return max(1, round(parse_seconds(text) * 1000))


def positive(value: int, name: str) -> int:
    """Check that a value is at least 1, and return it."""
    if value < 1:
        raise ConfigError(f"{name} is {value}; expected at least 1")
    return value
