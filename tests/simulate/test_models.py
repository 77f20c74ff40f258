"""Networks, stragglers, provisioning, noise scale, fits, searches: each against a formula or a count by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.core.units import Seconds
from ebbflow.engines.emulated.fused import cut_into_passes
from ebbflow.errors import ConfigError, EbbflowError, PlanError, RecordError
from ebbflow.plan import make_policy
from ebbflow.record import Header, Run, StepRow, ValidationRow
from ebbflow.simulate import FlatPrice, Scenario, ScenarioSettings, parse_step_time, simulate
from ebbflow.simulate.prices import PriceHistory, read_prices
from ebbflow.simulate.profiles import (
    MeasuredStep,
    fit_runs,
    fit_steps,
    measured_steps,
    noise_scale_of,
    read_noise_scale,
    read_profile,
    record_path,
)
from ebbflow.simulate.recovery import RECOVERIES
from ebbflow.simulate.search import (
    Goal,
    Outcome,
    Setting,
    best_outcome,
    compare_fleets,
    find_setting,
    outcomes,
    pareto,
    sensitivity,
    settings_grid,
)
from ebbflow.simulate.segments import provisioned_trace
from ebbflow.simulate.simulation import draw_simulations, interval_of, reseeded
from ebbflow.simulate.step_models import (
    NETWORKS,
    STRAGGLERS,
    Affine,
    ComputeAndNetwork,
    LognormalSpread,
    Stragglers,
    emulated_passes,
)
from ebbflow.studies.profiling import live_records, profile_records
from ebbflow.traces import Trace, load

COUNTS = np.array([1, 2, 8, 96])


# -- networks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # 100 MB through 8 Gb/s are 0.1 s. Ring: 2 (W-1) (1 ms + 0.1 s / W).
        ("ring(100, gbps=8, latency=1ms)", [0.0, 0.102, 14 * (0.001 + 0.0125), 190 * (0.001 + 0.1 / 96)]),
        # Tree: twice log2 W levels (0, 1, 3, 7) of 1 ms, and the gradients down and up.
        ("tree(100, gbps=8, latency=1ms)", [0.0, 0.202, 0.206, 0.214]),
        # One server: it receives the gradients of all workers and sends the weights to all.
        ("server(100, gbps=8, latency=1ms)", [0.202, 0.402, 1.602, 19.202]),
        # Four servers share it, but a worker's own link still takes 0.1 s.
        ("server(100, gbps=8, servers=4)", [0.2, 0.2, 0.4, 4.8]),
        # Eight on a machine: 1, 1, 1 and 12 machines.
        ("ring(100, gbps=8, per_machine=8)", [0.0, 0.0, 0.0, 22 * 0.1 / 12]),
        ("affine(20ms, more=1ms)", [0.0, 0.02, 0.026, 0.114]),
    ],
)  # fmt: skip
def test_exchange_times_follow_their_formula(text: str, expected: list[float]) -> None:
    network = NETWORKS.make(text)
    np.testing.assert_allclose(network.seconds(COUNTS), expected)
    assert NETWORKS.make(str(network)) == network


@pytest.mark.parametrize(
    "text", ["ring(0, gbps=8)", "ring(1, gbps=-1)", "tree(1, gbps=1, per_machine=0)", "server(1, gbps=1, servers=0)",
             "ring(1, gbps=1, latency=5)", "affine(1)"],
)  # fmt: skip
def test_impossible_networks_and_forgotten_units_are_refused(text: str) -> None:
    with pytest.raises(EbbflowError):
        NETWORKS.make(text)


# -- stragglers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["exponential(0.2)", "rare(0.03, factor=4)", "lognormal(0.3)"])
def test_the_slowest_worker_is_as_slow_as_a_simulation_says(text: str) -> None:
    model = STRAGGLERS.make(text)
    rng = np.random.default_rng(0)
    count = 20
    sampled = _factors(model, rng, (40_000, count)).max(axis=1)
    mean, variance = model.slowest(np.array([count]))
    assert mean[0] == pytest.approx(sampled.mean(), rel=0.01)
    assert variance[0] == pytest.approx(sampled.var(), rel=0.08)


def _factors(model: Stragglers, rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    if isinstance(model, LognormalSpread):
        return np.exp(model.spread * rng.standard_normal(shape))
    if hasattr(model, "delay"):
        return 1 + model.delay * rng.exponential(size=shape)
    return np.where(rng.random(shape) < model.chance, model.factor, 1.0)  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["exponential(-1)", "rare(2)", "rare(0.1, factor=0.5)", "lognormal(9)"])
def test_impossible_stragglers_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="stragglers"):
        STRAGGLERS.make(text)


# -- fleets ------------------------------------------------------------------------------------------------------------


@given(
    points=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 6)), min_size=1, max_size=12), delay=st.integers(1, 25)
)
def test_workers_are_ready_when_they_were_there_all_the_time_before(points: list[tuple[int, int]], delay: int) -> None:
    times = np.cumsum([0, *(length for length, _ in points)]).astype(np.float64)
    trace = Trace(times[:-1], np.array([count for _, count in points]), float(times[-1]))
    ready = provisioned_trace(trace, Seconds(float(delay)))
    for time in np.arange(0, trace.end, 0.5):
        window = np.arange(time - delay, time + 0.25, 0.5)
        least = min(trace.at(float(t)) if t >= 0 else 0 for t in window)
        assert ready.at(float(time)) == least, time


@pytest.mark.parametrize(
    "text", ["step(detect=-1s)", "step(detect=1)", "checkpoint(every=soon)", "ideal(maybe)", "checkpont"]
)
def test_impossible_recoveries_are_refused(text: str) -> None:
    with pytest.raises(EbbflowError):
        RECOVERIES.make(text)


# -- noise scale -------------------------------------------------------------------------------------------------------


def row(step: int, wall: float, *, workers: int = 2, batch: int = 8, **stats: float) -> StepRow:
    return StepRow(
        step=step, time_s=0, wall_s=wall, epoch=0, samples=0, workers=workers, batch=batch, micro_batches=1,
        lr_base=1, lr=1,
        multiplier=1, loss=1.0, stats=stats,
    )  # fmt: skip


def record(*rows: StepRow, validations: tuple[int, ...] = ()) -> Run:
    seen = [ValidationRow(step=step, epoch=1, samples=0, time_s=0, wall_s=0, metrics={}) for step in validations]
    return Run(path=Path("r.jsonl"), header=Header(), steps=list(rows), validations=seen, events=[], end=None)


def test_the_noise_scale_of_a_record_is_mean_noise_over_mean_signal() -> None:
    # By samples: (8 x 10 + 24 x 30) / 32 = 25 over (8 x 1 + 24 x 3) / 32 = 2.5.
    run = record(row(0, 1, noise=10, signal=1), row(1, 2), row(2, 3, batch=24, noise=30, signal=3))
    assert noise_scale_of(run) == pytest.approx(10.0)


def test_a_record_without_statistics_has_no_noise_scale() -> None:
    with pytest.raises(RecordError, match="its rule measured none"):
        noise_scale_of(record(row(0, 1)))


@pytest.mark.parametrize(("noise", "signal"), [(10, 0), (10, -0.5), (0, 1), (-0.5, 1)])
def test_a_mean_that_is_not_above_zero_gives_no_noise_scale(noise: float, signal: float) -> None:
    with pytest.raises(RecordError, match="give no noise scale; the run is too short"):
        noise_scale_of(record(row(0, 1, noise=noise, signal=signal)))


def test_a_record_may_be_named_by_the_folder_of_its_run(tmp_path: Path) -> None:
    assert record_path(tmp_path) == tmp_path / "record.jsonl"
    assert record_path(tmp_path / "other.jsonl") == tmp_path / "other.jsonl"


@pytest.mark.parametrize("text", ["0", "-5", "nan"])
def test_a_noise_scale_must_be_above_zero(text: str) -> None:
    with pytest.raises(ConfigError, match="above 0"):
        read_noise_scale(text)


# -- fits --------------------------------------------------------------------------------------------------------------


def test_a_fit_finds_the_times_that_steps_were_made_of() -> None:
    steps = [
        MeasuredStep(workers=w, samples=w * b, seconds=0.02 + 0.003 * b + (0.05 + 0.01 * (w - 2) if w > 1 else 0))
        for w in (1, 2, 5)
        for b in (8, 32)
    ]
    found = fit_steps(steps)
    assert found.error < 1e-9
    assert found.model.per_step == pytest.approx(0.02)
    assert found.model.per_sample == pytest.approx(0.003)
    assert isinstance(found.model.network, Affine)
    assert (found.model.network.first, found.model.network.more) == pytest.approx((0.05, 0.01))


def test_what_was_not_observed_is_left_out() -> None:
    one_size = fit_steps([MeasuredStep(workers=4, samples=64, seconds=0.32)])
    assert one_size.model.per_sample == pytest.approx(0.02)
    assert one_size.model.network is None
    emulated = fit_steps(
        [MeasuredStep(workers=w, samples=8 * w, seconds=0.1 + 0.08 * w) for w in (1, 2, 4)], serial=True
    )
    assert (emulated.model.per_step, emulated.model.per_sample) == pytest.approx((0.1, 0.01))
    assert emulated.model.serial


def test_micro_batches_may_be_single_samples() -> None:
    # Two workers share 6 samples: three micro-batches of one each, 0.5 s per micro-batch and 0.25 s per sample.
    model = ComputeAndNetwork(per_step=Seconds(0.5), per_sample=Seconds(0.25), micro_batch=1)
    assert model.breakdown(np.array([2]), np.array([6])).compute.tolist() == [2.25]


@given(workers=st.integers(1, 40), samples=st.integers(1, 2000), micro_batch=st.integers(1, 300))
def test_passes_of_an_emulated_step_are_those_that_the_engine_makes(
    workers: int, samples: int, micro_batch: int
) -> None:
    # Worker batches as even as whole samples allow, the larger ones first; a worker without a sample has none.
    each, more = divmod(samples, workers)
    sizes = [size for size in [each + 1] * more + [each] * (workers - more) if size]
    found = emulated_passes(np.array([workers]), np.array([samples]), micro_batch)
    assert found.tolist() == [len(cut_into_passes(sizes, samples=micro_batch))]


def test_a_fit_of_emulated_steps_separates_passes_from_samples() -> None:
    # 0.2 s per update, 0.05 s per pass of at most 128 samples, 0.001 s per sample. 16 workers: 512 samples are four
    # passes; 413 are 13 worker batches of 26 and 3 of 25, at most four of which go into a pass: 4 + 1 passes.
    passes = {(2, 64): 1, (16, 256): 2, (16, 512): 4, (16, 413): 5, (8, 256): 2}
    steps = [
        MeasuredStep(workers=w, samples=b, seconds=0.2 + 0.05 * count + 0.001 * b) for (w, b), count in passes.items()
    ]
    found = fit_steps(steps, serial=True, micro_batch=128)
    assert found.error < 1e-9
    assert (found.model.per_update, found.model.per_step, found.model.per_sample) == pytest.approx((0.2, 0.05, 0.001))
    unseen = found.model.breakdown(np.array([16]), np.array([290]))  # 2 of 19 and 14 of 18: 1 + 2 passes
    assert unseen.total[0] == pytest.approx(0.2 + 0.05 * 3 + 0.29)


def test_noise_does_not_make_a_fitted_model_too_fast() -> None:
    # The same step at 1 s and at 3 s is one of 2 s; the least relative errors would be at 1.2 s.
    twice = [MeasuredStep(workers=1, samples=8, seconds=1.0), MeasuredStep(workers=1, samples=8, seconds=3.0)]
    assert fit_steps(twice).seconds(twice[0]) == pytest.approx(2.0)
    # Two kinds of steps that the model cannot distinguish, since their worker batches are equal: 2 s for both.
    alike = [MeasuredStep(workers=2, samples=16, seconds=1.0), MeasuredStep(workers=2, samples=15, seconds=3.0)]
    assert [fit_steps(alike).seconds(one) for one in alike] == pytest.approx([2.0, 2.0])


def test_a_fit_is_never_negative() -> None:
    found = fit_steps(
        [MeasuredStep(workers=1, samples=10, seconds=0.2), MeasuredStep(workers=1, samples=20, seconds=0.1)]
    )
    assert found.model.per_sample == 0 and found.model.per_step > 0


def test_steps_of_a_record_are_measured_without_validations_and_gaps() -> None:
    # 1 s per step; 5 s of validation lie before step 2, and step 3 is missing.
    run = record(row(0, 1), row(1, 2), row(2, 8), row(4, 10), row(5, 11), validations=(2,))
    assert measured_steps(run) == [MeasuredStep(workers=2, samples=8, seconds=1.0, steps=2)]
    with pytest.raises(RecordError, match="a longer run is needed"):
        measured_steps(record(row(0, 1)))


def test_what_a_change_cost_is_not_the_time_of_a_step() -> None:
    # A loss before step 2 takes 0.9 s besides the step's own 1 s; that is what the recovery is for.
    run = record(row(0, 1), row(1, 2), row(2, 3.9, workers=1, batch=4), row(3, 4.9, workers=1, batch=4))
    assert measured_steps(run) == [
        MeasuredStep(workers=1, samples=4, seconds=pytest.approx(1.0), steps=1),
        MeasuredStep(workers=2, samples=8, seconds=1.0, steps=1),
    ]


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = fit_steps([MeasuredStep(workers=w, samples=w * b, seconds=0.1 + b + w) for w in (1, 2, 3) for b in (1, 2)])
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(found.as_json()))
    assert read_profile(path) == found.model
    passes = [
        MeasuredStep(workers=w, samples=b, seconds=s)
        for w, b, s in [(2, 8, 0.3), (4, 32, 0.9), (3, 9, 0.5), (4, 30, 1.5)]
    ]
    emulated = fit_steps(passes, serial=True, micro_batch=8)
    assert emulated.model.micro_batch == 8
    path.write_text(json.dumps(emulated.as_json()))
    assert read_profile(path) == emulated.model
    for damaged in ('{"per_step_s": 1}', path.read_text().replace('"piece": 8', '"piece": "some"')):
        path.write_text(damaged)
        with pytest.raises(ConfigError, match="is not a profile"):
            read_profile(path)


# -- many scenarios ----------------------------------------------------------------------------------------------------


@pytest.fixture
def one() -> Scenario:
    return Scenario(
        trace=load("constant(8, duration=10h)"), policy=make_policy("follow(10)"), model=parse_step_time("1s"),
        samples=800, epochs=10, price=FlatPrice(3600.0),
    )  # fmt: skip


def settings(*caps: int) -> list[Setting]:
    return [Setting(max_workers=cap, local_batch=10, policy="follow") for cap in caps]


def found(one: Scenario, *caps: int) -> list[Outcome]:
    return [o for o in outcomes(one, settings(*caps)) if isinstance(o, Outcome)]


def test_the_cheapest_before_a_deadline_and_the_fastest_within_a_budget(one: Scenario) -> None:
    # 800 samples per epoch in steps of 10, 30 and 70: 80, 27 and 12 steps of 1 s, a dollar per worker-second.
    results = found(one, 1, 3, 7)
    assert [(o.time_s, o.cost_usd) for o in results] == [
        (800, 800),
        (270, pytest.approx(810)),
        (120, pytest.approx(840)),
    ]
    assert best_outcome(results, Goal(deadline=300.0)).setting == settings(3)[0]
    assert best_outcome(results, Goal(deadline=120.0)).setting == settings(7)[0]
    assert best_outcome(results, Goal(budget=820.0)).setting == settings(3)[0]


def test_what_cannot_be_had_says_the_best_that_can(one: Scenario) -> None:
    with pytest.raises(
        PlanError, match=r"none of 2 settings ends within 50.0 s; the fastest takes 100.0 s and costs 800"
    ):
        best_outcome(found(one, 4, 8), Goal(deadline=50.0))
    with pytest.raises(PlanError, match=r"costs at most 5.00 USD; the cheapest takes .* and costs 800.00 USD"):
        best_outcome(found(one, 4, 8), Goal(budget=5.0))


def test_a_setting_that_never_ends_is_left_out(one: Scenario) -> None:
    short = replace(one, trace=load("constant(8, duration=150s)"))
    assert [isinstance(o, Outcome) for o in outcomes(short, settings(4, 8))] == [False, True]
    with pytest.raises(PlanError, match="no setting comes to an end"):
        best_outcome([], Goal(deadline=1.0))


def test_a_setting_that_outlasts_the_prices_is_left_out_and_so_is_a_variation(one: Scenario) -> None:
    # 4 workers take 200 steps of 1 s, 8 take 100; the prices reach 105 s, and steps that are 10 % slower do not.
    known = replace(one, price=PriceHistory(np.array([0.0]), np.array([3600.0]), 105.0))
    four, eight = outcomes(known, settings(4, 8))
    assert isinstance(four, PlanError) and isinstance(eight, Outcome)
    assert eight.cost_usd == pytest.approx(800.0)
    ends = {o.name: o.time_s for o in sensitivity(known)}
    assert ends["steps 10% slower"] == math.inf
    assert ends["steps 10% faster"] == pytest.approx(90.0)


def test_a_search_gives_the_best_setting_what_it_depends_on_and_the_alternatives(one: Scenario) -> None:
    result = find_setting(one, settings_grid([1, 3, 7], [10], ["follow"]), Goal(deadline=300.0))
    assert (result.best.time_s, result.tried, result.ended) == (270, 3, 3)
    assert [alternative.time_s for alternative in result.front] == [120, 270, 800]
    assert [varied.name for varied in result.variations][:2] == ["steps 10% slower", "steps 10% faster"]
    with pytest.raises(PlanError, match="none of 2 settings comes to an end; the first: the trace is too short"):
        find_setting(
            replace(one, trace=load("constant(8, duration=90s)")), settings_grid([4, 8], [10], ["follow"]),
            Goal(budget=1e6),
        )  # fmt: skip


def test_fleets_are_compared_by_what_differs_between_them() -> None:
    settings = ScenarioSettings(samples=800, epochs=1, local_batch=10, step_time="1s", price=3600.0)
    found = compare_fleets(
        settings, ["0s:8 1h", "0s:4 1h"], policies=["follow"], recoveries=["ideal"], prices=["1800", "3600"]
    )
    # 10 steps on 8 workers and 20 on 4, at half a dollar and a dollar per worker-second; on demand 8 and 4 at a dollar.
    assert {name: (round(run.time_s), round(run.cost_usd)) for name, run in found.items()} == {
        "0s:8 1h": (10, 40), "0s:4 1h": (20, 80), "8 on demand": (10, 80), "4 on demand": (20, 80),
    }  # fmt: skip


def test_a_goal_is_a_deadline_or_a_budget() -> None:
    for bad in ({}, {"deadline": 1.0, "budget": 1.0}, {"deadline": 0.0}, {"budget": -1.0}):
        with pytest.raises(ConfigError):
            Goal(**bad)


def test_sensitivity_changes_one_thing_at_a_time(one: Scenario) -> None:
    by_name = {o.name: o for o in sensitivity(replace(one, noise_scale=800.0, ref_batch=80))}
    assert by_name["steps 10% slower"].time_s == pytest.approx(110.0)
    assert by_name["price 10% lower"].cost_usd == pytest.approx(720.0)
    assert by_name["price 10% lower"].time_s == 100
    assert by_name["half the noise scale"].time_s == 100  # at the reference batch it does not matter
    assert any(name.startswith("begun") for name in by_name)


def test_a_later_beginning_ends_where_the_trace_ends_unless_it_is_repeated(one: Scenario) -> None:
    # 100 s of training on a trace of 160 s: begun 40 s into it it fits, begun 80 s into it it does not, as in simulate.
    short = replace(one, trace=load("0s:8 160s"))
    late = [o.time_s for o in sensitivity(short) if o.name.startswith("begun")]
    assert late == [100, math.inf, math.inf]
    with pytest.raises(PlanError, match="the trace is too short"):
        simulate(replace(short, offset=Seconds(80.0)))
    assert [o.time_s for o in sensitivity(replace(short, repeat=True)) if o.name.startswith("begun")] == [100] * 3


def test_one_step_time_for_several_local_batches_is_refused(one: Scenario) -> None:
    grid = settings_grid([None, 4], [10, 20], ["follow"])
    with pytest.raises(ConfigError, match=r"a worker takes 10 samples in .* and 20 in .*; the larger batch would cost"):
        find_setting(one, grid, Goal(deadline=1e6))
    with pytest.raises(ConfigError, match="the larger batch would cost nothing"):
        find_setting(one, settings_grid([2, 8], [None], ["fixed(80)"]), Goal(deadline=1e6))
    model = ComputeAndNetwork(per_step=Seconds(0.5), per_sample=Seconds(0.05))
    assert find_setting(replace(one, model=model), grid, Goal(deadline=1e6)).tried == 4
    limited = settings_grid([None], [10], ["follow", "capped(max_batch=20)"])
    assert find_setting(one, limited, Goal(deadline=1e6)).tried == 2


def test_paid_workers_that_take_no_part_are_not_computing(one: Scenario) -> None:
    full = simulate(one)
    half = simulate(replace(one, policy=make_policy("capped(10, max_workers=4)")))
    assert full.computing == pytest.approx(1.0)
    assert half.computing == pytest.approx(0.5)  # four of eight
    assert half.breakdown["compute"] == half.time_s  # the job computes all the time, half of what is paid does


def test_slower_steps_are_those_of_a_longer_step_time(one: Scenario) -> None:
    # On a grid of 1.1 s the gap from 4 to 9 s is over at the ninth position, 9.9 s: 4 steps before it, 6 after it.
    gap = replace(one, trace=load("0s:8 4s:0 9s:8 10h"), epochs=1)
    slower = next(o for o in sensitivity(gap) if o.name == "steps 10% slower")
    assert slower.time_s == pytest.approx(9.9 + 6 * 1.1)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12))
def test_the_front_is_what_nothing_beats(points: list[tuple[float, float]]) -> None:
    def beaten(a: tuple[float, float]) -> bool:
        return any(b[0] <= a[0] and b[1] <= a[1] and b != a for b in points)

    assert pareto(points) == [not beaten(point) for point in points]


def test_workers_that_need_no_time_leave_the_trace_as_it_is() -> None:
    trace = Trace.from_points([(0, 4), (60, 2)])  # an event log that stops with an event: two are left at the end
    assert provisioned_trace(trace, Seconds(0)) == trace


def test_another_seed_leaves_every_other_argument_as_it_was() -> None:
    assert reseeded("gcp-a100-like(3, 2h)", 5) == "gcp-a100-like(5, 2h)"
    assert reseeded("random-levels(1, 4, 5min, 2h, 3)", 5) == "random-levels(1, 4, 5min, 2h, 5)"
    assert load(reseeded("gcp-tpu-like(3, 2h)", 3)) == load("gcp-tpu-like(seed=3, duration=2h)")


def test_draws_of_no_seed_are_refused(one: Scenario) -> None:
    with pytest.raises(ConfigError, match="0 seeds; expected at least 1"):
        list(draw_simulations(lambda seed: one, 0))


def test_draws_give_the_same_for_the_same_seed_and_differ_between_seeds(one: Scenario) -> None:
    def scenario(seed: int) -> Scenario:
        return replace(one, trace=load(reseeded("poisson(8, preempt_every=1min, provision=20s, duration=2h)", seed)))

    times = [found.time_s for found in draw_simulations(scenario, 5)]
    assert times == [found.time_s for found in draw_simulations(scenario, 5)]
    assert len(set(times)) > 1
    spread = interval_of(times)
    assert min(times) <= spread.low <= spread.mean <= spread.high <= max(times)
    assert not math.isnan(spread.mean)


def test_everything_that_reads_takes_a_path_as_text(tmp_path: Path) -> None:
    fit = fit_steps([MeasuredStep(workers=1, samples=8, seconds=0.1)])
    (tmp_path / "p.json").write_text(json.dumps(fit.as_json()))
    (tmp_path / "prices.csv").write_text("time_s,usd_per_hour\n0,3.6\n7200,3.6\n")
    assert read_profile(str(tmp_path / "p.json")) == fit.model
    assert record_path(str(tmp_path)) == tmp_path / "record.jsonl"
    assert read_prices(str(tmp_path / "prices.csv")).integral(np.array([3600.0])) == pytest.approx([3.6])
    assert live_records(str(tmp_path)) == []
    with pytest.raises(RecordError, match="cannot be read"):
        profile_records(str(tmp_path))


@pytest.mark.parametrize(("engine", "emulated"), [("live", False), ("dask", False), ("auto", True), (None, True)])
def test_a_record_is_of_a_fleet_only_if_its_engine_is_one(engine: str | None, emulated: bool) -> None:
    rows = [
        StepRow(step=i, time_s=float(i), wall_s=float(i), epoch=0, samples=16 * i, workers=2, batch=16,
                micro_batches=2, lr_base=1, lr=1, multiplier=1, loss=1.0)
        for i in range(4)
    ]  # fmt: skip
    header = Header(config={} if engine is None else {"engine": engine})
    run = Run(path=Path("r"), header=header, steps=rows, validations=[], events=[], end=None)
    assert fit_runs([run]).model.serial is emulated
    assert fit_runs([run], emulated=not emulated).model.serial is not emulated
