"""What the contract suite trains, and what a run of an engine leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ebbflow.data.ledger import Ledger
from ebbflow.engines.base import Engine, EngineMaker, EngineParts, Faults
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.plan.batch_plan import BatchPlan
from ebbflow.plan.policies import Follow
from ebbflow.rules.rule import Rule, Scaling, StepContext, Verdict
from ebbflow.run.config import RunConfig
from ebbflow.run.flow import Flow
from ebbflow.traces.availability import Trace
from ebbflow.workloads import LossSum, cross_entropy

SAMPLES = 97  # a prime: no step size divides it
EPOCHS = 3


@dataclass(frozen=True)
class Outcome:
    """What a run of an engine leaves behind."""

    committed: list[list[int]]
    """Indices of the samples of each committed step, in the order of the steps."""
    epochs: list[int]
    """Epoch of each committed step."""
    weights: torch.Tensor
    attempts: int
    """Steps tried, the lost ones included."""


RunEngine = Callable[[BatchPlan, Faults, bool, bool], Outcome]
"""(plan, faults, batch norm, counted) -> outcome of EPOCHS epochs: SGD, momentum 0.9, rate 0.1 at 8 samples, linear.

Counted: batches are `nested`, and the loss is `counted_loss`.
"""

VOID = 2
"""The class that `counted_loss` leaves out."""


def changing_plan() -> BatchPlan:
    """2 to 5 workers of 4 samples; one step per second; long enough for three epochs of 97 samples."""
    trace = Trace.parse("0s:4 3s:2 7s:5 11s:3 15s:1 17s:4 40s")
    return BatchPlan.from_trace(trace, Follow(4), "1s")


def make_model(*, batch_norm: bool = False) -> nn.Module:
    torch.manual_seed(3)
    middle: list[nn.Module] = [nn.BatchNorm1d(8)] if batch_norm else []
    return nn.Sequential(nn.Linear(5, 8), *middle, nn.ReLU(), nn.Linear(8, 3)).double()


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (SAMPLES,), generator=generator)


def nested(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, Any]:
    """The same batch as detection has it: inputs in a container, targets as a list with one entry per sample."""
    x, y = batch
    return {"x": x}, [{"label": label} for label in y]


def counted_loss(model: nn.Module, inputs: Any, targets: Any) -> LossSum:
    """Cross-entropy as segmentation has it: a sum over the samples that are not void, and their number."""
    y = torch.stack([target["label"] for target in targets])
    total = nn.functional.cross_entropy(model(inputs["x"]), y, ignore_index=VOID, reduction="sum")
    return LossSum(total, (y != VOID).sum())


class Nested:
    """Fetches what another object fetches, as `nested` batches."""

    def __init__(self, fetch: Any) -> None:
        self.fetch, self.take = fetch, getattr(fetch, "take", None)

    def __call__(self, indices: np.ndarray) -> tuple[Any, Any]:
        return nested(self.fetch(indices))


@dataclass(frozen=True)
class BackAndForth(Rule):
    """Keeps a snapshot after step 2, goes back to it after two later steps, then forgets it; the rates are linear.

    It is confirmed two steps before the run first goes back; the one of the step after that never is.
    """

    back: tuple[int, int] = (6, 9)

    @property
    def guards(self) -> bool:
        return True

    def init(self) -> Any:
        return 0

    def scale(self, context: StepContext, state: Any) -> tuple[Scaling, Any]:
        return Scaling(lr=context.ratio), state

    def review(self, context: StepContext, loss: float, state: Any) -> tuple[Verdict, Any]:
        if context.step in self.back:
            return "restore", state + 1
        if context.step == self.back[1] + 2:
            return "release", state
        verdicts: dict[int, Verdict] = {2: "snapshot", self.back[0] - 2: "confirm", self.back[0] - 1: "snapshot"}
        return verdicts.get(context.step, "continue"), state

    def after_restore(self, snapshot: Any, state: Any) -> Any:
        return state


@dataclass(frozen=True)
class ThreeBranches(Rule):
    """Trains four steps after step 2 three times, at 1, 1/2 and 2 times the linear rate, and keeps those of `winner`.

    Each branch is scored for two steps, at the average of its last two weights. The steps of the branches are 3 to 8, 9
    to 14 and 15 to 20.
    """

    winner: int = 0

    @property
    def guards(self) -> bool:
        return True

    def init(self) -> Any:
        return []

    def scale(self, context: StepContext, state: Any) -> tuple[Scaling, Any]:
        branch, place = divmod(context.step - 3, 6)
        if not 3 <= context.step <= 20:
            branch, place = (0 if context.step < 3 else self.winner), 0
        factor = (1.0, 0.5, 2.0)[branch]
        return Scaling(lr=context.ratio * factor if place < 4 else 0.0), state

    def review(self, context: StepContext, loss: float, state: Any) -> tuple[Verdict, Any]:
        branch, place = divmod(context.step - 3, 6)
        if context.step == 2:
            return "branch", state
        if context.step < 3 or context.step > 20:
            return "release", state
        if place == 5 and branch == 2:
            return ("adopt last" if self.winner == 2 else "adopt"), [*state, loss]
        if place == 5:
            return ("lead" if branch == 0 or self.winner == branch else "next"), [*state, loss]
        verdicts: dict[int, Verdict] = {2: "average", 3: "score average"}
        return verdicts.get(place, "continue"), state

    def after_restore(self, snapshot: Any, state: Any) -> Any:
        return state


@dataclass(frozen=True)
class FromStepThree(Rule):
    """The linear rate, times a factor from step 3 on."""

    factor: float

    def scale(self, context: StepContext, state: Any) -> tuple[Scaling, Any]:
        return Scaling(lr=context.ratio * (self.factor if context.step > 2 else 1.0)), state


@dataclass(frozen=True)
class SlopesAndReviews(Rule):
    """The linear rate, times a factor that depends on the slopes along the step before; counts its reviews.

    It asks for a snapshot after every third step, and never goes back.
    """

    @property
    def guards(self) -> bool:
        return True

    def follows_slopes(self, state: Any) -> bool:
        return True

    def init(self) -> Any:
        return 0

    def scale(self, context: StepContext, state: Any) -> tuple[Scaling, Any]:
        began, ended = context.slopes or (1.0, 0.0)
        left = ended / began
        return Scaling(lr=context.ratio / (1 + left**2), stats={"began": began, "left": left}), state

    def review(self, context: StepContext, loss: float, state: Any) -> tuple[Verdict, Any]:
        return "snapshot" if context.step % 3 == 2 else "continue", state + 1


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([tensor.double().flatten() for tensor in model.state_dict().values()])


class Fetched:
    """The data of the suite, which notes the samples that were fetched."""

    def __init__(self) -> None:
        self.x, self.y = make_data()
        self._asked: list[int] = []

    def __call__(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        self._asked.extend(indices.tolist())
        return self.x[indices], self.y[indices]

    def take(self) -> list[int]:
        """The samples since the last call."""
        asked, self._asked = self._asked, []
        return asked


def make_engine(
    maker: EngineMaker, plan: BatchPlan, data: Any, *, faults: Faults | None = None, batch_norm: bool = False,
    needs: frozenset[str] = frozenset(), rule: str | Rule = "linear", counted: bool = False,
) -> Engine:  # fmt: skip
    """An engine over the suite's model, data and optimizer."""
    model = make_model(batch_norm=batch_norm)
    optimizer = ElasticOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rule, base_batch=8, epoch_samples=SAMPLES
    )
    return maker(
        EngineParts(
            model=model,
            fetch=Nested(data) if counted else data,
            loss=counted_loss if counted else cross_entropy,
            samples=SAMPLES,
            plan=plan,
            seed=7,
            needs=needs | optimizer.rule.needs,
            parameters=optimizer.layers,
            optimizer=optimizer,
            config=RunConfig(workload="contract"),
            faults=faults,
        )
    )


def in_this_process(
    maker: EngineMaker, *, data: Callable[[], Any] = Fetched, needs: frozenset[str] = frozenset()
) -> RunEngine:
    """How an engine that is driven by this process is run; `data()` fetches samples and tells which ones (`take`)."""

    def run(plan: BatchPlan, faults: Faults, batch_norm: bool, counted: bool) -> Outcome:
        fetched = data()
        optimizers: list[ElasticOptimizer] = []

        def noting(parts: EngineParts) -> Engine:
            optimizers.append(parts.optimizer)
            return maker(parts)

        committed, epochs, attempts = [], [], 0
        settings = {"faults": faults, "batch_norm": batch_norm, "needs": needs, "counted": counted}
        with make_engine(noting, plan, fetched, **settings) as engine:  # type: ignore[arg-type]
            flow = Flow(engine, optimizers[0], Ledger(samples=SAMPLES))
            fetched.take()  # what a run before it may have left
            while flow.ledger.epoch < EPOCHS:
                row = flow.run_step()
                attempts += 1
                asked = fetched.take()
                if row is not None:
                    committed.append(asked)
                    epochs.append(row.epoch)
        return Outcome(committed, epochs, weights_of(engine.model), attempts)

    return run
