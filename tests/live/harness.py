"""Fleets of real processes for tests: forked from a server that has imported torch, and always ended."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ebbflow.live.processes import hold_port

HEARTBEAT_MS = 600
os.environ["RUST_LOG"] = "error"  # read when torchft is loaded
# The server of Python 3.11 that loads modules beforehand does not know this process's path, but the environment's.
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, sys.path)))
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["live.replicas", "live.rank_replicas"])


def eventually(condition: Callable[[], Any], what: str, *, within_s: float = 150.0) -> Any:
    """Wait for something that happens in another process."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if answer := condition():
            return answer
        time.sleep(0.01)
    raise AssertionError(f"{what} did not happen within {within_s:g} s")


def run_ranks(target: Callable[..., None], ranks: int, rendezvous: Path, *arguments: Any) -> list[Any]:
    """What `target(rank, ranks, rendezvous, *arguments, answers)` puts into `answers` in each of some processes.

    An answer is a tuple that begins with the rank. The processes have two minutes.
    """
    answers = CONTEXT.SimpleQueue()
    processes = [
        CONTEXT.Process(target=target, args=(rank, ranks, str(rendezvous), *arguments, answers), daemon=True)
        for rank in range(ranks)
    ]
    until = time.monotonic() + 120.0
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
        assert [process.exitcode for process in processes] == [0] * ranks
        return sorted((answers.get() for _ in processes), key=lambda answer: answer[0])
    finally:
        for process in processes:
            process.kill()


@dataclass
class TestFleet:
    """A lighthouse in this process, and replicas in their own."""

    __test__ = False
    folder: Path
    target: Callable[..., None]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    processes: dict[str, BaseProcess] = field(default_factory=dict)
    join_timeout_ms: int = 10_000
    """How long the lighthouse waits for a replica that sends heartbeats and has not asked for a quorum."""

    def __post_init__(self) -> None:
        self.lighthouse: Any = None
        self._ports: list[socket.socket] = []
        self.host, self.port = "127.0.0.1", 0
        self.start_lighthouse()

    def start_lighthouse(self) -> None:
        """Start the lighthouse, on the port that it had before."""
        from torchft._torchft import LighthouseServer

        def begin() -> Any:
            try:
                return LighthouseServer(
                    bind=f"127.0.0.1:{self.port}",
                    min_replicas=1,
                    join_timeout_ms=self.join_timeout_ms,
                    quorum_tick_ms=20,
                    heartbeat_timeout_ms=HEARTBEAT_MS,
                )
            except RuntimeError:  # the port of the one before is not free yet
                return None

        self.lighthouse = eventually(begin, "a lighthouse")
        self.port = int(self.lighthouse.address().rpartition(":")[2])

    def start_ranks(self, name: str, ranks: int, *, faults: Mapping[int, str] | None = None, **more: Any) -> None:
        """Start a replica of several ranks, as torchrun does; their processes are called r0.0, r0.1, ..."""
        self._ports.append(hold_port())
        port = self._ports[-1].getsockname()[1]
        for rank in range(ranks):
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1"}
            shared = {"MASTER_PORT": port, **more.get("environment_of_all", {})}
            environment = {key: str(value) for key, value in {**own, **shared}.items()}
            self.start(name, fault=(faults or {}).get(rank, ""), environment=environment, **more)
            self.processes[f"{name}.{rank}"] = self.processes.pop(name)

    def start(self, *names: str, fault: str = "", **more: Any) -> None:
        """Start replicas."""
        for name in names:
            environment = {
                "EBBFLOW_LIGHTHOUSE": f"{self.host}:{self.port}",
                "EBBFLOW_BIND": more.get("bind", "127.0.0.1"),
                "EBBFLOW_REPLICA": name,
                "EBBFLOW_JOB": "test",
                "EBBFLOW_FOLDER": str(self.folder),
                "EBBFLOW_HEARTBEAT_TIMEOUT_MS": str(HEARTBEAT_MS),
                "EBBFLOW_FAULT": fault,
            }
            process = CONTEXT.Process(
                target=self.target, args=(environment, {**self.arguments, **more}), name=name, daemon=True
            )
            process.start()
            self.processes[name] = process

    def forget_who_was_here(self) -> None:
        """Replicas that are started again wait for each other, as at the first start."""
        for path in self.folder.glob("*.here"):
            path.unlink()

    def stop_holding(self) -> None:
        """Let all replicas train at full speed (`hold` in `replicas.tiny`)."""
        (self.folder / "full-speed").touch()

    def trains(self, *names: str, step: int = 1, members: int | None = None) -> None:
        """Wait until replicas have committed this number of steps, the last one with this number of participants."""

        def there(name: str) -> bool:
            own = [process for key, process in self.processes.items() if key.partition(".")[0] == name]
            alive = any(process.is_alive() for process in own)  # looked at before the status, which is the last word
            status = self.status(name)
            assert alive or status, f"{name} has ended without a word: {[process.exitcode for process in own]}"
            enough = members is None or status.get("members") == members
            return status.get("state") == "training" and status.get("step", 0) >= step and enough

        eventually(lambda: all(map(there, names)), f"{', '.join(names)} at step {step} with {members or 'any'} members")

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.processes[name].pid or 0, number)

    def status(self, name: str) -> dict[str, Any]:
        try:
            return json.loads((self.folder / "replicas" / name / "status.json").read_text())
        except (FileNotFoundError, ValueError):
            return {}

    def wait(self, *names: str, within_s: float = 150.0) -> dict[str, int]:
        """The exit codes of replicas, all of them by default, when they have ended."""
        until = time.monotonic() + within_s
        codes = {}
        for name in names or tuple(self.processes):
            process = self.processes[name]
            process.join(max(0.0, until - time.monotonic()))
            assert process.exitcode is not None, f"{name} did not end within {within_s:g} s: {self.status(name)}"
            codes[name] = process.exitcode
        return codes

    def close(self) -> None:
        for process in self.processes.values():
            if process.is_alive():
                process.kill()
            process.join(10)
        if self.lighthouse is not None:
            self.lighthouse.shutdown()
        for port in self._ports:
            port.close()

    def __enter__(self) -> TestFleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def final_state(folder: Path) -> dict[str, Any]:
    """What the newest checkpoint of a fleet holds."""
    from ebbflow.live.checkpoints import Checkpoints

    found = Checkpoints(folder / "checkpoints", on_event=lambda what, text: None).newest()
    assert found is not None
    return found[1]
