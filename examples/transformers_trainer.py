"""A small GPT-2, trained from scratch by the Trainer of transformers, in the shape of its `run_clm.py`.

    python examples/transformers_trainer.py

The lines marked `# elastic` make the difference to an ordinary script; docs/own-loops.md shows it.
"""

import random
import tempfile

import torch
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, default_data_collator

from ebbflow import BatchPlan, ElasticOptimizer, ElasticSampler  # elastic

EPOCHS, BLOCK = 3, 16
WORDS = ["the", "fleet", "grows", "and", "shrinks", "while", "a", "model", "learns", "from", "every", "sample", "once"]
# Two to eight workers with 8 sequences each, another number every two minutes.  # elastic
PLAN = BatchPlan.from_trace("random-levels(2, 8, every=2min)", "follow(8)", step_time="20s")  # elastic


class Blocks(Dataset):
    """Blocks of equal length of a tokenized text."""

    def __init__(self, blocks=300):
        tokens = random.Random(0).choices(range(len(WORDS)), k=blocks * BLOCK // 2)
        self.tokens = torch.tensor([(token, (token + 1) % len(WORDS)) for token in tokens]).view(blocks, BLOCK)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


class ElasticTrainer(Trainer):  # elastic
    def get_train_dataloader(self):
        sampler = self.optimizer.sampler
        return DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator)


class StopWhenFinished(TrainerCallback):  # elastic
    """Ends the training after the last sample of the last epoch, since the Trainer itself counts micro-batches."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = self.optimizer.finished


def main(plan=PLAN, local_batch=8, folder=None, resume=None, **settings):
    torch.manual_seed(0)
    data = Blocks()
    sizes = {"vocab_size": len(WORDS), "n_positions": BLOCK, "n_embd": 32, "n_layer": 1, "n_head": 2}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **tokens, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    optimizer = AdamW(model.parameters(), lr=3e-3)
    sampler = ElasticSampler(data, plan, local_batch=local_batch)  # elastic
    optimizer = ElasticOptimizer(  # elastic
        optimizer, rule="sqrt", base_batch=16, sampler=sampler, schedule="cosine", epochs=EPOCHS, clip=1.0
    )
    arguments = {
        "output_dir": folder,
        "num_train_epochs": 2 * EPOCHS,  # elastic; an upper bound
        "max_grad_norm": 0,  # elastic; clip= above
        "lr_scheduler_type": "constant",  # elastic; schedule= above
        "ignore_data_skip": True,  # elastic; the sampler resumes by itself
        "save_strategy": "epoch",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    trainer = ElasticTrainer(  # elastic
        model=model,
        args=TrainingArguments(**arguments | settings),
        train_dataset=data,
        data_collator=default_data_collator,
        optimizers=(optimizer, None),  # elastic
        callbacks=[StopWhenFinished(optimizer)],  # elastic
    )
    result = trainer.train(resume_from_checkpoint=resume)
    print(f"mean loss {result.training_loss:.4f}")
    return model, optimizer, result.training_loss


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as output:
        main(folder=output)
