"""The live engine under the contract: real replicas, and a lost worker is a real process that is killed.

The plan's workers are computed by whatever replicas there are (worker w by the replica of rank w mod replicas), so the
steps are those of the emulated engines. Every loss in the script of faults kills one replica that the others count on,
before it has anything to send: in the middle of the sum it may be too late for the step to be lost (`tests/live`).
"""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path

import pytest
import torch

from live.harness import TestFleet, final_state

pytest.importorskip("torchft", reason="the live engine needs torchft: pip install 'ebbflow[live]'")

from contract.suite import SAMPLES, EngineContract, Outcome
from ebbflow.data.permutation import Permutation
from ebbflow.engines.base import Faults
from ebbflow.live.accounting import read_fleet
from ebbflow.plan.plan import BatchPlan
from live import replicas

SURVIVORS = ("s0", "s1")


class TestLiveEngine(EngineContract):
    def run(self, plan: BatchPlan, *, faults: Faults | None = None, batch_norm: bool = False) -> Outcome:
        faults = faults or Faults()
        losses = sorted((step, worker) for step, workers in faults.losses.items() for worker in workers)
        names = [*SURVIVORS, *(f"v{i}" for i in range(len(losses)))]
        sizes = replicas.PlanSizes(plan, faults, len(names))
        with tempfile.TemporaryDirectory() as folder:
            fleet = TestFleet(Path(folder), replicas.tiny, {"batch_norm": batch_norm, "policy": sizes, "all": names})
            with fleet:
                for name, (step, _) in zip(names[len(SURVIVORS) :], losses, strict=True):
                    fleet.start(name, fault=f"kill:quorum@{step}")
                fleet.start(*SURVIVORS)
                codes = fleet.wait()
            killed = [name for name, code in codes.items() if code == -signal.SIGKILL]
            assert killed == names[len(SURVIVORS) :], codes
            assert {code for name, code in codes.items() if name not in killed} == {0}, codes
            faults.fired += len(killed) + sum(map(len, faults.returns.values()))
            account, runs = read_fleet(Path(folder))
            (lost,) = {sum(event.what == "lost step" for event in run.events) for run in runs if run.end}
            state = final_state(Path(folder))["model"]
        assert account.mistakes == ()
        committed = [
            Permutation(SAMPLES, 7, row.epoch)
            .indices(row.samples - row.batch - row.epoch * SAMPLES, row.samples - row.epoch * SAMPLES)
            .tolist()
            for row in account.steps
        ]
        weights = torch.cat([tensor.double().flatten() for tensor in state.values()])
        return Outcome(committed, [row.epoch for row in account.steps], weights, len(committed) + lost)
