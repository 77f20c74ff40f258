"""What the rule `auto` costs in time: a whole training by `auto`, divided by one by the fixed rule that it is made of.

    python benchmarks/auto_overhead.py [--turns N] [--epochs N]

With SGD both measure noise and signal, with AdamW neither does. `auto` also follows the slopes along its steps for a
quarter of the run and keeps snapshots while it is guarded. The two take turns, and turns in going first.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

import ebbflow

RULES = {"sgd": "adascale+statewarmup(0.05)", "adamw": "sqrt+statewarmup(0.05, by=multiplier)"}


def seconds(rule: str, optimizer: str, epochs: int) -> float:
    lr = 0.05 if optimizer == "sgd" else 0.001
    config = ebbflow.RunConfig(
        workload="digits-cnn", trace="constant(workers=8)", rule=rule, epochs=epochs, validate_every=epochs,
        optimizer=optimizer, lr=lr,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        return ebbflow.train(config, Path(folder)).steps[-1].wall_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--epochs", type=int, default=20)
    asked = parser.parse_args()
    print(f"{'optimizer':12}{'auto':>10}{'fixed':>10}{'ratio':>8}   fixed rule")
    for optimizer, rule in RULES.items():
        pairs = []
        for turn in range(asked.turns):
            order = ("auto", rule) if turn % 2 else (rule, "auto")
            took = {one: seconds(one, optimizer, asked.epochs) for one in order}
            pairs.append((took["auto"], took[rule]))
        ours, fixed = (median(column) for column in zip(*pairs, strict=True))
        ratio = median(one / other for one, other in pairs)
        print(f"{optimizer:12}{ours:9.2f}s{fixed:9.2f}s{ratio:8.3f}   {rule}", flush=True)


if __name__ == "__main__":
    main()
