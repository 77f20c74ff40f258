from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.errors import PlanError
from ebbflow.plan.batch_plan import BatchPlan, cut_step
from ebbflow.traces.availability import Trace


@pytest.mark.parametrize(
    ("requested", "remaining", "taken"),
    [
        (8, 100, 8),
        (8, 8, 8),
        (8, 3, 3),
        (8, 1, 1),  # an epoch of one sample has no choice
        (8, 9, 7),  # 9 - 8 = 1 would be alone: 7 and 2
        (3, 4, 2),  # 2 and 2
        (2, 3, 3),  # 1 and 2 would be a step of one sample now, 2 and 1 later: take all three
        (2, 4, 2),
        (1, 2, 1),  # single samples were asked for
        (1, 1, 1),
    ],
)
def test_a_step_at_the_end_of_an_epoch(requested: int, remaining: int, taken: int) -> None:
    assert cut_step(requested, remaining) == taken


@given(st.lists(st.integers(2, 9), min_size=1, max_size=6), st.integers(2, 200))
def test_no_step_holds_one_lone_sample_and_an_epoch_is_complete(sizes: list[int], epoch: int) -> None:
    taken, remaining, step = [], epoch, 0
    while remaining:
        taken.append(cut_step(sizes[step % len(sizes)], remaining))
        remaining -= taken[-1]
        step += 1
    assert sum(taken) == epoch
    assert min(taken) >= 2


def count_steps(batches: list[int], samples: int, epochs: int, cut: bool) -> int | None:
    """Steps that training takes, one after the other; None if the batches are not enough."""
    steps = 0
    if not cut:
        samples, epochs = samples * epochs, 1
    for _ in range(epochs):
        remaining = samples
        while remaining > 0:
            if steps == len(batches):
                return None
            remaining -= cut_step(batches[steps], remaining) if cut else batches[steps]
            steps += 1
    return steps


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 6)), min_size=1, max_size=12),
    st.integers(1, 3),
    st.integers(1, 120),
    st.integers(1, 6),
    st.booleans(),
)
def test_the_summary_equals_a_walk_step_by_step(
    segments: list[tuple[int, int]], local: int, samples: int, epochs: int, cut: bool
) -> None:
    points, now = [], 0
    for length, workers in segments:
        points.append((float(now), workers))
        now += length
    try:
        plan = BatchPlan.from_trace(Trace.from_points(points, end=float(now)), f"follow({local})", 1.0)
    except PlanError:
        return  # there are never any workers
    batches = plan.batches().tolist()
    steps = count_steps(batches, samples, epochs, cut)
    if steps is None:
        with pytest.raises(PlanError, match=f"of {epochs} epochs; repeat the trace"):
            plan.for_epochs(samples, epochs, cut=cut)
        return
    summary = plan.for_epochs(samples, epochs, cut=cut)
    planned = used = batches[:steps]
    if cut:  # what training takes: the last steps of an epoch are smaller
        used, left = [], samples
        for batch in planned:
            used.append(cut_step(batch, left))
            left = left - used[-1] or samples
        assert sum(used) == samples * epochs
    assert summary.steps == steps
    assert summary.samples == samples * epochs
    assert (summary.batch_min, summary.batch_max) == (min(used), max(used))
    assert summary.batch_mean == pytest.approx(sum(used) / steps)
    assert summary.changes == sum(a != b for a, b in pairwise(planned))
    last = plan.at(steps - 1)
    assert summary.time_s == last.time_s + last.duration_s


def test_a_plan_that_is_too_short_says_how_far_it_reaches() -> None:
    # Ten steps of 8. An epoch of 20 takes 8 + 8 + 4, three steps: three epochs, then 8 of 20 samples: 3.4.
    plan = BatchPlan.constant(4, 8, steps=10)
    with pytest.raises(PlanError, match=r"its 10 steps \(10.0 s\) reach 3.4 of 5 epochs; .*repeat=True"):
        plan.for_epochs(20, 5)
    # Across epoch ends ten steps are 80 samples: four epochs.
    assert plan.for_epochs(20, 4, cut=False).steps == 10
    with pytest.raises(PlanError, match="reach 4 of 5 epochs"):
        plan.for_epochs(20, 5, cut=False)


def test_planned_samples_that_a_cut_step_leaves_out_are_not_reached(tmp_path: Path) -> None:
    # Steps of 8 and 1 over nine samples: 8 would leave a single one, so 7 are taken, then 1 of 2. Nine were planned,
    # and yet one is missing.
    path = tmp_path / "batches.csv"
    path.write_text("step,batchsize\n0,8\n1,1\n")
    with pytest.raises(PlanError, match=r"its 2 steps \(2.0 s\) reach 0.99 of 1 epochs"):
        BatchPlan.read(path, 1).for_epochs(9, 1)


def test_a_change_is_of_workers_or_of_the_batch_and_a_pause_is_none() -> None:
    # Two steps of 8 samples on two workers, two on four, and after a pause two more on four.
    plan = BatchPlan.from_trace(Trace.parse("0s:2 10s:4 20s:0 30s:4 40s"), "fixed(8)", "5s")
    assert [plan.for_epochs(samples, 1).changes for samples in (16, 32, 48)] == [0, 1, 1]


def test_a_step_that_saves_the_next_one_can_make_the_plan_long_enough() -> None:
    # Steps of two over five samples: 2, then 3 at once. Two steps are enough, though they were planned for four.
    assert BatchPlan.constant(1, 2, steps=2).for_epochs(5, 1).steps == 2


def test_many_epochs_over_many_samples_are_counted_without_walking() -> None:
    # 10^9 samples in steps of 1,000: 10^6 steps an epoch, 10^9 for a thousand.
    assert BatchPlan.constant(8, 1000).for_epochs(10**9, 1000).steps == 10**9


def test_epochs_that_are_followed_one_by_one_have_a_limit() -> None:
    plan = BatchPlan.constant(2, 32)
    with pytest.raises(PlanError, match="epochs is 1000000000; expected a whole number from 1 to 1,000,000"):
        plan.for_epochs(500, 10**9)
    assert plan.for_epochs(500, 10**9, cut=False).steps == 500 * 10**9 // 32
