"""The command as scripts and people meet it: shapes that are fixed, and what bad input gets."""

from __future__ import annotations

import gzip
import html
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from cli.answers import Ebbflow
from ebbflow.cli.main import app
from ebbflow.core.files import hold_lock

TRACE = "time_s,accelerators\n0,4\n600,2\n1200,2\n"


# Shapes that scripts rely on ------------------------------------------------------------------------------------------


def test_trace_stats(ebbflow: Ebbflow) -> None:
    Path("t.csv").write_text(TRACE)
    assert json.loads(ebbflow("trace", "stats", "t.csv", "--json").out) == {
        "duration_s": 1200.0, "min": 2, "mean": 3.0, "max": 4, "changes": 1, "accelerator_hours": 1.0,
        "zero_fraction": 0.0,
    }  # fmt: skip


def test_plan(ebbflow: Ebbflow) -> None:
    Path("t.csv").write_text(TRACE)
    options = ("--local-batch", 8, "--step-time", "60s", "--samples", 100, "--epochs", 2, "--offset", "0s")
    # Steps of 32 samples; 100 = 3 * 32 + 4, so four steps an epoch.
    assert json.loads(ebbflow("plan", "t.csv", *options, "--json").out) == {
        "steps": 8, "time_s": 480.0, "samples": 200, "batch_min": 4, "batch_mean": 25.0, "batch_max": 32, "changes": 0,
    }  # fmt: skip


def test_rules(ebbflow: Ebbflow) -> None:
    rules = json.loads(ebbflow("rules", "--json").out)
    assert {tuple(rule) for rule in rules} == {("name", "kind", "needs", "cite", "summary")}
    assert {"constant", "linear", "sqrt", "power", "warmup"} <= {rule["name"] for rule in rules}
    assert {rule["kind"] for rule in rules} == {"rule", "modifier"}


@pytest.mark.process
def test_study_and_report(ebbflow: Ebbflow) -> None:
    Path("study.toml").write_text(
        'workloads = ["digits-mlp"]\nrules = ["linear"]\nseeds = 2\n'
        '[traces]\nstatic = "constant(workers=8)"\n[settings]\nepochs = 1\nlocal_batch = 32\n'
    )
    assert ebbflow("study", "study.toml", "--out", "out", "--jobs", 2).code == 0
    cells = json.loads(ebbflow("report", "out", "--json").out)["cells"]
    assert len(cells) == 1
    assert {"workload", "trace", "rule", "mean", "std", "seeds", "diverged"} <= set(cells[0])
    assert (cells[0]["workload"], cells[0]["trace"], cells[0]["rule"]) == ("digits-mlp", "static", "linear")


def test_train_and_resume(ebbflow: Ebbflow) -> None:
    options = ("train", "digits-mlp", "--epochs", 1, "--local-batch", 32, "--out", "run", "--json")
    first, second = json.loads(ebbflow(*options).out), json.loads(ebbflow(*options).out)
    assert first == second
    assert first["status"] == "finished"
    ebbflow(*options, "--rule", "sqrt").assert_refused("another configuration", "rule is 'sqrt', was 'adascale+")


def test_a_diverged_run_is_no_success(ebbflow: Ebbflow) -> None:
    options = ("train", "digits-mlp", "--epochs", 1, "--local-batch", 32, "--lr", "1e30", "--out", "run")
    first, again = ebbflow(*options), ebbflow(*options)
    assert (first.code, again.code) == (5, 5)
    assert "diverged" in first.out
    assert "nothing was trained" not in first.err
    assert "nothing was trained: run holds this run, which has ended" in again.err


@pytest.mark.process
def test_a_study_with_a_diverged_arm_reports_it_and_ends_with_code_5(ebbflow: Ebbflow) -> None:
    Path("study.toml").write_text(
        'workloads = ["digits-mlp"]\nrules = ["linear"]\n[traces]\nstatic = "constant(workers=8)"\n'
        "[settings]\nepochs = 1\nlocal_batch = 32\nlr = 1e30\n"
    )
    first, again = (ebbflow("study", "study.toml", "--out", "out", "--jobs", 1) for _ in range(2))
    assert (first.code, again.code) == (5, 5)
    assert "diverged: 1 of 1 arms" in first.err
    assert "nothing was trained: all 1 arms have ended before" in again.err


