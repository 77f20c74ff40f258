"""Whether two replicas reach each other on ports like those of the backend, and not only at their stores.

Gloo listens on any port that is free, another one for every group, and says only that connecting takes too long: not
with whom, and sometimes it names a peer that is reached. So every replica has one more such port, on the same address,
which answers those who know the secret. Whoever connects to it sends as much as a few packets hold, so that a link
which loses large packets is found, too; it gets as much back, after the other side has tried to reach it in the same
way. What is tried is TCP between two addresses: not NCCL, and not the further ranks of a replica.
"""

from __future__ import annotations

from ebbflow.core.key_store import KeyStore, StoreLost
from ebbflow.engines.process_group import open_store

__all__ = ["LinkProbe", "is_reached"]

_TIMEOUT_S = 2.0  # for connecting
_ANSWER_S = 5.0  # for the answer, before which the other side tries the way back
_PADDING = "." * (1 << 14)  # more than a packet can hold, also where packets may have 9,000 bytes


class LinkProbe(KeyStore):
    """The port of a replica that others try to reach, until it is closed."""

    def _do_probe(self, padding: str, back: str) -> str | None:
        """Answer as long as what came; nothing if the port at the address `back` cannot be reached from here."""
        return padding if not back or is_reached(back, self.secret) else None


def is_reached(address: str, secret: bytes, *, back: str = "") -> bool:
    """Whether the `LinkProbe` at an address is reached from here, and the one at `back`, if given, from there."""
    try:
        with open_store(address, secret, timeout_s=_TIMEOUT_S) as probe:
            answer = probe.ask("probe", wait_s=_ANSWER_S if back else 0.0, padding=_PADDING, back=back)
            return bool(answer == _PADDING)
    except StoreLost:
        return False
