"""From an estimator and its data to the flow that trains it: engine, optimizer, ledger and batch policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

from ebbflow.data.ledger import Assignment, Ledger
from ebbflow.engines.base import Engine, Gradients
from ebbflow.engines.emulated import FusedEngine, LoopEngine
from ebbflow.engines.emulated.grouped import unfusable
from ebbflow.errors import CheckpointError
from ebbflow.estimators.batches import Batches
from ebbflow.estimators.inputs import fetcher
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.plan.batch_plan import StepSize
from ebbflow.plan.growing import Growth
from ebbflow.run.flow import Flow

__all__ = ["Announced", "Watched", "emulated_engine", "make_flow", "saved_state"]


class Watched:
    """The loss of a net, which keeps what the model answered in the step under way, for callbacks that score it."""

    def __init__(self, net: Any) -> None:
        self.net = net
        self._micro_batches: list[tuple[Any, torch.Tensor, torch.Tensor]] = []

    def __call__(self, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss of a micro-batch."""
        output = model(inputs)
        first = output[0] if isinstance(output, tuple) else output
        self._micro_batches.append((inputs, targets, first.detach()))
        loss: torch.Tensor = self.net.get_loss(output, targets, X=inputs, training=True)
        return loss

    def take(self, batch: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """Inputs, targets and outputs of the last `batch` samples; what an attempt before them left is dropped."""
        micro_batches: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
        while batch > 0:
            micro_batches.insert(0, self._micro_batches.pop())
            batch -= len(micro_batches[0][1])
        self._micro_batches.clear()
        if len(micro_batches) == 1:
            return micro_batches[0]
        inputs, targets, outputs = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
        return inputs, targets, outputs


class Announced(Engine):
    """An engine that tells what is requested of it, and when the gradient of a step is there and counts."""

    def __init__(
        self,
        engine: Engine,
        *,
        on_gradients: Callable[[], None],
        on_request: Callable[[int], None] = lambda samples: None,
    ) -> None:
        self.engine = engine
        self.alone = engine.alone
        self.on_gradients = on_gradients
        self.on_request = on_request

    def want(self, samples: int) -> None:
        """Told and passed on."""
        self.on_request(samples)
        self.engine.want(samples)

    def measure(self, on: bool) -> None:
        """Passed on."""
        self.engine.measure(on)

    def members(self, step: int) -> StepSize:
        """As the engine says."""
        return self.engine.members(step)

    def gradients(self, assignment: Assignment, size: StepSize) -> Gradients:
        """As the engine computes them."""
        return self.engine.gradients(assignment, size)

    def commit(self) -> bool:
        """As the engine says; a callback may change the gradients of a step that counts."""
        committed = self.engine.commit()
        if committed:
            self.on_gradients()
        return committed

    def applied(self, context: object) -> None:
        """Passed on."""
        self.engine.applied(context)

    def sync(self) -> None:
        """Passed on."""
        self.engine.sync()


def emulated_engine(
    model: torch.nn.Module,
    data: Any,
    loss: Any,
    batches: Batches,
    optimizer: ElasticOptimizer,
    *,
    seed: int,
    device: str,
) -> FusedEngine | LoopEngine:
    """The workers of the plan in this process; fused where the model allows."""
    needs = batches.needs(optimizer)
    shared: dict[str, Any] = {
        "samples": len(data),
        "seed": seed,
        "needs": needs,
        "parameters": optimizer.layers,
        "micro_batch": batches.micro_batch if needs else None,
    }
    make = LoopEngine if unfusable(model) else FusedEngine
    return make(model, fetcher(data, device), loss, batches.plan, **shared)


def make_flow(
    engine: Engine,
    optimizer: ElasticOptimizer,
    batches: Batches,
    *,
    samples: int,
    epochs: int,
    epochs_done: int,
    saved: Mapping[str, Any],
) -> Flow:
    """The flow of a fit, or of its continuation: rule, policy and order of the samples go on where they were.

    A rule or a policy that was changed in between begins anew.
    """
    growth = None
    if batches.growing is not None:
        growth = Growth(batches.growing, ref_batch=batches.base_batch, epoch_samples=samples)
    if saved:
        with suppress(CheckpointError):
            optimizer.load_state_dict({**saved["optimizer"], "inner": optimizer.inner.state_dict()})
        if growth is not None and saved["growth"] is not None:
            with suppress(CheckpointError):
                growth.load_state_dict(saved["growth"])
    return Flow(
        engine,
        optimizer,
        Ledger(samples=samples, epoch=epochs_done),
        step=int(saved.get("step", 0)),
        wall_s=float(saved.get("wall_s", 0.0)),
        total_samples=epochs * samples,
        growth=growth,
    )


def saved_state(flow: Flow) -> dict[str, Any]:
    """What `make_flow` goes on from; the inner optimizer, which the estimator keeps itself, is left out."""
    optimizer = {key: value for key, value in flow.optimizer.state_dict().items() if key != "inner"}
    growth = flow.growth.state_dict() if flow.growth is not None else None
    return {"optimizer": optimizer, "growth": growth, "step": flow.step, "wall_s": flow.wall_s}
