"""The contract of an engine: three verbs, one loop for all engines.

    members(step)                 who takes part in the next step, and how many samples they take
    gradients(assignment, size)   backward over these samples: the mean gradient is in .grad
    commit()                      True: the step counts. False: nothing happened, the samples go back

Between `gradients` and `commit` an engine may lose a worker; then `commit` says False, the state of the model is what
it was before the step, and the loop assigns the same samples again. `tests/contract` holds the suite that every engine
passes: each sample exactly once under scripted faults, the same weights as the reference to float tolerance.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace

from ebbflow.data.ledger import Assignment
from ebbflow.moments.estimate import Measurement
from ebbflow.plan.batch_plan import StepSize

__all__ = ["Engine", "Faults", "Gradients"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradients:
    """What an engine knows after the backward pass of a step; the gradient itself is in the parameters."""

    loss: float
    """Mean over the samples of the step."""
    micro_batches: int
    """Backward passes the gradient was made of."""
    measurement: Measurement | None = None
    """Squared norms of the micro-batches and of their mean; None where no rule needs them, or none this time."""
    norm: float | None = None
    """Of the mean gradient, where replicas elsewhere have it and the optimizer looks at it without a measurement."""


class Engine(ABC):
    """Computes gradients with the workers that are there."""

    replicated: bool = False
    """Whether replicas elsewhere make the steps, and this process's model lags behind until `sync`."""
    alone: bool = False
    """Whether this process computes all gradients, so that none has to be added up with those of others."""

    def want(self, samples: int) -> None:  # noqa: B027, an engine that cannot hire has nothing to do
        """Told before `members`: a growing policy could use a step of so many samples. A fleet that can grow may."""

    def applied(self, context: object) -> None:  # noqa: B027, most engines have their model in this process
        """Told after the optimizer made the step, with its StepContext: replicas elsewhere make the same step."""

    def sync(self) -> None:  # noqa: B027
        """Bring model and optimizer of this process up to date, before somebody reads them.

        Where replicas elsewhere make the steps, this process only follows their rates and statistics in between.
        """

    def measure(self, on: bool) -> None:  # noqa: B027, measuring all the same costs time and nothing else
        """Told before `gradients`: whether anybody will look at the measurement of the upcoming steps."""

    @abstractmethod
    def members(self, step: int) -> StepSize:
        """Who takes part in a step and how many samples they are meant to take; waits while nobody is there."""

    @abstractmethod
    def gradients(self, assignment: Assignment, size: StepSize) -> Gradients:
        """Leave the sample-weighted mean gradient over the assignment in `.grad`."""

    @abstractmethod
    def commit(self) -> bool:
        """Whether the step counts. After False the model, its buffers and the position are what they were before."""


@dataclass
class Faults:
    """Workers that are lost and come back at given steps: a script, so that a test of a fault has no sleeping in it.

    A worker lost at a step dies in the middle of it: the first attempt fails, the next one runs without the worker.

    >>> faults = Faults().lose(worker=1, step=3).rejoin(worker=1, step=7)
    >>> faults.fired == faults.planned        # nothing has happened yet
    False
    """

    losses: dict[int, list[int]] = field(default_factory=dict)
    returns: dict[int, list[int]] = field(default_factory=dict)
    away: set[int] = field(default_factory=set)
    planned: int = 0
    """Losses and returns in the script."""
    fired: int = 0
    """Those that have happened: a fault that never fires proves nothing."""

    def lose(self, *, worker: int, step: int) -> Faults:
        """Lose a worker in the middle of a step."""
        self.planned += 1
        self.losses.setdefault(step, []).append(worker)
        return self

    def rejoin(self, *, worker: int, step: int) -> Faults:
        """Have a lost worker back before a step."""
        self.planned += 1
        self.returns.setdefault(step, []).append(worker)
        return self

    def present(self, step: int, size: StepSize) -> StepSize:
        """The members of a step after the losses so far; each keeps the share of samples it had."""
        back = self.returns.pop(step, [])
        self.fired += len(back)
        self.away.difference_update(back)
        lost = sum(worker < size.workers for worker in self.away)
        if not lost:
            return size
        workers = max(1, size.workers - lost)
        return replace(size, workers=workers, samples=max(1, size.samples * workers // size.workers))

    def strike(self, step: int) -> bool:
        """Whether a worker dies in this attempt at a step; each planned loss strikes once."""
        dying = self.losses.pop(step, [])
        self.fired += len(dying)
        self.away.update(dying)
        return bool(dying)