def test_two_runs_do_not_share_a_folder(ebbflow: Ebbflow) -> None:
    with hold_lock(Path("run/.run.lock")):
        answer = ebbflow("train", "digits-mlp", "--epochs", 1, "--local-batch", 32, "--out", "run")
    answer.assert_refused("another run is writing into run")


@pytest.mark.process
def test_importing_the_command_does_not_import_torch() -> None:
    code = "import sys, ebbflow, ebbflow.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_version_and_help(ebbflow: Ebbflow) -> None:
    assert ebbflow("--version").out.startswith("ebbflow ")
    for verb in ("demo", "trace", "plan", "rules", "workloads", "train", "study", "report"):
        assert verb in ebbflow("--help").out
        assert ebbflow(verb, "--help").code == 0


def verbs(command: Any, *path: str) -> Iterator[tuple[str, ...]]:
    for name, below in command.commands.items():
        yield from verbs(below, *path, name) if hasattr(below, "commands") else [(*path, name)]


@pytest.mark.parametrize("verb", [*verbs(get_command(app))], ids=" ".join)
def test_the_help_of_a_verb_fits_eighty_columns_whole_with_its_examples(
    verb: tuple[str, ...], ebbflow: Ebbflow
) -> None:
    text = ebbflow(*verb, "--help", width=80).out
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines())
    assert "…" not in text, "a word was cut"
    command: Any = get_command(app)
    for name in verb:
        command = command.commands[name]
    for paragraph in command.help.split("\n\n"):
        if paragraph.lstrip().startswith("ebbflow "):
            assert all(f"  {line.strip()}" in text for line in paragraph.strip().splitlines())
        else:
            assert " ".join(paragraph.split()) in " ".join(text.split())


def test_the_table_of_workloads_fits_eighty_columns_and_says_what_data_each_needs(ebbflow: Ebbflow) -> None:
    from ebbflow.workloads import WORKLOADS

    text = ebbflow("workloads", width=80).text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "digits-cnn, digits-mlp" in text
    assert "The others read the data that they name from --data" in " ".join(text.split())
    data = (
        "CIFAR-10",
        "ImageNet",
        "COCO",
        "ADE20K",
        "Fashion-MNIST",
        "text file",
        "folders",
        "digits",
        "quadratic",
        "token files",
    )
    for entry in WORKLOADS:
        if entry.make.__module__.startswith("ebbflow."):
            assert any(word in entry.summary for word in data), entry.summary


@pytest.mark.process
def test_a_preempted_run_writes_a_checkpoint_and_continues(tmp_path: Path) -> None:
    """SIGTERM is what a cloud sends before it takes the machine."""
    command = [sys.executable, "-m", "ebbflow", "train", "digits-mlp", "--local-batch", "2", "--epochs", "200"]
    record = tmp_path / "run" / "record.jsonl"
    end = time.monotonic() + 120
    with subprocess.Popen([*command, "--out", str(record.parent)], stderr=subprocess.PIPE, text=True) as process:
        try:
            while not (record.exists() and b'"step"' in record.read_bytes()):
                assert time.monotonic() < end
                assert process.poll() is None
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            _, told = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 3
    assert "the same command continues" in told
    assert (tmp_path / "run" / "checkpoint.pt").is_file()


# What bad input gets --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"time_s,accelerators\n", "t.csv"),
        (b"time_s,accelerators\n0,4\n", "t.csv"),
        (b"\x00\x01\x02\xff\xfe", "binary"),
        (gzip.compress(TRACE.encode(), mtime=0)[:-9], "gzip"),
        (b"time_s,accelerators\n0,4\n60,-1\n90,1\n", "t.csv:3"),
        (b"time_s,accelerators\n0,4\n60,1.5\n90,1\n", "t.csv:3"),
        (b"time_s,accelerators\n0,4\n60,\n90,1\n", "t.csv:3"),
        (b"time_s,accelerators\n0,4\n60\n90,1\n", "t.csv:3"),
        (b"time_s,accelerators\n0,4\n60,3\n30,1\n", "t.csv:4"),
        (b"time_s,accelerators\n0,4\nnan,3\n90,1\n", "t.csv:3"),
        (b"step,batchsize\n0,128\n1,128\n", "batch"),
    ],
)
@pytest.mark.parametrize("verb", ["stats", "show"])
def test_bad_traces(ebbflow: Ebbflow, content: bytes, message: str, verb: str) -> None:
    Path("t.csv").write_bytes(content)
    ebbflow("trace", verb, "t.csv").assert_refused(message)


