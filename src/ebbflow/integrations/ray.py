"""Ray Train: worker groups whose size changes, with the same samples and a rate that follows the batch.

def train_loop_per_worker(config):
    ...
    worker = prepare(model, optimizer, loader, rule="sqrt", base_batch=64)
    for epoch in range(worker.epoch, 10):
        for x, y in worker.loader:
            loss_fn(worker.model(x), y).backward()
            worker.optimizer.step()
            worker.optimizer.zero_grad()
        worker.report({"epoch": epoch})

TorchTrainer(train_loop_per_worker, scaling_config=ScalingConfig(num_workers=(1, 8))).fit()
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ebbflow.core.extras import require
from ebbflow.errors import CheckpointError
from ebbflow.integrations.elastic_loop import elastic_loop
from ebbflow.optim.elastic import ElasticOptimizer

__all__ = ["RayWorker", "prepare"]

_STATE = "ebbflow.pt"


def _ray(module: str) -> Any:
    return require(module, extra="ray", needed_for="ebbflow.integrations.ray")


class RayWorker:
    """One worker of a Ray Train group: its model, its optimizer and its part of the samples.

    The group may have another size after every restart: the samples of an epoch are the same, each counts once, and
    the steps since the last report are computed again. The gradients of a step are combined by the optimizer.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: DataLoader[Any],
        settings: dict[str, Any],
    ) -> None:
        """See `prepare`."""
        torch_api = _ray("ray.train.torch")
        self.model: torch.nn.Module = torch_api.prepare_model(model)
        """The model on the device of this worker, in DistributedDataParallel if there are several workers."""
        self.optimizer: ElasticOptimizer
        """Call `step` and `zero_grad` for every batch of the loader; it updates after the last one of a step."""
        self.optimizer, elastic = elastic_loop(optimizer, loader, model=self.model, **settings)
        self.loader: Any = torch_api.prepare_data_loader(elastic, add_dist_sampler=False)
        """This worker's micro-batches of every step, on its device, from the position in the data to the epoch's
        end."""
        self._train = _ray("ray.train")
        self._restore()

    @property
    def epoch(self) -> int:
        """The epoch of the next sample, from 0."""
        assert self.optimizer.sampler is not None
        return self.optimizer.sampler.epoch

    @property
    def _unwrapped(self) -> torch.nn.Module:
        model = self.model
        return model.module if isinstance(model, DistributedDataParallel) else model

    def report(self, metrics: Mapping[str, Any] | None = None) -> None:
        """`ray.train.report` with a checkpoint of the last complete step, and what the rule did; on all workers.

        From it the group continues after a failure or a change of its size. Call it after an epoch, or in the middle of
        one where `optimizer.updated` is true, which it is on all workers at the same time.
        """
        last, sampler = self.optimizer.last, self.optimizer.sampler
        assert sampler is not None
        shown: dict[str, float] = {
            "updates": self.optimizer.updates,
            "workers": sampler.world_size,
            "epoch": self.epoch,
        }
        if last is not None:
            shown |= {"multiplier": last.multiplier, "lr": last.lr}
        state = {"model": self._unwrapped.state_dict(), "optimizer": self.optimizer.state_dict()}  # the same on all
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if self._train.get_context().get_world_rank() == 0:
                torch.save(state, Path(folder) / _STATE)
                checkpoint = self._train.Checkpoint.from_directory(folder)
            self._train.report({**shown, **(metrics or {})}, checkpoint=checkpoint)

    def _restore(self) -> None:
        checkpoint = self._train.get_checkpoint()
        if checkpoint is None:
            return
        with checkpoint.as_directory() as folder:
            path = Path(folder) / _STATE
            if not path.is_file():
                found = ", ".join(sorted(one.name for one in Path(folder).glob("*"))) or "nothing"
                raise CheckpointError(
                    f"the checkpoint that Ray continues from holds {found}, and no {_STATE}: report with "
                    f"worker.report(...) instead of ray.train.report, and begin under another name of the run"
                )
            state = torch.load(path, map_location="cpu", weights_only=True)
        self._unwrapped.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def prepare(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any], **settings: Any
) -> RayWorker:
    """In `train_loop_per_worker`, instead of `prepare_model` and `prepare_data_loader`; continues from a checkpoint.

    `loader`: the DataLoader of one worker, whose `batch_size` is what a worker takes per step. `settings`: base_batch
    (the batch at which the rate was tuned), rule, policy ("follow": the batch follows the workers; "fixed(256)": it
    does not), schedule, epochs, clip, seed, ...: those of a `Session`.
    """
    return RayWorker(model, optimizer, loader, settings)
