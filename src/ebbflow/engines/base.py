"""The contract of an engine: everything that a run needs from whatever computes its gradients.

    participants(step)            who takes part in the next step, and how many samples they take
    gradients(assignment, size)   backward passes over these samples; the mean gradient is left in `.grad`
    commit()                      True: the step counts. False: nothing happened, and the samples are assigned again

Between `gradients` and `commit` an engine may lose a worker. `commit` then returns False, weights and buffers are what
they were before the step, and the flow assigns the same samples again. `tests/contract` holds the suite that every
engine passes.

An engine of your own subclasses `Engine` and is registered by name with a function that makes it:

    @ebbflow.register_engine("mine")
    def make(parts: EngineParts) -> Engine:
        return MyEngine(parts.model, parts.fetch, parts.loss, parts.plan, samples=parts.samples, seed=parts.seed)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Self

from ebbflow.core.spec import Registry
from ebbflow.data.ledger import Assignment
from ebbflow.errors import ConfigError
from ebbflow.moments.estimate import Measurement
from ebbflow.plan.batch_plan import BatchPlan, StepSize

__all__ = ["ENGINES", "Engine", "EngineParts", "Faults", "Gradients", "register_engine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradients:
    """What an engine knows after the backward passes of a step; the gradient itself is in the parameters."""

    loss: float
    """Mean over the samples of the step."""
    micro_batches: int
    """Backward passes that the gradient was made of."""
    measurement: Measurement | None = None
    """Squared norms of the micro-batch gradients and of their mean; None where this step was not measured."""
    norm: float | None = None
    """Norm of the mean gradient, where the all-reduce of a step that is not measured has found it, since the optimizer
    clips or checks for NaN; else the optimizer finds it."""
    slopes: tuple[float, float] | None = None
    """Slopes of the loss along the step before this one. Set only by the Dask all-reduce, when the rule follows
    them."""
    seconds: float | None = None
    """How long a step takes, from the previous one to this one: the same number in every process. None where this step
    has no predecessor, or where the plan says it (`StepSize.duration_s`)."""


class Engine(ABC):
    """Computes the gradients of steps with the workers that are there.

    Only the three abstract methods must be written. The others describe what an engine can do beyond them, and have
    defaults for an engine that computes in this process.
    """

    model: Any
    """The model that is trained; the only attribute that an engine must have."""
    replicated: bool = False
    """Whether replicas elsewhere apply the steps, so that the model of this process is behind until `sync`."""
    single_process: bool = False
    """Whether this process computes all gradients, so that none has to be added up with those of other processes."""

    # The three verbs ----------------------------------------------------------------------------------------------

    @abstractmethod
    def participants(self, step: int) -> StepSize:
        """Who takes part in a step, and how many samples they should take. Waits while nobody is there."""

    @abstractmethod
    def gradients(self, assignment: Assignment, size: StepSize) -> Gradients:
        """Leave the sample-weighted mean gradient over the assignment in `.grad`."""

    @abstractmethod
    def commit(self) -> bool:
        """Whether the step counts. After False the weights and buffers are what they were before the step.

        Ebbflow's own engines copy the buffers that are not batch norm's before each step, up to 256 MB of them
        (`KeptBuffers`).
        """

    # Around a step ------------------------------------------------------------------------------------------------

    def request(self, samples: int) -> None:  # noqa: B027
        """Called before `participants`: a growing policy could use a step of `samples` samples.

        An engine that can start workers may do so.
        """

    def measure(self, on: bool) -> None:  # noqa: B027
        """Called before `gradients`: whether the measurement of the step will be used. Measuring anyway is allowed."""

    def applied(self, context: object) -> None:  # noqa: B027
        """Called after the optimizer has applied the step, with its StepContext: replicas elsewhere apply it, too."""

    def sync(self) -> None:  # noqa: B027
        """Bring the model and optimizer of this process up to date, where replicas elsewhere apply the steps."""

    # A training loop of the user's own ----------------------------------------------------------------------------

    def open(self, assignment: Assignment, size: StepSize) -> None:
        """Begin a step whose backward passes the user does: `micro_batches`, `backward` for each, then `combine`."""
        raise ConfigError(
            f"{type(self).__name__} computes the backward passes itself: give the loss (loss=...) and call run(), "
            f"without a loop over the micro-batches of a step"
        )

    def micro_batches(self) -> Iterator[Any]:
        """The micro-batches that this process computes in the open step, each with `inputs` and `targets`."""
        raise NotImplementedError

    def backward(self, loss: Any, micro_batch: Any) -> None:
        """Add the gradient of a micro-batch; `loss` is the mean over its samples, or a LossSum."""
        raise NotImplementedError

    def combine(self) -> Gradients:
        """Add up the gradients of all processes, after the backward passes of this one."""
        raise NotImplementedError

    def abandon(self) -> None:  # noqa: B027
        """Give up the open step, because the user's loop was left: the model is what it was before the step."""

    # The run around the steps -------------------------------------------------------------------------------------

    @property
    def writes_files(self) -> bool:
        """Whether this process reads and writes the files of the run, and prints; exactly one process does."""
        return True

    def autocast(self) -> AbstractContextManager[object]:
        """The model computes in the engine's precision inside."""
        return nullcontext()

    def upcoming(self) -> Iterator[tuple[int, Any]]:
        """What will be fetched next, as far as it is known: the seed before each fetch, and its sample numbers.

        A guess: data that is prefetched for nothing costs time and changes no result.
        """
        return iter(())

    def agree_to_stop(self, should_stop: Callable[[], bool]) -> Callable[[], bool]:
        """What to ask after each step instead of `should_stop`, so that all processes stop after the same step."""
        return should_stop

    def idle_processes(self) -> str:
        """A sentence about processes that never have anything to compute; empty if all of them have."""
        return ""

    def describe(self) -> dict[str, Any]:
        """How steps are computed, as JSON values: for the header of a record."""
        return {"engine": type(self).__name__}

    def state_dict(self) -> dict[str, Any]:
        """What the steps so far have left in the engine and later ones depend on, for a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Go on where `state_dict` was taken."""

    def snapshot_taken(self) -> Any:
        """Called when the present state is kept as a snapshot: what `snapshot_loaded` has to know about it, as JSON."""
        return None

    def snapshot_loaded(self, known: Any) -> None:  # noqa: B027
        """Called when model and optimizer of this process were put back to a snapshot: replicas elsewhere follow.

        `known` is what `snapshot_taken` returned. The steps since then are given up.
        """

    def close(self) -> None:  # noqa: B027
        """Release what the engine holds outside of the model: hooks, connections, replicas."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.sync()
        finally:
            self.close()


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """What a run gives to the function that makes its engine."""

    model: Any
    fetch: Callable[[Any], Any]
    """From sample numbers to a batch on the model's device: (inputs, targets), or anything else as inputs alone."""
    loss: Callable[[Any, Any, Any], Any] | None
    """`loss(model, inputs, targets)`: the mean over the samples, or a LossSum. None if the user's own loop computes
    it."""
    samples: int
    """Samples in an epoch."""
    plan: BatchPlan | None
    """Workers and samples of each step; None if the fleet itself decides."""
    seed: int
    needs: frozenset[str]
    """What must be measured: "moments", "layers", or nothing."""
    parameters: list[Any]
    """The trained parameters in the optimizer's order: what is measured and added up."""
    optimizer: Any
    """The RuleOptimizer of the run."""
    config: Any
    """The RunConfig of the run, complete."""
    ranks: Any = None
    """This process among the ranks that torchrun started; None if there is only one."""
    faults: Faults | None = None
    """Scripted losses of workers, for tests."""
    on_event: Callable[[str, str], None] = lambda what, text: None
    """Called with a title and a sentence when something happens in a step that the record should tell. While the
    engine is made there is no record yet."""