def test_missing_files_and_unknown_names(ebbflow: Ebbflow) -> None:
    ebbflow("trace", "stats", "none.csv").assert_refused("none.csv: no such file")
    ebbflow("trace", "stats", "poison(workers=3)").assert_refused("did you mean 'poisson'")
    ebbflow("train", "digits-mpl").assert_refused("did you mean 'digits-mlp'")
    ebbflow("train", "digits-mlp", "--rule", "lineer").assert_refused("did you mean 'linear'")
    ebbflow("train", "digits-mlp", "--rule", "linear+warmpu(5ep)").assert_refused("did you mean 'warmup'")
    ebbflow("train", "digits-mlp", "--rule", "linear+warmup(5)").assert_refused("has no unit; write 5ep")
    ebbflow("train", "digits-mlp", "--optimizer", "sgdd").assert_refused("did you mean 'sgd'")
    ebbflow("train", "digits-mlp", "--schedule", "cosin").assert_refused("did you mean 'cosine'")
    ebbflow("train", "digits-mlp", "--policy", "folow").assert_refused("did you mean 'follow'")
    ebbflow("train", "digits-mlp", "--step-time", "0.6").assert_refused("has no unit; write 0.6s")
    ebbflow("train", "digits-mlp", "--plugin", "none.py").assert_refused("none.py does not exist")
    ebbflow("train", "digits-mlp", "--epochs", "0").assert_refused("epochs is 0")
    ebbflow("train", "digits-mlp", "--device", "cuda:7").assert_refused("cuda:7")
    ebbflow("train", "shakespeare-gpt").assert_refused("text")
    ebbflow("report", "none").assert_refused("none does not exist")
    ebbflow("study", "none.toml").assert_refused("none.toml: cannot be read")
    ebbflow("rules", "show", "liner").assert_refused("did you mean 'linear'")
    assert not Path("runs").exists(), "nothing was begun"


def test_a_plan_too_short_says_how_far_it_reaches(ebbflow: Ebbflow) -> None:
    Path("t.csv").write_text(TRACE)
    options = ("--local-batch", 8, "--step-time", "60s", "--samples", 100, "--epochs", 90)
    ebbflow("plan", "t.csv", *options).assert_refused("of 90 epochs", "repeat")
    assert ebbflow("plan", "t.csv", *options, "--repeat").code == 0
    train = ("train", "digits-mlp", "--trace", "t.csv", "--step-time", "60s", "--local-batch", 8)
    ebbflow(*train).assert_refused("of 30 epochs")


def test_a_batch_that_is_not_a_multiple_of_the_local_batch(ebbflow: Ebbflow) -> None:
    Path("b.csv").write_text("step,batchsize\n0,96\n1,100\n")
    ebbflow("train", "digits-mlp", "--plan", "b.csv", "--local-batch", 32).assert_refused("b.csv:3", "100", "32")


def test_a_damaged_or_foreign_checkpoint(ebbflow: Ebbflow) -> None:
    train = ("train", "digits-mlp", "--epochs", 1, "--local-batch", 32, "--out", "run")
    ebbflow(*train)
    Path("run/checkpoint.pt").write_bytes(b"not a checkpoint")
    ebbflow(*train).assert_refused("checkpoint", "damaged")

    import torch

    config = json.loads(Path("run/record.jsonl").read_text().partition("\n")[0])["config"]
    settings = {**config, "trace": config["trace_text"]}
    weights = torch.load("run/weights.pt", weights_only=True)["model"]
    torch.save({"version": 2, "model": weights, "settings": settings}, "run/checkpoint.pt")
    ebbflow(*train, "--rule", "sqrt").assert_refused("other settings", "rule is 'sqrt', was 'adascale+")
    first = next(iter(weights))
    torch.save({"version": 2, "model": {**weights, first: torch.zeros(1)}, "settings": settings}, "run/checkpoint.pt")
    ebbflow(*train).assert_refused("another model", "shape")
    assert "end" in Path("run/record.jsonl").read_text(), "the record is as it was"


