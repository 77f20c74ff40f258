"""Arms that cannot run or that fail: the reason is reported and recorded, and the others go on."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ebbflow.errors import ConfigError, DataError
from ebbflow.record import read_record
from ebbflow.report.results import load_results
from ebbflow.report.summary import summarise
from ebbflow.studies.grid import Study, parse_study
from ebbflow.studies.runner import ArmProgress, default_jobs, record_failure, run_arm, run_study

PLUGIN = '''
import os, signal
from dataclasses import dataclass
import torch
from ebbflow.rules import Rule, Scaling, register_rule

def at_step_ten(name, action):
    @register_rule(name, cite="test")
    @dataclass(frozen=True)
    class Fails(Rule):
        """Fails at its tenth step."""
        def scale(self, context, state):
            if context.step == 10:
                action()
            return Scaling(), state

def out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has ...")

at_step_ten("memory", out_of_memory)
at_step_ten("killed", lambda: os.kill(os.getpid(), signal.SIGKILL))

@register_rule("overflowing", cite="test")
@dataclass(frozen=True)
class Overflowing(Rule):
    """Diverges."""
    def scale(self, context, state):
        return Scaling(lr=1e30), state
'''


def study(**changes: Any) -> Study:
    values = {
        "workloads": ["digits-cnn(width=4)"],
        "rules": ["constant"],
        "traces": {"spot": "constant(workers=4)"},
        "settings": {"epochs": 2, "local_batch": 16},
    }
    return parse_study({**values, **changes}, source="study", folder=None)


@pytest.mark.process
def test_whatever_happens_to_an_arm_the_others_go_on_and_its_record_says_why(tmp_path: Path) -> None:
    rules = ["constant", "memory", "killed", "overflowing", "sqrt", "linear"]
    override = [
        {"rule": "sqrt", "set": {"device": "cuda:99"}},
        {"rule": "linear", "set": {"data": str(tmp_path / "nowhere")}},
    ]
    reported: dict[str, ArmProgress] = {}

    def on_progress(progress: ArmProgress) -> None:
        reported[progress.arm] = progress

    (tmp_path / "mine.py").write_text(PLUGIN)
    settings = {"epochs": 2, "local_batch": 16, "plugins": [str(tmp_path / "mine.py")]}
    chosen = study(rules=rules, override=override, settings=settings)
    run_study(chosen, tmp_path / "out", jobs=2, on_progress=on_progress)
    runs = {arm.config.rule: read_record(tmp_path / "out/arms" / arm.id / "record.jsonl") for arm in chosen.arms()}
    expected = {
        "constant": ("finished", ""),
        "memory": ("failed", "the memory of the device cpu does not suffice (CUDA out of memory. Tried to allocate"),
        "killed": ("failed", "its process was killed by SIGKILL (out of memory?)"),
        "overflowing": ("diverged", "the norm of the gradient is"),
        "sqrt": ("failed", "device cuda:99 was asked for, but torch sees"),
        "linear": ("failed", "was given, but the workload 'digits-cnn' takes none"),
    }
    for arm in chosen.arms():
        status, text = expected[arm.config.rule]
        run = runs[arm.config.rule]
        assert (run.status, reported[arm.id].what) == (status, status)
        assert run.end is not None
        assert text in run.end.text
        assert text in reported[arm.id].text
    assert len(runs["memory"].steps) == 10, "what was recorded before is kept"
    results = load_results(tmp_path / "out")
    assert {arm.rule: arm.status for arm in results.arms} == {rule: status for rule, (status, _) in expected.items()}


@pytest.mark.process
def test_a_data_folder_that_is_not_there_is_an_arms_failure(tmp_path: Path) -> None:
    chosen = study(workloads=["cifar10-vgg11(width=2)", "digits-mlp(width=4)"])
    chosen = parse_study(
        {**chosen.as_dict(), "override": [{"workload": "cifar10-vgg11(width=2)", "set": {"data": "nowhere"}}]},
        source="study",
        folder=None,
    )
    run_study(chosen, tmp_path / "out")
    runs = [read_record(tmp_path / "out/arms" / arm.id / "record.jsonl") for arm in chosen.arms()]
    assert [run.status for run in runs] == ["failed", "finished"]
    assert runs[0].end is not None
    assert "nowhere" in runs[0].end.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"data": "nowhere"},
            r"^the data of cifar10-vgg11 are not at nowhere: it does not exist\. Nothing was started",
        ),
        ({}, r"^cifar10-vgg11 needs its data: give with data= .*\. Nothing was started, since all 4 arms would fail"),
    ],
)
def test_data_that_no_arm_can_do_without_are_missed_once_before_anything_starts(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    chosen = study(
        workloads=["cifar10-vgg11(width=2)"],
        rules=["constant", "linear"],
        seeds=2,
        settings={"epochs": 1, "local_batch": 16, **settings},
    )
    with pytest.raises(DataError, match=message):
        run_study(chosen, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.process
def test_a_gap_without_workers_costs_time_and_nothing_else(tmp_path: Path) -> None:
    traces = {"gap": "gap.csv", "never": "never.csv"}
    (tmp_path / "gap.csv").write_text("time_s,accelerators\n0,3\n40,0\n400,2\n900,2\n")
    (tmp_path / "never.csv").write_text("time_s,accelerators\n0,0\n900,0\n")
    chosen = study(traces={label: str(tmp_path / name) for label, name in traces.items()})
    run_study(chosen, tmp_path / "out")
    gap, never = (read_record(tmp_path / "out/arms" / arm.id / "record.jsonl") for arm in chosen.arms())
    assert gap.status == "finished"
    assert {row.workers for row in gap.steps} == {3, 2}
    assert not any(40 <= row.time_s < 400 for row in gap.steps)
    assert gap.steps[-1].samples == 2 * gap.header.config["task"]["train_samples"]
    assert never.status == "failed"
    assert never.end is not None
    assert "no workers from 0 s on" in never.end.text


@pytest.mark.process
def test_a_line_that_a_kill_cut_is_dropped_and_the_failure_said(tmp_path: Path) -> None:
    chosen = study()
    run_study(chosen, tmp_path / "out")
    arm = chosen.arms()[0]
    folder = tmp_path / "out/arms" / arm.id
    whole = (folder / "record.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "record.jsonl").write_bytes(b"".join(whole[:6]) + whole[6][:20])
    record_failure(arm, folder, "killed")
    run = read_record(folder / "record.jsonl")
    assert (run.status, run.damage, len(run.steps)) == ("failed", "", 5)
    assert run.end is not None
    assert (run.end.text, run.end.samples) == ("killed", run.steps[-1].samples)


@pytest.mark.process
def test_arms_share_what_one_of_them_has_decoded(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    from workloads.test_image_files import jpeg, npz_arrays

    images = [jpeg((20 * i, 10, 10)) for i in range(10)]
    np.savez(tmp_path / "set.npz", **npz_arrays(images, "train"), **npz_arrays(images, "test"))
    settings = {"epochs": 1, "local_batch": 2, "data": str(tmp_path / "set.npz"), "threads": 1}
    chosen = study(workloads=["cifar10-vgg11(width=2)"], settings=settings, seeds=3)
    seen: list[int] = []
    run_study(
        chosen, tmp_path / "out", jobs=1,
        on_progress=lambda progress: seen.append(len(list((tmp_path / "out/.kept").glob("jpeg-*.npy")))),
    )  # fmt: skip
    assert {read_record(path).status for path in tmp_path.glob("out/arms/*/record.jsonl")} == {"finished"}
    assert max(seen) == 1, "train and test images are the same here: one file, for all arms"
    assert not (tmp_path / "out/.kept").exists(), "and none when the study is over"


def test_as_many_arms_at_once_as_fill_the_device(tmp_path: Path) -> None:
    arms = study(seeds=9).arms()
    assert default_jobs(arms, cores=8) == 8
    assert default_jobs(arms[:2], cores=8) == 2
    assert default_jobs([], cores=8) == 1
    settings = {"threads": 4, "epochs": 1}
    assert default_jobs(study(seeds=9, settings=settings).arms(), cores=8) == 2
    assert default_jobs(study(seeds=9, settings=settings | {"device": "cuda"}).arms(), cores=64) == 3


def test_a_study_under_torchrun_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="run it without torchrun"):
        run_study(study(), tmp_path / "out")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_said_before_anything_is_trained(tmp_path: Path) -> None:
    from ebbflow.run.config import RunConfig
    from ebbflow.run.training import train

    with pytest.raises(ConfigError, match="device cuda was asked for, but torch sees 0 GPUs; use cpu"):
        train(RunConfig(workload="digits-mlp", device="cuda"), tmp_path)


@pytest.mark.process
def test_an_arm_whose_study_was_killed_exits_without_a_failure(tmp_path: Path) -> None:
    (arm,) = study().arms()
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=run_arm, args=(arm, tmp_path, {}, theirs))
    ours.close()
    process.start()
    theirs.close()
    process.join(timeout=120)
    assert process.exitcode == 1
    record = (tmp_path / "arms" / arm.id / "record.jsonl").read_text()
    assert '"kind":"end"' not in record, "nothing was wrong with the arm: it can be continued"


@pytest.mark.process
def test_the_server_ignores_ctrl_c_while_it_imports_torch() -> None:
    program = (
        "import multiprocessing, re; from multiprocessing.forkserver import _forkserver as server; "
        "from pathlib import Path; from ebbflow.studies.runner import _start_server; "
        "_start_server(multiprocessing.get_context('forkserver')); "
        "print(re.search('SigIgn:\\\\s*(.*)', Path(f'/proc/{server._forkserver_pid}/status').read_text())[1])"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert int(shown.stdout, 16) & (1 << (signal.SIGINT - 1)), "SIGINT is ignored"


@pytest.mark.parametrize(
    ("workload", "metric", "higher"),
    [("coco-ssd300", "map", True), ("shakespeare-gpt", "loss", False), ("no-such-workload", "accuracy", True)],
)
def test_an_arm_that_failed_before_its_record_began_has_the_metric_of_its_workload(
    workload: str, metric: str, higher: bool, tmp_path: Path
) -> None:
    (arm,) = study(workloads=[workload]).arms()
    (tmp_path / "arms" / arm.id).mkdir(parents=True)
    record_failure(arm, tmp_path / "arms" / arm.id, "no data")
    (result,) = load_results(tmp_path).arms
    assert (result.status, result.metric, result.higher_is_better) == ("failed", metric, higher)
    assert {cell.metric for cell in summarise([result]).cells} == {metric}
