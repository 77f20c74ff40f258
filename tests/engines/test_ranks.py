"""Several real processes emulate one fleet: the same run as in one process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ebbflow.data.ledger import Assignment, MicroBatch
from ebbflow.engines.emulated import FusedEngine, Ranks
from ebbflow.engines.emulated.emulated_engine import EmulatedStep
from ebbflow.errors import ConfigError
from ebbflow.live.processes import hold_port
from ebbflow.plan.batch_plan import BatchPlan, StepSize
from ebbflow.record import Run, read_record
from ebbflow.run import torchrun
from ebbflow.run.config import RunConfig
from ebbflow.run.training import train
from engines.ranks_runs import RUNS, TRACE, config

SCRIPT = Path(__file__).with_name("ranks_runs.py")
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(sys.path),
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    for name in RUNS:
        train(config(name), folder / name)
    return folder


@pytest.fixture(scope="module", params=[2, 3])
def several(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same runs by so many ranks; one start for all of them."""
    world, folder = request.param, tmp_path_factory.mktemp("several")
    with hold_port() as port:
        place = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.getsockname()[1])}
        processes = [
            subprocess.Popen([sys.executable, SCRIPT, folder], env={**ENVIRONMENT, **place, "RANK": str(rank)})
            for rank in range(world)
        ]
        try:
            assert [process.wait(timeout=200) for process in processes] == [0] * world
        finally:
            for process in processes:
                process.kill()
    return folder


def assert_same_run(run: Run, reference: Run, *, rel: float) -> None:
    assert run.status == reference.status
    exact = ("step", "epoch", "samples", "workers", "batch", "time_s")
    for row, expected in zip(run.steps, reference.steps, strict=True):
        assert [getattr(row, name) for name in exact] == [getattr(expected, name) for name in exact]
        if expected.loss is None:  # not finite
            assert row.loss is None
        else:
            assert row.loss == pytest.approx(expected.loss, rel=rel)
        for rate in ("lr_base", "lr", "multiplier"):
            assert getattr(row, rate) == pytest.approx(getattr(expected, rate), rel=rel)
        assert row.stats == pytest.approx(expected.stats, rel=rel)
    for validation, expected in zip(run.validations, reference.validations, strict=True):
        assert validation.metrics == pytest.approx(expected.metrics, rel=rel)
    for row, expected in zip(run.layers, reference.layers, strict=True):
        for name in ("noise", "signal", "multiplier"):
            assert getattr(row, name) == pytest.approx(getattr(expected, name), rel=1e3 * rel, abs=rel)
    ours, theirs = (torch.load(r.path.with_name("weights.pt"))["model"] for r in (run, reference))
    assert any("running_var" in name for name in ours)
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=rel, atol=rel, equal_nan=True)


@pytest.mark.process
@pytest.mark.parametrize("name", RUNS)
def test_any_number_of_ranks_trains_the_run_of_one_process(name: str, several: Path, one_process: Path) -> None:
    run, reference = (read_record(folder / name / "record.jsonl") for folder in (several, one_process))
    assert_same_run(run, reference, rel=1e-7)  # in double precision
    assert run.header.config["emulation"]["ranks"] in (2, 3)
    if "linear" not in RUNS[name]["rule"] and "sqrt" not in RUNS[name]["rule"]:
        assert [row.micro_batches for row in run.steps] == [row.micro_batches for row in reference.steps]
        assert any(row.stats for row in run.steps), "something was measured"
    if name == "skipped-steps":
        assert any("skipped" in row.stats for row in run.steps)


@pytest.mark.process
def test_ranks_that_never_compute_are_told_of(several: Path) -> None:
    run = read_record(several / "fewer-workers-than-ranks" / "record.jsonl")
    told = [event.text for event in run.events if event.what == "idle ranks"]
    if run.header.config["emulation"]["ranks"] == 3:
        assert told == ["no step has more than 2 parts to share, so 1 of 3 ranks never compute; use fewer ranks"]
    else:
        assert not told


# torchrun ---------------------------------------------------------------------------------------------------------


def start(folder: Path, *arguments: str, ranks: int = 2, workload: str = "test-ranks") -> subprocess.Popen[str]:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    run = ["-m", "ebbflow", "train", workload, "--plugin", str(SCRIPT), "--trace", TRACE, "--rule", "adascale"]
    return subprocess.Popen(
        [sys.executable, *command, *run, "--engine", "loop", "--out", str(folder), *arguments],
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=200)
    finally:
        process.kill()
    return process.returncode, out, err


@pytest.fixture
def nothing_left() -> Iterator[None]:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    for child in left:
        child.kill()
    assert not left


def wait_for_steps(folder: Path, count: int, process: subprocess.Popen[str]) -> None:
    """Until the record holds so many steps; rows reach the file with each checkpoint."""
    deadline = time.monotonic() + 200
    path = folder / "record.jsonl"
    while not path.is_file() or path.read_bytes().count(b'"kind":"step"') < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.process
