"""Runs of different code are never mixed: not in a study, not in a folder of `train`, not in a report."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ebbflow import workloads
from ebbflow.core.plugins import load_plugins
from ebbflow.errors import CheckpointError, CodeChanged, ConfigError
from ebbflow.record import StepRow, read_record
from ebbflow.report.results import load_results
from ebbflow.report.summary import summarise
from ebbflow.run.config import RunConfig
from ebbflow.run.loop import Callbacks
from ebbflow.run.training import train
from ebbflow.studies.grid import Study, parse_study
from ebbflow.studies.runner import ArmProgress, run_study

PLUGIN = '''
from pathlib import Path
import torch
from torch import nn
import ebbflow
from ebbflow.workloads import Recipe, Task, TensorSource

WIDTH = 4
RECIPE = Recipe(ref_batch=8, local_batch=4, lr=0.05, optimizer="sgd", schedule="constant", epochs=2, metric="loss",
                higher_is_better=False)

@ebbflow.register_workload("test-edited", recipe=RECIPE)
def edited(recipe: Recipe) -> Task:
    """A regression; a file beside the plugin stands for code that it imports."""
    beside = Path(__file__).with_name("width.txt")
    width = int(beside.read_text()) if beside.exists() else WIDTH
    x = torch.linspace(-1, 1, 40)[:, None]
    model = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1))
    return Task(model=model, train=TensorSource(x, x), valid=TensorSource(x, x), recipe=recipe,
                loss=lambda model, x, y: nn.functional.mse_loss(model(x), y))
'''


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    return path


@pytest.fixture
def forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A function that forgets all plugins, as a new process does."""
    before, registered = set(sys.modules), dict(workloads.WORKLOADS._entries)

    def forget() -> None:
        monkeypatch.setattr(workloads.WORKLOADS, "_entries", dict(registered))
        for name in {name for name in sys.modules if name.startswith("ebbflow_plugin_")} - before:
            del sys.modules[name]

    forget()
    yield forget
    forget()


def study(plugin: Path, *, seeds: int = 2) -> Study:
    values = {
        "name": "edited",
        "workloads": ["test-edited"],
        "rules": ["constant"],
        "traces": {"static": "constant(workers=2)"},
        "seeds": seeds,
        "settings": {"plugins": [str(plugin)]},
    }
    return parse_study(values, source="edited", folder=None)


class Killed(BaseException):
    """A kill -9, as far as the run is concerned."""


def kill_at_step_five(row: StepRow) -> None:
    if row.step == 5:
        raise Killed


def begin(plugin: Path, folder: Path) -> RunConfig:
    """Train a few steps, then be killed."""
    values = {"workload": "test-edited", "rule": "constant", "trace": "constant(workers=2)"}
    config = RunConfig(**values, plugins=(str(plugin),))
    with pytest.raises(Killed):
        train(config, folder, callbacks=Callbacks(on_step=kill_at_step_five), checkpoint_every_s=0)
    return config


