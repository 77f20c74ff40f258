"""Faults at named points of a step, for those who want to see what a fleet does: `EBBFLOW_FAULT=kill:allreduce@5`.

    quorum      the members are known, nothing is computed           sum       the sum has arrived backward    after a
    micro-batch                                        commit    it counts, the weights are the old ones allreduce
    while the gradients are added up                     step      after a step, before it is recorded announce
    before a state is sent                               send      while it is sent announced   before a state is
    received                           receive   while it is received

`kill` ends the process as kill -9 does, `stop` halts it as SIGSTOP does, `fail` loses what was just done, as a broken
connection does. `@*` is the first time that the point is passed. Several faults are separated by commas; each strikes
once.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable

from ebbflow.engines.process_group import PeerLost
from ebbflow.errors import ConfigError

__all__ = ["ScriptedFaults"]

_FAULT = re.compile(r"(kill|stop|fail):([a-z]+)@(\d+|\*)")


class ScriptedFaults:
    """Strikes when the process passes a named point in a given step."""

    def __init__(self, text: str, step: Callable[[], int]) -> None:
        """`step`: the number of committed steps, asked at each point."""
        self._step = step
        self._planned: set[tuple[str, str, str]] = set()
        for part in filter(None, text.split(",")):
            match = _FAULT.fullmatch(part.strip())
            if match is None:
                raise ConfigError(f"EBBFLOW_FAULT has {part!r}; expected kill:POINT@STEP, stop:... or fail:...")
            self._planned.add((match[1], match[2], match[3]))

    def __call__(self, point: str) -> None:
        """The process is at a point."""
        if not self._planned:
            return
        step = str(self._step())
        for fault in [fault for fault in self._planned if fault[1] == point and fault[2] in (step, "*")]:
            self._planned.discard(fault)
            if fault[0] == "fail":
                raise PeerLost(f"a fault was asked for at {point}")
            os.kill(os.getpid(), signal.SIGKILL if fault[0] == "kill" else signal.SIGSTOP)
