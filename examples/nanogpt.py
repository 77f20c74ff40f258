"""A character-level GPT in plain PyTorch, in the shape of nanoGPT: AdamW with two groups, warm-up and cosine, clipping.

    python examples/nanogpt.py

The lines marked `# elastic` make the difference to an ordinary script; docs/own-loops.md shows it.
"""

import math
import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from ebbflow import BatchPlan, ElasticOptimizer, ElasticSampler  # elastic

EPOCHS, BLOCK = 4, 32
WORDS = ["the", "fleet", "grows", "and", "shrinks", "while", "a", "model", "learns", "from", "every", "sample", "once"]
# Two to eight workers with 8 sequences each, another number every two minutes.  # elastic
PLAN = BatchPlan.from_trace("random-levels(2, 8, every=2min)", "follow(8)", step_time="20s")  # elastic


class Text(Dataset):
    """Consecutive blocks of a text, each with the same block shifted by one character as its target."""

    def __init__(self, characters=20_000):
        text = " ".join(random.Random(0).choices(WORDS, k=characters // 5))[:characters]
        self.vocabulary = sorted(set(text))
        self.tokens = torch.tensor([self.vocabulary.index(character) for character in text])

    def __len__(self):
        return (len(self.tokens) - 1) // BLOCK

    def __getitem__(self, i):
        start = i * BLOCK
        return self.tokens[start : start + BLOCK], self.tokens[start + 1 : start + BLOCK + 1]


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        n, length, width = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, length, width))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary, width=32, heads=2, layers=2):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(BLOCK, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x, y):
        hidden = self.layers(self.tokens(x) + self.positions.weight[: x.shape[1]])
        return F.cross_entropy(self.head(self.ln(hidden)).flatten(0, 1), y.flatten())


def get_lr(update, total):
    """Warm-up over a sixteenth of the updates, and a cosine to a tenth of the rate at the end."""
    return 3e-3 * min(1.0, 16 * (update + 1) / total) * (0.55 + 0.45 * math.cos(math.pi * update / total))


def main(plan=PLAN, local_batch=8):
    torch.manual_seed(1337)
    data = Text()
    model = GPT(len(data.vocabulary))
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    sampler = ElasticSampler(data, plan, local_batch=local_batch)  # elastic
    loader = DataLoader(data, batch_sampler=sampler)  # elastic
    optimizer = ElasticOptimizer(optimizer, rule="sqrt", base_batch=16, sampler=sampler, clip=1.0)  # elastic
    update, total = 0, EPOCHS * len(data) // 16

    while update < total:
        for x, y in loader:
            for group in optimizer.param_groups:
                group["lr"] = get_lr(update, total)
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            update = optimizer.reference_steps  # elastic
            if optimizer.updated and optimizer.updates % 10 == 0:  # elastic
                print(f"update {update}  loss {loss.item():.4f}  lr {group['lr']:.5f}")
    return model, optimizer, loss.item()


if __name__ == "__main__":
    main()
