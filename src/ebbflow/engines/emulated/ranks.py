"""Several real processes share the virtual workers of every step, as the fleet's own processes would.

Each rank computes its part of a step; one all-reduce then makes gradient, statistics of the gradient, loss and running
statistics of batch norm those of the whole step on every rank. So all ranks take the same step, and the model is never
sent around.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from ebbflow.engines.allreduce import AllReduce
from ebbflow.engines.base import Gradients
from ebbflow.errors import ConfigError
from ebbflow.moments.meters import Meter

__all__ = ["Ranks", "StepSum", "same_on_all"]

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among `world` processes that emulate one fleet together.

    >>> [Ranks(rank, 3).own("abcd", [0, 1, 2, 3]) for rank in range(3)]
    [['a', 'd'], ['b'], ['c']]
    """

    rank: int
    world: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ConfigError(f"this is rank {self.rank} of {self.world}; expected a rank from 0 to {self.world - 1}")

    def own(self, parts: Sequence[Part], workers: Iterable[int]) -> list[Part]:
        """The parts of a step that this rank computes: virtual worker v belongs to rank v mod world."""
        return [part for part, worker in zip(parts, workers, strict=True) if worker % self.world == self.rank]


class StepSum:
    """Adds up over the ranks what each knows of a step; made once, with the same model on every rank.

    Guarantees: after a call `.grad`, the tensors of `sums`, loss, micro-batches and measurement are those of the whole
    step, the same on every rank, also where a rank had nothing to compute; one collective a step. All ranks learn in
    the same step that one of them was asked to stop."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        *,
        meter: Meter | None,
        sums: Sequence[torch.Tensor],
    ) -> None:
        """`sums`: weighted sums over the rank's samples, which are overwritten with those over all samples."""
        self._sums = list(sums)
        self._sizes = [tensor.numel() for tensor in self._sums]
        self._reduce = AllReduce(parameters, meter=meter, riders=3 + sum(self._sizes))
        self.should_stop: Callable[[], bool] = lambda: False
        """Whether this rank was asked to stop."""
        self.stopping = False
        """Whether any rank had been when the latest step was added up; the same on every rank."""

    @torch.no_grad()
    def __call__(self, loss: torch.Tensor | float, passes: int, *, samples: int, batch: int) -> Gradients:
        """Combine a step of `batch` samples of which this rank computed `samples`, with this mean loss."""
        share = samples / batch
        head, tail = self._reduce.riders.split([3, sum(self._sizes)])
        head[0] = loss
        head[0] *= share
        head[1] = passes
        head[2] = float(self.should_stop())
        if self._sums:
            torch.cat([tensor.reshape(-1).to(tail.dtype) for tensor in self._sums], out=tail)
            tail *= share
        measurement = self._reduce(samples=samples, batch=batch)
        if self._sums:
            parts = [part.view_as(own) for part, own in zip(tail.split(self._sizes), self._sums, strict=True)]
            torch._foreach_copy_(self._sums, parts)
        total, micro_batches, stops = head.tolist()
        self.stopping = stops > 0
        return Gradients(loss=total, micro_batches=round(micro_batches), measurement=measurement)


def same_on_all(tensors: Iterable[torch.Tensor]) -> None:
    """Give every rank the values of rank 0."""
    for tensor in tensors:
        dist.broadcast(tensor.detach(), src=0)
