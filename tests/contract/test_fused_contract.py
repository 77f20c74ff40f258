"""The fused engine under the contract: in one chunk a step, in small chunks, and with statistics."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from contract.suite import EPOCHS, SAMPLES, EngineContract, Outcome, make_data, make_model
from ebbflow.data.ledger import Ledger
from ebbflow.engines.base import Faults
from ebbflow.engines.emulated import FusedEngine
from ebbflow.loop import Flow
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.plan.plan import BatchPlan
from ebbflow.workloads import cross_entropy


class TestFusedEngine(EngineContract):
    settings: dict[str, Any] = {}  # noqa: RUF012

    def run(self, plan: BatchPlan, *, faults: Faults | None = None, batch_norm: bool = False) -> Outcome:
        x, y = make_data()
        model = make_model(batch_norm=batch_norm)
        asked: list[int] = []

        def fetch(indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
            asked.extend(indices.tolist())
            return x[indices], y[indices]

        engine = FusedEngine(model, fetch, cross_entropy, plan, samples=SAMPLES, seed=7, faults=faults, **self.settings)
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


class TestFusedEngineInSmallChunks(TestFusedEngine):
    settings = {"chunk": 8, "needs": frozenset({"moments"})}  # noqa: RUF012
