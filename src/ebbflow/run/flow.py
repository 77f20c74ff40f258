"""One step, one arrow of the flow a line. Decides nothing itself."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from dataclasses import dataclass

from ebbflow.data.ledger import Assignment, Ledger
from ebbflow.engines.base import Engine, Gradients
from ebbflow.errors import ConfigError
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.optim.ema import RunningStatistics, WeightAverage
from ebbflow.plan.batch_plan import StepSize
from ebbflow.plan.growing import Growth
from ebbflow.record import StepRow
from ebbflow.rules.rule import StepContext

__all__ = ["Flow", "OpenStep"]


@dataclass(frozen=True, slots=True)
class OpenStep:
    """A step between its two halves."""

    size: StepSize
    assignment: Assignment
    began: float
    measured: bool
    """Whether the rule takes what this step shows of noise and signal."""
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
    growth: Growth | None = None
    """Of the batch, where the policy is a growing one."""

    def __post_init__(self) -> None:
        if self.average is not None and self.engine.replicated:
            raise ConfigError(
                "an average of the weights is kept where the weights are, and this engine's replicas have them; use "
                "carry='centralized', or no average"
            )

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
        measures = bool(self.optimizer.rule.needs) or self.growth is not None
        if self.optimizer.unfrozen and (measures or not self.engine.alone):
            raise ConfigError(
                "a tensor is trained that was frozen when the optimizer was made; engines measure the gradients, and "
                "add up those of several processes, of the tensors that were not: unfreeze it before, or go on with "
                "its weights in a new run"
            )
        if self.growth is not None:
            self.engine.want(self.growth.useful)
        size = self.engine.members(self.step)  #                         traces, plan: who, and how much
        if self.growth is not None:
            size = self.growth.allow(size)
        assignment = self.ledger.assign(size.samples)  #                 data: which samples
        measured = self.growth is not None or self.optimizer.due(assignment.batch)
        self.engine.measure(measured)
        keep = ExitStack()
        if self.statistics is not None:
            keep.enter_context(self.statistics.step(assignment.batch, self.optimizer.base_batch))
        return OpenStep(size, assignment, began, measured, keep)

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
            shortfall=size.shortfall,
        )
        measurement = gradients.measurement if step.measured else None
        if measurement is None and step.measured and self.optimizer.rule.needs:
            raise ConfigError(
                f"the rule {self.optimizer.rule} needs the noise of the gradient, and this engine measures nothing; "
                f"make the engine with needs=optimizer.rule.needs"
            )
        update = self.optimizer.update(context, measurement, norm=gradients.norm)  # rules, optim: the step
        self.engine.applied(context)
        if update.applied and self.average is not None:
            self.average.update(context.ratio)
        if not update.applied and self.statistics is not None:
            self.statistics.undo()
        self.ledger = self.ledger.commit(assignment)
        self.step += 1
        if self.growth is not None:
            self.growth.observe(batch=batch, **_shown(gradients))
        self.wall_s += time.perf_counter() - step.began
        return StepRow(  #                                               record: what happened
            step=context.step,
            time_s=size.time_s,
            wall_s=round(self.wall_s, 6),
            epoch=assignment.epoch,
            samples=self.ledger.total,
            workers=size.workers,
            batch=context.batch,
            micro_batches=gradients.micro_batches,
            lr_base=update.lr_base,
            lr=update.lr,
            multiplier=update.multiplier,
            loss=gradients.loss,
            stats=update.stats,
        )


def _shown(gradients: Gradients) -> dict[str, float]:
    """What a step shows to a growing policy; nothing that is not finite."""
    shown = {"loss": gradients.loss}
    measured = gradients.measurement
    if measured is not None:
        shown["norm_sq"] = math.fsum(measured.sq_mean)
        if measured.micro_batches > 1:
            noise, signal = measured.estimate()
            shown |= {"noise": math.fsum(noise), "signal": math.fsum(signal)}
    return {name: value for name, value in shown.items() if math.isfinite(value)}
