"""Hand-derived values, one row or more a rule; the derivation stands beside each.

The reference batch is 100, an epoch 1000 samples, the run 10 epochs: T1 = 100 reference steps.
"""

from __future__ import annotations

import itertools
import math

import pytest

from ebbflow.moments.estimate import Averages, Measurement, Moments
from ebbflow.rules.noise_rules import gain
from ebbflow.rules.rule import Rule, Scaling, StepContext, make_rule, rule_entries


def context(batch: int, *, samples: int = 0, step: int = 0, moments: Moments | None = None) -> StepContext:
    return StepContext(
        step=step,
        batch=batch,
        ref_batch=100,
        samples=samples,
        epoch_samples=1000,
        total_samples=10_000,
        moments=moments,
    )


def first(text: str, batch: int, *, samples: int = 0, moments: Moments | None = None) -> Scaling:
    rule = make_rule(text)
    return rule.scale(context(batch, samples=samples, moments=moments), rule.init())[0]


# (rule, batch, samples committed before the step) -> multiplier
ROWS = [
    ("constant", 400, 0, 1.0),
    ("linear", 400, 0, 4.0),  # 400/100
    ("linear", 50, 0, 0.5),  # below the reference batch the rate falls
    ("sqrt", 400, 0, 2.0),  # sqrt(4)
    ("sqrt", 25, 0, 0.5),  # sqrt(1/4)
    ("power(0.5)", 900, 0, 3.0),  # 9^0.5
    ("power(p=0.25)", 1600, 0, 2.0),  # 16^(1/4)
    ("power", 1600, 0, 8.0),  # 16^(3/4)
    ("power(0)", 400, 0, 1.0),  # the ends of the family: constant and linear
    ("power(1)", 400, 0, 4.0),
    # warm-up over 2 epochs = 2000 samples, from 1 to 4. The middle of the first step is at sample 200: a tenth of the
    # way, so 1 + 3/10.
    ("linear+warmup(2ep)", 400, 0, 1.3),
    ("linear+warmup(2ep)", 400, 800, 2.5),  # middle at sample 1000, half the way: 1 + 3/2
    ("linear+warmup(2ep)", 400, 1900, 4.0),  # middle at 2100, past the end
    ("linear+warmup(2ep)", 400, 2000, 4.0),
    ("linear+warmup(20steps)", 400, 800, 2.5),  # 20 reference steps = 2000 samples
    ("linear+warmup(2000samples)", 400, 800, 2.5),
    ("linear+warmup(2ep, start=0)", 400, 800, 2.0),  # from 0 to 4, half the way
    ("linear+warmup(2ep)", 50, 0, 0.5),  # below the start: at once, a warm-up never raises the rate
    ("linear+warmup(0ep)", 400, 0, 4.0),  # an empty warm-up is none
    ("lsw(2ep)", 400, 800, 2.5),  # the same by its name
    ("lsw", 400, 2300, 2.5),  # 5 epochs = 5000 samples, middle at 2500
    ("dynamic", 400, 0, 4.0),  # linear+ramp: the first step has no momentum
    ("linear+cap(3)", 400, 0, 3.0),  # min(4, 3)
    ("linear+cap(3)", 200, 0, 2.0),
    # LEGW: sqrt(4) = 2, the warm-up of 1 epoch becomes 4 epochs = 4000 samples; the middle at 200 is 1/20 of it
    ("legw(1ep)", 400, 0, 0.1),
    ("legw(1ep)", 400, 1800, 1.0),  # middle at 2000 of 4000: 2/2
    ("legw(1ep)", 400, 3800, 2.0),  # middle at 4000: over
    ("legw(1ep)", 100, 0, 0.05),  # at the reference batch: 1 x 50/1000
    ("legw(10steps)", 25, 0, 0.025),  # sqrt(1/4) = 1/2; 1000 samples become 250; 12.5/250 = 1/20
    # before anything was measured: 1 above the reference batch, the batch ratio below it
    ("adascale", 400, 0, 1.0),
    ("adascale", 50, 0, 0.5),
    ("lena", 400, 0, 1.0),
    ("lena", 50, 0, 0.5),
    ("noise(0.5)", 400, 0, 1.0),
    ("noise(0.5)", 25, 0, 0.5),  # (1/4)^(1/2)
    ("surge", 400, 0, 1.0),
    ("surge", 25, 0, 0.5),  # sqrt(1/4)
]


