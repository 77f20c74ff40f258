"""The steps of an `ElasticOptimizer` over the ranks of `torch.distributed`, in a script that torchrun started.

Each rank keeps the gradients of its own micro-batches. After the last one of a step, the ranks add up how much each of
them has, and then the gradients with their statistics. DistributedDataParallel would average the gradients of every
backward pass with equal weights, which is wrong where ranks have different numbers of samples, so it is told not to.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ebbflow.data.sampler import ElasticSampler
from ebbflow.engines.allreduce import AllReduce
from ebbflow.errors import ConfigError
from ebbflow.moments.estimate import Measurement
from ebbflow.moments.meters import Meter

__all__ = ["AcrossRanks", "StepTotals", "without_sync"]

_PRIME = 65521  # positions are compared modulo this, so that their squares and sums are exact in float64


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTotals:
    """What the micro-batches of a step have together, in one process or over all ranks."""

    weight: float
    samples: int
    stop: bool
    """Whether anybody was asked to stop."""


class _WithoutSync:
    """Keeps one DistributedDataParallel from combining gradients, for as long as it is held by anybody."""

    def __init__(self, module: DistributedDataParallel) -> None:
        if module.static_graph:
            raise ConfigError(
                "the DistributedDataParallel has static_graph=True, with which it cannot leave the combining of "
                "gradients to ElasticOptimizer; make it without static_graph"
            )
        self._context = module.no_sync()
        self._context.__enter__()


_HELD: weakref.WeakValueDictionary[int, _WithoutSync] = weakref.WeakValueDictionary()
"""By the id of the module, which lives as long as the value. All optimizers of a module share one: the context of one
that is replaced would let the module combine gradients again when it ends."""


def without_sync(model: torch.nn.Module | None) -> list[_WithoutSync]:
    """Keep DistributedDataParallel from combining gradients, for as long as the result is held.

    It may be anywhere in the model: behind `torch.compile`, or once for each of several parts.
    """
    held = []
    for module in _parallel_modules(model):
        one = _HELD.get(id(module))
        if one is None:
            one = _HELD[id(module)] = _WithoutSync(module)
        held.append(one)
    return held


def _parallel_modules(model: torch.nn.Module | None) -> list[DistributedDataParallel]:
    modules = model.modules() if model is not None else ()
    return [module for module in modules if isinstance(module, DistributedDataParallel)]


class AcrossRanks:
    """Combines the steps of one optimizer over all ranks; made on every rank, with the same parameters.

    Guarantees: the gradient is the mean over all micro-batches of the step by their weights, whatever a rank has of
    them, and so are noise and signal; every rank has the same numbers afterwards. The parameters of rank 0 are given to
    all ranks at the beginning, and the buffers of the given model after every step, unless it is a
    DistributedDataParallel that is not to do so (`broadcast_buffers`). Ranks that are at different positions are a
    ConfigError on all of them.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        *,
        sampler: ElasticSampler,
        model: torch.nn.Module | None,
        meter: Meter | None,
        settings: Mapping[str, str],
    ) -> None:
        """`settings`: what must be the same on all ranks, by name."""
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                f"the sampler is for rank {sampler.rank} of {sampler.world_size}, but torch.distributed is not "
                f"initialised, so that gradients cannot be combined; call init_process_group() before, or use a "
                f"sampler with world_size=1"
            )
        own = (dist.get_rank(), dist.get_world_size())
        if own != (sampler.rank, sampler.world_size):
            raise ConfigError(
                f"the sampler is for rank {sampler.rank} of {sampler.world_size}, but this process is rank {own[0]} of "
                f"{own[1]} of torch.distributed; leave rank= and world_size= of the sampler out"
            )
        if any(isinstance(parameter, DTensor) for parameter in parameters):
            raise ConfigError(
                "the parameters are sharded (FSDP or tensor parallel), and ElasticOptimizer combines gradients of "
                "whole parameters; use DistributedDataParallel, or ElasticSampler with a loop that weighs the losses "
                "itself (docs/torchrun.md)"
            )
        self._sampler = sampler
        self._device = parameters[0].device
        self._check_same(settings)
        synced = all(module.broadcast_buffers for module in _parallel_modules(model))
        self._buffers = list(model.buffers()) if model is not None and synced else []
        self._combine = AllReduce(parameters, meter=meter)
        _broadcast(parameter.detach() for parameter in parameters)

    def _check_same(self, settings: Mapping[str, str]) -> None:
        """Refuse ranks that differ from rank 0: they would train with other samples, or become different."""
        own = json.dumps(dict(settings)).encode()
        length = torch.tensor([len(own)], device=self._device)
        dist.broadcast(length, src=0)
        text = torch.zeros(int(length), dtype=torch.uint8, device=self._device)
        if self._sampler.rank == 0:
            text.copy_(torch.tensor(list(own), dtype=torch.uint8))
        dist.broadcast(text, src=0)
        first = json.loads(bytes(text.tolist()))
        keys = [key for key in {**first, **settings} if first.get(key) != settings.get(key)]
        differ = torch.tensor([float(bool(keys))], device=self._device)
        dist.all_reduce(differ)
        if not differ:
            return
        said = "; ".join(f"{key} is {settings.get(key)} here and {first.get(key)} there" for key in keys)
        raise ConfigError(
            f"rank {self._sampler.rank} has other settings than rank 0 ({said}); give all ranks the same"
            if keys
            else f"{round(float(differ))} of {self._sampler.world_size} ranks have other settings than rank 0; their "
            f"own messages say which; give all ranks the same"
        )

    def agree(self, own: StepTotals) -> StepTotals:
        """The sums over all ranks; every rank calls this after the last micro-batch of the step."""
        position = self._sampler.state_dict()["step"] % _PRIME
        said = [own.weight, own.samples, own.stop, position, position**2]
        numbers = torch.tensor(said, dtype=torch.float64, device=self._device)
        dist.all_reduce(numbers)
        weight, samples, stop, total, squares = numbers.tolist()
        if total**2 != squares * self._sampler.world_size:  # equal only if all positions are
            raise ConfigError(
                f"the ranks are at different steps (rank {self._sampler.rank}: {position}, mean: "
                f"{total / self._sampler.world_size:g}); load the same state on all ranks, and call step() or skip() "
                f"once for every micro-batch on each of them"
            )
        return StepTotals(weight=weight, samples=round(samples), stop=stop > 0)

    def combine(self, *, weight: float, total: float) -> Measurement | None:
        """Replace the mean gradient of this rank, of the given weight, in `.grad` by the mean over all ranks.

        The measurement of the step, if there is a meter and it is on.
        """
        return self._combine(samples=weight, batch=total)

    def share_buffers(self) -> None:
        """Give all ranks the buffers of rank 0, as DistributedDataParallel does."""
        _broadcast(self._buffers)


@torch.no_grad()
def _broadcast(tensors: Iterable[torch.Tensor]) -> None:
    """Give all ranks the tensors of rank 0, with one message per type."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in kinds.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        dist.broadcast(flat, src=0)
        for tensor, part in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):  # type: ignore[no-untyped-call]
            tensor.copy_(part.view_as(tensor))
