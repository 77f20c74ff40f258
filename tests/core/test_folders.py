"""One kind of run per folder: the second is refused, whatever is first, and changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

import ebbflow
from contract.suite import make_data, make_model
from ebbflow.core.folders import FolderKind, check_folder
from ebbflow.errors import CheckpointError, ConfigError
from ebbflow.live.job_description import check_record
from ebbflow.live.launcher import launch_fleet
from ebbflow.record import Header, RecordWriter, StepRow, read_record
from ebbflow.studies.grid import load_study
from ebbflow.studies.runner import run_study
from ebbflow.workloads import TensorSource, cross_entropy

SETTINGS: dict[str, Any] = {"rule": "linear", "epochs": 2, "trace": "constant(workers=2)"}


def session(out: Path, **changes: Any) -> ebbflow.Session:
    model = make_model()
    settings = {**SETTINGS, "loss": cross_entropy, "base_batch": 8, "local_batch": 4, **changes}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ebbflow.Session(model, optimizer, TensorSource(*make_data()), out=out, **settings)


def train(out: Path, **changes: Any) -> None:
    ebbflow.train(ebbflow.RunConfig(**{"workload": "digits-mlp", **SETTINGS, **changes}), out)


def train_by_session(out: Path) -> None:
    with session(out) as opened:
        opened.run()


def launch(out: Path) -> None:
    with launch_fleet(["--epochs", "1"], replicas=1, workload="digits-mlp", out=out):
        pass


def study(out: Path) -> None:
    run_study(replace(load_study("demo"), seeds=(0,)), out)


def choose(out: Path) -> None:
    ebbflow.choose("digits-mlp", trace="constant(workers=2)", budget="20%", epochs=20, out=out)


KINDS: dict[FolderKind, tuple[str, Callable[[Path], None]]] = {
    "run": ("a run of `ebbflow train`", train),
    "session": ("a run of an ebbflow.Session", train_by_session),
    "fleet": ("a job of `ebbflow launch`", launch),
    "study": ("a study of `ebbflow study`", study),
    "tournament": ("a tournament of `ebbflow choose`", choose),
}


def make_folder(kind: FolderKind, folder: Path) -> None:
    """A folder with what tells its kind; as of a run that was killed."""
    folder.mkdir()
    if kind in ("run", "session"):
        with RecordWriter(folder / "record.jsonl") as record:
            record.write(Header(config={"workload": "Net", **({"trace_text": "8"} if kind == "run" else {})}))
        (folder / "checkpoint.pt").write_bytes(b"a checkpoint")
        return
    names: dict[FolderKind, str] = {"fleet": "fleet.json", "study": "study.json", "tournament": "choose.json"}
    (folder / names[kind]).write_text(json.dumps({}))


@pytest.mark.parametrize(("first", "second"), list(permutations(KINDS, 2)))
def test_a_folder_of_one_kind_is_not_for_another(first: FolderKind, second: FolderKind, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    make_folder(first, folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ConfigError) as error:
        KINDS[second][1](folder)
    assert f"out holds {KINDS[first][0]} (" in str(error.value)
    assert f"and {KINDS[second][0]} would mix its files with those; give another out=, or move" in str(error.value)
    assert before == {path: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_for_more_of_its_kind_and_so_is_one_of_other_files(kind: FolderKind, tmp_path: Path) -> None:
    make_folder(kind, tmp_path / "out")
    check_folder(tmp_path / "out", kind)
    check_folder(tmp_path / "nothing", kind)
    (tmp_path / "notes.txt").touch()
    check_folder(tmp_path, kind)


def test_the_arms_and_replicas_alone_tell_the_kind(tmp_path: Path) -> None:
    for name in ("arms", "replicas"):
        (tmp_path / name).mkdir()
        with pytest.raises(ConfigError, match=rf"\({name}\)"):
            check_folder(tmp_path, "run")
        (tmp_path / name).rmdir()


def test_a_run_without_a_checkpoint_is_not_replaced_by_another_one(tmp_path: Path) -> None:
    """As after a kill before the first checkpoint: the same run begins anew, and any other one would erase its rows."""
    opened = session(tmp_path)
    with opened:
        steps = iter(opened)
        next(steps)
        next(steps)  # the first step is complete now
    (tmp_path / "checkpoint.pt").unlink()
    rows = (tmp_path / "record.jsonl").read_bytes()
    assert read_record(tmp_path / "record.jsonl").steps
    with pytest.raises(ConfigError, match=r"holds a run of another configuration .*epochs is 3, was 2.*another out="):
        session(tmp_path, epochs=3).__enter__()
    assert (tmp_path / "record.jsonl").read_bytes() == rows
    train_by_session(tmp_path)
    assert read_record(tmp_path / "record.jsonl").status == "finished"


def test_a_replica_does_not_go_on_with_the_record_of_another_job(tmp_path: Path) -> None:
    job = {"ebbflow": "1", "rule": "sqrt", "epochs": "3"}
    path = tmp_path / "record.jsonl"
    check_record(job, path, jobs_have=job, allow_changes=False)
    with RecordWriter(path) as record:
        record.write(Header(config={**job, "epochs": 3, "ebbflow": "0"}))
        check_record({**job, "rule": "linear"}, path, jobs_have=job, allow_changes=False)  # nothing was trained
        record.write(
            StepRow(step=0, time_s=0, wall_s=0, epoch=0, samples=8, workers=1, batch=8, micro_batches=1, lr_base=1,
                    lr=1, multiplier=1, loss=1)
        )  # fmt: skip
    check_record(job, path, jobs_have=job, allow_changes=False)
    check_record({**job, "epochs": 4}, path, jobs_have=job, allow_changes=True)
    with pytest.raises(CheckpointError, match=r"record.jsonl is of another job: rule is 'linear'"):
        check_record({**job, "rule": "linear"}, path, jobs_have=job, allow_changes=True)