@pytest.mark.parametrize(("rule", "batch", "samples", "expected"), ROWS)
def test_multiplier(rule: str, batch: int, samples: int, expected: float) -> None:
    scaling = first(rule, batch, samples=samples)
    assert scaling.lr == pytest.approx(expected, rel=1e-12)
    assert scaling.gradient == 1.0


def noisy(noise: float, signal: float) -> Moments:
    return Moments(noise=noise, signal=signal)


# (rule, batch, noise V, signal mu2) -> multiplier; s2 = V/100, phi = s2/mu2
MEASURED = [
    # V = 200: s2 = 2, mu2 = 3, S = 2: (2 + 3)/(2/2 + 3) = 5/4
    ("adascale", 200, 200.0, 3.0, 1.25),
    ("adascale", 50, 200.0, 3.0, 5 / 7),  # S = 1/2: 5/(4 + 3)
    ("adascale", 150, 300.0, 1.0, 4 / 3),  # S = 3/2: (3 + 1)/(2 + 1)
    ("adascale", 800, 200.0, 0.0, 8.0),  # only noise: linear
    ("adascale", 800, 200.0, -1.0, 8.0),  # an average below zero counts as zero
    ("adascale", 800, 0.0, 3.0, 1.0),  # only signal: constant
    ("adascale", 800, 0.0, 0.0, 1.0),  # nothing is known: the cautious bound
    ("adascale", 800, 2e-10, 3e-12, 20 / 13),  # no absolute limit: s2 = 2e-12, mu2 = 3e-12, S = 8: 5/(1/4 + 3)
    # phi = 2/3, S = 2: (1 + 2/3)/(1 + 1/3) = 5/4, the same as adascale
    ("noise", 200, 200.0, 3.0, 1.25),
    ("noise(a=0.5)", 200, 200.0, 3.0, math.sqrt(1.25)),
    ("noise(0.5)", 400, 200.0, 0.0, 2.0),  # phi infinite: 4^(1/2)
    ("noise(0.5)", 400, 0.0, 1.0, 1.0),  # phi = 0: constant
    # phi = 4, S = 4, at the peak: (2 + 1/2)/(1 + 1) = 5/4
    ("surge", 400, 400.0, 1.0, 1.25),
    ("surge", 1600, 400.0, 1.0, 1.0),  # S = 16: (2 + 1/2)/(1/2 + 2) = 1: back at the base rate
    ("surge", 6400, 400.0, 1.0, 10 / 17),  # S = 64: (5/2)/(1/4 + 4) = 10/17, below it
    ("surge", 400, 100.0, 0.0, 2.0),  # only noise: sqrt(4)
    ("surge", 400, 0.0, 0.0, 1.0),  # nothing is known: as before anything was measured
    ("surge", 25, -0.5, -0.25, 0.5),
    ("surge", 25, 0.0, 1.0, 2.0),  # only signal: 1/sqrt(1/4), past the peak a smaller batch gets a larger rate
]


@pytest.mark.parametrize(("rule", "batch", "noise", "signal", "expected"), MEASURED)
def test_multiplier_from_noise_and_signal(rule: str, batch: int, noise: float, signal: float, expected: float) -> None:
    assert first(rule, batch, moments=noisy(noise, signal)).lr == pytest.approx(expected, rel=1e-12)


def test_surge_says_when_the_batch_is_beyond_the_noise_scale() -> None:
    # The noise scale is 400/1 = 400 samples.
    batches = (399, 400, 401)
    assert [first("surge", batch, moments=noisy(400.0, 1.0)).stats["past_peak"] for batch in batches] == [0, 0, 1]


def test_what_adascale_has_to_say() -> None:
    stats = first("adascale", 200, moments=noisy(200.0, 3.0)).stats
    assert stats == {"gain": 1.25, "noise": 200.0, "signal": 3.0, "noise_scale": pytest.approx(200 / 3)}
    assert "noise_scale" not in first("adascale", 200, moments=noisy(200.0, -1.0)).stats, "it would be infinite"


