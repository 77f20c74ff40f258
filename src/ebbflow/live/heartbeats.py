"""What the lighthouse's own page says about heartbeats.

A connection to a machine that vanished, or to a stopped process, does not break: whoever waits for its part of a sum
would wait for the timeout. The lighthouse knows better within a heartbeat.
"""

from __future__ import annotations

import re
import urllib.request

__all__ = ["Heartbeats", "heartbeat_ages"]

_AGE = re.compile(r"([^\s>]+): seen ([0-9.eE+-]+)s ago")


def heartbeat_ages(page: str) -> dict[str, float]:
    """Seconds since the last heartbeat of each replica that the lighthouse remembers, from its status page.

    >>> heartbeat_ages('<li class="heartbeat">r1:5f3a: seen 4.395209627s ago</li>')
    {'r1:5f3a': 4.395209627}
    """
    return {name: float(age) for name, age in _AGE.findall(page)}


class Heartbeats:
    """Asks a lighthouse whose heart has stopped."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        """`timeout_s`: how long a heart may pause; the lighthouse's own measure."""
        self.url = url
        self.timeout_s = timeout_s
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a lighthouse is never outside

    def ages(self) -> dict[str, float]:
        """Seconds since the last heartbeat of each replica; nothing if the lighthouse cannot be asked."""
        try:
            with self._opener.open(f"{self.url}/status", timeout=self.timeout_s) as answer:
                return heartbeat_ages(answer.read().decode("utf-8", "replace"))
        except (OSError, ValueError):
            return {}
