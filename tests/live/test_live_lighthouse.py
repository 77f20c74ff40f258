"""Replicas whose connection to the lighthouse dies without a word, behind a small proxy on loopback."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from live.harness import TestFleet, eventually

pytest.importorskip("torchft", reason="the live engine needs torchft: pip install 'ebbflow[live]'")

from contract.suite import EPOCHS
from ebbflow.live.accounting import read_fleet
from live import replicas

pytestmark = pytest.mark.process


class SwallowingProxy:
    """Passes on what a replica and the lighthouse say to each other, and can swallow the answer to a request.

    From then on nothing passes on that connection any more, in either direction, and nobody is told.
    """

    def __init__(self, port: int) -> None:
        self._lighthouse = ("127.0.0.1", port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._to_swallow = threading.Event()
        self.swallowed = threading.Event()
        """Set when a request has passed whose answer does not come."""
        threading.Thread(target=self._serve, daemon=True).start()

    def swallow_next_answer(self) -> None:
        """Swallow the answer to the next request for a quorum, and everything that follows on its connection."""
        self.swallowed.clear()
        self._to_swallow.set()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                lighthouse = socket.create_connection(self._lighthouse)
                self._sockets += [client, lighthouse]
                dead = threading.Event()
                for one, other in ((client, lighthouse), (lighthouse, client)):
                    threading.Thread(target=self._pass_on, args=(one, other, dead), daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket, dead: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                if dead.is_set():
                    continue
                if b"established" in data and self._to_swallow.is_set():  # what a replica says when it asks
                    self._to_swallow.clear()
                    dead.set()
                    self.swallowed.set()
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for one in (self._server, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[TestFleet]:
    with TestFleet(tmp_path, replicas.tiny, {"all": ["r0", "r1"], "hold": 4}) as fleet:
        yield fleet


def test_a_replica_that_lacks_an_answer_of_the_lighthouse_asks_again_over_another_connection(
    fleet: TestFleet, tmp_path: Path
) -> None:
    with contextlib.closing(SwallowingProxy(fleet.port)) as proxy:
        fleet.start("r0")
        fleet.start("r1", environment={"EBBFLOW_LIGHTHOUSE": proxy.address})
        fleet.trains("r0", "r1", step=5, members=2)
        proxy.swallow_next_answer()
        eventually(proxy.swallowed.is_set, "an answer that is swallowed")
        step = fleet.status("r1")["step"]
        fleet.trains("r0", "r1", step=step + 3, members=2)
        fleet.stop_holding()
        assert set(fleet.wait().values()) == {0}
    account, runs = read_fleet(tmp_path)
    assert account.mistakes == () and account.epochs == EPOCHS and account.given_up == 0
    lost = [event.text for run in runs for event in run.events if run.path.parent.name == "r1" and event.what == "lost"]
    assert len(lost) == 1 and "not over the connection" in lost[0], "it has noticed it itself, and nothing else failed"
