"""A small decoder-only transformer: pre-norm, learned positions, GELU, causal attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ebbflow.errors import ConfigError

__all__ = ["GPT"]


class Block(nn.Module):
    """Attention, then a perceptron, each on the normalised stream and added to it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The stream `(samples, tokens, width)` after this block."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropped = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropped)
        x = x + F.dropout(self.out(attended.transpose(1, 2).flatten(2)), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


class GPT(nn.Module):
    """Predicts the next token at each place of a block of at most `context` tokens."""

    def __init__(
        self, *, vocabulary: int, context: int, layers: int, heads: int, width: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if width % heads:
            raise ConfigError(f"width={width} is not a multiple of heads={heads}; change one of them")
        self.dropout = dropout
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        # GPT-2's initialisation: small weights, smaller still where a block writes to the stream.
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                writes = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if writes else 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Logits `(samples, tokens, vocabulary)` from token numbers `(samples, tokens)`."""
        stream = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        logits: Tensor = self.head(self.norm(self.blocks(F.dropout(stream, self.dropout, self.training))))
        return logits
