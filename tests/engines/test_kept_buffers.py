"""Buffers that forward passes change, apart from batch norm's: a step that does not count leaves them alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ebbflow
from ebbflow.data.ledger import Ledger, MicroBatch
from ebbflow.engines import kept_buffers
from ebbflow.engines.base import Faults
from ebbflow.engines.dask.dask_worker import ApplyStep, DaskReplica, FlatState, ReplicaBlueprint, WorkerTask
from ebbflow.engines.emulated import FusedEngine, LoopEngine, Ranks
from ebbflow.engines.kept_buffers import KeptBuffers
from ebbflow.engines.replica_step import ReplicaStep
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.plan.batch_plan import BatchPlan
from ebbflow.rules.rule import StepContext
from ebbflow.run.loop import Callbacks
from ebbflow.workloads import cross_entropy

SAMPLES = 48
BUFFERS = ("average", "passes", "replaced", "queue", "made_later")


class Remembers(nn.Module):
    """Changes its buffers in the ways in which modules do it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(5))
        self.register_buffer("passes", torch.tensor(0), persistent=False)
        self.register_buffer("replaced", torch.zeros(5))
        self.register_buffer("queue", torch.zeros(5))
        self.register_buffer("made_later", None)
        self.register_buffer("constant", torch.arange(1).expand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            mean = x.detach().mean(0)
            self.average.lerp_(mean, 0.1)
            self.passes += 1
            self.replaced = 0.9 * self.replaced + mean
            self.queue.data.add_(mean)  # which the version of the tensor does not show
            self.made_later = mean
        return x


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Remembers(), nn.BatchNorm1d(5), nn.utils.spectral_norm(nn.Linear(5, 3)))


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, 5, generator=generator), torch.randint(3, (SAMPLES,), generator=generator)


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """All buffers, those that are None or no part of `state_dict` included."""
    found = {
        f"{name}.{key}": copy.deepcopy(buffer)
        for name, module in model.named_modules()
        for key, buffer in module._buffers.items()
    }
    assert {f"0.{name}" for name in BUFFERS} < found.keys()
    return found


