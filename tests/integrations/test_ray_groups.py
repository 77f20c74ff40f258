"""Ray Train on a local Ray: a group that loses a worker, and continues with another size."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
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
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
]


def run(*command: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "GLOO_SOCKET_IFNAME": "lo"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]


def groups() -> Any:
    spec = importlib.util.spec_from_file_location("ray_groups", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(folder: Path, sizes: tuple[int, ...]) -> None:
    """Every sample once in every epoch, over as many workers as there were, and the weights of one process.

    Three epochs of 60 samples in steps of 12, whatever the number of workers; the rule measures the gradients.
    """
    script = groups()
    for epoch, workers in enumerate(sizes):
        seen = [json.loads((folder / f"seen-{epoch}-{rank}.json").read_text()) for rank in range(workers)]
        assert sorted(i for one in seen for i in one) == list(range(script.SAMPLES))
    model, optimizer, loader = script.parts()
    elastic, own = elastic_loop(optimizer, loader, model=model, rule="adascale", base_batch=4, policy="fixed(12)")
    for _ in range(script.EPOCHS):
        script.train(model, elastic, own)
    found = torch.load(folder / "weights.pt", weights_only=True)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


def test_groups_of_two_and_of_one_train_what_one_process_trains(tmp_path: Path) -> None:
    run(sys.executable, str(SCRIPT), str(tmp_path))
    assert (tmp_path / "started").exists()  # a worker was killed
    assert json.loads((tmp_path / "sizes.json").read_text()) == [[2, 2, 10], [1, 3, 15]]
    check(tmp_path, (2, 2, 1))


def test_a_group_that_ray_itself_resizes_trains_what_one_process_trains(tmp_path: Path) -> None:
    """One worker, then two after a machine was added, then one after it was lost, each change within an epoch."""
    run(sys.executable, str(SCRIPT), str(tmp_path), "elastic")
    assert {"waiting-1", "waiting-2"} <= {path.name for path in tmp_path.iterdir()}  # groups that Ray has ended
    assert json.loads((tmp_path / "metrics.json").read_text()) == [1, 15]
    check(tmp_path, (1, 2, 1))


def test_the_example_runs() -> None:
    run(sys.executable, str(ROOT / "examples" / "ray_train.py"))
