"""What a batch is worth, and the policy that keeps the best one: rows derived by hand, properties, and bad input."""

from __future__ import annotations

import itertools
import json
import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawing_examples import examples
from ebbflow.errors import EbbflowError, PlanError
from ebbflow.plan.batch_plan import StepSize
from ebbflow.plan.goodput import (
    StepTimes,
    TimedStep,
    batch_candidates,
    efficiencies,
    efficiency,
    fit_times,
    further_worker,
    value_of,
)
from ebbflow.plan.growing import Goodput, Growth, workers_for
from ebbflow.plan.policies import make_policy
from ebbflow.rules.noise_rules import gain

scales = st.one_of(st.just(0.0), st.just(math.inf), st.floats(1e-3, 1e9))


def test_efficiency_by_hand() -> None:
    # Noise of the mean gradient of a reference batch 7, signal 1: phi = 7 x 100 samples. At a ratio of 8 the gain is
    # (7 + 1)/(7/8 + 1) = 8 x 8/15, so that each sample makes 8/15 of the progress of one at the reference batch.
    assert efficiency(800, noise_scale=700, ref_batch=100) == pytest.approx(8 / 15)
    assert efficiency(100, noise_scale=700, ref_batch=100) == efficiency(5, noise_scale=700, ref_batch=100) == 1
    # Without noise a step is worth a reference step whatever its size; without signal every sample counts.
    assert efficiency(800, noise_scale=0, ref_batch=100) == 1 / 8
    assert efficiency(800, noise_scale=math.inf, ref_batch=100) == 1


@examples(100)
@given(noise_scale=scales, ref_batch=st.integers(1, 1000), batch=st.integers(1, 10**6), more=st.integers(1, 10**6))
def test_efficiency_is_the_gain_divided_by_the_ratio_and_falls_with_the_batch(
    noise_scale: float, ref_batch: int, batch: int, more: int
) -> None:
    def of(samples: int) -> float:
        return efficiency(samples, noise_scale=noise_scale, ref_batch=ref_batch)

    assert 0 < of(batch + more) <= of(batch) <= 1
    assert (batch + more) * of(batch + more) >= batch * of(batch) * (1 - 1e-12), "more samples make no less progress"
    ratio = max(1.0, batch / ref_batch)
    noise, signal = (1.0, 0.0) if noise_scale == math.inf else (noise_scale / ref_batch, 1.0)
    assert of(batch) == pytest.approx(gain(noise, signal, ratio) / ratio)
    several = efficiencies(np.array([float(batch), 0.0]), noise_scale=noise_scale, ref_batch=ref_batch)
    assert several[0] == pytest.approx(of(batch))


def test_what_a_further_worker_is_worth_by_hand() -> None:
    # Four workers of 100 with phi = 300: 400 samples x (300 + 100)/(300 + 400) in one second. The price is 0.9 USD x 4
    # per 3600 s, that is 0.001 USD per second for 228.6 reference samples: 4.375 USD per million. Five workers make
    # 500 x 400/800 = 250 in the same second: 9.4 % more, which is 0.375 of what a present worker makes.
    now, more = (value_of(n, 100 * n, 1.0, noise_scale=300, ref_batch=100, price=0.9) for n in (4, 5))
    assert now.efficiency == pytest.approx(4 / 7)
    assert now.samples_per_progress == pytest.approx(7 / 4)
    assert now.goodput == pytest.approx(1600 / 7)
    assert now.usd_per_million == pytest.approx(4.375)
    found = further_worker(now, more)
    assert found.gain == pytest.approx(250 * 7 / 1600 - 1)
    assert found.share == pytest.approx(0.375)
    assert value_of(4, 400, 1.0, noise_scale=300, ref_batch=100).usd_per_million is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: value_of(0, 100, 1.0, noise_scale=1, ref_batch=1), "0 workers make no progress"),
        (lambda: value_of(1, 100, 0.0, noise_scale=1, ref_batch=1), "takes 0 s; expected a finite time above 0"),
        (lambda: efficiency(100, noise_scale=-1, ref_batch=1), "noise scale of at least 0"),
        (lambda: efficiency(100, noise_scale=math.nan, ref_batch=1), "noise scale of at least 0"),
        (lambda: efficiency(0, noise_scale=1, ref_batch=1), "a batch of 0 samples"),
    ],
)
def test_what_is_worth_nothing_is_refused(call: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        call()


# -- step times ------------------------------------------------------------------------------------------------------


def test_fitted_step_times_by_hand() -> None:
    assert fit_times([]) is None
    # One kind of step: what depends on workers and samples is not known, and counts as free.
    assert fit_times([TimedStep(2, 64, 3.0)]) == StepTimes(step=3.0)
    # Workers of 32 samples each: 1 + 0.5 (W - 1) seconds.
    times = fit_times([TimedStep(1, 32, 1.0), TimedStep(2, 64, 1.5), TimedStep(4, 128, 2.5)])
    assert times is not None
    assert (times.step, times.sample, times.exchange) == pytest.approx((1.0, 0.0, 0.5))
    # Steps that become shorter with more workers: no part is negative, and the mean is the best of what is left.
    times = fit_times([TimedStep(1, 32, 2.0), TimedStep(2, 64, 1.0)])
    assert times is not None and times.exchange == 0 and 1 < times.step < 2


@examples(60)
@given(
    parts=st.tuples(st.floats(0.01, 10), st.floats(0.001, 1), st.floats(0.001, 1)),
    kinds=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 64)), min_size=1, max_size=8, unique=True),
)
def test_times_of_the_model_are_found_again(parts: tuple[float, float, float], kinds: list[tuple[int, int]]) -> None:
    true = StepTimes(step=parts[0], sample=parts[1], exchange=parts[2])
    measured = [TimedStep(n, n * share, true.seconds(n, n * share)) for n, share in kinds]
    found = fit_times(measured)
    assert found is not None
    errors = [found.seconds(one.workers, one.samples) / one.seconds - 1 for one in measured]
    assert max(map(abs, errors)) < 1e-3
    assert min(found.step, found.sample, found.exchange) >= 0 < found.step + found.sample