def test_adascale_counts_progress_in_gain_when_asked() -> None:
    moments = noisy(200.0, 3.0)
    assert first("adascale", 200, moments=moments).progress is None
    assert first("adascale(progress=gain)", 200, moments=moments).progress == 1.25
    assert first("adascale(progress=gain)", 50).progress == 0.5  # unmeasured: the multiplier all the same


def test_adam_follows_the_batch_as_a_whole() -> None:
    # S = 4: rate x 2, betas to the 4th power, eps / 2
    assert first("adamsde", 400) == Scaling(lr=2.0, betas=4.0, eps=0.5)
    assert first("adamsde(beta1=false)", 400) == Scaling(lr=2.0, betas=(1.0, 4.0), eps=0.5)
    assert first("adamsde", 25) == Scaling(lr=0.5, betas=0.25, eps=2.0)


TWO_LAYERS = Moments(noise=700.0, signal=4.0, layer_noise=(200.0, 500.0), layer_signal=(3.0, 1.0))


def test_lena_on_two_layers() -> None:
    # B = 200. First layer: top = 3 + 200/100 = 5, bot = 3 + 200/200 = 4: 5/4.
    # Second: top = 1 + 5 = 6, bot = 1 + 2.5 = 3.5: 12/7. Whole model: (7 + 4)/(3.5 + 4) = 22/15.
    scaling = first("lena(eps=0)", 200, moments=TWO_LAYERS)
    assert scaling.lr == pytest.approx((5 / 4, 12 / 7), rel=1e-12)
    assert scaling.stats["gain"] == pytest.approx(22 / 15)
    assert (scaling.stats["gain_min"], scaling.stats["gain_max"]) == pytest.approx((5 / 4, 12 / 7))
    # eps = 1 on both sides: 6/5 and 7/4.5
    assert first("lena(eps=1)", 200, moments=TWO_LAYERS).lr == pytest.approx((6 / 5, 14 / 9), rel=1e-12)


def test_lena_keeps_to_its_bounds() -> None:
    # No signal, or an estimate below zero: the batch ratio. No gradient at all: eps/eps = 1.
    moments = Moments(noise=300.0, signal=-1.0, layer_noise=(200.0, 100.0, 0.0), layer_signal=(0.0, -1.0, 0.0))
    # without eps the first would be 2/(2/8) = 8 exactly; with it (2 + 1e-6)/(0.25 + 1e-6), a little less
    assert first("lena", 800, moments=moments).lr == pytest.approx((8.0, 8.0, 1.0), rel=1e-4)
    assert first("lena", 50, moments=moments).lr == pytest.approx((0.5, 0.5, 1.0), rel=1e-4)


def test_lena_on_half_of_the_layers() -> None:
    # Figure 4: the layers that are chosen have their own gains, the others that of the model. Of two layers one is
    # chosen; which one depends on the seed.
    own, whole = (5 / 4, 12 / 7), 22 / 15  # as above
    cases = {(own[0], whole), (whole, own[1])}
    found = {first(f"lena(eps=0, fraction=0.5, seed={seed})", 200, moments=TWO_LAYERS).lr for seed in range(20)}
    assert sorted(found) == [pytest.approx(case) for case in sorted(cases)]
    assert first("lena(eps=0, fraction=0)", 200, moments=TWO_LAYERS).lr == pytest.approx((whole, whole))
    assert first("lena(eps=0, fraction=1)", 200, moments=TWO_LAYERS).lr == pytest.approx(own)
    # Of ten equal layers whose model has another gain, 3/10 have their own.
    ten = Moments(noise=700.0, signal=4.0, layer_noise=(200.0,) * 10, layer_signal=(3.0,) * 10)
    layers = first("lena(eps=0, fraction=0.3)", 200, moments=ten).layers
    assert sorted(layers) == pytest.approx([5 / 4] * 3 + [whole] * 7)
    assert layers == first("lena(eps=0, fraction=0.3)", 200, samples=200, moments=ten).layers, "the same in every step"


def test_a_model_of_one_tensor_has_one_multiplier() -> None:
    assert first("lena(eps=0)", 200, moments=noisy(200.0, 3.0)).lr == pytest.approx(1.25)


