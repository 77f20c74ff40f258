"""Steps that are not measured: every engine skips the same ones, and the run is the same for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from contract.suite import SAMPLES, changing_plan, make_data, make_model
from ebbflow.data.ledger import Ledger
from ebbflow.engines.base import Gradients
from ebbflow.engines.dask import DaskEngine
from ebbflow.engines.emulated import FusedEngine, LoopEngine
from ebbflow.errors import ConfigError
from ebbflow.moments.estimate import Averages
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.run.flow import Flow
from ebbflow.workloads import cross_entropy
from engines.dask_helpers import Witnessed, local_client

STEPS = 30
OLD = Averages(weight=0.9, noise=(3.0,), signal=(0.5,))
"""Averages that have seen a whole memory, so that steps are skipped from the first one on."""


class Told(LoopEngine):
    """A reference engine that writes down which steps it measured."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.measured: list[bool] = []

    def gradients(self, *args: Any) -> Gradients:
        gradients = super().gradients(*args)
        self.measured.append(gradients.measurement is not None)
        return gradients


def make_optimizer(model: nn.Module, **settings: Any) -> ElasticOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # An observation may stand for 1280/32 = 40 samples: of steps of 8 one in four is measured, of 16 every second.
    optimizer = ElasticOptimizer(inner, "adascale", base_batch=8, epoch_samples=SAMPLES, memory_steps=160, **settings)
    optimizer._averages = OLD
    return optimizer


def run(kind: type[LoopEngine] | type[FusedEngine], **settings: Any) -> tuple[Any, Flow, list[dict[str, float]]]:
    model = make_model()
    x, y = make_data()
    every = {"measure_every": settings.pop("measure_every")} if "measure_every" in settings else {}
    optimizer = make_optimizer(model, **every)
    engine = kind(
        model, lambda i: (x[i], y[i]), cross_entropy, changing_plan(), samples=SAMPLES, seed=7,
        needs=optimizer.rule.needs, micro_batch=2, **settings,
    )  # fmt: skip
    flow = Flow(engine, optimizer, Ledger(samples=SAMPLES))
    rows = []
    for _ in range(STEPS):
        row = flow.run_step()
        assert row is not None
        rows.append({"batch": row.batch, "multiplier": row.multiplier, **row.stats})
    return model, flow, rows


def assert_same(left: nn.Module, right: nn.Module) -> None:
    for name, expected in left.state_dict().items():
        torch.testing.assert_close(right.state_dict()[name], expected, rtol=1e-9, atol=1e-12, msg=name)


def test_the_steps_that_are_skipped_are_those_that_the_averages_can_do_without() -> None:
    _, flow, rows = run(Told)
    assert isinstance(flow.engine, Told)
    averages, due = OLD, []
    for row in rows:
        due.append(averages.due(int(row["batch"]), memory=1280, every=4))
        averages = Averages(0.9) if due[-1] else averages.passed(int(row["batch"]))
    assert flow.engine.measured == due
    assert 8 <= sum(due) <= STEPS - 8, "some are measured and some are not"


def test_a_step_that_is_not_measured_keeps_the_gain_of_the_averages() -> None:
    _, flow, rows = run(Told)
    assert isinstance(flow.engine, Told)
    for before, row, measured in zip(rows, rows[1:], flow.engine.measured[1:], strict=False):
        assert (row["noise"] == before["noise"]) == (not measured)


def test_one_measures_every_step() -> None:
    _, flow, _ = run(Told, measure_every=1)
    assert isinstance(flow.engine, Told)
    assert all(flow.engine.measured)


def test_the_fused_engine_skips_the_same_steps() -> None:
    reference, _, _ = run(LoopEngine)
    fused, _, _ = run(FusedEngine, fused_batch=2)  # micro-batches of two samples in both
    assert_same(reference, fused)


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize("transport", ["allreduce", "centralized"])
def test_dask_skips_the_same_steps(transport: str, tmp_path: Any) -> None:
    reference, _, _ = run(LoopEngine)
    model = make_model()
    optimizer = make_optimizer(model)
    with (
        local_client(2) as client,
        DaskEngine(
            model, Witnessed(*make_data(), tmp_path), cross_entropy, changing_plan(), client=client,
            transport=transport,
            optimizer=optimizer, samples=SAMPLES, seed=7, micro_batch=2, min_workers=2, needs=optimizer.rule.needs,
        ) as engine,
    ):  # fmt: skip
        flow = Flow(engine, optimizer, Ledger(samples=SAMPLES))
        done = 0
        while done < STEPS:
            done += flow.run_step() is not None
        engine.sync()
    assert_same(reference, model)


def test_a_checkpoint_between_two_measurements_goes_on_with_the_same_steps() -> None:
    whole, _, _ = run(LoopEngine)
    model = make_model()
    x, y = make_data()

    def flow_of(optimizer: ElasticOptimizer, ledger: Ledger, step: int) -> Flow:
        engine = LoopEngine(
            model, lambda i: (x[i], y[i]), cross_entropy, changing_plan(), samples=SAMPLES, seed=7,
            needs=optimizer.rule.needs, micro_batch=2,
        )  # fmt: skip
        return Flow(engine, optimizer, ledger, step=step)

    optimizer, ledger = make_optimizer(model), Ledger(samples=SAMPLES)
    for step in range(STEPS):  # saved and loaded after every step
        flow = flow_of(optimizer, ledger, step)
        assert flow.run_step() is not None
        ledger, state = flow.ledger, optimizer.state_dict()
        optimizer = make_optimizer(model)
        optimizer.load_state_dict(state)
    assert_same(whole, model)


def test_an_engine_that_measures_nothing_is_refused_by_a_rule_that_needs_it() -> None:
    model = make_model()
    x, y = make_data()
    engine = LoopEngine(model, lambda i: (x[i], y[i]), cross_entropy, changing_plan(), samples=SAMPLES, seed=7)
    flow = Flow(engine, make_optimizer(model, measure_every=1), Ledger(samples=SAMPLES))
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(ConfigError, match=r"adascale needs the noise .* make the engine with needs="):
        flow.run_step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), "before anything is changed"
