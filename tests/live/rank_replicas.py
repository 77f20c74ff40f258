"""What the ranks of the test fleets' replicas run; imported by the server that forks them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from contract.suite import counted_loss, make_data, make_model
from ebbflow.live import rank_watch
from ebbflow.live.live_session import join
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.workloads import cross_entropy
from ebbflow.workloads.sources import TensorSource
from live.replicas import NestedSource, break_backend, together


def sharded(environment: dict[str, str], arguments: dict[str, Any]) -> None:
    """Train the contract's model as one rank of a replica."""
    os.environ.update({**environment, **arguments.get("environment", {}), "GLOO_SOCKET_IFNAME": "lo"})
    torch.set_num_threads(1)
    rank_watch.INTERVAL_S = arguments.get("watch_every_s", rank_watch.INTERVAL_S)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == arguments.get("broken_rank"):
        break_backend(arguments["backend_says"])
    x, y = make_data()
    model = make_model(batch_norm=arguments.get("batch_norm", False))
    inside, data_mesh = arguments.get("inside", "fsdp"), None
    if inside == "fsdp":
        for layer in model:
            if [*layer.parameters()]:
                fully_shard(layer)
        fully_shard(model)
    elif inside == "ddp":
        model = DistributedDataParallel(model)
    elif inside == "tensor":
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
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
    hold, full_speed = arguments.get("hold"), Path(environment["EBBFLOW_FOLDER"]) / "full-speed"

    def pace(row: Any) -> None:
        if hold is not None and row.step >= hold and not full_speed.exists():
            time.sleep(0.2)

    counted = arguments.get("counted", False)
    with join(
        model,
        optimizer,
        NestedSource(x, y) if counted else TensorSource(x, y),
        max_steps=arguments["max_steps"],
        epochs=10,
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
            folder, own = fleet.fleet.folder, environment["EBBFLOW_REPLICA"]
            together(folder, environment["EBBFLOW_LIGHTHOUSE"], own, arguments["all"])
        for step in fleet:
            if counted:
                for inputs, targets in step:
                    _, predicted = next(fleet.flow.engine.upcoming())  # begins with what is fetched already
                    assert torch.equal(inputs["x"], x[torch.as_tensor(predicted)])
                    total, count = counted_loss(model, inputs, targets)
                    step.backward(total, count=count)
