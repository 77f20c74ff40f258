"""What the processes of the test fleets run; imported by the server that forks them."""

from __future__ import annotations

import ctypes
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

from contract.suite import EPOCHS, counted_loss, make_data, make_model, nested
from ebbflow.core.files import write_whole
from ebbflow.engines import allreduce, process_group
from ebbflow.engines.base import Faults
from ebbflow.engines.process_group import ProcessGroup
from ebbflow.live import connection, equality, membership, peer_watch, repeated_failures, state_transfer
from ebbflow.live.connection import FleetConnection
from ebbflow.live.live_session import join
from ebbflow.live.protocol import fetch_heartbeat_ages
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.rules import auto_rule
from ebbflow.torch_api import gloo_group
from ebbflow.workloads import cross_entropy
from ebbflow.workloads.sources import TensorSource
from live import buckets as buckets  # so that fsspec knows the stand-in

# The first optimizer of a process loads seconds worth of torch: here, once, and not in every replica.
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


class NestedSource(TensorSource):
    """The same samples in containers."""

    def batch(self, indices: Any, *, train: bool) -> Any:
        return nested(super().batch(indices, train=train))


class HangingSource(TensorSource):
    """Samples that are not there before the file `release` is, from one fetch on: a data loader that hangs."""

    fetches = 0
    file: Path

    def batch(self, indices: Any, *, train: bool) -> Any:
        self.fetches += train
        while self.fetches > 6 and not self.file.exists():
            time.sleep(0.01)
        return super().batch(indices, train=train)


class NotedSource(TensorSource):
    """Samples that note in a file that they were fetched, one line for each micro-batch."""

    file: Path

    def batch(self, indices: Any, *, train: bool) -> Any:
        if train:
            with self.file.open("a") as file:
                print(*indices.tolist(), file=file)
        return super().batch(indices, train=train)


def tiny(environment: dict[str, str], arguments: dict[str, Any]) -> None:
    """Train the contract's model.

    `all`: no replica begins without these. `hold`: from this step on every step takes a while (`stop_holding`), by
    default 0.2 seconds (`hold_s`). `gate`: after this step they wait for the file `gate-open`. `patience_s`: how long a
    replica waits for its peers, in the place of 60 and 10 seconds, and half of it in the place of 5. `soon_s`: how long
    a replica waits for a state before it listens, in the place of half a second, which may be too short on a busy
    machine. `failing_s`: for how long it may fail with the same replicas, in the place of two minutes. `auto`: other
    constants of the rule of this name.
    """
    os.environ.update({**environment, **arguments.get("environment", {})})
    torch.set_num_threads(1)
    allreduce.BUCKET_BYTES = arguments.get("bucket_bytes", allreduce.BUCKET_BYTES)
    connection.SOON_S = arguments.get("soon_s", 60.0)
    state_transfer._DESCRIBED = 64  # so that even the tensors of a tiny model are sent as large ones are
    if (patience_s := arguments.get("patience_s")) is not None:
        connection._COLLECTIVE_TIMEOUT_S = connection._CONNECT_TIMEOUT_S = patience_s
        peer_watch._LOOK_EVERY_S = membership._LEFT_OUT_S = patience_s / 2
    repeated_failures._MAX_FAILING_S = arguments.get("failing_s", repeated_failures._MAX_FAILING_S)
    enter_network(arguments.get("network"))
    folder, own = Path(environment["EBBFLOW_FOLDER"]), environment["EBBFLOW_REPLICA"]
    if arguments.get("receive_later"):
        receive_later(folder, own)
    x, y = make_data()
    device = torch.device(arguments.get("device", "cpu"))
    model = make_model(batch_norm=arguments.get("batch_norm", True)).to(device)
    if (initial := arguments.get("initial")) is not None:
        torch.manual_seed(initial)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
    for name, value in arguments.get("auto", {}).items():
        setattr(auto_rule, name, value)
    rule, counted = arguments.get("rule", "linear"), arguments.get("counted", False)
    optimizer = ElasticOptimizer(
        torch.optim.SGD(model.parameters(), lr=arguments.get("lr", 0.1), momentum=arguments.get("momentum", 0.9)),
        rule, base_batch=8, epoch_samples=len(x),
        memory_steps=arguments.get("memory_steps", 1000.0),
    )  # fmt: skip
    change(model, x, arguments.get("change", ""))
    if (said := arguments.get("backend_says")) is not None:
        break_backend(said)
    if arguments.get("notices_late"):
        notice_late(folder / "release")
    equality.CHECK_EVERY = arguments.get("check_every", equality.CHECK_EVERY)
    hold, full_speed = arguments.get("hold"), folder / "full-speed"

    def pace(row: Any) -> None:
        if arguments.get("note"):
            with (folder / f"{own}.committed").open("a") as file:
                print(row.step, file=file)
        if hold is not None and row.step >= hold and not full_speed.exists():
            time.sleep(arguments.get("hold_s", 0.2))
        while row.step == arguments.get("gate") and not (folder / "gate-open").exists():
            time.sleep(0.01)
        if row.step == arguments.get("tamper"):
            with torch.no_grad():
                next(model.parameters()).add_(1.0)

    data: TensorSource = NestedSource(x, y) if counted else TensorSource(x, y).to(device)
    if arguments.get("note"):
        data = NotedSource(x, y)
        data.file = folder / f"{own}.fetched"

    if arguments.get("hang"):
        data = HangingSource(x, y)
        data.file = folder / "release"

    with join(
        model,
        optimizer,
        data,
        epochs=arguments.get("epochs", EPOCHS),
        max_steps=arguments.get("max_steps"),
        policy=arguments.get("policy", "follow"),
        local_batch=4,
        micro_batch=arguments.get("micro_batch"),
        compile=arguments.get("compile"),
        seed=arguments.get("seed", 7),
        loss=counted_loss if counted else cross_entropy,
        on_commit=pace,
        checkpoint_every_s=arguments.get("checkpoint_every_s", 60.0),
        ema=arguments.get("ema"),
    ) as fleet:
        if (everybody := arguments.get("all")) is not None:
            together(folder, environment["EBBFLOW_LIGHTHOUSE"], own, everybody)
        fleet.run()


