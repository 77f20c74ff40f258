from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from ebbflow.data.ledger import Ledger, MicroBatch
from ebbflow.engines import replica_step
from ebbflow.engines.base import Faults
from ebbflow.engines.emulated import LoopEngine, Ranks
from ebbflow.engines.replica_step import micro_batch_seed
from ebbflow.errors import ConfigError
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.plan.batch_plan import BatchPlan
from ebbflow.run.flow import Flow
from ebbflow.workloads import cross_entropy

SAMPLES = 40


def engine_on(model: nn.Module, *, workers: int = 3, local: int = 4, **settings: object) -> LoopEngine:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(SAMPLES, 5, generator=generator), torch.randint(3, (SAMPLES,), generator=generator)
    plan = BatchPlan.constant(workers, workers * local)
    return LoopEngine(
        model, lambda i: (x[i], y[i]), cross_entropy, plan, samples=SAMPLES, **settings  # type: ignore[arg-type]
    )  # fmt: skip


def step(engine: LoopEngine, ledger: Ledger, number: int = 0) -> tuple[bool, Ledger]:
    size = engine.participants(number)
    assignment = ledger.assign(size.samples)
    engine.gradients(assignment, size)
    committed = engine.commit()
    return committed, ledger.commit(assignment) if committed else ledger


def test_running_statistics_move_once_a_step_by_the_mean_over_the_workers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3))
    engine = engine_on(model)
    step(engine, Ledger(samples=SAMPLES))
    # What three workers of four samples see, with torch's momentum of 0.1 applied once to the mean of their statistics.
    indices = engine._order(0).indices(0, 12)
    parts = [engine.fetch(indices[i : i + 4])[0] for i in (0, 4, 8)]
    mean = torch.stack([part.mean(0) for part in parts]).mean(0)
    var = torch.stack([part.var(0) for part in parts]).mean(0)
    torch.testing.assert_close(model[0].running_mean, 0.1 * mean)
    torch.testing.assert_close(model[0].running_var, 0.9 * torch.ones(5) + 0.1 * var)
    assert model[0].num_batches_tracked == 1


@pytest.mark.parametrize("kind", ["torch's", "own"])
def test_layers_count_steps_and_not_micro_batches(kind: str) -> None:
    class Own(nn.BatchNorm1d):
        """Counts by itself, as torch's SyncBatchNorm does, which does not work without a count."""

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            assert self.num_batches_tracked is not None
            return super().forward(input)

    layer = (Own if kind == "own" else nn.BatchNorm1d)(5)
    model = nn.Sequential(layer, nn.Linear(5, 3))
    engine = engine_on(model, micro_batch=2)
    ledger = Ledger(samples=SAMPLES)
    for number in range(3):
        _, ledger = step(engine, ledger, number)
        assert layer.num_batches_tracked == number + 1
    assert "0.num_batches_tracked" in model.state_dict()


def test_without_momentum_running_statistics_are_the_mean_of_all_steps() -> None:
    model = nn.Sequential(nn.BatchNorm1d(5, momentum=None), nn.Linear(5, 3))
    engine = engine_on(model)
    ledger = Ledger(samples=SAMPLES)
    for number in range(3):
        _, ledger = step(engine, ledger, number)
    # 36 samples in nine equal micro-batches: the mean over all of them
    seen = engine.fetch(engine._order(0).indices(0, 36))[0]
    torch.testing.assert_close(model[0].running_mean, seen.mean(0))
    assert model[0].momentum is None


def test_frozen_batch_norm_stays_frozen() -> None:
    class Frozen(nn.Sequential):
        def train(self, mode: bool = True) -> Frozen:
            super().train(mode)
            self[0].eval()
            return self

    model = Frozen(nn.BatchNorm1d(5), nn.Linear(5, 3))
    before = copy.deepcopy(model[0].state_dict())
    step(engine_on(model), Ledger(samples=SAMPLES))
    assert all(torch.equal(before[key], value) for key, value in model[0].state_dict().items())


def test_a_lost_step_restores_buffers_and_clears_gradients() -> None:
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3))
    before = copy.deepcopy(model.state_dict())
    committed, ledger = step(engine_on(model, faults=Faults().lose(worker=0, step=0)), Ledger(samples=SAMPLES))
    assert not committed
    assert ledger.total == 0
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_pieces_smaller_than_a_workers_share_give_the_same_gradient() -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(5, 3))
    parts = copy.deepcopy(whole)
    for model, micro_batch in ((whole, None), (parts, 3)):
        step(engine_on(model, workers=2, local=8, micro_batch=micro_batch), Ledger(samples=SAMPLES))
    torch.testing.assert_close(whole[0].weight.grad, parts[0].weight.grad)


