"""The decisions of `ebbflow choose`: who goes on, who needs another seed, what fits a budget."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.studies.halving import (
    Candidate,
    Pace,
    fitting,
    in_doubt,
    ladder,
    ladder_seconds,
    measured_noise,
    rank,
    rung_epochs,
    rung_seconds,
    seed_adjusted,
)

A, B, C, D = (Candidate(name, 1.0) for name in "abcd")
Table = Mapping[Candidate, Mapping[int, float | None]]

value = st.one_of(st.none(), st.floats(-10, 10, allow_nan=False).map(lambda x: round(x, 3)))


@st.composite
def tables(draw: st.DrawFn, values: st.SearchStrategy[float | None] = value) -> Table:
    """Scores of up to eight candidates; all have seed 0, some have more."""
    count = draw(st.integers(1, 8))
    return {
        Candidate(f"r{i}", 1.0): {seed: draw(values) for seed in range(draw(st.integers(1, 3)))} for i in range(count)
    }


@given(tables())
def test_a_ranking_has_every_candidate_once_and_those_that_diverged_last(scores: Table) -> None:
    order = rank(scores)
    assert sorted(order) == sorted(scores)
    diverged = [None in scores[one].values() for one in order]
    assert diverged == sorted(diverged)


@given(tables(st.floats(-10, 10)), st.floats(-100, 100))
def test_what_a_seed_does_to_all_candidates_changes_neither_their_order_nor_the_noise(
    scores: Table, effect: float
) -> None:
    shifted = {one: {s: v + effect if s == 1 and v is not None else v for s, v in runs.items()}
               for one, runs in scores.items()}  # fmt: skip
    before, after = seed_adjusted(scores), seed_adjusted(shifted)
    first = next(iter(scores))
    for one in scores:
        assert math.isclose(before[one] - before[first], after[one] - after[first], abs_tol=1e-9)
    noise, other = measured_noise(scores), measured_noise(shifted)
    assert (noise is None) == (other is None)
    if noise and other:
        assert noise.freedom == other.freedom
        assert math.isclose(noise.deviation, other.deviation, abs_tol=1e-7)


def test_a_candidate_that_has_all_seeds_keeps_its_mean_and_others_are_moved_by_the_usual_effect() -> None:
    # Seed 1 is better by 2, so on average over both seeds by 1: c, which has seed 0 only, is moved up by 1.
    scores = {A: {0: 1.0, 1: 3.0}, B: {0: 1.5, 1: 3.5}, C: {0: 1.4}, D: {0: None}}
    assert seed_adjusted(scores) == pytest.approx({A: 2.0, B: 2.5, C: 2.4, D: -math.inf})
    assert rank(scores) == [B, C, A, D]


def test_the_noise_is_that_of_the_differences_of_candidates_with_common_seeds() -> None:
    # Differences a - b: 0, 2; a - c: 1, 1; b - c: 1, -1. Variances 2, 0, 2, mean 4/3; of one run half of it, 2/3.
    noise = measured_noise({A: {0: 1.0, 1: 3.0}, B: {0: 1.0, 1: 1.0}, C: {0: 0.0, 1: 2.0}, D: {0: 9.0}})
    assert noise is not None
    assert noise.deviation == pytest.approx(math.sqrt(2 / 3))
    # Three candidates with two seeds: (3 - 1) (2 - 1) degrees of freedom, not the three pairs.
    assert noise.freedom == 2
    assert noise.margin(2) == pytest.approx(4.3027 * math.sqrt(2 / 3) / math.sqrt(2))


def test_before_the_noise_is_known_the_two_at_the_cut_get_a_seed() -> None:
    scores = {A: {0: 0.9}, B: {0: 0.8}, C: {0: 0.7}, D: {0: 0.1}}
    assert in_doubt(scores, 2, most_seeds=3) == [B, C]


def test_two_seeds_of_two_candidates_say_too_little_about_the_noise() -> None:
    # One degree of freedom: the interval of each would be 12.7 deviations of 0.07 wide, or nothing at all.
    for second in (0.85, 0.90):
        scores = {A: {0: 1.0, 1: 1.0}, B: {0: 0.9, 1: second}}
        assert measured_noise(scores) is None
        assert in_doubt(scores, 1, most_seeds=3) == [A, B]
        assert in_doubt(scores, 1, most_seeds=2) == []


def test_differences_that_are_equal_do_not_end_the_search_for_seeds() -> None:
    # Three candidates and two seeds are two degrees of freedom, and the deviation is 0: a step of the metric decides.
    scores = {A: {0: 0.9, 1: 0.8}, B: {0: 0.7, 1: 0.6}, C: {0: 0.5, 1: 0.4}}
    assert measured_noise(scores) is None
    assert in_doubt(scores, 1, most_seeds=3) == [A, B]


def test_then_all_get_one_that_are_nearer_than_two_standard_errors_to_the_other_side_of_the_cut() -> None:
    # Differences b - c: 0.10, 0.12 and 0.11: variance 0.0001, deviation of one run 0.007. b has 0.81, c has 0.70:
    # nineteen standard errors.
    scores = {A: {0: 0.9}, B: {0: 0.80, 1: 0.82, 2: 0.81}, C: {0: 0.70, 1: 0.70, 2: 0.70}, D: {0: 0.1}}
    assert in_doubt(scores, 2, most_seeds=4) == []
    # Differences 0.10, -0.06 and 0.02: variance 0.0064, deviation 0.0566. b is at 0.73 and c at 0.71: within 2 x 0.0566
    # x sqrt(2/3). Seed 1 has the effect (-0.14 + 0.02)/2 = -0.06 and seed 2 (-0.07 + 0.01)/2 = -0.03, on average -0.03,
    # so a, with seed 0 only, is at 0.92. It is compared with c: 0.21 is more than 2 x 0.0566 x sqrt(1 + 1/3) = 0.131.
    # From 0.79 - 0.03 it would be 0.05, which is less.
    close = {A: {0: 0.95}, B: {0: 0.80, 1: 0.66, 2: 0.73}, C: {0: 0.70, 1: 0.72, 2: 0.71}, D: {0: 0.1}}
    assert in_doubt(close, 2, most_seeds=4) == [B, C]
    near = {**close, A: {0: 0.79}}
    assert in_doubt(near, 2, most_seeds=4) == [A, B, C]
    assert in_doubt(near, 2, most_seeds=3) == [A]


@given(tables(), st.integers(1, 8), st.integers(1, 3))
def test_seeds_are_asked_for_only_where_they_can_change_something(scores: Table, keep: int, most: int) -> None:
    found = in_doubt(scores, keep, most_seeds=most)
    assert all(len(scores[one]) < most and None not in scores[one].values() for one in found)
    if keep >= len(scores):
        assert found == []


@given(st.integers(1, 1000))
def test_rungs_are_shorter_than_the_run_and_each_longer_than_the_one_before(epochs: int) -> None:
    lengths = rung_epochs(epochs)
    assert list(lengths) == sorted(set(lengths))
    assert 1 <= lengths[0] <= lengths[-1] <= max(1, math.ceil(epochs * 0.45))


@given(st.integers(1, 50), st.integers(1, 4))
def test_a_rung_has_at_most_as_many_candidates_as_the_one_before_and_two_at_least(count: int, rungs: int) -> None:
    counts = ladder(count, rungs)
    assert len(counts) == rungs
    assert list(counts) == sorted(counts, reverse=True)
    assert counts[-1] >= min(2, count)


paces = st.builds(Pace, start_s=st.floats(0, 10), epoch_s=st.floats(0.01, 10))


@given(st.integers(2, 24), st.integers(1, 200), paces, st.integers(1, 8), st.floats(0, 2000), st.integers(0, 3))
def test_what_is_planned_fits_and_more_time_never_means_less(
    count: int, epochs: int, pace: Pace, jobs: int, left: float, done: int
) -> None:
    lengths = rung_epochs(epochs)
    fit, rungs = fitting(count, lengths, pace, jobs, left_s=left, done=done)
    if fit:
        assert 2 <= fit <= count
        assert ladder_seconds(ladder(fit, rungs), lengths, pace, jobs, done=done) <= left
    longer, more = fitting(count, lengths, pace, jobs, left_s=2 * left + 1, done=done)
    assert (more, longer if more == rungs else math.inf) >= (rungs, fit)


@given(st.integers(0, 30), st.integers(1, 20), paces, st.integers(1, 8))
def test_twice_the_arms_take_at_most_twice_as_long(arms: int, epochs: int, pace: Pace, jobs: int) -> None:
    once, twice = (rung_seconds(n, epochs, pace, jobs) for n in (arms, 2 * arms))
    assert once <= twice <= 2 * once + 1e-9