def change(model: Any, x: torch.Tensor, what: str) -> None:
    """Make this replica another one than the others, in a way that no setting tells."""
    if what == "activation":
        place = next(name for name, one in model.named_modules() if isinstance(one, torch.nn.ReLU))
        model.set_submodule(place, torch.nn.SiLU())
    elif what == "data":
        x[-1] += 1.0
    elif what == "python":
        platform.python_version_tuple = lambda: ("2", "7", "18")
    elif what == "memory":
        model[0].weight.data = model[0].weight.data.t().contiguous().t()
    elif what == "passes":  # which every replica counts for itself
        model.register_buffer("passes", torch.tensor(0))
        model.register_forward_pre_hook(lambda model, _: model.passes.add_(1) and None)


def break_backend(said: str) -> None:
    """Let every sum of tensors fail, as NCCL fails for two processes on one GPU."""

    class Broken:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.whole = gloo_group(*arguments, **options)

        def allreduce(self, *_: Any) -> None:
            raise RuntimeError(said)

    process_group.gloo_group = Broken  # type: ignore[assignment]


def notice_late(file: Path) -> None:
    """Let this process learn that a step has failed only when the file is there, as from a backend that blocks."""
    failed = FleetConnection.failed

    def waiting(*arguments: Any) -> None:
        while not file.exists():
            time.sleep(0.01)
        failed(*arguments)

    FleetConnection.failed = waiting  # type: ignore[method-assign]


def receive_later(folder: Path, own: str) -> None:
    """Let this process receive no tensor of a state before the file `release` is there, or one of its own.

    It tells, by a file `asked`, when it asks the lighthouse for the first time.
    """
    receive, ask = ProcessGroup.receive_tensors, FleetConnection._ask

    def asking(*arguments: Any) -> None:
        ask(*arguments)
        (folder / f"{own}.asked").touch()

    def waiting(*arguments: Any) -> None:
        (folder / f"{own}.receiving").touch()
        while not ((folder / "release").exists() or (folder / f"{own}.release").exists()):
            time.sleep(0.01)
        receive(*arguments)

    ProcessGroup.receive_tensors = waiting  # type: ignore[method-assign]
    FleetConnection._ask = asking  # type: ignore[method-assign]


def enter_network(name: str | None) -> None:
    """Move this process into a network namespace."""
    if name is not None:
        with Path(f"/var/run/netns/{name}").open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000) != 0:  # CLONE_NEWNET
                raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")


def lighthouse(network: str | None, address: str, heartbeat_ms: int, there: Path | None = None) -> None:
    """A lighthouse, perhaps in a network namespace, until it is killed; its port is written into the file `there`."""
    enter_network(network)
    from torchft._torchft import LighthouseServer

    server = LighthouseServer(
        bind=address, min_replicas=1, join_timeout_ms=10_000, quorum_tick_ms=20, heartbeat_timeout_ms=heartbeat_ms
    )
    if there is not None:
        write_whole(there, server.address().rpartition(":")[2].encode())
    while server:
        time.sleep(1)


def together(folder: Path, lighthouse: str, own: str, everybody: list[str]) -> None:
    """Wait until all are here and send heartbeats: then none of them begins without the others.

    A replica that is not one of them, or comes back, does not wait for heartbeats: some may have ended.
    """
    here = folder / f"{own}.here"
    first = own in everybody and not here.exists()
    here.touch()
    while not all((folder / f"{name}.here").exists() for name in everybody):
        time.sleep(0.001)
    while first and not set(everybody) <= heard(lighthouse):
        time.sleep(0.01)


def heard(lighthouse: str) -> set[str]:
    """The replicas that send heartbeats, as far as the lighthouse knows."""
    ages = fetch_heartbeat_ages(lighthouse, timeout_s=5)
    return {name.partition(":")[0] for name, age in ages.items() if age < 0.5}


class PlanSizes:
    """The plan's workers, computed by whatever replicas there are, without those that the scripted faults took away.

    A loss in a step counts once its replica is dead. Every loss kills one, so the number of replicas says how many.
    """

    def __init__(self, plan: Any, faults: Faults, replicas: int) -> None:
        self.plan, self.faults, self.replicas = plan, faults, replicas

    def __call__(self, step: int, replicas: int) -> tuple[int, int]:
        size = self.plan.at(step)
        dead = self.replicas - replicas
        losses = sorted((at, worker) for at, workers in self.faults.losses.items() for worker in workers)
        away = {worker for _, worker in losses[:dead]}
        for at, workers in self.faults.returns.items():
            away -= {w for w in workers if at <= step and not any(at < s <= step and w == v for s, v in losses[:dead])}
        return self.reduced(size, away)

    @staticmethod
    def reduced(size: Any, away: set[int]) -> tuple[int, int]:
        present = Faults(away=away).present(-1, size)
        return present.workers, present.samples
