"""How messages call a setting: as an option where the command runs, and as an argument where Python code calls."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["called", "names_of_options"]

_of_the_command = False


@contextmanager
def names_of_options() -> Iterator[None]:
    """Inside, which is where the command runs, messages have the names of options."""
    global _of_the_command
    before, _of_the_command = _of_the_command, True
    try:
        yield
    finally:
        _of_the_command = before


def called(name: str, value: object = "") -> str:
    """A setting, with a value if one is given, as whoever reads the message has to write it.

    >>> called("ref_batch"), called("ref_batch", 256)
    ('ref_batch=', 'ref_batch=256')
    >>> called("engine", "loop")
    "engine='loop'"
    >>> with names_of_options():
    ...     called("ref_batch"), called("ref_batch", 256), called("repeat", True), called("stragglers", "rare(0.1)")
    ('--ref-batch', '--ref-batch 256', '--repeat', "--stragglers 'rare(0.1)'")
    """
    if not _of_the_command:
        return f"{name}=" if value == "" else f"{name}={value!r}"
    option = f"--{name.replace('_', '-')}"
    return option if value is True or value == "" else f"{option} {shlex.quote(str(value))}"
