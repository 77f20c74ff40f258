"""A step of the live engine against DDP over a limited link: two replicas in network namespaces, `tc tbf` between them.

Both train the same model (13M parameters, 50 MB of gradients) in the same two processes and take turns, so that other
load on the machine affects both alike; the ratio is the median over the turns. Both send gradients in buckets while the
backward pass goes on. With `--join` a third replica joins two others that train with Adam, and it is measured how many
steps these commit until it computes, and how much longer than usual they take. `--layers` and `--width` make the state
larger: 20 and 2048 are 1 GB.

With `--ranks 2` each replica is two processes that shard the model by FSDP2. They reach each other by loopback, and
share the link of their replica. Steps that send gradients during the backward pass (live) then take turns with steps
that send them after it (after).

Needs root, the programs ip and tc, and a kernel with tbf; otherwise it says so and ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

LIMIT = 1.05
LOCAL, STEPS, WIDTH, LAYERS = 256, 3, 1024, 12
HUB, ENDS = "ebblink-hub", ("ebblink-0", "ebblink-1", "ebblink-2")
SUBNET = "10.78.0"


def make_model(layers: int = LAYERS, width: int = WIDTH) -> Any:
    from torch import nn

    modules = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*modules, nn.Linear(width, 10))


def shard(model: Any) -> None:
    """Connect the ranks of this replica, and shard the model over them."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    for layer in model:
        if [*layer.parameters()]:
            fully_shard(layer)
    fully_shard(model)


def state_bytes(layers: int, width: int) -> int:
    """Weights and the two averages of Adam."""
    return 3 * 4 * (layers * (width + 1) * width + 10 * (width + 1))


def joining_replica(folder: Path, name: str, layers: int, width: int, local: int) -> None:
    """Train for ever; rank 0 writes down the participants and the time of every committed step."""
    import torch
    from torch.nn.functional import cross_entropy

    import ebbflow.live
    from ebbflow.workloads.sources import TensorSource

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    model = make_model(layers, width)
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    data = TensorSource(torch.randn(1 << 14, width), torch.arange(1 << 14) % 10)
    with ebbflow.live.join(
        model, optimizer, data, epochs=1_000, local_batch=local, base_batch=local, rule="linear",
        checkpoint_every_s=1e9,
    ) as fleet:  # fmt: skip
        for step in fleet:
            if rank == 0:
                with (folder / f"{name}.times").open("a") as file:
                    print(step.number, step.workers, time.monotonic(), file=file)
            for inputs, targets in step:
                step.backward(cross_entropy(model(inputs), targets))


def measure_join(rate: str, steps: int, more: list[str], ranks: int) -> tuple[float, float, list[float]]:
    """Median seconds of a step of two replicas and of three, and the seconds of each from the one before a third
    replica joined until that computed."""

    def times(name: str) -> list[tuple[int, int, float]]:
        path = folder / f"{name}.times"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(a), int(b), float(c)) for a, b, c in (line.split() for line in lines)]

    def wait(name: str, at_least: int) -> None:
        until = time.monotonic() + 300
        while len(times(name)) < at_least:
            if time.monotonic() > until:
                raise RuntimeError(f"{name} made {len(times(name))} steps in 300 s; expected {at_least}")
            time.sleep(0.2)

    with network(rate), tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        with processes(made, lambda rank: ["--joining", *more], (0, 1), ranks) as start:
            wait("r0", steps)
            start(2)
            wait("r2", 1)
            joined = times("r2")[0][0]  # the first step whose sum it has
            while sum(workers == 3 for _, workers, _ in times("r0")) < 4:
                time.sleep(0.2)
            found = times("r0")
    computes = next(number for number, workers, _ in found if workers == 3)
    seconds = {after[0]: after[2] - before[2] for before, after in pairwise(found)}  # until this step began
    usual = statistics.median(value for step, value in seconds.items() if 2 < step < joined)
    of_three = statistics.median(value for step, value in seconds.items() if step > computes)
    return usual, of_three, [seconds[step] for step in range(joined, computes + 1)]


def replica(rank: int, rule: str, turns: int, bucket_bytes: int | None) -> None:
    """One of the two processes; see `live_overhead.take_turns`."""
    import torch
    import torch.distributed as dist

    from ebbflow.engines import allreduce
    from live_overhead import take_turns

    if bucket_bytes is not None:
        allreduce.BUCKET_BYTES = bucket_bytes
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    x, y = torch.randn(LOCAL, WIDTH), torch.arange(LOCAL) % 10
    # Its gloo finds the link by GLOO_SOCKET_IFNAME.
    address = f"tcp://{SUBNET}.10:29511"
    connect = partial(dist.init_process_group, "gloo", init_method=address, rank=rank, world_size=2)
    take_turns(make_model, x, y, connect=connect, rank=rank, rule=rule, turns=turns, steps=STEPS)


