"""What is captured and replayed, where a stand-in plays the GPU: capturing computes nothing, replaying repeats it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from ebbflow.engines.emulated import FusedEngine, LoopEngine
from ebbflow.engines.emulated.compiled import CapturedPasses
from ebbflow.engines.replica_step import Loss
from ebbflow.moments.meters import FusedMeter
from ebbflow.plan.batch_plan import BatchPlan
from ebbflow.workloads import cross_entropy
from engines.test_fused_engine import (
    assert_same_state,
    engine_on,
    images,
    no_norm,
    over_two_classes,
    train,
    twins,
)

MODES: list[str] = []
"""Of the captures so far."""


class Recorded:
    """Stands for a CUDA graph: remembers what was computed, and on what, while it was captured."""

    graphs: CapturedPasses
    arguments: tuple[Any, ...] = ()

    def replay(self) -> None:
        """What Python notes beside the computing is not repeated."""
        sums = self.graphs._sums
        before = set(sums.touched)
        loss, count = self.graphs._compute(*self.arguments)
        self.graphs._loss.copy_(loss)
        if isinstance(count, torch.Tensor):
            self.graphs._count.copy_(count)
        sums.add()
        sums.touched = before


@contextmanager
def recording(graph: Recorded, *, pool: object, capture_error_mode: str = "global") -> Iterator[None]:
    MODES.append(capture_error_mode)
    graphs, sums = graph.graphs, graph.graphs._sums
    compute, written = graphs._compute, [graphs._loss, sums._norms, *sums._sums]
    before = [tensor.clone() for tensor in written]

    def noting(*arguments: Any) -> torch.Tensor:
        graph.arguments = arguments
        return compute(*arguments)

    graphs._compute = noting
    try:
        yield
    finally:
        graphs._compute = compute
        for tensor, value in zip(written, before, strict=True):
            tensor.copy_(value)


def with_graphs(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch, needs: tuple[str, ...] = (), **settings: Any
) -> tuple[FusedEngine, nn.Module]:
    """A fused engine that captures, and a copy of its model."""
    MODES.clear()
    fused, other = (model.double() for model in twins(make))
    engine = engine_on(FusedEngine, fused, **settings)
    assert isinstance(engine, FusedEngine)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    engine._sums = FusedMeter(fused.parameters(), measured=bool(needs))
    if needs:
        engine.meter = engine._sums
    Recorded.graphs = engine._captured = CapturedPasses(engine._compute, engine._sums, samples=engine.fused_batch)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    return engine, other


@pytest.mark.parametrize("needs", [(), ("moments",)])
@pytest.mark.parametrize("make", [images, no_norm])
@pytest.mark.parametrize("loss", [cross_entropy, over_two_classes])
def test_replayed_chunks_give_the_weights_of_the_reference(
    make: Callable[[], nn.Module], needs: tuple[str, ...], loss: Loss, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, other = with_graphs(make, monkeypatch, needs, fused_batch=24, loss=loss)
    ours = train(engine)
    theirs = train(engine_on(LoopEngine, other, needs=needs, loss=loss))
    assert_same_state(engine.model, other)
    assert [g.loss for g in ours] == pytest.approx([g.loss for g in theirs], rel=1e-6)  # the sums of losses are floats
    for one, reference in zip(ours, theirs, strict=True):
        assert (one.measurement is None) == (reference.measurement is None) == (not needs)
        if one.measurement is not None and reference.measurement is not None:
            assert one.measurement.sq_mean == pytest.approx(reference.measurement.sq_mean, rel=1e-6)
    assert engine._captured is not None and len(engine._captured) > 1, "several shapes were captured"


def test_other_threads_may_use_the_device_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that pins samples which are read ahead would spoil the capture otherwise, and fail itself."""
    engine, _ = with_graphs(no_norm, monkeypatch, plan=BatchPlan.constant(4, 24))
    train(engine, steps=4)
    assert MODES == ["thread_local"]


def test_only_so_many_graphs_are_kept_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbflow.engines.emulated.compiled._MOST_GRAPHS", 2)
    engine, other = with_graphs(images, monkeypatch, fused_batch=24)
    train(engine)
    train(engine_on(LoopEngine, other))
    assert_same_state(engine.model, other)
    assert engine._captured is not None and len(engine._captured) == 2
    assert len(MODES) > 2, "what was forgotten is captured again when it comes again"


def test_a_chunk_that_is_larger_than_the_buffers_is_computed_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker's samples are never cut, so that they may be more than a chunk should have."""
    plan = BatchPlan.constant(2, 40)
    engine, other = with_graphs(images, monkeypatch, plan=plan, fused_batch=16)
    train(engine, steps=12)
    train(engine_on(LoopEngine, other, plan), steps=12)
    assert_same_state(engine.model, other)
    assert not MODES


def test_a_parameter_that_is_frozen_later_gets_no_gradient_from_an_old_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = BatchPlan.constant(4, 24)
    engine, other = with_graphs(no_norm, monkeypatch, plan=plan)
    loop = engine_on(LoopEngine, other, plan)
    for one in (engine, loop):
        train(one, steps=6)
        one.model[1].requires_grad_(False)  # type: ignore[index]
        train(one, steps=6)
    assert_same_state(engine.model, other)
    assert len(MODES) == 2
