"""A character-level language model of any plain text, usually of Shakespeare's plays (about 1 MB)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ebbflow.core.files import read_text
from ebbflow.errors import ConfigError, DataError
from ebbflow.workloads.models import GPT
from ebbflow.workloads.sources import TokenSource
from ebbflow.workloads.workload import Recipe, Task, missing_data, register_workload

__all__ = ["shakespeare_gpt"]


# Validation loss at the reference batch after ten epochs of Shakespeare (1.1 MB) by learning rate; one seed, no warm-up
# (H200, torch 2.11):   5e-4 1.724   1e-3 1.622   2e-3 1.650.
@register_workload(
    "shakespeare-gpt",
    recipe=Recipe(
        ref_batch=32,
        local_batch=8,
        lr=1e-3,
        optimizer="adamw(weight_decay=0.1)",
        schedule="cosine",
        epochs=10,
        metric="loss",
        higher_is_better=False,
    ),
)
def shakespeare_gpt(
    data: Path | None,
    recipe: Recipe,
    context: int = 128,
    layers: int = 4,
    heads: int = 4,
    width: int = 128,
    dropout: float = 0.0,
) -> Task:
    """A small causal transformer on the characters of a text file, with AdamW.

    A sample is a block of `context` characters. Blocks do not overlap, so every character is used once per epoch. The
    first nine tenths of the text are for training, the rest for validation. The vocabulary is that of the whole text.
    """
    if data is None:
        raise missing_data("shakespeare-gpt", "the path of a plain text file")
    for name, value in {"context": context, "layers": layers, "heads": heads, "width": width}.items():
        if value < 1:
            raise ConfigError(f"shakespeare-gpt: {name} is {value}; expected at least 1")
    if not 0 <= dropout < 1:
        raise ConfigError(f"shakespeare-gpt: dropout is {dropout:g}; expected at least 0 and less than 1")
    text = read_text(data, error=DataError).replace("\r\n", "\n")  # a text is the same with the line ends of Windows
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    vocabulary, numbers = np.unique(points, return_inverse=True)
    tokens = torch.from_numpy(numbers.astype(np.int64))
    cut = len(tokens) * 9 // 10
    train = TokenSource(tokens[:cut], context, context)
    valid = TokenSource(tokens[cut:], context, context)
    if not len(train) or not len(valid):
        raise DataError(
            f"{data}: {len(tokens)} characters; a context of {context} needs {10 * (context + 1)} or more, so that the "
            f"last tenth of the text holds a block"
        )
    model = GPT(vocabulary=len(vocabulary), context=context, layers=layers, heads=heads, width=width, dropout=dropout)
    return Task(model=model, train=train, valid=valid, recipe=recipe)
