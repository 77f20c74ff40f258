"""What the ranks of the tests of sharded checkpoints run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, zeros

from ebbflow.errors import EbbflowError
from ebbflow.run.sharded_checkpoint import load_state, save_state

Answer = tuple[int, str, dict[str, Any]]


def make_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


def trained_net(rank: int = 0, ranks: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    """One step with momentum over the same 12 samples, of which each rank takes its part."""
    net = make_net()
    if ranks > 1:
        fully_shard(net, mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x = torch.linspace(-1, 1, 60).reshape(12, 5)[rank * 12 // ranks : (rank + 1) * 12 // ranks]
    net(x).square().mean().backward()
    optimizer.step()
    return net, optimizer


def complete_state(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": 1, "names": ("a", None)}


def whole(tensor: torch.Tensor) -> Any:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor().numpy()  # a tensor would travel by a process that has ended by then


def rank_main(rank: int, ranks: int, rendezvous: str, what: str, folder: str, answers: Any) -> None:
    """Save, or load into another sharding, and answer with whole tensors."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    group = dist.new_group(backend="gloo")
    found: dict[str, Any] = {}
    try:
        if what == "save":
            save_state(folder, complete_state(*trained_net(rank, ranks)), group=group)
        elif what == "save and fail":
            if rank == 1:
                Path(folder).mkdir(parents=True, exist_ok=True)
                (Path(folder) / "__1_0.distcp").mkdir()  # a folder in the way of this rank's file
            dist.barrier()
            save_state(folder, complete_state(*trained_net(rank, ranks)), group=group)
        else:
            mesh = init_device_mesh("cpu", (ranks,))

            def make(name: str, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
                return zeros(size, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])

            state = load_state(folder, make=make, group=group)
            found = {f"model.{name}": whole(value) for name, value in state["model"].items()}
            for number, values in state["optimizer"]["state"].items():
                found[f"momentum.{number}"] = whole(values["momentum_buffer"])
            assert (state["step"], state["names"]) == (1, ("a", None))
        problem = ""
    except EbbflowError as error:
        problem = f"{type(error).__name__}: {error}"
    answers.put((rank, problem, found))
    dist.destroy_process_group()
