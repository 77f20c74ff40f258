"""TensorBoard, Weights & Biases and MLflow, with the libraries themselves: every row of a record arrives."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import ebbflow
from ebbflow.core.trackers import check_tracker, open_tracker
from ebbflow.errors import ConfigError, MissingExtra, OutputError
from ebbflow.record import read_record

SETTINGS: dict[str, Any] = {"trace": "0s:4 3s:2 7s:5 60s", "step_time": "1s", "rule": "adascale", "base_batch": 8}
Read = Callable[[Path], dict[str, list[tuple[int, float]]]]


def tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def records_of(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log, as which Weights & Biases writes its offline runs: blocks of 32 KiB, in which each
    part of a record has a header of checksum, length and kind (1: whole, 2: first, 3: middle, 4: last)."""
    position, parts = 7, b""  # behind the header of the file
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        size, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        parts += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):
            yield parts
            parts = b""


def wandb(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What the files of offline runs hold, which `wandb sync` uploads."""
    import wandb as library
    from wandb.proto import wandb_internal_pb2

    library.teardown()  # ends its process, which writes the files
    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for data in records_of(path.read_bytes()):
            row = wandb_internal_pb2.Record()
            row.ParseFromString(data)
            items = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in row.history.item}
            for name, value in items.items():
                if isinstance(value, int | float) and "step" in items:
                    found.setdefault(name, []).append((items["step"], value))
    return found


def mlflow(folder: Path) -> dict[str, list[tuple[int, float]]]:
    import mlflow

    client = mlflow.MlflowClient((folder / "mlflow").resolve().as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("ebbflow").experiment_id])
    return {
        name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)] for name in run.data.metrics
    }


READERS: dict[str, Read] = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow}


@pytest.fixture(autouse=True)
def of_this_test_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_PROJECT", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


def trained(out: Path | None, **settings: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    data = TensorDataset(torch.randn(60, 4), torch.randn(60, 1))
    own = {**SETTINGS, "local_batch": 4, "epochs": 1, "out": out, **settings}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ebbflow.Session(
        model,
        optimizer,
        data,
        loss=lambda net, x, y: (net(x) - y).square().mean(),
        evaluate=lambda: {"score": 0.5},
        **own,
    ) as session:
        session.run()


@pytest.mark.process
@pytest.mark.parametrize("name", READERS)
def test_every_row_of_a_record_arrives(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed: pip install 'ebbflow[{name}]'")
    trained(tmp_path, tracker=name)
    found, record = READERS[name](tmp_path), read_record(tmp_path / "record.jsonl")
    steps = record.steps
    assert len(steps) == 5  # of 16, 16, 16, 8 and the last 4 samples
    for key, values in {
        "workers": [row.workers for row in steps],
        "batch_ratio": [row.batch / 8 for row in steps],
        "multiplier": [row.multiplier for row in steps],
        "noise_scale": [row.stats["noise_scale"] for row in steps if "noise_scale" in row.stats],
        "loss": [row.loss for row in steps],
        "validation/score": [0.5],
    }.items():
        assert values and [value for _, value in found[key]] == pytest.approx(values, rel=1e-6)
        if key in ("workers", "loss"):
            assert [step for step, _ in found[key]] == [0, 1, 2, 3, 4]


@pytest.mark.process
def test_events_and_settings_arrive(tmp_path: Path) -> None:
    for name in READERS:
        pytest.importorskip(name, reason=f"{name} is not installed: pip install 'ebbflow[{name}]'")
    tracker = open_tracker("tensorboard, mlflow, wandb", tmp_path, name="a run")
    tracker.settings({"rule": "sqrt", "clip": None})
    tracker.event(3, "lost step", "a worker left")
    tracker.scalars(3, {"loss": math.nan, "workers": 2})  # what is not a number is left out
    tracker.close()
    import mlflow as library
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    client = library.MlflowClient((tmp_path / "mlflow").resolve().as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("ebbflow").experiment_id])
    assert run.data.params == {"rule": "sqrt"} and run.data.metrics == {"workers": 2}
    assert run.data.tags["event.00000003.lost-step"] == "a worker left"
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert "events/lost step/text_summary" in events.Tags()["tensors"]
    assert wandb(tmp_path)["workers"] == [(3, 2)]


def test_a_run_that_continues_is_one_run(tmp_path: Path) -> None:
    """TensorBoard shows the steps up to the one from which it goes on, and then the new ones."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'ebbflow[tensorboard]'")
    for first, numbers in ((0, range(6)), (4, range(4, 8))):
        tracker = open_tracker("tensorboard", tmp_path, name="a run", step=first)
        for step in numbers:
            tracker.scalars(step, {"loss": float(first)})
        tracker.close()
    assert tensorboard(tmp_path)["loss"] == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 4), (5, 4), (6, 4), (7, 4)]


