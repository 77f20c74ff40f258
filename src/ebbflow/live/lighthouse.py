"""torchft's lighthouse, where replicas meet: served here, and started as a process of its own.

It listens on the address it is given and on no other. Whoever reaches that port can join the fleet, and kill replicas
(its status page has a button for that), so it belongs on loopback or on a network of the fleet alone.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ebbflow.core.files import write_whole
from ebbflow.errors import ConfigError
from ebbflow.live import torchft_api
from ebbflow.live.address import LOOPBACK, format_address, parse_address
from ebbflow.live.process import Child
from ebbflow.live.settings import HEARTBEAT_TIMEOUT_MS

__all__ = ["DEFAULT_PORT", "Lighthouse", "LighthouseOptions", "serve"]

DEFAULT_PORT = 29510
"""torchft's own."""
_START_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LighthouseOptions:
    """How the lighthouse decides who is in."""

    bind: str = LOOPBACK
    port: int = 0
    """0: any free one."""
    min_replicas: int = 1
    """Training waits while there are fewer."""
    heartbeat_timeout_ms: int = HEARTBEAT_TIMEOUT_MS
    """A replica that was silent for so long is dead; a kill costs about this much and a tenth of a second."""
    join_timeout_ms: int = 10_000
    """How long the others wait for a replica that lives but is late."""
    quorum_tick_ms: int = 50
    """How often it looks."""


def serve(options: LighthouseOptions, *, address_file: Path | None = None) -> None:
    """Serve until SIGINT or SIGTERM; the address goes into `address_file`, if any, once it is known."""
    signals = {signal.SIGINT, signal.SIGTERM}
    # Before its threads start, so that we are the one to get them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        server = _start(options)
        # What it calls its address has the name of the machine in it, whatever it listens on.
        address = format_address(options.bind, int(str(server.address()).rpartition(":")[2]))
        if address_file is not None:
            write_whole(address_file, address.encode())
        print(f"lighthouse at {address}", flush=True)
        signal.sigwait(signals)
        server.shutdown()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(options: LighthouseOptions) -> Any:
    where = format_address(options.bind, options.port)
    try:
        return torchft_api.start_lighthouse(
            where,
            min_replicas=options.min_replicas,
            join_timeout_ms=options.join_timeout_ms,
            quorum_tick_ms=options.quorum_tick_ms,
            heartbeat_timeout_ms=options.heartbeat_timeout_ms,
        )
    except RuntimeError as problem:
        raise ConfigError(
            f"the lighthouse cannot listen on {where}: {problem}; choose another port, or an address of this machine"
        ) from None


class Lighthouse:
    """A lighthouse as a child process, always at the address it got first."""

    def __init__(self, folder: Path, options: LighthouseOptions) -> None:
        self.folder = folder
        self.options = options
        self.restarts = 0
        self._child, self.address = self._launch()

    def _launch(self) -> tuple[Child, str]:
        options, told = self.options, self.folder / "address"
        told.unlink(missing_ok=True)
        child = Child(
            [
                sys.executable, "-m", "ebbflow", "lighthouse",
                "--bind", format_address(options.bind, options.port),
                "--min-replicas", str(options.min_replicas),
                "--heartbeat-timeout", f"{options.heartbeat_timeout_ms}ms",
                "--join-timeout", f"{options.join_timeout_ms}ms",
                "--address-file", str(told),
            ],
            environment=os.environ, log=self.folder / "log.txt", title="lighthouse",
        )  # fmt: skip
        end = time.monotonic() + _START_S
        while not told.exists():
            if child.exit_code() is not None or time.monotonic() > end:
                child.kill()
                raise ConfigError("the lighthouse did not start:\n" + "\n".join(child.last_words(5)))
            time.sleep(0.02)
        return child, told.read_text()

    def keep_alive(self) -> bool:
        """Start it again, on the same port, if it died; whether it had."""
        if self._child.exit_code() is None:
            return False
        self.options = replace(self.options, port=parse_address(self.address)[1])
        self._child, self.address = self._launch()
        self.restarts += 1
        return True

    def close(self) -> None:
        """End it."""
        self._child.kill()
