"""Passes on a GPU against the reference on a CPU: as they are, compiled, and replayed from CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from ebbflow.engines.captured import CapturedPasses
from ebbflow.engines.emulated import FusedEngine, LoopEngine
from ebbflow.moments.meters import FusedMeter
from ebbflow.plan.batch_plan import BatchPlan
from ebbflow.workloads import cross_entropy
from engines.test_fused_engine import (
    MODELS,
    SAMPLES,
    assert_same_state,
    engine_on,
    images,
    no_norm,
    over_two_classes,
    train,
    twins,
)
from engines.test_graphs import gradients_of_steps, replica_step

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.process,  # the compiler has processes of its own
    pytest.mark.filterwarnings("default"),  # an error in place of one of the compiler's warnings would end compiling
]


@pytest.fixture(autouse=True)
def _fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("ebbflow.engines.emulated.compiled._COMPILE_AFTER", 4)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("needs", [(), ("moments",)])
@pytest.mark.parametrize("make", MODELS)
def test_it_ends_with_the_weights_and_buffers_of_the_reference(
    make: Callable[[], nn.Module], needs: tuple[str, ...]
) -> None:
    fused, loop = (model.double() for model in twins(make))
    ours = train(engine_on(FusedEngine, fused.cuda(), fused_batch=13, needs=needs))
    theirs = train(engine_on(LoopEngine, loop, needs=needs))
    assert_same_state(fused.cpu(), loop)
    assert [g.loss for g in ours] == pytest.approx([g.loss for g in theirs], rel=1e-7)


@pytest.mark.parametrize("needs", [(), ("moments",)])
@pytest.mark.parametrize("make", [images, no_norm])
def test_compiled_and_replayed_too(make: Callable[[], nn.Module], needs: tuple[str, ...]) -> None:
    fused, loop = (model.double() for model in twins(make))
    events: list[tuple[str, str]] = []
    engine = engine_on(
        FusedEngine,
        fused.cuda(),
        fused_batch=24,
        needs=needs,
        compile=True,
        on_event=lambda *event: events.append(event),
    )
    ours = train(engine)
    assert len(engine._captured) > 1, "several shapes were captured"
    assert not events
    theirs = train(engine_on(LoopEngine, loop, needs=needs))
    assert_same_state(fused.cpu(), loop)
    assert [g.loss for g in ours] == pytest.approx([g.loss for g in theirs], rel=1e-7)


def test_a_loss_that_is_a_sum_with_its_count_is_compiled_and_replayed_too() -> None:
    """Each replay computes the count anew."""
    fused, loop = (model.double() for model in twins(images))
    settings = {"loss": over_two_classes, "needs": ("moments",)}
    engine = engine_on(FusedEngine, fused.cuda(), fused_batch=24, compile=True, **settings)
    ours = train(engine)
    assert len(engine._captured) > 1, "several shapes were captured"
    theirs = train(engine_on(LoopEngine, loop, **settings))
    assert_same_state(fused.cpu(), loop)
    assert [g.loss for g in ours] == pytest.approx([g.loss for g in theirs], rel=1e-7)
    measured, reference = ([g.measurement.sq_mean[0] for g in run] for run in (ours, theirs))
    assert measured == pytest.approx(reference, rel=1e-6)


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("sends", [False, True])
@pytest.mark.parametrize("needs", [(), ("moments",)])
def test_a_replica_replays_its_micro_batches(needs: tuple[str, ...], sends: bool, interrupted: bool) -> None:
    ours, theirs = (model.double() for model in twins(images))
    replica = replica_step(ours.cuda(), over_two_classes, needs, captures=True, sends=sends)
    found = gradients_of_steps(replica, interrupted=interrupted)
    assert replica._captured is not None and len(replica._captured) == 1
    expected = gradients_of_steps(replica_step(theirs, over_two_classes, needs), interrupted=False)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close([tensor.cpu() for tensor in one], other)
    assert_same_state(ours.cpu(), theirs)


def test_pieces_replayed_from_a_graph_are_measured_as_those_that_are_not() -> None:
    measured = []
    for compile in (False, True):
        model, _ = twins(images)
        engine = engine_on(
            FusedEngine,
            model.double().cuda(),
            BatchPlan.constant(4, 24),
            fused_batch=12,
            needs=("layers",),
            compile=compile,
        )
        measured.append([g.measurement for g in train(engine, steps=20)])
    for plain, replayed in zip(*measured, strict=True):
        assert replayed.mean_sq == pytest.approx(plain.mean_sq, rel=1e-6)
        assert replayed.sq_mean == pytest.approx(plain.sq_mean, rel=1e-6)


def test_dropout_draws_new_numbers_at_every_replay() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(48, 3)).cuda()
    x = torch.ones(SAMPLES, 3, 4, 4, device="cuda")
    y = torch.zeros(SAMPLES, dtype=torch.long, device="cuda")
    engine = FusedEngine(
        model, lambda i: (x[i], y[i]), cross_entropy, BatchPlan.constant(2, 20), samples=SAMPLES, compile=True
    )
    losses = [g.loss for g in train(engine, steps=9, lr=0.0)]
    assert len(engine._captured) >= 1  # type: ignore[arg-type]
    assert len(set(losses)) == len(losses), "equal samples and weights: only dropout differs"


def test_a_model_that_cannot_be_captured_is_trained_all_the_same() -> None:
    class Waits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(48, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.linear(x.flatten(1))
            return out * (1.0 if out.sum().item() > 1e9 else 2.0)  # asks the device in the middle of the pass

    events: list[str] = []
    ours, theirs = (model.double() for model in twins(Waits))
    train(engine_on(FusedEngine, ours.cuda(), compile=True, on_event=lambda what, text: events.append(what)))
    train(engine_on(LoopEngine, theirs))
    assert_same_state(ours.cpu(), theirs)
    assert events == ["no CUDA graph"]


@pytest.mark.parametrize("ends_with", ["a wait", "out of memory"])
def test_a_capture_that_failed_leaves_nothing_behind(ends_with: str) -> None:
    """Neither its stream nor a generator that fails at the next random number."""

    def compute(inputs: Any, targets: Any, kind: object, factor: torch.Tensor) -> tuple[torch.Tensor, int]:
        loss = nn.functional.dropout(model(inputs)).sum()
        (loss * factor).backward()
        if torch.cuda.is_current_stream_capturing():
            if ends_with == "out of memory":
                raise torch.OutOfMemoryError("as if")
            loss.item()
        return loss.detach(), len(inputs)

    model = nn.Linear(4096, 4096).cuda()
    refused: list[str] = []
    passes = CapturedPasses(compute, FusedMeter(list(model.parameters())), samples=2048, on_refused=refused.append)
    inputs, targets = torch.ones(2048, 4096, device="cuda"), torch.zeros(2048, device="cuda")
    stream = torch.cuda.current_stream()
    passes.begin(list(model.parameters()))
    with pytest.raises(torch.OutOfMemoryError) if ends_with == "out of memory" else nullcontext():
        for _ in range(8):
            passes(inputs, targets, "usual", 1.0)
    assert len(refused) == (ends_with == "a wait") and len(passes) == 0
    assert torch.cuda.current_stream() == stream
    assert torch.randn(8, device="cuda").isfinite().all()


def test_freezing_a_layer_later_leaves_it_as_it_is() -> None:
    ours, theirs = (model.double() for model in twins(no_norm))
    fused, loop = engine_on(FusedEngine, ours.cuda(), compile=True), engine_on(LoopEngine, theirs)
    for engine, model in ((fused, ours), (loop, theirs)):
        train(engine, steps=8)
        model[1].requires_grad_(False)
        train(engine, steps=8)
    assert_same_state(ours.cpu(), theirs)
