"""Replicas of several ranks: the weights and statistics of an unsharded run, also when single ranks are killed."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from live.harness import TestFleet

pytest.importorskip("torchft", reason="the live engine needs torchft: pip install 'ebbflow[live]'")

from contract.suite import SAMPLES, make_data, make_model
from ebbflow.data.ledger import Ledger
from ebbflow.engines.emulated import LoopEngine
from ebbflow.live.accounting import Account, read_fleet
from ebbflow.live.protocol import FINAL_WEIGHTS
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.plan.batch_plan import StepSize
from ebbflow.record import StepRow
from ebbflow.run.checkpoint import load_checkpoint
from ebbflow.run.flow import Flow
from ebbflow.workloads import cross_entropy
from live import rank_replicas

pytestmark = pytest.mark.process

KILLED = -signal.SIGKILL
BOTH = ("r0", "r1")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Callable[..., TestFleet]]:
    made: list[TestFleet] = []

    def make(**arguments: Any) -> TestFleet:
        made.append(TestFleet(tmp_path, rank_replicas.sharded, {"all": BOTH, "max_steps": 20, **arguments}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def unsharded(account: Account, **arguments: Any) -> tuple[dict[str, torch.Tensor], list[StepRow]]:
    """Weights and rows of an emulated run of the unsharded model, with the same replicas in every step."""
    local = arguments.get("local_batch", 4)

    class Plan:
        def at(self, step: int) -> StepSize:
            workers = account.steps[step].workers
            return StepSize(workers=workers, samples=local * workers, time_s=0.0, duration_s=1.0)

    x, y = make_data()
    model = make_model(batch_norm=arguments.get("batch_norm", False))
    make = getattr(torch.optim, arguments.get("optimizer", "SGD"))
    settings = {"momentum": 0.9} if make is torch.optim.SGD else {}
    optimizer = ElasticOptimizer(
        make(model.parameters(), lr=0.1, **settings), arguments.get("rule", "linear"), base_batch=8,
        epoch_samples=SAMPLES, clip=arguments.get("clip"),
    )  # fmt: skip
    engine = LoopEngine(
        model, lambda i: (x[i], y[i]), cross_entropy, Plan(), samples=SAMPLES, seed=7, needs=optimizer.rule.needs,
        micro_batch=arguments.get("micro_batch"),
    )  # fmt: skip
    flow = Flow(engine, optimizer, Ledger(samples=SAMPLES))
    return model.state_dict(), [flow.run_step() for _ in account.steps]


def check(folder: Path, **arguments: Any) -> Account:
    """Every sample once; weights and statistics of the unsharded emulated run, to rounding."""
    account, _ = read_fleet(folder)
    assert account.mistakes == ()
    weights, rows = unsharded(account, **arguments)
    found = load_checkpoint(folder / FINAL_WEIGHTS)["model"]
    assert found.keys() == weights.keys()
    for name, expected in weights.items():
        torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
    for row, expected in zip(account.steps, rows, strict=True):
        assert (row.batch, row.micro_batches) == (expected.batch, expected.micro_batches)
        assert row.loss == pytest.approx(expected.loss, rel=1e-9)
        for name, value in expected.stats.items():
            assert row.stats[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name
    return account


def test_two_replicas_of_two_ranks_with_fsdp_train_as_the_unsharded_model(fleet: Any, tmp_path: Path) -> None:
    group = fleet(rule="adascale")
    for name in BOTH:
        group.start_ranks(name, 2)
    assert set(group.wait().values()) == {0}
    account = check(tmp_path, rule="adascale")
    assert len(account.steps) == 20 and {row.workers for row in account.steps} == {2}
    assert account.steps[-1].stats["noise"] > 0


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("point", ["backward", "allreduce"])
def test_one_killed_rank_takes_its_replica_and_nothing_else(
    fleet: Any, tmp_path: Path, victim: int, point: str
) -> None:
    group = fleet(rule="adascale")
    group.start_ranks("r0", 2)
    group.start_ranks("r1", 2, faults={victim: f"kill:{point}@6"})
    codes = group.wait()
    assert codes["r0.0"] == codes["r0.1"] == 0 and codes[f"r1.{victim}"] == KILLED
    assert codes[f"r1.{1 - victim}"] not in (0, KILLED)  # it ended by itself: a replica without a rank is none
    account = check(tmp_path, rule="adascale")
    assert [row.workers for row in account.steps[:6]] == [2] * 6
    assert {row.workers for row in account.steps[8:]} == {1}
