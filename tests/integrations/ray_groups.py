"""What test_ray_groups.py runs in a process of its own: `python ray_groups.py FOLDER`.

A group of two workers, of which one kills itself in the second epoch; then a group of one goes on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

EPOCHS, SAMPLES = 3, 60


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

    worker = prepare(*parts(), rule="adascale", base_batch=4, policy="fixed(12)")
    rank, started = ray.train.get_context().get_world_rank(), Path(config["folder"]) / "started"
    seen: list[int] = []
    for epoch in range(worker.epoch, config["epochs"]):
        if epoch == 1 and rank == 1 and not started.exists():
            started.touch()

            def die(index: Any) -> None:
                os.kill(os.getpid(), signal.SIGKILL)

            train(worker.model, worker.optimizer, worker.loader, die)
        seen.clear()
        took = worker.optimizer

        def note(index: Any, took: Any = took) -> None:
            seen.extend(index.tolist()[: took.micro_batch.size])

        train(worker.model, worker.optimizer, worker.loader, note)
        (Path(config["folder"]) / f"seen-{epoch}-{rank}.json").write_text(json.dumps(seen))
        worker.report({"size": ray.train.get_context().get_world_size()})
    if rank == 0:
        model = getattr(worker.model, "module", worker.model)
        torch.save(model.state_dict(), Path(config["folder"]) / "weights.pt")


def main(folder: Path) -> None:
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(num_cpus=3, include_dashboard=False, _node_ip_address="127.0.0.1")
    sizes = []
    try:
        for workers, epochs in ((2, 2), (1, EPOCHS)):
            result = TorchTrainer(
                train_loop,
                train_loop_config={"folder": str(folder), "epochs": epochs},
                scaling_config=ScalingConfig(num_workers=workers),
                run_config=RunConfig(
                    name="groups", storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=1)
                ),
            ).fit()
            sizes.append((result.metrics["size"], result.metrics["epoch"], result.metrics["updates"]))
    finally:
        ray.shutdown()
    (folder / "sizes.json").write_text(json.dumps(sizes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