@pytest.mark.parametrize("rule_needs", [set(), {"moments"}])
def test_gradients_that_are_added_up_at_once_are_those_of_autograd(
    monkeypatch: pytest.MonkeyPatch, rule_needs: set[str]
) -> None:
    """As on a GPU, in steps that are not measured; one parameter has a gradient in some micro-batches only."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 3), nn.Linear(5, 3)
            self.rows = nn.Embedding(4, 3, sparse=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.first(x) + self.rows(torch.tensor([1, 2, len(x) % 4])).mean(0)
            return out + self.second(x) if x[0, 0] > 0 else out

    found: list[dict[str, torch.Tensor]] = []
    for at_once in (False, True):
        monkeypatch.setattr(replica_step, "adds_at_once", lambda parameters, answer=at_once: answer)
        torch.manual_seed(0)
        model = Sometimes()
        engine = engine_on(model, micro_batch=2, needs=rule_needs)
        engine.measure(False)
        seen: list[bool] = []
        model.first.weight.register_hook(lambda g, m=model, s=seen: s.append(m.first.weight.grad is None))
        step(engine, Ledger(samples=SAMPLES))
        assert any(seen[1:]) is at_once
        found.append({name: p.grad.to_dense() for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() and "second.weight" in found[0]
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]), name


def test_the_sum_of_all_micro_batches_is_in_the_gradients_that_are_sent_during_the_last_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_step, "adds_at_once", lambda parameters: True)
    weight = nn.Parameter(torch.zeros(1))
    model = nn.Module()
    model.weight = weight
    sent: list[float] = []
    weight.register_post_accumulate_grad_hook(lambda p: sent.append(p.grad.item()))  # type: ignore[union-attr]
    replica = replica_step.ReplicaStep(
        model, lambda i: (torch.ones(len(i)), torch.ones(len(i))), lambda m, x, y: (m.weight * x).mean(),
        samples=6, seed=0, sends_in_last=lambda: True,
    )  # fmt: skip
    replica.begin()
    replica.compute([MicroBatch(worker=0, start=i, stop=i + 2) for i in (0, 2, 4)], epoch=0, batch=6)
    assert sent == pytest.approx([1 / 3, 1 / 3, 1.0]) and weight.grad is not None and weight.grad.item() == sent[-1]


def test_dropout_does_not_depend_on_what_happened_before() -> None:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    second = copy.deepcopy(first)
    step(engine_on(first), Ledger(samples=SAMPLES, epoch=2, position=12))
    torch.rand(1000)  # a run with another history has drawn other numbers
    step(engine_on(second), Ledger(samples=SAMPLES, epoch=2, position=12))
    assert torch.equal(first[0].weight.grad, second[0].weight.grad)


def test_piece_seeds_differ_and_fit_torch() -> None:
    seeds = {micro_batch_seed(seed, epoch, start) for seed in range(5) for epoch in range(20) for start in range(50)}
    assert len(seeds) == 5 * 20 * 50
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_nan_loss_is_returned_not_hidden() -> None:
    model = nn.Linear(5, 3)
    nn.init.constant_(model.weight, float("nan"))
    engine = engine_on(model)
    size = engine.participants(0)
    assert np.isnan(engine.gradients(Ledger(samples=SAMPLES).assign(12), size).loss)


@pytest.mark.parametrize("step_number", [0, 5])
def test_faults_strike_once(step_number: int) -> None:
    faults = Faults().lose(worker=1, step=step_number)
    assert faults.strike(step_number)
    assert not faults.strike(step_number)
    size = BatchPlan.constant(4, 32).at(0)
    present = faults.present(step_number, size)
    assert (present.workers, present.samples) == (3, 24)


@pytest.mark.parametrize("needs", [{"moments"}, {"moments", "layers"}])
def test_it_measures_the_pieces_when_a_rule_needs_it(needs: set[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    engine = engine_on(model, workers=3, local=4, needs=frozenset(needs))
    ledger = Ledger(samples=SAMPLES, position=30)  # ten samples are left: micro-batches of 4, 3 and 3
    size = engine.participants(0)
    measured = engine.gradients(ledger.assign(size.samples), size).measurement
    assert measured is not None
    indices = engine._order(0).indices(30, 40)
    squares = torch.zeros(4)
    for start, stop in ((0, 4), (4, 7), (7, 10)):
        x, y = engine.fetch(indices[start:stop])
        parts = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))
        squares += torch.stack([part.square().sum() for part in parts]) * (stop - start) / 10
    mean = [p.grad.square().sum().item() for p in model.parameters() if p.grad is not None]
    layers = "layers" in needs
    assert (measured.batch, measured.micro_batches) == (10, 3)
    assert measured.mean_sq == pytest.approx(squares.tolist() if layers else [squares.sum().item()], rel=1e-5)
    assert measured.sq_mean == pytest.approx(mean if layers else [sum(mean)], rel=1e-5)


def test_it_measures_nothing_unless_a_rule_needs_it() -> None:
    model = nn.Linear(5, 3)
    engine = engine_on(model)
    size = engine.participants(0)
    assert engine.meter is None
    assert engine.gradients(Ledger(samples=SAMPLES).assign(12), size).measurement is None


def test_one_worker_is_one_piece_unless_pieces_are_smaller() -> None:
    for micro_batch, count in ((None, 1), (3, 2)):
        engine = engine_on(nn.Linear(5, 3), workers=1, local=6, micro_batch=micro_batch, needs={"moments"})
        size = engine.participants(0)
        measured = engine.gradients(Ledger(samples=SAMPLES).assign(6), size).measurement
        assert measured is not None
        assert measured.micro_batches == count


def test_a_lost_step_leaves_no_trace_in_the_measurements() -> None:
    measured = []
    for faults in (None, Faults().lose(worker=9, step=0)):
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        engine = engine_on(model, needs={"moments"}, faults=faults)
        assignment, size = Ledger(samples=SAMPLES).assign(12), engine.participants(0)
        gradients = engine.gradients(assignment, size)
        if not engine.commit():
            gradients = engine.gradients(assignment, size)
            assert engine.commit()
        measured.append(gradients.measurement)
    assert measured[0] == measured[1]


def test_a_step_that_an_exception_cut_short_is_forgotten() -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    engine = engine_on(model, needs={"moments"})
    assignment, size = Ledger(samples=SAMPLES).assign(12), engine.participants(0)
    undisturbed = engine.gradients(assignment, size).measurement
    fetch, calls = engine.fetch, []

    def failing(indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(1)
        if len(calls) == 2:
            raise OSError("the disk is gone")
        return fetch(indices)

    engine.fetch = failing
    with pytest.raises(OSError, match="disk"):
        engine.gradients(assignment, size)
    engine.fetch = fetch
    assert engine.gradients(assignment, size).measurement == undisturbed


def test_layers_come_in_the_order_of_the_given_parameters() -> None:
    model = nn.Linear(5, 3)
    engine = engine_on(model, needs={"layers"}, parameters=[model.bias, model.weight])
    size = engine.participants(0)
    measured = engine.gradients(Ledger(samples=SAMPLES).assign(12), size).measurement
    assert measured is not None
    assert model.bias.grad is not None
    assert measured.sq_mean[0] == pytest.approx(model.bias.grad.square().sum().item())


@pytest.mark.parametrize(("rule", "ranks"), [("adascale", None), ("linear", Ranks(0, 1)), ("linear", None)])
def test_unfreezing_a_layer_is_refused_where_it_would_be_left_out(rule: str, ranks: Ranks | None) -> None:
    # Nobody would measure its gradient, and ranks would not add theirs up. One process that does neither just trains.
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    optimizer = ElasticOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), rule, base_batch=4)
    engine = engine_on(model, parameters=optimizer.layers, needs=optimizer.rule.needs, ranks=ranks)
    flow = Flow(engine, optimizer, Ledger(samples=SAMPLES))
    assert flow.run_step() is not None
    model[1].weight.requires_grad_(False)  # freezing more is fine
    assert flow.run_step() is not None
    before = model[0].weight.clone()
    model[0].requires_grad_(True)
    if rule == "linear" and ranks is None:
        assert flow.run_step() is not None
        assert not torch.equal(model[0].weight, before)
        return
    with pytest.raises(ConfigError, match="a tensor is trained that was frozen when the optimizer was made"):
        flow.run_step()
    assert flow.step == 2