def test_the_two_line_script_has_a_tracker(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'ebbflow[tensorboard]'")
    model, data = torch.nn.Linear(4, 1), TensorDataset(torch.randn(40, 4), torch.randn(40, 1))
    sampler = ebbflow.ElasticSampler(data, 2, local_batch=4)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = ebbflow.ElasticOptimizer(
        inner, rule="adascale", base_batch=4, sampler=sampler, tracker=f"tensorboard({tmp_path})"
    )
    for x, y in DataLoader(data, batch_sampler=sampler):
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer._tracker.close()  # type: ignore[union-attr]
    found = tensorboard(tmp_path)
    assert found["batch_ratio"] == [(step, 2.0) for step in range(5)]
    assert {"workers", "multiplier", "noise_scale", "lr", "lr_base", "samples"} <= found.keys()


SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from ebbflow import ElasticOptimizer, ElasticSampler
model, data = torch.nn.Linear(4, 1), TensorDataset(torch.randn(40, 4), torch.randn(40, 1))
sampler = ElasticSampler(data, 2, local_batch=4)
inner = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = ElasticOptimizer(inner, "sqrt", base_batch=4, sampler=sampler, tracker="wandb, tensorboard")
for x, y in DataLoader(data, batch_sampler=sampler):
    (model(x) - y).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.process
def test_the_trackers_of_a_script_are_closed_at_its_end(tmp_path: Path) -> None:
    """Before the libraries end their own processes: nothing is lost, and the script ends without a traceback."""
    for name in ("wandb", "tensorboard"):
        pytest.importorskip(name, reason=f"{name} is not installed: pip install 'ebbflow[{name}]'")
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0 and "Traceback" not in result.stderr, result.stderr[-3000:]
    for read in (wandb, tensorboard):
        assert [step for step, _ in read(tmp_path / "runs")["workers"]] == [0, 1, 2, 3, 4]


@pytest.mark.process
def test_runs_that_begin_anew_in_a_folder_are_several_runs(tmp_path: Path) -> None:
    """Two starts from the first sample, and a part that goes on with the second of them."""
    library = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install 'ebbflow[mlflow]'")
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'ebbflow[tensorboard]'")
    for rule, step in (("sqrt", 0), ("linear", 0), ("linear", 2)):
        tracker = open_tracker("mlflow, tensorboard", tmp_path, name="a run", step=step, several_runs=True)
        tracker.settings({"rule": rule})
        tracker.scalars(step, {"workers": 2})
        tracker.close()
    client = library.MlflowClient((tmp_path / "mlflow").resolve().as_uri())
    runs = client.search_runs([client.get_experiment_by_name("ebbflow").experiment_id])
    assert {run.data.params["rule"]: len(client.get_metric_history(run.info.run_id, "workers")) for run in runs} == {
        "sqrt": 1,
        "linear": 2,
    }
    assert [len(list((tmp_path / "tensorboard" / place).glob("events.*"))) for place in ("", "2")] == [1, 2]


@pytest.mark.process
def test_settings_of_a_run_that_continues_may_have_changed(tmp_path: Path) -> None:
    """MLflow lets no parameter change; what is different is a tag."""
    library = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install 'ebbflow[mlflow]'")
    for device in ("cpu", "cuda"):
        tracker = open_tracker("mlflow", tmp_path, name="a run", step=3)
        tracker.settings({"rule": "sqrt", "device": device})
        tracker.close()
    client = library.MlflowClient((tmp_path / "mlflow").resolve().as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("ebbflow").experiment_id])
    assert run.data.params == {"rule": "sqrt", "device": "cpu"} and run.data.tags["changed.device"] == "cuda"


