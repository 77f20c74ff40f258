"""The command line of a replica, the job's name, and the folder that one launcher at a time may use."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ebbflow.core.files import write_whole
from ebbflow.errors import ConfigError, OutputError

__all__ = ["WORKER", "job_name", "locked", "replica_command", "tell_where"]

WORKER = "ebbflow.live.worker"
"""The ready-made replica, for a workload without a script of one's own."""


def replica_command(command: Sequence[str], *, workload: str | None = None) -> tuple[str, ...]:
    """What a replica runs: a Python script, `-m` a module, or the ready-made worker on a workload.

    >>> replica_command(["-m", "my.training", "--lr", "0.1"])[1:]
    ('-m', 'my.training', '--lr', '0.1')
    """
    if workload is not None:
        if command and not command[0].startswith("-"):
            raise ConfigError(
                f"--workload {workload} runs without a script, but {command[0]!r} was given; leave one of them out"
            )
        return (sys.executable, "-m", WORKER, "--workload", workload, *command)
    if not command:
        raise ConfigError(
            "nothing to run; give a Python script, -m and a module, or --workload and a name (ebbflow workloads)"
        )
    first = command[0]
    if first == "-m":
        if len(command) < 2:
            raise ConfigError("-m needs the name of a module, such as -m my.training")
        return (sys.executable, *command)
    if first.startswith("-"):
        raise ConfigError(f"unknown option {first}; options of the script go behind the script")
    if not Path(first).is_file():
        raise ConfigError(f"{first}: no such file; expected a Python script")
    return (sys.executable, *command)


def job_name(command: Sequence[str], *, workload: str | None = None) -> str:
    """A name for the job, from what it runs.

    >>> job_name(["train/my net.py"]), job_name(["-m", "my.training"]), job_name([], workload="digits-mlp")
    ('my-net', 'training', 'digits-mlp')
    """
    text = workload or (command[1].rpartition(".")[2] if command[0] == "-m" else Path(command[0]).stem)
    return re.sub(r"[^\w.-]+", "-", text)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder: a second launcher would write into the files of the first. Freed even by kill -9."""
    import fcntl  # not on Windows, where the other verbs work all the same

    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("a+")
    except OSError as problem:
        raise OutputError(f"{folder} cannot be written: {problem.strerror}; choose another --folder") from problem
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{folder} is in use by another launcher; stop that one first, or choose another --folder"
            ) from None
        except OSError:
            pass  # a file system without locks, as mounted buckets are: then it is up to the user
        yield


def tell_where(folder: Path, *, job: str, lighthouse: str, command: Sequence[str]) -> None:
    """Write fleet.json, by which `ebbflow status` finds the job's folder and its lighthouse."""
    body = {
        "job": job, "lighthouse": lighthouse, "command": list(command), "launcher": os.getpid(), "time": time.time(),
    }  # fmt: skip
    write_whole(folder / "fleet.json", json.dumps(body, indent=2).encode())
