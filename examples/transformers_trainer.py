"""A small GPT-2, trained from scratch by the Trainer of transformers, in the shape of its `run_clm.py`.

    python examples/transformers_trainer.py
    ebbflow launch --replicas 3 examples/transformers_trainer.py    # as replicas of a live fleet

The lines marked `# elastic` make the difference to an ordinary script; docs/integrations.md shows it.
"""

import os
import random
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from ebbflow.integrations.transformers import ElasticTrainer  # elastic

WORDS = ["the", "fleet", "grows", "and", "shrinks", "while", "a", "model", "learns", "from", "every", "sample", "once"]
LENGTH = 16


class Sentences(Dataset):
    """Sequences of 4 to 16 tokens, in which every second token follows from the one before it."""

    def __init__(self, count=300):
        draw = random.Random(0)
        pairs = [draw.choices(range(len(WORDS)), k=draw.randint(2, LENGTH // 2)) for _ in range(count)]
        self.tokens = [[t for one in tokens for t in (one, (one + 1) % len(WORDS))] for tokens in pairs]

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i]}


def pad(samples):
    """Pads a batch to its longest sequence; the labels of the padding are -100, which the loss leaves out."""
    length = max(len(sample["input_ids"]) for sample in samples)
    rows = [sample["input_ids"] + [-100] * (length - len(sample["input_ids"])) for sample in samples]
    labels = torch.tensor(rows)
    return {"input_ids": labels.clamp(min=0), "attention_mask": (labels >= 0).long(), "labels": labels}


def main(folder, elastic=None, resume=None, samples=300, **settings):
    torch.manual_seed(0)
    sizes = {"vocab_size": len(WORDS), "n_positions": LENGTH, "n_embd": 32, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    arguments = {
        "output_dir": folder,
        "num_train_epochs": 3,
        "per_device_train_batch_size": 8,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 10,
        "save_strategy": "epoch",
        "logging_steps": 10,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    # Two to eight workers with 8 sequences each, another number every two minutes.  # elastic
    spot = {"trace": "random-levels(2, 8, every=2min)", "step_time": "20s"}  # elastic
    live = {"engine": "live"}  # elastic; as a replica of `ebbflow launch`
    fleet = live if "EBBFLOW_LIGHTHOUSE" in os.environ else spot  # elastic
    trainer = ElasticTrainer(
        model=model,
        args=TrainingArguments(**arguments | settings),
        train_dataset=Sentences(samples),
        data_collator=pad,
        elastic={"rule": "sqrt", "base_batch": 16, **fleet, **(elastic or {})},  # elastic
    )
    result = trainer.train(resume_from_checkpoint=resume)
    print(f"mean loss {result.training_loss:.4f} after {trainer.state.global_step} steps")
    return trainer


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as output:
        main(output)
