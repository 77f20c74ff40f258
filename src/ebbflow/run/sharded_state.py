"""The state of a run whose tensors the ranks of a replica hold in shards: without them, with them again, or whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ebbflow.engines.batches import map_batch
from ebbflow.engines.replica_ranks import ReplicaRanks, is_sharded
from ebbflow.engines.shards import as_shard
from ebbflow.run.kept_states import BRANCH_STATES, KEPT

__all__ = ["shard_maker", "whole_state", "with_shards", "without_shards"]


def without_shards(state: Any) -> Any:
    """A state in plain containers, with this rank's shards as plain tensors in the place of DTensors."""
    return map_batch(state, lambda value: value.to_local() if is_sharded(value) else value)


def whole_state(state: Any, ranks: ReplicaRanks) -> Any:
    """A state with whole tensors in the memory of the host of rank 0, in the place of DTensors; all ranks call this.

    On the other ranks they are None. One tensor after the other is collected, so that a device holds one at a time.
    """

    def whole(value: Any) -> Any:
        if not is_sharded(value):
            return value
        mesh = value.device_mesh
        if all(dist.get_backend(mesh.get_group(dimension)) == "gloo" for dimension in range(mesh.ndim)):
            value = value.cpu()  # what gloo would do with the memory of a GPU here, it does not check
        full = value.full_tensor()
        return full.cpu() if ranks.leads else None

    return map_batch(state, whole)


def with_shards(state: Mapping[str, Any], model: torch.nn.Module, inner: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of a flow that `without_shards` made plain on the same rank of another replica, with DTensors again."""
    like: dict[str, Any] = {**dict(model.named_parameters()), **model.state_dict()}
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]

    def by_name(tensors: Mapping[str, Any] | None) -> dict[str, Any] | None:
        return None if tensors is None else {name: _divided(t, like.get(name)) for name, t in tensors.items()}

    divided = dict(state)
    for key in ("model", "average", "sum"):
        if key in divided:
            divided[key] = by_name(divided[key])
    if "inner" in state.get("optimizer", {}):
        optimizer = dict(state["optimizer"])
        of_parameters = {
            index: {name: _divided(value, parameters[index]) for name, value in values.items()}
            for index, values in optimizer["inner"]["state"].items()
        }
        divided["optimizer"] = {**optimizer, "inner": {**optimizer["inner"], "state": of_parameters}}
    for key in (*KEPT, *BRANCH_STATES):
        if divided.get(key) is not None:
            divided[key] = with_shards(divided[key], model, inner)
    return divided


_KEPT = re.compile(rf"^({'|'.join(KEPT)})\.(({'|'.join(BRANCH_STATES)})\.)?")
"""Where the states that a flow keeps for its rule lie in a checkpoint."""


def shard_maker(model: torch.nn.Module, inner: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
    """Make the function with which the shards of this rank are read from a checkpoint (`load_state`).

    A tensor is divided like the parameter that it belongs to, if it has its shape; any other is whole.
    """
    like: dict[str, Any] = {**dict(model.named_parameters()), **model.state_dict()}
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]

    def make(name: str, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        part, _, own = _KEPT.sub("", name).partition(".")
        found: Any = like.get(own) if part in ("model", "average", "sum") else None
        if state := re.match(r"optimizer\.inner\.state\.(\d+)\.", f"{part}.{own}"):
            found = parameters[int(state[1])]
        if not is_sharded(found) or found.shape != size:
            return torch.empty(size, dtype=dtype)
        return torch.empty_like(found, dtype=dtype, requires_grad=False)

    return make


def _divided(value: Any, like: Any) -> Any:
    if not is_sharded(like) or not isinstance(value, torch.Tensor) or is_sharded(value):
        return value
    return as_shard(value.to(like.device), like) if value.shape == like.to_local().shape else value
