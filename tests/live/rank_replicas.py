"""What the ranks of the test fleets' replicas run; imported by the server that forks them."""

from __future__ import annotations

import faulthandler
import logging
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from contract.suite import counted_loss, make_data, make_model
from ebbflow.engines import allreduce
from ebbflow.engines.replica_ranks import local_shard
from ebbflow.live import connection, equality, listening, rank_watch, state_transfer
from ebbflow.live.live_engine import LiveEngine
from ebbflow.live.live_session import LiveSession, join
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.run.sharded_state import without_shards
from ebbflow.workloads import cross_entropy
from ebbflow.workloads.sources import TensorSource
from live.replicas import NestedSource, break_backend, receive_later, together


def sharded(environment: dict[str, str], arguments: dict[str, Any]) -> None:
    """Train the contract's model as one rank of a replica."""
    os.environ.update({**environment, **arguments.get("environment", {}), "GLOO_SOCKET_IFNAME": "lo"})
    torch.set_num_threads(1)
    rank_watch.INTERVAL_S = arguments.get("watch_every_s", rank_watch.INTERVAL_S)
    equality.CHECK_EVERY = arguments.get("check_every", equality.CHECK_EVERY)
    connection.SOON_S = arguments.get("soon_s", 60.0)  # as in `replicas.tiny`
    state_transfer._DESCRIBED = 64
    allreduce.BUCKET_BYTES = arguments.get("bucket_bytes", allreduce.BUCKET_BYTES)
    if "logs" in arguments:
        write_output_to(Path(arguments["logs"]) / f"{environment['EBBFLOW_REPLICA']}.{os.environ['RANK']}.txt")
    device = torch.device(arguments.get("device", "cpu"))
    if device.type == "cuda":
        torch.cuda.set_device(device)  # else torch would take the GPU of the number LOCAL_RANK
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    listening._MOST_STEPS = arguments.get("most_heard", {}).get(rank, listening._MOST_STEPS)
    if rank == arguments.get("broken_rank"):
        break_backend(arguments["backend_says"])
    folder, own = Path(environment["EBBFLOW_FOLDER"]), environment["EBBFLOW_REPLICA"]
    note_buckets(folder / f"{own}.{rank}.buckets")
    note_states(folder / f"{own}.{rank}.states")
    if arguments.get("receive_later"):
        receive_later(folder, f"{own}.{rank}")
    x, y = (tensor.to(device) for tensor in make_data())
    model = make_model(batch_norm=arguments.get("batch_norm", False))
    change_model(model, arguments)
    model = model.to(device)
    inside, data_mesh = arguments.get("inside", "fsdp"), None
    if inside == "fsdp":
        # On a GPU, a mesh of torch's own choice may be one of NCCL, which refuses ranks that share the GPU.
        mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
        for layer in dict.fromkeys(model):
            if [*layer.parameters()]:
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif inside == "ddp":
        model = DistributedDataParallel(model)
    elif inside == "tensor":
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    elif inside == "sequence":
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
        layers = {
            "0": ColwiseParallel(output_layouts=Shard(0)),
            "2": SequenceParallel(sequence_dim=0),
            "3": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, layers)
    elif inside == "both":
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        data_mesh = mesh["dp"]
    make = getattr(torch.optim, arguments.get("optimizer", "SGD"))
    settings = {"momentum": 0.9} if make is torch.optim.SGD else {}
    rate = arguments.get("rates", {}).get(rank, 0.1)
    optimizer = ElasticOptimizer(
        make(model.parameters(), lr=rate, **settings), arguments.get("rule", "linear"), base_batch=8,
        epoch_samples=len(x), clip=arguments.get("clip"),
    )  # fmt: skip
    hold, full_speed = arguments.get("hold"), folder / "full-speed"

    def pace(row: Any) -> None:
        with (folder / f"{own}.{rank}.committed").open("a") as file:
            print(row.step, row.workers, file=file)
        if hold is not None and row.step >= hold and not full_speed.exists():
            time.sleep(0.2)
        if (rank, row.step) == arguments.get("tamper"):
            change_weights(model)

    counted = arguments.get("counted", False)
    with join(
        model,
        optimizer,
        NestedSource(x, y) if counted else TensorSource(x, y),
        max_steps=arguments["max_steps"],
        epochs=arguments.get("epochs", 10),
        local_batch=arguments.get("local_batch", 4),
        micro_batch=arguments.get("micro_batch"),
        seed=7,
        loss=counted_loss if counted else cross_entropy,
        ema=arguments.get("ema"),
        data_mesh=data_mesh,
        on_commit=pace,
        checkpoint_every_s=arguments.get("checkpoint_every_s", 60.0),
    ) as fleet:
        if rank == 0:
            together(folder, environment["EBBFLOW_LIGHTHOUSE"], own, arguments["all"])
        for step in fleet:
            if counted:
                for inputs, targets in step:
                    _, predicted = next(fleet.flow.engine.upcoming())  # begins with what is fetched already
                    assert torch.equal(inputs["x"], x[torch.as_tensor(predicted)])
                    total, count = counted_loss(model, inputs, targets)
                    step.backward(total, count=count)
    if arguments.get("save_weights"):
        torch.save(without_shards(model.state_dict()), folder / f"{own}.{rank}.pt")


