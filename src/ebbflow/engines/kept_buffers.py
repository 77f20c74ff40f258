"""The buffers that forward passes change, apart from batch norm's: what a step that does not count must put back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch

from ebbflow.engines.replica_ranks import local_shard
from ebbflow.torch_api import BatchNorm, foreach_copy_

__all__ = ["KeptBuffers", "differing_buffers"]

_MOST_BYTES = 1 << 28  # copied before every step; a quantised backbone has gigabytes of buffers that never change


class KeptBuffers:
    """Copies of a model's buffers as they were before a step, such as spectral norm's vectors, a codebook or a counter.

    `begin` copies them and `rollback` puts them back: contents that were changed in place, and tensors that a forward
    pass has replaced. They are copied before each step, since neither a write through `.data` nor one from a CUDA graph
    shows in the version of a tensor. Limits: of more than 256 MB of buffers the smaller ones are copied, and of the
    others only replaced tensors are put back; a buffer that the model did not have when this was made stays.
    """

    def __init__(self, model: torch.nn.Module, *, batch_norm: bool = False) -> None:
        """`batch_norm`: keep the running statistics of batch norm, too."""
        self._slots: list[tuple[dict[str, Any], str]] = []
        """Where the modules have their buffers; a module finds an attribute several times as slowly."""
        self._names: list[str] = []
        for prefix, module in model.named_modules():
            statistics = isinstance(module, BatchNorm) and module.running_mean is not None and not batch_norm
            buffers: dict[str, Any] = vars(module)["_buffers"]
            for name in buffers:
                if not (statistics and name in ("running_mean", "running_var", "num_batches_tracked")):
                    self._slots.append((buffers, name))
                    self._names.append(f"{prefix}.{name}".lstrip("."))
        self._held: list[Any] = []
        """The tensors of before the step, or None, by slot."""
        self._kept: list[torch.Tensor] = []
        """Those of them that are copied."""
        self._copies: list[torch.Tensor] = []
        self._after: tuple[list[Any], list[torch.Tensor]] | None = None
        """While a step is paused: the tensors that it left, by slot, and the contents that it left in those kept."""
        self._open = False

    @torch.no_grad()
    def begin(self) -> None:
        """Remember the buffers of before the step. Does not synchronise."""
        self._open, self._after = True, None
        held = self._present()
        if not _same(held, self._held):
            self._held, self._kept = held, _restorable(held)
            self._copies = [torch.empty_like(local_shard(tensor)) for tensor in self._kept]
        for index, (tensor, copy) in enumerate(zip(self._kept, self._copies, strict=True)):
            if local_shard(tensor).shape != copy.shape:
                self._copies[index] = torch.empty_like(local_shard(tensor))
        _copy(self._copies, self._kept)

    def commit(self) -> None:
        """The step counts: its buffers stay."""
        self._open = False

    def rollback(self) -> None:
        """Put back the buffers of before the step; without a step there is nothing to put back."""
        if self._open:
            self._open = False
            self._write(self._held, self._copies)

    def pause(self) -> None:
        """Put back the buffers of before the step, and keep those that it left for `resume`."""
        if self._open:
            self._after = self._present(), [local_shard(tensor).clone() for tensor in self._kept]
        self.rollback()

    def resume(self) -> None:
        """Put back what the step had left when it was paused; the buffers of before it are those of now."""
        if self._after is not None:
            self._write(*self._after)
            self._open, self._after = True, None

    @torch.no_grad()
    def changed(self) -> list[str]:
        """The names of the buffers that the open step has changed. Waits for the device."""
        if not self._open:
            return []
        copies = {id(tensor): copy for tensor, copy in zip(self._kept, self._copies, strict=True)}
        return [
            name
            for name, held, now in zip(self._names, self._held, self._present(), strict=True)
            if held is not now or (id(held) in copies and not torch.equal(local_shard(held), copies[id(held)]))
        ]

    def _present(self) -> list[Any]:
        return [buffers.get(name) for buffers, name in self._slots]

    @torch.no_grad()
    def _write(self, held: Sequence[Any], copies: Sequence[torch.Tensor]) -> None:
        for (buffers, name), tensor in zip(self._slots, held, strict=True):
            if buffers.get(name) is not tensor:
                buffers[name] = tensor
        for tensor, copy in zip(self._kept, copies, strict=True):
            if local_shard(tensor).shape != copy.shape:  # it was resized, or given other data
                tensor.data = copy.clone()
        _copy(self._kept, copies)


def differing_buffers(names: Sequence[str], who: str) -> str:
    """What a record says of buffers that each `who` (replica, rank) has for itself.

    >>> differing_buffers(["norm.u"], "rank").partition(",")[0]
    'norm.u: changed by forward passes'
    """
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return (
        f"{shown}: changed by forward passes, and not added up as batch norm's are; each {who} has what its own "
        f"micro-batches left"
    )


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _copy(into: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copy tensors into others, with one kernel for those that follow each other and are alike."""
    pairs = zip(map(local_shard, into), map(local_shard, tensors), strict=True)
    for _, alike in groupby(pairs, key=lambda pair: (pair[0].dtype, pair[0].device)):
        targets, sources = zip(*alike, strict=True)
        foreach_copy_(targets, sources)


def _restorable(held: Sequence[Any]) -> list[torch.Tensor]:
    """The buffers whose content can be put back, the smallest first, up to the bytes that are copied at most."""
    tensors = {id(tensor): tensor for tensor in held if isinstance(tensor, torch.Tensor) and _is_writable(tensor)}
    kept, size = list[torch.Tensor](), 0
    for tensor in sorted(tensors.values(), key=lambda tensor: local_shard(tensor).nbytes):
        size += local_shard(tensor).nbytes
        if size > _MOST_BYTES:
            break
        kept.append(tensor)
    return sorted(kept, key=lambda tensor: (str(tensor.device), str(tensor.dtype)))


def _is_writable(tensor: torch.Tensor) -> bool:
    """Whether a buffer can be written in place: not an expanded one, nor one that was made in inference mode."""
    if torch.nn.parameter.is_lazy(tensor) or tensor.is_meta or tensor.is_inference() or tensor.layout != torch.strided:
        return False
    return not any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
