"""Advancing by segments equals making every step by itself, on any trace and with any recovery."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from drawing_examples import examples
from ebbflow.core.units import Seconds
from ebbflow.simulate.recovery import CheckpointRecovery, Ideal, Recovery, StepRecovery
from ebbflow.simulate.scenario import TrainingWork
from ebbflow.simulate.skip import simulate_segments
from simulate.naive import NaiveSimulator, assert_same, fleets, recoveries, segments_of, works


@examples(400)
@given(
    fleet=fleets,
    recovery=recoveries,
    work=works,
    batch=st.integers(1, 5),
    step=st.sampled_from([0.6, 1.0, 2.5]),
    more=st.sampled_from([0.0, 0.13]),
    fixed=st.sampled_from([0.0, 0.3, 1.0]),
    skip_from=st.sampled_from([1, 10**9]),
)
def test_a_simulation_by_segments_equals_one_step_by_step(
    fleet: list[tuple[float, int]], recovery: Recovery, work: TrainingWork, batch: int, step: float, more: float,
    fixed: float, skip_from: int,
) -> None:  # fmt: skip
    segments = segments_of(fleet, recovery, batch=batch, step=step, more=more, fixed=fixed)
    assert_same(
        simulate_segments(segments, work, skip_from=skip_from, segments_per_epoch=0),
        NaiveSimulator(segments, work).run(),
    )


@examples(200)
@given(
    fleet=st.lists(st.tuples(st.floats(0.05, 30.0), st.integers(0, 4)), min_size=2, max_size=12),
    recovery=recoveries,
    step=st.sampled_from([0.6, 2.5]),
    more=st.sampled_from([0.0, 0.13]),
    epoch=st.integers(300, 10**6),
)
def test_skipping_within_long_epochs_equals_a_simulation_step_by_step(
    fleet: list[tuple[float, int]], recovery: Recovery, step: float, more: float, epoch: int
) -> None:
    segments = segments_of(fleet, recovery, batch=3, step=step, more=more, fixed=0.4)
    work = TrainingWork(epoch=epoch, needed=1e9)  # never done: the whole trace is used
    assert_same(
        simulate_segments(segments, work, skip_from=1, segments_per_epoch=0), NaiveSimulator(segments, work).run()
    )


@given(fleet=fleets, work=works, batch=st.integers(1, 5), skip_from=st.sampled_from([1, 10**9]))
@example(fleet=[(1.8, 1), (1.5, 0), (9.0, 2)], work=TrainingWork(epoch=9, needed=20.0), batch=2, skip_from=1)
def test_steps_on_a_grid_equal_a_simulation_step_by_step(
    fleet: list[tuple[float, int]], work: TrainingWork, batch: int, skip_from: int
) -> None:
    segments = segments_of(fleet, Ideal(), batch=batch, step=0.6, more=0.0, fixed=1.0, grid=True)
    assert_same(
        simulate_segments(segments, work, skip_from=skip_from, segments_per_epoch=0),
        NaiveSimulator(segments, work).run(),
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "recovery",
    [
        Ideal("finish"),
        Ideal("lose"),
        StepRecovery(detect=Seconds(0.7), restart=Seconds(0.5), join=Seconds(1.1)),
        StepRecovery(detect=Seconds(0.7), notice=Seconds(0.85)),
        CheckpointRecovery(every=Seconds(2.5), write=Seconds(1.7), restart=Seconds(1.3), detect=Seconds(0.2)),
        CheckpointRecovery(every=Seconds(4.0), write=Seconds(0.9), restart=Seconds(0.0), notice=Seconds(1.75)),
    ],
    ids=str,
)
def test_skipping_most_of_a_long_trace_equals_advancing_segment_by_segment(seed: int, recovery: Recovery) -> None:
    # Times in tenths: ends of steps fall on changes again and again. Some segments are empty, some shorter than a
    # step, neighbours differ, and about forty epochs end.
    rng = np.random.default_rng(seed)
    lengths, workers = rng.integers(1, 200, 2000) / 10, np.cumsum(rng.integers(1, 5, 2000)) % 5
    fleet = list(zip(lengths.tolist(), workers.tolist(), strict=True))
    segments = segments_of(fleet, recovery, batch=3, step=0.6, more=0.1 * (seed + 1), fixed=0.5)
    work = TrainingWork(epoch=3001 + seed, needed=1e9)
    skipped, advanced = (
        simulate_segments(segments, work, skip_from=1),
        simulate_segments(segments, work, skip_from=10**9),
    )
    assert len(skipped.blocks) > 10 > len(advanced.blocks)
    assert skipped.time == pytest.approx(advanced.time, rel=1e-12)
    for name in ("waiting", "lost", "restart", "checkpoint"):
        assert getattr(skipped, name) == pytest.approx(getattr(advanced, name), abs=1e-6), name
    for name in ("segments", "counts", "sizes", "seconds"):
        np.testing.assert_array_equal(getattr(skipped.runs(), name), getattr(advanced.runs(), name), err_msg=name)
    np.testing.assert_allclose(skipped.runs().starts, advanced.runs().starts, atol=1e-6)
