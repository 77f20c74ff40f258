"""What a run of the command gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Answer(NamedTuple):
    code: int
    out: str
    err: str


Ebbflow = Callable[..., Answer]
"""Called with the arguments, in the order of a command line."""
