"""What a fleet of replicas with several ranks should have computed: an emulated run of the unsharded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from contract.suite import SAMPLES, counted_loss, make_data, make_model, nested
from ebbflow.data.ledger import Ledger
from ebbflow.engines.emulated import LoopEngine
from ebbflow.live.accounting import Account, read_fleet
from ebbflow.live.protocol import FINAL_WEIGHTS
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.optim.ema import WeightAverage
from ebbflow.plan.batch_plan import StepSize
from ebbflow.record import StepRow
from ebbflow.run.checkpoint import load_checkpoint
from ebbflow.run.flow import Flow
from ebbflow.workloads import cross_entropy
from live import rank_replicas


def unsharded(account: Account, **arguments: Any) -> tuple[dict[str, dict[str, torch.Tensor]], list[StepRow]]:
    """Weights and rows of an emulated run of the unsharded model, with the same replicas in every step."""
    split, counted = arguments.get("split", 1), arguments.get("counted", False)
    local = arguments.get("local_batch", 4) // split

    class Plan:
        def at(self, step: int) -> StepSize:
            workers = account.steps[step].workers * split
            return StepSize(workers=workers, samples=local * workers, time_s=0.0, duration_s=1.0)

    x, y = make_data()
    model = make_model(batch_norm=arguments.get("batch_norm", False))
    rank_replicas.change_model(model, arguments)
    make = getattr(torch.optim, arguments.get("optimizer", "SGD"))
    settings = {"momentum": 0.9} if make is torch.optim.SGD else {}
    optimizer = ElasticOptimizer(
        make(model.parameters(), lr=0.1, **settings), arguments.get("rule", "linear"), base_batch=8,
        epoch_samples=SAMPLES, clip=arguments.get("clip"),
    )  # fmt: skip
    engine = LoopEngine(
        model, lambda i: nested((x[i], y[i])) if counted else (x[i], y[i]), counted_loss if counted else cross_entropy,
        Plan(), samples=SAMPLES, seed=7, needs=optimizer.rule.needs, micro_batch=arguments.get("micro_batch"),
    )  # fmt: skip
    average = WeightAverage(model, arguments["ema"]) if "ema" in arguments else None
    flow = Flow(engine, optimizer, Ledger(samples=SAMPLES), average=average)
    rows = [flow.run_step() for _ in account.steps]
    return {"model": model.state_dict(), **({"ema": average.state_dict()} if average is not None else {})}, rows


def check(folder: Path, **arguments: Any) -> Account:
    """Every sample once; weights and statistics of the unsharded emulated run, to rounding."""
    account, _ = read_fleet(folder)
    assert account.mistakes == ()
    kinds, rows = unsharded(account, **arguments)
    saved = load_checkpoint(folder / FINAL_WEIGHTS)
    for kind, weights in kinds.items():
        assert saved[kind].keys() == weights.keys()
        for name, expected in weights.items():
            torch.testing.assert_close(
                saved[kind][name], expected, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
            )
    for row, expected in zip(account.steps, rows, strict=True):
        assert (row.batch, row.micro_batches * arguments.get("split", 1)) == (expected.batch, expected.micro_batches)
        assert row.loss == pytest.approx(expected.loss, rel=1e-9)
        for name, value in expected.stats.items():
            assert row.stats[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name
    return account
