"""The options that `launch`, `replay` and `lighthouse` share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ebbflow.cli.common import Verb
from ebbflow.core.units import parse_seconds
from ebbflow.errors import ConfigError
from ebbflow.live.protocol import HEARTBEAT_INTERVAL_S, Transport

__all__ = [
    "PASS_THROUGH", "AllowChanges", "CheckpointPlace", "Command", "FromScratch", "Gpus", "Grace", "Heartbeat",
    "JobName", "MaxFailures", "MinReplicas", "Notices", "Out", "Ranks", "ScriptCommand", "TransportName", "Workload",
    "check_ranks",
    "heartbeat_milliseconds", "milliseconds", "positive", "script_position", "with_plugins",
]  # fmt: skip

PASS_THROUGH = {"ignore_unknown_options": True}
"""Unknown options are passed to the script."""

Command = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SCRIPT [ARGS]...",
        help="A Python script (or -m MODULE) and its arguments. Everything behind its name is passed to it: options of "
        "this command come before.",
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
FromScratch = Annotated[
    bool, typer.Option("--from-scratch", help="Begin anew; checkpoints and records of before are moved aside.")
]
AllowChanges = Annotated[
    bool, typer.Option("--allow-changes", help="Continue a checkpoint with the changed settings of the script.")
]
CheckpointPlace = Annotated[
    str,
    typer.Option(
        "--checkpoints",
        metavar="FOLDER|URL",
        help="Where checkpoints go: a folder, or a URL that fsspec knows (s3://bucket/job, gs://...); by default the "
        "folder checkpoints of the job.",
    ),
]
Notices = Annotated[
    list[str] | None,
    typer.Option(
        "--notice",
        metavar="SOURCE",
        help="Leave as on SIGTERM when this machine is to be taken away: aws, gcp, azure or file(PATH). May be given "
        "several times.",
    ),
]
Gpus = Annotated[int, typer.Option(help="GPUs per replica; 0 leaves CUDA_VISIBLE_DEVICES alone.")]
Ranks = Annotated[
    int,
    typer.Option(
        "--ranks-per-replica",
        help="Processes per replica, which torch.distributed connects; the script shards its model over them.",
    ),
]

TransportName = Annotated[
    Transport,
    typer.Option(
        "--transport", help="What carries the gradients of GPUs; with gloo, replicas may share a GPU. auto is nccl."
    ),
]


def with_plugins(command: Sequence[str], plugins: Sequence[str], *, workload: str | None) -> list[str]:
    """The command, and, for the ready-made replica, the plugin files that it is to load."""
    return [*command, *(part for file in plugins for part in ("--plugin", file) if workload is not None)]


def milliseconds(text: str) -> int:
    """Parse a duration as whole milliseconds, at least one."""
    return max(1, round(parse_seconds(text) * 1000))


def heartbeat_milliseconds(text: str) -> int:
    """Parse a heartbeat timeout, during which several heartbeats must be possible."""
    timeout, least = milliseconds(text), round(3000 * HEARTBEAT_INTERVAL_S)
    if timeout < least:
        raise ConfigError(
            f"heartbeat-timeout is {text}; expected at least {least}ms, since a heartbeat is sent every "
            f"{HEARTBEAT_INTERVAL_S:g} s: every replica would be taken for dead"
        )
    return timeout


def script_position(arguments: Sequence[str], *, flags: Collection[str], options: Collection[str], before: int) -> int:
    """Find the script among the arguments of a verb, behind `before` other positional arguments: everything from there
    on is the script's. With --workload there is no script, and the length is returned.

    >>> arguments = ["--replicas", "2", "--json", "train.py", "--seed", "3", "--json"]
    >>> script_position(arguments, flags={"--json"}, options={"--replicas", "--workload"}, before=0)
    3
    """
    place = 0
    while place < len(arguments):
        argument = arguments[place]
        name, equals, _ = argument.partition("=")
        if argument == "--" or name == "--workload":
            return len(arguments)
        if argument in flags or (name in options and equals):
            place += 1
        elif argument in options:
            place += 2
        elif argument == "-m" or not argument.startswith("-"):
            if not before:
                return place
            before -= 1
            place += 1
        else:  # an unknown option: `replica_command` refuses it
            return len(arguments)
    return len(arguments)


class ScriptCommand(Verb):
    """A verb that runs a script, to which everything behind its name belongs, as with torchrun."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Mark where the script begins."""
        known = [one for one in self.params if one.param_type_name == "option"]
        names = {
            flag: {name for one in known if getattr(one, "is_flag", False) == flag for name in one.opts}
            for flag in (True, False)
        }
        before = sum(one.param_type_name == "argument" for one in self.params) - 1
        place = script_position(args, flags={*names[True], *ctx.help_option_names}, options=names[False], before=before)
        if place < len(args):
            args = [*args[:place], "--", *args[place:]]
        return super().parse_args(ctx, args)


def check_ranks(ranks: int, *, gpus: int) -> None:
    """Refuse a number of ranks that a replica cannot have."""
    positive(ranks, "ranks-per-replica")
    if gpus and gpus < ranks:
        raise ConfigError(
            f"a replica has {ranks} ranks (--ranks-per-replica) and {gpus} GPUs (--gpus); give each rank a GPU of "
            f"its own, or leave --gpus out and choose the devices in the script"
        )


def positive(value: int, name: str) -> int:
    """Check that a value is at least 1, and return it."""
    if value < 1:
        raise ConfigError(f"{name} is {value}; expected at least 1")
    return value
