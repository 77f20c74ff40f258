"""The replica without torch, and questions about processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

FAKE = Path(__file__).parent / "fake_replica.py"


def alive(pid: int) -> bool:
    """Whether a process runs; the dead that nobody has waited for do not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def until(condition: Callable[[], object], *, seconds: float = 30.0) -> None:
    """Wait for something that must happen; how long it takes proves nothing."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.02)


def processes_with(text: str) -> list[int]:
    """Processes whose environment or command line names something, this one left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                said = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue
            if text.encode() in said and alive(int(entry.name)):
                found.append(int(entry.name))
    return found
