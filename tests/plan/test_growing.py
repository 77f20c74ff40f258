"""Growing policies: rows derived by hand, what they do to a run, and what is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drawing_examples import examples
from ebbflow.core.units import Seconds
from ebbflow.data.ledger import Assignment, Ledger
from ebbflow.engines.base import Engine, Gradients
from ebbflow.errors import CheckpointError, EbbflowError, PlanError, SpecError, UnitError
from ebbflow.moments.estimate import Measurement, Moments
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.plan.batch_plan import BatchPlan, StepSize
from ebbflow.plan.fitted_plans import fit_growing, foresee, plan_growing
from ebbflow.plan.growing import Geo, Goodput, Growth, allow
from ebbflow.plan.policies import GrowingPolicy, Observation, PolicyState, make_policy
from ebbflow.rules.rule import Rule, Scaling, State, StepContext, damp, make_rule
from ebbflow.run.config import RunConfig
from ebbflow.run.flow import Flow
from ebbflow.run.loop import Callbacks
from ebbflow.run.training import train
from ebbflow.traces.availability import Trace


def policy_of(text: str) -> GrowingPolicy:
    policy = make_policy(text)
    assert isinstance(policy, GrowingPolicy)
    return policy


def requested(text: str, *steps: dict[str, Any], ref_batch: int = 100) -> list[int]:
    """What a policy requests in the first step and after each of the given ones."""
    growth = Growth(policy_of(text), ref_batch=ref_batch, epoch_samples=1000)
    found = [growth.requested]
    for step in steps:
        growth.observe(**{"batch": 100, **step})
        found.append(growth.requested)
    return found


def test_geo_by_hand() -> None:
    # Epochs of 1000 samples, steps of 500: after 2 epochs x3, after 4 x9.
    assert requested("geo(2ep, factor=3)", *[{"batch": 500}] * 8) == [100, 100, 100, 100, 300, 300, 300, 300, 900]
    # Ten reference steps of 100 are 1000 samples; 64 x 1.5 = 96, x 1.5 = 144.
    assert requested("geo(10steps, factor=1.5, initial=64)", *[{"batch": 1000}] * 2) == [64, 96, 144]
    assert requested("geo", *[{"batch": 1000}] * 5) == [100] * 5 + [200]  # the default: 2 every 5 epochs


def test_pada_by_hand() -> None:
    # 100 + 0.5 k, rounded up.
    assert requested("pada(rate=0.5)", *[{}] * 4) == [100, 101, 101, 102, 102]


def test_ada_by_hand() -> None:
    # F0 is the loss of the first step, 4. Means of two steps: 3 gives 133.3; 1.5 gives 266.7; 1 gives 400. With F* = 1,
    # F0 - F* = 3: over 2 it gives 150, over 0.5 it gives 600, and over 0 the batch is unknown.
    losses = [{"loss": x} for x in (4.0, 2.0, 2.0, 1.0, 1.5, 0.5)]
    assert requested("ada(dwell=2, wait=0)", *losses) == [100, 100, 134, 134, 267, 267, 400]
    assert requested("ada(dwell=2, wait=0, best=1)", *losses) == [100, 100, 150, 150, 600, 600, 600]
    assert requested("ada(dwell=2, wait=5)", *losses) == [100] * 6 + [400]
    # A first loss that is not known, or not above F*, is no reference: 4 is the first that is.
    assert requested("ada(dwell=1, wait=0, best=1)", {}, {"loss": 0.5}, {"loss": 4.0}, {"loss": 2.5})[3:] == [100, 200]
    # A loss above the first is no reason for a batch below the first.
    assert requested("ada(dwell=1, wait=0)", {"loss": 1.0}, {"loss": 2.0}) == [100, 100, 100]


def test_ada_norm_by_hand() -> None:
    # The first signal is 8, then 2: x4. Below zero there is no telling: as before.
    shown = [{"signal": 8.0}, {"signal": 2.0}, {"signal": -1.0}]
    assert requested("ada-norm(dwell=1, wait=0)", *shown) == [100, 100, 400, 400]


def test_rada_by_hand() -> None:
    # Windows of two; least loss and least squared norm: (2, 8), then (1, 2). Smoothed with rho = 0.5: (1.5, 5).
    # Mean of 1.5/2 and 5/8 is 0.6875, so D = ceil(100/0.6875) = ceil(145.45) = 146.
    shown = [{"loss": a, "norm_sq": b} for a, b in ((4.0, 8.0), (2.0, 9.0), (1.0, 3.0), (3.0, 2.0))]
    assert requested("rada(dwell=2, wait=0, rho=0.5)", *shown) == [100, 100, 100, 100, 146]


def test_rada_weighs_the_old_values_by_rho_and_its_second_window_contains_the_first() -> None:
    # Reference in step 2: (2, 8). The second window is all four steps, so that nothing changes: (2, 8). The third is
    # (1, 2), smoothed 0.25 (2, 8) + 0.75 (1, 2) = (1.25, 3.5). Mean of 1.25/2 and 3.5/8 is 0.53125: D = 188.2.
    values = ((4.0, 8.0), (2.0, 9.0), (3.0, 10.0), (5.0, 12.0), (1.0, 3.0), (1.5, 2.0))
    shown = [{"loss": a, "norm_sq": b} for a, b in values]
    assert requested("rada(dwell=2, wait=0, rho=0.25)", *shown) == [100] * 6 + [189]
    # With wait=4 the reference is the lowest of the first four steps, the same (2, 8); the window of step 6 is all six:
    # (1, 2), as before.
    assert requested("rada(dwell=2, wait=4, rho=0.25)", *shown) == [100] * 6 + [189]


def test_the_noise_policy_by_hand() -> None:
    # V/S = 900/3 = 300 after one step, whatever its weight; half of it is 150.
    assert requested("noise(dwell=1, wait=0)", {"noise": 900.0, "signal": 3.0}) == [100, 300]
    assert requested("noise(part=0.5, dwell=1, wait=0)", {"noise": 900.0, "signal": 3.0}) == [100, 150]
    # The first step enters with weight 1/2 and is halved once: (900/4 + 300/2)/(3/4 + 3/2) = 375/2.25 = 166.7.
    memory = 100 / 0.6931471805599453
    text = f"noise(dwell=1, wait=0, memory={memory!r}samples)"
    assert requested(text, {"noise": 900.0, "signal": 3.0}, {"noise": 300.0, "signal": 3.0}) == [100, 300, 167]


def test_no_worker_gets_a_single_sample_of_a_small_request() -> None:
    # Four workers of 2. Of 3 samples one worker takes all, of 5 two take 3 and 2: a third would have one alone.
    four = StepSize(workers=4, samples=8, time_s=0.0, duration_s=1.0)
    assert [(allow(four, n).workers, allow(four, n).samples) for n in (1, 3, 4, 5)] == [(1, 1), (1, 3), (2, 4), (2, 5)]


# -- the rate pays ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "exponent", "multiplier", "damping"),
    [
        ("constant", 1.0, 0.25, 0.25),  # a quarter of what was requested: a quarter of the rate
        ("constant", 0.5, 0.5, 0.5),  # optimizers that normalise: its root
        ("linear", 1.0, 2.0, 1.0),  # 2 at a batch of twice the reference: the rule has paid, 8 x 1/4 = 2
        ("linear", 0.5, 2.0, 1.0),  # 8 x 1/2 = 4 would raise the rate, which never happens
        ("sqrt", 1.0, 8**0.5 / 4, 0.5),  # sqrt says 8^(1/2) of the requested batch, 2^(1/2) of the step
    ],
)
def test_the_rate_pays_for_what_the_rule_has_not(rule: str, exponent: float, multiplier: float, damping: float) -> None:
    # The reference batch is 32, the step has 64, and 256 were requested.
    context = StepContext(step=0, batch=64, ref_batch=32, samples=0, shortfall=0.25)
    made = make_rule(rule)
    scaling = damp(made.scale(context, made.init())[0], made, context, made.init(), exponent=exponent)
    assert scaling.multiplier == pytest.approx(multiplier)
    assert scaling.stats["damping"] == pytest.approx(damping)


@pytest.mark.parametrize(
    ("rule", "before", "after"),
    [
        # 128 samples at a reference of 32, then 512 are requested: m(512) x 1/4, whether or not there is a ramp.
        ("linear", 4.0, 16 / 4),
        ("linear+ramp", 4.0, 16 / 4),
        ("dynamic", 4.0, 16 / 4),
        ("sqrt+ramp", 2.0, 4 / 4),
        ("constant+ramp", 1.0, 1 / 4),
    ],
)
def test_a_ramp_follows_the_batches_that_there_were_and_not_the_requested_ones(
    rule: str, before: float, after: float
) -> None:
    made = make_rule(rule)
    state, found = made.init(), []
    for step in range(40):
        context = StepContext(
            step=step, batch=128, ref_batch=32, samples=128 * step, shortfall=0.25 if step >= 20 else 1.0
        )
        scaling, new = made.scale(context, state)
        found.append(damp(scaling, made, context, state, exponent=1.0).multiplier)
        state = new
    assert found == pytest.approx([before] * 20 + [after] * 20)


def test_a_ramp_that_is_under_way_goes_on_at_the_reduced_rate() -> None:
    # From 32 to 128 samples the ramp of sqrt climbs from 1 to 2 over 16 steps; requested are 512: 4 x 1/4 of 2 is 1/2.
    made = make_rule("sqrt+ramp")
    _, state = made.scale(StepContext(step=0, batch=32, ref_batch=32, samples=0), made.init())
    for step in range(1, 6):
        context = StepContext(step=step, batch=128, ref_batch=32, samples=128 * step, shortfall=0.25)
        scaling, new = made.scale(context, state)
        assert scaling.multiplier == pytest.approx(1 + (step - 1) / 16)
        damped = damp(scaling, made, context, state, exponent=1.0)
        assert damped.multiplier == pytest.approx(scaling.multiplier / 2) and damped.stats["damping"] == 0.5
        state = new


def test_each_layer_pays_what_its_own_multiplier_has_not() -> None:
    # One layer is all signal, one all noise. At 128 of 32 samples they have 1 and 4, at the requested 512 1 and 16.
    moments = Moments(noise=8.0, signal=8.0, layer_noise=(0.0, 8.0), layer_signal=(8.0, 0.0))
    context = StepContext(step=0, batch=128, ref_batch=32, samples=0, shortfall=0.25, moments=moments)
    made = make_rule("lena(eps=0)")
    damped = damp(made.scale(context, made.init())[0], made, context, made.init(), exponent=1.0)
    assert damped.lr == pytest.approx((1 / 4, 16 / 4))
    assert damped.stats["damping"] == pytest.approx((1 / 4 + 4) / (1 + 4))


def test_a_rule_that_stands_still_has_nothing_to_pay_with() -> None:
    class Still(Rule):
        def scale(self, context: StepContext, state: State) -> tuple[Scaling, State]:
            return Scaling(lr=0.0), state

    context = StepContext(step=0, batch=64, ref_batch=32, samples=0, shortfall=0.25)
    assert damp(Scaling(lr=0.0), Still(), context, None, exponent=1.0) == Scaling(lr=0.0)


@pytest.mark.parametrize(
    ("kind", "lr"), [(torch.optim.SGD, 0.025), (torch.optim.AdamW, 0.05), (torch.optim.Adadelta, 0.05)]
)
def test_the_optimizer_decides_by_which_power(kind: type[torch.optim.Optimizer], lr: float) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = ElasticOptimizer(kind([weight], lr=0.1), "constant", base_batch=8)  # type: ignore[call-arg]
    weight.grad = torch.ones(3)
    update = optimizer.update(StepContext(step=0, batch=8, ref_batch=8, samples=0, shortfall=0.25))
    assert update.lr == pytest.approx(lr)
    assert update.lr_base == pytest.approx(0.1)


# -- plans -----------------------------------------------------------------------------------------------------------


def test_foreseen_steps_by_hand() -> None:
    # Eight workers of 4: 32 samples at most. Epochs of 100: 8 samples (12 x 8 + 4), then 24 (4 x 24 + 4), then 72 are
    # requested and 32 taken (3 x 32 + 4).
    trace = Trace.parse("0s:8 100s")
    policy = policy_of("geo(1ep, factor=3, initial=8, local_batch=4)")
    plan = plan_growing(trace, policy, 1.0, samples=100, epochs=3, ref_batch=8)
    found = [(run.first, run.stop, run.workers, run.samples) for run in plan.foreseen.runs()]
    assert found == [(0, 13, 2, 8), (13, 18, 6, 24), (18, 22, 8, 32)]
    assert plan.capacity.steps == 100
    assert fit_growing(trace, policy, samples=100, epochs=3, ref_batch=8) == pytest.approx(100 / 21, rel=1e-5)


@given(
    policy=st.sampled_from(
        ["geo(1ep)", "geo(0.3ep, factor=1.3)", "geo(7steps, factor=5, max_batch=40)", "geo(31samples, initial=3)"]
        + [f"pada({rate}, initial=2)" for rate in (0, 0.001, 0.1, 1 / 3, 0.5, 2.5)]
    ),
    workers=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
    local_batch=st.integers(1, 9),
    samples=st.integers(1, 2000),
    epochs=st.integers(1, 5),
    ref_batch=st.integers(1, 20),
)
@examples(100)
def test_foreseen_steps_are_those_of_a_policy_that_is_asked_for_each(
    policy: str, workers: list[int], local_batch: int, samples: int, epochs: int, ref_batch: int
) -> None:
    grows = make_policy(policy, local_batch)
    assert isinstance(grows, GrowingPolicy)
    trace = Trace.from_points([(40.0 * i, count) for i, count in enumerate(workers)], end=Seconds(40.0 * len(workers)))
    capacity = BatchPlan.from_trace(trace, grows, 0.3)
    growth = Growth(grows, ref_batch=ref_batch, epoch_samples=samples)
    expected, ledger = [], Ledger(samples=samples)
    while ledger.epoch < epochs and len(expected) < (capacity.steps or 0):
        size = growth.allow(capacity.at(len(expected)))
        assignment = ledger.assign(size.samples)
        ledger = ledger.commit(assignment)
        growth.observe(batch=assignment.batch)
        expected.append((size.workers, size.samples, pytest.approx(size.time_s)))
    plan = foresee(grows, capacity, samples=samples, epochs=epochs, ref_batch=ref_batch)
    found = [plan.at(step) for step in range(plan.steps or 0)]
    assert [(size.workers, size.samples, size.time_s) for size in found] == expected


def test_a_long_run_is_foreseen_without_a_look_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    # 30 epochs each of 5,004 x 256 + 143, of 1,251 x 1,024 + 143 and of 312 x 4,096 + 3,215 samples.
    asked: list[int] = []
    requested = Geo.requested

    def counting(self: Geo, seen: Observation, state: Any) -> tuple[int, Any]:
        asked.append(seen.step)
        return requested(self, seen, state)

    monkeypatch.setattr(Geo, "requested", counting)
    policy, capacity = policy_of("geo(30ep, factor=4)"), BatchPlan.constant(8, 8192)
    plan = foresee(policy, capacity, samples=1_281_167, epochs=90, ref_batch=256)
    assert plan.steps == 30 * (5_005 + 1_252 + 313)
    assert len(asked) < 10 * 90


@pytest.mark.parametrize(
    ("text", "policy", "offset", "message"),
    [
        ("0s:4 60s:0 120s", "geo(5ep, local_batch=4)", 60.0, "no workers from 60 s on; no step time fits"),
        ("0s:4 60s:0 120s", "noise(local_batch=4)", 120.0, "offset of 120 s lies outside of the trace"),
        ("0s:4 60s", "geo(5ep)", 0.0, "does not say how many samples a worker takes"),
    ],
)
def test_where_no_step_time_fits_it_is_said_and_not_sought_for_ever(
    text: str, policy: str, offset: float, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        fit_growing(Trace.parse(text), policy_of(policy), samples=100, epochs=2, ref_batch=8, offset=Seconds(offset))


def test_an_adaptive_policy_is_foreseen_as_one_that_never_grows() -> None:
    plan = foresee(policy_of("ada(initial=10, local_batch=4)"), BatchPlan.constant(8, 32), samples=100, epochs=2,
                   ref_batch=8)  # fmt: skip
    assert (plan.steps, int(plan.samples.max())) == (20, 10)


def test_a_trace_that_is_too_short_is_an_error_or_repeated() -> None:
    policy = policy_of("geo(1ep, initial=8, local_batch=4)")
    with pytest.raises(PlanError, match=r"reach 0\.48 of 1 epochs"):
        plan_growing(Trace.parse("0s:8 6s"), policy, 1.0, samples=100, epochs=1, ref_batch=8)
    plan = plan_growing(Trace.parse("0s:8 6s"), policy, 1.0, samples=100, epochs=1, ref_batch=8, repeat=True)
    assert plan.foreseen.for_epochs(100, 1).steps == 13


def test_an_offset_after_which_there_are_no_workers_waits_for_the_repetition() -> None:
    # From 60 s on there are no workers; the trace begins again at 120 s, 60 s later. Three workers of 4 could do 12
    # samples.
    trace, policy = Trace.parse("0s:3 60s:0 120s"), policy_of("geo(1ep, initial=8, local_batch=4)")
    plan = plan_growing(
        trace, policy, 1.0, samples=8, epochs=1, ref_batch=8, offset=Seconds(60.0), repeat=True
    )  # fmt: skip
    assert (plan.capacity.at(0).time_s, plan.capacity.at(0).samples) == (60.0, 12)
    assert (plan.foreseen.steps, plan.foreseen.at(0).samples) == (1, 8)


@pytest.mark.timeout(60)
def test_a_trace_that_is_almost_long_enough_is_repeated_once_more() -> None:
    # Ten steps of one sample a repetition. Two reach 20/21 of the epoch: another is needed, and one is enough.
    trace, policy = Trace.parse("0s:1 10s"), policy_of("geo(1ep, factor=1, initial=1, local_batch=1)")
    plan = plan_growing(trace, policy, 1.0, samples=21, epochs=1, ref_batch=1, repeat=True)
    assert (plan.capacity.steps, plan.foreseen.steps) == (30, 21)


@pytest.mark.timeout(60)
def test_a_fit_that_cannot_be_found_is_an_error_and_not_an_endless_search() -> None:
    trace, policy = Trace.parse("0s:8 60s:0 120s"), policy_of("geo(1ep, initial=8, local_batch=4)")
    for offset, on_change, message in [
        (60.0, "finish", "has no workers from 60 s on"),
        (120.0, "finish", "lies outside of the trace"),
        (0.0, "cry", "expected 'finish' or 'lose'"),
    ]:
        with pytest.raises(PlanError, match=message):
            fit_growing(trace, policy, samples=8, epochs=1, ref_batch=8, offset=Seconds(offset), on_change=on_change)
    with pytest.raises(PlanError, match="how many samples a worker takes"):
        fit_growing(trace, policy_of("geo(1ep, initial=8)"), samples=8, epochs=1, ref_batch=8)


def test_a_fitted_step_is_no_longer_than_what_the_offset_leaves_of_the_trace() -> None:
    # One step is enough: it takes all of the 40 s from 80 s on, as with a policy that does not grow.
    policy = policy_of("geo(1ep, initial=8, local_batch=4)")
    fitted = fit_growing(Trace.parse("0s:8 120s"), policy, samples=8, epochs=1, ref_batch=8, offset=Seconds(80.0))
    assert fitted == 40


# -- runs ------------------------------------------------------------------------------------------------------------

CONFIG = RunConfig(
    workload="digits-mlp(width=16)", rule="constant", trace="constant(workers=4)", epochs=3, ref_batch=32,
    local_batch=32, policy="geo(1ep, factor=2, max_batch=64)",
)  # fmt: skip


def test_a_growing_run_has_the_batches_and_rates_of_its_policy(tmp_path: Path) -> None:
    run = train(CONFIG, tmp_path)
    batches = {epoch: max(row.batch for row in run.steps if row.epoch == epoch) for epoch in range(3)}
    assert batches == {0: 32, 1: 64, 2: 64}
    # In the third epoch 128 are requested and 64 allowed.
    assert {round(row.multiplier, 9) for row in run.steps if row.epoch == 2} == {0.5}
    assert {row.workers for row in run.steps if row.epoch == 0} == {1}


def test_a_run_by_goodput_follows_its_own_noise_scale_and_goes_on_after_a_break(tmp_path: Path) -> None:
    times = "step=0.4s, sample=10ms, exchange=50ms, initial=32, dwell=5, wait=5, memory=20steps"
    config = CONFIG.replace(
        rule="linear", trace="constant(workers=12)", ref_batch=32, local_batch=16, epochs=6, policy=f"goodput({times})"
    )
    whole = train(config, tmp_path / "whole")
    policy = policy_of(f"goodput({times}, local_batch=16)")
    assert isinstance(policy, Goodput)

    def score(batch: int, phi: float) -> float:
        workers = -(-batch // 16)
        seconds = 0.4 + 0.01 * -(-batch // workers) + 0.05 * (workers - 1)
        return policy.score(batch, workers, seconds, noise_scale=phi, ref_batch=32)

    requested, taken, changes = 32, 0, 0
    for step, row in enumerate(whole.steps):
        limit = min(requested, 12 * 16)
        last = step + 1 == len(whole.steps) or whole.steps[step + 1].epoch != row.epoch
        assert row.batch <= limit and (row.batch >= limit - 1 or last)  # see `cut_step`
        taken = max(taken, row.batch)
        if (step + 1) % 5 == 0:  # what the policy decides, by comparing all batches that it may request
            phi = row.stats.get("noise_scale", math.inf)
            most = max(requested, 2 * taken)
            best = max([32, *range(48, most + 1, 16)], key=lambda batch: score(batch, phi))
            if score(best, phi) > 1.05 * score(requested, phi):
                requested, changes = best, changes + 1
            taken = 0
    assert changes
    assert {round(row.multiplier * 32 - row.batch, 9) for row in whole.steps} == {0}, "linear, and nothing else"
    count = iter(range(10**6))
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "cut", callbacks=Callbacks(should_stop=lambda: next(count) == 40))
    resumed = train(config, tmp_path / "cut")
    assert resumed.end is not None and whole.end is not None
    assert resumed.end.weights_sha256 == whole.end.weights_sha256


class Scripted(Engine):
    """Four workers of 8, whose steps have one micro-batch each, from which noise and signal cannot be estimated."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        self.weight = weight
        self.requests: list[int] = []
        self.measured: list[bool] = []

    def request(self, samples: int) -> None:
        self.requests.append(samples)

    def measure(self, on: bool) -> None:
        self.measured.append(on)

    def participants(self, step: int) -> StepSize:
        return StepSize(workers=4, samples=32, time_s=float(step), duration_s=1.0)

    def gradients(self, assignment: Assignment, size: StepSize) -> Gradients:
        self.weight.grad = torch.ones(3)
        measured = Measurement(batch=assignment.batch, micro_batches=1, mean_sq=(3.0,), sq_mean=(3.0,))
        return Gradients(loss=1.0, micro_batches=1, measurement=measured)

    def commit(self) -> bool:
        return True