# -- the policy ------------------------------------------------------------------------------------------------------

TIMES = "step=0.8s, exchange=0.2s, local_batch=100, dwell=1, wait=0"
"""T(W) = 0.6 + 0.2 W seconds. With phi = 300 and B0 = 100, progress per second is proportional to W/((3 + W) T(W)):
0.3125, 0.4, 0.4167, 0.4082 with 1 to 4 workers."""
MEASURED = {"noise": 900.0, "signal": 3.0}


def requested(text: str, *steps: dict[str, Any], ref_batch: int = 100, workers: int | None = None) -> list[int]:
    """What the policy requests, first and after each step, if steps take what is requested (of so many workers)."""
    policy = make_policy(text)
    assert isinstance(policy, Goodput)
    growth = Growth(policy, ref_batch=ref_batch, epoch_samples=1000)
    local = policy.local_batch or ref_batch
    found = [growth.requested]
    for step in steps:
        batch = min(growth.useful, workers * local if workers is not None else growth.useful)
        growth.observe(**{"batch": batch, "workers": workers_for(batch, local), **step})
        found.append(growth.requested)
    return found


def test_the_goodput_policy_by_hand() -> None:
    # At most twice the last step: 200, then the best of all, 300. It is 4.2 % better than 200: not enough by default.
    assert requested(f"goodput({TIMES}, margin=0)", *[MEASURED] * 4) == [100, 200, 300, 300, 300]
    assert requested(f"goodput({TIMES})", *[MEASURED] * 4) == [100, 200, 200, 200, 200]
    # Half of the noise scale: W/((1.5 + W)(0.6 + 0.2 W)) is 0.5 for one worker, 0.571 for two, 0.556 for three.
    assert requested(f"goodput({TIMES}, margin=0)", *[{"noise": 450.0, "signal": 3.0}] * 3) == [100, 200, 200, 200]
    # With a limit of two workers' samples, and where only two workers are there, no more than that is taken.
    assert requested(f"goodput({TIMES}, margin=0, max_batch=250)", *[MEASURED] * 3) == [100, 200, 200, 200]
    assert requested(f"goodput({TIMES}, margin=0)", *[MEASURED] * 3, workers=1) == [100, 200, 200, 200]


def test_progress_per_dollar_by_hand() -> None:
    # With the price of the workers alone one worker is best. With 10 times its price for the job, progress per dollar
    # is proportional to W/((3 + W) T (W + 10)): 0.0284, 0.0333, 0.0321 for 1 to 3 workers.
    dollars = f"{TIMES}, per=dollar, price=0.5, margin=0"
    assert requested(f"goodput({dollars})", *[MEASURED] * 3) == [100] * 4
    assert requested(f"goodput({dollars}, fixed=5)", *[MEASURED] * 3) == [100, 200, 200, 200]


def test_a_signal_that_is_lost_and_a_noise_that_is_none() -> None:
    # phi is infinite: W/T(W) grows with every worker. phi is 0: 1/T(W), so that the first batch is best again.
    lost, clear = {"noise": 900.0, "signal": -1.0}, {"noise": -1.0, "signal": 3.0}
    assert requested(f"goodput({TIMES})", *[lost] * 3) == [100, 200, 400, 800]
    assert requested(f"goodput({TIMES}, memory=1samples)", lost, lost, clear, clear) == [100, 200, 400, 100, 100]
    # Steps of one micro-batch, or neither noise nor signal: nothing is known, and nothing changes.
    assert requested(f"goodput({TIMES})", {}, {"noise": -1.0, "signal": -1.0}) == [100, 100, 100]


def test_measured_durations_by_hand() -> None:
    # phi = 300; steps of 100 take 1 s, and of 200 they take 1 s, too: 400 is tried, and takes 4 s, where 200 made
    # 200 x 400/500 = 160 and 400 makes 400 x 400/700/4 = 57 per second. The first step after each change is not
    # counted. Then T is fitted to 1, 1 and 4 s, and back it goes.
    text = "goodput(local_batch=100, dwell=2, wait=0)"
    quick, slow = {**MEASURED, "seconds": 1.0}, {**MEASURED, "seconds": 4.0}
    found = requested(text, quick, quick, quick, quick, slow, slow)
    assert found[:-1] == [100, 100, 200, 200, 400, 400]
    assert found[-1] < 400
    without = requested(text, *[MEASURED] * 6)
    assert without == [100] * 7, "no step time is known"


