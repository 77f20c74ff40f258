"""`ebbflow report`: what is printed where."""

from __future__ import annotations

from pathlib import Path

from cli.answers import Ebbflow


def test_it_prints_the_table_the_takeaway_and_the_path(ebbflow: Ebbflow, study: Path, tmp_path: Path) -> None:
    answer = ebbflow("report", study, "--out", tmp_path / "r", width=80)
    assert max(len(line) for line in answer.text.splitlines() if not line.startswith("report:")) <= 80
    assert "96.0 ± 1.4 *" in answer.out
    assert "1 of 2 diverged" in answer.out
    assert "sqrt is best on gpu" in " ".join(answer.out.split())
    assert f"report: {tmp_path / 'r' / 'index.html'}" in answer.out
    assert "warning: " in answer.err
    assert "the last line is incomplete" in answer.err


def test_json_is_alone_on_standard_output(ebbflow: Ebbflow, study: Path, tmp_path: Path) -> None:
    answer = ebbflow("report", study / "arms" / "tiny-gpt_gpu_sqrt_s1", "--out", tmp_path / "r", "--json")
    (cell,) = answer.json["cells"]
    assert (cell["workload"], cell["trace"], cell["rule"], cell["mean"]) == ("tiny-gpt", "gpu", "sqrt", None)
    assert (cell["seeds"], cell["diverged"], cell["unfinished"]) == (1, 0, 1)
    assert "the last line is incomplete" in answer.err


def test_what_is_not_a_study_is_refused(ebbflow: Ebbflow, tmp_path: Path) -> None:
    ebbflow("report", tmp_path).assert_refused("is not the folder of a study or a run")
    assert list(tmp_path.iterdir()) == []
