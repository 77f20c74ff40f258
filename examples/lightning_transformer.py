"""A transformer as a LightningModule with automatic optimization, which Lightning's Trainer saves and resumes.

    python examples/lightning_transformer.py

The lines marked `# elastic` make the difference to an ordinary script; docs/integrations.md shows it.
"""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ebbflow.integrations.lightning import ElasticStrategy  # elastic

LENGTH, VOCABULARY = 16, 12
# Two to eight workers with 8 sequences each, another number every two minutes.  # elastic
SPOT = {"trace": "random-levels(2, 8, every=2min)", "step_time": "20s"}  # elastic


def sequences(count):
    """Sequences in which every token is the sum of the two before it."""
    tokens = torch.randint(VOCABULARY, (count, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    for i in range(2, LENGTH + 1):
        tokens[:, i] = (tokens[:, i - 1] + tokens[:, i - 2]) % VOCABULARY
    return TensorDataset(tokens)


class Transformer(L.LightningModule):
    def __init__(self, width=32):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, nhead=2, dim_feedforward=64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=1)
        self.head = nn.Linear(width, VOCABULARY)

    def training_step(self, batch, index):
        (tokens,) = batch
        x, y = tokens[:, :-1], tokens[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        hidden = self.encoder(self.tokens(x) + self.positions.weight, mask=mask, is_causal=True)
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def main(fleet=SPOT, batch_size=8, resume=None, samples=600, **settings):
    torch.manual_seed(1)
    loader = DataLoader(sequences(samples), batch_size=batch_size, shuffle=True)
    model = Transformer()
    elastic = ElasticStrategy(rule="sqrt", base_batch=16, **fleet)  # elastic
    trainer = L.Trainer(
        strategy=elastic,  # elastic
        accelerator="cpu",
        devices=1,
        gradient_clip_val=1.0,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 4, "logger": False, "enable_checkpointing": False} | settings,
    )
    trainer.fit(model, loader, ckpt_path=resume)
    print(f"loss {trainer.callback_metrics['train_loss_epoch']:.4f} after {trainer.global_step} steps")
    return model, trainer


if __name__ == "__main__":
    main()
