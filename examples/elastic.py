"""An ordinary PyTorch training script. `elastic.py` is the same script for workers that come and go."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from ebbflow import BatchPlan, ElasticOptimizer, ElasticSampler

digits = load_digits()
data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
loss_fn = nn.CrossEntropyLoss()

sampler = ElasticSampler(data, BatchPlan.from_trace("gcp-a100-like(seed=1)", "follow(8)", step_time="20s"))
optimizer = ElasticOptimizer(SGD(model.parameters(), lr=0.1, momentum=0.9), rule="sqrt", base_batch=32, sampler=sampler)
loader = DataLoader(data, batch_sampler=sampler)

for epoch in range(10):
    for x, y in loader:
        loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        accuracy = (model(data.tensors[0]).argmax(1) == data.tensors[1]).float().mean()
    print(f"epoch {epoch + 1:2d}  accuracy {accuracy:.3f}")
