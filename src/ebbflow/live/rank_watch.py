"""Rank 0 of a replica watches the other ranks: one that was stopped, or whose machine vanished, ends the replica.

A rank that dies closes its connections, so that whoever waits for it fails at once. A rank that is stopped closes
nothing: the others would wait for it in their collectives, and rank 0 would go on to send heartbeats for a replica that
cannot compute, for which the lighthouse and so the whole fleet would wait.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Self

from ebbflow.core.key_store import KeyStore, KeyStoreClient, StoreLost
from ebbflow.engines.replica_ranks import ReplicaRanks
from ebbflow.live.protocol import EXIT_RESTART

__all__ = ["RankWatch"]

INTERVAL_S = 0.5
"""How often a rank says that it is there, and how often rank 0 looks."""
MOST_MISSED = 30
"""Looks without a sign of life after which a rank is given up. A thread that a long call of the main thread keeps from
running is silent, too, so that this is generous."""
_CONNECT_S = 60.0
_LEAVE_S = 2.0  # for telling rank 0 that this rank ends because the training does


def _end_process(reason: str) -> None:
    """End this process, whose main thread may wait in a collective; the launcher starts the replica again."""
    print(reason, file=sys.stderr, flush=True)
    os._exit(EXIT_RESTART)


class RankWatch:
    """Signs of life of the ranks of a replica, as a context; all ranks enter it.

    Looks are counted, and not seconds: if rank 0 itself is stopped for a while, it does not blame the others.
    """

    def __init__(
        self, ranks: ReplicaRanks, host: str, secret: bytes, *, give_up: Callable[[str], None] = _end_process
    ) -> None:
        """`host`: the address of this machine on which rank 0 listens. `give_up`: called with the reason."""
        self._ranks = ranks
        self._store = KeyStore(host, secret) if ranks.leads and ranks.size > 1 else None
        self._address = ranks.share((host, self._store.port if self._store is not None else 0))
        self._secret = secret
        self._give_up = give_up
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._ranks.size > 1:
            work = self._look if self._ranks.leads else self._say
            self._thread = threading.Thread(target=work, daemon=True, name="ebbflow-rank-watch")
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_LEAVE_S)
        if self._store is not None:
            self._store.close()

    def _say(self) -> None:
        """On the other ranks: count up, again and again if rank 0 does not answer.

        Either it has ended, which the collectives will say, or it was stopped for a while.
        """
        while not self._ended.wait(INTERVAL_S):
            with (
                contextlib.suppress(StoreLost),
                KeyStoreClient(*self._address, self._secret, timeout_s=_CONNECT_S) as store,
            ):
                while not self._ended.wait(INTERVAL_S):
                    store.add(str(self._ranks.rank), 1)
                store.add(f"{self._ranks.rank} left", 1)

    def _look(self) -> None:
        """On rank 0: see who counts."""
        assert self._store is not None
        others = [str(rank) for rank in range(1, self._ranks.size)]
        missed = dict.fromkeys(others, 0)
        counts: dict[str, bytes | None] = dict.fromkeys(others)
        while not self._ended.wait(INTERVAL_S):
            for rank in others:
                count = self._store.peek(rank)
                missed[rank] = 0 if count != counts[rank] else missed[rank] + 1
                counts[rank] = count
            silent = [r for r in others if missed[r] > MOST_MISSED and self._store.peek(f"{r} left") is None]
            if silent:
                seconds = MOST_MISSED * INTERVAL_S
                self._give_up(
                    f"rank {', '.join(silent)} of this replica has given no sign of life for {seconds:g} s; the "
                    f"replica ends"
                )
                return
