"""Checkpoints: written whole or not at all, read without executing anything in them.

A checkpoint is a file of `torch.save` that `torch.load(weights_only=True)` reads. It is written beside its target,
synced to the disk and then moved over it, so a crash leaves either the old one or the new one."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ebbflow.core.files import write_whole
from ebbflow.engines.batches import map_batch
from ebbflow.engines.replica_ranks import local_shard
from ebbflow.errors import CheckpointError, ConfigError

__all__ = [
    "add_content", "check_extra_state", "load_checkpoint", "load_model", "save_checkpoint", "tensor_bytes",
    "unreadable_part", "weights_digest",
]  # fmt: skip

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


def unreadable_part(state: Any) -> str:
    """What in a state could be saved and not be read back, in few words; nothing if all of it is read."""
    file = io.BytesIO()
    try:
        torch.save(map_batch(state, lambda value: None if isinstance(value, torch.Tensor) else value), file)
        torch.load(io.BytesIO(file.getbuffer()), weights_only=True)
    except Exception as error:  # what pickle and torch raise is of many kinds
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        return named[1] if named else f"{type(error).__name__}: {error}".partition("\n")[0][:200]
    return ""


def check_extra_state(model: torch.nn.Module) -> None:
    """Raise ConfigError if what a module keeps by `get_extra_state` could be saved and not be read back."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is torch.nn.Module.get_extra_state:
            continue
        if what := unreadable_part(module.get_extra_state()):
            raise ConfigError(
                f"get_extra_state() of {name or 'the model'} ({type(module).__name__}) returns something that is not "
                f"read back from a checkpoint, nor by a replica that joins ({what}); let it return tensors, numbers, "
                f"texts and plain containers of them"
            )


def load_model(model: torch.nn.Module, state: Mapping[str, torch.Tensor], origin: str) -> None:
    """Load weights and buffers; the state of another model is refused, and the first differences are named."""
    own = model.state_dict()
    problems = [f"{name} is missing" for name in own if name not in state]
    problems += [f"{name} is not in this model" for name in state if name not in own]
    problems += [
        f"{name} has shape {tuple(state[name].shape)}, this model's is {tuple(own[name].shape)}"
        for name in own
        if isinstance(own[name], torch.Tensor)  # what get_extra_state returns may be anything, and another thing later
        and isinstance(state.get(name), torch.Tensor)
        and state[name].shape != own[name].shape
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CheckpointError(
            f"{origin} is of another model: {'; '.join(problems[:3])}{more}; use the same workload and settings, or "
            f"another output folder"
        )
    model.load_state_dict(state)


def tensor_bytes(tensor: torch.Tensor) -> Iterator[bytes]:
    """The numbers of a tensor, in order; of a sparse one where they lie, and those that are there."""
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        parts = [tensor.indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        parts = [tensor]
    for part in parts:
        plain = part.detach().cpu().resolve_conj().resolve_neg().contiguous()
        yield plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def add_content(digest: Any, value: Any) -> None:
    """Add tensors, arrays, numbers and texts in any nesting of containers to a digest; of anything else, its type."""
    if isinstance(value, torch.Tensor):
        digest.update(repr((tuple(value.shape), str(value.dtype))).encode())
        for part in tensor_bytes(value):
            digest.update(part)
    elif isinstance(value, np.ndarray):
        digest.update(repr((value.shape, str(value.dtype))).encode() + value.tobytes())
    elif isinstance(value, Mapping):
        for key in value:
            digest.update(repr(key).encode())
            add_content(digest, value[key])
    elif isinstance(value, list | tuple):
        for one in value:
            add_content(digest, one)
    else:
        digest.update((repr(value) if isinstance(value, str | bytes | int | float) else type(value).__name__).encode())


def weights_digest(model: torch.nn.Module) -> str:
    """SHA-256 digest of all weights and buffers and of what modules keep by `get_extra_state`, in the order of their
    names; of a sharded model, of this rank's shards."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        if isinstance(value, torch.Tensor):
            for part in tensor_bytes(local_shard(value)):
                digest.update(part)
        else:
            add_content(digest, value)
    return digest.hexdigest()
