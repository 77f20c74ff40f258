"""`ebbflow report`: what is printed where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ebbflow.cli.report_command import report
from ebbflow.errors import RecordError
from ebbflow.report.report_page import write_report
from ebbflow.report.results import load_results

app = typer.Typer()
app.command()(report)


def run(*arguments: str) -> tuple[str, str]:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False, env={"COLUMNS": "80"})
    assert result.exit_code == 0
    return result.stdout, result.stderr


def test_it_prints_the_table_the_takeaway_and_the_path(study: Path, tmp_path: Path) -> None:
    out, err = run(str(study), "--out", str(tmp_path / "r"))
    assert max(len(line) for line in out.splitlines() if not line.startswith("report:")) <= 80
    assert "96.0 ± 12.7" in out
    assert "1 of 2 diverged" in out
    assert "sqrt is ahead on gpu (96.0 %, 2.0 points better than linear+warmup(2ep)), but there is one run" in " ".join(
        out.split()
    )
    assert f"report: {tmp_path / 'r' / 'index.html'}" in out
    assert "warning: " in err
    assert "the last line is incomplete" in err


def test_json_is_alone_on_standard_output(study: Path, tmp_path: Path) -> None:
    out, err = run(str(study / "arms" / "tiny-gpt_gpu_sqrt_s1"), "--out", str(tmp_path / "r"), "--json")
    (cell,) = json.loads(out)["cells"]
    assert (cell["workload"], cell["trace"], cell["rule"], cell["mean"]) == ("tiny-gpt", "gpu", "sqrt", None)
    assert (cell["seeds"], cell["diverged"], cell["unfinished"]) == (1, 0, 1)
    assert "the last line is incomplete" in err


def test_what_is_not_a_study_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="is not the folder of a study or a run"):
        CliRunner().invoke(app, [str(tmp_path)], catch_exceptions=False)
    assert list(tmp_path.iterdir()) == []


def test_a_target_and_a_price_give_time_and_cost_to_it(study: Path, tmp_path: Path) -> None:
    arm = str(study / "arms" / "digits-mlp_gpu_constant_s0")
    out, _ = run(arm, "--out", str(tmp_path / "r"), "--target", "0.8", "--spot-price", "2", "--json")
    (cell,) = json.loads(out)["cells"]
    assert (cell["target"], cell["target_reached"]) == (0.8, 1)
    assert cell["target_cost_usd"] == 2 * cell["target_worker_hours"]
    assert 0 < cell["target_time_s"] < cell["time_s"]
    printed, _ = run(arm, "--out", str(tmp_path / "r"), "--target", "0.99")
    assert "not every run reaches accuracy 99.0 %: constant (never)" in " ".join(printed.split())
    assert "To the target" in (tmp_path / "r" / "index.html").read_text()


def test_a_report_takes_paths_as_text(study: Path, tmp_path: Path) -> None:
    arm = str(study / "arms" / "digits-mlp_gpu_constant_s0")
    assert load_results(arm).arms
    assert write_report(arm, out=str(tmp_path / "r")).page.exists()
