"""`ebbflow report`: what is printed where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.answers import Ebbflow
from ebbflow.report.report_page import write_report
from ebbflow.report.results import load_results


def test_it_prints_the_table_the_takeaway_and_the_path(ebbflow: Ebbflow, study: Path, tmp_path: Path) -> None:
    answer = ebbflow("report", study, "--out", tmp_path / "r", width=80)
    assert max(len(line) for line in answer.text.splitlines() if not line.startswith("report:")) <= 80
    assert "96.0 ± 12.7" in answer.out
    assert "1 of 2 diverged" in answer.out
    ahead = "sqrt is ahead on gpu (96.0 %, 2.0 points better than linear+warmup(2ep)), but there is one run"
    assert ahead in " ".join(answer.out.split())
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


@pytest.mark.slow
def test_a_target_and_a_price_give_time_and_cost_to_it(study: Path, tmp_path: Path, ebbflow: Ebbflow) -> None:
    arm = str(study / "arms" / "digits-mlp_gpu_constant_s0")
    answer = ebbflow("report", arm, "--out", str(tmp_path / "r"), "--target", "0.8", "--spot-price", "2", "--json")
    (cell,) = json.loads(answer.out)["cells"]
    assert (cell["target"], cell["target_reached"]) == (0.8, 1)
    assert cell["target_cost_usd"] == 2 * cell["target_worker_hours"]
    assert 0 < cell["target_time_s"] < cell["time_s"]
    printed = ebbflow("report", arm, "--out", str(tmp_path / "r"), "--target", "0.99").out
    assert "no run reaches accuracy 99.0 %." in " ".join(printed.split())
    assert "To accuracy 99.0 %" in (tmp_path / "r" / "index.html").read_text()


@pytest.mark.parametrize("price", ["inf", "1e308"])
def test_a_price_that_gives_no_costs_is_refused(study: Path, ebbflow: Ebbflow, price: str) -> None:
    ebbflow("report", str(study), "--spot-price", price).assert_refused(
        "USD per hour; expected a number from 0 to 1e+09"
    )


def test_a_report_takes_paths_as_text(study: Path, tmp_path: Path) -> None:
    arm = str(study / "arms" / "digits-mlp_gpu_constant_s0")
    assert load_results(arm).arms
    assert write_report(arm, out=str(tmp_path / "r")).page.exists()
