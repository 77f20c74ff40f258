"""How long a study still takes and which arm comes next: arithmetic, without processes and clocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.studies.forecast import ArmPace, Speeds, StudyForecast, remaining_s

MLP = ArmPace(epochs=10, kind=("mlp", "static"))


def test_nothing_is_known_before_anything_was_timed() -> None:
    assert Speeds([MLP]).of(("mlp",)) is None
    assert Speeds([replace(MLP, timed_epochs=1, timed_s=0)]).of(MLP.kind) is None
    assert remaining_s([MLP], [MLP], [], jobs=2) is None
    assert remaining_s([], [], [MLP], jobs=2) == 0


def test_the_most_similar_arms_say_how_fast_a_new_one_is() -> None:
    static = replace(MLP, timed_epochs=10, timed_s=20)  # 0.5 epochs per second
    spot = replace(MLP, kind=("mlp", "spot"), timed_epochs=4, timed_s=2)  # 2
    cnn = replace(MLP, kind=("cnn", "static"), timed_epochs=1, timed_s=10)  # 0.1
    speeds = Speeds([static, spot, cnn, MLP])
    assert speeds.of(("mlp", "static")) == 0.5
    assert speeds.of(("mlp", "tpu")) == pytest.approx(14 / 22)  # both of mlp
    assert speeds.of(("gpt", "static")) == pytest.approx(15 / 32)  # all
    assert speeds.of(("mlp", "static", "more")) == 0.5  # as far as the kinds are known
    assert speeds.of(()) == pytest.approx(15 / 32)


def test_arms_fill_the_slots_as_they_become_free() -> None:
    # 1 epoch per second; 3 and 6 s to go in two slots, then 10 s, 10 s and 4 s in the order of waiting:
    # slot A: 3 -> 13, slot B: 6 -> 16, then A again: 13 -> 17.
    running = [replace(MLP, done=0.7, timed_epochs=7, timed_s=7), replace(MLP, done=0.4, timed_epochs=4, timed_s=4)]
    waiting = [MLP, MLP, replace(MLP, epochs=4)]
    assert remaining_s(running, waiting, [], jobs=2) == pytest.approx(17)
    # With a third slot, which is free now: 10 s in it, 3 + 10 in A, 6 + 4 in B.
    assert remaining_s(running, waiting, [], jobs=3) == pytest.approx(13)


def test_a_large_study_is_forecast_from_the_speeds_of_its_kinds() -> None:
    # 20 workloads on 5 traces, 30 arms each: 10 epochs of w + t + 1 s. One arm of each kind ended, the others wait for
    # one slot, so that 29 times the sum over the kinds is left: 29 x 10 x (5 x 190 + 20 x 10 + 100) = 362,500 s.
    kinds = [(w, t) for w in range(20) for t in range(5)]
    new = {(w, t): ArmPace(epochs=10, kind=(f"w{w}", f"t{t}")) for w, t in kinds}
    ended = [replace(new[w, t], done=1, timed_epochs=10, timed_s=10 * (w + t + 1)) for w, t in kinds]
    waiting = [new[kind] for _ in range(29) for kind in kinds]
    assert remaining_s([], waiting, ended, jobs=1) == pytest.approx(362_500)
    # A trace that no arm has had: the mean of the five traces of the first workload, 1 + 2 + 3 + 4 + 5 s per 5 epochs.
    unknown = ArmPace(epochs=10, kind=("w0", "new"))
    assert remaining_s([], [unknown], ended, jobs=1) == pytest.approx(30)
    # With 100 slots and the arms in this order each slot has its own kind first; w = 19, t = 4 alone takes 240 s.
    assert remaining_s([], waiting[:100], ended, jobs=100) == pytest.approx(240)


def test_a_running_arm_keeps_its_own_speed() -> None:
    slow = replace(MLP, done=0.1, timed_epochs=1, timed_s=5)
    fast = replace(MLP, done=0.5, timed_epochs=5, timed_s=1)
    assert remaining_s([slow, fast], [], [], jobs=2) == pytest.approx(45)
    fresh = replace(MLP, kind=("mlp", "spot"))  # has just begun: as fast as both together, 1 epoch per second
    assert remaining_s([fresh], [], [slow, fast], jobs=1) == pytest.approx(10)


def test_what_a_resumed_arm_had_done_before_does_not_count_for_its_speed() -> None:
    forecast = StudyForecast(waiting={"a": MLP, "b": MLP})
    forecast.start("a")
    assert forecast.remaining_s(2) is None
    forecast.move("a", 0.8, now=100.0)  # continued from a checkpoint
    assert forecast.remaining_s(2) is None
    forecast.move("a", 0.9, now=104.0)  # one epoch in 4 s
    assert forecast.remaining_s(2) == pytest.approx(40)  # the other one, at once
    assert forecast.remaining_s(1) == pytest.approx(44)
    forecast.end("a")
    forecast.start("b")
    assert forecast.remaining_s(1) == pytest.approx(40)


def test_the_longest_arm_is_started_first() -> None:
    long, short, unlike = MLP, replace(MLP, epochs=2), replace(MLP, epochs=3, kind=("cnn", "static"))
    forecast = StudyForecast(waiting={"short": short, "unlike": unlike, "long": long, "also long": long, "cnn": unlike})
    assert forecast.longest(["short", "unlike", "long", "also long"]) == "long"
    forecast.start("cnn")
    forecast.move("cnn", 0.0, now=0.0)
    forecast.move("cnn", 1.0, now=300.0)
    forecast.start("also long")
    forecast.move("also long", 0.0, now=0.0)
    forecast.move("also long", 0.5, now=1.0)
    # 3 epochs of 100 s are longer than 10 of 0.2 s.
    assert forecast.longest(["short", "unlike", "long"]) == "unlike"
    forecast.end("cnn")
    assert forecast.longest(["short", "unlike", "long"]) == "unlike"
    forecast.move("also long", 0.6, now=1001.0)  # 6 epochs in 1,001 s, instead of 5 in 1 s
    assert forecast.longest(["short", "unlike", "long"]) == "long"


def test_an_arm_fits_if_it_would_end_in_time_at_the_speed_of_those_before_it() -> None:
    cnn = replace(MLP, kind=("cnn", "static"))
    forecast = StudyForecast(waiting={"first": MLP, "next": MLP, "short": replace(MLP, epochs=2), "cnn": cnn})
    assert forecast.fits("first", 0.1)  # nothing was timed: who knows
    assert not forecast.fits("first", 0.0)
    forecast.start("first")
    forecast.move("first", 0.0, now=0.0)
    forecast.move("first", 0.5, now=20.0)  # 5 epochs in 20 s: 40 s for all
    assert [forecast.expected_s(name) for name in ("next", "short", "cnn")] == pytest.approx([40, 8, 40])
    assert forecast.fits("next", 40.0) and not forecast.fits("next", 39.9)
    assert forecast.fits("short", 39.9)
    assert forecast.fits("cnn", float("inf"))


arms = st.builds(
    ArmPace,
    epochs=st.floats(1, 100),
    kind=st.sampled_from([("a", "x"), ("a", "y"), ("b", "x")]),
    done=st.floats(0, 1),
    timed_epochs=st.floats(0.1, 50),
    timed_s=st.floats(0.1, 50),
)


@given(st.lists(arms, min_size=1, max_size=4), st.lists(arms, max_size=6), st.integers(1, 6))
def test_a_forecast_lies_between_sharing_perfectly_and_one_after_the_other(
    running: list[ArmPace], waiting: list[ArmPace], jobs: int
) -> None:
    jobs = max(jobs, len(running))
    expected = [arm.left / (arm.timed_epochs / arm.timed_s) for arm in running]
    expected += [arm.left / speed for arm in waiting if (speed := Speeds(running).of(arm.kind))]
    forecast = remaining_s(running, waiting, [], jobs=jobs)
    assert forecast is not None
    assert sum(expected) / jobs <= forecast * (1 + 1e-9)
    assert max(expected) <= forecast * (1 + 1e-9)
    assert forecast <= sum(expected) * (1 + 1e-9)


@given(st.lists(arms, max_size=8), st.sampled_from([("a", "x"), ("a", "z"), ("c", "x"), ("a",), ()]))
def test_speeds_are_those_of_the_most_similar_arms_alone(known: list[ArmPace], kind: tuple[str, ...]) -> None:
    similar: list[ArmPace] = []
    for length in range(len(kind) + 1):  # the longest common beginning that an arm has
        similar = [arm for arm in known if arm.kind[:length] == kind[:length]] or similar
    found = Speeds(known).of(kind)
    if not known:
        assert found is None
    else:
        assert found == pytest.approx(sum(arm.timed_epochs for arm in similar) / sum(arm.timed_s for arm in similar))
