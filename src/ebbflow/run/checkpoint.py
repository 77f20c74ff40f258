"""Checkpoints: written whole or not at all, read without executing anything in them.

A checkpoint is a file of `torch.save` that `torch.load(weights_only=True)` reads. It is written beside its target,
synced to the disk and then moved over it, so a crash leaves either the old one or the new one."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ebbflow.core.files import write_whole
from ebbflow.engines.replica_ranks import local_shard
from ebbflow.errors import CheckpointError

__all__ = ["load_checkpoint", "load_model", "save_checkpoint", "weights_digest"]

VERSION = 2


def save_checkpoint(path: Path, content: Mapping[str, Any]) -> None:
    """Write a checkpoint atomically. `content`: tensors, numbers, strings and plain containers of them."""
    buffer = io.BytesIO()
    torch.save({"version": VERSION, **content}, buffer)
    write_whole(path, buffer.getvalue())


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint {path}") from None
    except Exception as error:  # torch raises many kinds for a damaged file; all mean the same to the user
        reason = str(error).partition("\n")[0][:200]
        raise CheckpointError(
            f"the checkpoint {path} is damaged or not one of ebbflow's ({reason}); delete it"
        ) from error
    if not isinstance(content, dict) or content.get("version") != VERSION:
        found = content.get("version") if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(
            f"the checkpoint {path} has version {found!r}, expected {VERSION}; delete it to start anew"
        )
    return content


def load_model(model: torch.nn.Module, state: Mapping[str, torch.Tensor], origin: str) -> None:
    """Load weights and buffers; the state of another model is refused, and the first differences are named."""
    own = model.state_dict()
    problems = [f"{name} is missing" for name in own if name not in state]
    problems += [f"{name} is not in this model" for name in state if name not in own]
    problems += [
        f"{name} has shape {tuple(state[name].shape)}, this model's is {tuple(own[name].shape)}"
        for name in own
        if name in state and state[name].shape != own[name].shape
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CheckpointError(
            f"{origin} is of another model: {'; '.join(problems[:3])}{more}; use the same workload and settings, or "
            f"another output folder"
        )
    model.load_state_dict(state)


def weights_digest(model: torch.nn.Module) -> str:
    """SHA-256 digest of all weights and buffers, in the order of their names; of a sharded model, of this rank's
    shards."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(local_shard(tensor).detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
