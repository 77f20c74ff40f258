"""A transformer as a LightningModule with automatic optimization, which Lightning's Trainer saves and resumes.

    python examples/lightning_transformer.py

The lines marked `# elastic` make the difference to an ordinary script; docs/own-loops.md shows it.
"""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ebbflow import BatchPlan, ElasticOptimizer, ElasticSampler  # elastic

EPOCHS, LENGTH, VOCABULARY = 4, 16, 12
# Two to eight workers with 8 sequences each, another number every two minutes.  # elastic
PLAN = BatchPlan.from_trace("random-levels(2, 8, every=2min)", "follow(8)", step_time="20s")  # elastic


def sequences(count=600):
    """Sequences in which every token is the sum of the two before it."""
    tokens = torch.randint(VOCABULARY, (count, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    for i in range(2, LENGTH + 1):
        tokens[:, i] = (tokens[:, i - 1] + tokens[:, i - 2]) % VOCABULARY
    return TensorDataset(tokens)


class Transformer(L.LightningModule):
    def __init__(self, sampler, width=32):
        super().__init__()
        self.sampler = sampler  # elastic
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, nhead=2, dim_feedforward=64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=1)
        self.head = nn.Linear(width, VOCABULARY)

    def training_step(self, batch, index):
        (tokens,) = batch
        x, y = tokens[:, :-1], tokens[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        hidden = self.encoder(self.tokens(x) + self.positions.weight, mask=mask, is_causal=True)
        self.loss = F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())
        return self.loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=3e-3)
        settings = {"schedule": "cosine", "epochs": EPOCHS, "clip": 1.0}  # elastic
        return ElasticOptimizer(optimizer, rule="sqrt", base_batch=16, sampler=self.sampler, **settings)  # elastic

    def on_train_batch_end(self, outputs, batch, index):  # elastic
        self.trainer.should_stop = self.optimizers().finished  # elastic


def main(plan=PLAN, local_batch=8, resume=None, **settings):
    torch.manual_seed(1)
    data = sequences()
    sampler = ElasticSampler(data, plan, local_batch=local_batch)  # elastic
    loader = DataLoader(data, batch_sampler=sampler)  # elastic
    model = Transformer(sampler)  # elastic
    trainer = L.Trainer(
        max_epochs=-1,  # elastic
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False} | settings,
    )
    trainer.fit(model, loader, ckpt_path=resume)
    print(f"loss {model.loss.item():.4f}")
    return model, trainer.optimizers[0], model.loss.item()


if __name__ == "__main__":
    main()
