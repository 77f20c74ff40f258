"""`ebbflow plan`: steps, time and batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.answers import Ebbflow

TASK = ["--samples", "100", "--epochs", "2", "--step-time", "0.5s"]


def test_the_answer_as_json_has_the_fixed_keys(ebbflow: Ebbflow) -> None:
    found = ebbflow("plan", "constant(4, duration=1h)", "--local-batch", "8", *TASK, "--json").json
    # Steps of 32: 32 + 32 + 32 + 4, twice.
    assert found == {
        "steps": 8,
        "time_s": 4.0,
        "samples": 200,
        "batch_min": 4,
        "batch_mean": 25.0,
        "batch_max": 32,
        "changes": 0,
    }


def test_steps_may_run_across_epochs(ebbflow: Ebbflow) -> None:
    # 200 samples in steps of 32: 6.25, so seven.
    found = ebbflow("plan", "constant(4)", "--local-batch", "8", *TASK, "--across-epochs", "--json").json
    assert (found["steps"], found["samples"]) == (7, 200)


def test_offset_repeat_policy_and_on_change_are_heard(ebbflow: Ebbflow) -> None:
    trace = "step(2, factor=2, at=2s, duration=4s)"
    found = ebbflow("plan", trace, "--policy", "follow(8)", *TASK, "--offset", "2s", "--repeat", "--json").json
    # Four steps of 32 with 4 workers (100 = 32 * 3 + 4), then four of 16 and four of 32: 64, then 32, then 4.
    assert (found["steps"], found["batch_min"], found["batch_max"], found["changes"]) == (10, 4, 32, 2)
    found = ebbflow("plan", trace, "--policy", "fixed(50)", *TASK, "--on-change", "lose", "--json").json
    assert (found["steps"], found["batch_mean"]) == (4, 50.0)


def test_a_batch_plan_is_read_on_request(ebbflow: Ebbflow, tmp_path: Path) -> None:
    path = tmp_path / "b.csv"
    path.write_text("step,batchsize\n" + "0,64\n1,32\n" * 4)
    found = ebbflow("plan", "--plan", str(path), "--local-batch", "32", *TASK, "--json").json
    # 64 + 32 + 4 of 64, then 32 + 64 + 4 of 32.
    assert (found["steps"], found["changes"]) == (6, 5)


@pytest.mark.parametrize(
    "option",
    [
        ("--policy", "fixed(50)"), ("--ref-batch", "8"), ("--offset", "2s"), ("--repeat",), ("--on-change", "lose"),
        ("--format", "canonical"),
    ],
)  # fmt: skip
def test_options_that_are_for_a_trace_are_refused_beside_a_batch_plan(
    ebbflow: Ebbflow, tmp_path: Path, option: tuple[str, ...]
) -> None:
    """The file has too few steps for the task, and --repeat would not have made them more."""
    path = tmp_path / "b.csv"
    path.write_text("step,batchsize\n0,64\n")
    refused = ebbflow("plan", "--plan", path, "--local-batch", 32, *TASK, *option)
    refused.assert_refused(f"{option[0]} is for a trace, but the steps are those of the file")


def test_the_answer_for_people_has_units_and_fits_the_terminal(ebbflow: Ebbflow) -> None:
    task = ("--local-batch", 128, "--samples", 50_000, "--epochs", 10, "--step-time", "0.6s")
    text = ebbflow("plan", "gcp-a100-like", *task, width=80).text
    assert "samples" in text
    assert "min" in text or " s" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["constant(4, duration=2s)", "--local-batch", "8", *TASK], "reach 1 of 2 epochs"),
        (["constant(4)", *TASK], "lacks local_batch"),
        (["constant(4)", "--local-batch", "8", *TASK, "--step-time", "0.5"], "has no unit"),
        (["constant(4)", "--local-batch", "8", *TASK, "--on-change", "cry"], "'finish' or 'lose'"),
        (["constant(4)", "--policy", "folow", *TASK], "did you mean 'follow'"),
        (["--plan", "b.csv", *TASK], "--local-batch"),
    ],
)
def test_bad_input_is_refused(ebbflow: Ebbflow, arguments: list[str], message: str) -> None:
    ebbflow("plan", *arguments).assert_refused(message)


def test_a_trace_or_a_batch_plan_is_needed_and_not_both(ebbflow: Ebbflow) -> None:
    ebbflow("plan", *TASK).assert_refused("give a trace, or a batch plan with --plan FILE")
    ebbflow("plan", "constant(4)", "--plan", "b.csv", *TASK).assert_refused("one of the two")


def test_the_steps_of_a_growing_batch_are_counted(ebbflow: Ebbflow) -> None:
    def count(*more: object) -> int:
        task = ("--samples", 50_000, "--epochs", 200, "--step-time", "1s", "--local-batch", 128)
        steps: int = ebbflow("plan", "constant(workers=125)", *task, *more, "--json").json["steps"]
        return steps

    # Holt and Sievert, Table 1: 60 x 391 + 60 x 79 + 60 x 16 + 20 x 4.
    assert count("--policy", "geo(60ep, factor=5)", "--ref-batch", 128) == 29_240
    assert count("--policy", "geo(60ep, factor=5, initial=256, max_batch=5120)") == 14_960


def test_the_published_numbers_come_out_of_the_command(ebbflow: Ebbflow, shared: Path) -> None:
    file = str(shared / "traces" / "gcp_a100_2022-05.csv")
    task = ["--local-batch", "128", "--step-time", "0.6s", "--samples", "1281167", "--epochs", "90", "--json"]
    assert abs(ebbflow("plan", file, *task).json["steps"] - 18_837) <= 2
    assert abs(ebbflow("plan", file, *task, "--across-epochs").json["steps"] - 18_803) <= 2


def test_what_was_trained_on_and_what_was_dropped_are_told_apart(ebbflow: Ebbflow) -> None:
    options = ["--local-batch", 32, "--policy", "drop(parts=4)", "--step-time", "1s", "--repeat", "--epochs", 3]
    trace = "0s:4 20s:2 35s:3 1h"
    call = ["train", "digits-mlp(width=16)", "--trace", trace, *options, "--rule", "sqrt", "--out", "run"]
    assert "after 36 steps, 3,404 samples (922 more were dropped), " in ebbflow(*call).out
    answer = ebbflow(*call, "--json").json
    assert (answer["samples"], answer["dropped"]) == (3404, 922)
    # Plans and simulations count what steps cover, and say so.
    says = "what steps cover, with the samples that are dropped"
    assert says in ebbflow("plan", trace, *options, "--samples", 1442).out
    assert says in ebbflow("simulate", trace, *options, "--samples", 1442, "--spot-price", 1, "--price", 1).out
    assert says not in ebbflow("plan", trace, *options, "--samples", 1442, "--policy", "follow").out
