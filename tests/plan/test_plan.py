from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ebbflow.errors import PlanError
from ebbflow.plan.batch_plan import BatchPlan, StepSize, fit_step_time
from ebbflow.plan.fitted_plans import plan_for
from ebbflow.traces.availability import Trace

# Times are eighths of a second, so that sums are exact in binary and a naive simulation decides as the plan does.
EIGHTH = 0.125
STEP_TIMES = st.integers(1, 200).map(lambda n: n * EIGHTH)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    gaps = draw(st.lists(st.integers(1, 300), min_size=1, max_size=15))
    counts = draw(st.lists(st.integers(0, 5), min_size=len(gaps), max_size=len(gaps)))
    assume(any(counts))
    times = np.cumsum([0, *gaps]) * EIGHTH
    return Trace(times[:-1], np.array(counts), float(times[-1]))


def expand(plan: BatchPlan) -> list[tuple[int, int, float, float]]:
    assert plan.steps is not None
    sizes = [plan.at(step) for step in range(plan.steps)]
    return [(size.workers, size.samples, size.time_s, size.duration_s) for size in sizes]


def simulate(trace: Trace, step_times: dict[int, float], on_change: str) -> list[tuple[int, int, float, float]]:
    """One step after the other, asking the trace each time: slow and obvious. Seven samples a worker."""
    steps, now = [], 0.0
    while now < trace.end:
        workers = trace.at(now)
        change = min([*(t for t in trace.times.tolist() if t > now), trace.end])
        if workers == 0:
            now = change
            continue
        step = step_times[workers]
        if on_change == "lose" and now + step > change:
            now = change
            continue
        steps.append((workers, 7 * workers, now, step))
        now += step
    return steps


def steps_of_plan(*args: object, **kwargs: object) -> list[tuple[int, int, float, float]]:
    try:
        return expand(BatchPlan.from_trace(*args, **kwargs))
    except PlanError as error:
        if "gives no step" not in str(error):
            raise
        return []


@given(traces(), STEP_TIMES, st.integers(0, 400))
def test_with_a_constant_step_time_the_batch_of_position_i_is_the_count_at_i_dt_plus_offset(
    trace: Trace, step: float, offset_eighths: int
) -> None:
    offset = offset_eighths * EIGHTH % trace.end
    positions = np.arange(0, np.ceil((trace.end - offset) / step)) * step
    counts = trace.at(positions + offset)
    expected = [(w, 7 * w, t, step) for w, t in zip(counts.tolist(), positions.tolist(), strict=True) if w]
    assert steps_of_plan(trace, "follow(7)", step, offset=offset) == expected


@given(traces(), st.lists(STEP_TIMES, min_size=5, max_size=5), st.sampled_from(["finish", "lose"]))
def test_an_event_driven_plan_equals_a_simulation_step_by_step(
    trace: Trace, steps: list[float], on_change: str
) -> None:
    table = dict(enumerate(steps, start=1))
    expected = simulate(trace, table, on_change)
    assert steps_of_plan(trace, "follow(7)", table, on_change=on_change) == expected
    assert steps_of_plan(trace, "follow(7)", lambda w: table[w], on_change=on_change) == expected


@given(traces(), STEP_TIMES)
def test_losing_steps_of_constant_duration_equals_a_simulation(trace: Trace, step: float) -> None:
    expected = simulate(trace, dict.fromkeys(range(1, 6), step), "lose")
    assert steps_of_plan(trace, "follow(7)", step, on_change="lose") == expected


@given(traces(), st.integers(1, 8))
def test_planned_samples_equal_the_integral_when_changes_fall_on_the_grid(trace: Trace, per_second: int) -> None:
    # With dt = 1/8 s every change lies on a step: sum of batch * dt = b * integral, exactly.
    plan = BatchPlan.from_trace(trace, f"follow({per_second})", EIGHTH)
    assert plan.batches().sum() * EIGHTH == per_second * trace.integral()


@given(traces(), STEP_TIMES)
def test_planned_samples_differ_from_the_integral_by_at_most_a_step_for_each_change(trace: Trace, step: float) -> None:
    # Inside a step the count differs from that at its start by at most the sum of the changes in it; the last step may
    # reach beyond the end by less than dt. Hence |dt * sum of counts - integral| <= dt * (sum |change| + last count).
    total = sum(workers for workers, *_ in steps_of_plan(trace, "follow(1)", step))
    bound = step * (np.abs(np.diff(trace.workers)).sum() + trace.workers[-1])
    assert abs(total * step - trace.integral()) <= bound + 1e-9


