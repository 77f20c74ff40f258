"""What `ebbflow train` shows while it trains."""

from __future__ import annotations

import errno
import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from cli.answers import Ebbflow
from ebbflow.cli import train_progress
from ebbflow.core.signals import StopSignal
from ebbflow.record import StepRow, ValidationRow

TRAIN = ("train", "digits-mlp", "--trace", "constant(workers=4)", "--epochs", 2, "--out", "run")


def test_without_a_terminal_there_is_a_line_now_and_then(ebbflow: Ebbflow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_progress, "_FIRST_LINE_S", 0.0)  # now: after every step
    lines = ebbflow(*TRAIN).err.splitlines()
    record = Path("run/record.jsonl").read_text(encoding="utf-8")
    assert len(lines) == record.count('"kind":"step"')
    assert re.fullmatch(r"\d\d:\d\d:\d\d step 1  epoch 0  \d+% of the samples  workers 4  loss \d\.\d{3}", lines[0])
    accuracy = json.loads(next(line for line in record.splitlines() if '"kind":"validation"' in line))
    assert "epoch 1  100% of the samples  workers 4  loss" in lines[-1]
    assert lines[-1].endswith(f"accuracy {accuracy['metrics']['accuracy']:.4f}")


def test_beside_json_there_are_no_lines(ebbflow: Ebbflow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_progress, "_FIRST_LINE_S", 0.0)
    answer = ebbflow(*TRAIN, "--json")
    assert answer.json["status"] == "finished" and answer.err == ""


@pytest.mark.parametrize("what", [BrokenPipeError, OSError(errno.ENOSPC, "No space left on device")])
def test_a_line_that_cannot_be_printed_does_not_end_the_run(
    ebbflow: Ebbflow, monkeypatch: pytest.MonkeyPatch, what: OSError
) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise what

    monkeypatch.setattr(train_progress, "_FIRST_LINE_S", 0.0)
    monkeypatch.setattr(train_progress, "err", Console(file=Broken()))
    assert "finished after" in ebbflow(*TRAIN).text


def test_a_run_that_goes_on_says_so(ebbflow: Ebbflow, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as stopped:
        stopped.setattr(StopSignal, "requested", property(lambda self: True, lambda self, value: None), raising=False)
        assert ebbflow(*TRAIN).code == 3
    answer = ebbflow(*TRAIN)
    # One step of 4 workers with 8 samples each, of an epoch of 1442.
    assert answer.code == 0
    assert answer.err == f"run holds this run: it goes on after step 1, epoch {32 / 1442:.4g}\n"


def test_the_bar_has_one_line_of_80_columns_and_all_its_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = io.StringIO()
    monkeypatch.setattr(train_progress, "err", Console(file=screen, force_terminal=True, width=80, color_system=None))
    total, names = 115_306_300, ("accuracy", "mean_average_precision", "ema_accuracy", "ema_mean_average_precision")
    step = StepRow(
        step=9, time_s=0.0, wall_s=0.0, epoch=2, samples=1_280_000, workers=128, batch=1024, micro_batches=128,
        lr_base=0.1, lr=0.1, multiplier=1.0, loss=0.5,
    )  # fmt: skip
    scores = ValidationRow(step=9, epoch=1, samples=1, time_s=0, wall_s=0, metrics=dict.fromkeys(names, 0.25))
    with train_progress.TrainProgress(Path("run"), silent=False, quiet=False) as shown:
        shown.on_start(0, total)
        shown.on_step(step)
        shown.on_validation(scores)
    frames = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue()).replace("\n", "\r").split("\r")
    last = [frame for frame in frames if frame.strip()][-1]
    assert len(last) <= 80
    assert last.startswith("loss 0.500  accuracy 0.2500 ")
    assert "1280000/115306300 samples" in last and last.rstrip()[-1] in "0123456789:-"
