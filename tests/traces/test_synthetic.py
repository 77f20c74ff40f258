from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ebbflow.errors import EbbflowError, SpecError, TraceError, UnitError
from ebbflow.traces.availability import Trace
from ebbflow.traces.formats import write
from ebbflow.traces.synthetic import GENERATORS, load

SEEDS = range(60)
EXAMPLES = {
    "constant": "constant(8, duration=1h)",
    "step": "step(2, factor=12, at=10min, duration=1h)",
    "square": "square(2, 8, period=20min, duration=1h)",
    "random-levels": "random-levels(1, 16, every=5min, duration=2h, seed=3)",
    "poisson": "poisson(8, preempt_every=20min, provision=2min, duration=2h, seed=3)",
    "gcp-a100-like": "gcp-a100-like(seed=3)",
    "gcp-tpu-like": "gcp-tpu-like(seed=3, duration=40h)",
    "gcp-a100-2022-05": "gcp-a100-2022-05(stop=2h, max_workers=14)",
    "gcp-tpuv2-2022-04": "gcp-tpuv2-2022-04(start=212min, stop=487min)",
}


@pytest.mark.parametrize("name", GENERATORS.names())
def test_the_same_text_gives_the_same_trace_and_names_it(name: str) -> None:
    first, again = load(EXAMPLES[name]), load(EXAMPLES[name])
    assert first == again
    assert first.name == EXAMPLES[name]


@pytest.mark.parametrize("name", ["random-levels", "poisson", "gcp-a100-like", "gcp-tpu-like"])
def test_another_seed_gives_another_trace(name: str) -> None:
    assert load(EXAMPLES[name]) != load(EXAMPLES[name].replace("seed=3", "seed=4"))


def test_the_simple_generators_give_what_they_say() -> None:
    assert load(EXAMPLES["constant"]) == Trace.parse("0s:8 1h")
    assert load(EXAMPLES["step"]) == Trace.parse("0s:2 10min:24 1h")
    assert load("step(8, factor=0.5, at=10min, duration=1h)") == Trace.parse("0s:8 10min:4 1h")
    assert load("step(96, then=8, at=20h, duration=90h)") == Trace.parse("0s:96 20h:8 90h")  # Lin et al., Figure 4b
    assert load(EXAMPLES["square"]) == Trace.parse("0s:2 10min:8 20min:2 30min:8 40min:2 50min:8 1h")


def test_random_levels_reach_both_bounds_and_change_only_on_the_beat() -> None:
    trace = load("random-levels(1, 4, every=5min, duration=24h, seed=1)")
    assert (trace.stats().min, trace.stats().max) == (1, 4)
    assert not (trace.times % 300).any()


def test_a_duration_holds_as_many_intervals_as_it_should_in_spite_of_rounding() -> None:
    # 2.1 s = 7 x 0.3 s, but 2.1/0.3 is above 7 in floats: the eighth interval would begin at 2.1 s, which is the end.
    wave = load("square(1, 2, period=0.6s, duration=2.1s)")
    assert wave.workers.tolist() == [1, 2, 1, 2, 1, 2, 1]
    assert wave.end == 2.1
    assert load("random-levels(1, 2, every=0.3s, duration=2.1s)").end == 2.1
    # 1 s = 3 1/3 x 0.3 s: the last one is cut.
    assert load("square(1, 2, period=0.6s, duration=1s)").workers.tolist() == [1, 2, 1, 2]


def test_poisson_availability_is_the_share_of_a_workers_life() -> None:
    # A worker lives 60 min and is away 20 min on average: 60 / (60 + 20) of 100 workers = 75.
    # The first 10 of 200 h, in which the start with all of them fades, are left out.
    trace = load("poisson(100, preempt_every=60min, provision=20min, duration=200h, seed=5)")
    assert trace.shift(10 * 3600.0).mean_workers() == pytest.approx(75, abs=1)
    assert trace.at(0) == 100
    # Each worker changes twice in 80 min: 100 * 200 h / 80 min * 2 = 30,000.
    assert trace.stats().changes == pytest.approx(30_000, rel=0.03)


def test_poisson_without_a_provisioning_time_stays_complete_almost_always() -> None:
    assert load("poisson(8, preempt_every=10min, provision=0s, duration=5h)").mean_workers() == pytest.approx(8)


PUBLISHED = [
    # generator, tick, unit, least, mean (tolerance of a seed, of the mean over seeds), greatest, changes (same)
    ("gcp-a100-like", 63, 1, (29, 31), (47.92, 2.0, 0.5), 56, (46, 20, 3)),
    ("gcp-tpu-like", 30, 8, (24, 32), (74.66, 7.0, 1.5), 120, (97, 20, 4)),
]