@pytest.mark.process
def test_an_edited_plugin_starts_new_runs_and_the_earlier_ones_are_kept_apart(
    plugin: Path, forget: Callable[[], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    reported: list[ArmProgress] = []
    run_study(study(plugin), out)
    forget()
    moved = tmp_path / "elsewhere" / "mine.py"
    moved.parent.mkdir()
    shutil.copy(plugin, moved)
    run_study(study(moved), out, on_progress=reported.append)
    assert [progress.what for progress in reported] == ["found", "found"], "a plugin that was moved is the same"
    forget()
    plugin.write_text(PLUGIN.replace("WIDTH = 4", "WIDTH = 16"))
    reported.clear()
    with caplog.at_level(logging.WARNING):
        run_study(study(plugin, seeds=3), out, on_progress=reported.append)
    assert sorted(p.what for p in reported if p.what != "moved") == ["finished"] * 3 + ["started"] * 3
    assert f"plugin mine.py has changed: its 2 earlier runs are kept apart in {out}/earlier/1," in caplog.text
    for folder, parameters, seeds in ((out / "earlier" / "1", 13, 2), (out, 49, 3)):
        results = load_results(folder)
        assert {arm.header.config["task"]["parameters"] for arm in results.arms if arm.header} == {parameters}
        (cell,) = summarise(results.arms, results.config).cells
        assert cell.seeds == seeds
        assert results.problems == []


@pytest.mark.process
def test_an_edited_recipe_starts_new_runs_although_no_plugin_has_it(
    plugin: Path, forget: Callable[[], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_study(study(plugin, seeds=1), tmp_path / "out")
    (record,) = tmp_path.glob("out/arms/*/record.jsonl")
    header, *rows = record.read_text().splitlines()
    body = json.loads(header)
    body["config"]["lr"] = 0.01  # as if the run had been made when the recipe said so
    record.write_text("\n".join([json.dumps(body), *rows]) + "\n")
    with caplog.at_level(logging.WARNING):
        run_study(study(plugin, seeds=1), tmp_path / "out")
    assert "the recipe's lr is 0.05, was 0.01: its earlier run is kept apart in" in caplog.text
    assert read_record(record).header.config["lr"] == 0.05


@pytest.mark.process
def test_an_arm_that_was_interrupted_is_not_continued_by_a_model_of_another_size(
    plugin: Path, forget: Callable[[], None], tmp_path: Path
) -> None:
    chosen = study(plugin, seeds=1)
    (arm,) = chosen.arms()
    begin(plugin, tmp_path / "out/arms" / arm.id)
    (tmp_path / "width.txt").write_text("6")  # in code that the plugin imports: its own digest is the same
    run_study(chosen, tmp_path / "out")
    assert read_record(tmp_path / "out/arms" / arm.id / "record.jsonl").status == "finished"
    earlier = read_record(tmp_path / "out/earlier/1/arms" / arm.id / "record.jsonl")
    assert (earlier.status, earlier.header.config["task"]["parameters"]) == ("interrupted", 13)


def test_train_refuses_changed_code_and_goes_on_if_that_is_allowed(
    plugin: Path, forget: Callable[[], None], tmp_path: Path
) -> None:
    config = begin(plugin, tmp_path / "run")
    forget()
    plugin.write_text(PLUGIN + "# edited\n")
    with pytest.raises(
        CodeChanged, match=r"plugin mine\.py has changed; give another out=, or .*allow_code_change=True"
    ):
        train(config, tmp_path / "run")
    run = train(config, tmp_path / "run", allow_code_change=True)
    assert run.status == "finished"
    assert [(event.what, event.text) for event in run.events][1:] == [("code changed", "plugin mine.py has changed")]
    assert "continued by other code: plugin mine.py has changed" in load_results(tmp_path / "run").arms[0].note
    with pytest.raises(CodeChanged, match="holds a run of other code"):
        train(config, tmp_path / "run")


def test_train_refuses_another_recipe_and_a_model_of_another_size(
    plugin: Path, forget: Callable[[], None], tmp_path: Path
) -> None:
    config = begin(plugin, tmp_path / "run")
    (tmp_path / "width.txt").write_text("6")
    with pytest.raises(CodeChanged, match="the model has 19 parameters, had 13"):
        train(config, tmp_path / "run")
    with pytest.raises(CheckpointError, match="is of another model"):
        train(config, tmp_path / "run", allow_code_change=True)
    (tmp_path / "width.txt").unlink()
    train(config, tmp_path / "run")
    (tmp_path / "width.txt").write_text("6")
    with pytest.raises(CodeChanged, match="the model has 19 parameters, had 13"):
        train(config, tmp_path / "run")
    forget()
    plugin.write_text(PLUGIN.replace("lr=0.05", "lr=0.1"))
    with pytest.raises(CodeChanged, match=r"plugin mine\.py has changed; the recipe's lr is 0\.1, was 0\.05"):
        train(config, tmp_path / "run")


def test_a_setting_that_the_user_gave_is_no_change_of_code(
    plugin: Path, forget: Callable[[], None], tmp_path: Path
) -> None:
    config = begin(plugin, tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"other settings \(lr is 0\.2, was 0\.05\)"):
        train(config.replace(lr=0.2), tmp_path / "run", allow_code_change=True)


def test_a_report_keeps_runs_of_different_code_apart_and_names_them(
    plugin: Path, forget: Callable[[], None], tmp_path: Path
) -> None:
    for seed, width in ((0, 4), (1, 4), (2, 16)):
        forget()
        plugin.write_text(PLUGIN.replace("WIDTH = 4", f"WIDTH = {width}"))
        config = RunConfig(workload="test-edited", plugins=(str(plugin),), seed=seed, label="static")
        train(config, tmp_path / "out/arms" / f"seed{seed}")
        record = tmp_path / "out/arms" / f"seed{seed}" / "record.jsonl"
        record.write_text(record.read_text().replace('"created":"2', f'"created":"{seed + 2}', 1))
    results = load_results(tmp_path / "out")
    cells = {cell.workload: cell for cell in summarise(results.arms, results.config).cells}
    assert cells["test-edited"].seeds == 1
    (other,) = set(cells) - {"test-edited"}
    assert other.startswith("test-edited, other code (13 parameters, mine.py of digest ")
    assert cells[other].seeds == 2
    (problem,) = results.problems
    assert problem.startswith("2 runs of test-edited made by other code (13 parameters, mine.py of digest ")
    assert problem.endswith("than the newest run are shown apart")


def test_a_plugin_that_was_added_changes_no_earlier_run_and_one_that_was_removed_does(tmp_path: Path) -> None:
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text("a = 1\n")
    two.write_text("b = 2\n")
    alone = RunConfig(workload="digits-mlp", plugins=(str(one),))
    both = RunConfig(workload="digits-mlp", plugins=(str(two), str(one)))
    assert both.code_differences(alone.recorded()) == []
    assert alone.code_differences(both.recorded()) == ["plugin two.py is no longer loaded"]
    assert both.code_differences(RunConfig(workload="digits-mlp").recorded()) == []
    assert "plugins_sha256" not in RunConfig(workload="digits-mlp").recorded()


def test_a_plugin_that_is_edited_after_it_was_imported_is_refused(
    plugin: Path, forget: Callable[[], None], tmp_path: Path
) -> None:
    load_plugins([str(plugin)])
    load_plugins([str(plugin)])
    plugin.write_text(PLUGIN + "# edited\n")
    with pytest.raises(ConfigError, match=r"mine\.py was edited after this process .*start Python again"):
        load_plugins([str(plugin)])


def test_two_runs_into_one_folder_are_refused(plugin: Path, forget: Callable[[], None], tmp_path: Path) -> None:
    config = RunConfig(workload="test-edited", plugins=(str(plugin),))

    def on_step(row: StepRow) -> None:
        if row.step == 3:
            with pytest.raises(ConfigError, match=r"another run is writing into .*run; wait for it to end, or give"):
                train(config, tmp_path / "run")

    assert train(config, tmp_path / "run", callbacks=Callbacks(on_step=on_step)).status == "finished"
