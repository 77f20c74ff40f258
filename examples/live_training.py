"""The script of `plain.py` for a fleet of real replicas that come, go and are killed.

    ebbflow launch --replicas 3 examples/live_training.py

Kill a replica (`kill -9`): the others go on, and `ebbflow launch` starts it again. Tell one to leave (`kill`): it
finishes its step and is not started again.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import ebbflow.live

torch.set_num_threads(1)
digits = load_digits()
data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
loss_fn = nn.CrossEntropyLoss()
optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)


def accuracy(epoch: int) -> dict[str, float]:
    with torch.no_grad():
        right = (model(data.tensors[0]).argmax(1) == data.tensors[1]).float().mean().item()
    print(f"epoch {epoch:2d}  accuracy {right:.3f}", flush=True)
    return {"accuracy": right}


with ebbflow.live.join(
    model, optimizer, data, rule="adascale", base_batch=32, local_batch=16, epochs=10, on_epoch=accuracy
) as fleet:
    for step in fleet:  # until all epochs are done, whoever comes and goes
        for x, y in step:  # this replica's micro-batches of the step
            step.backward(loss_fn(model(x), y))