@given(traces(), STEP_TIMES, st.data())
def test_the_expansion_of_any_range_equals_asking_step_by_step(trace: Trace, step: float, data: st.DataObject) -> None:
    try:
        plan = BatchPlan.from_trace(trace, "follow(7)", step)
    except PlanError:
        return
    assert plan.steps is not None
    start, stop = sorted(data.draw(st.tuples(st.integers(0, plan.steps), st.integers(0, plan.steps))))
    assert plan.batches(start, stop).tolist() == [plan.at(i).samples for i in range(start, stop)]
    from_runs = [run.samples for run in plan.runs() for _ in range(run.first, run.stop or 0)]
    assert plan.batches().tolist() == from_runs


def test_steps_that_begin_at_a_change_belong_to_the_new_fleet_whatever_the_decimals() -> None:
    # 4.2 / 0.7 is 6 in decimals but 6 * 0.7 = 4.199999999999999 in binary: step 6 begins at the change all the same.
    trace = Trace.from_points([(0, 1), (4.2, 2)], end=8.4)
    assert BatchPlan.from_trace(trace, "follow(1)", "0.7s").batches().tolist() == [1] * 6 + [2] * 6


def test_waiting_takes_time_and_no_step() -> None:
    trace = Trace.parse("0s:2 10s:0 25s:3 40s")
    grid = BatchPlan.from_trace(trace, "follow(4)", "10s")
    # Positions 0, 10, 20, 30: no workers at 10 and 20.
    assert [(s.workers, s.time_s) for s in map(grid.at, range(2))] == [(2, 0.0), (3, 30.0)]
    assert grid.steps == 2
    events = BatchPlan.from_trace(trace, "follow(4)", lambda workers: 10.0)
    # Event-driven: the next step begins when there are workers again.
    assert [(s.workers, s.time_s) for s in map(events.at, range(3))] == [(2, 0.0), (3, 25.0), (3, 35.0)]


def test_a_change_that_the_policy_does_not_pass_on_loses_no_step() -> None:
    trace = Trace.parse("0s:4 15s:6 40s")
    assert BatchPlan.from_trace(trace, "capped(2, max_workers=4)", "10s", on_change="lose").steps == 4
    assert BatchPlan.from_trace(trace, "follow(2)", "10s", on_change="lose").steps == 3  # 0-10, (10-15), 15-25, 25-35
    # Two workers, then the four of the cap: the change from 4 to 6 is none here, too.
    trace = Trace.parse("0s:2 10s:4 15s:6 40s")
    assert BatchPlan.from_trace(trace, "capped(2, max_workers=4)", "10s", on_change="lose").steps == 4


def test_equal_steps_are_one_run() -> None:
    # The dip to 1 at 11 s lies between two steps and is never seen.
    plan = BatchPlan.from_trace(Trace.parse("0s:4 11s:1 12s:4 40s"), "follow(2)", "10s")
    assert [tuple(run) for run in plan.runs()] == [(0, 4, 4, 8, 0.0, 10.0)]
    assert plan == BatchPlan.constant(4, 8, step_time="10s", steps=4)


def test_a_constant_plan_has_no_end_unless_it_is_given_one() -> None:
    plan = BatchPlan.constant(4, 128, step_time="0.5s")
    assert plan.steps is None
    assert plan.at(10**12) == StepSize(workers=4, samples=128, time_s=0.5e12, duration_s=0.5)
    assert plan.batches(5, 8).tolist() == [128] * 3
    assert BatchPlan.constant(4, 128, steps=1).batches().tolist() == [128]
    # 1,000 samples in steps of 128: 7 whole ones and one of 104; five epochs make 40 steps of half a second.
    summary = plan.for_epochs(1000, 5)
    assert (summary.steps, summary.time_s, summary.changes) == (40, 20.0, 0)
    with pytest.raises(PlanError, match="which has no end"):
        plan.batches()


def test_a_description_is_json_and_says_what_the_plan_is_made_from() -> None:
    plan = BatchPlan.from_trace(Trace.parse("0s:4 60s", name="mine"), "follow(32)", "0.6s", offset=6.0)
    assert json.loads(json.dumps(plan.describe())) == {
        "trace": "mine",
        "policy": "follow(32)",
        "step_time": "0.6s",
        "offset_s": 6.0,
        "on_change": "finish",
        "steps": 90,
        "runs": 1,
        "duration_s": 54.0,
        "batch_min": 128,
        "batch_max": 128,
    }