@pytest.mark.parametrize(("name", "tick", "unit", "least", "mean", "most", "changes"), PUBLISHED)
def test_the_imitations_stay_near_the_published_statistics(
    name: str,
    tick: int,
    unit: int,
    least: tuple[int, int],
    mean: tuple[float, ...],
    most: int,
    changes: tuple[int, ...],
) -> None:
    traces = [load(f"{name}(seed={seed})") for seed in SEEDS]
    stats = [trace.stats() for trace in traces]
    assert all(least[0] <= s.min <= least[1] and s.max == most for s in stats)
    assert min(s.min for s in stats) == least[0], "the least count that was published is seen"
    assert all(abs(s.mean - mean[0]) < mean[1] and abs(s.changes - changes[0]) < changes[1] for s in stats)
    assert np.mean([s.mean for s in stats]) == pytest.approx(mean[0], abs=mean[2])
    assert np.mean([s.changes for s in stats]) == pytest.approx(changes[0], abs=changes[2])
    assert not any((trace.times % tick).any() or (trace.workers % unit).any() for trace in traces)
    # Machines are taken in bulk and come back one by one: the greatest loss is much greater than the greatest gain.
    moves = [np.diff(trace.workers) for trace in traces]
    assert np.mean([-m.min() for m in moves]) > 1.5 * np.mean([m.max() for m in moves])


@pytest.mark.parametrize(("name", "hours"), [("gcp-a100-like", 3.64), ("gcp-tpu-like", 16.12)])
def test_an_imitation_without_arguments_is_as_long_as_the_published_one(name: str, hours: float) -> None:
    assert load(name) == load(f"{name}(seed=0)")
    assert load(name).end / 3600 == pytest.approx(hours, abs=0.01)


@pytest.mark.parametrize("name", ["gcp-a100-like", "gcp-tpu-like"])
def test_the_imitations_can_be_of_any_length(name: str) -> None:
    short, long = load(f"{name}(seed=1, duration=100s)"), load(f"{name}(seed=1, duration=100h)")
    assert (short.end, long.end) == (100, 360_000)
    assert long.stats().changes > 500


def test_a_file_is_loaded_by_its_name_and_wins_over_a_generator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(Trace.parse("0s:3 60s"), tmp_path / "gcp-a100-like")
    monkeypatch.chdir(tmp_path)
    assert load("gcp-a100-like") == load(tmp_path / "gcp-a100-like") == Trace.parse("0s:3 60s")


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("gcp-a10-like", TraceError, "neither a file nor a generator; did you mean 'gcp-a100-like'"),
        ("missing.csv", TraceError, "missing.csv: no such file"),
        ("folder/missing", TraceError, "folder/missing: no such file"),
        ("", EbbflowError, "folder|empty"),
        ("poisson(", TraceError, "neither a file nor the text of a generator"),
        ("poisson", SpecError, "lacks workers"),
        ("poisson(4, provide=2s)", SpecError, "unknown argument 'provide'"),
        ("constant(8, duration=90)", UnitError, "has no unit"),
        ("constant(8, duration=0s)", TraceError, "the end is 0 s"),
        ("constant(-8)", TraceError, "count at 0 s is -8"),
        ("poisson(8, seed=-1)", TraceError, "seed is -1"),
        ("poisson(8, preempt_every=0s)", TraceError, "preempt_every is 0"),
        ("square(1, 2, period=0s)", TraceError, "period is 0"),
        ("random-levels(8, 2)", TraceError, "minimum <= maximum"),
        ("step(3, factor=0.5)", TraceError, "a whole number of workers"),
        ("step(3, at=30h)", TraceError, "a time inside the duration"),
        ("gcp-tpu-like(duration=1s)", TraceError, "at least one observation"),
    ],
)
def test_what_is_no_trace_is_refused(text: str, kind: type[EbbflowError], message: str) -> None:
    with pytest.raises(kind, match=message):
        load(text)


def test_a_given_format_means_a_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        load("constant(8)", format="canonical")


@pytest.mark.parametrize(
    "text",
    [
        "square(1, 2, period=1s, duration=1000000000h)",
        "random-levels(1, 2, every=0.001s)",
        "poisson(workers=1000000000)",
        "poisson(workers=1, preempt_every=0.000001s, provision=0s)",
        "gcp-a100-like(duration=10000000000h)",
    ],
)
def test_a_trace_that_would_fill_the_memory_is_refused_at_once(text: str) -> None:
    with pytest.raises(TraceError, match=r"the trace would have about .* changes; expected at most 10,000,000"):
        load(text)