def test_the_engine_is_told_before_each_step_what_the_policy_could_use() -> None:
    # Epochs of 24: three steps of 8. Then 24 are requested, of which 20 are allowed: 20 and the 4 that are left.
    weight = torch.nn.Parameter(torch.ones(3))
    engine = Scripted(weight)
    policy = policy_of("geo(1ep, factor=3, initial=8, max_batch=20, local_batch=8)")
    flow = Flow(
        engine,
        ElasticOptimizer(torch.optim.SGD([weight], lr=0.1), "constant", base_batch=8),
        Ledger(samples=24),
        growth=Growth(policy, ref_batch=8, epoch_samples=24),
    )
    rows = [flow.run_step() for _ in range(5)]
    assert [row.batch for row in rows if row is not None] == [8, 8, 8, 20, 4]
    assert engine.requests == [8, 8, 8, 20, 20]
    assert engine.measured == [True] * 5  # a policy may look at any step


@pytest.mark.parametrize("policy", ["ada(dwell=2, wait=4)", "rada(dwell=2, wait=4)", "noise(dwell=2, wait=4)"])
def test_a_run_that_is_interrupted_grows_as_one_that_is_not(policy: str, tmp_path: Path) -> None:
    config = RunConfig(
        workload="digits-mlp(width=16)", trace="constant(workers=64)", epochs=1, ref_batch=32, local_batch=16,
        policy=policy,
    )  # fmt: skip
    whole = train(config, tmp_path / "whole")
    assert len({row.batch for row in whole.steps[:-1]}) > 1, "the batch did grow"
    stops = iter([False] * 8 + [True] + [False] * 1000)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "cut", callbacks=Callbacks(should_stop=lambda: next(stops)))
    resumed = train(config, tmp_path / "cut")
    assert [row.batch for row in resumed.steps] == [row.batch for row in whole.steps]
    assert resumed.end is not None
    assert whole.end is not None
    assert resumed.end.weights_sha256 == whole.end.weights_sha256


