from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.core.units import Seconds
from ebbflow.errors import TraceError
from ebbflow.traces.availability import Trace

# Times are eighths of a second, so that all sums and differences below are exact in binary.
EIGHTH = 0.125


@st.composite
def traces(draw: st.DrawFn, max_changes: int = 12) -> Trace:
    gaps = draw(st.lists(st.integers(1, 400), min_size=1, max_size=max_changes))
    counts = draw(st.lists(st.integers(0, 9), min_size=len(gaps), max_size=len(gaps)))
    times = np.cumsum([0, *gaps]) * EIGHTH
    return Trace(times[:-1], np.array(counts), float(times[-1]))


def moments(trace: Trace) -> st.SearchStrategy[float]:
    return st.integers(0, int(trace.end / EIGHTH) - 1).map(lambda n: n * EIGHTH)


def naive_at(trace: Trace, time: float) -> int:
    return next(workers for start, stop, workers in trace.segments() if start <= time < stop)


def test_a_count_holds_from_its_time_until_the_next() -> None:
    trace = Trace.parse("0s:4 60s:2 90s:6 120s")
    assert [trace.at(t) for t in (0, 59.9, 60, 89.9, 90, 119.9)] == [4, 4, 2, 2, 6, 6]
    assert trace.at(np.array([[0.0, 60.0], [75.0, 90.0]])).tolist() == [[4, 2], [2, 6]]


def test_statistics_derived_by_hand() -> None:
    # 60 s of 4, 30 s of 0, 30 s of 6: 240 + 0 + 180 = 420 worker-seconds in 120 s.
    stats = Trace.parse("0s:4 60s:0 90s:6 120s").stats()
    assert (stats.duration_s, stats.min, stats.mean, stats.max, stats.changes) == (120.0, 0, 3.5, 6, 2)
    assert stats.accelerator_hours == pytest.approx(420 / 3600)
    assert stats.zero_fraction == 0.25


def test_an_event_at_the_very_end_counts_as_a_change_and_for_no_time() -> None:
    trace = Trace.from_points([(0, 4), (60, 2), (120, 1)])
    assert (trace.final, trace.stats().changes, trace.stats().min, trace.stats().mean) == (1, 2, 1, 3.0)
    assert trace != Trace.parse("0s:4 60s:2 120s")


def test_equal_neighbours_are_merged_and_equal_functions_are_equal_values() -> None:
    merged = Trace.from_points([(0, 4), (30, 4), (60, 2), (120, 2)], name="a")
    assert merged == Trace.parse("0s:4 60s:2 120s", name="b")
    assert hash(merged) == hash(Trace.parse("0s:4 60s:2 120s"))
    assert merged.times.tolist() == [0.0, 60.0]


def test_a_trace_cannot_be_changed_also_after_a_copy_through_pickle() -> None:
    source = np.array([4, 2])
    trace = Trace(np.array([0.0, 60.0]), source, 120.0, name="x")
    source[0] = 99
    copy = pickle.loads(pickle.dumps(trace))
    assert copy == trace
    assert copy.name == "x"
    for one in (trace, copy):
        assert one.at(0) == 4
        with pytest.raises(ValueError, match="read-only"):
            one.workers[0] = 1


@given(st.data())
def test_at_equals_a_search_through_the_segments(data: st.DataObject) -> None:
    trace = data.draw(traces())
    time = data.draw(moments(trace))
    assert trace.at(time) == naive_at(trace, time)


@given(st.data())
def test_the_integral_equals_a_sum_over_the_segments(data: st.DataObject) -> None:
    trace = data.draw(traces())
    start, stop = sorted(data.draw(st.tuples(moments(trace), moments(trace))))
    expected = sum(workers * max(0.0, min(stop, high) - max(start, low)) for low, high, workers in trace.segments())
    assert trace.integral(Seconds(start), Seconds(stop)) == expected
    assert trace.mean_workers() == trace.integral() / trace.end


@given(st.data())
def test_a_slice_shows_the_same_counts_moved_to_zero(data: st.DataObject) -> None:
    trace = data.draw(traces())
    start, stop = sorted(data.draw(st.lists(moments(trace), min_size=2, max_size=2)))
    if start == stop:
        stop = trace.end
    part = trace.slice(Seconds(start), Seconds(stop))
    time = data.draw(moments(part))
    assert part.end == stop - start
    assert part.at(time) == trace.at(start + time)
    assert part.integral() == trace.integral(Seconds(start), Seconds(stop))


@given(traces())
def test_the_whole_as_a_slice_and_one_repetition_are_the_trace_itself(trace: Trace) -> None:
    assert trace.slice() == trace
    assert trace.shift(Seconds(0.0)) == trace
    assert trace.repeat(1) == trace
    assert trace.scale() == trace
    assert trace.clip() == trace