def test_a_plan_cannot_be_changed() -> None:
    plan = BatchPlan.constant(4, 128)
    with pytest.raises(ValueError, match="read-only"):
        plan.samples[0] = 1


# -- long enough -------------------------------------------------------------------------------------------------------


def test_a_plan_for_epochs_repeats_the_trace_as_often_as_needed() -> None:
    trace = Trace.parse("0s:4 60s:0 120s")
    # Six steps of 8 samples a repetition. Ten epochs of 20 samples (8 + 8 + 4: three steps each) need five repetitions.
    plan = plan_for(trace, "follow(2)", "10s", samples=20, epochs=10, repeat=True)
    assert plan.for_epochs(20, 10).steps == 30
    # The last step is the sixth of the fifth repetition: 4 * 120 + 60 s.
    assert plan.for_epochs(20, 10).time_s == 540
    with pytest.raises(PlanError, match=r"its 6 steps \(60.0 s\) reach 2 of 10 epochs; repeat the trace"):
        plan_for(trace, "follow(2)", "10s", samples=20, epochs=10)


@pytest.mark.timeout(60)
def test_a_trace_that_is_almost_long_enough_is_repeated_once_more() -> None:
    # Ten samples a repetition. Two repetitions reach 20/21 of the epoch: another is needed, and one is enough.
    trace = Trace.parse("0s:1 10s")
    assert plan_for(trace, "follow(1)", "1s", samples=21, epochs=1, repeat=True).steps == 30


def test_an_offset_beyond_the_end_is_possible_with_repetition_only() -> None:
    trace = Trace.parse("0s:4 60s:2 120s")
    assert plan_for(trace, "follow(2)", "10s", samples=8, epochs=1, offset=1450.0, repeat=True).at(0).workers == 4
    assert plan_for(trace, "follow(2)", "10s", samples=8, epochs=1, offset=1500.0, repeat=True).at(0).workers == 2
    with pytest.raises(PlanError, match="lies outside of the trace"):
        plan_for(trace, "follow(2)", "10s", samples=8, epochs=1, offset=1500.0)


@given(traces(), st.integers(1, 500), st.integers(1, 5), st.sampled_from(["finish", "lose"]))
def test_the_fitted_step_time_reaches(trace: Trace, samples: int, epochs: int, on_change: str) -> None:
    step = fit_step_time(trace, "follow(7)", samples=samples, epochs=epochs, on_change=on_change)
    plan = plan_for(trace, "follow(7)", step, samples=samples, epochs=epochs, on_change=on_change)
    assert plan.epochs_reached(samples, epochs) == epochs


def test_the_fitted_step_time_is_the_longest_one() -> None:
    trace = Trace.parse("0s:4 100s")
    # Ten steps of 28 samples. Finished: the tenth begins before 100 s, so nine steps take 100 s. Lost: ten steps do.
    assert fit_step_time(trace, "follow(7)", samples=280, epochs=1) == pytest.approx(100 / 9, rel=2e-6)
    assert fit_step_time(trace, "follow(7)", samples=280, epochs=1, on_change="lose") == pytest.approx(10, rel=2e-6)
    # As exact for short steps: nine of them take 100 ms.
    assert fit_step_time(trace.scale(time=0.001), "follow(7)", samples=280, epochs=1) == pytest.approx(
        0.1 / 9, rel=2e-6
    )
    # One step is enough: it takes as long as the trace.
    assert fit_step_time(trace, "follow(7)", samples=28, epochs=1) == 100


# -- files and bad input -----------------------------------------------------------------------------------------------


def test_a_batch_file_is_read_in_the_order_of_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "batches.csv"
    path.write_text("step,batchsize\n0,128\n1,128\n0,256\n1,64")
    plan = BatchPlan.read(path, 32, step_time={2: 0.5, 4: 1.0, 8: 2.0})
    assert expand(plan) == [(4, 128, 0.0, 1.0), (4, 128, 1.0, 1.0), (8, 256, 2.0, 2.0), (2, 64, 4.0, 0.5)]
    assert plan.describe()["file"] == "batches.csv"


