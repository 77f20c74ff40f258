"""What the membership protocol costs by the size of a fleet: messages and seconds, simulated; and the real lighthouse.

simulated   the protocol of every replica in virtual time (tests/live/fleet_simulator.py): messages per step and
            replica; seconds from a change of the fleet to the next step of all, with steps of one second
lighthouse  torchft's lighthouse on loopback: seconds for one quorum of all replicas, and bytes of its answers
"""

from __future__ import annotations

import argparse
import itertools
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from ebbflow.live import torchft_api
from ebbflow.live.processes import LighthouseOptions, listen


def simulate(replicas: int) -> None:
    """Start a fleet, let a tenth join, and let a third vanish at once."""
    from live.fleet_simulator import SimulatedFleet

    fleet = SimulatedFleet(Random(0), step_s=(1.0, 1.0))

    def until_all_train() -> float:
        before, began = len(fleet.commits), fleet.now
        fleet.run_until(
            began + 600.0,
            stop=lambda: len(fleet.commits) > before and len(fleet.commits[-1].group) == len(fleet.running()),
        )
        return fleet.now - began

    for _ in range(replicas):
        fleet.start()
    started = until_all_train()
    fleet.messages.clear()
    began, steps = fleet.now, len(fleet.commits)
    fleet.run_until(began + 10.0)
    count = max(1, (len(fleet.commits) - steps) // replicas)
    control = sum(number for kind, number in fleet.messages.items() if kind not in ("sum", "state")) / count / replicas
    for _ in range(max(1, replicas // 10)):
        fleet.start()
    fleet.run_until(fleet.now + 0.5)
    joined = until_all_train()
    for victim in fleet.running()[: len(fleet.running()) // 3]:
        fleet.kill(victim)
    vanished = until_all_train()
    print(
        f"{replicas:6} replicas  control messages per step and replica {control:.1f}  "
        f"first step after {started:.1f} s  a tenth joins {joined:.1f} s  a third vanishes {vanished:.1f} s"
    )


def ask_lighthouse(replicas: int, rounds: int = 5) -> None:
    """Let as many threads ask the real lighthouse for quorums, a hundred per connection."""
    server = listen(LighthouseOptions(heartbeat_timeout_ms=60_000, join_timeout_ms=600_000))
    address = f"127.0.0.1:{str(server.address()).rpartition(':')[2]}"
    limit = timedelta(seconds=600)
    clients = [torchft_api.lighthouse_client(address, connect_timeout=limit) for _ in range(-(-replicas // 100))]
    for number in range(replicas):  # all are known before the first asks
        clients[0].heartbeat(f"r{number:05}:0123456789ab@127.0.0.1:40000")
    ends: list[float] = []
    barrier = threading.Barrier(replicas, action=lambda: ends.append(time.monotonic()))

    def replica(number: int) -> None:
        name = f"r{number:05}:0123456789ab@127.0.0.1:40000"
        for step in range(rounds):
            barrier.wait()
            torchft_api.request_quorum(
                clients[number // 100], name=name, store="127.0.0.1:40000", step=step,
                data={"group": "0123456789ab", "established": "True"}, timeout=limit,
            )  # fmt: skip
        barrier.wait()

    threads = [threading.Thread(target=replica, args=(number,)) for number in range(replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.shutdown()
    seconds = sorted(later - earlier for earlier, later in itertools.pairwise(ends))
    print(f"{replicas:6} replicas  one quorum of all takes {seconds[len(seconds) // 2]:.3f} s (median of {rounds})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 100, 300])
    chosen = parser.parse_args()
    print("simulated")
    for size in chosen.sizes:
        simulate(size)
    print("lighthouse, and as many threads of one process that ask it")
    for size in chosen.sizes:
        ask_lighthouse(size)