def test_a_long_pause_counts_for_three_steps_at_most() -> None:
    policy = make_policy("goodput(local_batch=100, dwell=1000)")
    assert isinstance(policy, Goodput)
    growth = Growth(policy, ref_batch=100, epoch_samples=1000)
    for seconds in (9.0, 1.0, 1.0, 1000.0):  # the first has no step before it to compare with
        growth.observe(batch=100, workers=1, seconds=seconds)
    (kind,) = json.loads(growth.state_dict()["state"])["kinds"]
    assert kind == [1, 100, pytest.approx(5 / 3), 3]  # (1 + 1 + 3)/3


def test_the_rate_does_not_pay_for_workers_that_are_not_there() -> None:
    policy = make_policy(f"goodput({TIMES})")
    assert isinstance(policy, Goodput)
    growth = Growth(policy, ref_batch=100, epoch_samples=1000)
    growth.observe(batch=100, workers=1, **MEASURED)
    size = growth.allow(StepSize(workers=1, samples=100, time_s=0.0, duration_s=1.0))
    assert (growth.requested, size.samples, size.shortfall) == (200, 100, 1.0)


def test_the_batch_does_not_flap_with_noisy_measurements() -> None:
    # phi = 3000 +- 40 % in each step, durations +- 10 %: after it has settled, the batch hardly changes.
    rng = random.Random(1)
    policy = make_policy("goodput(local_batch=32, dwell=10, wait=50)")
    assert isinstance(policy, Goodput)
    growth, batches = Growth(policy, ref_batch=64, epoch_samples=10_000), []
    for _ in range(3000):
        batch = min(growth.useful, 64 * 32)
        workers = workers_for(batch, 32)
        seconds = (0.5 + 0.02 * workers) * rng.uniform(0.9, 1.1)
        growth.observe(
            batch=batch,
            workers=workers,
            seconds=seconds,
            noise=3000 * rng.uniform(0.6, 1.4),
            signal=rng.uniform(0.6, 1.4),
        )
        batches.append(growth.requested)
    # W/((3000/32 + W)(0.5 + 0.02 W)) is best where 0.02 W^2 = 0.5 x 3000/32, that is W = 48, and within 5 % of that
    # from W = 31 to 77; the fleet has 64.
    settled = batches[1000:]
    changes = sum(a != b for a, b in itertools.pairwise(settled))
    assert changes <= 5
    assert 25 * 32 <= settled[-1] <= 85 * 32


@examples(60)
@given(
    noise_scale=st.floats(10, 1e5), step=st.floats(0.01, 2), exchange=st.floats(0.001, 0.5),
    local=st.integers(1, 64), ref_batch=st.integers(1, 128), per=st.sampled_from(["hour", "dollar"]),
)  # fmt: skip
def test_the_policy_arrives_at_the_best_batch_of_all_and_that_grows_with_the_noise_scale(
    noise_scale: float, step: float, exchange: float, local: int, ref_batch: int, per: str
) -> None:
    price = ", price=1.0, fixed=20.0" if per == "dollar" else ""
    policy = make_policy(f"goodput(step={step}s, exchange={exchange}s, per={per}{price}, margin=0, dwell=1, wait=0, "
                         f"local_batch={local}, max_batch={200 * local + ref_batch})")  # fmt: skip
    assert isinstance(policy, Goodput)

    def settled(phi: float) -> int:
        growth = Growth(policy, ref_batch=ref_batch, epoch_samples=1000)
        for _ in range(20):
            growth.observe(batch=growth.useful, noise=phi, signal=1.0)
        return growth.requested

    def score(batch: int) -> float:
        workers = workers_for(batch, local)
        times = StepTimes(step=step, exchange=exchange)
        return policy.score(batch, workers, times.seconds(workers, batch), noise_scale=noise_scale, ref_batch=ref_batch)

    everything = batch_candidates(ref_batch, local_batch=local, most=200 * local + ref_batch)
    assert score(settled(noise_scale)) == pytest.approx(max(map(score, everything)))
    assert settled(noise_scale) <= settled(4 * noise_scale) + local  # + local: of equals, rounding decides


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("goodput(per=dollar)", "the price is missing; write price=0.74"),
        ("goodput(per=dollar, price=0)", "price is 0; expected a number above 0"),
        ("goodput(price=0.5)", "per hour does not depend on a price; leave it out, or write per=dollar"),
        ("goodput(per=mile)", "per is 'mile'"),
        ("goodput(exchange=5ms)", "a step would take no time; give step=50ms"),
        ("goodput(margin=-0.1)", "margin is -0.1; expected at least 0"),
        ("goodput(memory=0steps)", "memory is 0steps"),
    ],
)
def test_a_bad_goodput_policy_is_refused(text: str, message: str) -> None:
    with pytest.raises(EbbflowError, match=message):
        make_policy(text)
