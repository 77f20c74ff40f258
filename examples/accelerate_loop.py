"""A training loop with Hugging Face accelerate, with checkpoints from which it resumes.

    python examples/accelerate_loop.py

The lines marked `# elastic` make the difference to an ordinary script; docs/integrations.md shows it.
"""

import tempfile

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from ebbflow.integrations.accelerate import prepare  # elastic

EPOCHS = 4
# Two to eight workers with 16 samples each, another number every two minutes.  # elastic
SPOT = {"trace": "random-levels(2, 8, every=2min)", "step_time": "20s", "epochs": EPOCHS}  # elastic


def main(fleet=SPOT, batch_size=16, folder=None, resume=False, epochs=None):
    torch.manual_seed(0)
    digits = load_digits()
    inputs, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    data = TensorDataset(inputs, labels)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    loader = DataLoader(data, batch_size=batch_size, shuffle=True)
    optimizer = AdamW(model.parameters(), lr=3e-3)
    elastic = {"rule": "sqrt", "base_batch": 32, **fleet}  # elastic
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader, **elastic)  # elastic
    if resume:
        accelerator.load_state(folder)

    for epoch in range(loader.batch_sampler.epoch, epochs or EPOCHS):  # elastic
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
