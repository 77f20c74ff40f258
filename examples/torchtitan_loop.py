"""A language model with FSDP2, in the shape of torchtitan's loop: only the sampler and the batch policy are Ebbflow's.

    torchrun --standalone --nproc-per-node 2 examples/torchtitan_loop.py runs/titan

The loop keeps what torchtitan's has: it reads the micro-batches of a step, divides the losses by what the whole step
counts, lets FSDP2 combine the gradients, clips, steps, and saves with torch.distributed.checkpoint. The batch stays 24
blocks however many processes there are, every block is trained on once per epoch, and the run may be stopped and
resumed with another number of processes. An argument after the folder is the number of steps after which it stops.
"""

import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

from ebbflow import ElasticSampler, StepContext, make_rule

EPOCHS, BLOCKS, CONTEXT, VOCABULARY = 3, 205, 16, 32
LR, REFERENCE_BATCH = 0.01, 12


class Blocks(Dataset):
    """Counting texts: each token is the one before plus the first, so that there is something to learn."""

    def __len__(self):
        return BLOCKS

    def __getitem__(self, index):
        tokens = (1 + index % 5) * torch.arange(CONTEXT + 1) + index // 5
        return tokens[:-1] % VOCABULARY, tokens[1:] % VOCABULARY


class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(CONTEXT * width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        # Each position sees itself and those before it.
        past = torch.stack([F.pad(x, (0, 0, shift, 0))[:, :CONTEXT] for shift in range(CONTEXT)], dim=2)
        return x + self.out(F.gelu(self.mix(self.norm(past).flatten(2))))


class Model(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main(folder, stop_after=math.inf):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    rule = make_rule("sqrt")

    data = Blocks()
    sampler = ElasticSampler(data, "fixed(24)", local_batch=4)
    loader = DataLoader(data, batch_sampler=sampler)

    saved = sorted(Path(folder).glob("*/.metadata"))
    if saved:
        state = checkpoint(model, optimizer, sampler)
        dcp.load(state, checkpoint_id=saved[-1].parent)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    batches, loss = iter(loader), math.nan
    while sampler.epoch < EPOCHS and sampler.peek().step < float(stop_after):
        step = sampler.peek()
        samples, loss = sampler.position, 0.0
        for _ in range(step.count):  # the same number on every rank
            inputs, targets = next(batches)
            size = sampler.consume().size  # 0 for a micro-batch that is repeated because there are not enough
            total = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
            part = total * (size > 0) / (step.batch * CONTEXT)
            (part * dist.get_world_size()).backward()  # FSDP2 divides the sum of the gradients by the ranks
            loss += part.item()
        context = StepContext(step=step.step, batch=step.batch, ref_batch=REFERENCE_BATCH, samples=samples)
        scaling, _ = rule.scale(context, rule.init())  # sqrt remembers nothing from step to step
        for group in optimizer.param_groups:
            group["lr"] = LR * scaling.lr * 0.5 * (1 + math.cos(math.pi * samples / (EPOCHS * BLOCKS)))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if sampler.epoch > step.epoch:
            batches = iter(loader)

    number = sampler.peek().step
    dcp.save(checkpoint(model, optimizer, sampler), checkpoint_id=Path(folder) / f"{number:06}")
    mean = torch.tensor(loss)
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks  step {number}  loss {mean.item():.6f}")


def checkpoint(model, optimizer, sampler):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "sampler": sampler}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(*sys.argv[1:])
    dist.destroy_process_group()  # after the model is gone
