from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ebbflow.cli.plan_command import plan
from ebbflow.errors import EbbflowError, PlanError, SpecError, UnitError

app = typer.Typer()
app.command()(plan)
TASK = ["--samples", "100", "--epochs", "2", "--step-time", "0.5s"]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_answer_as_json_has_the_fixed_keys() -> None:
    found = json.loads(run("constant(4, duration=1h)", "--local-batch", "8", *TASK, "--json"))
    # Steps of 32: 32 + 32 + 32 + 4, twice.
    assert found == {
        "steps": 8,
        "time_s": 4.0,
        "samples": 200,
        "batch_min": 32,
        "batch_mean": 32.0,
        "batch_max": 32,
        "changes": 0,
    }


def test_steps_may_run_across_epochs() -> None:
    # 200 samples in steps of 32: 6.25, so seven.
    found = json.loads(run("constant(4)", "--local-batch", "8", *TASK, "--across-epochs", "--json"))
    assert (found["steps"], found["samples"]) == (7, 200)


def test_offset_repeat_policy_and_on_change_are_heard() -> None:
    trace = "step(2, factor=2, at=2s, duration=4s)"
    found = json.loads(run(trace, "--policy", "follow(8)", *TASK, "--offset", "2s", "--repeat", "--json"))
    # Four steps of 32 with 4 workers (100 = 32 * 3 + 4), then four of 16 and four of 32: 64, then 32, then 4.
    assert (found["steps"], found["batch_min"], found["batch_max"], found["changes"]) == (10, 16, 32, 2)
    found = json.loads(run(trace, "--policy", "fixed(50)", *TASK, "--on-change", "lose", "--json"))
    assert (found["steps"], found["batch_mean"]) == (4, 50.0)


def test_a_batch_plan_is_read_on_request(tmp_path: Path) -> None:
    path = tmp_path / "b.csv"
    path.write_text("step,batchsize\n" + "0,64\n1,32\n" * 4)
    found = json.loads(run("--plan", str(path), "--local-batch", "32", *TASK, "--json"))
    # 64 + 32 + 4 of 64, then 32 + 64 + 4 of 32.
    assert (found["steps"], found["changes"]) == (6, 5)


def test_the_answer_for_people_has_units_and_fits_the_terminal() -> None:
    text = run("gcp-a100-like", "--local-batch", "128", "--samples", "50000", "--epochs", "10", "--step-time", "0.6s")
    assert "samples" in text
    assert "min" in text or " s" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (["constant(4, duration=2s)", "--local-batch", "8", *TASK], PlanError, "reach 1 of 2 epochs"),
        (["constant(4)", *TASK], SpecError, "lacks local_batch"),
        (["constant(4)", "--local-batch", "8", *TASK, "--step-time", "0.5"], UnitError, "has no unit"),
        (["constant(4)", "--local-batch", "8", *TASK, "--on-change", "cry"], PlanError, "'finish' or 'lose'"),
        (["constant(4)", "--policy", "folow", *TASK], SpecError, "did you mean 'follow'"),
        (["--plan", "b.csv", *TASK], PlanError, "--local-batch"),
    ],
)
def test_bad_input_raises(arguments: list[str], kind: type[EbbflowError], message: str) -> None:
    with pytest.raises(kind, match=message):
        run(*arguments)


def test_the_published_numbers_come_out_of_the_command(shared: Path) -> None:
    file = str(shared / "traces" / "gcp_a100_2022-05.csv")
    task = ["--local-batch", "128", "--step-time", "0.6s", "--samples", "1281167", "--epochs", "90", "--json"]
    assert abs(json.loads(run(file, *task))["steps"] - 18_837) <= 2
    assert abs(json.loads(run(file, *task, "--across-epochs"))["steps"] - 18_803) <= 2