# -- what cannot be used ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("geo(5)", UnitError, "geo: delay: '5' has no unit; write 5ep"),
        ("geo(0ep)", PlanError, "delay is 0ep"),
        ("geo(factor=0.5)", PlanError, "factor is 0.5; expected at least 1"),
        ("geo(initial=64, max_batch=32)", PlanError, "max_batch=32 is less than the initial batch of 64"),
        ("pada(rate=-1)", PlanError, "rate is -1"),
        ("ada(dwell=0)", PlanError, "dwell is 0; expected at least 1"),
        ("rada(rho=-0.1)", PlanError, "rho is -0.1; expected at least 0"),
        ("rada(rho=1)", PlanError, "rho is 1; expected a weight of at least 0 and below 1"),
        ("noise(part=0)", PlanError, "part is 0; expected a number above 0"),
        ("ada(max_batch=0)", PlanError, "max_batch is 0"),
        ("gio(5ep)", SpecError, "did you mean 'geo'"),
    ],
)
def test_a_bad_policy_is_refused(text: str, kind: type[EbbflowError], message: str) -> None:
    with pytest.raises(kind, match=message):
        make_policy(text)


def test_the_state_of_another_policy_is_refused() -> None:
    ours, theirs = (Growth(policy_of(text), ref_batch=8, epoch_samples=100) for text in ("geo(5ep)", "geo(6ep)"))
    with pytest.raises(CheckpointError, match=r"is 'geo\(6ep\)', this run's is geo"):
        ours.load_state_dict(theirs.state_dict())
    with pytest.raises(CheckpointError, match="damaged"):
        ours.load_state_dict({**ours.state_dict(), "requested": "many"})


