"""What the emulated engines share: whose samples, which seed, who is lost, what is measured.

They differ in how the virtual workers of a step are computed: one after another (`loop.py`) or many at once
(`fused.py`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ebbflow.data.ledger import Assignment, Share, shares
from ebbflow.data.permutation import Permutation
from ebbflow.engines.base import Engine, Faults, Gradients
from ebbflow.engines.pieces import Fetch, Loss, Precision, autocast, generators, piece_seed
from ebbflow.errors import ConfigError
from ebbflow.moments.measure import Meter
from ebbflow.plan.plan import BatchPlan, StepSize
from ebbflow.spec import nearest

__all__ = ["BatchNorm", "EmulatedEngine", "Fetch", "Loss", "Precision", "Step", "piece_seed"]


class BatchNorm(Protocol):
    """The running statistics of a model's batch norm, which move once a step."""

    def begin(self) -> None:
        """A step begins, perhaps again."""

    def commit(self) -> None:
        """The step counts: one update with the mean over its workers."""

    def rollback(self) -> None:
        """The step does not count: the statistics are what they were."""


class Step:
    """The samples of one step and the groups, one worker's samples each, that they are computed in."""

    def __init__(self, assignment: Assignment, indices: npt.NDArray[np.int64], groups: tuple[Share, ...]) -> None:
        self.epoch = assignment.epoch
        self.start = assignment.start
        self.batch = assignment.batch
        self.indices = indices
        self.groups = groups


class EmulatedEngine(Engine):
    """Emulates the workers of a plan in this process; how they are computed is the subclass's part.

    The gradient is the sample-weighted mean over the workers. Seeds torch's global generators before every backward
    pass, by the position of its first sample. Batch norm sees one worker's samples at a time, or what a subclass
    offers besides; running statistics move once a step.
    """

    precisions: tuple[Precision, ...] = ("fp32", "bf16")

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
        parameters: Iterable[torch.nn.Parameter] | None = None,
        precision: Precision = "fp32",
    ) -> None:
        """`samples`: size of an epoch. `piece`: at most so many samples of a worker together; default: its share.

        `needs`: what the rule needs, "moments" or "layers"; without either nothing is measured and nothing paid.
        `parameters`: what to measure, in the optimizer's order; default: all of the model that require a gradient.
        """
        if precision not in self.precisions:
            raise ConfigError(f"precision is {precision!r}; {nearest(precision, list(self.precisions))}")
        self.model = model
        self.fetch = fetch
        self.loss = loss
        self.plan = plan
        self.samples = samples
        self.seed = seed
        self.piece = piece
        self.faults = faults or Faults()
        self.precision = precision
        self.meter: Meter | None = None
        if not {"moments", "layers"}.isdisjoint(needs):
            trained = [*(parameters if parameters is not None else (p for p in model.parameters() if p.requires_grad))]
            # On a GPU a hook for each tensor costs more than the arithmetic; fp16 looks at .grad before it is measured.
            adds = trained[0].device.type != "cpu" and precision != "fp16"
            self.meter = Meter(trained, layers="layers" in needs, adds=adds)
        self._batch_norm = self._make_batch_norm()
        self._generators = generators(model)
        self._device_type = next((p.device.type for p in model.parameters()), "cpu")
        self._epoch = 0
        self._order = Permutation(samples, seed, 0)
        self._step = 0

    @abstractmethod
    def _make_batch_norm(self) -> BatchNorm:
        """How this engine keeps the running statistics."""

    @abstractmethod
    def _backward(self, step: Step) -> tuple[torch.Tensor | float, int]:
        """Leave the mean gradient in `.grad`, the pieces in the meter; (mean loss, backward passes)."""

    def members(self, step: int) -> StepSize:
        """What the plan says, less the workers that the script of faults took away."""
        self._step = step
        return self.faults.present(step, self.plan.at(step))

    def gradients(self, assignment: Assignment, size: StepSize) -> Gradients:
        """Forward and backward passes over the step's samples."""
        if assignment.epoch != self._epoch:
            self._epoch = assignment.epoch
            self._order = Permutation(self.samples, self.seed, assignment.epoch)
        share = -(-size.samples // size.workers)
        groups = shares(assignment, workers=size.workers, piece=min(share, self.piece or share))
        step = Step(assignment, self._order.indices(assignment.start, assignment.stop), groups)
        self._begin()
        total, passes = self._backward(step)
        measurement = self.meter.finish(step.batch) if self.meter is not None else None
        return Gradients(loss=float(total), pieces=passes, measurement=measurement)

    def _begin(self) -> None:
        """Begin a step, or begin it again: nothing of an earlier attempt is left."""
        self.model.train()
        self.model.zero_grad(set_to_none=True)
        self._batch_norm.begin()
        if self.meter is not None:
            self.meter.discard()  # a step that an exception cut short

    def _fetch(self, step: Step, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        seed = piece_seed(self.seed, step.epoch, start)
        for generator in self._generators:
            generator.manual_seed(seed)
        return self.fetch(step.indices[start - step.start : stop - step.start])

    def autocast(self) -> AbstractContextManager[object]:
        """The model computes in the engine's precision inside."""
        return autocast(self.precision, self._device_type)

    def describe(self) -> dict[str, Any]:
        """How workers are emulated, as JSON: what a record's header keeps."""
        return {"engine": type(self).__name__, "precision": self.precision}

    def commit(self) -> bool:
        """True, unless the script of faults has a worker die in this attempt."""
        if self.faults.strike(self._step):
            self._batch_norm.rollback()
            self.model.zero_grad(set_to_none=True)
            return False
        self._batch_norm.commit()
        return True