def test_lena_is_the_papers_ratio_of_averages() -> None:
    """Eq. 4 and 8: EMA(mean |g_i|^2)/EMA(|mean g_i|^2), with four equal micro-batches of the reference batch."""
    # A and N of two layers in three steps; |mean g|^2 is never above the mean of |g_i|^2.
    seen = [((5.0, 9.0), (4.0, 3.0)), ((6.0, 8.0), (2.0, 2.5)), ((4.0, 7.0), (3.0, 2.0))]
    averages, top, bottom, memory = Averages(), [0.0, 0.0], [0.0, 0.0], 1000.0
    keep = math.exp(-400 / memory)
    for mean_sq, sq_mean in seen:
        measured = Measurement(batch=400, micro_batches=4, mean_sq=mean_sq, sq_mean=sq_mean)
        averages = averages.updated(measured, memory=memory)
        top = [keep * old + (1 - keep) * new for old, new in zip(top, mean_sq, strict=True)]
        bottom = [keep * old + (1 - keep) * new for old, new in zip(bottom, sq_mean, strict=True)]
    scaling = first("lena(eps=0)", 400, moments=averages.moments())
    assert scaling.lr == pytest.approx([a / n for a, n in zip(top, bottom, strict=True)], rel=1e-12)


def test_lena_is_right_at_once_when_the_batch_changes() -> None:
    # Four micro-batches: A = 5, N = 4. V = 400 (5 - 4)/3, in micro-batch units V/100 = 4/3, mu2 = 4 - 1/3 = 11/3.
    # With 8 workers the denominator is 11/3 + 4/3/8 = 23/6, the numerator still 5: 30/23.
    averages = Averages().updated(
        Measurement(batch=400, micro_batches=4, mean_sq=(5.0, 5.0), sq_mean=(4.0, 4.0)), memory=1e5
    )
    assert first("lena(eps=0)", 400, moments=averages.moments()).lr == pytest.approx((5 / 4,) * 2, rel=1e-9)
    assert first("lena(eps=0)", 800, moments=averages.moments()).lr == pytest.approx((30 / 23,) * 2, rel=1e-9)


# Over several steps ------------------------------------------------------------------------------------------------


def follow(
    text: str, batches: list[int], *, moments: Moments | None = None, samples: int = 0
) -> list[tuple[float | tuple[float, ...], float]]:
    """(multiplier, the modifier's own number) of each step."""
    rule: Rule = make_rule(text)
    state, found = rule.init(), []
    for step, batch in enumerate(batches):
        scaling, state = rule.scale(context(batch, samples=samples, step=step, moments=moments), state)
        own = {**scaling.stats}
        found.append((scaling.lr, own.get("ramp", own.get("warming", math.nan))))
        samples += batch
    return found


def multipliers(text: str, batches: list[int], **more: object) -> list[float | tuple[float, ...]]:
    return [lr for lr, _ in follow(text, batches, **more)]  # type: ignore[arg-type]


def test_the_state_aware_warm_up_of_linear_adds_the_measured_gain() -> None:
    # s2 = 200/100 = 2, mu2 = 3, S = 4: the gain is 5/(2/4 + 3) = 10/7, added before the test. theta = 0.04 x 100 = 4:
    # p = 10/7, 20/7, 30/7. Multipliers 4 x 10/28, 4 x 20/28, and 4 from then on.
    found = follow("linear+statewarmup(0.04)", [400] * 4, moments=noisy(200.0, 3.0))
    assert [lr for lr, _ in found] == pytest.approx([10 / 7, 20 / 7, 4.0, 4.0])
    assert [warming for _, warming in found] == [1.0, 1.0, 0.0, 0.0]
    stats = first("linear+statewarmup", 400, moments=noisy(200.0, 3.0)).stats
    assert (stats["gain"], stats["noise"], stats["signal"]) == pytest.approx((10 / 7, 200.0, 3.0))


@pytest.mark.parametrize("rule", ["constant", "sqrt", "power(0.25)", "linear", "adascale", "noise(0.5)", "surge"])
def test_the_state_aware_warm_up_takes_as_long_with_every_rule_of_the_whole_model(rule: str) -> None:
    # The gain is 10/7 as above, theta = 4: factors 5/14, 10/14, 1 of whatever the rule says.
    moments = noisy(200.0, 3.0)
    alone = multipliers(rule, [400] * 3, moments=moments)
    warmed = multipliers(f"{rule}+statewarmup(0.04)", [400] * 3, moments=moments)
    assert [m / full for m, full in zip(warmed, alone, strict=True)] == pytest.approx([5 / 14, 10 / 14, 1.0])


