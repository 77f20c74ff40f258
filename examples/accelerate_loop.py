"""A training loop with Hugging Face accelerate, in any number of processes, with checkpoints from which it resumes.

    python examples/accelerate_loop.py
    accelerate launch --multi_gpu --num_processes 2 examples/accelerate_loop.py

The lines marked `# elastic` make the difference to an ordinary script; docs/integrations.md shows it.
"""

import math

import torch
from accelerate import Accelerator, PartialState
from sklearn.datasets import load_digits
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from ebbflow.integrations.accelerate import prepare  # elastic

EPOCHS = 4
# Two to eight workers with 16 samples each, another number every two minutes.  # elastic
SPOT = {"trace": "random-levels(2, 8, every=2min)", "step_time": "20s", "epochs": EPOCHS}  # elastic


def main(fleet=SPOT, batch_size=16, folder=None, resume=None, epochs=None, accumulation=1, clip=1.0):
    torch.manual_seed(0)
    digits = load_digits()
    inputs, labels = torch.tensor(digits.data, dtype=torch.get_default_dtype()) / 16, torch.tensor(digits.target)
    data = TensorDataset(inputs, labels)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    loader = DataLoader(data, batch_size=batch_size, shuffle=True)
    optimizer = AdamW(model.parameters(), lr=3e-3)
    scheduler = CosineAnnealingLR(optimizer, EPOCHS * math.ceil(len(data) / 32))
    elastic = {"rule": "sqrt", "base_batch": 32, **fleet}  # elastic
    prepared = prepare(accelerator, model, optimizer, loader, scheduler, **elastic)  # elastic
    model, optimizer, loader, scheduler = prepared
    if resume is not None:
        accelerator.load_state(resume)

    for epoch in range(loader.batch_sampler.epoch, epochs or EPOCHS):  # elastic
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        if folder is not None:
            accelerator.save_state(folder)
        with torch.no_grad():
            accuracy = (model(inputs).argmax(1) == labels).float().mean().item()
        accelerator.print(f"epoch {epoch + 1}  accuracy {accuracy:.3f}")
    return model, optimizer, accuracy


if __name__ == "__main__":
    main()
    PartialState().destroy_process_group()  # after the model is gone
