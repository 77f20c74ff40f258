"""A training loop on Ray Train, whose group of workers may have another size after every restart.

    python examples/ray_train.py

The lines marked `# elastic` make the difference to an ordinary script; docs/integrations.md shows it.
"""

import tempfile

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from ebbflow.integrations.ray import prepare  # elastic


def train_loop(config):
    torch.manual_seed(0)
    digits = load_digits()
    inputs, labels = torch.tensor(digits.data, dtype=torch.float64) / 16, torch.tensor(digits.target)
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).double()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    worker = prepare(model, optimizer, loader, rule="sqrt", base_batch=32, policy=config["policy"])  # elastic
    model, optimizer, loader = worker.model, worker.optimizer, worker.loader  # elastic
    for epoch in range(worker.epoch, config["epochs"]):  # elastic
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            accuracy = (model(inputs).argmax(1) == labels).float().mean().item()
        worker.report({"epoch": epoch, "accuracy": accuracy})  # elastic


def main(folder, workers=(1, 2), epochs=4, policy="follow"):
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"epochs": epochs, "policy": policy},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name="digits", storage_path=folder),
    )
    result = trainer.fit()
    print(result.metrics)
    return result


if __name__ == "__main__":
    ray.init(address="local", num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1")
    with tempfile.TemporaryDirectory() as storage:
        main(storage)
    ray.shutdown()