def test_batches_of_a_file_may_differ_by_one_and_take_a_second_each_unless_told(tmp_path: Path) -> None:
    path = tmp_path / "batches.csv"
    path.write_text("step,batchsize\n0,4\n1,5\n2,5\n3,4")
    expected = [(4, 4, 0.0, 1.0), (5, 5, 1.0, 1.0), (5, 5, 2.0, 1.0), (4, 4, 3.0, 1.0)]
    assert expand(BatchPlan.read(path, 1)) == expected


def test_a_batch_file_that_is_too_short_needs_more_rows_since_no_trace_can_be_repeated(tmp_path: Path) -> None:
    path = tmp_path / "b.csv"
    path.write_text("step,batchsize\n0,64\n1,64\n")
    with pytest.raises(PlanError, match=r"reach 0\.64 of 1 epochs; give a file with more rows or ask for fewer epochs"):
        BatchPlan.read(path, 32).for_epochs(200, 1)


def test_the_published_batch_file_is_read(shared: Path) -> None:
    plan = BatchPlan.read(shared / "traces" / "raw_eth_batchsizes.csv", 32)
    assert plan.steps == 810
    assert plan.batches(0, 12).tolist() == [128, 128, 256, 256, 64, 64, 32, 32, 256, 256, 256, 256]
    with pytest.raises(
        PlanError, match=r"batchsizes.csv:6: a batch of 64 is not a multiple .* try a local batch of 32"
    ):
        BatchPlan.read(shared / "traces" / "raw_eth_batchsizes.csv", 128)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("step,batchsize\n", "no rows"),
        ("step,batchsize\n0,128\n1,100\n", "3: a batch of 100 is not a multiple of the local batch 32; try .* of 4,"),
        ("step,batchsize\n0,0\n", "2: the batch size is 0"),
        ("step,batchsize\n0,-32\n", "2: the batch size is -32"),
        ("step,batchsize\n0,\n", "2: the batch size is missing"),
        ("step,batchsize\n0,12.5\n", "2: the batch size is 12.5"),
        ("step,batchsize\n0\n", "2: found '0'"),
        ("time_s,accelerators\n0,4\n60,4\n", "1: .* BatchPlan.from_trace"),
    ],
)
def test_a_bad_batch_file_is_refused_with_its_name_and_line(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(content)
    with pytest.raises(PlanError, match=f"bad.csv:.*{message}"):
        BatchPlan.read(path, 32)


def test_what_gives_no_plan_is_refused(tmp_path: Path) -> None:
    trace = Trace.parse("0s:0 10s:4 20s:0 60s")
    for make, message in [
        (lambda: BatchPlan.from_trace(trace, "follow(8)", "30s"), "gives no step"),
        (lambda: BatchPlan.from_trace(trace, "follow(8)", "1s", offset=30.0), "gives no step"),
        (lambda: BatchPlan.from_trace(trace, "follow(8)", "1s", offset=60.0), "lies outside of the trace"),
        (lambda: BatchPlan.from_trace(trace, "follow(8)", "1s", offset=-0.5), "lies outside of the trace"),
        (lambda: BatchPlan.from_trace(trace, "follow(8)", "1s", on_change="cry"), "expected 'finish' or 'lose'"),
        (lambda: BatchPlan.from_trace(trace, "follow(8)", 0.0), "step time is 0 s"),
        (lambda: fit_step_time(trace, "follow(8)", samples=8, epochs=1, offset=20.0), "has no workers"),
        (lambda: plan_for(trace.slice(20.0), "follow(8)", 1.0, samples=8, epochs=1, repeat=True), "gives no step"),
        (lambda: BatchPlan.constant(0, 8), "workers is 0; expected a whole number from 1"),
        (lambda: BatchPlan.constant(4, 2), "samples is 2; expected a whole number from 4"),
        (lambda: BatchPlan.constant(4, 8, steps=3).at(3), "step 3 is not in the plan, which has 3 steps"),
        (lambda: BatchPlan.constant(4, 8).at(-1), "step -1 is not in the plan"),
        (lambda: BatchPlan.constant(4, 8).for_epochs(0, 1), "samples is 0; expected"),
        (lambda: plan_for(trace, "follow(8)", 1.0, samples=-8, epochs=1, repeat=True), "samples is -8; expected"),
        (lambda: fit_step_time(trace, "follow(8)", samples=8, epochs=0), "epochs is 0; expected"),
        (lambda: BatchPlan.read(tmp_path / "none.csv", 32), "no such file"),
        (lambda: BatchPlan.read(tmp_path / "none.csv", 0), "local batch is 0"),
    ]:
        with pytest.raises(PlanError, match=message):
            make()
