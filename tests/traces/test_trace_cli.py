from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ebbflow.cli.trace_command import app
from ebbflow.errors import EbbflowError, TraceError, UnitError
from ebbflow.traces.availability import Trace
from ebbflow.traces.formats import read
from ebbflow.traces.synthetic import GENERATORS


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_stats_as_json_have_the_fixed_keys() -> None:
    found = json.loads(run("stats", "step(4, factor=2, at=1h, duration=2h)", "--json"))
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


def test_stats_for_people_have_units_and_fit_the_terminal() -> None:
    text = run("stats", "gcp-tpu-like")
    assert "16.1 h" in text
    assert max(map(len, text.splitlines())) <= 80


def test_show_draws_in_the_terminal_and_into_a_file(tmp_path: Path) -> None:
    text = run("show", "gcp-a100-like(seed=1)", "--out", str(tmp_path / "t.svg"))
    assert "█" in text
    assert "gcp-a100-like(seed=1)" in text
    assert max(len(line) for line in text.splitlines() if not line.startswith("wrote")) <= 80
    assert (tmp_path / "t.svg").read_bytes().startswith(b"<?xml")


def test_convert_reads_any_format_and_cuts_and_scales(tmp_path: Path) -> None:
    source, target = tmp_path / "in.json", tmp_path / "out.csv"
    source.write_text('{"metadata": {"gap_seconds": 60}, "data": [0, 8, 8, 4, 2]}')
    run("convert", str(source), str(target))
    assert read(target) == Trace.parse("0s:0 60s:8 180s:4 240s:2 300s")
    run("convert", str(source), str(target), "--start", "1min", "--stop", "4min", "--max-workers", "4")
    assert read(target) == Trace.parse("0s:4 120s:2 180s")


def test_make_writes_a_synthetic_trace_and_lists_all_generators(tmp_path: Path) -> None:
    run("make", "square(1, 2, period=2min, duration=4min)", str(tmp_path / "made.csv.gz"))
    assert read(tmp_path / "made.csv.gz") == Trace.parse("0s:1 1min:2 2min:1 3min:2 4min")
    listed = run("make", "--list")
    assert all(name in listed for name in GENERATORS.names())


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (["stats", "nothing.csv"], TraceError, "no such file"),
        (["stats", "gcp-a100-lik"], TraceError, "did you mean 'gcp-a100-like'"),
        (["stats", "constant(1)", "--format", "canonical"], TraceError, "no such file"),
        (["convert", "constant(1)", "out.csv", "--start", "30"], UnitError, "has no unit"),
        (["convert", "constant(1)", "out.csv", "--start", "30h"], TraceError, "covers 0 to 86400 s"),
        (["make", "in.csv", "out.csv"], TraceError, "ebbflow trace convert in.csv out.csv"),
        (["show", "constant(1)", "--out", "out.gif"], TraceError, "expected .svg"),
    ],
)
def test_bad_input_raises_and_writes_nothing(
    arguments: list[str], kind: type[EbbflowError], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.csv").write_text("time_s,accelerators\n0,1\n9,1\n")
    with pytest.raises(kind, match=message):
        run(*arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["in.csv"]