def test_much_noise_ends_the_warm_up_of_linear_soon_and_much_signal_late() -> None:
    # theta = 8. Only noise: the gain is S = 4, p = 4, 8, over at the second step. Only signal: the gain is 1, p = 1,
    # 2, ..., over at the eighth. So is it while nothing is known.
    batches = [400] * 9
    ends = [
        [warming for _, warming in follow("linear+statewarmup(0.08)", batches, moments=moments)].index(0.0)
        for moments in (noisy(200.0, 0.0), noisy(0.0, 3.0), None)
    ]
    assert ends == [1, 7, 7]


def test_unmeasured_steps_below_the_reference_batch_add_their_ratio() -> None:
    # theta = 1: p = 1/2, 1; linear gives 1/2.
    assert multipliers("linear+statewarmup(0.01)", [50] * 2) == [0.25, 0.5]


def test_the_state_aware_warm_up_by_the_multiplier() -> None:
    # theta = 0.1 x 100 = 10; linear gives 4 a step, added before the test, whatever the noise: p = 4, 8, 12.
    # Multipliers 4 x 4/10, 4 x 8/10, and 4 from then on.
    found = follow("linear+statewarmup(0.1, by=multiplier)", [400] * 4, moments=noisy(200.0, 3.0))
    assert [lr for lr, _ in found] == pytest.approx([1.6, 3.2, 4.0, 4.0])
    assert [warming for _, warming in found] == [1.0, 1.0, 0.0, 0.0]


def test_the_state_aware_warm_up_reaches_theta_exactly() -> None:
    # theta = 8: p = 4, 8; at p = theta the factor is 1 and the warm-up is over
    assert follow("linear+statewarmup(0.08, by=multiplier)", [400] * 2) == [(2.0, 1.0), (4.0, 0.0)]
    assert follow("linear+statewarmup(0.08)", [400] * 2, moments=noisy(1.0, 0.0)) == [(2.0, 1.0), (4.0, 0.0)]


def test_a_layer_at_its_bound_adds_the_gain_of_the_model() -> None:
    # B = 200, S = 2. First layer: no signal, s2 = 2: the gain is the bound, 2. Second: s2 = 2, mu2 = 3: 5/(1 + 3).
    # Whole model: s2 = 4, mu2 = 3: 7/(2 + 3) = 7/5. theta = 0.04 x 100 = 4: p1 = 7/5, p2 = 5/4.
    moments = Moments(noise=400.0, signal=3.0, layer_noise=(200.0, 200.0), layer_signal=(0.0, 3.0))
    (lr, _), *_ = follow("lena(eps=0)+statewarmup(0.04)", [200], moments=moments)
    assert lr == pytest.approx((2 * 7 / 20, 5 / 4 * 5 / 16))
    # With by=multiplier the layer adds its own 2.
    (lr, _), *_ = follow("lena(eps=0)+statewarmup(0.04, by=multiplier)", [200], moments=moments)
    assert lr == pytest.approx((2 * 2 / 4, 5 / 4 * 5 / 16))


def test_the_gain_without_signal_is_the_ratio_to_the_last_digit() -> None:
    # 0.1/(0.1/ratio) may be off by rounding; a layer at its bound must be recognised as such.
    for ratio in (3, 6.625, 7, 49, 1 / 3):
        assert all(gain(noise, signal, ratio) == ratio for noise in (0.1, 1 / 3, 7e-9) for signal in (0.0, -1.0))


def test_layers_end_their_warm_up_one_by_one() -> None:
    # theta = 0.04 x 100 = 4. The layers gain 5/4 and 12/7 a step:
    # p1 = 1.25, 2.5, 3.75, 5    -> factors 0.3125, 0.625, 0.9375, 1
    # p2 = 12/7, 24/7, 36/7      -> factors 3/7, 6/7, 1, 1
    found = follow("lena(eps=0)+statewarmup(0.04)", [200] * 4, moments=TWO_LAYERS)
    factors = [(0.3125, 3 / 7), (0.625, 6 / 7), (0.9375, 1.0), (1.0, 1.0)]
    for (lr, _), (low, high) in zip(found, factors, strict=True):
        assert lr == pytest.approx((1.25 * low, 12 / 7 * high))
    assert [warming for _, warming in found] == [2.0, 2.0, 1.0, 0.0]