def sharded_replica(rule: str, turns: int) -> None:
    """One rank of a replica. Sends gradients after the backward pass in every second turn; rank 0 of r0 prints the
    seconds per step of both ways."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy

    import ebbflow.live

    class Endless:
        def __len__(self) -> int:
            return 1 << 22

        def batch(self, indices: Any, *, train: bool) -> tuple[Any, Any]:
            return x[: len(indices)], y[: len(indices)]

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    x, y = torch.randn(LOCAL, WIDTH), torch.arange(LOCAL) % 10
    model = make_model()
    shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    with ebbflow.live.join(
        model, optimizer, Endless(), epochs=1, local_batch=LOCAL, base_batch=LOCAL, rule=rule, checkpoint_every_s=1e9,
    ) as fleet:  # fmt: skip
        replica_step: Any = fleet.flow.engine._replica
        during = replica_step._sends_in_last
        began: list[float] = []
        for step in fleet:
            turn, first = divmod(step.number, STEPS)
            if first == 0:
                began.append(time.perf_counter())
                replica_step._sends_in_last = during if turn % 2 else lambda: False
            if turn == 2 * turns + 4:  # two turns of each for warming up
                break
            for inputs, targets in step:
                step.backward(cross_entropy(model(inputs), targets))
        if os.environ["EBBFLOW_REPLICA"] == "r0" and dist.get_rank() == 0:
            taken = [(after - before) / STEPS for before, after in pairwise(began)][4:]
            for pair in zip(taken[::2], taken[1::2], strict=True):
                print(json.dumps(pair), flush=True)
        os._exit(0)


def run(*command: str, inside: str | None = None) -> None:
    subprocess.run([*(["ip", "netns", "exec", inside] if inside else []), *command], check=True, capture_output=True)


@contextlib.contextmanager
def network(rate: str) -> Iterator[None]:
    """A namespace with a bridge for the lighthouse, and one for each replica, whose link has this rate each way."""
    try:
        run("ip", "netns", "add", HUB)
        run("ip", "link", "add", "bridge", "type", "bridge", inside=HUB)
        run("ip", "addr", "add", f"{SUBNET}.1/24", "dev", "bridge", inside=HUB)
        run("ip", "link", "set", "bridge", "up", inside=HUB)
        for number, space in enumerate(ENDS):
            run("ip", "netns", "add", space)
            run("ip", "link", "add", f"r{number}", "type", "veth", "peer", "name", "eth", "netns", space, inside=HUB)
            run("ip", "link", "set", f"r{number}", "master", "bridge", "up", inside=HUB)
            run("ip", "addr", "add", f"{SUBNET}.{10 + number}/24", "dev", "eth", inside=space)
            run("ip", "link", "set", "eth", "up", inside=space)
            run("ip", "link", "set", "lo", "up", inside=space)
            limit = ("tbf", "rate", rate, "burst", "1mb", "latency", "100ms")
            run("tc", "qdisc", "add", "dev", "eth", "root", *limit, inside=space)
            run("tc", "qdisc", "add", "dev", f"r{number}", "root", *limit, inside=HUB)
        yield
    finally:
        for space in (HUB, *ENDS):
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


@contextlib.contextmanager
def processes(
    folder: str, more: Callable[[int], list[str]], ranks: Sequence[int], of_each: int = 1
) -> Iterator[Callable[[int], Any]]:
    """A lighthouse and these replicas of so many processes; yields what starts another one, and returns its first
    process."""
    lighthouse = f"{SUBNET}.1:29510"
    environment = {
        **os.environ, "RUST_LOG": "error", "EBBFLOW_LIGHTHOUSE": lighthouse, "EBBFLOW_FOLDER": folder,
        "GLOO_SOCKET_IFNAME": "eth", "EBBFLOW_MIN_REPLICAS": "2",
    }  # fmt: skip
    serve = [sys.executable, "-m", "ebbflow", "lighthouse", "--bind", lighthouse, "--min-replicas", "2"]
    started = [subprocess.Popen(["ip", "netns", "exec", HUB, *serve], env=environment, stdout=subprocess.DEVNULL)]

    def start(rank: int) -> Any:
        own = {**environment, "EBBFLOW_REPLICA": f"r{rank}", "EBBFLOW_BIND": f"{SUBNET}.{10 + rank}"}
        command = ["ip", "netns", "exec", ENDS[rank], sys.executable, __file__, "--rank", str(rank), *more(rank)]
        if of_each > 1:
            own |= {"WORLD_SIZE": str(of_each), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29520"}
            own["GLOO_SOCKET_IFNAME"] = "lo"
        for number in range(of_each):
            own_rank = {"RANK": str(number), "LOCAL_RANK": str(number)} if of_each > 1 else {}
            started.append(subprocess.Popen(command, env={**own, **own_rank}, stdout=subprocess.PIPE))
        return started[-of_each]

    try:
        for rank in ranks:
            start(rank)
        yield start
    finally:
        for process in started:
            process.kill()
            process.wait()


def measure(rate: str, rule: str, turns: int, bucket_bytes: int | None, ranks: int) -> list[tuple[float, float]]:
    more = ["--rule", rule, "--turns", str(turns), "--ranks", str(ranks)]
    more += ["--bucket-bytes", str(bucket_bytes)] if bucket_bytes is not None else []
    with (
        network(rate),
        tempfile.TemporaryDirectory() as folder,
        processes(folder, lambda rank: more, (1,), ranks) as start,
    ):
        output, _ = start(0).communicate(timeout=600)
    return [tuple(json.loads(line)) for line in output.decode().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--rates", nargs="+", default=["1gbit", "10gbit"])
    parser.add_argument("--rules", nargs="+", default=["linear", "adascale"])
    parser.add_argument("--bucket-bytes", type=int, help="least size of a bucket; a large number: no overlap")
    parser.add_argument("--join", action="store_true", help="measure what a newcomer costs the others instead")
    parser.add_argument(
        "--ranks", type=int, default=1, help="processes of each replica, which shard the model by FSDP2"
    )
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the model that is trained with --join")
    parser.add_argument("--width", type=int, default=WIDTH, help="of these layers")
    parser.add_argument("--local", type=int, default=LOCAL, help="samples of one replica per step, with --join")
    parser.add_argument("--joining", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rule", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.joining:
        folder, sizes = Path(os.environ["EBBFLOW_FOLDER"]), (arguments.layers, arguments.width, arguments.local)
        return joining_replica(folder, f"r{arguments.rank}", *sizes)
    if arguments.rank is not None and arguments.ranks > 1:
        return sharded_replica(arguments.rule, arguments.turns)
    if arguments.rank is not None:
        return replica(arguments.rank, arguments.rule, arguments.turns, arguments.bucket_bytes)
    if shutil.which("ip") is None or shutil.which("tc") is None or os.geteuid() != 0:
        print("skipped: network namespaces and limited links need root and the programs ip and tc")
        return None
    if arguments.join:
        size = state_bytes(arguments.layers, arguments.width)
        more = [f"--{name}={getattr(arguments, name)}" for name in ("layers", "width", "local")]
        print(f"{size / 1e9:.2f} GB of state; seconds of the others")
        print(
            f"{'link':10}{'step':>8}{'of three':>10}{'transfer alone':>16}{'lost':>8}  steps until the third computes"
        )
        for rate in arguments.rates:
            usual, of_three, during = measure_join(rate, arguments.turns, more, arguments.ranks)
            transfer = size * 8 / (int(rate.removesuffix("gbit")) * 1e9)
            lost = sum(during) - len(during) * usual
            steps = " ".join(f"{seconds:.2f}" for seconds in during)
            print(f"{rate:10}{usual:8.2f}{of_three:10.2f}{transfer:16.2f}{lost:8.2f}  {steps}", flush=True)
        return None
    peer, limit = ("DDP", f"{LIMIT:8.2f}") if arguments.ranks == 1 else ("after", "")
    print(f"{'link':10}{'rule':10}{peer:>10}{'live':>10}{'ratio':>8}{'limit' if limit else '':>8}")
    for rate in arguments.rates:
        for rule in arguments.rules:
            turns = measure(rate, rule, arguments.turns, arguments.bucket_bytes, arguments.ranks)
            theirs, live = (statistics.median(column) for column in zip(*turns, strict=True))
            ratio = statistics.median(ours / other for other, ours in turns)
            print(f"{rate:10}{rule:10}{theirs * 1e3:8.1f}ms{live * 1e3:8.1f}ms{ratio:8.3f}{limit}", flush=True)
    return None


if __name__ == "__main__":
    main()
