"""The Dask engine when something goes wrong at a given moment: messages that are lost, workers that are busy, errors.

Most of it on workers that are threads of this process: nothing is killed, so a fault strikes exactly where it is meant
to; `test_dask_engine.py` kills real ones.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed import Client, LocalCluster

from contract.suite import weights_of
from ebbflow.data.ledger import Ledger
from ebbflow.engines.dask import DaskEngine, cluster, dask_worker, transport
from ebbflow.engines.dask.dask_worker import WorkerFailure
from ebbflow.engines.emulated import LoopEngine
from ebbflow.errors import ConfigError
from ebbflow.plan.batch_plan import BatchPlan
from ebbflow.run.flow import Flow
from ebbflow.workloads import cross_entropy
from engines.dask_helpers import local_client
from engines.test_dask_engine import BOTH, SAMPLES, Plain, engine_with, make_model, make_optimizer, reference

pytestmark = pytest.mark.process

PLAN = BatchPlan.constant(2, 16)


@contextmanager
def threads(workers: int) -> Iterator[Client]:
    """Workers in this process."""
    with (
        LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=False,
            dashboard_address="127.0.0.1:0",
            scheduler_kwargs={"dashboard": False},
            silence_logs=50,
        ) as made,
        Client(made) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def two() -> Iterator[Client]:
    with threads(2) as client:
        yield client


def run_of(client: Client, *, seed: int = 5, rule: str = "linear", optimizer: Any = None, **settings: Any) -> Any:
    """A flow on a new engine."""
    model = make_model(seed)
    chosen = make_optimizer(model, rule=rule, **(optimizer or {}))
    given = {"data": Plain(), "min_workers": 2, "needs": chosen.rule.needs, "parameters": chosen.layers, **settings}
    engine = DaskEngine(
        model, given.pop("data"), cross_entropy, PLAN, client=client, optimizer=chosen, samples=SAMPLES, seed=seed,
        **given,
    )  # fmt: skip
    return Flow(engine, chosen, Ledger(samples=SAMPLES))


def answers_of(flow: Flow, change: Callable[[str, Mapping[str, Any]], dict[str, Any] | None]) -> None:
    """Whenever messages are sent, `change(what, send)` may answer for the workers; None: it does not."""
    engine: Any = flow.engine
    original = engine.cluster.call

    def call(messages: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        (what,) = {message[0] for message in messages.values()}
        found = change(what, messages)
        return original(messages, **options) if found is None else found

    engine.cluster.call = call


def gone(addresses: Any) -> dict[str, Any]:
    return {address: WorkerFailure(text="a fault was asked for", gone=True) for address in addresses}


# -- who is lost when ----------------------------------------------------------------------------------------------


@BOTH
def test_workers_that_share_a_process_do_not_share_a_replica(two: Client, transport: Any) -> None:
    flow = run_of(two, transport=transport)
    with flow.engine:
        for _ in range(5):
            assert flow.run_step() is not None
    torch.testing.assert_close(weights_of(flow.engine.model), reference(5, PLAN, seed=5)[-1], rtol=1e-9, atol=1e-12)


def test_one_that_dies_while_the_steps_of_a_lost_fleet_are_repeated(
    two: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are left have repeated some steps and must not go on from there."""
    monkeypatch.setattr(cluster, "_RETRY_AFTER_S", 0.0)
    flow = run_of(two)
    steps = 0

    def change(what: str, messages: Mapping[str, Any]) -> dict[str, Any] | None:
        nonlocal steps
        steps += what == "step" and flow.step == 6
        if what == "step" and steps == 1:  # all at once
            return gone(messages)
        if what == "step" and steps == 4:  # the third of the six steps that are repeated
            first, *rest = messages
            sent = flow.engine.cluster.client.sync(flow.engine.cluster._call, messages, 60.0)
            return {**sent, **gone(rest), first: sent[first]}
        return None

    answers_of(flow, change)
    with flow.engine:
        while flow.step < 10:
            flow.run_step()
    assert steps > 4
    torch.testing.assert_close(weights_of(flow.engine.model), reference(10, PLAN, seed=5)[-1], rtol=1e-9, atol=1e-12)


