"""Which replicas run at which time of a trace."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.errors import ConfigError
from ebbflow.live.trace_replay import TraceReplay, adapt_trace, make_schedule
from ebbflow.traces import Trace


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    counts = draw(st.lists(st.integers(0, 6), min_size=1, max_size=30))
    gaps = draw(st.lists(st.floats(0.1, 50), min_size=len(counts), max_size=len(counts)))
    times = [0.0]
    for gap in gaps:
        times.append(times[-1] + gap)
    return Trace.from_points(zip(times[:-1], counts, strict=True), end=times[-1])


@given(
    trace=traces(),
    stop=st.sampled_from(["kill", "term", "mixed"]),
    leaver=st.sampled_from(["newest", "oldest", "random"]),
    seed=st.integers(0, 3),
)
def test_at_every_time_as_many_run_as_the_trace_says(
    trace: Trace,
    stop: Literal["kill", "term", "mixed"],
    leaver: Literal["newest", "oldest", "random"],
    seed: int,
) -> None:
    schedule = make_schedule(trace, stop=stop, leaver=leaver, seed=seed)
    running: set[str] = set()
    for action in schedule.actions:  # no replica starts twice, and none is stopped that does not run
        assert (action.replica in running) == (action.what != "start")
        (running.add if action.what == "start" else running.discard)(action.replica)
    for start, end, workers in trace.segments():
        for time in (start, (start + end) / 2):
            assert len(schedule.running(time)) == workers
    assert schedule == make_schedule(trace, stop=stop, leaver=leaver, seed=seed)
    assert [a.time_s for a in schedule.actions] == sorted(a.time_s for a in schedule.actions)
    assert {a.replica for a in schedule.actions} == {f"r{i}" for i in range(trace.workers.max())}


def departures(leaver: Literal["newest", "oldest", "random"], **options: object) -> list[tuple[float, str, str]]:
    trace = Trace.parse("0s:1 1s:2 2s:3 3s:2 4s:1 5s:3 9s")
    schedule = make_schedule(trace, leaver=leaver, **options)  # type: ignore[arg-type]
    return [(action.time_s, action.what, action.replica) for action in schedule.actions]


def test_the_newest_or_the_oldest_leaves_and_the_free_slot_is_taken_again() -> None:
    starts = [(0.0, "start", "r0"), (1.0, "start", "r1"), (2.0, "start", "r2")]
    assert departures("newest") == [
        *starts, (3.0, "kill", "r2"), (4.0, "kill", "r1"), (5.0, "start", "r1"), (5.0, "start", "r2"),
    ]  # fmt: skip
    assert departures("oldest", stop="term") == [
        *starts, (3.0, "term", "r0"), (4.0, "term", "r1"), (5.0, "start", "r0"), (5.0, "start", "r1"),
    ]  # fmt: skip


def test_the_seed_decides_which_replica_is_stopped_and_how() -> None:
    histories = {tuple(departures("random", stop="mixed", seed=seed)) for seed in range(20)}
    assert len(histories) > 5
    assert {what for history in histories for _, what, _ in history} == {"start", "kill", "term"}


class Requests(list[tuple[str, str]]):
    """What a supervisor is asked for."""

    def request(self, name: str) -> None:
        self.append(("start", name))

    def stop(self, name: str, **_: object) -> list[object]:
        self.append(("stop", name))
        return []

    def stop_all(self, **_: object) -> list[object]:
        self.append(("stop", "all"))
        return []


def test_a_replay_that_is_late_makes_one_change_after_the_other() -> None:
    """Between two calls the supervisor starts and ends what it was asked for: a short stay is not left out."""
    asked, now = Requests(), 0.0
    schedule = make_schedule(Trace.parse("0s:1 1s:2 2s:1 3s:2 4s"), leaver="newest")
    replay = TraceReplay(asked, schedule, grace_s=1, clock=lambda: now)  # type: ignore[arg-type]
    now = 100.0
    calls = []
    while replay.act() is not None:
        calls.append(asked[:])
        asked.clear()
        assert len(calls) < 6
    assert calls == [[("start", "r0")], [("start", "r1")], [("stop", "r1")]]
    assert asked == [("start", "r1"), ("stop", "all")]


def test_a_trace_is_scaled_down_never_up() -> None:
    trace = Trace.parse("0s:2 60s:1 120s")
    assert adapt_trace(trace, max_workers=4) == trace
    assert adapt_trace(trace, max_workers=1, speed=60) == Trace.parse("0s:1 2s")
    assert adapt_trace(trace, duration_s=60) == Trace.parse("0s:2 60s")
    assert adapt_trace(trace, duration_s=600) == trace


def test_bad_settings_are_refused() -> None:
    trace = Trace.parse("0s:2 60s")
    with pytest.raises(ConfigError, match="speed is 0; expected a number above 0"):
        adapt_trace(trace, speed=0)
    with pytest.raises(ConfigError, match="signal is 'hup'; expected kill, term or mixed"):
        make_schedule(trace, stop="hup")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="leaver is 'best'; expected newest, oldest or random"):
        make_schedule(trace, leaver="best")  # type: ignore[arg-type]
