from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from ebbflow.errors import ConfigError, OutputError
from ebbflow.record import Run, read_record
from ebbflow.run.config import RunConfig
from ebbflow.run.loop import Callbacks
from ebbflow.studies import runner
from ebbflow.studies.grid import Study, load_study, parse_study
from ebbflow.studies.runner import ArmProgress, run_study


def small(**changes: Any) -> Study:
    values = {
        "name": "small",
        "workloads": ["digits-cnn(width=4)"],
        "rules": ["constant", "linear"],
        "traces": {"spot": "random-levels(minimum=1, maximum=6, every=60s, duration=20min, seed=3)"},
        "seeds": 1,
        "settings": {"epochs": 2, "local_batch": 16},
    }
    return parse_study({**values, **changes}, source="small", folder=None)


def records(out: Path) -> dict[str, Run]:
    return {path.parent.name: read_record(path) for path in sorted(out.glob("arms/*/record.jsonl"))}


def digests(out: Path) -> dict[str, str]:
    return {name: run.end.weights_sha256 for name, run in records(out).items() if run.end is not None}


def test_arms_are_chosen_by_workload_trace_rule_and_seed() -> None:
    study = small(seeds=2, traces={"spot": "constant(workers=2)", "large": "constant(workers=4)"})

    def chosen(**only: list[str]) -> list[tuple[str, str, int]]:
        return [(arm.config.label, arm.config.rule, arm.config.seed) for arm in study.only(only)]

    assert len(chosen()) == 8
    assert chosen(trace=["large"], seed=["1"]) == [("large", "constant", 1), ("large", "linear", 1)]
    assert chosen(rule=["linear"], seed=["0", "1"], trace=["spot"]) == [("spot", "linear", 0), ("spot", "linear", 1)]
    with pytest.raises(ConfigError, match="small has no rule 'sqrt'; Known: constant, linear"):
        chosen(rule=["sqrt"])
    with pytest.raises(ConfigError, match="'epochs' does not tell arms apart; Known: "):
        chosen(epochs=["2"])
    without = small(skip=[{"rule": "linear"}])
    with pytest.raises(ConfigError, match=r"small has no arm with rule=linear: \[\[skip\]\] leaves it out"):
        without.only({"rule": ["linear"]})


@pytest.mark.process
def test_arms_that_are_not_chosen_stay_as_they_are(tmp_path: Path) -> None:
    study = small(seeds=2)
    first, *others = study.only({"rule": ["constant"]})
    run_study(study, tmp_path, only={first.id})
    assert {*records(tmp_path)} == {first.id}
    before = (tmp_path / "arms" / first.id / "record.jsonl").read_bytes()
    reported: list[ArmProgress] = []
    run_study(study, tmp_path, only={arm.id for arm in others}, on_progress=reported.append)
    assert {*records(tmp_path)} == {first.id, *(arm.id for arm in others)}
    assert (tmp_path / "arms" / first.id / "record.jsonl").read_bytes() == before
    assert {progress.arm for progress in reported} == {arm.id for arm in others}


def train_until_stopped(config: RunConfig, folder: Path, *, callbacks: Callbacks, **options: Any) -> NoReturn:
    """Reports one step, and leaves a file when it is asked to stop."""
    callbacks.on_start(0, 100)
    callbacks.on_step(SimpleNamespace(samples=1))  # type: ignore[arg-type]
    while not callbacks.should_stop():
        time.sleep(0.02)
    (folder / "stopped").touch()
    raise KeyboardInterrupt


@pytest.mark.process
def test_arms_that_run_when_the_time_is_over_are_asked_to_stop_and_no_others_are_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: clock.now))
    reported: list[str] = []

    def on_progress(progress: ArmProgress) -> None:
        reported.append(progress.what)
        if progress.what == "moved":
            clock.now = 60.0

    run_study(small(), tmp_path, jobs=1, within_s=59.0, on_progress=on_progress, train=train_until_stopped)
    assert reported == ["started", "moved"]
    (folder,) = tmp_path.glob("arms/*")
    assert (folder / "stopped").exists()


