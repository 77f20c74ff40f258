"""Closed forms: constant and two-level traces, gaps, changes inside a step, what recoveries cost; all by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.core.units import Seconds
from ebbflow.errors import ConfigError, PlanError
from ebbflow.plan import BatchPlan, make_policy
from ebbflow.simulate import ComputeAndNetwork, FlatPrice, Scenario, on_demand, parse_step_time, simulate
from ebbflow.simulate.recovery import RECOVERIES
from ebbflow.simulate.simulation import Simulation
from ebbflow.simulate.step_models import Affine, RareDelay
from ebbflow.traces import Trace, load


def scenario(fleet: str, *, batch: int = 10, step: str = "1s", samples: int = 1000, epochs: int = 1, **more: object) -> Scenario:  # fmt: skip  # noqa: E501
    given: dict[str, object] = {
        "trace": load(fleet),
        "policy": make_policy("follow", batch),
        "model": parse_step_time(step),
        "samples": samples,
        "epochs": epochs,
        "price": FlatPrice(3.6),  # a tenth of a cent per worker-second
    }
    return Scenario(**{**given, **more})  # type: ignore[arg-type]


def parts(found: Simulation) -> dict[str, float]:
    """The breakdown without zeros; it always adds up to the time."""
    assert sum(found.breakdown.values()) == pytest.approx(found.time_s)
    return {name: pytest.approx(seconds) for name, seconds in found.breakdown.items() if abs(seconds) > 1e-9}


def test_a_constant_fleet_takes_samples_over_batch_steps() -> None:
    # 4 workers x 10 samples: 1,000 samples are 25 steps of 1 s; 4 workers x 25 s x 0.001 USD = 0.1 USD.
    found = simulate(scenario("constant(4, duration=1h)"))
    assert (found.steps, found.samples, found.time_s) == (25, 1000, 25.0)
    assert found.cost_usd == pytest.approx(0.1)
    assert found.goodput == pytest.approx(40.0)
    assert parts(found) == {"compute": 25.0}


def test_two_levels_take_their_steps_one_after_the_other() -> None:
    # 10 s with 4 workers: 400 samples. The other 600 with 2 workers: 30 steps. 4 x 10 + 2 x 30 worker-seconds.
    found = simulate(scenario("0s:4 10s:2 1h"))
    assert (found.steps, found.time_s) == (40, 40.0)
    assert found.cost_usd == pytest.approx(0.1)


def test_a_gap_without_workers_is_waited_for_and_costs_nothing() -> None:
    found = simulate(scenario("0s:4 10s:0 30s:2 1h"))
    assert found.time_s == 60.0
    assert found.cost_usd == pytest.approx(0.1)
    assert parts(found) == {"compute": 40.0, "waiting": 20.0}


@pytest.mark.parametrize("recovery", ["ideal(lose)", "step(detect=0s)", "checkpoint(1s, 0s, detect=0s, restart=0s)"])
def test_where_there_are_no_workers_a_step_may_take_no_time(recovery: str) -> None:
    # 8 workers x 10 samples x 0.1 s: steps of 1 s. Three before the gap of 7 s, seven after it, twice in the trace.
    model = ComputeAndNetwork(per_sample=Seconds(0.1))
    found = simulate(
        scenario("0s:8 3s:0 10s:8 17s", samples=1600, model=model, repeat=True, recovery=RECOVERIES.make(recovery))
    )
    assert (found.time_s, found.steps) == (pytest.approx(34.0), 20)


def test_a_step_that_a_change_cuts_is_finished_or_lost() -> None:
    # Steps of 4 s: two end at 8 s, the third is in progress at 10 s. Finished, it has the old batch of 40 and ends at
    # 12 s. Then 88 samples in steps of 20: five, the last one smaller. Lost, 2 s go with it; 128 samples take seven.
    finished = simulate(scenario("0s:4 10s:2 1h", step="4s", samples=208))
    assert (finished.steps, finished.time_s) == (8, 12 + 5 * 4.0)
    lost = simulate(scenario("0s:4 10s:2 1h", step="4s", samples=208, recovery=RECOVERIES.make("ideal(lose)")))
    assert (lost.steps, lost.time_s) == (9, 10 + 7 * 4.0)
    assert parts(lost) == {"compute": 36.0, "lost": 2.0}


def test_a_loss_costs_the_step_its_detection_and_the_restart() -> None:
    recovery = RECOVERIES.make("step(detect=3s, restart=2s)")
    found = simulate(scenario("0s:4 10s:2 1h", step="4s", samples=208, recovery=recovery))
    # 8 s of steps, 2 s lost, 5 s until the next step, seven steps.
    assert found.time_s == 10 + 5 + 7 * 4.0
    assert parts(found) == {"compute": 36.0, "lost": 2.0, "restart": 5.0}


def test_a_loss_that_is_announced_a_step_ahead_loses_nothing() -> None:
    recovery = RECOVERIES.make("step(detect=3s, notice=4s)")
    found = simulate(scenario("0s:4 10s:2 1h", step="4s", samples=208, recovery=recovery))
    # The third step begins at 8 s, without those who leave at 10 s: 128 samples in seven steps of 2 workers.
    assert found.time_s == 8 + 7 * 4.0
    assert parts(found) == {"compute": 36.0}
    too_short = replace(found.scenario, recovery=RECOVERIES.make("step(detect=3s, notice=3.9s)"))
    assert parts(simulate(too_short)) == {"compute": 36.0, "lost": 2.0, "restart": 3.0}


def test_joining_waits_for_the_step_under_way_and_costs_its_pause() -> None:
    recovery = RECOVERIES.make("step(join=1s)")
    found = simulate(scenario("0s:2 10s:4 1h", step="4s", samples=140, recovery=recovery))
    # Three steps of 20, the third ends at 12 s; a pause of 1 s; two steps of 40.
    assert found.time_s == 12 + 1 + 8.0
    assert parts(found) == {"compute": 20.0, "restart": 1.0}


def test_a_checkpoint_system_repeats_what_came_after_the_last_checkpoint() -> None:
    recovery = RECOVERIES.make("checkpoint(every=3s, write=1s, detect=2s, restart=5s)")
    found = simulate(scenario("0s:4 10s:2 1h", samples=360, recovery=recovery))
    # Three steps and a write are 4 s. By 10 s: two of these, and two steps that are lost. 7 s until it goes on.
    # 240 samples are kept; 120 more are six steps of 20, with a write in the middle and none at the end.
    assert found.time_s == 10 + 7 + 3 + 1 + 3.0
    assert parts(found) == {"compute": 12.0, "lost": 2.0, "restart": 7.0, "checkpoint": 3.0}


def test_a_checkpoint_system_with_notice_writes_before_the_loss() -> None:
    recovery = RECOVERIES.make("checkpoint(every=1h, write=1s, detect=2s, restart=5s, notice=30s)")
    found = simulate(scenario("0s:4 10s:2 1h", samples=400, recovery=recovery))
    # Nine steps end at 9 s, the write at 10 s; a restart of 5 s; 40 samples are two steps.
    assert found.time_s == 10 + 5 + 2.0
    assert parts(found) == {"compute": 11.0, "restart": 5.0, "checkpoint": 1.0}


def test_workers_are_paid_while_they_boot() -> None:
    found = simulate(scenario("constant(4, duration=1h)", provisioning=Seconds(30.0)))
    assert found.time_s == 55.0
    assert found.cost_usd == pytest.approx(4 * 55 * 0.001)
    assert parts(found) == {"compute": 25.0, "waiting": 30.0}


def test_a_cap_on_the_fleet_is_not_paid_for_and_a_cap_of_the_policy_is() -> None:
    rented = simulate(scenario("constant(8, duration=1h)", max_workers=4))
    idle = simulate(scenario("constant(8, duration=1h)", policy=make_policy("capped(10, max_workers=4)")))
    assert rented.time_s == idle.time_s == 25.0
    assert rented.cost_usd == pytest.approx(0.1)
    assert idle.cost_usd == pytest.approx(0.2)


def test_computing_network_and_waiting_are_distinguished() -> None:
    model = ComputeAndNetwork(
        per_step=Seconds(0.2), per_sample=Seconds(0.03), network=Affine(first=Seconds(0.4)), overlap=0.5,
        loading=Seconds(0.09),
    )  # fmt: skip
    # A share of 10: 0.5 s of computing, which hides 0.25 s of the exchange; 0.9 s of reading, 0.25 s longer than both.
    found = simulate(scenario("constant(4, duration=1h)", samples=400, model=model))
    assert found.time_s == pytest.approx(9.0)
    assert parts(found) == {"compute": 5.0, "network": 1.5, "waiting": 2.5}


def test_a_cut_step_pays_what_does_not_depend_on_samples_in_full() -> None:
    model = ComputeAndNetwork(per_step=Seconds(0.2), per_sample=Seconds(0.01))
    # Two workers, local batch 10: epochs of 30 are a step of 20 (0.3 s) and one of 10 (0.2 + 5 x 0.01 s).
    found = simulate(scenario("constant(2, duration=1h)", samples=30, epochs=4, model=model))
    assert found.steps == 8
    assert found.time_s == pytest.approx(4 * (0.3 + 0.25))


def test_accumulation_pays_the_fixed_time_of_every_micro_batch_and_one_exchange() -> None:
    model = ComputeAndNetwork(
        per_step=Seconds(0.1), per_sample=Seconds(0.01), network=Affine(first=Seconds(1.0)), micro_batch=4
    )
    # A share of 10 in micro-batches of 4: three times 0.1 s, 10 x 0.01 s, one exchange.
    found = simulate(scenario("constant(2, duration=1h)", samples=20, model=model))
    assert parts(found) == {"compute": 0.4, "network": 1.0}


def test_emulated_workers_compute_one_after_another() -> None:
    model = ComputeAndNetwork(per_step=Seconds(0.5), per_sample=Seconds(0.01), serial=True)
    assert simulate(scenario("constant(4, duration=1h)", samples=40, model=model)).time_s == pytest.approx(0.9)


def test_stragglers_make_a_step_wait_for_the_slowest() -> None:
    # Each of two workers takes three times as long with a chance of a half: the slowest does so in 3 of 4 steps.
    found = simulate(scenario("constant(2, duration=1h)", samples=200, stragglers=RareDelay(0.5, factor=3.0)))
    assert parts(found) == {"compute": 10.0, "waiting": 10 * 2 * 0.75}


def test_drawn_stragglers_are_the_same_for_the_same_seed_and_right_on_average() -> None:
    one = scenario("square(2, 4, period=1min, duration=10h)", samples=100_000, stragglers=RareDelay(0.5, factor=3.0))
    times = [simulate(one, rng=np.random.default_rng(seed)).time_s for seed in range(40)]
    assert simulate(one, rng=np.random.default_rng(0)).time_s == times[0] != times[1]
    assert np.mean(times) == pytest.approx(simulate(one).time_s, rel=0.005)


class OneStepInTen:
    """Takes five times as long, however many the workers: 1.4 on average, with a variance of 16 x 0.1 x 0.9."""

    def slowest(self, workers: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        return np.full(len(workers), 1.4), np.full(len(workers), 1.44)


def test_drawn_stragglers_are_right_on_average_where_a_segment_has_two_steps() -> None:
    # A step takes 1.4 s, with a deviation of 1.2 s, and the fleet changes every 3 s. 350,000 samples in steps of 100
    # and 110 are 3,333 steps or 4,667 s, with a deviation of 1.2 s x sqrt(3,333) = 69 s.
    changes = " ".join(f"{3 * i}s:{10 + i % 2}" for i in range(2000))
    one = scenario(f"{changes} 6000s", samples=350_000, stragglers=OneStepInTen())
    times = np.array([simulate(one, rng=np.random.default_rng(seed)).time_s for seed in range(60)])
    expected = simulate(one).time_s
    assert expected == pytest.approx(4667, rel=0.005)
    assert times.mean() == pytest.approx(expected, rel=0.01)
    assert times.std() == pytest.approx(69, rel=0.3)


def test_beyond_the_noise_scale_more_samples_are_needed() -> None:
    # A step of 40 at a noise scale of 20 and a reference batch of 10 is worth 40 x 30 / 60 = 20: 50 steps.
    found = simulate(scenario("constant(4, duration=1h)", noise_scale=20.0, ref_batch=10))
    assert (found.steps, found.samples, found.time_s) == (50, 2000, 50.0)
    assert found.goodput == pytest.approx(1000 / 50)


def test_the_on_demand_cluster_is_the_same_training_on_a_steady_fleet() -> None:
    cluster = on_demand(scenario("0s:1 1h"), workers=5, usd_per_hour=36.0)
    assert (cluster.time_s, cluster.steps) == (20.0, 20)
    assert cluster.cost_usd == pytest.approx(5 * 20 * 0.01)
    days = on_demand(scenario("0s:1 1h", samples=10**8), workers=1, usd_per_hour=1.0)
    assert days.time_s == 10**7


def test_a_repeated_trace_goes_on_until_the_training_is_done() -> None:
    # 100 samples a round of 15 s, of which 5 s are empty: ten rounds, the last without its gap.
    found = simulate(scenario("0s:1 10s:0 15s", repeat=True))
    assert (found.steps, found.time_s) == (100, 145.0)


def test_a_trace_that_is_too_short_says_how_far_it_reaches() -> None:
    with pytest.raises(PlanError, match=r"reach 1\.2 of 2 epochs; repeat it"):
        simulate(scenario("0s:1 120s", epochs=2))


def test_a_fleet_that_never_completes_a_step_is_reported() -> None:
    # Every segment is shorter than a step, and every change discards the step in progress.
    recovery = RECOVERIES.make("ideal(lose)")
    with pytest.raises(PlanError, match="no step is completed"):
        simulate(scenario("square(1, 2, period=2s, duration=1h)", step="5s", recovery=recovery, repeat=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": 0}, "expected at least one"),
        ({"samples": 2**50, "epochs": 100}, r"more than 2\^53 samples"),
        ({"noise_scale": -1.0}, "expected both above 0"),
        ({"max_workers": 0}, "expected at least 1"),
        ({"offset": Seconds(1e9)}, "lies outside of the trace"),
        ({"provisioning": Seconds(-1.0)}, "not negative"),
        ({"policy": make_policy("follow", 2**62)}, r"more than 2\^53 samples"),
    ],
)
def test_impossible_scenarios_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(scenario("constant(1, duration=1h)", **change))  # type: ignore[arg-type]


@pytest.mark.parametrize("step", ["1e300s", "1e18s"])
def test_steps_longer_than_any_trace_are_refused(step: str) -> None:
    with pytest.raises(PlanError, match="would have to be repeated"):
        simulate(scenario("square(1, 2, duration=1h)", step=step, repeat=True, recovery=RECOVERIES.make("ideal(lose)")))


counts = st.lists(st.tuples(st.floats(0.1, 50).map(lambda x: round(x, 2)), st.integers(0, 5)), min_size=1, max_size=8)


@given(fleet=counts, samples=st.integers(1, 300), epochs=st.integers(1, 3), cut=st.booleans())
def test_without_interruptions_a_simulation_is_the_plan(
    fleet: list[tuple[float, int]], samples: int, epochs: int, cut: bool
) -> None:
    times = np.cumsum([0.0, *(length for length, _ in fleet)])
    trace = Trace(times[:-1], np.array([workers for _, workers in fleet]), float(times[-1]))
    one = replace(scenario("constant(1)", batch=3, step="0.6s", samples=samples, epochs=epochs, cut=cut), trace=trace)
    try:
        found = simulate(one)
    except PlanError:
        with pytest.raises(PlanError):
            BatchPlan.from_trace(trace, "follow(3)", 0.6).for_epochs(samples, epochs, cut=cut)
        return
    plan = BatchPlan.from_trace(trace, "follow(3)", 0.6).for_epochs(samples, epochs, cut=cut)
    assert (found.steps, found.samples) == (plan.steps, plan.samples)
    assert found.time_s == pytest.approx(plan.time_s)
    assert sum(found.breakdown.values()) == pytest.approx(found.time_s)


def test_a_hundred_thousand_workers_for_a_month() -> None:
    month = 30 * 86400.0
    rng = np.random.default_rng(1)
    times = np.append(0.0, np.sort(rng.uniform(1, month - 1, 5000)))
    trace = Trace(times, rng.integers(80_000, 100_001, len(times)), month)
    one = replace(scenario("constant(1)", step="0.6s", recovery=RECOVERIES.make("step")), trace=trace)
    one = replace(one, samples=10**9, epochs=1000)
    found = simulate(one)
    assert found.samples == 10**12
    # A worker takes ten samples in 0.6 s, so a sample is 0.06 worker-seconds; interruptions cost the rest.
    assert found.cost_usd == pytest.approx(10**12 * 0.06 * 0.001, rel=0.02)
    assert sum(found.breakdown.values()) == pytest.approx(found.time_s)


def test_the_published_training_takes_188_minutes_and_112_dollars() -> None:
    trace = load("gcp-a100-2022-05(stop=13545s)")
    one = replace(scenario("constant(1)", batch=128, step="0.6s", samples=1_281_167, epochs=90), trace=trace)
    found = simulate(replace(one, price=FlatPrice(0.744)))
    assert (found.steps, round(found.time_s / 60, 1)) == (18_837, 188.4)
    assert found.cost_usd == pytest.approx(112, abs=0.5)
    cluster = on_demand(replace(one, cut=False), workers=64, usd_per_hour=2.48, model=parse_step_time("0.554s"))
    assert cluster.cost_usd == pytest.approx(344, abs=0.5)
