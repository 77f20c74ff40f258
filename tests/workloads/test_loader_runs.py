"""Complete runs on a prefetched data set: the weights are those of a run without loader processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from ebbflow.errors import ConfigError, DataError
from ebbflow.record import Run, read_record
from ebbflow.run.assemble import loader_workers
from ebbflow.run.checkpoint import load_checkpoint
from ebbflow.run.config import RunConfig
from ebbflow.run.loop import Callbacks
from ebbflow.run.training import train
from ebbflow.studies.grid import Study
from ebbflow.studies.runner import run_study
from workloads.drawing import SAMPLES
from workloads.loader_runs import RECIPE

pytestmark = pytest.mark.process

PLUGIN = str(Path(__file__).with_name("loader_runs.py"))
TRACE = "0s:4 3s:2 7s:5 11s:3 15s:1 17s:4 40s"
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


def config(**settings: Any) -> RunConfig:
    defaults: dict[str, Any] = {"workload": "test-drawing", "trace": TRACE, "plugins": (PLUGIN,)}
    return RunConfig(**(defaults | settings))


def digest(run: Run) -> str:
    assert run.status == "finished"
    assert run.end is not None
    assert run.end.weights_sha256
    return run.end.weights_sha256


EARLIER: set[psutil.Process] = set()


@pytest.fixture(autouse=True)
def _earlier_children() -> None:
    """Other tests may have left processes running."""
    EARLIER.clear()
    EARLIER.update(psutil.Process().children(recursive=True))


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if child not in EARLIER]


@pytest.mark.parametrize(
    "settings",
    [
        {"engine": "loop"},
        {"engine": "fused", "rule": "adascale", "fused_batch": 14},
        {"engine": "fused", "policy": "geo(1ep, factor=2)", "rule": "sqrt"},
        {"engine": "loop", "on_change": "lose", "step_time": "0.4s"},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_the_weights_are_those_of_a_run_without_loader_processes_bit_for_bit(tmp_path, settings):
    runs = [train(config(loader_workers=workers, **settings), tmp_path / str(workers)) for workers in (0, 1, 2)]
    assert len({digest(run) for run in runs}) == 1
    assert len({str(run.validations[-1].metrics) for run in runs}) == 1
    assert children() == []


def test_only_the_loader_processes_read_samples(tmp_path):
    (tmp_path / "seen").mkdir()
    train(config(loader_workers=2, data=str(tmp_path / "seen"), epochs=1), tmp_path / "run")
    readers = {int(path.name) for path in (tmp_path / "seen").iterdir()}
    assert len(readers) == 2
    assert os.getpid() not in readers
    read = [int(line) for path in (tmp_path / "seen").iterdir() for line in path.read_text().splitlines()]
    assert set(read) == set(range(SAMPLES))
    # Prefetched beyond the end: two processes hold two sub-requests each, of at most 32 samples.
    assert len(read) <= SAMPLES + 4 * 32


def test_an_interrupted_run_can_be_continued_with_another_number_of_loader_processes(tmp_path):
    whole = train(config(loader_workers=0), tmp_path / "whole")
    steps = 0

    def stop() -> bool:
        nonlocal steps
        steps += 1
        return steps in (5, 12)

    for workers in (2, 0):
        with pytest.raises(KeyboardInterrupt):
            train(config(loader_workers=workers), tmp_path / "parts", callbacks=Callbacks(should_stop=stop))
        assert children() == []
    assert digest(train(config(loader_workers=1), tmp_path / "parts")) == digest(whole)


def test_a_finished_run_is_recognised_with_another_number_of_loader_processes(tmp_path):
    run = train(config(loader_workers=0, epochs=1), tmp_path)
    assert train(config(loader_workers=3, epochs=1), tmp_path).end == run.end


def test_a_broken_sample_and_a_killed_process_end_the_run_with_a_clear_message(tmp_path):
    with pytest.raises(DataError, match="sample 70 of Broken cannot be read"):
        train(config(workload="test-drawing(broken=true)", loader_workers=1), tmp_path / "broken")
    assert children() == []
    with pytest.raises(DataError, match="prefetching samples of Killing failed"):
        train(config(workload="test-drawing(kill=true)", loader_workers=1), tmp_path / "killed")
    assert children() == []


def test_the_number_of_loader_processes_is_the_user_s_or_that_of_idle_cores(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    assert loader_workers(config(loader_workers=7)) == 7
    assert loader_workers(config()) == 4
    assert loader_workers(config(threads=6)) == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert loader_workers(config()) == 1  # 8 cores / 4 ranks - 1 thread
    with pytest.raises(ConfigError, match="loader_workers is -1"):
        config(loader_workers=-1)


def test_arms_of_a_study_prefetch_at_the_same_time(tmp_path):
    study = Study(
        name="study", workloads=("test-drawing",), rules=("constant", "linear"), traces={"changing": TRACE}, seeds=(0,),
        settings={"plugins": (PLUGIN,), "epochs": 1, "loader_workers": 1},
    )  # fmt: skip
    run_study(study, tmp_path / "study", jobs=2)
    alone = train(config(rule="linear", epochs=1, loader_workers=0), tmp_path / "alone")
    ended = {run.header.config["rule"]: run for run in map(read_record, (tmp_path / "study").rglob("record.jsonl"))}
    assert digest(ended["linear"]) == digest(alone)
    assert digest(ended["constant"]) != digest(alone)


# ---- processes ----


def start(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command], env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip


def training_command(folder: Path, *more: str) -> list[str]:
    return ["-m", "ebbflow", "train", "test-drawing", "--plugin", PLUGIN, "--trace", TRACE, "--out", str(folder), *more]


def family(process: subprocess.Popen[str], *, at_least: int) -> list[psutil.Process]:
    """Wait until the process has this number of descendants, and return them."""
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline:
        found = psutil.Process(process.pid).children(recursive=True)
        if len(found) >= at_least:
            return found
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    raise AssertionError("the processes did not start")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_interrupted_or_killed_leaves_no_process_behind(tmp_path, number):
    process = start(*training_command(tmp_path / "run", "--epochs", "2000", "--loader-workers", "2"))
    below = family(process, at_least=2)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # to every process, as a terminal does
    else:
        process.send_signal(number)
    _, told = process.communicate(timeout=150)
    left = psutil.wait_procs(below, timeout=30)[1]
    for orphan in left:
        orphan.kill()
    assert left == []
    if number == signal.SIGINT:
        assert "Traceback" not in told
        assert load_checkpoint(tmp_path / "run" / "checkpoint.pt")["step"] > 0


def test_ranks_prefetch_their_own_samples_and_get_the_result_of_one_process(tmp_path):
    alone = train(config(engine="loop", loader_workers=0, epochs=1), tmp_path / "alone")
    command = training_command(tmp_path / "ranks", "--engine", "loop", "--loader-workers", "1", "--epochs", "1")
    process = start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command)
    _, told = process.communicate(timeout=200)
    assert process.returncode == 0, told
    shared = read_record(tmp_path / "ranks" / "record.jsonl")
    # In double precision; dropout and transforms draw the same numbers.
    assert [row.loss for row in shared.steps] == pytest.approx([row.loss for row in alone.steps], rel=1e-9)
    assert shared.validations[-1].metrics == pytest.approx(alone.validations[-1].metrics, rel=1e-9)


def test_the_recipe_of_these_runs_is_long_enough_to_prove_something():
    assert SAMPLES * RECIPE.epochs > 10 * 4 * RECIPE.local_batch  # ten steps of the largest fleet