@pytest.mark.process
def test_the_arms_of_a_study_have_it_as_a_setting(tmp_path: Path) -> None:
    """A study of two arms, each with its event files."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'ebbflow[tensorboard]'")
    study = tmp_path / "study.toml"
    study.write_text(
        'workloads = ["quadratic"]\nrules = ["linear", "sqrt"]\ntraces = ["constant(workers=2)"]\nseeds = [0]\n'
        '[settings]\nepochs = 1\ntracker = "tensorboard"\n',
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "ebbflow", "study", str(study), "--out", str(tmp_path / "out"), "--jobs", "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert len({path.parent for path in (tmp_path / "out").rglob("events.out.tfevents.*")}) == 2


@pytest.mark.process
def test_a_fleet_sends_every_step_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'ebbflow[tensorboard]'")
    pytest.importorskip("torchft", reason="the live engine needs torchft: pip install 'ebbflow[live]'")
    command = [sys.executable, "-m", "ebbflow", "launch", "--replicas", "2", "--out", str(tmp_path)]
    settings = ["--workload", "quadratic", "--epochs", "1", "--tracker", "tensorboard"]
    result = subprocess.run([*command, *settings], capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    steps = [step for step, _ in tensorboard(tmp_path)["workers"]]
    assert len(steps) > 1 and steps == list(range(len(steps)))


def test_a_tracker_that_does_not_exist_is_refused_before_the_run_begins(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'tensorboard'"):
        check_tracker("tensorbord")
    with pytest.raises(ConfigError, match="give out="):
        trained(None, tracker="tensorboard")
    with pytest.raises(ConfigError, match="tracker is 'tenserboard'"):
        trained(tmp_path, tracker="tenserboard")
    assert not (tmp_path / "record.jsonl").exists()


def test_a_tracker_whose_library_is_missing_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbflow.core.trackers.find_spec", lambda name: None)  # nothing is installed
    config = ebbflow.RunConfig(workload="digits-mlp", tracker="mlflow", epochs=1)
    with pytest.raises(MissingExtra, match=r"the tracker mlflow needs mlflow-skinny.*pip install 'ebbflow\[mlflow\]'"):
        ebbflow.train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_cannot_be_opened_or_is_named_twice_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'ebbflow[tensorboard]'")
    (tmp_path / "file").touch()
    with pytest.raises(
        OutputError, match=r"tensorboard\(.*file/logs\) cannot be opened \(NotADirectoryError.*leave it out"
    ):
        open_tracker(f"tensorboard({tmp_path / 'file' / 'logs'})", tmp_path, name="a run")
    with pytest.raises(ConfigError, match="has an entry twice"):
        check_tracker("tensorboard, tensorboard")


@pytest.mark.process
def test_a_tracker_that_fails_ends_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """MLflow's file store is replaced by a file; TensorBoard, which stands behind it, gets every step."""
    for name in ("mlflow", "tensorboard"):
        pytest.importorskip(name, reason=f"{name} is not installed: pip install 'ebbflow[{name}]'")
    tracker = open_tracker("mlflow, tensorboard", tmp_path, name="a run")
    for step in range(4):
        if step == 1:
            shutil.rmtree(tmp_path / "mlflow")
            (tmp_path / "mlflow").touch()
        tracker.scalars(step, {"loss": 1.0})
    tracker.close()
    assert tensorboard(tmp_path)["loss"] == [(step, 1.0) for step in range(4)]
    assert [record.getMessage()[:40] for record in caplog.records if "tracker" in record.name] == [
        "the tracker mlflow fails and gets nothing"[:40]
    ]