def test_nothing_is_known_of_the_workers_without_a_local_batch() -> None:
    with pytest.raises(PlanError, match=r"write local_batch=32"):
        BatchPlan.from_trace(Trace.parse("0s:8 100s"), policy_of("geo(5ep)"), 1.0)


def test_an_observation_says_where_training_is() -> None:
    seen = Observation(step=28_200, samples=6_000_000, epoch_samples=50_000, ref_batch=128)
    assert policy_of("geo(60ep, factor=5)").requested(seen, None) == (3200, None)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((-5, None), "the batch that requested.. returned is -5; expected a whole number from 1"),
        ((0, None), "returned is 0; expected a whole number from 1"),
        ((48.0, None), "returned is 48.0; expected a whole number from 1"),
        (64, "requested.. returned 64; expected a pair: the batch, and the state"),
    ],
)
def test_an_own_policy_that_requests_no_batch_is_refused_and_not_followed_for_ever(answer: Any, message: str) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Mine(GrowingPolicy):
        passive = True

        def requested(self, seen: Observation, state: PolicyState) -> Any:
            return answer

    policy = Mine(local_batch=8)
    capacity = BatchPlan.constant(4, 32)
    with pytest.raises(PlanError, match=message):
        foresee(policy, capacity, samples=100, epochs=1, ref_batch=16)
    with pytest.raises(PlanError, match=message):
        Growth(policy, ref_batch=16, epoch_samples=100)


def test_an_own_policy_may_grow_without_a_bound_and_answer_with_a_list() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Doubling(GrowingPolicy):
        passive = True

        def requested(self, seen: Observation, state: PolicyState) -> Any:
            return [16 << (20 * seen.step), state]  # soon more than 64 bits have

    plan = foresee(Doubling(local_batch=8), BatchPlan.constant(4, 32), samples=400, epochs=1, ref_batch=16)
    assert plan.samples.tolist()[:2] == [16, 32]  # all that the workers can do