def train_in_two_reports(config: RunConfig, folder: Path, *, callbacks: Callbacks, **options: Any) -> SimpleNamespace:
    """Reports 1 % and 50 % of the samples, further apart than reports are held back, and ends."""
    callbacks.on_start(0, 100)
    for samples in (1, 50):
        callbacks.on_step(SimpleNamespace(samples=samples))  # type: ignore[arg-type]
        time.sleep(0.3)
    return SimpleNamespace(status="finished", end=None)


@pytest.mark.process
@pytest.mark.parametrize(("within_s", "arms"), [(40.0, 1), (41.0, 2)])
def test_an_arm_that_would_not_end_in_time_is_left_for_another_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within_s: float, arms: int
) -> None:
    # The clock goes on by ten seconds with each report. The first arm takes 20 s; from its first report to the second
    # it did 49 % in 10 s, so that the next one is expected to take 20.4 s.
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: clock.now))
    ended: list[str] = []

    def on_progress(progress: ArmProgress) -> None:
        clock.now += 10.0 * (progress.what == "moved")
        ended.extend([progress.arm] * (progress.what == "finished"))

    run_study(small(), tmp_path, jobs=1, within_s=within_s, on_progress=on_progress, train=train_in_two_reports)
    assert len(ended) == arms


@pytest.mark.process
def test_no_time_starts_nothing(tmp_path: Path) -> None:
    run_study(small(), tmp_path, within_s=0.0)
    assert not list(tmp_path.glob("arms/*"))


@pytest.mark.process
def test_a_study_runs_every_arm_once_and_then_has_nothing_to_do(tmp_path: Path) -> None:
    reported: list[ArmProgress] = []
    run_study(small(), tmp_path, jobs=2, on_progress=reported.append)
    assert {run.status for run in records(tmp_path).values()} == {"finished"}
    assert (
        sorted(progress.what for progress in reported if progress.what != "moved")
        == ["finished", "finished"] + ["started"] * 2
    )
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("arms/*/record.jsonl")}

    reported.clear()
    run_study(small(), tmp_path, jobs=2, on_progress=reported.append)
    assert [progress.what for progress in reported] == ["found", "found"]
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.glob("arms/*/record.jsonl")}
    assert not list(tmp_path.glob("arms/*/checkpoint.pt"))


@pytest.mark.process
def test_a_folder_of_another_study_is_refused_and_the_difference_named(tmp_path: Path) -> None:
    run_study(small(rules=["constant"]), tmp_path)
    with pytest.raises(ConfigError, match=r"rules \(now \['linear'\], was \['constant'\]\)"):
        run_study(small(rules=["linear"]), tmp_path)


@pytest.mark.process
def test_arms_that_were_made_from_other_data_are_found_with_a_warning(tmp_path: Path) -> None:
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_text("to be or not to be, " * 20, encoding="utf-8")
    chosen = {"workloads": ["shakespeare-gpt(width=8, layers=1, heads=1, context=8)"], "rules": ["constant"]}
    reported: list[ArmProgress] = []
    for name in ("one.txt", "one.txt", "two.txt"):
        study = small(**chosen, settings={"epochs": 1, "local_batch": 4, "data": str(tmp_path / name)})
        run_study(study, tmp_path / "out", on_progress=reported.append)
    found = [progress.other_data for progress in reported if progress.what == "found"]
    assert found == ["", f"its data was {tmp_path / 'one.txt'}, now it is {tmp_path / 'two.txt'}"]


@pytest.mark.process
def test_a_study_grows_by_seeds_and_rules_and_keeps_what_was_run(tmp_path: Path) -> None:
    run_study(small(rules=["constant"]), tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("arms/*/record.jsonl")}
    reported: list[ArmProgress] = []
    run_study(small(seeds=2), tmp_path, jobs=2, on_progress=reported.append)
    assert sorted(p.what for p in reported if p.what != "moved") == ["finished"] * 3 + ["found"] + ["started"] * 3
    assert all(path.stat().st_mtime_ns == time_ns for path, time_ns in before.items())
    assert {(run.header.config["rule"], run.header.config["seed"]) for run in records(tmp_path).values()} == {
        ("constant", 0), ("linear", 0), ("constant", 1), ("linear", 1),
    }  # fmt: skip
    config = json.loads((tmp_path / "study.json").read_text())["config"]
    assert (config["rules"], config["seeds"]) == (["constant", "linear"], [0, 1])


