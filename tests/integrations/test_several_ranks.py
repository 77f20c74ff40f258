"""Several processes of `accelerate launch`: the Trainer of transformers, and a loop with accelerate.

They train what one process trains, go on where one process has stopped, and one process goes on after them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'ebbflow[transformers]'")

from integrations import several_ranks

SCRIPT = Path(several_ranks.__file__)
pytestmark = [pytest.mark.process, pytest.mark.slow]
LAUNCH = """
from ebbflow.workloads.torchvision_import import import_torchvision
import_torchvision(needed_for="accelerate")
from accelerate.commands.accelerate_cli import main
main()
"""


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any, Any]]:
    """The folder; a Trainer and a model of one process, which was interrupted by nothing."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.set_default_dtype(torch.float64)
    alone = several_ranks.trainer(folder / "alone")
    several_ranks.loop(folder / "loop", 1)
    whole, *_ = several_ranks.loop(folder / "whole", 3)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "1"}
    command = [sys.executable, "-c", LAUNCH, "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    command += ["--main_process_ip", "127.0.0.1", "--main_process_port", "0", str(SCRIPT), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("epoch 2  accuracy") == 1  # only the first of two processes prints
    yield folder, alone, whole
    torch.set_default_dtype(torch.float32)


def test_trainers_in_several_processes_train_what_one_trains(runs: tuple[Path, Any, Any], tmp_path: Path) -> None:
    """Two ranks continue a checkpoint of one process, and one process continues one of theirs."""
    folder, alone, _ = runs
    last = folder / "ranks" / f"checkpoint-{alone.state.global_step}"
    saved = type(alone.model).from_pretrained(last, dtype=torch.float64)
    torch.testing.assert_close(weights(saved), weights(alone.model), rtol=1e-6, atol=1e-7)
    again = several_ranks.trainer(tmp_path, resume=folder / "ranks" / "checkpoint-6")
    assert again.state.global_step == alone.state.global_step
    torch.testing.assert_close(weights(again.model), weights(alone.model), rtol=1e-6, atol=1e-7)


def test_a_loop_in_several_processes_trains_what_one_trains(runs: tuple[Path, Any, Any], tmp_path: Path) -> None:
    """One process, then two, then one, an epoch each, with a scheduler, clipping and a rule that measures."""
    folder, _, whole = runs
    model, *_ = several_ranks.loop(tmp_path, 3, resume=folder / "ranks-loop")
    torch.testing.assert_close(weights(model), weights(whole), rtol=1e-8, atol=1e-10)
