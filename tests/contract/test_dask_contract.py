"""The Dask engine under the contract: both ways to carry gradients, on two and on four workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from distributed import Client

from contract.suite import EPOCHS, SAMPLES, EngineContract, Outcome, make_data, make_model
from ebbflow.data.ledger import Ledger
from ebbflow.engines.base import Faults
from ebbflow.engines.dask import DaskEngine
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.plan.batch_plan import BatchPlan
from ebbflow.run.flow import Flow
from ebbflow.workloads import cross_entropy
from engines.dask_helpers import Witnessed, local_client


@pytest.fixture(scope="module")
def four_workers() -> Iterator[Client]:
    with local_client(4) as client:
        yield client


class TestAllreduceOnTwo(EngineContract):
    settings: ClassVar[dict[str, Any]] = {"carry": "allreduce", "min_workers": 2, "max_workers": 2}

    @pytest.fixture(autouse=True)
    def _given(self, four_workers: Client, tmp_path: Path) -> None:
        self.client, self.folder = four_workers, tmp_path

    def run(self, plan: BatchPlan, *, faults: Faults | None = None, batch_norm: bool = False) -> Outcome:
        data = Witnessed(*make_data(), self.folder)
        data.news()  # of an earlier run in the same folder
        model = make_model(batch_norm=batch_norm)
        optimizer = ElasticOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "linear", base_batch=8, epoch_samples=SAMPLES
        )
        committed, epochs, attempts = [], [], 0
        with DaskEngine(
            model, data, cross_entropy, plan, client=self.client, optimizer=optimizer, samples=SAMPLES, seed=7,
            faults=faults, **self.settings,
        ) as engine:  # fmt: skip
            flow = Flow(engine, optimizer, Ledger(samples=SAMPLES))
            while flow.ledger.epoch < EPOCHS:
                row = flow.run_step()
                attempts += 1
                asked = sorted(index for indices in data.news().values() for index in indices)
                if row is not None:
                    committed.append(asked)
                    epochs.append(row.epoch)
        weights = torch.cat([tensor.double().flatten() for tensor in model.state_dict().values()])
        return Outcome(committed, epochs, weights, attempts)


class TestAllreduceOnFourWithStatistics(TestAllreduceOnTwo):
    settings: ClassVar[dict[str, Any]] = {"carry": "allreduce", "min_workers": 4, "needs": frozenset({"moments"})}


class TestCentralizedOnTwo(TestAllreduceOnTwo):
    settings: ClassVar[dict[str, Any]] = {"carry": "centralized", "min_workers": 2, "max_workers": 2}


class TestCentralizedOnFourWithStatistics(TestAllreduceOnTwo):
    settings: ClassVar[dict[str, Any]] = {"carry": "centralized", "min_workers": 4, "needs": frozenset({"moments"})}
