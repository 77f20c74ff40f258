"""The reference engine: a plain loop over virtual workers, one small backward pass each.

Slow on a GPU and simple enough to be believed; every faster or distributed engine is compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ebbflow.data.ledger import MicroBatch
from ebbflow.engines.batchnorm import LocalBatchNorm
from ebbflow.engines.emulated.base import EmulatedEngine
from ebbflow.engines.emulated.step import Step

__all__ = ["LoopEngine"]


class LoopEngine(EmulatedEngine):
    """Emulates the workers of a plan one after another in this process.

    The gradient is the sample-weighted mean over the micro-batches. Batch norm sees one worker's samples at a time;
    running statistics are updated once a step. Seeds torch's global generators before every micro-batch. With a single
    micro-batch in a step (one worker, and no smaller `micro_batch`) noise and signal cannot be told apart: the
    measurement says micro_batches=1."""

    _batch_norm: LocalBatchNorm

    def _make_batch_norm(self) -> LocalBatchNorm:
        return LocalBatchNorm(self.model)

    def _parts(self, groups: Sequence[MicroBatch]) -> tuple[list[Sequence[MicroBatch]], list[int]]:
        return [[group] for group in groups], [group.worker for group in groups]

    def _micro_batches(self, step: Step) -> list[int]:
        return [group.size for group in step.groups]

    def _backward(self, step: Step) -> tuple[torch.Tensor | float, int]:
        """One forward and backward pass a micro-batch, accumulated with each micro-batch's share as weight."""
        total: torch.Tensor | float = 0.0
        groups = step.groups
        for part in groups:
            inputs, targets = self._fetch(step, part.start, part.stop)
            weight = part.size / step.batch
            with self._batch_norm.micro_batch(weight), self.autocast():
                loss = self.loss(self.model, inputs, targets) * weight
            loss.backward()  # type: ignore[no-untyped-call]
            if self.meter is not None:
                self.meter.close_micro_batch(part.size, weight)
            total += loss.detach()
        return total, len(groups)
