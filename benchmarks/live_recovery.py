"""What a change of the fleet costs: kill -9, SIGTERM, a new replica; 11M parameters, replicas on loopback.

    killed   from kill -9 to the next step that the others commit
    left     from the last step with a replica that was told to leave to the next step without it
    joined   from the time when a started replica is ready for its training loop to its first committed step

The lighthouse has the default heartbeat timeout. With `--torchrun`, torchrun's elastic restart is measured in the same
run: from kill -9 of one of its workers to the next step of the restarted workers, which import torch again. It takes
about a minute.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMITS = {"killed": 1.2, "left": 0.3, "joined": 2.0}
SAMPLES, LOCAL = 1 << 22, 8


def eleven_million() -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 400), nn.Linear(400, 10)
    )


def replica() -> None:
    """What each process of the fleet runs: endless steps, each logged with the time of its commit."""
    import torch

    import ebbflow.live
    from ebbflow.workloads import cross_entropy

    class Endless:
        def __len__(self) -> int:
            return SAMPLES

        def batch(self, indices: Any, *, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.randn(len(indices), 512), torch.as_tensor(indices) % 10

    torch.set_num_threads(1)
    model = eleven_million()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    log = (Path(os.environ["EBBFLOW_FOLDER"]) / f"{os.environ['EBBFLOW_REPLICA']}.times").open("a", buffering=1)
    with ebbflow.live.join(
        model, optimizer, Endless(), epochs=1, local_batch=LOCAL, base_batch=LOCAL, loss=cross_entropy,
        on_commit=lambda row: log.write(json.dumps([time.time(), row.step, row.workers]) + "\n"),
    ) as fleet:  # fmt: skip
        log.write(json.dumps([time.time(), -1, 0]) + "\n")
        fleet.run()


class Processes:
    """A lighthouse here and replicas in their own processes."""

    def __init__(self, folder: Path) -> None:
        os.environ["RUST_LOG"] = "error"  # before torchft is loaded
        from torchft._torchft import LighthouseServer

        from ebbflow.live.protocol import HEARTBEAT_TIMEOUT_MS

        self.folder = folder
        self.lighthouse = LighthouseServer(
            bind="127.0.0.1:0",
            min_replicas=1,
            join_timeout_ms=10_000,
            quorum_tick_ms=50,
            heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS,
        )
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        """Start a replica."""
        environment = {
            **os.environ,
            "EBBFLOW_LIGHTHOUSE": "127.0.0.1:" + self.lighthouse.address().rpartition(":")[2],
            "EBBFLOW_REPLICA": name,
            "EBBFLOW_FOLDER": str(self.folder),
        }
        self.processes[name] = subprocess.Popen([sys.executable, __file__, "--replica"], env=environment)

    def times(self, name: str) -> list[tuple[float, int, int]]:
        """(time, step, replicas) of its commits so far; the first entry says when it was ready."""
        path = self.folder / f"{name}.times"
        return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for the fleet."""
        deadline = time.monotonic() + 120
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError("the fleet did not come that far")
            time.sleep(0.05)

    def together(self, *names: str) -> None:
        """Until all of them have committed a few steps with each other."""
        self.until(lambda: all([row[2] for row in self.times(name)[-3:]] == [len(names)] * 3 for name in names))

    def close(self) -> None:
        """End everything."""
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.lighthouse.shutdown()


def measure(rounds: int) -> dict[str, list[float]]:
    results: dict[str, list[float]] = {"step": [], "killed": [], "left": [], "joined": []}
    with tempfile.TemporaryDirectory() as folder:
        fleet = Processes(Path(folder))
        try:
            for name in ("r0", "r1", "r2"):
                fleet.start(name)
            fleet.together("r0", "r1", "r2")
            for number in range(rounds):
                for how in ("killed", "left"):
                    victim = f"r{1 + (number + (how == 'left')) % 2}"
                    stays = [name for name in ("r0", "r1", "r2") if name != victim]
                    began = time.time()
                    fleet.processes[victim].send_signal(signal.SIGKILL if how == "killed" else signal.SIGTERM)
                    fleet.processes[victim].wait()
                    fleet.together(*stays)
                    rows = fleet.times("r0")
                    after = next(i for i, row in enumerate(rows) if row[0] > began and row[2] == 2)
                    results[how].append(rows[after][0] - (began if how == "killed" else rows[after - 1][0]))
                    (fleet.folder / f"{victim}.times").unlink()
                    fleet.start(victim)
                    fleet.together("r0", "r1", "r2")
                    ready, first = fleet.times(victim)[:2]
                    results["joined"].append(first[0] - ready[0])
            rows = fleet.times("r0")[-20:]
            results["step"] = [b[0] - a[0] for a, b in itertools.pairwise(rows)]
        finally:
            fleet.close()
    return results


def worker_of_torchrun() -> None:
    """The same model under DDP, restarted by torchrun when a worker dies."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(eleven_million())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    path = Path(os.environ["BENCH_FOLDER"]) / f"{os.getpid()}.times"
    with path.open("a", buffering=1) as log:
        while True:
            x, y = torch.randn(LOCAL, 512), torch.arange(LOCAL) % 10
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            log.write(f"{time.time()}\n")


def measure_torchrun() -> float:
    """Seconds from a kill to the next step; infinite if it does not come within 90 s."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2", "--max-restarts=3",
            "--monitor-interval=0.1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", __file__,
            "--torchrun-worker",
        ]  # fmt: skip
        # Without the last one a restarted group may wait for the store of the old one.
        environment = {
            **os.environ, "BENCH_FOLDER": folder, "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"
        }  # fmt: skip
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)  # reports deaths at length

        def steps() -> dict[str, list[str]]:
            """When the steps of each worker ended, by its process number."""
            return {path.stem: path.read_text().split() for path in Path(folder).glob("*.times")}

        def wait(condition: Callable[[], bool]) -> bool:
            deadline = time.monotonic() + 90
            while not condition():
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.05)
            return True

        try:
            if not wait(lambda: [len(times) > 5 for times in steps().values()] == [True, True]):
                raise TimeoutError("torchrun's workers did not begin to train")
            old = set(steps())
            began = time.time()
            os.kill(int(min(old)), signal.SIGKILL)
            if not wait(lambda: any(times for worker, times in steps().items() if worker not in old)):
                return math.inf
            return min(float(times[0]) for worker, times in steps().items() if worker not in old and times) - began
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--torchrun", action="store_true")
    parser.add_argument("--replica", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--torchrun-worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.replica:
        return replica()
    if arguments.torchrun_worker:
        return worker_of_torchrun()
    results = measure(arguments.rounds)
    print(f"one step of three replicas: {statistics.median(results['step']):.3f} s\n")
    print(f"{'':8}{'median':>9}{'worst':>9}{'limit':>9}{'ratio':>9}")
    for name, limit in LIMITS.items():
        middle = statistics.median(results[name])
        print(f"{name:8}{middle:8.2f}s{max(results[name]):8.2f}s{limit:8.2f}s{middle / limit:9.2f}")
    if arguments.torchrun:
        restart = measure_torchrun()
        killed = statistics.median(results["killed"])
        print(f"\nkilled: ours {killed:.2f} s, torchrun's restart {restart:.1f} s, ratio {killed / restart:.3f}")
    return None


if __name__ == "__main__":
    main()
