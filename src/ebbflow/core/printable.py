"""Text of others, such as names in records and status files, for terminals and tables."""

from __future__ import annotations

__all__ = ["printable"]

_CONTROLS = {
    code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"
}


def printable(text: str) -> str:
    """Replace control characters but line feeds and tabs: a terminal would obey them.

    >>> printable("r0\\x1b[2J")
    'r0�[2J'
    """
    return text.translate(_CONTROLS)
