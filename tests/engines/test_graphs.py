"""What is captured and replayed, where a stand-in plays the GPU: capturing computes nothing, replaying repeats it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ebbflow.data.ledger import Ledger, micro_batches_of
from ebbflow.engines import captured as captured_passes
from ebbflow.engines.captured import CapturedPasses
from ebbflow.engines.emulated import FusedEngine, LoopEngine
from ebbflow.engines.replica_step import Loss, ReplicaStep
from ebbflow.moments.meters import FusedMeter
from ebbflow.plan.batch_plan import BatchPlan, StepSize
from ebbflow.torch_api import clear_failed_capture
from ebbflow.workloads import cross_entropy
from engines.test_fused_engine import (
    SAMPLES,
    assert_same_state,
    data,
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


def record_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    MODES.clear()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)


def with_graphs(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch, needs: tuple[str, ...] = (), **settings: Any
) -> tuple[FusedEngine, nn.Module]:
    """A fused engine that captures, and a copy of its model."""
    record_graphs(monkeypatch)
    fused, other = (model.double() for model in twins(make))
    engine = engine_on(FusedEngine, fused, **settings)
    assert isinstance(engine, FusedEngine)
    engine._sums = FusedMeter(fused.parameters(), measured=bool(needs))
    if needs:
        engine.meter = engine._sums
    Recorded.graphs = engine._captured = CapturedPasses(engine._compute, engine._sums, samples=engine.fused_batch)
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


def test_cudnn_tries_its_algorithms_once_before_a_capture_and_the_capture_uses_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The flag is off in the first pass, on in the second, which is the last before the capture, and on in that."""
    engine, _ = with_graphs(images, monkeypatch, plan=BatchPlan.constant(4, 24))
    captured = engine._captured
    assert captured is not None
    compute, flags = captured._compute, []

    def noting(*arguments: Any) -> Any:
        flags.append(torch.backends.cudnn.benchmark)
        return compute(*arguments)

    captured._compute = noting
    train(engine, steps=3)
    assert flags == [False, True, True, False], "two passes, the capture, and the replay, which chooses nothing"
    assert not torch.backends.cudnn.benchmark

    engine, _ = with_graphs(images, monkeypatch, plan=BatchPlan.constant(2, 40), fused_batch=16)
    assert engine._captured is not None
    engine._captured._compute, compute = noting, engine._captured._compute
    flags.clear()
    train(engine, steps=3)
    assert flags and not any(flags), "what is too large to be captured is computed as before"


def test_only_so_many_graphs_are_kept_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbflow.engines.captured._MOST_GRAPHS", 2)
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


def test_a_layer_that_is_put_into_eval_mode_later_is_not_replayed_from_an_old_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = BatchPlan.constant(4, 24)
    engine, other = with_graphs(images, monkeypatch, plan=plan)
    loop = engine_on(LoopEngine, other, plan)
    for one in (engine, loop):
        train(one, steps=6)
        one.model[1].eval()  # type: ignore[index]
        train(one, steps=6)
    assert_same_state(engine.model, other)
    assert len(MODES) == 2


