"""What every engine owes: each sample exactly once under faults, the weights of plain training, nothing left behind."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from contract.engines import CASES, CLIENT, EngineCase
from contract.suite import (
    EPOCHS,
    SAMPLES,
    VOID,
    BackAndForth,
    Fetched,
    FromStepThree,
    Outcome,
    SlopesAndReviews,
    ThreeBranches,
    changing_plan,
    make_data,
    make_engine,
    make_model,
    weights_of,
)
from ebbflow.data.ledger import Ledger
from ebbflow.data.permutation import Permutation
from ebbflow.engines.base import Engine, EngineParts, Faults
from ebbflow.plan.batch_plan import BatchPlan
from ebbflow.record import StepRow
from ebbflow.rules.rule import Rule
from ebbflow.run.flow import Flow

every_engine = pytest.mark.parametrize("case", [case.param() for case in CASES], indirect=True)
driven_here = pytest.mark.parametrize("case", [case.param() for case in CASES if case.maker is not None], indirect=True)


@pytest.fixture(scope="module")
def four_workers() -> Iterator[None]:
    pytest.importorskip("distributed", reason="the Dask engine needs distributed: pip install 'ebbflow[dask]'")
    from engines.dask_helpers import local_client

    with local_client(4) as client:
        CLIENT.append(client)
        yield
        CLIENT.clear()


@pytest.fixture
def case(request: pytest.FixtureRequest) -> EngineCase:
    if request.param.dask:
        request.getfixturevalue("four_workers")
    return request.param


def run(case: EngineCase, *, faults: Faults | None = None, batch_norm: bool = False, counted: bool = False) -> Outcome:
    return case.run(changing_plan(), faults or Faults(), batch_norm, counted)


def assert_exactly_once(outcome: Outcome) -> None:
    for epoch in range(EPOCHS):
        used = Counter(
            i for step, at in zip(outcome.committed, outcome.epochs, strict=True) if at == epoch for i in step
        )
        assert used == Counter(range(SAMPLES)), f"epoch {epoch}"


def by_plain_torch(outcome: Outcome, **loss: int) -> torch.Tensor:
    """The weights after the same steps, each computed as one batch."""
    model = make_model()
    x, y = make_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in outcome.committed:
        optimizer.param_groups[0]["lr"] = 0.1 * len(step) / 8
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[step]), y[step], **loss).backward()
        optimizer.step()
    return weights_of(model)


# Runs ---------------------------------------------------------------------------------------------------------------


@every_engine
def test_every_sample_counts_once_per_epoch_while_workers_change(case: EngineCase) -> None:
    outcome = run(case)
    assert_exactly_once(outcome)
    assert len({len(step) for step in outcome.committed}) > 3, "the plan did change the batch"


@every_engine
@pytest.mark.parametrize("worker", [0, 1])
def test_a_lost_worker_costs_a_step_and_no_sample(case: EngineCase, worker: int) -> None:
    faults = Faults().lose(worker=worker, step=2).rejoin(worker=worker, step=9)
    outcome = run(case, faults=faults)
    assert faults.fired == faults.planned == 2, "a fault that never fired proves nothing"
    assert_exactly_once(outcome)
    assert outcome.attempts == len(outcome.committed) + 1


@every_engine
def test_two_lost_at_once_and_one_in_every_epoch(case: EngineCase) -> None:
    faults = Faults().lose(worker=0, step=3).lose(worker=1, step=3).rejoin(worker=0, step=5)
    faults.lose(worker=2, step=12).rejoin(worker=2, step=13).lose(worker=0, step=20)
    outcome = run(case, faults=faults)
    assert faults.fired == faults.planned
    assert_exactly_once(outcome)


@every_engine
def test_a_lost_step_leaves_no_trace_in_the_model(case: EngineCase) -> None:
    """A worker that dies and is back at once: the step is repeated with the same samples and the same result."""
    faults = Faults().lose(worker=9, step=4)  # a worker that the step does not count: it dies, nobody is missing
    disturbed = run(case, faults=faults, batch_norm=True)
    undisturbed = run(case, batch_norm=True)
    assert disturbed.attempts == undisturbed.attempts + 1
    assert disturbed.committed == undisturbed.committed
    torch.testing.assert_close(disturbed.weights, undisturbed.weights, rtol=1e-9, atol=1e-12)


@every_engine
def test_any_number_of_workers_equals_one_large_batch(case: EngineCase) -> None:
    """Without batch norm: the same steps computed by plain torch, one batch each."""
    outcome = run(case)
    torch.testing.assert_close(outcome.weights, by_plain_torch(outcome), rtol=1e-9, atol=1e-12)


@every_engine
def test_a_loss_over_something_else_than_samples_is_divided_once_by_the_count_of_the_step(case: EngineCase) -> None:
    """Batches are nested, and a third of the samples is void: the same steps computed by plain torch, one batch each.

    Micro-batches have 4 samples, so the mean of their means would be another gradient in nearly every step.
    """
    outcome = run(case, counted=True)
    torch.testing.assert_close(outcome.weights, by_plain_torch(outcome, ignore_index=VOID), rtol=1e-9, atol=1e-12)


@every_engine
def test_the_same_run_twice_is_the_same(case: EngineCase) -> None:
    first, second = run(case, batch_norm=True), run(case, batch_norm=True)
    assert first.committed == second.committed
    torch.testing.assert_close(first.weights, second.weights, rtol=1e-9, atol=1e-12)


# Single members of the contract --------------------------------------------------------------------------------------


def made(case: EngineCase, **settings: object) -> Engine:
    assert case.maker is not None
    return make_engine(case.maker, changing_plan(), Fetched(), **settings)  # type: ignore[arg-type]


@driven_here
def test_what_a_header_and_a_checkpoint_keep_is_plain(case: EngineCase) -> None:
    with made(case) as engine:
        assert json.loads(json.dumps(engine.describe()))["engine"] == type(engine).__name__
        state = json.loads(json.dumps(engine.state_dict()))
        engine.load_state_dict(state)
        assert engine.state_dict() == state
        assert engine.writes_files
        assert engine.idle_processes() == ""


@driven_here
def test_steps_are_measured_when_asked_for_and_the_numbers_are_those_of_the_reference(case: EngineCase) -> None:
    def measurement(engine: Engine) -> object:
        size = engine.participants(0)
        engine.measure(True)
        gradients = engine.gradients(Ledger(samples=SAMPLES).assign(size.samples), size)
        assert engine.commit()
        return gradients.measurement

    with made(case, needs=frozenset({"moments"})) as engine, made(CASES[0], needs=frozenset({"moments"})) as reference:
        ours, theirs = measurement(engine), measurement(reference)
    assert ours is not None and theirs is not None
    assert ours.sq_mean == pytest.approx(theirs.sq_mean, rel=1e-9)  # type: ignore[attr-defined]
    assert ours.micro_batches >= 2  # type: ignore[attr-defined]


@driven_here
def test_loss_and_statistics_of_a_counted_loss_are_those_of_the_gradient_that_is_applied(case: EngineCase) -> None:
    """The measurement is made before the division: |mean gradient|^2 of plain torch, and the mean loss of the step."""
    with made(case, needs=frozenset({"moments"}), counted=True) as engine:
        size = engine.participants(0)
        engine.measure(True)
        gradients = engine.gradients(Ledger(samples=SAMPLES).assign(size.samples), size)
        assert engine.commit()
    step = Permutation(SAMPLES, 7, 0).indices(0, size.samples)
    model = make_model()
    x, y = make_data()
    loss = nn.functional.cross_entropy(model(x[step]), y[step], ignore_index=VOID)
    loss.backward()
    norm_sq = sum(
        parameter.grad.square().sum().item() for parameter in model.parameters() if parameter.grad is not None
    )
    assert gradients.loss == pytest.approx(loss.item(), rel=1e-9)
    assert gradients.measurement is not None
    assert sum(gradients.measurement.sq_mean) == pytest.approx(norm_sq, rel=1e-9)


def run_steps(case: EngineCase, rule: str | Rule, steps: int) -> tuple[Flow, list[StepRow]]:
    """So many steps of four workers and 16 samples, with batch norm."""
    optimizers = []

    def noting(parts: EngineParts) -> Engine:
        optimizers.append(parts.optimizer)
        assert case.maker is not None
        return case.maker(parts)

    with make_engine(noting, BatchPlan.constant(4, 16), Fetched(), batch_norm=True, rule=rule) as engine:
        flow = Flow(engine, optimizers[0], Ledger(samples=SAMPLES), total_samples=3 * SAMPLES)
        rows = [row for _ in range(steps) if (row := flow.run_step()) is not None]
    return flow, rows


@driven_here
def test_a_run_that_goes_back_to_a_snapshot_ends_as_if_nothing_had_happened(case: EngineCase) -> None:
    """Steps 3 to 6 are given back, then 7 to 9; the ledger goes back with the weights, and no sample counts twice.

    An epoch of 97 samples is five steps of 16, one of 15 and one of 2: 16 + 16 + 15 + 2 and 16 + 16 + 15 go back.
    """

    flow, rows = run_steps(case, BackAndForth(), 16)
    plain, undisturbed = run_steps(case, "linear", 9)
    assert [row.step for row in rows] == list(range(16)), "steps go on counting"
    assert {row.step: row.stats["given_back"] for row in rows if "given_back" in row.stats} == {6: 49.0, 9: 47.0}
    kept = [row for row in rows if row.step < 3 or row.step > 9]
    assert [(row.epoch, row.samples) for row in kept] == [(row.epoch, row.samples) for row in undisturbed]
    assert [row.loss for row in kept] == pytest.approx([row.loss for row in undisturbed], rel=1e-9)
    assert flow.ledger == plain.ledger
    assert flow.kept.snapshot is None and flow.kept.unconfirmed is None, "released after step 11"
    assert flow.optimizer.state_dict()["rule_state"] == 2
    torch.testing.assert_close(weights_of(flow.engine.model), weights_of(plain.engine.model), rtol=1e-9, atol=1e-12)


@driven_here
@pytest.mark.parametrize(("winner", "factor"), [(1, 0.5), (2, 2.0)])
def test_of_three_branches_only_the_winner_leaves_a_trace(case: EngineCase, winner: int, factor: float) -> None:
    """An epoch has steps of 16, 16, 16, 16, 16, 15 and 2 samples: three before the branches, whose four take 16 + 16 +
    15 + 2 and whose scores take 16 + 16 of the next epoch.
    """
    flow, rows = run_steps(case, ThreeBranches(winner), 24)
    plain, undisturbed = run_steps(case, FromStepThree(factor), 10)
    trained, scored = 49, 32
    given_back = {row.step: row.stats["given_back"] for row in rows if "given_back" in row.stats}
    assert given_back == {8: trained + scored, 14: trained + scored, 20: scored}
    kept = [row for row in rows if row.step < 3 or row.step > 20 or 3 + 6 * winner <= row.step < 7 + 6 * winner]
    assert [(row.epoch, row.samples) for row in kept] == [(row.epoch, row.samples) for row in undisturbed]
    assert [row.loss for row in kept] == pytest.approx([row.loss for row in undisturbed], rel=1e-9)
    scores = [rows[step].loss for step in (8, 14, 20)]
    assert flow.optimizer.state_dict()["rule_state"] == scores and len(set(scores)) == 3
    assert flow.ledger == plain.ledger and flow.kept.branches is None
    torch.testing.assert_close(weights_of(flow.engine.model), weights_of(plain.engine.model), rtol=1e-9, atol=1e-12)


@driven_here
def test_a_rule_that_follows_the_slopes_sees_those_of_the_reference_and_keeps_what_it_has_reviewed(
    case: EngineCase,
) -> None:
    flow, rows = run_steps(case, SlopesAndReviews(), 9)
    plain, reference = run_steps(CASES[0], SlopesAndReviews(), 9)
    assert flow.optimizer.state_dict()["rule_state"] == plain.optimizer.state_dict()["rule_state"] == 9
    assert [row.stats["left"] for row in rows] == pytest.approx([row.stats["left"] for row in reference], rel=1e-6)
    assert [row.stats["began"] < 0 for row in rows] == [False] + 8 * [True], "a step goes down where it begins"
    torch.testing.assert_close(weights_of(flow.engine.model), weights_of(plain.engine.model), rtol=1e-7, atol=1e-9)


@driven_here
def test_stopping_is_agreed_on_and_closing_twice_is_harmless(case: EngineCase) -> None:
    asked = False
    with made(case) as engine:
        should_stop = engine.agree_to_stop(lambda: asked)
        size = engine.participants(0)
        engine.gradients(Ledger(samples=SAMPLES).assign(size.samples), size)
        engine.commit()
        assert not should_stop()
        asked = True
        engine.gradients(Ledger(samples=SAMPLES).assign(size.samples), size)
        engine.commit()
        assert should_stop()
    engine.close()
