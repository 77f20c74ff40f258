from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.errors import CheckpointError, ConfigError
from ebbflow.moments.estimate import Averages, Measurement, Moments, decay


def measurement(sizes: np.ndarray, gradients: np.ndarray) -> Measurement:
    """The measurement of the whole model, from the sizes of the micro-batches and their mean gradients, one per row."""
    batch = sizes.sum()
    weights = sizes / batch
    return Measurement(
        batch=int(batch),
        micro_batches=len(sizes),
        mean_sq=(float(weights @ np.square(gradients).sum(1)),),
        sq_mean=(float(np.square(weights @ gradients).sum()),),
    )


def of(noise: float, signal: float, *, batch: int, micro_batches: int) -> Measurement:
    """The measurement whose estimate is exactly this noise and signal: A = S + K V/B, N = S + V/B."""
    return Measurement(
        batch=batch,
        micro_batches=micro_batches,
        mean_sq=(signal + micro_batches * noise / batch,),
        sq_mean=(signal + noise / batch,),
    )


def gain(moments: Moments, *, base: int, batch: int) -> float:
    sigma2, ratio = moments.noise / base, batch / base
    return (sigma2 + moments.signal) / (sigma2 / ratio + moments.signal)


def test_two_uneven_micro_batches_by_hand() -> None:
    # One number; micro-batches of 3 and 1 samples with gradients 2 and 6: A = 3/4*4 + 1/4*36 = 12, mean 3/4*2 + 1/4*6 =
    # 3, N = 9; V = 4*(12 - 9)/1 = 12, S = 9 - 12/4 = 6.
    measured = measurement(np.array([3, 1]), np.array([[2.0], [6.0]]))
    assert measured.estimate() == ((12.0,), (6.0,))


def test_ten_thousand_steps_with_uneven_micro_batches_are_unbiased() -> None:
    rng = np.random.default_rng(20)
    true, spread = np.array([0.3, -0.2, 0.1, 0.0, 0.5]), np.array([1.0, 0.5, 2.0, 3.0, 0.1])
    noise, signal = float(np.square(spread).sum()), float(np.square(true).sum())
    patterns = [np.array(p) for p in ([1, 3, 4, 8], [16, 1], [2, 2, 2, 2, 2, 5], [7, 9, 1])]
    estimates, naive = [], []
    for step in range(10_000):
        sizes = patterns[step % len(patterns)]
        micro_batches = true + spread * rng.standard_normal((len(sizes), 5)) / np.sqrt(sizes)[:, None]
        measured = measurement(sizes, micro_batches)
        (v,), (s,) = measured.estimate()
        estimates.append((v, s))
        # What equal weights would give: the mean of the micro-batches' squares, whatever their sizes.
        equal = np.square(micro_batches).sum(1).mean()
        naive.append(measured.batch * (equal - measured.sq_mean[0]) / (measured.micro_batches - 1))
    mean, error = np.mean(estimates, axis=0), np.std(estimates, axis=0) / math.sqrt(len(estimates))
    assert np.all(np.abs(mean - [noise, signal]) < 3 * error), (mean, error)
    assert error[0] < 0.02 * noise, "too few steps to say anything"
    assert abs(np.mean(naive) - noise) > 3 * np.std(naive) / math.sqrt(len(naive)), (
        "the test does not distinguish the weights"
    )


@given(
    st.lists(st.tuples(st.integers(1, 50), st.floats(-3, 3), st.floats(-3, 3)), min_size=2, max_size=6),
    st.floats(0.1, 10),
)
def test_properties_of_one_estimate(micro_batches: list[tuple[int, float, float]], factor: float) -> None:
    sizes = np.array([n for n, _, _ in micro_batches])
    gradients = np.array([(x, y) for _, x, y in micro_batches])
    measured = measurement(sizes, gradients)
    (v,), (s,) = measured.estimate()
    assert v >= -1e-9, "the mean of squares is never below the square of the mean"
    assert s + v / measured.batch == pytest.approx(measured.sq_mean[0], abs=1e-9)
    # Order does not matter; gradients `factor` times as large have factor^2 times the noise and signal.
    turned = measurement(sizes[::-1], factor * gradients[::-1])
    assert turned.estimate()[0][0] == pytest.approx(factor**2 * v, rel=1e-6, abs=1e-6)
    assert turned.estimate()[1][0] == pytest.approx(factor**2 * s, rel=1e-6, abs=1e-6)


def test_one_micro_batch_gives_no_estimate_and_averages_are_held() -> None:
    single = Measurement(batch=8, micro_batches=1, mean_sq=(4.0,), sq_mean=(4.0,))
    with pytest.raises(ConfigError, match="at least two are needed"):
        single.estimate()
    before = Averages().updated(of(2, 3, batch=8, micro_batches=2), memory=100)
    assert before.updated(single, memory=100) is before
    assert Averages().updated(single, memory=100).moments() is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_infinite_gradient_leaves_the_averages_untouched(bad: float) -> None:
    before = Averages().updated(of(2, 3, batch=8, micro_batches=2), memory=100)
    for measured in (
        Measurement(batch=8, micro_batches=2, mean_sq=(bad,), sq_mean=(1.0,)),
        Measurement(batch=8, micro_batches=2, mean_sq=(1.0,), sq_mean=(bad,)),
    ):
        assert not measured.finite
        assert before.updated(measured, memory=100) is before


