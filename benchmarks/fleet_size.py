"""What the membership protocol costs by the size of a fleet: messages and seconds, simulated; and the real lighthouse.

simulated   the protocol of every replica in virtual time (tests/live/fleet_simulator.py): seconds per step, of which
            one is spent computing; messages per step and replica; seconds from a change of the fleet to the next step
lighthouse  torchft's lighthouse on loopback, in a process of its own: seconds for one quorum of all replicas, which are
            threads of several processes, and processor time of the lighthouse alone
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from ebbflow.live import torchft_api

PER_PROCESS = 125
"""Replicas that one process stands for, each with a thread."""


def simulate(replicas: int) -> None:
    """Start a fleet, let a tenth join, and let a third vanish at once."""
    from live.fleet_simulator import SimulatedFleet, answers_computed_once

    began = time.monotonic()
    fleet = SimulatedFleet(Random(0), step_s=(1.0, 1.0))

    def until_all_train() -> float:
        before, changed, size = len(fleet.commits), fleet.now, len(fleet.running())
        trains = fleet.run_until(
            changed + 600.0, stop=lambda: len(fleet.commits) > before and len(fleet.commits[-1].group) == size
        )
        assert trains, f"the {size} replicas do not train together"
        return fleet.now - changed

    with answers_computed_once():
        for _ in range(replicas):
            fleet.start()
        started = until_all_train()
        fleet.messages.clear()
        before = len(fleet.commits)
        fleet.run_until(fleet.now + 10.0)
        control = sum(number for kind, number in fleet.messages.items() if kind not in ("sum", "state"))
        ends = list({commit.state: commit.time for commit in fleet.commits[before:]}.values())  # of the last replica
        step_s = (ends[-1] - ends[0]) / (len(ends) - 1)
        messages = control / (10.0 / step_s) / replicas
        for _ in range(max(1, replicas // 10)):
            fleet.start()
        fleet.run_until(fleet.now + 0.5)
        joined = until_all_train()
        for victim in fleet.running()[: len(fleet.running()) // 3]:
            fleet.kill(victim)
        vanished = until_all_train()
    memory_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(
        f"{replicas:6} replicas  step {step_s:.2f} s  control messages per step and replica {messages:.1f}  "
        f"first step after {started:.1f} s  a tenth joins {joined:.1f} s  a third vanishes {vanished:.1f} s  "
        f"(simulated in {time.monotonic() - began:.0f} s, with at most {memory_gb:.1f} GB)",
        flush=True,
    )


def _name(number: int) -> str:
    return f"r{number:05}:0123456789ab@127.0.0.1:40000"


def ask(address: str, numbers: range, rounds: int) -> list[float]:
    """Let these replicas ask for quorums; the times at which all of them had each."""
    limit = timedelta(seconds=600)
    client = torchft_api.lighthouse_client(address, connect_timeout=limit)
    ends: list[float] = []
    together = threading.Barrier(len(numbers), action=lambda: ends.append(time.monotonic()))

    def replica(number: int) -> None:
        for step in range(rounds):
            quorum = torchft_api.request_quorum(
                client, name=_name(number), store="127.0.0.1:40000", step=step,
                data={"group": "0123456789ab", "established": "True"}, timeout=limit,
            )  # fmt: skip
            assert quorum.quorum_id > 0
            together.wait()

    threads = [threading.Thread(target=replica, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends


def processor_time(pid: int) -> float:
    """Seconds for which a process has used a processor."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ask_lighthouse(replicas: int, rounds: int = 6) -> None:
    """Let as many threads, in several processes, ask a real lighthouse for quorums of all."""
    parts = [range(first, min(first + PER_PROCESS, replicas)) for first in range(0, replicas, PER_PROCESS)]
    command = [sys.executable, "-m", "ebbflow", "lighthouse", "--bind", "127.0.0.1:0", "--min-replicas", str(replicas)]
    command += ["--heartbeat-timeout", "600s", "--join-timeout", "600s"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as lighthouse:
        try:
            assert lighthouse.stdout is not None
            address = lighthouse.stdout.readline().split()[-1]
            with ProcessPoolExecutor(len(parts), mp_context=multiprocessing.get_context("spawn")) as pool:
                before = processor_time(lighthouse.pid)
                answers = [pool.submit(ask, address, numbers, rounds) for numbers in parts]
                ends = [max(times) for times in zip(*(answer.result() for answer in answers), strict=True)]
                used = (processor_time(lighthouse.pid) - before) / rounds
        finally:
            lighthouse.terminate()
    seconds = sorted(later - earlier for earlier, later in itertools.pairwise(ends))
    print(
        f"{replicas:6} replicas  one quorum of all {seconds[len(seconds) // 2]:.3f} s (median of {len(seconds)})  "
        f"processor time of the lighthouse {used:.3f} s",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=[10, 100, 300], help="of simulated fleets")
    parser.add_argument(
        "--lighthouse", type=int, nargs="*", default=[10, 100, 300], help="replicas that ask a real one"
    )
    chosen = parser.parse_args()
    parts: list[tuple[str, list[int], Callable[[int], None]]] = [
        ("simulated", chosen.sizes, simulate),
        ("a real lighthouse", chosen.lighthouse, ask_lighthouse),
    ]
    for title, sizes, measure in parts:
        print(title)
        for size in sizes:
            measure(size)
