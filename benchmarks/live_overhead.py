"""A step of the live engine against plain DDP: the same model, 11M parameters, two replicas, gloo over loopback.

Both train in the same two processes and take turns, so that other load on the machine affects both alike; the ratio is
the median over the turns. Both add up gradients in buckets during the backward pass. The live engine asks the
lighthouse before every step, confirms the step with the others, and writes its record; with AdaScale it measures the
noise, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

LIMIT = 1.05
LOCAL, STEPS = 64, 5


def take_turns(
    make_model: Callable[[], Any], x: Any, y: Any, *, connect: Callable[[], None], rank: int, rule: str, turns: int,
    steps: int,
) -> None:  # fmt: skip
    """Train with DDP and with the live engine in turns; rank 0 prints the seconds per step of both for each turn.

    `connect` initialises torch.distributed for two processes. It is called after the process has joined the fleet,
    which would take these two for the ranks of one replica. Ends the process, in the middle of an epoch.
    """
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    import ebbflow.live

    class Endless:
        def __len__(self) -> int:
            return 1 << 22

        def batch(self, indices: Any, *, train: bool) -> tuple[Any, Any]:
            return x, y

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    with ebbflow.live.join(
        model, optimizer, Endless(), epochs=1, local_batch=len(x), base_batch=len(x), rule=rule, checkpoint_every_s=1e9
    ) as fleet:
        connect()
        plain = DistributedDataParallel(make_model())
        plain_optimizer = torch.optim.SGD(plain.parameters(), lr=1e-4, momentum=0.9)

        def ddp_step() -> None:
            plain_optimizer.zero_grad()
            cross_entropy(plain(x), y).backward()
            plain_optimizer.step()

        dist.barrier()
        rounds = iter(fleet)
        step = next(rounds)

        def live_step() -> None:
            nonlocal step
            for inputs, targets in step:
                step.backward(cross_entropy(model(inputs), targets))
            step = next(rounds)

        def seconds(what: Callable[[], None]) -> float:
            dist.barrier()
            began = time.perf_counter()
            for _ in range(steps):
                what()
            dist.barrier()
            return (time.perf_counter() - began) / steps

        for turn in range(turns + 2):
            order = (ddp_step, live_step) if turn % 2 else (live_step, ddp_step)
            taken = {what: seconds(what) for what in order}
            if rank == 0 and turn >= 2:
                print(json.dumps([taken[ddp_step], taken[live_step]]), flush=True)
        sys.stdout.flush()
        os._exit(0)


def replica(rank: int, rule: str, turns: int) -> None:
    """One of the two processes."""
    import torch
    import torch.distributed as dist

    from live_recovery import eleven_million

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    x, y = torch.randn(LOCAL, 512), torch.arange(LOCAL) % 10
    store = dist.FileStore(str(Path(os.environ["EBBFLOW_FOLDER"]) / "ddp"), 2)
    connect = partial(dist.init_process_group, "gloo", store=store, rank=rank, world_size=2)
    take_turns(eleven_million, x, y, connect=connect, rank=rank, rule=rule, turns=turns, steps=STEPS)


def measure(rule: str, turns: int) -> list[tuple[float, float]]:
    os.environ["RUST_LOG"] = "error"  # before torchft is loaded
    from torchft._torchft import LighthouseServer

    from ebbflow.live.protocol import HEARTBEAT_TIMEOUT_MS

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=10_000, heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS
    )
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(2):
            environment = {
                **os.environ,
                "EBBFLOW_LIGHTHOUSE": "127.0.0.1:" + lighthouse.address().rpartition(":")[2],
                "EBBFLOW_REPLICA": f"r{rank}",
                "EBBFLOW_FOLDER": folder,
                "GLOO_SOCKET_IFNAME": "lo",
            }
            command = [sys.executable, __file__, "--rank", str(rank), "--rule", rule, "--turns", str(turns)]
            processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE))
        try:
            output, _ = processes[0].communicate(timeout=300)
            processes[1].wait(timeout=60)
        finally:
            for process in processes:
                process.kill()
                process.wait()
            lighthouse.shutdown()
    return [tuple(json.loads(line)) for line in output.decode().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--rule", default="linear", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        return replica(arguments.rank, arguments.rule, arguments.turns)
    print(f"{'rule':10}{'DDP':>10}{'live':>10}{'ratio':>8}{'limit':>8}")
    for rule in ("linear", "adascale"):
        turns = measure(rule, arguments.turns)
        ddp, live = (statistics.median(column) for column in zip(*turns, strict=True))
        ratio = statistics.median(ours / theirs for theirs, ours in turns)
        print(f"{rule:10}{ddp * 1e3:8.1f}ms{live * 1e3:8.1f}ms{ratio:8.3f}{LIMIT:8.2f}")
    return None


if __name__ == "__main__":
    main()