def test_after_4_to_64_workers_the_gain_is_right_at_once() -> None:
    # b0 = 32, V/b0 = 384, S = 1: the gain at 64 workers is 385/(384/64 + 1) = 55. Code that multiplies the variance
    # by old/new scale on a change reads (24 + 1)/(24/64 + 1) = 18.2.
    base, noise, signal = 32, 384.0 * 32, 1.0
    averages = Averages()
    for _ in range(50):
        averages = averages.updated(of(noise, signal, batch=4 * base, micro_batches=4), memory=1000 * base)
    moments = averages.moments()
    assert moments is not None
    assert gain(moments, base=base, batch=64 * base) == pytest.approx(55.0, rel=1e-9)
    averages = averages.updated(of(noise, signal, batch=64 * base, micro_batches=64), memory=1000 * base)
    moments = averages.moments()
    assert moments is not None
    assert gain(moments, base=base, batch=64 * base) == pytest.approx(55.0, rel=1e-9)


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(-1, 10), st.integers(2, 500)), min_size=1, max_size=20))
def test_averages_lie_between_their_observations_and_survive_json(steps: list[tuple[float, float, int]]) -> None:
    averages = Averages()
    for noise, signal, batch in steps:
        averages = averages.updated(of(noise, signal, batch=batch, micro_batches=2), memory=200)
    moments = averages.moments()
    assert moments is not None
    low, high = min(v for v, _, _ in steps), max(v for v, _, _ in steps)
    assert low - 1e-6 <= moments.noise <= high + 1e-6
    low, high = min(s for _, s, _ in steps), max(s for _, s, _ in steps)
    assert low - 1e-6 <= moments.signal <= high + 1e-6
    assert Averages.restore(json.loads(json.dumps(averages.state()))) == averages


def test_the_memory_is_counted_in_samples() -> None:
    # Two steps of 50 samples fade the past as much as one of 100.
    assert decay(50, 1000) ** 2 == pytest.approx(decay(100, 1000))
    old = Averages().updated(of(5, 5, batch=100, micro_batches=2), memory=1000)
    once = old.updated(of(1, 2, batch=100, micro_batches=2), memory=1000)
    twice = old
    for _ in range(2):
        twice = twice.updated(of(1, 2, batch=50, micro_batches=2), memory=1000)
    first, second = once.moments(), twice.moments()
    assert first is not None
    assert second is not None
    assert (first.noise, first.signal) == pytest.approx((second.noise, second.signal))


def test_an_observation_stands_for_the_steps_before_it_that_were_not_measured() -> None:
    # Three steps of 10 samples that pass and a measured one of 10 fade the past like a measured step of 40.
    before = Averages().updated(of(2, 3, batch=8, micro_batches=2), memory=100)
    skipping = before.passed(10).passed(10).passed(10).updated(of(5, 1, batch=10, micro_batches=2), memory=100)
    assert skipping == before.updated(of(5, 1, batch=40, micro_batches=2), memory=100)


def test_an_observation_of_few_samples_does_not_get_the_weight_of_the_large_steps_before_it() -> None:
    # Three steps of 10 pass, then one of 2 is measured: 32 samples of time, and 4 x 2 of weight.
    before = Averages().updated(of(2, 3, batch=8, micro_batches=2), memory=100)
    after = before.passed(10).passed(10).passed(10).updated(of(5, 1, batch=2, micro_batches=2), memory=100)
    keep, share = math.exp(-0.32), 1 - math.exp(-0.08)
    old = keep * (1 - math.exp(-0.08))
    assert after.weight == pytest.approx(old + share)
    moments = after.moments()
    assert moments is not None
    assert moments.noise == pytest.approx((old * 2 + share * 5) / (old + share))
    assert moments.signal == pytest.approx((old * 3 + share * 1) / (old + share))


def test_the_tails_of_epochs_do_not_drown_the_signal_where_steps_are_sampled() -> None:
    # Epochs of 50 steps of 512 samples and a tail of 2; V = 2000, S = 0.2. The estimate of S scatters by about V/B in a
    # step of two micro-batches: 4 in a step of 512, 1000 in a tail. Weighed by samples a memory of 500 steps scatters
    # by about 4/sqrt(2 x 125) = 0.25 where a quarter is measured; a tail at the weight of 4 steps adds 8 on its own.
    random, memory = np.random.default_rng(3), 500 * 512
    averages, found = Averages(), []
    for step in range(6000):
        batch = 2 if step % 51 == 50 else 512
        if averages.due(batch, memory=memory, every=4):
            signal = 0.2 + 2000 / batch * random.standard_normal()
            averages = averages.updated(of(2000, signal, batch=batch, micro_batches=2), memory=memory)
        else:
            averages = averages.passed(batch)
        moments = averages.moments()
        assert moments is not None
        found.append(moments.signal)
    assert np.std(found[2000:]) < 0.5