@pytest.mark.process
def test_a_study_that_was_moved_with_its_traces_is_the_same_study(tmp_path: Path) -> None:
    text = "time_s,accelerators\n0,4\n60,2\n120,2\n"
    reported: list[ArmProgress] = []
    for home in ("here", "there"):
        (tmp_path / home).mkdir()
        (tmp_path / home / "spot.csv").write_text(text)
        study = small(rules=["linear"], traces={"spot": str(tmp_path / home / "spot.csv")})
        run_study(study, tmp_path / "out", on_progress=reported.append)
    assert [progress.what for progress in reported if progress.what != "moved"] == ["started", "finished", "found"]
    (tmp_path / "there" / "spot.csv").write_text(text.replace("60,2", "60,3"))
    with pytest.raises(
        ConfigError, match=r"not in this study: digits-cnn-width-4_spot_linear_s0_.*; a trace or plan was edited since"
    ):
        run_study(small(rules=["linear"], traces={"spot": str(tmp_path / "there" / "spot.csv")}), tmp_path / "out")


@pytest.mark.process
def test_an_arm_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from dataclasses import dataclass\n"
        "from ebbflow.rules import Rule, Scaling, register_rule\n"
        "@register_rule('explode', cite='test')\n@dataclass(frozen=True)\nclass Explode(Rule):\n"
        "    '''Fails at the third step.'''\n"
        "    def scale(self, context, state):\n"
        "        if context.step == 3:\n            raise RuntimeError('boom')\n"
        "        return Scaling(), state\n"
        "@register_rule('infinite', cite='test')\n@dataclass(frozen=True)\nclass Infinite(Rule):\n"
        "    '''Diverges.'''\n"
        "    def scale(self, context, state):\n        return Scaling(lr=1e30), state\n"
    )
    out = tmp_path / "out"
    settings = {"epochs": 1, "plugins": [str(plugin)]}
    run_study(small(rules=["explode", "infinite", "constant"], settings=settings), out, jobs=2)
    status = {run.header.config["rule"]: run for run in records(out).values()}
    assert status["constant"].status == "finished"
    assert status["infinite"].status == "diverged"
    assert status["explode"].status == "failed"
    assert "RuntimeError: boom" in status["explode"].end.text  # type: ignore[union-attr]
    assert len(status["explode"].steps) == 3


STUDY = """
workloads = ["digits-cnn"]
rules = ["linear+warmup(2ep)", "sqrt"]
seeds = 1
[traces]
spot = "random-levels(minimum=1, maximum=6, every=60s, duration=20min, seed=3)"
[settings]
epochs = 6
local_batch = 8
"""


STARTED: list[subprocess.Popen[bytes]] = []


@pytest.fixture(autouse=True)
def _nothing_is_left_running() -> Iterator[None]:
    """Kill what a failed test has left behind; the arms of a killed study end by themselves."""
    yield
    while STARTED:
        with STARTED.pop() as process:
            process.kill()


def start(study: Path, out: Path, checkpoint_every: str, stderr: Any = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "ebbflow", "study", str(study), "--out", str(out), "--jobs", "2"]
    process = subprocess.Popen(
        [*command, "--checkpoint-every", checkpoint_every], stdout=subprocess.DEVNULL, stderr=stderr
    )
    STARTED.append(process)
    return process


def wait_for(condition: Any, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.02)


def rows(out: Path) -> int:
    return sum(path.read_bytes().count(b'"kind":"step"') for path in out.glob("arms/*/record.jsonl"))