def change_model(model: Any, arguments: dict[str, Any]) -> None:
    """`layer_norm`: add one. `layer_twice`: add a layer that is called twice. `partly_trained`: freeze a parameter, and
    add one that no pass uses."""
    if arguments.get("layer_norm"):
        model.insert(2, torch.nn.LayerNorm(8, dtype=torch.float64))
    if arguments.get("layer_twice"):
        layer = torch.nn.Linear(8, 8, dtype=torch.float64)
        model.insert(2, layer).insert(2, layer)
    if arguments.get("partly_trained"):
        next(model.parameters()).requires_grad_(False)
        model.register_parameter("spare", torch.nn.Parameter(torch.ones(3, dtype=torch.float64)))


def note_buckets(file: Path) -> None:
    """Note of every part of a message that is added up: whether the last backward pass still went on, and its size."""
    begin = LiveEngine._begin_sum

    def noted(engine: LiveEngine, part: torch.Tensor) -> Any:
        with file.open("a") as lines:
            print(int(engine._in_last_pass), part.numel(), file=lines)
        return begin(engine, part)

    LiveEngine._begin_sum = noted  # type: ignore[method-assign]


def note_states(file: Path) -> None:
    """Note when the state of a peer is loaded."""
    unpack = LiveSession.unpack

    def noted(session: LiveSession, state: Any) -> Any:
        with file.open("a") as lines:
            print("loaded", file=lines)
        return unpack(session, state)

    LiveSession.unpack = noted  # type: ignore[method-assign]


def write_output_to(path: Path) -> None:
    """Let all output of this process go into a file: what it prints, what libraries print, and where it crashes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    faulthandler.enable(file=descriptor)
    faulthandler.dump_traceback_later(100, file=descriptor)  # where it hangs, before the test gives up
    logging.basicConfig(level=logging.INFO, stream=open(descriptor, "w", buffering=1, closefd=False))  # noqa: SIM115


def change_weights(model: torch.nn.Module) -> None:
    """Change what this rank holds of the first parameter."""
    with torch.no_grad():
        local_shard(next(model.parameters())).add_(1.0)


def numbers_of_weights(rank: int, ranks: int, rendezvous: str, inside: str, answers: Any) -> None:
    """The number of a replica's weights: at first, trained, changed on rank 0, changed on rank 1, and healed."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    model = make_model()
    if inside == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    wrapped = DistributedDataParallel(model) if inside == "ddp" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def number() -> int:
        def gather(own: str) -> list[str]:
            found: list[Any] = [None] * ranks
            dist.all_gather_object(found, own)
            return found

        return equality.weights_number(model.parameters(), 100, gather=gather)

    said = [number()]
    wrapped(make_data()[0][:4]).sum().backward()
    optimizer.step()
    said.append(number())
    trained = [local_shard(parameter.detach()).clone() for parameter in model.parameters()]
    for changed in (0, 1, None):
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), trained, strict=True):
                local_shard(parameter).copy_(value)
        if changed == rank:
            change_weights(model)
        said.append(number())
    answers.put((rank, *said))