def test_repeated_steps_are_measured_where_they_were(two: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights, bit for bit, with and without the loss of all workers at step 90."""
    # 128 reference steps are 1,024 samples, or 64 steps of 16: from then on one step in two is measured.
    monkeypatch.setattr(cluster, "_RETRY_AFTER_S", 0.0)
    found = []
    for losses in (0, 1):
        flow = run_of(two, rule="adascale", optimizer={"memory_steps": 128}, micro_batch=4)
        struck = []

        def change(what: str, messages: Mapping[str, Any]) -> dict[str, Any] | None:
            if what == "step" and flow.step == 90 and len(struck) < losses:  # noqa: B023, called in this round only
                struck.append(what)  # noqa: B023
                return gone(messages)
            return None

        answers_of(flow, change)
        with flow.engine:
            while flow.step < 94:
                flow.run_step()
        assert len(struck) == losses
        found.append(weights_of(flow.engine.model))
    assert torch.equal(*found)


def test_who_dies_before_it_is_connected_is_not_waited_for_as_long_as_a_slow_sum(
    two: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for its address, and no connection breaks; a sum may take ten minutes."""
    monkeypatch.setattr(transport, "_CONNECT_S", 1.0)
    flow = run_of(two)
    joins = 0

    def change(what: str, messages: Mapping[str, Any]) -> dict[str, Any] | None:
        nonlocal joins
        joins += what == "join"
        if what == "join" and joins == 1:
            first, last = messages
            sent = flow.engine.cluster.client.sync(flow.engine.cluster._call, {first: messages[first]}, 60.0)
            return {**sent, last: WorkerFailure(text="a fault was asked for", partner=True)}
        return None

    answers_of(flow, change)
    with flow.engine:
        assert flow.run_step() is None
        assert flow.run_step() is not None
    assert joins == 2


def test_busy_workers_do_not_keep_free_ones_from_training(tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    def busy(path: str) -> None:
        while not Path(path).exists():
            time.sleep(0.01)

    with threads(6) as client:
        addresses = list(client.scheduler_info(n_workers=-1)["workers"])
        tasks = [client.submit(busy, str(gate), workers=[a], pure=False) for a in addresses[:5]]
        try:
            with engine_with(client, wait_s=60) as engine:
                engine.participants(0)
                assert engine._workers == addresses[5:]
        finally:
            gate.touch()
            client.gather(tasks)


def test_a_replica_that_was_just_made_does_not_outlive_the_engine(two: Client) -> None:
    with engine_with(two) as engine:
        assert engine.cluster.look(now=True) == []
        for start in engine.cluster._starting.values():
            assert start.result(60) is None
        assert len(dask_worker._RUNS) == 2
    assert dask_worker._RUNS == {}


# -- errors --------------------------------------------------------------------------------------------------------


class Demanding(Exception):
    """Cannot be read back: it keeps one argument and asks for two."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}, {why}")


class Locked(Exception):
    """Cannot be pickled."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}, {why}")
        self.lock = threading.Lock()


class Raising(Plain):
    def __init__(self, kind: type[Exception]) -> None:
        super().__init__()
        self.kind = kind

    def __call__(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        raise self.kind("no sample", "the disk is away")


def test_an_error_that_cannot_travel_is_told_by_its_name_and_text() -> None:
    with local_client(1) as client:
        for kind in (Demanding, Locked):
            with engine_with(client, data=Raising(kind), transport="centralized") as engine:
                flow = Flow(engine, make_optimizer(engine.model), Ledger(samples=SAMPLES))
                with pytest.raises(RuntimeError, match=f"^{kind.__name__}: no sample, the disk is away") as caught:
                    flow.run_step()
            assert any("on the Dask worker tcp://127.0.0.1" in note for note in caught.value.__notes__)


class FailsOnce(Plain):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.mark = folder / "failed"

    def __call__(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        if 7 in indices and not self.mark.exists():
            self.mark.touch()
            raise KeyError("sample 7 is away for a moment")
        return super().__call__(indices)


@BOTH
def test_a_run_goes_on_after_an_error_of_one_worker_that_the_user_caught(
    two: Client, transport: Any, tmp_path: Path
) -> None:
    flow = run_of(two, transport=transport, data=FailsOnce(tmp_path))
    errors = 0
    with flow.engine:
        while flow.step < 8:
            try:
                flow.run_step()
            except KeyError:
                errors += 1
    assert errors == 1
    torch.testing.assert_close(weights_of(flow.engine.model), reference(8, PLAN, seed=5)[-1], rtol=1e-9, atol=1e-12)


@BOTH
def test_a_client_that_is_closed_before_the_engine_is_named(two: Client, transport: Any) -> None:
    client = Client(two.scheduler.address)
    flow = run_of(client, transport=transport)
    flow.run_step()
    client.close()
    with pytest.raises(ConfigError, match="Client"):
        flow.run_step()
    flow.engine.close()


# -- the gradient is elsewhere -------------------------------------------------------------------------------------


def test_the_norm_of_a_gradient_elsewhere_is_that_of_the_gradient(two: Client) -> None:
    """A rule that measures nothing, clipped: the driver decides and records what the replicas do."""
    model = make_model(5)
    optimizer = make_optimizer(model, clip=0.5)
    here = Flow(
        LoopEngine(model, Plain(), cross_entropy, PLAN, samples=SAMPLES, seed=5), optimizer, Ledger(samples=SAMPLES)
    )
    flow = run_of(two, optimizer={"clip": 0.5})
    with flow.engine:
        for _ in range(8):
            expected, found = here.run_step(), flow.run_step()
            assert found.stats == pytest.approx(expected.stats, rel=1e-9)
            assert found.stats["gradient_norm"] > 0
    torch.testing.assert_close(weights_of(flow.engine.model), weights_of(model), rtol=1e-9, atol=1e-12)


class Broken(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.data[0][7] = torch.nan


def test_a_step_that_replicas_skip_is_skipped_here_and_leaves_their_buffers_alone(two: Client) -> None:
    flow = run_of(two, optimizer={"on_nonfinite": "skip"}, data=Broken())
    skipped = []
    with flow.engine:
        while flow.ledger.epoch < 1:
            skipped.append("skipped" in flow.run_step().stats)
    assert sum(skipped) == 1
    assert torch.isfinite(weights_of(flow.engine.model)).all()