def test_an_output_folder_that_cannot_be_written(ebbflow: Ebbflow) -> None:
    Path("file").write_text("")
    ebbflow("train", "digits-mlp", "--out", "file/run").assert_refused("cannot be written")
    Path("t.csv").write_text(TRACE)
    ebbflow("trace", "convert", "t.csv", "file/out.csv").assert_refused("file/out.csv", "cannot be written")
    ebbflow("study", "demo", "--out", "file/x").assert_refused("cannot be written")


def test_what_train_prints_can_be_copied_from_a_narrow_terminal(ebbflow: Ebbflow) -> None:
    folder = "runs/[bold] " + "a-long-name-" * 8
    arguments = ("train", "digits-mlp", "--epochs", 1, "--local-batch", 64, "--out", folder)
    assert ebbflow(*arguments).code == 0
    lines = ebbflow(*arguments, width=80).text.splitlines()  # found finished: only the answer is printed
    assert f"record: {folder}/record.jsonl" in lines
    assert f"report: ebbflow report '{folder}'" in lines


PLUGIN_WITHOUT_SOME = """
import dataclasses
from ebbflow.workloads import Recipe, Task, build, recipe, register_workload

@register_workload("some-digits", recipe=recipe("digits-mlp"))
def some_digits(recipe: Recipe) -> Task:
    "Digits, of which some are left out."
    left_out = {"train": {"crowd boxes": 3, "images without boxes": 2}, "val": {"<b> boxes": 1}}
    return dataclasses.replace(build("digits-mlp(width=8)"), left_out=left_out)
"""


def test_what_is_left_out_of_the_data_is_said_by_train_and_by_the_report(ebbflow: Ebbflow) -> None:
    Path("plugin.py").write_text(PLUGIN_WITHOUT_SOME)
    train = ("train", "some-digits", "--plugin", "plugin.py", "--epochs", 1, "--local-batch", 64, "--out", "run")
    line = "left out of the data, or changed: train: 3 crowd boxes, 2 images without boxes; val: 1 <b> boxes"
    assert line in ebbflow(*train).text.splitlines()
    assert ebbflow(*train, "--json").json["left_out"] == line.partition(": ")[2]
    assert f"some-digits: {line}" in ebbflow("report", "run").text.splitlines()
    assert f"L{html.escape(line[1:])}" in Path("run/report/index.html").read_text()


@pytest.mark.process
def test_a_terminal_that_lacks_a_character_gets_no_traceback() -> None:
    command = [sys.executable, "-m", "ebbflow", "trace", "show", "constant(4)"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "4 to 4 workers" in answer.stdout


@pytest.mark.process
def test_a_study_whose_arms_fail_reports_and_ends_with_code_1(ebbflow: Ebbflow) -> None:
    Path("study.toml").write_text(
        'workloads = ["digits-mlp"]\nrules = ["linear"]\n[traces]\nstatic = "constant(workers=8)"\n'
        '[settings]\ndevice = "cuda:99"\n'
    )
    answer = ebbflow("study", "study.toml", "--out", "out", "--jobs", 1)
    assert answer.code == 1
    assert "device cuda:99 was asked for, but torch sees" in answer.err
    assert "The table is not complete: 1 failed." in answer.out


def test_a_study_without_its_data_is_refused_before_it_begins(ebbflow: Ebbflow) -> None:
    Path("study.toml").write_text(
        'workloads = ["shakespeare-gpt"]\nrules = ["linear", "sqrt"]\ntraces = "constant(8)"\n'
    )
    answer = ebbflow("study", "study.toml", "--out", "out")
    answer.assert_refused("needs its data: give with --data (in a study: --set data=)", "all 2 arms would fail")
    assert not Path("out").exists()


def test_a_damaged_last_line_of_a_record_is_reported_and_the_rest_used(ebbflow: Ebbflow) -> None:
    ebbflow("train", "digits-mlp", "--epochs", 2, "--local-batch", 32, "--out", "run")
    record = Path("run/record.jsonl")
    record.write_bytes(record.read_bytes()[:-30])
    answer = ebbflow("report", "run")
    assert answer.code == 0
    assert "last line is incomplete" in answer.err