EngineMaker = Callable[[EngineParts], Engine]

ENGINES: Registry[EngineMaker] = Registry("engine")


def register_engine(name: str, *, cite: str = "", measures: bool = False) -> Callable[[EngineMaker], EngineMaker]:
    """Return a decorator that adds an engine: a function from `EngineParts` to an `Engine`.

    The setting `engine` then knows it by its name. `measures`: whether it measures what `EngineParts.needs` says, so
    that a run that names no rule gets one that measures.
    """

    def add(make: EngineMaker) -> EngineMaker:
        ENGINES.register(name, cite=cite)(make)
        make.measures = measures  # type: ignore[attr-defined]
        return make

    return add


@dataclass
class Faults:
    """Workers that are lost and come back at given steps: a script, so that a test of a fault needs no sleeping.

    A worker that is lost at a step dies in the middle of it: the first attempt fails, the next one runs without it.

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
        """Bring a lost worker back before a step."""
        self.planned += 1
        self.returns.setdefault(step, []).append(worker)
        return self

    def present(self, step: int, size: StepSize) -> StepSize:
        """The participants of a step after the losses so far; each keeps its worker batch."""
        back = self.returns.pop(step, [])
        self.fired += len(back)
        self.away.difference_update(back)
        lost = sum(worker < size.workers for worker in self.away)
        if not lost:
            return size
        workers = max(1, size.workers - lost)
        return replace(size, workers=workers, samples=max(1, size.samples * workers // size.workers))

    def strike(self, step: int) -> bool:
        """Whether a worker dies in this attempt at a step; each planned loss happens once."""
        dying = self.losses.pop(step, [])
        self.fired += len(dying)
        self.away.update(dying)
        return bool(dying)
