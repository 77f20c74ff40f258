"""A classifier of handwritten digits, in the shape of PyTorch's MNIST example: `train`, `test`, a scheduler per epoch.

    python examples/mnist.py

The lines marked `# elastic` make the difference to an ordinary script; docs/own-loops.md shows it.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from ebbflow import BatchPlan, ElasticOptimizer, ElasticSampler  # elastic

EPOCHS = 6
# Two to eight workers with 16 samples each, another number every two minutes.  # elastic
PLAN = BatchPlan.from_trace("random-levels(2, 8, every=2min)", "follow(16)", step_time="20s")  # elastic


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3)
        self.conv2 = nn.Conv2d(16, 32, 3)
        self.fc1 = nn.Linear(128, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(x), dim=1)


def train(model, loader, optimizer, epoch):
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}  {len(loader)} micro-batches  training loss {loss.item():.4f}", end="  ")


def test(model, loader):
    model.eval()
    with torch.no_grad():
        correct = sum((model(data).argmax(dim=1) == target).sum().item() for data, target in loader)
    accuracy = correct / len(loader.dataset)
    print(f"test accuracy {accuracy:.3f}")
    return accuracy


def main(plan=PLAN, local_batch=16):
    torch.manual_seed(1)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train_data, test_data = TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])

    model = Net()
    sampler = ElasticSampler(train_data, plan, local_batch=local_batch)  # elastic
    train_loader = DataLoader(train_data, batch_sampler=sampler)  # elastic
    test_loader = DataLoader(test_data, batch_size=256)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = ElasticOptimizer(optimizer, rule="sqrt", base_batch=32, sampler=sampler)  # elastic
    scheduler = StepLR(optimizer, step_size=1, gamma=0.8)

    for epoch in range(1, EPOCHS + 1):
        train(model, train_loader, optimizer, epoch)
        accuracy = test(model, test_loader)
        scheduler.step()
    return model, optimizer, accuracy


if __name__ == "__main__":
    main()
