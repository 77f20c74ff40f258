"""The engines that pass the contract. A new engine is one more row: a name, and how it is run or made."""

from __future__ import annotations

import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from contract.suite import SAMPLES, Outcome, RunEngine, in_this_process
from ebbflow.data.permutation import Permutation
from ebbflow.engines.base import Engine, EngineMaker, EngineParts, Faults
from ebbflow.engines.emulated import FusedEngine, LoopEngine, Ranks
from ebbflow.plan.batch_plan import BatchPlan

MEASURED = frozenset({"moments"})
CLIENT: list[Any] = []
"""The Client of the cluster that the tests of a module share, while there is one."""


@dataclass(frozen=True)
class EngineCase:
    """An engine under the contract."""

    name: str
    run: RunEngine
    maker: EngineMaker | None = None
    """For the tests of single members of the contract; None for an engine that this process does not drive."""
    processes: bool = False
    """Whether it starts processes."""
    dask: bool = False
    """Whether it needs a Dask cluster, which the fixture `case` starts."""

    def param(self) -> Any:
        return pytest.param(self, id=self.name, marks=[pytest.mark.process] if self.processes else [])


def emulated(
    name: str, kind: type[LoopEngine] | type[FusedEngine], *, measured: bool = False, **settings: Any
) -> EngineCase:
    def make(parts: EngineParts) -> Engine:
        return kind(
            parts.model, parts.fetch, parts.loss, parts.plan, samples=parts.samples, seed=parts.seed,
            needs=parts.needs, parameters=parts.parameters, faults=parts.faults, **settings,
        )  # type: ignore[arg-type]  # fmt: skip

    return EngineCase(name, in_this_process(make, needs=MEASURED if measured else frozenset()), make)


def dask(name: str, *, measured: bool = False, **settings: Any) -> EngineCase:
    def make(parts: EngineParts) -> Engine:
        from ebbflow.engines.dask import DaskEngine

        return DaskEngine(
            parts.model, parts.fetch, parts.loss, parts.plan, client=CLIENT[0], samples=parts.samples, seed=parts.seed,
            optimizer=parts.optimizer, needs=parts.needs, parameters=parts.parameters, faults=parts.faults, **settings,
        )  # type: ignore[arg-type]  # fmt: skip

    def witnessed() -> Any:
        from contract.suite import make_data
        from engines.dask_helpers import Witnessed

        return Witnessed(*make_data(), Path(tempfile.mkdtemp()))

    needs = MEASURED if measured else frozenset()
    return EngineCase(name, in_this_process(make, data=witnessed, needs=needs), make, processes=True, dask=True)


def live() -> EngineCase:
    """Real replicas, and a lost worker is a real process that is killed.

    The plan's workers are computed by whatever replicas there are (worker w by the replica of rank w mod replicas), so
    the steps are those of the emulated engines. Every loss in the script of faults kills one replica that the others
    count on, before it has anything to send: during the all-reduce it may be too late for the step to be lost.
    """
    survivors = ("s0", "s1")

    def run(plan: BatchPlan, faults: Faults, batch_norm: bool, counted: bool) -> Outcome:
        pytest.importorskip("torchft", reason="the live engine needs torchft: pip install 'ebbflow[live]'")
        import torch

        from ebbflow.live import read_fleet
        from live import replicas
        from live.harness import TestFleet, final_state

        losses = sorted((step, worker) for step, workers in faults.losses.items() for worker in workers)
        names = [*survivors, *(f"v{i}" for i in range(len(losses)))]
        sizes = replicas.PlanSizes(plan, faults, len(names))
        with tempfile.TemporaryDirectory() as folder:
            arguments = {"batch_norm": batch_norm, "policy": sizes, "all": names, "counted": counted}
            fleet = TestFleet(Path(folder), replicas.tiny, arguments)
            with fleet:
                for name, (step, _) in zip(names[len(survivors) :], losses, strict=True):
                    fleet.start(name, fault=f"kill:quorum@{step}")
                fleet.start(*survivors)
                codes = fleet.wait()
            killed = [name for name, code in codes.items() if code == -signal.SIGKILL]
            assert killed == names[len(survivors) :], codes
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

    return EngineCase("live", run, processes=True)


CASES = [
    emulated("loop", LoopEngine),
    emulated("loop of the only rank", LoopEngine, ranks=Ranks(0, 1)),
    emulated("fused", FusedEngine),
    emulated("fused in small passes", FusedEngine, measured=True, fused_batch=8),
    emulated("fused of the only rank", FusedEngine, measured=True, fused_batch=8, ranks=Ranks(0, 1)),
    dask("dask all-reduce on two", transport="allreduce", min_workers=2, max_workers=2),
    dask("dask all-reduce on four", measured=True, transport="allreduce", min_workers=4),
    dask("dask centralized on two", transport="centralized", min_workers=2, max_workers=2),
    dask("dask centralized on four", measured=True, transport="centralized", min_workers=4),
    live(),
]