@pytest.mark.process
def test_killed_with_kill_9_the_same_command_ends_with_the_same_weights(tmp_path: Path) -> None:
    study = tmp_path / "study.toml"
    study.write_text(STUDY)
    undisturbed, killed_often = tmp_path / "undisturbed", tmp_path / "killed_often"
    assert start(study, undisturbed, "1h").wait(timeout=120) == 0

    killed = 0
    for _ in range(3):
        process = start(study, killed_often, "0s")  # a checkpoint after every step
        seen = rows(killed_often) if killed_often.exists() else 0
        wait_for(lambda seen=seen, process=process: rows(killed_often) > seen + 20 or process.poll() is not None)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            killed += 1
        process.wait(timeout=150)
    assert killed >= 2, "the study ended before it was killed"
    assert start(study, killed_often, "0s").wait(timeout=120) == 0

    assert digests(killed_often) == digests(undisturbed)
    assert len(digests(undisturbed)) == 2
    for name, run in records(killed_often).items():
        assert any(event.what == "resumed" for event in run.events), "it did continue from a checkpoint"
        assert [row.step for row in run.steps] == list(range(len(run.steps))), "no step is missing or twice"
        straight = records(undisturbed)[name]
        assert [(row.samples, row.loss) for row in run.steps] == [(row.samples, row.loss) for row in straight.steps]
        assert [row.metrics for row in run.validations] == [row.metrics for row in straight.validations]


def released(out: Path) -> bool:
    """Whether no process holds the folder of an arm."""
    for path in out.glob("arms/*/.lock"):
        with path.open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
    return True


@pytest.mark.process
def test_the_arms_of_a_killed_study_stop_and_have_not_failed(tmp_path: Path) -> None:
    study, out, said = tmp_path / "study.toml", tmp_path / "out", tmp_path / "said"
    study.write_text(STUDY.replace("epochs = 6", "epochs = 500"))
    with said.open("wb") as stderr:
        process = start(study, out, "0s", stderr)
    wait_for(lambda: len(list(out.glob("arms/*/checkpoint.pt"))) == 2 or process.poll() is not None)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=150)
    wait_for(lambda: released(out))
    time.sleep(0.3)  # for what an arm might still write after it released its lock
    assert {run.status for run in records(out).values()} == {"interrupted"}
    assert "Traceback" not in said.read_text()


@pytest.mark.process
def test_ctrl_c_leaves_checkpoints_and_no_process(tmp_path: Path) -> None:
    study = tmp_path / "study.toml"
    study.write_text(STUDY.replace("epochs = 6", "epochs = 500"))
    process = start(study, tmp_path / "out", "1h")
    wait_for(lambda: rows(tmp_path / "out") > 0 or process.poll() is not None)
    wait_for(lambda: len(list(tmp_path.glob("out/arms/*/record.jsonl"))) == 2)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=90) != 0
    assert len(list(tmp_path.glob("out/arms/*/checkpoint.pt"))) >= 1
    assert json.loads((tmp_path / "out" / "study.json").read_text())["config"]["name"] == "study"


@pytest.mark.process
def test_a_second_study_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    study = tmp_path / "study.toml"
    study.write_text(STUDY.replace("epochs = 6", "epochs = 500"))
    start(study, tmp_path / "out", "1h")
    wait_for(lambda: (tmp_path / "out" / "study.json").exists())
    with pytest.raises(ConfigError, match="another study is running"):
        run_study(load_study(str(study)), tmp_path / "out")


def test_an_output_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="choose another output folder"):
        run_study(small(), tmp_path / "file" / "out")
    with pytest.raises(ConfigError, match="jobs is 0"):
        run_study(small(), tmp_path, jobs=0)


@pytest.mark.process
def test_arms_that_do_not_stop_in_time_are_killed_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner, "_END_WITHIN_S", 0.5)
    building = tmp_path / "building"
    plugin = tmp_path / "slow.py"
    plugin.write_text(
        "import time\nfrom pathlib import Path\nfrom ebbflow import register_workload\n"
        "from ebbflow.workloads import WORKLOADS, recipe\n"
        "@register_workload('slow-to-build', recipe=recipe('digits-cnn'), cite='test')\n"
        f"def slow(recipe):\n    Path({str(building)!r}).touch()\n    time.sleep(200)\n"
    )
    study = small(workloads=["slow-to-build"], rules=["constant"], settings={"plugins": [str(plugin)], "epochs": 1})
    run_study(study, tmp_path / "out", jobs=1, should_stop=building.exists)
    assert "1 of 1 arms did not come to the end of a step within 0.5 s and were killed" in caplog.text