def measured_steps(batches: list[int], *, memory: float, every: int) -> list[int]:
    averages, found = Averages(), []
    for step, batch in enumerate(batches):
        if averages.due(batch, memory=memory, every=every):
            averages = averages.updated(of(2, 3, batch=batch, micro_batches=2), memory=memory)
            found.append(step)
        else:
            averages = averages.passed(batch)
    return found


def test_an_observation_may_stand_for_a_thirty_second_of_the_memory() -> None:
    # 3,200/32 = 100 samples: a step of 50 may pass, since with another one they are 100; a step of 51 may not.
    old = Averages(weight=0.9)
    assert [old.due(batch, memory=3200, every=99) for batch in (50, 51)] == [False, True]


def test_young_averages_measure_every_step_and_old_ones_one_in_four() -> None:
    # A memory of 3,200 samples has been seen after 101 steps of 32 (after 100 the weight is 1 - 1/e, or a rounding
    # less); an observation may stand for 100 samples. Steps of 20: three pass, and 60 + 2 x 20 would still be 100.
    assert measured_steps([32] * 101 + [20] * 9, memory=3200, every=4)[101:] == [104, 108]
    # Steps of 40: one passes, then 40 + 2 x 40 are 120.
    assert measured_steps([32] * 101 + [40] * 5, memory=3200, every=4)[101:] == [102, 104]
    # Steps of 60: two are more than 100, every one is measured.
    assert measured_steps([32] * 101 + [60] * 5, memory=3200, every=4) == [*range(106)]
    assert measured_steps([32] * 101 + [20] * 9, memory=3200, every=1) == [*range(110)]


@given(st.lists(st.integers(1, 200), min_size=150, max_size=400), st.integers(1, 6))
def test_an_observation_never_stands_for_more_than_it_may(batches: list[int], every: int) -> None:
    measured = measured_steps(batches, memory=3200, every=every)
    for before, after in pairwise(measured):
        assert after - before <= every
        assert sum(batches[before + 1 : after]) <= 100  # the size of the step after them is not known before


@pytest.mark.parametrize("every", [1, 4])
def test_averages_of_sampled_steps_are_as_good_as_they_should_be(every: int) -> None:
    # Noise drawn from an exponential of mean 2. In the long run the mean of n observations within the memory scatters
    # by about 2/sqrt(2 n): 32,000 samples of 32 are 1,000 steps, a quarter of which is measured: 0.089 of 2.
    random = np.random.default_rng(0)
    averages = Averages()
    for _ in range(20_000):
        if averages.due(32, memory=32_000, every=every):
            averages = averages.updated(of(random.exponential(2.0), 1, batch=32, micro_batches=2), memory=32_000)
        else:
            averages = averages.passed(32)
    moments = averages.moments()
    assert moments is not None
    assert moments.noise == pytest.approx(2.0, abs=3 * 2 / math.sqrt(2 * 1000 / every))


def test_layers_add_up_to_the_whole() -> None:
    layered = Measurement(batch=8, micro_batches=2, mean_sq=(5.0, 3.0), sq_mean=(4.0, 1.0))
    whole = Measurement(batch=8, micro_batches=2, mean_sq=(8.0,), sq_mean=(5.0,))
    by_layer, total = (Averages().updated(m, memory=100).moments() for m in (layered, whole))
    assert by_layer is not None
    assert total is not None
    assert (by_layer.noise, by_layer.signal) == pytest.approx((total.noise, total.signal))
    assert by_layer.layer_noise == pytest.approx((8.0, 16.0))  # V = 8 (A - N)
    assert total.layer_noise == ()


def test_averages_of_other_layers_are_refused() -> None:
    averages = Averages().updated(of(2, 3, batch=8, micro_batches=2), memory=100)
    with pytest.raises(ConfigError, match="over 1 layers, but 2 were measured"):
        averages.updated(Measurement(batch=8, micro_batches=2, mean_sq=(1.0, 2.0), sq_mean=(1.0, 1.0)), memory=100)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"weight": "much", "noise": [], "signal": [], "passed": [0, 0]},
        {"weight": 1.0, "noise": [1.0], "signal": [], "passed": [0, 0]},
        {"weight": -1.0, "noise": [1.0], "signal": [1.0], "passed": [0, 0]},
        {"weight": 1.0, "noise": [math.nan], "signal": [1.0], "passed": [0, 0]},
        {"weight": 1.0, "noise": [1.0], "signal": [1.0]},
        {"weight": 1.0, "noise": [1.0], "signal": [1.0], "passed": [8]},
        {"weight": 1.0, "noise": [1.0], "signal": [1.0], "passed": [8, -1]},
    ],
)
def test_a_damaged_state_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="damaged"):
        Averages.restore(state)


def test_a_memory_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot remember 0 samples"):
        Averages().updated(of(2, 3, batch=8, micro_batches=2), memory=0)


def test_the_noise_scale_is_infinite_without_signal() -> None:
    assert Moments(noise=8.0, signal=2.0).noise_scale == 4.0
    assert Moments(noise=8.0, signal=-1.0).noise_scale == math.inf
    assert Moments(noise=-8.0, signal=2.0).noise_scale == 0.0
