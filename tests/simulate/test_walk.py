"""The walk from event to event equals one that takes every step by itself, on any trace and with any recovery."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ebbflow.core.units import Seconds
from ebbflow.simulate.legs import Work
from ebbflow.simulate.recovery import Checkpoint, Ideal, PerStep, Recovery
from ebbflow.simulate.walk import walk
from simulate.naive import Naive, assert_same, legs_of, recoveries, stretches, works


@settings(max_examples=400)
@given(
    stretches=stretches,
    recovery=recoveries,
    work=works,
    batch=st.integers(1, 5),
    step=st.sampled_from([0.6, 1.0, 2.5]),
    more=st.sampled_from([0.0, 0.13]),
    fixed=st.sampled_from([0.0, 0.3, 1.0]),
    leap_from=st.sampled_from([1, 10**9]),
)
def test_the_walk_equals_a_walk_step_by_step(
    stretches: list[tuple[float, int]], recovery: Recovery, work: Work, batch: int, step: float, more: float,
    fixed: float, leap_from: int,
) -> None:  # fmt: skip
    legs = legs_of(stretches, recovery, batch=batch, step=step, more=more, fixed=fixed)
    assert_same(walk(legs, work, leap_from=leap_from, leap_over=0), Naive(legs, work).run())


@settings(max_examples=200)
@given(
    stretches=st.lists(st.tuples(st.floats(0.05, 30.0), st.integers(0, 4)), min_size=2, max_size=12),
    recovery=recoveries,
    step=st.sampled_from([0.6, 2.5]),
    more=st.sampled_from([0.0, 0.13]),
    epoch=st.integers(300, 10**6),
)
def test_leaps_over_long_epochs_equal_a_walk_step_by_step(
    stretches: list[tuple[float, int]], recovery: Recovery, step: float, more: float, epoch: int
) -> None:
    legs = legs_of(stretches, recovery, batch=3, step=step, more=more, fixed=0.4)
    work = Work(epoch=epoch, needed=1e9)  # never done: all of the trace is followed
    assert_same(walk(legs, work, leap_from=1, leap_over=0), Naive(legs, work).run())


@given(stretches=stretches, work=works, batch=st.integers(1, 5), leap_from=st.sampled_from([1, 10**9]))
@example(stretches=[(1.8, 1), (1.5, 0), (9.0, 2)], work=Work(epoch=9, needed=20.0), batch=2, leap_from=1)
def test_steps_on_a_grid_equal_a_walk_step_by_step(
    stretches: list[tuple[float, int]], work: Work, batch: int, leap_from: int
) -> None:
    legs = legs_of(stretches, Ideal(), batch=batch, step=0.6, more=0.0, fixed=1.0, grid=True)
    assert_same(walk(legs, work, leap_from=leap_from, leap_over=0), Naive(legs, work).run())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "recovery",
    [
        Ideal("finish"),
        Ideal("lose"),
        PerStep(detect=Seconds(0.7), restart=Seconds(0.5), join=Seconds(1.1)),
        PerStep(detect=Seconds(0.7), notice=Seconds(0.85)),
        Checkpoint(every=Seconds(2.5), write=Seconds(1.7), restart=Seconds(1.3), detect=Seconds(0.2)),
        Checkpoint(every=Seconds(4.0), write=Seconds(0.9), restart=Seconds(0.0), notice=Seconds(1.75)),
    ],
    ids=str,
)
def test_leaps_over_a_long_trace_equal_a_walk_from_stretch_to_stretch(seed: int, recovery: Recovery) -> None:
    # Times in tenths: ends of steps fall on changes again and again. Some stretches are empty, some shorter than a
    # step, neighbours differ, and about forty epochs end on the way.
    rng = np.random.default_rng(seed)
    lengths, workers = rng.integers(1, 200, 2000) / 10, np.cumsum(rng.integers(1, 5, 2000)) % 5
    stretches = list(zip(lengths.tolist(), workers.tolist(), strict=True))
    legs = legs_of(stretches, recovery, batch=3, step=0.6, more=0.1 * (seed + 1), fixed=0.5)
    work = Work(epoch=3001 + seed, needed=1e9)
    leapt, walked = walk(legs, work, leap_from=1), walk(legs, work, leap_from=10**9)
    assert len(leapt.blocks) > 10 > len(walked.blocks)
    assert leapt.time == pytest.approx(walked.time, rel=1e-12)
    for name in ("waiting", "lost", "restart", "checkpoint"):
        assert getattr(leapt, name) == pytest.approx(getattr(walked, name), abs=1e-6), name
    for name in ("legs", "counts", "sizes", "seconds"):
        np.testing.assert_array_equal(getattr(leapt.runs(), name), getattr(walked.runs(), name), err_msg=name)
    np.testing.assert_allclose(leapt.runs().starts, walked.runs().starts, atol=1e-6)
