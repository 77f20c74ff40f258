"""One step, one arrow of the flow a line. Decides nothing itself."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass

from ebbflow.data.ledger import Assignment, Ledger
from ebbflow.engines.base import Engine, Gradients
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.optim.ema import RunningStatistics, WeightAverage
from ebbflow.plan.plan import StepSize
from ebbflow.record import StepRow
from ebbflow.rules.base import StepContext

__all__ = ["Flow", "OpenStep"]


@dataclass(frozen=True, slots=True)
class OpenStep:
    """A step between its two halves."""

    size: StepSize
    assignment: Assignment
    began: float
    keep: ExitStack
    """Closed at the end of the step: puts back what was set for its length."""


@dataclass
class Flow:
    """The parts of a run that meet in a step, and its position."""

    engine: Engine
    optimizer: ElasticOptimizer
    ledger: Ledger
    step: int = 0
    total_samples: int = 0
    """Samples in the whole run; 0 if it has no end."""
    wall_s: float = 0.0
    """Seconds of computing so far; resumed runs go on counting."""
    statistics: RunningStatistics | None = None
    """Of batch norm, where they follow the batch or a step may be skipped."""
    average: WeightAverage | None = None

    def run_step(self) -> StepRow | None:
        """One step from the fleet to the record; None if it was lost, and then nothing has happened.

        A step that was skipped, because its gradient is not finite, has happened: its samples count. It leaves no
        trace in weights, buffers, rule and averages, and its row has `skipped` among its stats.
        """
        step = self.open()
        with step.keep:
            return self.close(step, self.engine.gradients(step.assignment, step.size))

    def open(self) -> OpenStep:
        """The first half of a step, up to the backward passes: for loops in which somebody else does those."""
        began = time.perf_counter()
        size = self.engine.members(self.step)  #                         traces, plan: who, and how much
        assignment = self.ledger.assign(size.samples)  #                 data: which samples
        keep = ExitStack()
        if self.statistics is not None:
            keep.enter_context(self.statistics.step(assignment.batch, self.optimizer.base_batch))
        return OpenStep(size, assignment, began, keep)

    def close(self, step: OpenStep, gradients: Gradients) -> StepRow | None:
        """The second half: commit, rule, optimizer, record."""
        size, assignment, batch = step.size, step.assignment, step.assignment.batch
        with step.keep:  #                                               engines, moments: mean gradient, noise, signal
            committed = self.engine.commit()
        if not committed:
            self.wall_s += time.perf_counter() - step.began
            return None  # the samples go back: an assignment that is not committed leaves no trace
        context = StepContext(
            step=self.step,
            batch=batch,
            ref_batch=self.optimizer.base_batch,
            samples=self.ledger.total,
            workers=size.workers,
            epoch_samples=self.ledger.samples,
            total_samples=self.total_samples,
        )
        update = self.optimizer.update(context, gradients.measurement)  # rules, optim: the step
        if update.applied and self.average is not None:
            self.average.update(context.ratio)
        if not update.applied and self.statistics is not None:
            self.statistics.undo()
        self.ledger = self.ledger.commit(assignment)
        self.step += 1
        self.wall_s += time.perf_counter() - step.began
        return StepRow(  #                                               record: what happened
            step=context.step,
            time_s=size.time_s,
            wall_s=round(self.wall_s, 6),
            epoch=assignment.epoch,
            samples=self.ledger.total,
            workers=size.workers,
            batch=context.batch,
            pieces=gradients.pieces,
            lr_base=update.lr_base,
            lr=update.lr,
            multiplier=update.multiplier,
            loss=gradients.loss,
            stats=update.stats,
        )
