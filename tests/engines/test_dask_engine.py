"""The Dask engine on workers that are shared, arrive, leave and are killed."""

from __future__ import annotations

import asyncio
import copy
import io
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from distributed import Client, LocalCluster
from torch import nn

from contract.suite import weights_of
from ebbflow.core.units import Span
from ebbflow.data.ledger import Ledger, MicroBatch
from ebbflow.engines.dask import DaskEngine, connect
from ebbflow.engines.dask.dask_worker import ApplyStep, DaskReplica, FlatState, ReplicaBlueprint, WorkerTask
from ebbflow.engines.emulated import LoopEngine
from ebbflow.errors import ConfigError, DataError
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.plan.batch_plan import BatchPlan
from ebbflow.plan.growing import Geo, Growth
from ebbflow.plan.policies import Drop, GrowingPolicy, make_policy
from ebbflow.record import StepRow
from ebbflow.rules.rule import StepContext
from ebbflow.run.flow import Flow
from ebbflow.workloads import cross_entropy
from engines.dask_helpers import Witnessed, local_client

pytestmark = pytest.mark.process

SAMPLES = 101
BOTH = pytest.mark.parametrize("transport", ["allreduce", "centralized"])


@pytest.fixture(scope="module")
def two_workers() -> Iterator[Client]:
    with local_client(2, threads=2) as client:
        yield client


@pytest.fixture(scope="module")
def growing_cluster() -> Iterator[Client]:
    with local_client(1) as client:
        yield client


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (SAMPLES,), generator=generator)


def make_model(seed: int = 0) -> nn.Module:
    """With dropout, which draws from the generators that all threads of a process share."""
    torch.manual_seed(seed)
    layers = nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.BatchNorm1d(16), nn.Linear(16, 3)
    return nn.Sequential(*layers).double()


def make_optimizer(model: nn.Module, *, rule: str = "linear", **settings: Any) -> ElasticOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return ElasticOptimizer(inner, rule, base_batch=8, epoch_samples=SAMPLES, epochs=2, **settings)