@pytest.mark.usefixtures("nothing_left")
def test_a_rank_killed_with_kill_9_ends_all_and_any_number_of_ranks_continues(tmp_path: Path) -> None:
    settings = {"workload": "test-ranks", "trace": TRACE, "rule": "adascale", "engine": "loop", "epochs": 12}
    reference = train(RunConfig(**settings), tmp_path / "one")
    folder = tmp_path / "several"
    process = start(folder, "--epochs", "12", "--checkpoint-every", "0s")
    wait_for_steps(folder, 15, process)
    ranks = [child for child in psutil.Process(process.pid).children() if "ebbflow" in child.cmdline()]
    os.kill(ranks[1].pid, signal.SIGKILL)
    code, _, told = ended(process)
    assert code != 0
    assert told.count("error:") <= 1  # torchrun may end rank 0 before it notices
    assert not read_record(folder / "record.jsonl").end

    process = start(folder, "--epochs", "12", "--checkpoint-every", "0s", ranks=3)
    wait_for_steps(folder, 40, process)
    process.send_signal(signal.SIGINT)  # as Ctrl-C: torchrun passes it on
    code, _, told = ended(process)
    assert code != 0
    assert told.count("the same command continues") == 1
    assert (folder / "checkpoint.pt").is_file()

    code, out, told = ended(start(folder, "--epochs", "12"))
    assert code == 0, told
    assert out.count("finished after") == 1
    run = read_record(folder / "record.jsonl")
    assert [event.what for event in run.events].count("resumed") == 2
    assert_same_run(run, reference, rel=1e-7)


@pytest.mark.process
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("fails", "message"),
    [
        ("fails=data, rank=-1", "error: the workload 'test-ranks' cannot be built: DataError: there is no data here"),
        ("fails=data", "error: the workload 'test-ranks' cannot be built: DataError: there is no data here"),
        ("fails=memory", "error: the memory of the device cpu does not suffice"),
        ("fails=error", "error: a plugin raised RuntimeError: boom"),
        ("fails=kill", "error: another rank has ended in the middle of a step"),
    ],
)
def test_an_error_on_a_rank_ends_all_with_one_message(fails: str, message: str, tmp_path: Path) -> None:
    code, _, told = ended(start(tmp_path / "run", workload=f"test-ranks({fails})"))
    assert code != 0
    assert told.count(message) == 1, told
    assert len(re.findall("^error: ", told, re.MULTILINE)) == message.startswith("error: "), told


# Without processes ------------------------------------------------------------------------------------------------


def test_a_worker_belongs_to_the_rank_of_its_number_modulo_the_ranks() -> None:
    workers = [0, 1, 2, 3, 4, 0, 1]  # seven micro-batches of five workers
    parts = [Ranks(rank, 3).own(range(7), workers) for rank in range(3)]
    assert parts == [[0, 3, 5], [1, 4, 6], [2]]
    with pytest.raises(ConfigError, match="rank 3 of 3"):
        Ranks(3, 3)


def test_the_samples_of_a_ranks_parts_are_those_at_their_positions() -> None:
    # Positions 10 to 19 of an epoch; this rank has 12 to 14 and 17 to 19.
    assignment, indices = Assignment(1, 10, 20), torch.arange(100, 110).numpy()
    size = StepSize(workers=4, samples=10, time_s=0.0, duration_s=1.0)
    parts = [[MicroBatch(1, 12, 15)], [MicroBatch(3, 17, 20)]]
    step = EmulatedStep(number=2, assignment=assignment, size=size, indices=indices, parts=parts)
    assert step.batch == 6
    assert [step.samples(part[0].start, part[0].stop).tolist() for part in parts] == [[102, 103, 104], [107, 108, 109]]
    assert EmulatedStep(number=2, assignment=assignment, size=size, indices=indices, parts=[]).batch == 0


@pytest.mark.parametrize("needs", [(), ("moments",)])
def test_a_rank_whose_memory_is_smaller_still_has_its_own_part_of_a_step(needs: tuple[str, ...]) -> None:
    """Its chunks are smaller then, but what it computes is not: else samples were lost, or counted twice."""
    plan = BatchPlan.constant(9, 36)
    steps, fetched = [], []
    for rank in range(2):
        model = torch.nn.Linear(2, 2)
        engine = FusedEngine(model, None, None, plan, samples=97, fused_batch=8, needs=needs, ranks=Ranks(rank, 2))  # type: ignore[arg-type]
        if rank == 1:
            engine.fused_batch = 4  # what is left after the memory did not suffice for 8
        steps.append(engine._make_step(0, Assignment(0, 0, 36), plan.at(0)))
        fetched += [index for span in engine._fetches(steps[-1]) for index in steps[-1].samples(*span)]
    assert [step.batch for step in steps] == [20, 16]  # passes of 8, 8, 8, 8 and 4, by turns
    assert sorted(fetched) == sorted(engine._order(0).indices(0, 36)), "those of the whole step, each once"


def test_the_environment_says_which_rank_this_is() -> None:
    assert torchrun.rank_info({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == torchrun.RankInfo(
        rank=5, world=8, local_rank=1
    )
    assert torchrun.rank_info({"WORLD_SIZE": "8"}) is None
    with pytest.raises(ConfigError, match=r"RANK=first.*torchrun sets"):
        torchrun.rank_info({"RANK": "first", "WORLD_SIZE": "8"})


def test_each_rank_takes_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    second, third = (torchrun.RankGroup(torchrun.RankInfo(rank=4 + i, world=8, local_rank=i)) for i in (1, 2))
    assert (second.device("cuda"), second.device("cpu"), torchrun.RankGroup().device("cuda:1")) == (
        "cuda:1",
        "cpu",
        "cuda:1",
    )
    with pytest.raises(ConfigError, match=r"rank 6 needs GPU number 3.*torch sees 2; start at most 2 ranks"):
        third.device("cuda")
    with pytest.raises(ConfigError, match="use device cuda"):
        second.device("cuda:0")


def test_synchronised_batch_norm_cannot_be_shared_by_ranks(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"samples": 8, "batch_norm": "sync", "ranks": Ranks(0, 2)}
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    with pytest.raises(ConfigError, match="ranks cannot share: use local or frozen"):
        FusedEngine(model, None, None, BatchPlan.constant(2, 8), **settings)  # type: ignore[arg-type]
