"""Faults at named points of a step, to see what a fleet makes of them: `EBBFLOW_FAULT=kill:allreduce@5`.

    quorum      the participants are known, nothing is computed yet
    backward    after the backward pass of a micro-batch
    allreduce   while the gradients are added up
    bucket      the same, while the backward pass goes on
    sum         the sum has arrived
    commit      the step counts, and the weights are still the old ones
    step        the step is applied, and not recorded yet
    save        the final weights are written, and the last checkpoint is not
    announce    before a state is sent
    send        while a state is sent
    announced   before a state is received
    receive     while a state is received
    copy        a step counts while a state is sent, and what is not sent yet was copied
    hear        a step of the others counts while this replica receives a state

`kill` ends the process as kill -9 does, `stop` halts it as SIGSTOP does, and `fail` acts as if the connection had been
lost. The number after @ is the number of committed steps; @* stands for the first time that the point is reached.
Several faults are separated by commas, and each happens once.
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
    """Lets a fault happen when the process reaches a named point in a given step."""

    def __init__(self, text: str, step: Callable[[], int]) -> None:
        """`text`: the value of EBBFLOW_FAULT. `step`: gives the number of committed steps."""
        self._step = step
        self._planned: set[tuple[str, str, str]] = set()
        for part in filter(None, text.split(",")):
            match = _FAULT.fullmatch(part.strip())
            if match is None:
                raise ConfigError(f"EBBFLOW_FAULT has {part!r}; expected kill:POINT@STEP, stop:... or fail:...")
            self._planned.add((match[1], match[2], match[3]))

    def __call__(self, point: str) -> None:
        """Let the faults happen that are planned for this point and step."""
        if not self._planned:
            return
        step = str(self._step())
        for fault in [fault for fault in self._planned if fault[1] == point and fault[2] in (step, "*")]:
            self._planned.discard(fault)
            if fault[0] == "fail":
                raise PeerLost(f"a fault was asked for at {point}")
            os.kill(os.getpid(), signal.SIGKILL if fault[0] == "kill" else signal.SIGSTOP)
