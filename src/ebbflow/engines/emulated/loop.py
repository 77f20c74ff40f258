"""The reference engine: a plain loop over virtual workers, one small backward pass each.

Slow on a GPU and simple enough to be believed; every faster or distributed engine is compared with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import numpy as np
import numpy.typing as npt
import torch

from ebbflow.data.ledger import Assignment, shares
from ebbflow.data.permutation import Permutation
from ebbflow.engines.base import Engine, Faults, Gradients
from ebbflow.engines.emulated.batchnorm import LocalBatchNorm
from ebbflow.moments.measure import Meter
from ebbflow.plan.plan import BatchPlan, StepSize

__all__ = ["Fetch", "Loss", "LoopEngine", "piece_seed"]

Fetch = Callable[[npt.NDArray[np.int64]], tuple[torch.Tensor, torch.Tensor]]
"""Inputs and targets of the samples with these indices, on the model's device."""
Loss = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
"""Mean loss of the model over inputs and targets."""

_MASK = (1 << 64) - 1


def piece_seed(seed: int, epoch: int, start: int) -> int:
    """The seed of dropout and augmentation for the piece that starts at a position of an epoch.

    A function of the position alone (a splitmix64 mix of the three numbers): a resumed run, or one in which a step
    was lost and repeated, draws what an undisturbed run draws.
    """
    value = 0
    for part in (seed, epoch, start):
        value = (value + part + 0x9E3779B97F4A7C15) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        value ^= value >> 31
    return value >> 1  # torch takes seeds below 2**63 on every platform


def _generators(model: torch.nn.Module) -> list[torch.Generator]:
    """The generators that dropout and augmentation draw from: the CPU's, and those of the GPUs the model is on.

    Not `torch.manual_seed`, which without a GPU formats and keeps a stack trace for every call (2.13).
    """
    gpus = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    return [torch.default_generator, *(torch.cuda.default_generators[gpu.index or 0] for gpu in gpus)]


class LoopEngine(Engine):
    """Emulates the workers of a plan one after another in this process.

    The gradient is the sample-weighted mean over the pieces. Batch norm sees one worker's samples at a time; running
    statistics are updated once a step. Seeds torch's global generators before every piece. With a single piece in a
    step (one worker, and no smaller `piece`) noise and signal cannot be told apart: the measurement says pieces=1.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        fetch: Fetch,
        loss: Loss,
        plan: BatchPlan,
        *,
        samples: int,
        seed: int = 0,
        piece: int | None = None,
        faults: Faults | None = None,
        needs: Collection[str] = (),
        parameters: Iterable[torch.nn.Parameter] = (),
    ) -> None:
        """`samples`: size of an epoch. `piece`: at most so many samples a backward pass; default: a worker's share.

        `needs`: what the rule needs, "moments" or "layers"; without either nothing is measured and nothing paid.
        `parameters`: what to measure, in the optimizer's order; default: all of the model that require a gradient.
        """
        self.model = model
        self.fetch = fetch
        self.loss = loss
        self.plan = plan
        self.samples = samples
        self.seed = seed
        self.piece = piece
        self.faults = faults or Faults()
        self.meter: Meter | None = None
        if not {"moments", "layers"}.isdisjoint(needs):
            trained = [*parameters] if parameters else [p for p in model.parameters() if p.requires_grad]
            self.meter = Meter(trained, layers="layers" in needs, adds=trained[0].device.type != "cpu")
        self._batch_norm = LocalBatchNorm(model)
        self._generators = _generators(model)
        self._epoch = 0
        self._order = Permutation(samples, seed, 0)
        self._step = 0

    def members(self, step: int) -> StepSize:
        """What the plan says, less the workers that the script of faults took away."""
        self._step = step
        return self.faults.present(step, self.plan.at(step))

    def gradients(self, assignment: Assignment, size: StepSize) -> Gradients:
        """One forward and backward pass a piece, accumulated with each piece's share as weight."""
        if assignment.epoch != self._epoch:
            self._epoch = assignment.epoch
            self._order = Permutation(self.samples, self.seed, assignment.epoch)
        indices = self._order.indices(assignment.start, assignment.stop)
        share = -(-size.samples // size.workers)
        pieces = shares(assignment, workers=size.workers, piece=min(share, self.piece or share))
        self.model.train()
        self.model.zero_grad(set_to_none=True)
        self._batch_norm.begin()
        if self.meter is not None:
            self.meter.discard()  # a step that an exception cut short
        total: torch.Tensor | float = 0.0
        for part in pieces:
            inputs, targets = self._fetch(assignment, indices, part.start, part.stop)
            weight = part.size / len(indices)
            with self._batch_norm.piece(weight):
                loss = self.loss(self.model, inputs, targets) * weight
            loss.backward()  # type: ignore[no-untyped-call]
            if self.meter is not None:
                self.meter.close_piece(part.size, weight)
            total += loss.detach()
        measurement = self.meter.finish(len(indices)) if self.meter is not None else None
        return Gradients(loss=float(total), pieces=len(pieces), measurement=measurement)

    def _fetch(
        self, assignment: Assignment, indices: npt.NDArray[np.int64], start: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        seed = piece_seed(self.seed, assignment.epoch, start)
        for generator in self._generators:
            generator.manual_seed(seed)
        return self.fetch(indices[start - assignment.start : stop - assignment.start])

    def commit(self) -> bool:
        """True, unless the script of faults has a worker die in this attempt."""
        if self.faults.strike(self._step):
            self._batch_norm.rollback()
            self.model.zero_grad(set_to_none=True)
            return False
        self._batch_norm.commit()
        return True
