"""What test_several_ranks.py runs in several processes: `several_ranks.py FOLDER`, after one process has begun."""

from __future__ import annotations

import gc
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ELASTIC = {"trace": "0s:4 3s:2 7s:5 600s", "step_time": "1s", "rule": "adascale"}
"""Steps of 4, 4, 4, 2, 2, 2, 2, 5, 5, ... workers."""
TRAINER = {
    "samples": 120, "num_train_epochs": 1, "per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 3,
    "logging_steps": 1, "max_grad_norm": 0.5,
}  # fmt: skip


def trainer(folder: Path, resume: Path | None = None) -> Any:
    """The example of transformers, with a scheduler, clipping and a rule that measures."""
    main = runpy.run_path(str(EXAMPLES / "transformers_trainer.py"))["main"]
    return main(str(folder), ELASTIC, resume=None if resume is None else str(resume), **TRAINER)


def accelerate_loop() -> Any:
    """The example of accelerate, with the first 500 of its samples."""
    main = runpy.run_path(str(EXAMPLES / "accelerate_loop.py"))["main"]
    digits = main.__globals__["load_digits"]()
    digits["data"], digits["target"] = digits["data"][:500], digits["target"][:500]
    main.__globals__["load_digits"] = lambda: digits
    return main


def loop(folder: Path, epochs: int, resume: Path | None = None) -> Any:
    """The first epochs of it, in double precision by `torch.set_default_dtype`."""
    resumed = None if resume is None else str(resume)
    return accelerate_loop()({**ELASTIC, "epochs": 4}, 4, str(folder), resumed, epochs, clip=0.3)


if __name__ == "__main__":
    from ebbflow.workloads.torchvision_import import import_torchvision

    import_torchvision(needed_for="transformers")  # which does not load beside every build of torch
    torch.set_default_dtype(torch.float64)
    start = Path(sys.argv[1])
    loop(start / "ranks-loop", 2, resume=start / "loop")
    trainer(start / "ranks", resume=start / "alone" / "checkpoint-3")
    gc.collect()  # no DistributedDataParallel may outlive its group
    torch.distributed.destroy_process_group()  # with gloo, a process that ends with its group aborts now and then