def test_layers_that_are_not_known_yet_warm_up_together() -> None:
    # The first step is unmeasured: lena gives 1 for the model, p = 1, 1 x 1/4. Then the layers go their own ways:
    # p = 1 + 5/4 = 9/4 and 1 + 12/7 = 19/7.
    rule = make_rule("lena(eps=0)+statewarmup(0.04)")
    scaling, state = rule.scale(context(200), rule.init())
    assert (scaling.lr, scaling.stats["warming"]) == (0.25, 1.0)
    scaling, _ = rule.scale(context(200, samples=200, moments=TWO_LAYERS), state)
    assert scaling.lr == pytest.approx((5 / 4 * 9 / 16, 12 / 7 * 19 / 28))


def test_adascale_with_the_state_aware_warm_up_adds_its_gain() -> None:
    # gain 5/4, theta = 2: p = 1.25, 2.5
    assert multipliers("adascale+statewarmup(0.02)", [200] * 2, moments=noisy(200.0, 3.0)) == pytest.approx(
        [1.25 * 0.625, 1.25]
    )


def test_a_ramp_after_one_increase() -> None:
    # 100 -> 200 at step 1: k = 2, T = 16. Eq. 6: 1 + (t/16)(2 - 1), and 2 from t = 16 on.
    found = follow("linear+ramp", [100] + [200] * 20, samples=7)
    expected = [1.0] + [1 + t / 16 for t in range(16)] + [2.0] * 4
    assert [lr for lr, _ in found] == pytest.approx(expected)
    assert [part for _, part in found] == pytest.approx([1.0] + [m / 2 for m in expected[1:]])


def test_a_decrease_is_applied_at_once() -> None:
    assert multipliers("dynamic", [400, 100, 100, 50], samples=7) == [4.0, 1.0, 1.0, 0.5]


def test_an_increase_inside_a_ramp_starts_from_where_the_ramp_is() -> None:
    # 100 -> 200: k = 2, T = 16: 1, 17/16, 18/16, 19/16 at t = 0..3. At t = 4 the old ramp is at 20/16 = 1.25 when the
    # batch becomes 500: m* = 5, k = 5/1.25 = 4, T = 32: 1.25 + 3.75 t/32.
    found = multipliers("linear+ramp", [100] + [200] * 4 + [500] * 40, samples=7)
    first_ramp = [1 + t / 16 for t in range(4)]
    second = [1.25 + 3.75 * min(t, 32) / 32 for t in range(40)]
    assert found == pytest.approx([1.0, *first_ramp, *second])


def test_a_decrease_inside_a_ramp_ends_it_or_shortens_it() -> None:
    # 100 -> 400: k = 4, T = 32: 1 + 3t/32, at t = 8: 1.75. Down to 150: m* = 1.5 <= 1.75, at once, and it stays.
    found = multipliers("linear+ramp", [100] + [400] * 8 + [150] * 3, samples=7)
    assert found == pytest.approx([1.0, *(1 + 3 * t / 32 for t in range(8)), 1.5, 1.5, 1.5])
    # Down to 350 instead: m* = 3.5 is still above 1.75, so a new ramp leads there: k = 2, T = 16.
    found = multipliers("linear+ramp", [100] + [400] * 8 + [350] * 20, samples=7)
    assert found[9:] == pytest.approx([1.75 + 1.75 * min(t, 16) / 16 for t in range(20)])


def test_a_batch_that_grows_at_every_step_is_followed_by_its_ramp() -> None:
    # Each change starts from where the old ramp has got to, so the rate keeps moving: 100, 110, 120.
    # Step 1: 1.0 (t = 0), k = 1.1, T = 8.8. Step 2: the old ramp is at 1 + 0.1/8.8; k = 1.2/that.
    found = multipliers("linear+ramp", [100, 110, 120, 130], samples=7)
    at_2 = 1 + 0.1 / 8.8
    at_3 = at_2 + (1.2 - at_2) / (8 * 1.2 / at_2)
    assert found == pytest.approx([1.0, 1.0, at_2, at_3])


