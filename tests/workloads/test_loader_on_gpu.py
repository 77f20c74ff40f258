"""Prefetching for a GPU, through pinned memory: the same samples in the same order."""

from __future__ import annotations

import pytest
import torch

from ebbflow.run.config import RunConfig
from ebbflow.run.training import train
from ebbflow.workloads import DatasetSource
from workloads.drawing import SAMPLES, Drawing
from workloads.test_loader_runs import PLUGIN, TRACE

pytestmark = [pytest.mark.process, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def test_batches_arrive_on_the_gpu_as_they_were_read():
    here, there = DatasetSource(Drawing()), DatasetSource(Drawing(), loader_workers=2).to(torch.device("cuda"))
    for _ in range(2):
        batches = []
        for source in (here, there):
            torch.manual_seed(3)
            batches.append(source.batch(torch.randperm(SAMPLES), train=True))
        assert batches[1][0].is_cuda
        assert torch.equal(batches[0][0], batches[1][0].cpu())
        assert torch.equal(batches[0][1], batches[1][1].cpu())
    there.close()


def as_dict(samples):
    inputs, targets = zip(*samples, strict=True)
    return {"x": torch.stack(inputs), "y": torch.tensor(targets)}


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_a_collate_fn_are_whole_while_the_gpu_computes(workers):
    """The memory of a batch that is no longer used is that of a later one, which is copied on another stream."""
    data = [(torch.full((256, 256), float(number)), number) for number in range(64)]
    source = DatasetSource(data, torch.device("cuda"), loader_workers=workers, collate_fn=as_dict, pairs=False)
    busy, sums = torch.randn(4096, 4096, device="cuda"), []
    for turn in range(40):
        indices = torch.arange(8) + turn * 8 % 64
        batch = source.batch(indices.numpy(), train=True)
        assert batch["x"].is_cuda
        busy = (busy @ busy).clamp(-1, 1)  # keeps the GPU busy while the next batch is copied
        sums.append((indices, batch["x"].mean((1, 2)), batch["y"].clone()))
    for indices, means, targets in sums:
        assert torch.equal(means.cpu(), indices.float()) and torch.equal(targets.cpu(), indices)
    source.close()


def test_the_losses_of_a_run_do_not_depend_on_the_number_of_loader_processes(tmp_path):
    losses = []
    for workers in (0, 2):
        config = RunConfig(
            workload="test-drawing", trace=TRACE, plugins=(PLUGIN,), device="cuda", loader_workers=workers
        )
        losses.append([row.loss for row in train(config, tmp_path / str(workers)).steps])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)  # kernels may add in another order
