"""A replica that trains a workload: `python -m ebbflow.live.worker --workload digits-mlp --rule adascale`.

For those who want to try a fleet, replay a trace or measure without a script of their own. Started by
`ebbflow launch`, or by whoever sets the environment that `protocol.py` names.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import Any

import torch

from ebbflow import workloads
from ebbflow.core.memory import keep_freed_memory
from ebbflow.errors import EbbflowError
from ebbflow.live.fleet import Fleet
from ebbflow.live.joining import join
from ebbflow.optim.build import build_optimizer
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.run.config import load_plugins

__all__ = ["join_workload", "main"]


def join_workload(
    workload: str,
    *,
    rule: str = "linear",
    epochs: int | None = None,
    lr: float | None = None,
    ref_batch: int | None = None,
    local_batch: int | None = None,
    policy: str = "follow",
    optimizer: str | None = None,
    schedule: str | None = None,
    seed: int = 0,
    data: str | None = None,
    device: str = "cpu",
    **settings: Any,
) -> Fleet:
    """Join a fleet that trains a workload by its recipe, or what is given instead; `run()` trains to the end.

    `settings`: those of `ebbflow.live.join`.
    """
    task = workloads.build(workload, data=data, seed=seed, device=device)
    recipe = task.recipe
    epochs = epochs or recipe.epochs
    elastic = ElasticOptimizer(
        build_optimizer(optimizer or recipe.optimizer, task.model, lr=lr or recipe.lr),
        rule,
        base_batch=ref_batch or recipe.ref_batch,
        schedule=schedule or recipe.schedule,
        epochs=epochs,
        epoch_samples=len(task.train),
        on_nonfinite="stop",
    )
    return join(
        task.model,
        elastic,
        task.train,
        loss=task.loss,
        epochs=epochs,
        policy=policy,
        local_batch=local_batch or recipe.local_batch,
        seed=seed,
        on_epoch=lambda epoch: task.evaluate(task.model),
        describe={"workload": workload, "metric": recipe.metric, "higher_is_better": recipe.higher_is_better},
        **settings,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ebbflow.live.worker", description="A replica of a live fleet.")
    parser.add_argument("--workload", default="digits-mlp", help="name or text form, such as digits-cnn(width=32)")
    parser.add_argument("--rule", default="linear", help="text form, such as adascale or linear+warmup(5ep)")
    parser.add_argument("--policy", default="follow", help="how the batch follows the replicas")
    for name, kind in (("epochs", int), ("lr", float), ("ref-batch", int), ("local-batch", int), ("micro_batch", int)):
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--optimizer")
    parser.add_argument("--schedule")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", help="folder or file of the data set")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--checkpoint-every-s", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--plugin", action="append", default=[], help="Python file with workloads or rules of your own")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; the exit code."""
    values = vars(_parser().parse_args(arguments))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    torch.set_num_threads(values.pop("threads"))
    torch.set_flush_denormal(True)
    keep_freed_memory()
    try:
        load_plugins(tuple(values.pop("plugin")))
        with join_workload(**values) as fleet:
            fleet.run()
    except EbbflowError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