def test_the_short_last_step_of_an_epoch_starts_no_ramp() -> None:
    # Epochs of 1000 samples in steps of 300: the fourth has the last 100. Its rate falls; the next one is 3 again.
    assert multipliers("linear+ramp", [300, 300, 300, 100, 300]) == [3.0, 3.0, 3.0, 1.0, 3.0]
    # Inside a ramp (100 -> 300 at step 1, k = 3, T = 24) the tail takes the smaller of its own rate and the ramp's.
    found = multipliers("linear+ramp", [100, 300, 300, 300, 300], samples=900)
    assert found[:4] == pytest.approx([1.0, 1.0, 1 + 2 / 24, 1 + 4 / 24])
    found = multipliers("linear+ramp", [100, 300, 300, 100, 300], samples=200)  # the fourth step ends the epoch
    assert found == pytest.approx([1.0, 1.0, 1 + 2 / 24, 1.0, 1 + 4 / 24])


def test_a_step_that_leaves_two_samples_to_the_last_one_of_an_epoch_starts_no_ramp() -> None:
    # 1000 samples in steps of 333: one would be left, so the third step takes 332 and the fourth two.
    assert multipliers("linear+ramp", [333, 333, 332, 2, 333]) == [3.33, 3.33, 3.32, 0.02, 3.33]
    # Inside a ramp (100 -> 333 at step 1, k = 3.33, T = 26.64: 2.33/26.64 per step) it continues after them.
    found = multipliers("linear+ramp", [100, 333, 333, 332, 2, 333], samples=900)
    climb = 2.33 / 26.64
    assert found == pytest.approx([1.0, 1.0, 1 + climb, 1 + 2 * climb, 0.02, 1 + 2 * climb])
    # A fleet of two samples is given the third of three, and 2 again in the next epoch.
    assert multipliers("linear+ramp", [2, 3, 2], samples=995) == [0.02, 0.02, 0.02]
    # Elsewhere one sample less is a decrease, and the way back an increase: k = 333/332, from 3.32.
    assert multipliers("linear+ramp", [333, 332, 333], samples=7) == [3.33, 3.32, 3.32]


def test_a_ramp_scales_a_rule_that_moves_at_every_step() -> None:
    # Gains 1.25 at S = 2 (V = 200, mu2 = 3); the reference batch before it. k = 1.25, T = 10, c from 0.8 to 1.
    rule = make_rule("adascale+ramp")
    _, state = rule.scale(context(100, samples=7, moments=noisy(200.0, 3.0)), rule.init())
    found = []
    for step, signal in enumerate([3.0, 3.0, 0.0, 3.0]):
        scaling, state = rule.scale(context(200, samples=107 + 200 * step, moments=noisy(200.0, signal)), state)
        found.append(scaling.lr)
    # c = 0.8, 0.82, 0.84, 0.86; the third step has gain 2: the ramp continues and does not start again
    assert found == pytest.approx([1.25 * 0.8, 1.25 * 0.82, 2.0 * 0.84, 1.25 * 0.86])


def test_layers_have_ramps_of_their_own() -> None:
    # 100 -> 200: the layers go from 1 to 5/4 and 12/7. k = 5/4, T = 10 and k = 12/7, T = 96/7.
    found = multipliers("lena(eps=0)+ramp", [100, 200, 200, 200], samples=7, moments=TWO_LAYERS)
    for t, lr in enumerate(found[1:]):
        assert lr == pytest.approx((1 + 0.25 * t / 10, 1 + 5 / 7 * t * 7 / 96))


def test_legw_does_not_fall_back_into_its_warm_up() -> None:
    # Over at the reference batch after 1000 samples; then the batch is 16 times as large, whose own warm-up would
    # last 16000 samples.
    assert multipliers("legw(1ep)", [100, 1600], samples=1000) == [1.0, 4.0]
    assert multipliers("legw(1ep)", [100, 1600], samples=950) == [1.0, 4.0]  # the middle at 1000: just over
    assert multipliers("legw(1ep)", [1600], samples=1100) == pytest.approx([4 * 1900 / 16000])  # it never ended


