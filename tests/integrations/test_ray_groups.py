"""Ray Train on a local Ray: a group that loses a worker, and continues with another size."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbflow.integrations.elastic_loop import elastic_loop

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("ray_groups.py")
pytestmark = [
    pytest.mark.timeout(520),
    pytest.mark.process,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # also on Linux, it makes Ray use the loopback address
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",  # fewer processes, as the next one
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # Ray gives its processes the niceness 15, with which they starve on a machine where others compute.
    "RAY_worker_niceness": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
}


def run(*command: str, start_timeout_s: int = 300) -> None:
    """Run a script that starts a Ray of its own, and end whatever is left of it."""
    home = tempfile.mkdtemp(prefix="ray-")  # short: the paths of its sockets are in it
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path), "RAY_TMPDIR": home}
    environment["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(start_timeout_s)
    try:
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    finally:
        end_processes_of(home)
        shutil.rmtree(home, ignore_errors=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]


def end_processes_of(home: str) -> None:
    """Kill every process that has this temporary folder of Ray, and wait until there is none."""
    for _ in range(100):
        found = [int(path.name) for path in Path("/proc").glob("[0-9]*") if belongs_to(path, home)]
        for process in found:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.1)
    raise AssertionError(f"processes of Ray that cannot be ended: {found}")


def belongs_to(process: Path, home: str) -> bool:
    """By its environment, or, since some processes of Ray overwrite theirs with a title, by the logs it writes."""
    with suppress(OSError):  # it has ended, or belongs to somebody else
        if f"RAY_TMPDIR={home}".encode() in (process / "environ").read_bytes().split(b"\0"):
            return True
        return any(file.readlink().is_relative_to(home) for file in (process / "fd").iterdir())
    return False


def groups() -> Any:
    spec = importlib.util.spec_from_file_location("ray_groups", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_samples(folder: Path, sizes: tuple[int, ...]) -> None:
    """Every sample once in every epoch, over as many workers as there were."""
    for epoch, workers in enumerate(sizes):
        seen = [json.loads((folder / f"seen-{epoch}-{rank}.json").read_text()) for rank in range(workers)]
        assert sorted(i for one in seen for i in one) == list(range(groups().SAMPLES))


def check_weights(folder: Path, *policies: str, **settings: Any) -> None:
    """The weights of one process that trains an epoch with each of these policies."""
    script = groups()
    state: dict[str, Any] = {}
    for policy in policies:
        model, optimizer, loader = script.parts()
        elastic, own = elastic_loop(optimizer, loader, model=model, **{**settings, "policy": policy})
        if state:
            model.load_state_dict(state["model"])
            elastic.load_state_dict(state["optimizer"])
        script.train(model, elastic, own)
        state = {"model": model.state_dict(), "optimizer": elastic.state_dict()}
    found = torch.load(folder / "weights.pt", weights_only=True)
    for name, value in state["model"].items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


def test_a_group_of_one_goes_on_where_a_group_of_two_ended(tmp_path: Path) -> None:
    """60 samples in steps of 4 per worker, which is the base batch: 8 steps of two workers, of which the last has four
    samples left, and 15 of one worker. The square root rule multiplies the rate by sqrt(8 / 4) and by 1."""
    run(sys.executable, str(SCRIPT), str(tmp_path), "short")
    two, one = json.loads((tmp_path / "sizes.json").read_text())
    assert two == [2, 1, 8, pytest.approx([math.sqrt(2)] * 7 + [1])]
    assert one == [1, 2, 8 + 15, [1.0] * 15]
    check_samples(tmp_path, (2, 1))
    check_weights(tmp_path, "fixed(8)", "fixed(4)", **groups().FOLLOW)


@pytest.mark.long
def test_groups_of_two_and_of_one_train_what_one_process_trains(tmp_path: Path) -> None:
    run(sys.executable, str(SCRIPT), str(tmp_path), "killed")
    assert (tmp_path / "started").exists()  # a worker was killed
    assert [row[:3] for row in json.loads((tmp_path / "sizes.json").read_text())] == [[2, 2, 10], [1, 3, 15]]
    check_samples(tmp_path, (2, 2, 1))
    check_weights(tmp_path, *["fixed(12)"] * 3, **groups().FIXED)


@pytest.mark.long
def test_a_group_that_ray_itself_resizes_trains_what_one_process_trains(tmp_path: Path) -> None:
    """One worker, then two after a machine was added, then one after it was lost, each change within an epoch."""
    # Ray plans the third group before it knows that the machine is lost, and makes a smaller one when that times out.
    run(sys.executable, str(SCRIPT), str(tmp_path), "elastic", start_timeout_s=60)
    assert {"waiting-1", "waiting-2"} <= {path.name for path in tmp_path.iterdir()}  # groups that Ray has ended
    assert json.loads((tmp_path / "metrics.json").read_text()) == [1, 15]
    check_samples(tmp_path, (1, 2, 1))
    check_weights(tmp_path, *["fixed(12)"] * 3, **groups().FIXED)


@pytest.mark.long
def test_the_example_runs() -> None:
    run(sys.executable, str(ROOT / "examples" / "ray_train.py"))
