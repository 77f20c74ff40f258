"""A training loop with Hugging Face accelerate, with checkpoints from which it resumes.

    python examples/accelerate_loop.py

The lines marked `# elastic` make the difference to an ordinary script; docs/own-loops.md shows it.
"""

import tempfile

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from ebbflow import BatchPlan, ElasticOptimizer, ElasticSampler  # elastic

EPOCHS = 4
# Two to eight workers with 16 samples each, another number every two minutes.  # elastic
PLAN = BatchPlan.from_trace("random-levels(2, 8, every=2min)", "follow(16)", step_time="20s")  # elastic


def main(plan=PLAN, local_batch=16, folder=None, resume=False, epochs=None):
    torch.manual_seed(0)
    digits = load_digits()
    inputs, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    data = TensorDataset(inputs, labels)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    sampler = ElasticSampler(data, plan, local_batch=local_batch)  # elastic
    loader = DataLoader(data, batch_sampler=sampler)  # elastic
    optimizer = AdamW(model.parameters(), lr=3e-3)
    optimizer = ElasticOptimizer(optimizer, rule="sqrt", base_batch=32, sampler=sampler)  # elastic
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if resume:
        accelerator.load_state(folder)
        loader.set_epoch(sampler.epoch)  # elastic

    for epoch in range(sampler.epoch, epochs or EPOCHS):  # elastic
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if folder is not None:
            accelerator.save_state(folder)
        with torch.no_grad():
            accuracy = (model(inputs).argmax(1) == labels).float().mean().item()
        accelerator.print(f"epoch {epoch + 1}  accuracy {accuracy:.3f}")
    return model, optimizer, accuracy


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as checkpoints:
        main(folder=checkpoints, epochs=2)
        main(folder=checkpoints, resume=True)