@pytest.mark.parametrize("said", ["a kernel that waits\nand more", ""])
def test_a_model_that_cannot_be_captured_is_trained_without_and_says_why(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first error counts: that of the end of a capture only says that something has failed before."""
    engine, other = with_graphs(images, monkeypatch, plan=BatchPlan.constant(4, 24))
    cleared = failing_captures(engine, RuntimeError(said), RuntimeError("failed before"), monkeypatch)
    train(engine, steps=6)
    train(engine_on(LoopEngine, other, BatchPlan.constant(4, 24)), steps=6)
    assert_same_state(engine.model, other)
    assert engine._captured is not None and len(engine._captured) == 0
    assert (engine._captured.refused, cleared) == (said.partition("\n")[0] or "RuntimeError", ["cleared"])


def test_a_capture_without_enough_memory_leaves_no_gradient_and_smaller_passes_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, other = with_graphs(images, monkeypatch, plan=BatchPlan.constant(4, 24))
    cleared = failing_captures(engine, torch.OutOfMemoryError("as if"), None, monkeypatch)
    left: list[bool] = []
    halve = engine._halve_passes
    monkeypatch.setattr(
        engine,
        "_halve_passes",
        lambda *said: (left.append(any(p.grad is not None for p in engine.model.parameters())), halve(*said)),
    )
    train(engine, steps=6)
    train(engine_on(LoopEngine, other, BatchPlan.constant(4, 24)), steps=6)
    assert_same_state(engine.model, other)
    assert engine._captured is not None and engine._captured.refused == ""
    assert (left, cleared) == ([False], ["cleared"]) and len(engine._captured) > 0


def failing_captures(
    engine: FusedEngine, error: RuntimeError, at_end: RuntimeError | None, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Let the first capture of an engine compute, and then fail with an error, or with another one at its end."""
    captured = engine._captured
    assert captured is not None
    cleared: list[str] = []

    @contextmanager
    def failing(graph: Recorded, *, pool: object, capture_error_mode: str) -> Iterator[None]:
        if cleared:
            with recording(graph, pool=pool, capture_error_mode=capture_error_mode):
                yield
            return
        compute = captured._compute

        def computing(*arguments: Any) -> Any:
            compute(*arguments)
            raise error

        captured._compute = computing
        try:
            yield
        finally:
            captured._compute = compute
            if at_end is not None:
                raise at_end

    monkeypatch.setattr(torch.cuda, "graph", failing)
    monkeypatch.setattr(captured_passes, "clear_failed_capture", lambda pool, stream: cleared.append("cleared"))
    return cleared


def test_after_a_failed_capture_the_stream_and_the_memory_are_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is given back only where torch has not done so: a second time would abort the process."""
    calls: list[str] = []
    stream = SimpleNamespace(device_index=0, device="cpu")

    @contextmanager
    def failing(*_: object, **__: object) -> Iterator[None]:
        yield
        raise RuntimeError("this capture fails, too")

    def ended(*_: object) -> None:
        calls.append("end")
        if has_ended:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    monkeypatch.setattr(torch.cuda, "set_stream", lambda one: calls.append("stream" if one is stream else "another"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", failing)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", ended)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *_: calls.append("release"))
    has_ended = False
    clear_failed_capture((0, 1), stream)  # type: ignore[arg-type]
    has_ended = True
    clear_failed_capture((0, 1), stream)  # type: ignore[arg-type]
    assert calls == ["stream", "end", "release", "stream", "stream", "end", "stream"]


# The micro-batches of a live replica ----------------------------------------------------------------------------------


def replica_step(
    model: nn.Module, loss: Loss, needs: tuple[str, ...] = (), *, captures: bool = False, sends: bool = False
) -> ReplicaStep:
    device = next(model.parameters()).device
    x, y = data()
    x, y = x.to(device, torch.float64), y.to(device)
    step = ReplicaStep(
        model, lambda i: (x[i], y[i]), loss, samples=SAMPLES, seed=5, needs=needs, sends_in_last=lambda: sends,
        captured_samples=8 if captures else 0,
    )  # fmt: skip
    if captures:
        assert step._captured is not None
        Recorded.graphs = step._captured
    return step


def gradients_of_steps(replica: ReplicaStep, *, interrupted: bool) -> list[list[torch.Tensor]]:
    """The gradients of six steps of four workers with 7 samples; if interrupted, from the third on in two attempts."""
    size, ledger, found = StepSize(workers=4, samples=28, time_s=0.0, duration_s=1.0), Ledger(samples=SAMPLES), []
    optimizer = torch.optim.SGD(replica.model.parameters(), lr=0.05)
    for number in range(6):
        assignment = ledger.assign(size.samples)
        where = {"epoch": assignment.epoch, "batch": assignment.batch, "whole": assignment.batch}
        todo = micro_batches_of(assignment, size)
        replica.begin()
        if interrupted and number > 1:
            replica.compute(todo[:1], **where)
            replica.pause()
            replica.resume()
            todo = todo[1:]
        replica.compute(todo, **where)
        if replica.meter is not None:
            replica.meter.take()
        replica.batch_norm.commit()
        found.append([parameter.grad.clone() for parameter in replica.parameters if parameter.grad is not None])
        optimizer.step()
        ledger = ledger.commit(assignment)
    return found


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("sends", [False, True])
@pytest.mark.parametrize("needs", [(), ("moments",)])
@pytest.mark.parametrize("loss", [cross_entropy, over_two_classes])
def test_a_replica_that_replays_its_micro_batches_has_the_same_gradients(
    loss: Loss, needs: tuple[str, ...], sends: bool, interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the last one is computed without a graph, and where a step is interrupted and goes on."""
    record_graphs(monkeypatch)
    ours, theirs = (model.double() for model in twins(images))
    replica = replica_step(ours, loss, needs, captures=True, sends=sends)
    found = gradients_of_steps(replica, interrupted=interrupted)
    reference = replica_step(theirs, loss, needs)
    for one, other in zip(found, gradients_of_steps(reference, interrupted=False), strict=True):
        torch.testing.assert_close(one, other)
    assert_same_state(ours, theirs)
    assert float(replica.loss) == pytest.approx(float(reference.loss)) and replica.samples == reference.samples
    assert float(replica.count) == float(reference.count)
    assert MODES == ["thread_local"], "one shape, captured once"
    if needs:
        assert replica.meter is not None and reference.meter is not None
        squares = [meter.take().squares.tolist() for meter in (replica.meter, reference.meter)]
        assert squares[0] == pytest.approx(squares[1])


def test_inputs_of_another_shape_are_not_copied_into_the_buffers_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single column would be spread over all of them without a word."""
    record_graphs(monkeypatch)
    weight = nn.Parameter(torch.ones(1))
    sums = FusedMeter([weight], measured=False)

    def compute(x: torch.Tensor, y: torch.Tensor, kind: str, factor: torch.Tensor) -> tuple[torch.Tensor, float]:
        loss = (weight * x).sum()
        (loss * factor).backward()  # type: ignore[no-untyped-call]
        return loss.detach(), len(x)

    Recorded.graphs = passes = CapturedPasses(compute, sums, samples=4)
    for columns in (3, 3, 3, 3, 1, 3):
        loss, _ = passes(torch.ones(2, columns), torch.zeros(2), "pass", 1.0)
        assert loss.item() == 2 * columns
    assert sums._sums[0].item() == 2 * (5 * 3 + 1)
