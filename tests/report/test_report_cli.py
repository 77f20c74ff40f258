"""`ebbflow report`: what is printed where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ebbflow.cli.report_command import report
from ebbflow.errors import RecordError

app = typer.Typer()
app.command()(report)


def run(*arguments: str) -> tuple[str, str]:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False, env={"COLUMNS": "80"})
    assert result.exit_code == 0
    return result.stdout, result.stderr


def test_it_prints_the_table_the_takeaway_and_the_path(study: Path, tmp_path: Path) -> None:
    out, err = run(str(study), "--out", str(tmp_path / "r"))
    assert max(len(line) for line in out.splitlines() if not line.startswith("report:")) <= 80
    assert "96.0 ± 1.4 *" in out
    assert "1 of 2 diverged" in out
    assert "sqrt is best on gpu" in " ".join(out.split())
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
