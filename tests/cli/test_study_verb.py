"""`ebbflow study`: what its options do to a study, and the recipes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.answers import Ebbflow
from ebbflow.studies.grid import load_study, recipe_names, recipe_text
from ebbflow.studies.scaling import scaled, with_stand_in


@pytest.mark.process
def test_the_command_scales_sets_and_counts_seeds_and_the_folder_says_so(ebbflow: Ebbflow) -> None:
    Path("tiny.toml").write_text(
        'workloads = "digits-mlp"\nrules = "linear+warmup(5ep)"\ntraces = "constant(workers=4)"\nseeds = 3\n'
    )
    options = ("--scale", 0.04, "--seeds", 1, "--set", "epochs=50", "--out", "out", "--jobs", 1, "--json")
    answer = ebbflow("study", "tiny.toml", *options)
    assert answer.code == 0, answer.err
    config = json.loads(Path("out/study.json").read_text())["config"]
    # 0.04 of 50 epochs are 2, of 5 epochs 0.2; 64 times the root of 0.04 is 12.8, to a multiple of 8 16.
    assert (config["scale"], config["seeds"], config["settings"]["epochs"]) == (0.04, [0], 2)
    assert (config["rules"], config["workloads"]) == (["linear+warmup(0.2ep)"], ["digits-mlp(width=16)"])
    assert len(list(Path("out").glob("arms/*/record.jsonl"))) == 1


@pytest.mark.process
def test_a_recipe_runs_to_its_report_on_data_that_stands_in_for_the_papers(ebbflow: Ebbflow) -> None:
    options = ("--stand-in", "digits", "--scale", 0.001, "--set", "precision=bf16", "--out", "out", "--jobs", 1)
    answer = ebbflow("study", "dynamic-figure4", *options)
    assert answer.code == 0, answer.err
    config = json.loads(Path("out/study.json").read_text())["config"]
    assert (config["name"], config["stand_in"]) == ("dynamic-figure4-digits-x0.001", "digits")
    assert (config["settings"]["ref_batch"], config["settings"]["precision"]) == (8, "bf16")
    assert "which stands in for the paper's" in " ".join(answer.text.split())
    assert len(list(Path("out").glob("arms/*/record.jsonl"))) == 4


@pytest.mark.process
def test_the_report_at_the_end_of_a_study_has_the_published_targets(ebbflow: Ebbflow) -> None:
    paper = '[[paper]]\nsource = "A 2022, Table 1"\nrule = "linear"\n'
    Path("tiny.toml").write_text(
        'workloads = "digits-mlp"\nrules = "linear"\n[settings]\nepochs = 1\n[traces]\nstatic = "constant(workers=4)"\n'
        f'{paper}what = "epochs to 0.01"\nvalues = {{ static = 102 }}\n'
        f'{paper}what = "seconds to 0.01"\nvalues = {{ static = "never" }}\n'
    )
    answer = ebbflow("study", "tiny.toml", "--out", "out", "--jobs", 1, width=80)
    assert answer.code == 0, answer.err
    # The only validation is after one epoch, and one image in a hundred is recognised by then.
    own, theirs = (line.split() for line in answer.text.splitlines() if line.split()[:1] in (["linear"], ["paper"]))
    assert own[:5] == ["linear", "1", "of", "1", "1"]
    assert theirs == ["paper", "102", "never"]
    (cell,) = ebbflow("report", "out", "--target", 0.01, "--json").json["cells"]
    assert cell["targets"][0]["published"] == {"epochs": 102.0, "time_s": "never"}
    (cell,) = ebbflow("report", "out", "--target", 0.02, "--json").json["cells"]
    assert cell["targets"][0]["published"] == {}


@pytest.mark.process
def test_a_part_of_a_study_is_run_and_the_rest_is_left_for_another_call(ebbflow: Ebbflow) -> None:
    Path("tiny.toml").write_text(
        'workloads = "digits-mlp"\nrules = ["linear", "sqrt"]\n[settings]\nepochs = 1\n'
        '[traces]\nstatic = "constant(workers=4)"\nlarge = "constant(workers=8)"\n'
    )
    options = ("study", "tiny.toml", "--out", "out", "--jobs", 1)
    none = ebbflow(*options, "--budget", "1ms")
    assert (none.code, len(list(Path("out").glob("arms/*/record.jsonl")))) == (4, 0)
    assert "0 of 4 arms have ended; the same command continues with the others" in none.err
    part = ebbflow(*options, "--only", "trace=large", "--only", "rule=linear", "--json")
    assert [(cell["trace"], cell["rule"]) for cell in part.json["cells"] if cell["mean"]] == [("large", "linear")]
    assert part.code == 0
    assert ebbflow(*options, "--budget", "1h", "--json").code == 0
    assert len(list(Path("out").glob("arms/*/record.jsonl"))) == 4


TINY = (
    'workloads = "digits-mlp"\nrules = ["constant", "linear"]\n[settings]\nepochs = 1\n'
    '[traces]\nstatic = "constant(workers=4)"\n'
)


@pytest.mark.process
def test_a_record_without_its_first_row_is_that_of_an_arm_that_has_not_begun(ebbflow: Ebbflow) -> None:
    """As an arm leaves it that is ended before it has built its model."""
    Path("tiny.toml").write_text(TINY)
    options = ("study", "tiny.toml", "--out", "out", "--jobs", 1, "--budget", "1ms", "--json")
    ebbflow(*options)
    begun = Path("out/arms") / load_study("tiny.toml").arms()[0].id
    begun.mkdir(parents=True)
    (begun / "record.jsonl").write_text("")
    ended = ebbflow(*options)
    assert (ended.code, json.loads(ended.out)) == (4, {"cells": []})
    assert "0 of 2 arms have ended; the same command continues with the others" in ended.err
    ebbflow("report", "out").assert_refused("has no records yet", "wait until it begins")


@pytest.mark.process
def test_a_report_that_cannot_be_made_does_not_hide_how_the_study_ended(ebbflow: Ebbflow) -> None:
    Path("tiny.toml").write_text(TINY)
    Path("out/report").mkdir(parents=True)
    Path("out/report/notes.txt").write_text("mine")
    answer = ebbflow("study", "tiny.toml", "--out", "out", "--jobs", 1)
    assert answer.code == 1
    assert "error: the report could not be made: " in answer.err
    assert len(list(Path("out").glob("arms/*/record.jsonl"))) == 2


def test_a_setting_that_an_override_keeps_from_some_runs_is_said_to_do_so(ebbflow: Ebbflow) -> None:
    Path("tiny.toml").write_text(TINY + '[[override]]\nrule = "linear"\nset = { lr = 0.02 }\n')
    said = ebbflow("study", "tiny.toml", "--set", "lr=0.5", "--set", "threads=1", "--show").err
    assert "--set lr: 1 of 2 runs keep their own, by an [[override]] of the study: 0.02" in said
    assert "threads" not in said
    assert load_study("tiny.toml").overridden("lr") == [0.02]


def test_a_study_of_ones_own_is_shown_without_other_options_too(ebbflow: Ebbflow) -> None:
    Path("tiny.toml").write_text(TINY)
    Path("shown.toml").write_text(ebbflow("study", "tiny.toml", "--show").text)
    assert [arm.id for arm in load_study("shown.toml").arms()] == [arm.id for arm in load_study("tiny.toml").arms()]


def test_what_a_study_cannot_be_limited_to_is_refused(ebbflow: Ebbflow) -> None:
    options = ("study", "demo", "--out", "out")
    ebbflow(*options, "--only", "large").assert_refused("--only 'large'", "NAME=VALUE")
    ebbflow(*options, "--only", "trace=large").assert_refused("has no trace 'large'", "static")
    ebbflow(*options, "--budget", "0s").assert_refused("--budget 0s", "50min")
    ebbflow(*options, "--budget", "soon").assert_refused("soon")


def test_the_command_lists_and_shows_recipes(ebbflow: Ebbflow) -> None:
    listed = ebbflow("study", "--list", "--json").json
    assert [entry["name"] for entry in listed] == recipe_names()
    assert {"name": "lena-table1", "arms": 16, "summary": load_study("lena-table1").summary} in listed
    assert "lena-table1 " in ebbflow("study", "--list").text
    assert ebbflow("study", "demo", "--show").text == recipe_text("demo")


def test_a_study_is_shown_as_the_other_options_make_it(ebbflow: Ebbflow) -> None:
    options = ("--stand-in", "digits", "--scale", 0.1, "--seeds", 2, "--set", "precision=bf16")
    Path("mine.toml").write_text(ebbflow("study", "andre-table1", *options, "--show").text)
    mine = load_study("mine.toml")
    expected = scaled(with_stand_in(load_study("andre-table1"), "digits"), 0.1)
    assert mine.name == expected.name == "andre-table1-digits-x0.1"
    assert (mine.workloads, mine.rules, mine.traces) == (expected.workloads, expected.rules, expected.traces)
    assert (mine.seeds, mine.settings) == ((0, 1), {**expected.settings, "precision": "bf16"})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--stand-in", "nothing"), "no stand-in 'nothing'"),
        (("--stand-in", ""), "no stand-in ''"),
        (("--scale", 0), "the scale is 0"),
        (("--seeds", 0), "seeds is 0"),
        (("--set", "nonsense=1"), "nonsense"),
        (("--set", "optimizer=sgdd"), "did you mean 'sgd'"),
    ],
)
def test_what_cannot_be_applied_to_a_shown_study_is_refused(
    ebbflow: Ebbflow, options: tuple[object, ...], says: str
) -> None:
    ebbflow("study", "andre-table1", *options, "--show").assert_refused(says)


@pytest.mark.process
def test_one_reason_for_which_many_arms_fail_is_said_once(ebbflow: Ebbflow, tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(
        'workloads = ["cifar10-resnet18(width=2)", "digits-mlp(width=4)"]\nrules = ["linear", "sqrt"]\n'
        'traces = { two = "constant(workers=2)" }\nsettings = { epochs = 1 }\n'
    )
    answer = ebbflow("study", "study.toml", "--out", "out")
    assert answer.code == 1
    assert answer.err.count("needs its data") == 1
    assert "failed: 2 of 4 arms" in answer.err
