"""The emulated engines under the contract: the reference, and the fused one in one chunk a step and in small ones."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch

from contract.suite import EPOCHS, SAMPLES, EngineContract, Outcome, make_data, make_model
from ebbflow.data.ledger import Ledger
from ebbflow.engines.base import Faults
from ebbflow.engines.emulated import FusedEngine, LoopEngine
from ebbflow.engines.emulated.base import EmulatedEngine
from ebbflow.engines.emulated.ranks import Ranks
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.plan.batch_plan import BatchPlan
from ebbflow.run.flow import Flow
from ebbflow.workloads import cross_entropy


class TestLoopEngine(EngineContract):
    engine: ClassVar[type[EmulatedEngine]] = LoopEngine
    settings: ClassVar[dict[str, Any]] = {}

    def run(self, plan: BatchPlan, *, faults: Faults | None = None, batch_norm: bool = False) -> Outcome:
        x, y = make_data()
        model = make_model(batch_norm=batch_norm)
        asked: list[int] = []

        def fetch(indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
            asked.extend(indices.tolist())
            return x[indices], y[indices]

        engine = self.engine(model, fetch, cross_entropy, plan, samples=SAMPLES, seed=7, faults=faults, **self.settings)
        optimizer = ElasticOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "linear", base_batch=8, epoch_samples=SAMPLES
        )
        flow = Flow(engine, optimizer, Ledger(samples=SAMPLES))
        committed, epochs, attempts = [], [], 0
        while flow.ledger.epoch < EPOCHS:
            asked.clear()
            row = flow.run_step()
            attempts += 1
            if row is not None:
                committed.append(list(asked))
                epochs.append(row.epoch)
        weights = torch.cat([tensor.double().flatten() for tensor in model.state_dict().values()])
        return Outcome(committed, epochs, weights, attempts)


class TestFusedEngine(TestLoopEngine):
    engine = FusedEngine


class TestFusedEngineInSmallChunks(TestLoopEngine):
    engine = FusedEngine
    settings: ClassVar[dict[str, Any]] = {"chunk": 8, "needs": frozenset({"moments"})}


class TestLoopEngineOfTheOnlyRank(TestLoopEngine):
    """The path of several ranks, without the others: `tests/engines/test_ranks.py` has them."""

    settings: ClassVar[dict[str, Any]] = {"ranks": Ranks(0, 1)}


class TestFusedEngineOfTheOnlyRank(TestLoopEngine):
    engine = FusedEngine
    settings: ClassVar[dict[str, Any]] = {"chunk": 8, "needs": frozenset({"moments"}), "ranks": Ranks(0, 1)}