@given(st.data(), st.integers(2, 5))
def test_a_repetition_shows_the_same_counts_again_and_dropping_it_gives_the_trace_back(
    data: st.DataObject, times: int
) -> None:
    trace = data.draw(traces())
    time = data.draw(moments(trace))
    again = trace.repeat(times)
    assert again.end == times * trace.end
    assert [again.at(k * trace.end + time) for k in range(times)] == [trace.at(time)] * times
    assert again.shift(Seconds((times - 1) * trace.end)) == trace
    assert again.integral() == times * trace.integral()


@given(st.data())
def test_shifting_twice_is_shifting_once_by_the_sum(data: st.DataObject) -> None:
    trace = data.draw(traces())
    once = data.draw(moments(trace))
    rest = trace.shift(Seconds(once))
    twice = data.draw(moments(rest))
    assert rest.shift(Seconds(twice)) == trace.shift(Seconds(once + twice))


@given(traces(), st.integers(1, 30))
def test_scaling_to_a_maximum_reaches_it_and_never_turns_a_positive_count_into_zero(trace: Trace, most: int) -> None:
    scaled = trace.scale(max_workers=most)
    if trace.workers.max():
        assert scaled.stats().max == most
    assert scaled.stats().zero_fraction == trace.stats().zero_fraction


def test_scaling_rounds_halves_up_and_keeps_one_worker() -> None:
    # 5 * 0.5 = 2.5 -> 3;  3 * 0.5 = 1.5 -> 2;  1 * 0.1 = 0.1 -> 1, since 0 would mean waiting.
    assert Trace.parse("0s:5 1s:3 2s:0 3s").scale(workers=0.5) == Trace.parse("0s:3 1s:2 2s:0 3s")
    assert Trace.parse("0s:1 3s").scale(workers=0.1) == Trace.parse("0s:1 3s")
    assert Trace.parse("0s:5 1s:3 2s").scale(time=60) == Trace.parse("0s:5 1min:3 2min")


def test_clipping_bounds_the_counts() -> None:
    assert Trace.parse("0s:5 1s:0 2s:3 3s").clip(minimum=1, maximum=3) == Trace.parse("0s:3 1s:1 2s:3 3s")


@given(traces())
def test_a_short_text_form_reads_back(trace: Trace) -> None:
    text = repr(trace)
    if text.startswith("Trace('"):
        assert Trace.parse(text.removeprefix("Trace('").removesuffix("')")) == trace


@pytest.mark.parametrize(
    ("times", "workers", "end", "message"),
    [
        ([], [], 1, "make no trace"),
        ([0, 1], [1], 2, "one count for each"),
        ([1], [4], 2, "first time is 1 s"),
        ([0, 5, 5], [1, 2, 3], 9, "time 5 s follows 5 s"),
        ([0, 5, 3], [1, 2, 3], 9, "time 3 s follows 5 s"),
        ([0, np.nan], [1, 2], 9, "time number 2 is not finite"),
        ([0, 5], [1, -2], 9, "count at 5 s is -2"),
        ([0, 5], [1, 2.5], 9, "count at 5 s is 2.5"),
        ([0, 5], [1, np.nan], 9, "count at 5 s is nan"),
        ([0, 5], ["1", "2"], 9, "expected whole numbers"),
        ([0, 5], [1, 2], 5, "expected a time after the last change at 5 s"),
        ([0, 5], [1, 2], np.inf, "the end is inf s"),
    ],
)
def test_what_is_no_step_function_is_refused(times: list, workers: list, end: float, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        Trace(np.array(times), np.array(workers), end)


@pytest.mark.parametrize("text", ["", "0s:4", "0s:4 60s:2", "0:4 60s", "0s:4 60s:two 90s", "0s:-4 60s", "5s:4 60s"])
def test_a_text_that_is_no_trace_is_refused(text: str) -> None:
    with pytest.raises(TraceError, match=r"write|expected"):
        Trace.parse(text)


def test_questions_outside_of_the_trace_are_refused() -> None:
    trace = Trace.parse("0s:4 60s", name="mine")
    for question in (
        lambda: trace.at(60),
        lambda: trace.at(-1),
        lambda: trace.at(np.array([0, np.nan])),
        lambda: trace.integral(Seconds(0), Seconds(61)),
        lambda: trace.slice(Seconds(10), Seconds(61)),
        lambda: trace.shift(Seconds(60)),
    ):
        with pytest.raises(TraceError, match=r"trace mine .* covers 0 to 60 s"):
            question()
    for question, message in (
        (lambda: trace.repeat(0), "cannot be repeated 0 times"),
        (lambda: trace.scale(workers=0), "cannot be scaled by 0 in workers and 1 in time"),
        (lambda: trace.scale(time=0), "cannot be scaled by 1 in workers and 0 in time"),
        (lambda: trace.scale(workers=2, max_workers=3), "not both"),
        (lambda: trace.scale(max_workers=0), "max_workers is 0"),
        (lambda: trace.clip(minimum=3, maximum=2), "cannot clip to 3 .. 2 workers"),
        (lambda: trace.clip(minimum=-1), "cannot clip to -1 .. None workers"),
        (lambda: trace.mean_workers(Seconds(0)), "a mean over 0 s is not defined"),
    ):
        with pytest.raises(TraceError, match=message):
            question()
