"""`ebbflow study`: what its options do to a study, and the recipes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.answers import Ebbflow
from ebbflow.studies.grid import load_study, recipe_names, recipe_text


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


def test_the_command_lists_and_shows_recipes(ebbflow: Ebbflow) -> None:
    listed = ebbflow("study", "--list", "--json").json
    assert [entry["name"] for entry in listed] == recipe_names()
    assert {"name": "lena-table1", "arms": 16, "summary": load_study("lena-table1").summary} in listed
    assert "lena-table1 " in ebbflow("study", "--list").text
    assert ebbflow("study", "demo", "--show").text == recipe_text("demo")
