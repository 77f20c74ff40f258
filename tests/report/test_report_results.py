"""Reading folders of records: what is there, what is missing, and what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import ebbflow
from ebbflow.errors import RecordError
from ebbflow.report.results import load_results
from ebbflow.report.summary import summarise

MakeRecord = Callable[..., Path]


def test_a_study_has_all_arms_of_its_grid_also_the_missing_one(study: Path) -> None:
    results = load_results(study)
    assert results.name == "Which rule for a fleet that breathes?"
    assert results.command == "ebbflow study fleet.toml --out fleet"
    assert len(results.arms) == 24  # 2 workloads x 2 traces x 3 rules x 2 seeds
    missing = [(a.workload, a.trace, a.rule, a.seed) for a in results.arms if a.status == "missing"]
    assert missing == [("tiny-gpt", "gpu", "constant", 1)]


def test_a_damaged_last_line_is_reported_and_the_rest_used(study: Path) -> None:
    results = load_results(study)
    (cut,) = [arm for arm in results.arms if arm.damage]
    assert cut.status == "interrupted"
    assert cut.values.size == 5  # the five epochs before the crash
    assert results.problems == [cut.damage]
    assert "record.jsonl, line " in cut.damage
    assert "stopped after step" in cut.note


def test_one_run_can_be_given_by_folder_or_by_file(tmp_path: Path, make_record: MakeRecord) -> None:
    path = make_record(tmp_path / "run" / "record.jsonl", last=(0.9,))
    for given in (path, path.parent):
        results = load_results(given)
        assert len(results.arms) == 1
        assert results.folder == path.parent
        assert results.name == "digits-mlp on static"


def test_progress_counts_epochs_with_their_fraction(tmp_path: Path, make_record: MakeRecord) -> None:
    path = make_record(tmp_path / "record.jsonl", last=(0.9,), trace="static")
    (arm,) = load_results(path).arms
    # 8 workers x 8 samples = 64 of 1437 samples after the first step; 9 whole epochs after the last.
    assert arm.columns["position"][0] == pytest.approx(64 / 1437)
    assert arm.columns["position"][-1] == pytest.approx(9)


def test_a_run_ends_when_its_last_step_does_however_long_that_takes(tmp_path: Path) -> None:
    """A time per epoch: four steps of one worker take 1 s each, those of four workers 4 s."""
    model = torch.nn.Linear(2, 2)
    data = TensorDataset(torch.randn(128, 2), torch.randint(2, (128,)))
    with ebbflow.Session(
        model, torch.optim.SGD(model.parameters(), lr=0.1), data, rule="sqrt", base_batch=16, local_batch=16, epochs=2,
        trace="0s:1 4s:4 100s", step_time="8s/ep", evaluate=lambda: {"loss": 0.5}, out=tmp_path,
        loss=lambda model, x, y: torch.nn.functional.cross_entropy(model(x), y),
    ) as session:  # fmt: skip
        session.run()
    assert [(row.time_s, row.duration_s, row.workers) for row in session.record.steps] == [
        (0, 1, 1), (1, 1, 1), (2, 1, 1), (3, 1, 1), (4, 4, 4), (8, 4, 4), (12, 4, 4)
    ]  # fmt: skip
    (arm,) = load_results(tmp_path).arms
    assert (arm.end_s, list(arm.times)) == (16, [8, 16])
    # 4 s with one worker and 12 s with four; the first epoch takes 4 s of each.
    assert arm.worker_hours(arm.end_s) * 3600 == pytest.approx(52)
    assert arm.worker_hours(arm.times[0]) * 3600 == pytest.approx(20)
    assert summarise([arm]).cells[0].time_s == 16
    without_trace = replace(arm, header=None)
    assert without_trace.worker_hours(arm.end_s) * 3600 == pytest.approx(52)


def test_records_that_do_not_say_how_long_a_step_took_are_still_read(tmp_path: Path, make_record: MakeRecord) -> None:
    path = make_record(tmp_path / "record.jsonl", last=(0.9,), trace="static")
    older = path.read_text().replace('"duration_s":null,', "")
    assert '"duration_s"' not in older
    path.write_text(older)
    (arm,) = load_results(path).arms
    assert arm.end_s == 9 * 23 * 13.0  # a step begins every 13 s, and the last is taken to last as long


def test_the_smaller_last_step_of_an_epoch_is_left_out_of_whole_steps(tmp_path: Path, make_record: MakeRecord) -> None:
    path = make_record(tmp_path / "record.jsonl", last=(0.9,), trace="static")
    (arm,) = load_results(path).arms
    # 1437 = 22 * 64 + 29: 23 steps per epoch, the last one with 29 samples; 9 epochs.
    assert arm.steps == 9 * 23
    (batch,) = arm.whole_steps("batch")
    assert batch.size == 9 * 22
    assert np.all(batch == 64)


def test_the_step_before_a_smaller_last_one_is_drawn_to_the_end_of_its_epoch(
    tmp_path: Path, make_record: MakeRecord
) -> None:
    path = make_record(tmp_path / "record.jsonl", last=(0.9,), trace="static")
    (arm,) = load_results(path).arms
    ends, batch = arm.over_epochs("batch")
    assert ends.size == batch.size == 9 * 22
    # Otherwise a rate that falls at epoch 1 would be drawn from 22 * 64/1437 = 0.98 on, and with two steps per epoch
    # from the middle of the epoch on.
    assert ends[20:23] == pytest.approx([21 * 64 / 1437, 1, 1 + 64 / 1437])
    assert ends[-1] == pytest.approx(9)


def test_a_step_that_is_smaller_because_workers_left_is_a_whole_step(tmp_path: Path, make_record: MakeRecord) -> None:
    path = make_record(tmp_path / "record.jsonl", last=(0.9,), trace="gpu")
    (arm,) = load_results(path).arms
    batch, workers = arm.whole_steps("batch", "workers")
    assert np.all(batch == 8 * workers)
    assert set(workers) == {12, 24, 16, 8, 20}  # every level that training met


def test_an_arm_that_cannot_be_read_is_named_and_the_others_are_used(tmp_path: Path, make_record: MakeRecord) -> None:
    make_record(tmp_path / "arms" / "good" / "record.jsonl", last=(0.9,))
    bad = tmp_path / "arms" / "bad" / "record.jsonl"
    bad.parent.mkdir()
    bad.write_bytes(b"\x00\xffnot a record\n{}\n")
    results = load_results(tmp_path)
    assert [(arm.id, arm.status) for arm in results.arms] == [("good", "finished"), ("bad", "unreadable")]
    assert "bad/record.jsonl, line 1" in results.problems[0]


def test_an_end_written_for_a_killed_process_does_not_hide_what_was_done(tmp_path: Path) -> None:
    rows = [
        {"kind": "header", "version": 1, "config": {"workload": "w", "rule": "r", "trace": "t", "seed": 0}},
        {
            "kind": "step", "step": 0, "time_s": 0, "wall_s": 2.5, "epoch": 0, "samples": 64, "workers": 2, "batch": 64,
            "pieces": 2, "lr_base": 0.1, "lr": 0.1, "multiplier": 1, "loss": 1.0,
        },
        {"kind": "end", "status": "failed", "steps": 1, "samples": 0, "wall_s": 0.0, "text": "killed"},
    ]  # fmt: skip
    (tmp_path / "record.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (arm,) = load_results(tmp_path).arms
    assert (arm.status, arm.samples, arm.wall_s, arm.note) == ("failed", 64, 2.5, "killed")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "is not the folder of a study or a run; expected study.json with arms/, or a record.jsonl"),
        ({"replicas/r0/record.jsonl": ""}, "has no header"),
        ({"study.json": "{}"}, "has no records yet; expected arms/"),
        ({"study.json": "{", "arms/a/record.jsonl": ""}, "study.json is not JSON"),
        ({"study.json": "[]", "arms/a/record.jsonl": ""}, "is not the file of a study"),
        (
            {"study.json": '{"version": 9}', "arms/a/record.jsonl": ""},
            "has study version 9, this ebbflow reads up to 1",
        ),
        ({"study.json": "{}", "arms/a/record.jsonl": ""}, "has no records yet; .* or wait until it begins"),
        (
            {"study.json": "{}", "arms/a/record.jsonl": '{"kind":"event","step":1,"what":"x"}\n'},
            "has no record that can be read; the first says: .* no header",
        ),
        (
            {"study.json": "{}", "arms/a/record.jsonl": '{"kind":"header","version":2,"config":[]}\n'},
            "has no record that can be read; the first says: .* it was damaged or edited",
        ),
        ({"record.jsonl": "nonsense\n"}, "line 1: not a row of a record"),
    ],
)
def test_what_cannot_be_read_says_what_was_expected(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(RecordError, match=message):
        load_results(tmp_path)


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="nowhere does not exist; give the folder"):
        load_results(tmp_path / "nowhere")


def test_arms_that_the_study_leaves_out_are_not_missing(study: Path, tmp_path: Path) -> None:
    study = shutil.copytree(study, tmp_path / "study")
    path = study / "study.json"
    content = json.loads(path.read_text())
    lost = [arm for arm in load_results(study).arms if arm.status == "missing"]
    assert lost, "the study of this test has an arm without a record"
    content["config"]["skip"] = [{"rule": [lost[0].rule], "trace": lost[0].trace, "seed": lost[0].seed}]
    path.write_text(json.dumps(content))
    after = [arm for arm in load_results(study).arms if arm.status == "missing"]
    assert len(after) == len(lost) - 1


def test_a_seed_counts_once_and_the_older_record_is_named(tmp_path: Path, make_record: MakeRecord) -> None:
    # Twice seed 0, as another version of the package, which names the folders differently, leaves them behind.
    for name, value, created in (("a_new", 0.9, "2026-02-01"), ("b_old", 0.5, "2026-01-01")):
        path = make_record(tmp_path / "arms" / name / "record.jsonl", last=[value] * 3, seed=0)
        path.write_text(path.read_text().replace("2025-01-01", created, 1))
    make_record(tmp_path / "arms" / "c" / "record.jsonl", last=[0.8] * 3, seed=1)
    results = load_results(tmp_path)
    assert [(arm.id, arm.seed) for arm in results.arms] == [("a_new", 0), ("c", 1)]
    assert results.problems == [
        "arms/b_old is left out: arms/a_new is a newer record of constant on static, seed 0"
    ]  # fmt: skip
    (cell,) = summarise(results.arms).cells
    assert cell.values == pytest.approx((0.9, 0.8))
