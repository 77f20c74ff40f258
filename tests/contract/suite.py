"""The suite that every engine passes. An engine joins by a subclass with one method, `run`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from ebbflow.engines.base import Faults
from ebbflow.plan.batch_plan import BatchPlan
from ebbflow.plan.policies import Follow
from ebbflow.traces.availability import Trace

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


def changing_plan() -> BatchPlan:
    """2 to 5 workers of 4 samples; one step a second; long enough for three epochs of 97 samples."""
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


class EngineContract(ABC):
    """Subclass in a test module, name it Test..., and implement `run`."""

    @abstractmethod
    def run(self, plan: BatchPlan, *, faults: Faults | None = None, batch_norm: bool = False) -> Outcome:
        """Train `make_model` on `make_data` for EPOCHS epochs: SGD with momentum 0.9, rate 0.1 at 8 samples, linear."""

    def assert_exactly_once(self, outcome: Outcome) -> None:
        for epoch in range(EPOCHS):
            used = Counter(
                i for step, at in zip(outcome.committed, outcome.epochs, strict=True) if at == epoch for i in step
            )
            assert used == Counter(range(SAMPLES)), f"epoch {epoch}"

    def test_every_sample_counts_once_an_epoch_while_workers_change(self) -> None:
        outcome = self.run(changing_plan())
        self.assert_exactly_once(outcome)
        assert len({len(step) for step in outcome.committed}) > 3, "the plan did change the batch"

    @pytest.mark.parametrize("worker", [0, 1])
    def test_a_lost_worker_costs_a_step_and_no_sample(self, worker: int) -> None:
        faults = Faults().lose(worker=worker, step=2).rejoin(worker=worker, step=9)
        outcome = self.run(changing_plan(), faults=faults)
        assert faults.fired == faults.planned == 2, "a fault that never fired proves nothing"
        self.assert_exactly_once(outcome)
        assert outcome.attempts == len(outcome.committed) + 1

    def test_two_lost_at_once_and_one_in_every_epoch(self) -> None:
        faults = Faults().lose(worker=0, step=3).lose(worker=1, step=3).rejoin(worker=0, step=5)
        faults.lose(worker=2, step=12).rejoin(worker=2, step=13).lose(worker=0, step=20)
        outcome = self.run(changing_plan(), faults=faults)
        assert faults.fired == faults.planned
        self.assert_exactly_once(outcome)

    def test_a_lost_step_leaves_no_trace_in_the_model(self) -> None:
        """A worker that dies and is back at once: the step is repeated with the same samples and the same result."""
        faults = Faults().lose(worker=9, step=4)  # a worker that the step does not count: it dies, nobody is missing
        disturbed = self.run(changing_plan(), faults=faults, batch_norm=True)
        undisturbed = self.run(changing_plan(), batch_norm=True)
        assert disturbed.attempts == undisturbed.attempts + 1
        assert disturbed.committed == undisturbed.committed
        torch.testing.assert_close(disturbed.weights, undisturbed.weights, rtol=1e-9, atol=1e-12)

    def test_any_number_of_workers_equals_one_large_batch(self) -> None:
        """Without batch norm: the same steps computed by plain torch, one batch each."""
        outcome = self.run(changing_plan())
        model = make_model()
        x, y = make_data()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in outcome.committed:
            optimizer.param_groups[0]["lr"] = 0.1 * len(step) / 8
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[step]), y[step]).backward()
            optimizer.step()
        plain = torch.cat([tensor.double().flatten() for tensor in model.state_dict().values()])
        torch.testing.assert_close(outcome.weights, plain, rtol=1e-9, atol=1e-12)

    def test_the_same_run_twice_is_the_same(self) -> None:
        first, second = self.run(changing_plan(), batch_norm=True), self.run(changing_plan(), batch_norm=True)
        assert first.committed == second.committed
        torch.testing.assert_close(first.weights, second.weights, rtol=1e-9, atol=1e-12)