class Plain:
    def __init__(self) -> None:
        self.data = make_data()

    def __call__(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        return self.data[0][indices], self.data[1][indices]


def reference(
    steps: int, plan: BatchPlan, *, seed: int, micro_batch: int | None = None, **settings: Any
) -> list[torch.Tensor]:
    """The weights after each step, computed by the reference engine in this process."""
    model = make_model(seed)
    optimizer = make_optimizer(model, **settings)
    engine = LoopEngine(
        model, Plain(), cross_entropy, plan, samples=SAMPLES, seed=seed, micro_batch=micro_batch,
        needs=optimizer.rule.needs,
        parameters=optimizer.layers,
    )  # fmt: skip
    flow = Flow(engine, optimizer, Ledger(samples=SAMPLES))
    found = []
    for _ in range(steps):
        flow.run_step()
        found.append(weights_of(model))
    return found


@BOTH
@pytest.mark.parametrize("workers", [1, 2])
def test_weights_equal_those_of_one_process_at_every_step(two_workers: Client, transport: Any, workers: int) -> None:
    plan = BatchPlan.constant(3, 24)  # three workers of the plan on one or two real ones; 101 = 4 * 24 + 5
    expected = reference(12, plan, seed=3, micro_batch=5, rule="adascale", clip=0.5)
    model = make_model(3)
    optimizer = make_optimizer(model, rule="adascale", clip=0.5)
    with DaskEngine(
        model, Plain(), cross_entropy, plan, client=two_workers, optimizer=optimizer, samples=SAMPLES, seed=3,
        micro_batch=5,
        transport=transport, min_workers=workers, max_workers=workers, needs={"moments"}, parameters=optimizer.layers,
    ) as engine:  # fmt: skip
        flow = Flow(engine, optimizer, Ledger(samples=SAMPLES))
        for step, weights in enumerate(expected):
            assert flow.run_step() is not None
            engine.sync()
            torch.testing.assert_close(weights_of(model), weights, rtol=1e-9, atol=1e-12, msg=f"step {step}")


@BOTH
def test_a_saved_state_has_the_steps_of_the_replicas_and_replicas_begin_with_a_loaded_one(
    two_workers: Client, transport: Any
) -> None:
    """Saved in the middle of an epoch, without a validation before; loaded into another model and optimizer."""
    plan = BatchPlan.constant(3, 24)
    expected = reference(7, plan, seed=3, micro_batch=5, rule="adascale")

    def train(initial: int, state: dict[str, Any] | None, until: int) -> dict[str, Any]:
        model = make_model(initial)
        optimizer = make_optimizer(model, rule="adascale")
        with DaskEngine(
            model, Plain(), cross_entropy, plan, client=two_workers, optimizer=optimizer, samples=SAMPLES, seed=3,
            micro_batch=5, transport=transport, min_workers=2, needs={"moments"}, parameters=optimizer.layers,
        ) as engine:  # fmt: skip
            flow = Flow(engine, optimizer, Ledger(samples=SAMPLES))
            if state is not None:
                flow.load_state_dict(state)
            while flow.step < until:
                assert flow.run_step() is not None
            saved = copy.deepcopy(flow.state_dict())
        torch.testing.assert_close(weights_of(model), expected[until - 1], rtol=1e-9, atol=1e-12)
        return saved

    saved = train(3, None, 3)
    other = make_model(0)
    other.load_state_dict(saved["model"])
    torch.testing.assert_close(weights_of(other), expected[2], rtol=1e-9, atol=1e-12)
    train(0, saved, 7)


def test_the_clock_of_a_run_that_is_continued_goes_on(two_workers: Client) -> None:
    def two_steps(state: dict[str, Any] | None) -> tuple[list[StepRow], dict[str, Any]]:
        model = make_model(3)
        optimizer = make_optimizer(model)
        with DaskEngine(
            model, Plain(), cross_entropy, make_policy("follow(8)"), client=two_workers, optimizer=optimizer,
            samples=SAMPLES, seed=3, min_workers=2, parameters=optimizer.layers,
        ) as engine:  # fmt: skip
            flow = Flow(engine, optimizer, Ledger(samples=SAMPLES))
            if state is not None:
                flow.load_state_dict(state)
            rows = [flow.run_step() for _ in range(2)]
            return [row for row in rows if row is not None], flow.state_dict()

    before, state = two_steps(None)
    later, _ = two_steps(state)
    assert [row.step for row in (*before, *later)] == [0, 1, 2, 3]
    for row, after in (before, later):
        assert row.duration_s and row.time_s < row.time_s + row.duration_s <= after.time_s + 1e-5
    # The state has the clock of its latest step, which ends a moment later, when its row is made.
    assert before[-1].time_s < state["engine"]["clock_s"] <= later[0].time_s + 1e-5


@BOTH
def test_samples_of_absent_workers_are_dropped_as_in_one_process(two_workers: Client, transport: Any) -> None:
    # Two of three parts are there: a step covers 24 samples and trains on 16 of them. Of the last 5 of 101, on 3.
    policy = Drop(8, parts=3)
    expected_model, model = make_model(3), make_model(3)
    one = Flow(
        LoopEngine(expected_model, Plain(), cross_entropy, BatchPlan.constant(2, 24), samples=SAMPLES, seed=3),
        make_optimizer(expected_model),
        Ledger(samples=SAMPLES),
        drop=policy,
    )
    optimizer = make_optimizer(model)
    with DaskEngine(
        model, Plain(), cross_entropy, policy, client=two_workers, optimizer=optimizer, samples=SAMPLES, seed=3,
        transport=transport, min_workers=2, parameters=optimizer.layers,
    ) as engine:  # fmt: skip
        flow = Flow(engine, optimizer, Ledger(samples=SAMPLES), drop=policy)
        rows = [(one.run_step(), flow.run_step()) for _ in range(5)]
        engine.sync()
    for expected, row in rows:
        assert expected is not None
        assert row is not None
        assert (row.batch, row.stats["dropped"]) == (expected.batch, expected.stats["dropped"])
    assert [row.batch for _, row in rows if row is not None] == [16, 16, 16, 16, 3]
    torch.testing.assert_close(weights_of(model), weights_of(expected_model), rtol=1e-9, atol=1e-12)
    assert flow.ledger == Ledger(samples=SAMPLES, epoch=1)


@BOTH
def test_runs_that_share_workers_do_not_share_models(two_workers: Client, transport: Any) -> None:
    """Two runs at once, on workers of two threads each. A model or a generator that tasks of a worker share would give
    one run the gradient of the other's weights, or of its dropout."""
    plan = BatchPlan.constant(4, 32)
    models = {seed: make_model(seed) for seed in (1, 2)}

    def train(seed: int) -> None:
        model = models[seed]
        optimizer = make_optimizer(model)
        with DaskEngine(
            model, Plain(), cross_entropy, plan, client=two_workers, optimizer=optimizer, samples=SAMPLES, seed=seed,
            transport=transport, min_workers=2,
        ) as engine:  # fmt: skip
            flow = Flow(engine, optimizer, Ledger(samples=SAMPLES))
            for _ in range(15):
                flow.run_step()

    threads = [threading.Thread(target=train, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in (1, 2):
        torch.testing.assert_close(weights_of(models[seed]), reference(15, plan, seed=seed)[-1], rtol=1e-9, atol=1e-12)


class Cut:
    """A run that is followed step by step: which samples counted, and how many workers there were."""

    def __init__(self, flow: Flow, data: Witnessed) -> None:
        self.flow, self.data = flow, data
        self.used: Counter[tuple[int, int]] = Counter()
        self.lost = 0

    def step(self) -> int | None:
        row = self.flow.run_step()
        asked = [index for indices in self.data.news().values() for index in indices]
        if row is None:
            self.lost += 1
            return None
        self.used.update((row.epoch, index) for index in asked)
        return row.workers

    def until(self, workers: int, *, within_s: float = 150.0) -> None:
        end = time.monotonic() + within_s
        while self.step() != workers:
            assert time.monotonic() < end, f"never had {workers} workers"
            time.sleep(0.01)

    def finish_epoch(self) -> None:
        epoch = self.flow.ledger.epoch
        while self.flow.ledger.epoch == epoch:
            self.step()
        assert self.used == Counter({(e, i): 1 for e in range(epoch + 1) for i in range(SAMPLES)})


def run_epoch(flow: Flow) -> None:
    while flow.ledger.epoch < 1:
        flow.run_step()


def run_steps(flow: Flow, steps: int) -> None:
    for _ in range(steps):
        flow.run_step()


def pids(client: Client) -> dict[str, int]:
    return dict(client.run(os.getpid))


@BOTH
def test_every_sample_counts_once_while_the_cluster_scales_and_a_worker_is_killed(
    growing_cluster: Client, transport: Any, tmp_path: Path
) -> None:
    """1 -> 4 -> 2 workers, and kill -9: the number of workers follows the requested batch of 4 samples a worker."""
    client = growing_cluster
    model = make_model()
    optimizer = make_optimizer(model)
    data = Witnessed(*make_data(), tmp_path)
    events: list[str] = []
    with DaskEngine(
        model, data, cross_entropy, "follow(4)", client=client, optimizer=optimizer, samples=SAMPLES,
        transport=transport, max_workers=4, scale=True, on_event=lambda what, text: events.append(f"{what}: {text}"),
    ) as engine:  # fmt: skip
        run = Cut(Flow(engine, optimizer, Ledger(samples=SAMPLES)), data)
        assert run.step() == 1
        engine.request(100)
        run.until(4)
        victim = pids(client)[engine._workers[-1]]
        os.kill(victim, signal.SIGKILL)
        while run.step() is not None:  # the step that it was in, or the next
            pass
        assert run.step() == 3
        run.until(4)  # its nanny started another one
        engine.request(8)
        run.until(2)
        run.finish_epoch()
        if transport == "allreduce":
            states = engine.cluster.call({a: ("state", {"apply": engine.transport._apply}) for a in engine._workers})
            contents = [torch.load(io.BytesIO(state)) for state in states.values()]
            assert len(contents) == 2
            for name in contents[0]["model"]:
                assert torch.equal(contents[0]["model"][name], contents[1]["model"][name]), name
    assert run.lost == 1
    scaled = [event for event in events if event.startswith("scale")]  # a busy machine also waits for workers
    assert scaled[:3] == ["scale: to 1 workers", "scale: to 4 workers", "scale: to 2 workers"]


@BOTH
def test_a_run_survives_the_loss_of_all_its_workers(transport: Any) -> None:
    """The only member is killed, before and after a sync: another worker gets what was lost.

    Of three workers two are killed, since a LocalCluster does not always start a killed one again.
    """
    plan = BatchPlan.constant(2, 16)
    model = make_model(5)
    optimizer = make_optimizer(model)
    with local_client(3) as client, DaskEngine(
        model, Plain(), cross_entropy, plan, client=client, optimizer=optimizer, samples=SAMPLES, seed=5,
        transport=transport, max_workers=1,
    ) as engine:  # fmt: skip
        flow = Flow(engine, optimizer, Ledger(samples=SAMPLES))
        for steps, synced in ((3, False), (9, True)):
            while flow.step < steps:
                flow.run_step()
            if synced:
                engine.sync()  # from here on less is repeated
                flow.run_step()
            os.kill(pids(client)[engine._workers[0]], signal.SIGKILL)
            assert flow.run_step() is None
        while flow.step < 14:
            flow.run_step()
    torch.testing.assert_close(weights_of(model), reference(14, plan, seed=5)[-1], rtol=1e-9, atol=1e-12)


def test_workers_are_never_taken_for_lost_because_the_client_refreshed_its_cache(two_workers: Client) -> None:
    """A timer of the Client stores a list of no workers every few seconds; here it does nothing else."""
    over = threading.Event()

    async def refresh() -> None:
        while not over.is_set():
            await two_workers._update_scheduler_info()

    model = make_model()
    with DaskEngine(
        model, Plain(), cross_entropy, "follow(4)", client=two_workers, optimizer=make_optimizer(model),
        samples=SAMPLES, min_workers=2,
    ) as engine:  # fmt: skip
        engine.participants(0)
        first = {address: engine.cluster.arrival(address) for address in engine.cluster.look(now=True)}
        assert len(first) == 2
        refreshing = asyncio.run_coroutine_threadsafe(refresh(), two_workers.loop.asyncio_loop)
        try:
            for _ in range(200):
                there = engine.cluster.look(now=True)
                assert {address: engine.cluster.arrival(address) for address in there} == first
        finally:
            over.set()
            refreshing.result(10)


def test_a_cluster_whose_scheduler_is_killed_is_reported_as_gone(tmp_path: Path) -> None:
    """Once the Client has given up to reach it again."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment, "cwd": tmp_path}
    common = [sys.executable, "-m"]
    address = tmp_path / "scheduler.json"
    processes = [
        subprocess.Popen([*common, "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0",
                          "--no-dashboard", "--scheduler-file", str(address)], **quiet),
    ]  # fmt: skip
    try:
        until = time.monotonic() + 120
        # The file is there before its content is complete.
        while not (address.exists() and address.read_text().rstrip().endswith("}")) and time.monotonic() < until:
            time.sleep(0.05)
        where = json.loads(address.read_text())["address"]
        worker = ["distributed.cli.dask_worker", where, "--no-nanny", "--nthreads", "1", "--no-dashboard",
                  "--host", "127.0.0.1"]  # fmt: skip
        processes += [subprocess.Popen([*common, *worker], **quiet) for _ in range(2)]
        model = make_model()
        optimizer = make_optimizer(model)
        with connect(where, timeout_s=5) as client:
            engine = DaskEngine(
                model, Plain(), cross_entropy, "follow(4)", client=client, optimizer=optimizer, samples=SAMPLES,
                min_workers=2,
            )  # fmt: skip
            flow = Flow(engine, optimizer, Ledger(samples=SAMPLES))
            assert flow.run_step() is not None
            processes[0].kill()
            with pytest.raises(ConfigError, match="scheduler no longer answers"):
                run_steps(flow, 1000)
            engine.close()
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_workers_without_a_nanny_at_an_address(tmp_path: Path) -> None:
    """A worker that is killed stays away; the scheduler is known by its address only, messages go through it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with LocalCluster(
        n_workers=0, dashboard_address="127.0.0.1:0", host="127.0.0.1", scheduler_kwargs={"dashboard": False}
    ) as cluster:
        command = [sys.executable, "-m", "distributed.cli.dask_worker", cluster.scheduler_address, "--no-nanny",
                   "--nthreads", "1", "--no-dashboard", "--host", "127.0.0.1"]  # fmt: skip
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        workers = [subprocess.Popen(command, env=environment, cwd=tmp_path, **quiet) for _ in range(2)]
        try:
            with connect(cluster.scheduler_address) as client:
                model = make_model()
                optimizer = make_optimizer(model)
                with pytest.raises(ConfigError, match="knows an address only"):
                    DaskEngine(model, Plain(), cross_entropy, "follow(4)", client=client, optimizer=optimizer,
                               samples=SAMPLES, scale=True)  # fmt: skip
                data = Witnessed(*make_data(), tmp_path)
                with DaskEngine(
                    model, data, cross_entropy, "follow(4)", client=client, optimizer=optimizer, samples=SAMPLES,
                    min_workers=2, direct=False,
                ) as engine:  # fmt: skip
                    run = Cut(Flow(engine, optimizer, Ledger(samples=SAMPLES)), data)
                    assert run.step() == 2
                    workers[0].kill()
                    engine.min_workers = 1
                    assert run.step() is None
                    run.until(1)
                    run.finish_epoch()
                    assert run.lost == 1
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()


def test_the_batch_and_the_cluster_grow_together(growing_cluster: Client) -> None:
    model = make_model()
    optimizer = make_optimizer(model, rule="constant")
    policy = Geo(Span(1, "ep"), 2.0, initial=8, max_batch=16, local_batch=8)
    growth = Growth(policy, ref_batch=8, epoch_samples=SAMPLES)
    with DaskEngine(
        model, Plain(), cross_entropy, policy, client=growing_cluster, optimizer=optimizer, samples=SAMPLES,
        max_workers=4, scale=True,
    ) as engine:  # fmt: skip
        flow = Flow(engine, optimizer, Ledger(samples=SAMPLES), growth=growth)
        rows = []
        while flow.ledger.epoch < 3:
            rows.append(flow.run_step())
            while flow.ledger.epoch == 2 and len(engine.cluster.look(now=True)) < 2:
                time.sleep(0.1)  # an epoch of seven steps is shorter than the start of a worker
    last = [row for row in rows if row is not None and row.epoch == 2]
    assert {row.workers for row in last} == {2}
    assert [row.batch for row in last] == [16] * 6 + [5]
    # 32 were requested, and max_batch is 16: the rate pays, as it does in the last step, which the epoch's end has cut.
    assert {row.lr for row in last} == {0.05}


def test_the_driver_measures_how_long_steps_take(two_workers: Client) -> None:
    model = make_model()
    optimizer = make_optimizer(model, rule="linear")
    policy = make_policy("goodput(initial=8, local_batch=8, dwell=2, wait=2)")
    assert isinstance(policy, GrowingPolicy)
    growth = Growth(policy, ref_batch=8, epoch_samples=SAMPLES)
    with DaskEngine(
        model, Plain(), cross_entropy, policy, client=two_workers, optimizer=optimizer, samples=SAMPLES, micro_batch=4,
        needs=policy.needs, transport="centralized",
    ) as engine:  # fmt: skip
        flow = Flow(engine, optimizer, Ledger(samples=SAMPLES), growth=growth)
        while flow.ledger.epoch < 2:
            flow.run_step()
    kinds = json.loads(growth.state_dict()["state"])["kinds"]
    assert kinds and all(seconds > 0 and samples in (8, 16) for _, samples, seconds, _ in kinds)


def test_a_run_of_replicas_keeps_no_average_here(two_workers: Client) -> None:
    from ebbflow.optim.ema import WeightAverage

    model = make_model()
    optimizer = make_optimizer(model)
    with (
        DaskEngine(
            model, Plain(), cross_entropy, "follow(4)", client=two_workers, optimizer=optimizer, samples=SAMPLES
        ) as engine,
        pytest.raises(ConfigError, match="centralized"),
    ):
        Flow(engine, optimizer, Ledger(samples=SAMPLES), average=WeightAverage(model, 0.9))


# -- what cannot be used -------------------------------------------------------------------------------------------


class Failing(Plain):
    def __call__(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        if 7 in indices:
            raise KeyError("sample 7 is broken")
        return super().__call__(indices)


@BOTH
def test_what_the_data_raise_on_a_worker_is_raised_here(two_workers: Client, transport: Any) -> None:
    with engine_with(two_workers, data=Failing(), plan="follow(8)", transport=transport, min_workers=2) as engine:
        flow = Flow(engine, make_optimizer(engine.model), Ledger(samples=SAMPLES))
        with pytest.raises(KeyError, match="sample 7 is broken") as caught:
            run_epoch(flow)
    assert any("on the Dask worker tcp://127.0.0.1" in note for note in caught.value.__notes__)


def engine_with(client: Client, **changes: Any) -> DaskEngine:
    model = changes.pop("model", None) or make_model()
    given = {"data": Plain(), "samples": SAMPLES, "optimizer": make_optimizer(model), "plan": "follow(4)", **changes}
    return DaskEngine(model, given.pop("data"), cross_entropy, given.pop("plan"), client=client, **given)


def _listening() -> list[str]:
    """The addresses on which this process waits for connections."""
    found = psutil.Process().net_connections("tcp")
    return [one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN]


def test_workers_listen_only_on_the_address_that_they_were_told(two_workers: Client) -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    before = {worker: len(addresses) for worker, addresses in two_workers.run(_listening).items()}
    with engine_with(two_workers, model=model, optimizer=optimizer, min_workers=2) as engine:
        flow = Flow(engine, optimizer, Ledger(samples=SAMPLES))
        assert flow.run_step() is not None
        found = two_workers.run(_listening)
    assert sum(map(len, found.values())) > sum(before.values()), "the store, at least"
    assert {address for addresses in found.values() for address in addresses} == {"127.0.0.1"}


@pytest.mark.parametrize("transport", ["allreduce", "centralized"])
def test_modules_that_were_in_eval_mode_stay_in_it_here_and_on_the_workers(two_workers: Client, transport: str) -> None:
    model = make_model()
    model[3].eval()
    before, optimizer = copy.deepcopy(model[3]), make_optimizer(model)
    with engine_with(two_workers, model=model, optimizer=optimizer, transport=transport, min_workers=2) as engine:
        flow = Flow(engine, optimizer, Ledger(samples=SAMPLES))
        for _ in range(2):
            assert flow.run_step() is not None
            model.eval()  # as an evaluation may leave it
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(getattr(model[3], name), getattr(before, name))
    assert not torch.equal(model[3].weight, before.weight)


def test_a_model_that_cannot_be_pickled_is_refused_with_advice(two_workers: Client) -> None:
    model = make_model()
    model.lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"cannot be pickled .*keep open files, locks"):
        engine_with(two_workers, model=model)


def test_data_that_cannot_be_pickled_are_refused(two_workers: Client, tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as file:
        data = Plain()
        data.file = file  # type: ignore[attr-defined]
        with pytest.raises(DataError, match="the data set cannot be pickled"):
            engine_with(two_workers, data=data)


def test_data_larger_than_a_worker_are_refused_with_the_numbers() -> None:
    data = Plain()
    data.ballast = b"x" * 80 * 2**20  # type: ignore[attr-defined]
    with (
        local_client(1, memory_limit="200MiB") as client,
        engine_with(client, data=data, transport="centralized") as engine,
        pytest.raises(ConfigError, match=r"has 200 MiB of memory, the data set 80 MiB.*give workers 267 MiB"),
    ):
        engine.participants(0)


class UnpackedAtSecondTry(Plain):
    """Data that fail to be unpacked as often as their file says."""

    def __init__(self, failures: Path) -> None:
        super().__init__()
        self.failures = failures

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        left = int(self.failures.read_text())
        self.failures.write_text(str(left - 1))
        if left > 0:
            raise SystemError(f"a start that failed, {left} left")


@pytest.mark.parametrize("failures", [1, 2])
def test_a_start_that_fails_is_tried_a_second_time(failures: int, tmp_path: Path) -> None:
    (tmp_path / "failures").write_text("0")
    data = UnpackedAtSecondTry(tmp_path / "failures")
    (tmp_path / "failures").write_text(str(failures))
    with local_client(1) as client, engine_with(client, data=data, transport="centralized") as engine:
        if failures == 1:
            assert engine.participants(0).workers == 1
        else:
            with pytest.raises(ConfigError, match=r"could not make the model(.|\n)*a start that failed, 1 left"):
                engine.participants(0)


def test_a_wait_for_workers_that_is_interrupted_is_not_begun_again_to_save_the_state(
    two_workers: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends the run at once; if enough workers are there later, lost steps are computed again as always."""
    with engine_with(two_workers, min_workers=2, wait_s=60, transport="allreduce") as engine:
        looked: list[str] = []

        def interrupted() -> list[str]:
            looked.append("looked")
            if len(looked) > 1:
                raise KeyboardInterrupt
            return []

        with monkeypatch.context() as patched:
            patched.setattr(engine.cluster, "look", interrupted)
            patched.setattr(engine.transport, "sync", lambda: False)
            with pytest.raises(KeyboardInterrupt):
                engine.participants(0)
            with pytest.raises(ConfigError, match="no worker is left that has the state of the latest steps"):
                engine.sync()
        assert looked == ["looked", "looked"]
        engine.participants(0)
        answers = iter([False, True])
        regrouped: list[object] = []
        with monkeypatch.context() as patched:
            patched.setattr(engine.transport, "sync", lambda: next(answers))
            patched.setattr(engine.transport, "regroup", regrouped.append)
            engine.sync()
        assert len(regrouped) == 1


def test_workers_that_never_come_are_waited_for_and_then_given_up(two_workers: Client) -> None:
    with (
        engine_with(two_workers, min_workers=3, wait_s=0.5) as engine,
        pytest.raises(ConfigError, match=r"2 of at least 3 workers came within 500 ms; start more"),
    ):
        engine.participants(0)


@pytest.mark.parametrize("found", ["no package", "another version"])
def test_a_worker_that_lacks_the_package_is_refused(
    two_workers: Client, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(name: str) -> None:
        sys.modules.pop("ebbflow.engines.dask.dask_worker", None)
        sys.modules[name] = None  # type: ignore[assignment]

    def mend(name: str) -> None:
        del sys.modules[name]

    if found == "another version":
        monkeypatch.setattr("ebbflow.engines.dask.cluster.__version__", "99.0")
        expected = r"has ebbflow .*, this process 99\.0; install the same version"
    else:
        two_workers.run(spoil, "ebbflow.engines.dask.dask_worker")
        expected = r"cannot import ebbflow .*pip install 'ebbflow\[dask\]=="
    try:
        with engine_with(two_workers) as engine, pytest.raises(ConfigError, match=expected):
            engine.participants(0)
    finally:
        if found == "no package":
            two_workers.run(mend, "ebbflow.engines.dask.dask_worker")


def test_no_cluster_at_an_address() -> None:
    with pytest.raises(ConfigError, match=r"no Dask cluster answers at tcp://127\.0\.0\.1:9 within 300 ms"):
        connect("tcp://127.0.0.1:9", timeout_s=0.3)


def test_settings_that_make_no_sense_are_refused(two_workers: Client) -> None:
    with pytest.raises(ConfigError, match="did you mean 'centralized'"):
        engine_with(two_workers, transport="centralised")
    with pytest.raises(ConfigError, match="give optimizer=, or transport='centralized'"):
        engine_with(two_workers, optimizer=None)
    with pytest.raises(ConfigError, match="min_workers=3, max_workers=2"):
        engine_with(two_workers, min_workers=3, max_workers=2)


def test_a_growing_policy_without_a_limit_per_worker_is_shared_by_all_of_them(two_workers: Client) -> None:
    with engine_with(two_workers, plan="geo(1ep)", transport="centralized", min_workers=2) as engine:
        engine.request(40)
        size = engine.participants(0)
        assert (size.workers, size.samples) == (2, 40)


@pytest.mark.parametrize("value", [1.0, math.inf])
def test_a_replica_that_skips_a_step_leaves_batch_norm_alone(value: float) -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3))
    optimizer = ElasticOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), base_batch=4, on_nonfinite="skip")
    blueprint = ReplicaBlueprint(
        model=model, loss=cross_entropy, optimizer=optimizer, samples=8, seed=0, trained_numbers=(0, 1, 2, 3),
        needs=frozenset({"moments"}), precision="fp32", device="cpu",
    )  # fmt: skip
    inputs = torch.arange(16.0).view(8, 2) * value
    alone = SimpleNamespace(all_reduce=lambda buffer: None)
    replica = DaskReplica(blueprint, lambda i: (inputs[i], torch.zeros(len(i), dtype=torch.int64)))
    replica.group = alone  # type: ignore[assignment]
    micro_batches = (MicroBatch(0, 0, 2), MicroBatch(0, 2, 4))
    replica.step(None, WorkerTask(attempt=0, epoch=0, batch=4, micro_batches=micro_batches))
    context = StepContext(step=0, batch=4, ref_batch=4, samples=0)
    replica.apply(ApplyStep(attempt=0, context=context, groups=({},), momenta=(0.1,)))
    assert model[0].num_batches_tracked == (1 if value == 1.0 else 0)
    assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())


def test_a_batch_without_targets_is_all_inputs() -> None:
    """The mean of x w^2 over x = 0, 1, 2, 3 is 1.5 w^2, with the slope 3 w."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 3.0)
    seen = []

    def loss(model: nn.Module, inputs: torch.Tensor, targets: object) -> torch.Tensor:
        seen.append(targets)
        return (model(inputs.sqrt()) ** 2).mean()

    blueprint = ReplicaBlueprint(
        model=model, loss=loss, optimizer=None, samples=4, seed=0, trained_numbers=(0,), needs=frozenset(),
        precision="fp32", device="cpu",
    )  # fmt: skip
    replica = DaskReplica(blueprint, lambda i: torch.from_numpy(i).float().view(-1, 1))
    micro_batches = (MicroBatch(0, 0, 2), MicroBatch(0, 2, 4))
    replica.gradients(FlatState(model).read(), WorkerTask(attempt=0, epoch=0, batch=4, micro_batches=micro_batches))
    assert seen == [None, None]
    assert model.weight.grad.item() == pytest.approx(9.0)