def assert_same(one: dict[str, torch.Tensor | None], other: dict[str, torch.Tensor | None]) -> None:
    for name, buffer in one.items():
        torch.testing.assert_close(other[name], buffer, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


Engines = pytest.mark.parametrize("kind", [LoopEngine, FusedEngine])


def engine_on(
    kind: type[LoopEngine] | type[FusedEngine], model: nn.Module, **settings: Any
) -> LoopEngine | FusedEngine:
    x, y = make_data()
    settings = {"loss": cross_entropy, "samples": SAMPLES, "fetch": lambda i: (x[i], y[i]), **settings}
    return kind(model, plan=BatchPlan.constant(3, 12), **settings)


def steps(engine: LoopEngine | FusedEngine, ledger: Ledger | None = None, *, attempts: int = 1) -> Ledger:
    ledger = ledger or Ledger(samples=SAMPLES)
    for _ in range(attempts):
        size = engine.participants(ledger.position // 12)
        assignment = ledger.assign(size.samples)
        engine.gradients(assignment, size)
        ledger = ledger.commit(assignment) if engine.commit() else ledger
    return ledger


@Engines
def test_a_lost_step_leaves_all_buffers_as_they_were(kind: type[LoopEngine] | type[FusedEngine]) -> None:
    model = make_model()
    engine = engine_on(kind, model, faults=Faults().lose(worker=0, step=1))
    ledger = steps(engine)
    before = buffers_of(model)
    assert steps(engine, ledger).total == ledger.total
    assert_same(before, buffers_of(model))
    undisturbed = make_model()
    engine.faults = None
    steps(engine, ledger)
    # The plan has three workers, so that the lost step is the same one when it is computed again.
    steps(engine_on(kind, undisturbed), attempts=2)
    assert_same(buffers_of(undisturbed), buffers_of(model))


@Engines
def test_a_step_that_an_exception_ends_leaves_all_buffers_as_they_were(
    kind: type[LoopEngine] | type[FusedEngine],
) -> None:
    model = make_model()

    def loss(*arguments: Any) -> torch.Tensor:
        cross_entropy(*arguments)
        raise RuntimeError("boom")

    session = ebbflow.Session(
        model, torch.optim.SGD(model.parameters(), lr=0.1), torch.utils.data.TensorDataset(*make_data()), loss=loss,
        engine="loop" if kind is LoopEngine else "fused", epochs=1, local_batch=4, base_batch=12,
        trace="0s:2 100s", rule="constant",
    )  # fmt: skip
    with session:
        before = buffers_of(model)
        with pytest.raises(RuntimeError, match="boom"):
            session.run()
        assert_same(before, buffers_of(model))


def own_loop(interrupted: str) -> nn.Module:
    """Train one epoch in a loop of one's own, in which the third step is left once."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = ebbflow.Session(
        model, optimizer, torch.utils.data.TensorDataset(*make_data()), epochs=1, local_batch=4, trace="0s:3 100s",
        rule="constant", base_batch=12,
    )  # fmt: skip

    def until(last: int | None) -> None:
        for step in session:
            for x, y in step:
                step.backward(cross_entropy(model, x, y))
                if step.number == last and interrupted == "break":
                    return
                if step.number == last:
                    raise KeyError(interrupted)

    with session:
        if interrupted == "left open":
            opened = session.next_step()
            assert opened is not None
            for x, y in opened:
                opened.backward(cross_entropy(model, x, y))
        elif interrupted:
            with suppress(KeyError):
                until(2)
        until(None)
    return model


@pytest.mark.parametrize("how", ["break", "raise", "left open"])
def test_a_session_whose_loop_is_left_in_a_step_goes_on_as_if_it_had_not_begun_it(how: str) -> None:
    one, other = own_loop(""), own_loop(how)
    assert_same(buffers_of(one), buffers_of(other))
    for mine, its in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, its)


@Engines
def test_a_skipped_step_leaves_all_buffers_as_they_were(kind: type[LoopEngine] | type[FusedEngine]) -> None:
    model = make_model()
    seen: list[dict[str, torch.Tensor | None]] = []

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model, x, y) * (torch.nan if len(seen) == 2 else 1.0)

    session = ebbflow.Session(
        model, torch.optim.SGD(model.parameters(), lr=0.1), torch.utils.data.TensorDataset(*make_data()), loss=loss,
        engine="loop" if kind is LoopEngine else "fused", epochs=1, local_batch=4, base_batch=12,
        trace="0s:3 100s", rule="constant", on_nonfinite="skip",
        callbacks=Callbacks(on_step=lambda row: seen.append(buffers_of(model))),
    )  # fmt: skip
    with session:
        session.run()
    assert_same(seen[1], seen[2])
    assert seen[3]["0.passes"] != seen[2]["0.passes"]


def test_a_fused_pass_that_is_repeated_counts_once() -> None:
    """The memory does not suffice for 12 samples at a time; the next attempt has three passes of 4."""
    model, memory = make_model(), 8

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = cross_entropy(model, x, y)
        if len(x) > memory:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found

    engine = engine_on(FusedEngine, model, loss=loss)
    steps(engine)
    assert model[0].passes == 3


def test_a_step_that_is_paused_and_resumed_counts_all_its_micro_batches() -> None:
    model, whole = make_model(), make_model()
    x, y = make_data()

    def step_of(model: nn.Module) -> ReplicaStep:
        return ReplicaStep(model, lambda i: (x[i], y[i]), cross_entropy, samples=SAMPLES, seed=0)

    parts = [MicroBatch(worker, 4 * worker, 4 * worker + 4) for worker in range(3)]
    step, reference = step_of(model), step_of(whole)
    step.begin()
    before = buffers_of(model)
    for part in parts:  # each in an attempt of its own, of which the first two fail
        step.compute([part], epoch=0, batch=12, whole=12)
        if part is not parts[-1]:
            step.pause()
            assert_same(before, buffers_of(model))
            step.resume()
    step.commit()
    reference.begin()
    reference.compute(parts, epoch=0, batch=12, whole=12)
    reference.commit()
    assert_same(buffers_of(whole), buffers_of(model))
    assert model[0].passes == 3


def replica(model: nn.Module, optimizer: Any = None) -> DaskReplica:
    x, y = make_data()
    blueprint = ReplicaBlueprint(
        model=model, loss=cross_entropy, optimizer=optimizer, samples=SAMPLES, seed=0,
        trained_numbers=tuple(range(len(list(model.parameters())))), needs=frozenset(), precision="fp32", device="cpu",
    )  # fmt: skip
    return DaskReplica(blueprint, lambda i: (x[i], y[i]))


@pytest.mark.parametrize("counts", [True, False])
def test_a_replica_on_a_dask_worker_keeps_what_a_committed_step_left_and_nothing_else(counts: bool) -> None:
    model = make_model()
    optimizer = ElasticOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), base_batch=4)
    worker = replica(model, optimizer)
    worker.group = SimpleNamespace(all_reduce=lambda buffer: None)  # type: ignore[assignment]
    before = buffers_of(model)
    worker.step(None, WorkerTask(attempt=0, epoch=0, batch=4, micro_batches=(MicroBatch(0, 0, 4),)))
    context = StepContext(step=0, batch=4, ref_batch=4, samples=0)
    step = ApplyStep(attempt=0, context=context, groups=({},), momenta=(0.1,))
    worker.apply(step if counts else None)
    assert model[0].passes == int(counts)
    if not counts:
        assert_same(before, buffers_of(model))


def test_a_dask_worker_without_the_model_leaves_its_buffers_alone() -> None:
    model = make_model()
    worker, before = replica(model), buffers_of(model)
    for attempt in range(2):
        task = WorkerTask(attempt=attempt, epoch=0, batch=4, micro_batches=(MicroBatch(0, 0, 4),))
        worker.gradients(FlatState(make_model()).read(), task)
        assert_same(before, buffers_of(model))


@pytest.mark.parametrize("ranks", [None, Ranks(0, 1)])
@Engines
def test_ranks_say_once_which_buffers_are_their_own(
    kind: type[LoopEngine] | type[FusedEngine], ranks: Ranks | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(LoopEngine, "_share_with_ranks", lambda *_: None)
    monkeypatch.setattr(FusedEngine, "_share_with_ranks", lambda *_: None)
    engine = engine_on(kind, make_model(), ranks=ranks, on_event=lambda what, text: told.append((what, text)))
    steps(engine, attempts=2)
    assert [what for what, _ in told] == ([] if ranks is None else ["buffers differ"])
    for _, text in told:
        assert all(name in text for name in ("0.average", "0.passes", "0.replaced", "0.queue", "and 2 more"))
        assert "running_mean" not in text and "constant" not in text


@pytest.fixture
def _few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_buffers, "_MOST_BYTES", 100)


@pytest.mark.usefixtures("_few_bytes")
@pytest.mark.parametrize(("change", "after"), [(lambda m: m.large.add_(1.0), 1.0), (lambda m: grown(m), 0.0)])
def test_of_many_bytes_the_smaller_buffers_are_kept(change: Callable[[nn.Module], Any], after: float) -> None:
    model = nn.Module()
    model.register_buffer("large", torch.zeros(100))
    model.register_buffer("small", torch.zeros(20))
    kept = KeptBuffers(model)
    kept.begin()
    change(model)
    model.small.add_(1.0)
    kept.rollback()
    assert model.small.sum() == 0.0
    assert model.large[0] == after, "what was replaced is put back, whatever its size"


def grown(model: nn.Module) -> None:
    model.large = torch.ones(200)


def test_buffers_that_no_pass_can_change_are_left_alone() -> None:
    """Expanded ones, and those that were made in inference mode, cannot be written."""
    model = nn.Module()
    model.register_buffer("places", torch.arange(4).expand(3, -1))
    with torch.inference_mode():
        model.register_buffer("fixed", torch.ones(2))
    kept = KeptBuffers(model)
    kept.begin()
    kept.rollback()
    assert model.places.shape == (3, 4)


def test_a_buffer_that_was_given_other_data_gets_its_own_back() -> None:
    model = nn.Module()
    model.register_buffer("bank", torch.zeros(2))
    kept = KeptBuffers(model)
    for size in (3, 4):
        kept.begin()
        bank, before = model.bank, model.bank.clone()
        model.bank.data = torch.ones(size)
        kept.rollback()
        assert model.bank is bank and torch.equal(bank, before)
        model.bank.data = torch.full((size,), 2.0)
