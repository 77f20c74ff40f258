"""A classifier of handwritten digits with DistributedDataParallel, which torchrun starts with any number of processes.

    torchrun --standalone --nproc-per-node 3 examples/ddp_torchrun.py runs/ddp

Stop it (Ctrl-C, SIGTERM, or a notice, see below) and start it with another number of processes: it goes on with the
next sample, and ends with the weights of a run that was never stopped. A second argument names a source of preemption
notices, such as aws, gcp, azure or "file(runs/stop)".

The lines marked `# elastic` make the difference to an ordinary script; docs/torchrun.md shows it.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from ebbflow import ElasticOptimizer, ElasticSampler, PreemptionNotice  # elastic

EPOCHS = 6


def digits():
    data = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32) / 16
    labels = torch.tensor(data.target)
    return TensorDataset(images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def main(folder, *sources):
    torch.manual_seed(1)
    train_data, (images, labels) = digits()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    sampler = ElasticSampler(train_data, "fixed(64)", local_batch=8)  # elastic
    loader = DataLoader(train_data, batch_sampler=sampler)  # elastic
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    notice = PreemptionNotice(*sources)  # elastic
    settings = {"rule": "adascale", "base_batch": 32, "schedule": "cosine", "epochs": EPOCHS}  # elastic
    optimizer = ElasticOptimizer(optimizer, sampler=sampler, model=model, stop=notice, **settings)  # elastic

    state = {"model": model, "optimizer": optimizer}  # elastic
    saved = sorted(Path(folder).glob("*/.metadata"))  # written last, when a checkpoint is complete
    if saved:
        dcp.load(state, checkpoint_id=saved[-1].parent)
    with notice:  # elastic
        while not (optimizer.finished or optimizer.stop_requested):  # elastic
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                if optimizer.stop_requested:  # elastic
                    break  # elastic
            dcp.save(state, checkpoint_id=Path(folder) / f"{optimizer.updates:06}")  # elastic

    with torch.no_grad():
        accuracy = (model.module(images).argmax(dim=1) == labels).float().mean().item()
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks  test accuracy {accuracy:.3f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(*sys.argv[1:])
    dist.destroy_process_group()  # after the model is gone
