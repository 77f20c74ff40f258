"""`ebbflow trace`: drawings, statistics, conversions, generated traces."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.answers import Ebbflow
from ebbflow.traces.availability import Trace
from ebbflow.traces.formats import read
from ebbflow.traces.synthetic import GENERATORS


def test_stats_as_json_have_the_fixed_keys(ebbflow: Ebbflow) -> None:
    found = ebbflow("trace", "stats", "step(4, factor=2, at=1h, duration=2h)", "--json").json
    # One hour of 4 and one of 8: 12 accelerator-hours, mean 6.
    assert found == {
        "duration_s": 7200.0,
        "min": 4,
        "mean": 6.0,
        "max": 8,
        "changes": 1,
        "accelerator_hours": 12.0,
        "zero_fraction": 0.0,
    }
    assert list(found)[:3] == ["duration_s", "min", "mean"]


def test_stats_for_people_have_units_and_fit_the_terminal(ebbflow: Ebbflow) -> None:
    text = ebbflow("trace", "stats", "gcp-tpu-like", width=80).text
    assert "16.1 h" in text
    assert max(map(len, text.splitlines())) <= 80


def test_show_draws_in_the_terminal_and_into_a_file(ebbflow: Ebbflow, tmp_path: Path) -> None:
    text = ebbflow("trace", "show", "gcp-a100-like(seed=1)", "--out", tmp_path / "t.svg", width=80).text
    assert "█" in text
    assert "gcp-a100-like(seed=1)" in text
    assert max(len(line) for line in text.splitlines() if not line.startswith("wrote")) <= 80
    assert (tmp_path / "t.svg").read_bytes().startswith(b"<?xml")


def test_convert_reads_any_format_and_cuts_and_scales(ebbflow: Ebbflow, tmp_path: Path) -> None:
    source, target = tmp_path / "in.json", tmp_path / "out.csv"
    source.write_text('{"metadata": {"gap_seconds": 60}, "data": [0, 8, 8, 4, 2]}')
    assert ebbflow("trace", "convert", source, target).code == 0
    assert read(target) == Trace.parse("0s:0 60s:8 180s:4 240s:2 300s")
    part = ("--start", "1min", "--stop", "4min", "--max-workers", 4)
    assert ebbflow("trace", "convert", source, target, *part).code == 0
    assert read(target) == Trace.parse("0s:4 120s:2 180s")


def test_make_writes_a_synthetic_trace_and_lists_all_generators(ebbflow: Ebbflow, tmp_path: Path) -> None:
    assert ebbflow("trace", "make", "square(1, 2, period=2min, duration=4min)", tmp_path / "made.csv.gz").code == 0
    assert read(tmp_path / "made.csv.gz") == Trace.parse("0s:1 1min:2 2min:1 3min:2 4min")
    listed = ebbflow("trace", "make", "--list").text
    assert all(name in listed for name in GENERATORS.names())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stats", "nothing.csv"], "no such file"),
        (["stats", "gcp-a100-lik"], "did you mean 'gcp-a100-like'"),
        (["stats", "constant(1)", "--format", "canonical"], "no such file"),
        (["convert", "constant(1)", "out.csv", "--start", "30"], "has no unit"),
        (["convert", "constant(1)", "out.csv", "--start", "30h"], "covers 0 to 86400 s"),
        (["stats", "8"], "a fleet that stays is constant(workers=8)"),
        (["make", "in.csv", "out.csv"], "ebbflow trace convert in.csv out.csv"),
        (["show", "constant(1)", "--out", "out.gif"], "expected .svg"),
    ],
)
def test_bad_input_is_refused_and_writes_nothing(
    ebbflow: Ebbflow, arguments: list[str], message: str, tmp_path: Path
) -> None:
    Path("in.csv").write_text("time_s,accelerators\n0,1\n9,1\n")
    ebbflow("trace", *arguments).assert_refused(message)
    assert [path.name for path in tmp_path.iterdir()] == ["in.csv"]


def test_a_drawing_fits_a_narrow_terminal_unless_told_otherwise(ebbflow: Ebbflow) -> None:
    trace = "0min:4 60min:2 90min:6 120min"
    assert max(map(len, ebbflow("trace", "show", trace, width=60).text.splitlines())) == 60
    assert max(map(len, ebbflow("trace", "show", trace, width=200).text.splitlines())) == 80
    assert max(map(len, ebbflow("trace", "show", trace, "--width", "100", width=200).text.splitlines())) == 100
