"""Replicas of several ranks: each shards the model by FSDP2, and may come, go and be killed.

    ebbflow launch --replicas 2 --ranks-per-replica 2 examples/live_fsdp.py

Kill any process of a replica (`kill -9`): the replica ends, the others go on, and `ebbflow launch` starts it again.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW
from torch.utils.data import TensorDataset

import ebbflow.live

torch.set_num_threads(1)
dist.init_process_group("gloo")  # on GPUs: nccl, and torch.cuda.set_device(LOCAL_RANK)
digits = load_digits()
data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
for layer in (model[0], model[2]):
    fully_shard(layer)
fully_shard(model)
loss_fn = nn.CrossEntropyLoss()
optimizer = AdamW(model.parameters(), lr=0.003)


def accuracy(epoch: int) -> dict[str, float]:
    with torch.no_grad():
        right = (model(data.tensors[0]).argmax(1) == data.tensors[1]).float().mean().item()
    if fleet.first:
        print(f"epoch {epoch:2d}  accuracy {right:.3f}", flush=True)
    return {"accuracy": right}


with ebbflow.live.join(
    model, optimizer, data, rule="sqrt", base_batch=32, local_batch=16, epochs=10, on_epoch=accuracy
) as fleet:
    for step in fleet:  # until all epochs are done, whoever comes and goes
        for x, y in step:  # this rank's samples of the replica's micro-batches
            step.backward(loss_fn(model(x), y))
dist.destroy_process_group()
