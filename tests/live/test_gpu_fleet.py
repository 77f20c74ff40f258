"""Replicas that share a GPU: gloo carries their gradients, and NCCL says that it does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from live.harness import TestFleet

pytest.importorskip("torchft", reason="the live engine needs torchft: pip install 'ebbflow[live]'")

from contract.suite import EPOCHS, SAMPLES
from ebbflow.live.accounting import read_fleet
from live import replicas

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.process,
]


@pytest.mark.parametrize(("names", "transport"), [(["r0"], "auto"), (["r0", "r1"], "gloo")])
def test_replicas_train_on_one_gpu(tmp_path: Path, names: list[str], transport: str) -> None:
    settings = {"all": names, "device": "cuda", "environment": {"EBBFLOW_TRANSPORT": transport}}
    with TestFleet(tmp_path, replicas.tiny, settings) as group:
        group.start(*names)
        assert group.wait(within_s=200) == dict.fromkeys(names, 0)
    account, runs = read_fleet(tmp_path)
    assert account.mistakes == () and account.samples == EPOCHS * SAMPLES
    assert len({run.end.weights_sha256 if run.end else "none" for run in runs}) == 1


@pytest.mark.parametrize(("names", "rule"), [(["r0"], "linear"), (["r0", "r1"], "adascale"), (["r0", "r1"], "linear")])
def test_replicas_that_replay_cuda_graphs_train_as_others(tmp_path: Path, names: list[str], rule: str) -> None:
    """Of two replicas, each replays its first micro-batch, and sends gradients while it computes the second."""
    losses = []
    for compiled in (False, True):
        settings = {
            "all": names, "device": "cuda", "rule": rule, "micro_batch": 2, "compile": compiled,
            "environment": {"EBBFLOW_TRANSPORT": "gloo"},
        }  # fmt: skip
        folder = tmp_path / str(compiled)
        folder.mkdir()
        with TestFleet(folder, replicas.tiny, settings) as group:
            group.start(*names)
            assert group.wait(within_s=280) == dict.fromkeys(names, 0)
        account, runs = read_fleet(folder)
        assert account.mistakes == () and account.samples == EPOCHS * SAMPLES
        assert len({run.end.weights_sha256 if run.end else "none" for run in runs}) == 1
        assert not [event for run in runs for event in run.events if event.what == "no CUDA graph"]
        losses.append([row.loss for row in runs[0].steps])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_two_replicas_on_one_gpu_end_with_what_nccl_says(tmp_path: Path) -> None:
    settings = {"all": ["r0", "r1"], "device": "cuda", "environment": {"EBBFLOW_TRANSPORT": "nccl"}}
    with TestFleet(tmp_path, replicas.tiny, settings) as group:
        group.start("r0", "r1")
        assert group.wait(within_s=280) == {"r0": 1, "r1": 1}
        for name in ("r0", "r1"):
            reason = group.status(name)["reason"]
            assert "Duplicate GPU" in reason and "--transport gloo" in reason, reason
