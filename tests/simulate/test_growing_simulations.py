"""A batch that grows: equal to a simulation step by step, to what the policy requests, and to `ebbflow plan`."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawing_examples import examples
from ebbflow.core.units import Seconds, Span
from ebbflow.errors import ConfigError
from ebbflow.plan import StepSize, make_policy, plan_growing
from ebbflow.plan.growing import Geo, Goodput, Pada, allow
from ebbflow.plan.policies import GrowingPolicy
from ebbflow.simulate import NETWORKS, ComputeAndNetwork, FlatPrice, Scenario, on_demand, parse_step_time, simulate
from ebbflow.simulate.advance import GrowthPhases, simulate_growing
from ebbflow.simulate.recovery import RECOVERIES, Recovery
from ebbflow.simulate.scenario import SettledGoodput, TrainingWork
from ebbflow.simulate.search import Setting, outcomes
from ebbflow.simulate.segments import Segments, limit_batches
from ebbflow.traces import Trace, load
from simulate.naive import NaiveSimulator, assert_same, fleets, recoveries, steps_of, works

policies = st.one_of(
    st.builds(
        Geo,
        delay=st.builds(Span, st.sampled_from([7, 20.5, 64]), st.just("samples")),
        factor=st.sampled_from([1.0, 1.5, 3.0]),
        initial=st.integers(1, 6),
        max_batch=st.sampled_from([None, 9]),
    ),
    st.builds(Pada, rate=st.sampled_from([0.0, 0.3, 2.5]), initial=st.integers(1, 6)),
)


@examples(400)
@given(
    fleet=fleets,
    recovery=recoveries,
    work=works,
    policy=policies,
    local=st.integers(1, 5),
    step=st.sampled_from([0.6, 1.7]),
    each=st.sampled_from([0.0, 0.083]),
    fixed=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_a_growing_simulation_equals_one_step_by_step(
    fleet: list[tuple[float, int]], recovery: Recovery, work: TrainingWork, policy: GrowingPolicy, local: int,
    step: float, each: float, fixed: float,
) -> None:  # fmt: skip
    stops, there = np.cumsum([s[0] for s in fleet]), np.array([s[1] for s in fleet], np.int64)
    phases = GrowthPhases(policy=policy, ref_batch=4, epoch_samples=work.epoch, most=max(int(there.max()) * local, 1))

    @cache
    def segments_of(requested: int) -> Segments:
        workers, samples = limit_batches(there, there * local, requested)
        steps = steps_of(workers, samples, step + each * samples, fixed)
        return Segments(stops=stops, steps=steps, reaction=recovery.react(workers, steps.seconds))

    def part_of(requested: int, first: int, stop: int) -> Segments:
        return segments_of(requested).take(slice(first, stop))

    naive = NaiveSimulator(lambda steps, samples: segments_of(phases.requested(steps, samples)), work).run()
    found, used = simulate_growing(phases, part_of, len(stops), work)
    assert_same(found, naive)
    if found.rows or found.blocks:  # the numbers of the segments are those of the parts
        sizes = np.concatenate([part.steps.samples[:count] for part, count in used])
        assert (found.runs().sizes <= sizes[found.runs().segments] + 1).all()  # no lone sample is left over


@given(workers=st.integers(1, 40), local=st.integers(1, 64), requested=st.integers(1, 3000))
def test_what_a_step_takes_is_what_training_allows(workers: int, local: int, requested: int) -> None:
    taken = allow(StepSize(workers=workers, samples=workers * local, time_s=0.0, duration_s=1.0), requested)
    found = limit_batches(np.array([workers]), np.array([workers * local]), requested)
    assert (int(found[0][0]), int(found[1][0])) == (taken.workers, taken.samples)


@given(policy=policies, steps=st.integers(0, 500), samples=st.integers(0, 5000))
def test_a_phase_lasts_as_long_as_the_policy_requests_the_same_batch(
    policy: GrowingPolicy, steps: int, samples: int
) -> None:
    phases = GrowthPhases(policy=policy, ref_batch=4, epoch_samples=100, most=1000)
    phase = phases.at(steps, samples)
    assert phase.requested == phases.requested(steps, samples)
    if phase.until_steps < 2**62:
        assert (
            phases.requested(phase.until_steps - 1, samples)
            == phase.requested
            < phases.requested(phase.until_steps, samples)
        )
    if phase.until_samples < 2**62:
        assert (
            phases.requested(steps, phase.until_samples - 1)
            == phase.requested
            < phases.requested(steps, phase.until_samples)
        )


def growing(text: str, trace: str, **more: object) -> Scenario:
    given: dict[str, object] = {
        "trace": load(trace), "policy": make_policy(text, 32), "model": parse_step_time("0.7s"), "samples": 5000,
        "epochs": 8, "price": FlatPrice(3.6), "ref_batch": 64, "repeat": True,
    }  # fmt: skip
    return Scenario(**{**given, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["geo(2ep, factor=2)", "geo(500steps, factor=1.7, max_batch=300)", "pada(rate=0.4)"])
@pytest.mark.parametrize("trace", ["constant(12)", "poisson(6, seed=3)", "0s:2 70s:0 100s:20 500s:5 900s"])
def test_the_steps_are_those_of_a_plan(text: str, trace: str) -> None:
    scenario = growing(text, trace)
    assert isinstance(scenario.policy, GrowingPolicy)
    plan = plan_growing(
        scenario.trace, scenario.policy, "0.7s", samples=5000, epochs=8, ref_batch=64, repeat=True
    ).foreseen.for_epochs(5000, 8)
    found = simulate(scenario)
    assert (found.steps, found.samples) == (plan.steps, plan.samples) == (plan.steps, 40_000)
    assert found.time_s == pytest.approx(plan.time_s)
    assert sum(found.breakdown.values()) == pytest.approx(found.time_s)


def test_the_time_of_a_growing_batch_by_hand() -> None:
    # 4 workers, at most 40 samples. An epoch of 100 samples in steps of 20 (0.1 + 10 x 0.01 s on two workers of 10
    # each: 0.2 s), then 40 (0.2 s on four): 5 x 0.2 s, then two steps of 40 and the last of 20, which takes half
    # way between an empty step (0.1 s) and a whole one: 0.2 + 0.2 + 0.15 s.
    model = ComputeAndNetwork(per_step=Seconds(0.1), per_sample=Seconds(0.01))
    policy = make_policy("geo(1ep, factor=2, initial=20, local_batch=10)")
    found = simulate(growing("follow", "constant(4)", policy=policy, model=model, samples=100, epochs=2))
    assert found.steps == 8
    assert found.time_s == pytest.approx(1.55)
    assert found.breakdown["compute"] == pytest.approx(1.55)
    assert found.segments.workers[found.runs.segments].tolist() == [2, 4, 4]  # the last step is one of a whole of 40


def test_a_loss_may_throw_training_back_into_the_phase_before() -> None:
    # Steps of 1 s: 10 samples each until 30 are done, then 40. Four steps by 4.5 s, when one of four workers is lost
    # and all is repeated from the start, after a restart of 2 s: 3 x 10, then what three workers can do, and the rest.
    policy = make_policy("geo(30samples, factor=4, initial=10, max_batch=40, local_batch=10)")
    recovery = RECOVERIES.make("checkpoint(every=1h, write=1s, detect=0s, restart=2s)")
    scenario = growing(
        "follow", "0s:4 4.5s:3 1h", policy=policy, model=parse_step_time("1s"), samples=100, epochs=1,
        recovery=recovery, repeat=False,
    )  # fmt: skip
    found = simulate(scenario)
    assert np.repeat(found.runs.sizes, found.runs.counts).tolist() == [10, 10, 10, 30, 30, 10]
    assert found.time_s == pytest.approx(4.5 + 2 + 6)


def test_a_change_among_idle_workers_is_none() -> None:
    policy = make_policy("geo(1ep, factor=1, initial=20, local_batch=10)")
    one = growing("follow", "0s:6 10s:3 20s:5 1h", policy=policy, model=parse_step_time("1s"), samples=1000, epochs=1)
    lossy = replace(one, recovery=RECOVERIES.make("ideal(lose)"), model=parse_step_time("0.7s"))
    assert simulate(one).time_s == 50.0
    assert simulate(lossy).breakdown["lost"] == pytest.approx(0.0)
    assert simulate(lossy).time_s == pytest.approx(35.0)


def test_on_demand_clusters_and_settings_grow_too() -> None:
    scenario = growing("geo(2ep)", "poisson(6, seed=3)", samples=50_000, model=parse_step_time("1:0.5s 8:0.7s"))
    assert on_demand(scenario, workers=8, usd_per_hour=1.0).samples == 400_000
    settings = [Setting(max_workers=w, local_batch=32, policy=p) for w in (4, 8) for p in ("geo(2ep)", "pada(rate=1)")]
    assert len({getattr(one, "time_s", None) for one in outcomes(scenario, settings)}) == 4


def test_policies_that_need_a_training_are_refused() -> None:
    for name in ("ada", "ada-norm", "rada", "noise"):
        with pytest.raises(ConfigError, match=r"grows by what training shows.*geo or pada.*--plan FILE"):
            growing(name, "constant(4)")
    with pytest.raises(ConfigError, match="begins with the reference batch; give it"):
        growing("geo(2ep)", "constant(4)", ref_batch=None)


# -- the best batch --------------------------------------------------------------------------------------------------

SLOWER = ComputeAndNetwork(
    per_step=Seconds(0.7), per_sample=Seconds(0.001), network=NETWORKS.make("affine(0.2s, 0.2s)")
)
"""Workers of 100 samples: 0.6 + 0.2 W seconds, so that with a noise scale of 300 and a reference batch of 100 progress
per second is proportional to W/((3 + W)(0.6 + 0.2 W)): 0.3125, 0.4, 0.4167, 0.4082 with 1 to 4 workers."""


def best(text: str, trace: str, **more: object) -> Scenario:
    given: dict[str, object] = {
        "policy": make_policy(text, 100), "model": SLOWER, "samples": 10_000, "ref_batch": 100, "noise_scale": 300.0,
        "epochs": 2,
    }  # fmt: skip
    return growing("follow", trace, **{**given, **more})


def test_goodput_is_simulated_where_it_settles_by_hand() -> None:
    # Of five workers three take part, in steps of 300 samples, each worth 300 x 400/600 = 200, and of 1.2 s, of which
    # an empty step takes 0.7 s and 0.4 s for the exchange. An epoch is 33 such steps and one of 100 samples, which is
    # worth 100 and takes 1.1 + 0.1/3 s. Training ends after 20,000 reference samples; an epoch is worth 6,700.
    found = simulate(best("goodput", "constant(5)"))
    assert set(found.segments.workers.tolist()) == {3}
    assert np.repeat(found.runs.sizes, found.runs.counts).tolist()[:35] == [300] * 33 + [100, 300]
    per_epoch = 33 * 1.2 + (1.1 + 0.1 / 3)
    # Two epochs are worth 13,400; 33 further steps of 200 are the rest.
    assert found.time_s == pytest.approx(2 * per_epoch + 33 * 1.2)
    # Where there are fewer workers, all of them take part. Per dollar, with ten times a worker's price for the job, two
    # are best: 0.4/12 against 0.4167/13.
    assert set(simulate(best("goodput", "0s:2 9h")).segments.workers.tolist()) == {2}
    dollars = simulate(best("goodput(per=dollar, price=0.5, fixed=5)", "constant(5)"))
    assert set(dollars.segments.workers.tolist()) == {2}
    # Times that the policy is given decide, whatever the steps really take: with no exchange all five take part.
    assert set(simulate(best("goodput(step=1s)", "constant(5)")).segments.workers.tolist()) == {5}


@examples(50)
@given(
    noise_scale=st.floats(10, 1e5), local=st.integers(1, 64), fleet=st.integers(1, 40), ref_batch=st.integers(1, 300),
    first=st.floats(0, 1), more=st.floats(0, 0.2),
)  # fmt: skip
def test_no_smaller_fleet_makes_more_progress_per_hour_than_goodput(
    noise_scale: float, local: int, fleet: int, ref_batch: int, first: float, more: float
) -> None:
    model = ComputeAndNetwork(
        per_step=Seconds(0.5), per_sample=Seconds(0.01), network=NETWORKS.make(f"affine({first}s, {more}s)")
    )
    policy = make_policy("goodput", local)
    assert isinstance(policy, Goodput)
    settled = SettledGoodput(policy=policy, model=model, noise_scale=noise_scale, ref_batch=ref_batch)
    fleets = np.arange(fleet + 1)
    workers, samples = settled.sizes(fleets)
    assert (workers <= fleets).all() and (samples <= workers * local).all()
    assert (samples >= np.minimum(ref_batch, fleets * local)).all()
    seconds = model.breakdown(np.maximum(workers, 1), samples).total
    found = TrainingWork(epoch=1, needed=1, noise_scale=noise_scale, ref_batch=ref_batch).worths(samples) / seconds
    batches = fleets[1:] * local
    times = model.breakdown(fleets[1:], batches).total
    others = TrainingWork(epoch=1, needed=1, noise_scale=noise_scale, ref_batch=ref_batch).worths(batches) / times
    allowed = batches >= ref_batch
    if allowed.any():
        assert found[-1] >= others[allowed].max() * (1 - 1e-12)


def test_goodput_needs_a_noise_scale_to_be_simulated() -> None:
    for lacking in ({"noise_scale": float("inf")}, {"ref_batch": None}):
        with pytest.raises(ConfigError, match=r"follows the noise scale.*noise_scale=8000 and ref_batch=256"):
            best("goodput", "constant(4)", **lacking)


def test_a_long_trace_is_simulated_in_windows() -> None:
    times = np.arange(3000) * 5.0
    trace = Trace(times, 2 + np.arange(3000) % 2, 15_000.0)
    scenario = replace(growing("pada(rate=0.01)", "constant(2)", epochs=100, samples=3000), trace=trace)
    whole = simulate(scenario)
    assert whole.samples == 300_000
    assert sum(whole.breakdown.values()) == pytest.approx(whole.time_s)
