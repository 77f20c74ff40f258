"""What test_ray_groups.py runs in processes of their own.

python ray_groups.py FOLDER short      a group of two workers for an epoch; then a group of one goes on for another
python ray_groups.py FOLDER killed     a group of two workers, of which one kills itself in the second epoch; then a
                                       group of one goes on
python ray_groups.py FOLDER elastic    a group that Ray itself resizes: from one worker to two when a machine comes,
                                       and back to one when that machine is gone
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

EPOCHS, SAMPLES = 3, 60
FIXED = {"rule": "adascale", "base_batch": 4, "policy": "fixed(12)"}
"""Steps of 12 samples, whatever the number of workers; the rule measures the gradients."""
FOLLOW = {"rule": "sqrt", "base_batch": 4, "policy": "follow"}
"""Steps of 4 samples per worker: two workers train with sqrt(2) times the rate of one."""


class Line(Dataset):  # type: ignore[type-arg]
    """A regression, whose samples say which they are."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Any:
        return i, self.x[i], self.x[i].sum()


def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, DataLoader(Line(), batch_size=4, shuffle=True)


def train(model: torch.nn.Module, optimizer: Any, loader: Any, each: Any = lambda index: None) -> None:
    """An epoch, or what is left of it."""
    for index, x, y in loader:
        (model(x).flatten() - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        each(index)


def train_loop(config: dict[str, Any]) -> None:
    import ray.train

    from ebbflow.integrations.ray import prepare

    worker = prepare(*parts(), **config["settings"])
    rank, started = ray.train.get_context().get_world_rank(), Path(config["folder"]) / "started"
    seen: list[int] = []
    multipliers: list[float] = []
    for epoch in range(worker.epoch, config["epochs"]):
        if epoch == 1 and rank == 1 and not started.exists():
            started.touch()

            def die(index: Any) -> None:
                os.kill(os.getpid(), signal.SIGKILL)

            train(worker.model, worker.optimizer, worker.loader, die)
        seen.clear()
        multipliers.clear()
        took = worker.optimizer

        def note(index: Any, took: Any = took) -> None:
            seen.extend(index.tolist()[: took.micro_batch.size])
            if took.updated:
                multipliers.append(took.last.multiplier)

        train(worker.model, worker.optimizer, worker.loader, note)
        (Path(config["folder"]) / f"seen-{epoch}-{rank}.json").write_text(json.dumps(seen))
        worker.report({"size": ray.train.get_context().get_world_size(), "multipliers": multipliers})
    if rank == 0:
        model = getattr(worker.model, "module", worker.model)
        torch.save(model.state_dict(), Path(config["folder"]) / "weights.pt")


def resized_loop(config: dict[str, Any]) -> None:
    """Epochs 0, 1 and 2 are complete with one, two and one workers; other groups stop in the middle of an epoch."""
    import ray.train

    from ebbflow.integrations.ray import prepare

    folder = Path(config["folder"])
    worker = prepare(*parts(), **FIXED)
    rank, size = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    for epoch in range(worker.epoch, EPOCHS):
        seen: list[int] = []

        def note(index: Any, epoch: int = epoch, seen: list[int] = seen) -> None:
            seen.extend(index.tolist()[: worker.optimizer.micro_batch.size])
            if size != SIZES[epoch] and worker.optimizer.updates % 5 == 2:  # of five steps per epoch, two are done
                (folder / f"waiting-{epoch}").touch()
                time.sleep(200)  # until Ray ends this group

        train(worker.model, worker.optimizer, worker.loader, note)
        (folder / f"seen-{epoch}-{rank}.json").write_text(json.dumps(seen))
        worker.report({"size": size})
    if rank == 0:
        torch.save(getattr(worker.model, "module", worker.model).state_dict(), folder / "weights.pt")


SIZES = (1, 2, 1)


def elastic(folder: Path) -> None:
    """Ray on two machines of one CPU each, of which the second comes in epoch 1 and is gone in epoch 2."""
    import ray
    from ray.cluster_utils import Cluster
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    own = {"node_ip_address": "127.0.0.1", "num_cpus": 1}
    cluster = Cluster(initialize_head=True, head_node_args={**own, "include_dashboard": False})
    ray.init(address=cluster.address)
    trainer = TorchTrainer(
        resized_loop,
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=(1, 2), elastic_resize_monitor_interval_s=1),
        run_config=RunConfig(
            name="elastic", storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=3)
        ),
    )
    try:
        with ThreadPoolExecutor() as pool:
            fit = pool.submit(trainer.fit)
            wait_for(folder / "waiting-1", fit)
            second = cluster.add_node(**own)
            wait_for(folder / "waiting-2", fit)
            cluster.remove_node(second, allow_graceful=False)
            metrics = fit.result().metrics
        (folder / "metrics.json").write_text(json.dumps([metrics["size"], metrics["updates"]]))
    finally:
        ray.shutdown()
        cluster.shutdown()


def wait_for(path: Path, fit: Future[Any]) -> None:
    while not path.exists():
        if fit.done():
            raise RuntimeError(f"the training ended before {path.name}: {fit.result()}")
        time.sleep(0.1)


def one_after_another(folder: Path, groups: list[tuple[int, int]], settings: dict[str, Any]) -> None:
    """Groups of so many workers, each until so many epochs are done; each continues from the checkpoint of the last."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(address="local", num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1")
    sizes = []
    try:
        for workers, epochs in groups:
            result = TorchTrainer(
                train_loop,
                train_loop_config={"folder": str(folder), "epochs": epochs, "settings": settings},
                scaling_config=ScalingConfig(num_workers=workers),
                run_config=RunConfig(
                    name="groups", storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=1)
                ),
            ).fit()
            found = result.metrics
            sizes.append([found["size"], found["epoch"], found["updates"], found["multipliers"]])
    finally:
        ray.shutdown()
    (folder / "sizes.json").write_text(json.dumps(sizes))


if __name__ == "__main__":
    target, kind = Path(sys.argv[1]), sys.argv[2]
    if kind == "elastic":
        elastic(target)
    elif kind == "killed":
        one_after_another(target, [(2, 2), (1, EPOCHS)], FIXED)
    else:
        one_after_another(target, [(2, 1), (1, 2)], FOLLOW)