def test_inside_moves_the_multiplier_into_the_gradient() -> None:
    assert first("linear+inside", 400) == Scaling(lr=1.0, gradient=4.0)
    scaling = first("lena(eps=0)+inside", 200, moments=TWO_LAYERS)
    assert scaling.lr == 1.0
    assert scaling.gradient == pytest.approx((5 / 4, 12 / 7))
    assert first("linear+warmup(2ep)+inside", 400, samples=800) == Scaling(gradient=2.5)
    assert first("linear+inside+inside", 400) == Scaling(gradient=4.0), "twice is once"


def test_a_warm_up_of_its_own_is_recorded_for_each_layer() -> None:
    # The run has 100 reference steps, so that theta is 1.5; the gains of the first step are 5/4 and 12/7.
    assert first("lena(eps=0)+statewarmup(0.015)", 200, moments=TWO_LAYERS).warm_up == pytest.approx((5 / 6, 1.0))
    assert first("adascale+statewarmup(0.015)", 200, moments=TWO_LAYERS).warm_up is None


def test_keepdecay_keeps_the_decay_of_a_sample() -> None:
    # lambda S/m: linear 4/4, square root 4/2, constant 4/1
    assert first("linear+keepdecay", 400).weight_decay == 1.0
    assert first("sqrt+keepdecay", 400) == Scaling(lr=2.0, weight_decay=2.0)
    assert first("constant+keepdecay", 400).weight_decay == 4.0
    assert first("sqrt+keepdecay", 25) == Scaling(lr=0.5, weight_decay=0.5)  # (1/4)/(1/2)
    # inside the momentum or outside, m is the same
    assert first("sqrt+inside+keepdecay", 400) == first("sqrt+keepdecay+inside", 400)
    # layers of 5/4 and 12/7: mean 83/56, S = 2, so 112/83
    assert first("lena(eps=0)+keepdecay", 200, moments=TWO_LAYERS).weight_decay == pytest.approx(112 / 83)


def test_a_cap_holds_for_each_layer() -> None:
    assert first("lena(eps=0)+cap(1.5)", 200, moments=TWO_LAYERS).lr == pytest.approx((5 / 4, 1.5))


def test_every_registered_name_is_in_this_file() -> None:
    rows = [row[0] for row in ROWS] + [row[0] for row in MEASURED]
    several = "adamsde ramp inside keepdecay statewarmup auto"  # tests of their own, above and in tests/rules
    text = " ".join([*rows, several])
    own = [entry.name for entry in rule_entries() if entry.make.__module__.startswith("ebbflow.")]
    assert [name for name in own if name not in text] == []


# Published comparisons are text ----------------------------------------------------------------------------------


def test_all_of_lenas_table_2_is_text() -> None:
    rules, warmups = ("linear", "adascale", "lena"), ("", "+warmup(5ep)", "+statewarmup(0.05)")
    for rule, warmup in itertools.product(rules, warmups):
        scaling = first(f"{rule}{warmup}", 200, moments=TWO_LAYERS)
        assert len(scaling.layers) == (2 if rule == "lena" else 1)


def test_all_methods_of_dynamic_sgd_are_text() -> None:
    # static and fixed mini-batch are policies of the plan (the batch stays): any rule then changes nothing
    assert first("linear", 100) == Scaling()
    # a batch twice as large from the second step on: at once, by a ramp, inside the momentum
    assert multipliers("linear", [100, 200, 200]) == [1.0, 2.0, 2.0]
    assert multipliers("dynamic", [100, 200, 200]) == multipliers("linear+ramp", [100, 200, 200])
    assert multipliers("linear+inside", [100, 200, 200]) == [1.0, 1.0, 1.0]


def test_a_capped_step_is_worth_no_more_than_the_cap_where_the_schedule_follows_the_gain() -> None:
    # Noise alone: r = S = 4, so that the rate is that of the linear rule and the step worth 4 reference steps.
    noise = noisy(1.0, 0.0)
    assert first("adascale(progress=gain)", 400, moments=noise).progress == pytest.approx(4)
    assert first("adascale(progress=gain)+cap(3)", 400, moments=noise).progress == 3
    assert first("adascale(progress=gain)+cap(5)", 400, moments=noise).progress == pytest.approx(4)
    assert first("adascale+cap(3)", 400, moments=noise).progress is None
