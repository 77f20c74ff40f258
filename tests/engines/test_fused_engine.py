"""The fused engine against the reference: the same weights, the same statistics on average, whatever the workers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ebbflow.data.ledger import Ledger
from ebbflow.engines.base import Faults, Gradients
from ebbflow.engines.emulated import EmulatedEngine, FusedEngine, LoopEngine
from ebbflow.engines.emulated.compiled import PassShape
from ebbflow.engines.emulated.fused import cut_into_passes
from ebbflow.errors import ConfigError
from ebbflow.plan.batch_plan import BatchPlan, StepSize
from ebbflow.plan.growing import allow
from ebbflow.plan.policies import Follow
from ebbflow.run import training
from ebbflow.run.config import RunConfig
from ebbflow.traces.availability import Trace
from ebbflow.workloads import LossSum, cross_entropy

SAMPLES = 211  # a prime: every epoch has an uneven tail
STEPS = 50


def flat() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.0),
        nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8, momentum=None), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3),
    )  # fmt: skip


def odd_norms() -> nn.Module:
    """Without weights, without running statistics, with another momentum."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False), nn.ReLU(), nn.BatchNorm2d(4, track_running_stats=False),
        nn.Flatten(), nn.Linear(16, 5), nn.BatchNorm1d(5, momentum=0.3, eps=1e-3), nn.Linear(5, 3),
    )  # fmt: skip


def sequences() -> nn.Module:
    """Batch norm over channels of a sequence (samples, channels, length)."""
    return nn.Sequential(
        nn.Flatten(2), nn.Conv1d(3, 6, 5), nn.BatchNorm1d(6), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3)
    )


def no_norm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.Tanh(), nn.Linear(16, 3))


MODELS: list[Callable[[], nn.Module]] = [flat, images, odd_norms, sequences, no_norm]


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(SAMPLES, 3, 4, 4, generator=generator)
    y = torch.randint(3, (SAMPLES,), generator=generator)
    return x + y[:, None, None, None] * 0.5, y


def changing_plan() -> BatchPlan:
    """One to seven workers of six samples, another number every two steps."""
    trace = Trace.parse("0s:4 2s:2 4s:7 6s:3 8s:1 10s:5 12s:6 14s:2 16s").repeat(8)
    return BatchPlan.from_trace(trace, Follow(6), "1s")


def engine_on(
    kind: type[EmulatedEngine], model: nn.Module, plan: BatchPlan | None = None, **settings: Any
) -> EmulatedEngine:
    one = next(model.parameters())
    x, y = data()
    x, y = x.to(one.device, one.dtype), y.to(one.device)
    loss = settings.pop("loss", cross_entropy)
    return kind(model, lambda i: (x[i], y[i]), loss, plan or changing_plan(), samples=SAMPLES, seed=5, **settings)


def over_two_classes(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> LossSum:
    """A loss that leaves a third of the samples out, so that micro-batches count differently."""
    return LossSum(nn.functional.cross_entropy(model(x), y, ignore_index=2, reduction="sum"), (y != 2).sum())


def train(engine: EmulatedEngine, steps: int = STEPS, *, lr: float = 0.05) -> list[Gradients]:
    optimizer = torch.optim.SGD(engine.model.parameters(), lr=lr, momentum=0.9)
    ledger, seen = Ledger(samples=SAMPLES), []
    for step in range(steps):
        size = engine.participants(step)
        assignment = ledger.assign(size.samples)
        seen.append(engine.gradients(assignment, size))
        if engine.commit():
            optimizer.step()
            ledger = ledger.commit(assignment)
    return seen


def twins(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    model = make()
    return model, copy.deepcopy(model)


def assert_same_state(left: nn.Module, right: nn.Module) -> None:
    """To 1e-7 in double precision, where rounding cannot hide a difference; in single, to what 50 steps make of it."""
    double = next(left.parameters()).dtype == torch.float64
    rtol, atol = (1e-7, 1e-9) if double else (1e-3, 1e-4)
    assert left.state_dict().keys() == right.state_dict().keys()
    for name, value in left.state_dict().items():
        torch.testing.assert_close(value, right.state_dict()[name], rtol=rtol, atol=atol)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("needs", [(), ("moments",)])
@pytest.mark.parametrize("chunk", [13, 1000])
@pytest.mark.parametrize("make", MODELS)
def test_it_ends_with_the_weights_and_buffers_of_the_reference(
    make: Callable[[], nn.Module], chunk: int, needs: tuple[str, ...]
) -> None:
    fused, loop = (model.double() for model in twins(make))
    ours = train(engine_on(FusedEngine, fused, fused_batch=chunk, needs=needs))
    theirs = train(engine_on(LoopEngine, loop, needs=needs))
    assert_same_state(fused, loop)
    assert [g.loss for g in ours] == pytest.approx([g.loss for g in theirs], rel=1e-7)
    assert sum(g.micro_batches for g in ours) < sum(g.micro_batches for g in theirs), "workers were fused"


@pytest.mark.parametrize("make", [flat, images, no_norm])
def test_it_does_so_in_single_precision(make: Callable[[], nn.Module]) -> None:
    fused, loop = twins(make)
    train(engine_on(FusedEngine, fused, needs=("moments",)))
    train(engine_on(LoopEngine, loop, needs=("moments",)))
    assert_same_state(fused, loop)


@pytest.mark.slow
@pytest.mark.parametrize("make", [images, pytest.param(odd_norms, marks=pytest.mark.long), no_norm])
def test_compiled_it_ends_the_same_with_few_graphs(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **settings: compile(f, backend=counter, **settings))
    monkeypatch.setattr("ebbflow.engines.emulated.compiled._COMPILE_AFTER", 2)
    fused, loop = (model.double() for model in twins(make))
    train(engine_on(FusedEngine, fused, needs=("moments",), compile=True))
    train(engine_on(LoopEngine, loop, needs=("moments",)))
    assert_same_state(fused, loop)
    assert 2 <= counter.frame_count <= 3, "seven numbers of workers and uneven tails need no graph each"


def test_every_engine_of_a_process_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler limits the graphs of a function (to eight): a study has many engines."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("eager")
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **settings: compile(f, backend=counter, **settings))
    for _ in range(10):
        train(engine_on(FusedEngine, no_norm(), BatchPlan.constant(4, 24), compile=True), steps=2)
    assert counter.frame_count == 10


def test_a_model_that_cannot_be_compiled_is_run_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: object, inputs: object) -> Any:
        raise RuntimeError("no compiler here")

    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **settings: compile(f, backend=broken, **settings))
    events: list[tuple[str, str]] = []
    fused, loop = twins(images)
    train(engine_on(FusedEngine, fused, compile=True, on_event=lambda *event: events.append(event)), steps=5)
    train(engine_on(LoopEngine, loop), steps=5)
    assert_same_state(fused, loop)
    assert [what for what, _ in events] == ["not compiled"]


@pytest.mark.slow
@pytest.mark.parametrize("layers", [False, True])
def test_noise_and_signal_equal_the_references_on_average(layers: bool) -> None:
    """At fixed weights, over all steps of many epochs: means agree within three standard errors of their difference."""
    needs = ("layers",) if layers else ("moments",)
    estimates = {}
    for kind, settings in ((FusedEngine, {"fused_batch": 18}), (LoopEngine, {})):
        model, _ = twins(no_norm)
        seen = train(engine_on(kind, model, BatchPlan.constant(6, 36), needs=needs, **settings), steps=600, lr=0.0)
        measured = [g.measurement for g in seen if g.measurement is not None and g.measurement.batch == 36]
        estimates[kind] = np.array([m.estimate() for m in measured])  # (steps, noise or signal, layers)
    fused, loop = estimates[FusedEngine], estimates[LoopEngine]
    assert fused.shape == loop.shape
    error = np.sqrt(fused.var(0) / len(fused) + loop.var(0) / len(loop))
    assert (np.abs(fused.mean(0) - loop.mean(0)) < 3 * error).all()
    assert (error[0] < 0.1 * loop.mean(0)[0]).all(), "the comparison could see a difference of a third of the noise"


def test_a_step_has_two_pieces_where_a_rule_needs_them_and_workers_allow() -> None:
    for workers, micro_batches in ((1, 1), (2, 2), (5, 2)):
        model = no_norm()
        engine = engine_on(FusedEngine, model, BatchPlan.constant(workers, 6 * workers), needs=("moments",))
        assert [g.micro_batches for g in train(engine, steps=3)] == [micro_batches] * 3
        engine = engine_on(FusedEngine, model, BatchPlan.constant(workers, 6 * workers))
        assert [g.micro_batches for g in train(engine, steps=3)] == [1] * 3


@pytest.mark.parametrize("kind", [FusedEngine, LoopEngine])
def test_a_layer_that_a_step_does_not_call_keeps_its_running_statistics(kind: type[EmulatedEngine]) -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.spare = nn.Linear(48, 3), nn.BatchNorm1d(3)
            nn.init.constant_(self.spare.running_mean, 0.3)
            nn.init.constant_(self.spare.running_var, 2.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.linear(x.flatten(1))
            return out

    model = Spare()
    train(engine_on(kind, model), steps=3)
    assert model.spare.running_mean.tolist() == pytest.approx([0.3] * 3)
    assert model.spare.running_var.tolist() == pytest.approx([2.0] * 3)


def test_synchronised_batch_norm_equals_one_large_batch() -> None:
    fused, plain = twins(images)
    engine = engine_on(FusedEngine, fused, batch_norm="sync", fused_batch=8)
    train(engine)
    x, y = data()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    ledger = Ledger(samples=SAMPLES)
    for step in range(STEPS):
        assignment = ledger.assign(changing_plan().at(step).samples)
        indices = engine._order(assignment.epoch).indices(assignment.start, assignment.stop)
        optimizer.zero_grad()
        cross_entropy(plain, x[indices], y[indices]).backward()
        optimizer.step()
        ledger = ledger.commit(assignment)
    assert_same_state(fused, plain)


def test_frozen_batch_norm_uses_and_keeps_the_running_statistics() -> None:
    fused, plain = twins(flat)
    for model in (fused, plain):
        nn.init.constant_(model[2].running_mean, 0.3)
        nn.init.constant_(model[2].running_var, 2.0)
    engine = engine_on(FusedEngine, fused, BatchPlan.constant(4, 24), batch_norm="frozen")
    size = engine.participants(0)
    engine.gradients(Ledger(samples=SAMPLES).assign(24), size)
    assert engine.commit()
    plain.train()
    plain[2].eval()
    x, y = data()
    indices = engine._order(0).indices(0, 24)
    cross_entropy(plain, x[indices], y[indices]).backward()
    for ours, theirs in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert fused[2].running_mean.tolist() == pytest.approx([0.3] * 16)
    assert fused[2].num_batches_tracked == 0


def test_a_checkpoint_of_one_engine_is_continued_by_the_other() -> None:
    """25 steps by one and 25 by the other: the same weights as 50 by the reference."""
    whole, _ = twins(images)
    train(engine_on(LoopEngine, whole))
    for first, second in ((FusedEngine, LoopEngine), (LoopEngine, FusedEngine)):
        model, other = twins(images)
        engine = engine_on(first, model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        ledger = Ledger(samples=SAMPLES)
        for step in range(STEPS):
            if step == STEPS // 2:
                other.load_state_dict(copy.deepcopy(model.state_dict()))
                engine = engine_on(second, other)
                state = optimizer.state_dict()
                optimizer = torch.optim.SGD(other.parameters(), lr=0.05, momentum=0.9)
                optimizer.load_state_dict(state)
            size = engine.participants(step)
            assignment = ledger.assign(size.samples)
            engine.gradients(assignment, size)
            assert engine.commit()
            optimizer.step()
            ledger = ledger.commit(assignment)
        assert_same_state(other, whole)


def test_the_model_is_left_as_it_was_given() -> None:
    model, untouched = twins(images)
    engine = engine_on(FusedEngine, model)
    train(engine, steps=3)
    assert [type(m) for m in model.modules()] == [type(m) for m in untouched.modules()]
    assert all("forward" not in vars(module) for module in model.modules())
    copy.deepcopy(model)
    model.eval()
    x, _ = data()
    untouched.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(x), untouched.eval()(x))


def test_a_lost_step_leaves_no_trace() -> None:
    model, before = twins(images)
    engine = engine_on(FusedEngine, model, faults=Faults().lose(worker=0, step=0))
    train(engine, steps=1)
    assert_same_state(model, before)
    assert all(parameter.grad is None for parameter in model.parameters())


class Small:
    """A device on which at most so many samples fit."""

    def __init__(self, fits: int) -> None:
        self.fits = fits
        self.sizes: list[int] = []

    def __call__(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(x))
        loss = cross_entropy(model, x, y)
        if len(x) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss


def test_what_does_not_fit_into_the_memory_is_halved_and_the_step_repeated() -> None:
    fused, loop = twins(images)
    events: list[tuple[str, str]] = []
    plan = BatchPlan.constant(8, 48)
    engine = engine_on(FusedEngine, fused, plan, needs=("moments",), on_event=lambda *event: events.append(event))
    engine.loss = small = Small(fits=18)
    seen = train(engine, steps=4)
    # 48 = 24 + 24 do not fit, nor would 24; 12 samples, two workers, do: four chunks, and so from then on.
    assert small.sizes[0] == 24 and set(small.sizes[1:]) == {12}
    assert [g.micro_batches for g in seen] == [4] * 4
    assert events == [("out of memory", "24 samples did not fit; from now on at most 12 at a time")]
    train(engine_on(LoopEngine, loop, plan, needs=("moments",)), steps=4)
    assert_same_state(fused, loop)


def test_two_workers_that_do_not_fit_together_are_taken_one_by_one() -> None:
    fused, loop = twins(images)
    plan = BatchPlan.constant(2, 12)
    engine = engine_on(FusedEngine, fused, plan)
    engine.loss = small = Small(fits=6)
    train(engine, steps=2)
    assert small.sizes == [12, 6, 6, 6, 6]
    train(engine_on(LoopEngine, loop, plan), steps=2)
    assert_same_state(fused, loop)


def test_samples_fetched_ahead_for_a_chunk_that_no_longer_fits_are_fetched_again() -> None:
    fused, loop = twins(images)
    plan = BatchPlan.constant(4, 24)
    engine = engine_on(FusedEngine, fused, plan)
    assert isinstance(engine, FusedEngine)
    engine.prefetches = True
    small = Small(fits=24)

    def fills_up(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = small(model, x, y)
        small.fits = 12  # from the second step on
        return loss

    engine.loss = fills_up
    train(engine, steps=3)
    assert small.sizes == [24, 24, 12, 12, 12, 12]
    train(engine_on(LoopEngine, loop, plan), steps=3)
    assert_same_state(fused, loop)


def test_a_workers_batch_that_does_not_fit_is_an_error_that_says_what_to_do() -> None:
    engine = engine_on(FusedEngine, images(), BatchPlan.constant(4, 24))
    engine.loss = Small(fits=5)
    with pytest.raises(ConfigError, match=r"one worker's 6 samples do not fit .* smaller local batch or micro-batch"):
        train(engine, steps=1)
    engine = engine_on(FusedEngine, images(), BatchPlan.constant(4, 24), batch_norm="sync")
    engine.loss = Small(fits=5)
    with pytest.raises(ConfigError, match=r"the whole step, which synchronised batch norm needs, 24 samples"):
        train(engine, steps=1)


def test_dropout_depends_on_the_position_only() -> None:
    gradients = []
    for _ in range(2):
        torch.rand(100 + len(gradients))  # a run with another history has drawn other numbers
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        torch.rand(100 * len(gradients))
        engine = engine_on(FusedEngine, model, BatchPlan.constant(4, 24))
        engine.gradients(Ledger(samples=SAMPLES, epoch=2, position=12).assign(24), engine.participants(0))
        gradients.append(model[1].weight.grad)
    assert torch.equal(*gradients)


def test_half_precision_is_close_to_the_reference() -> None:
    full, half = twins(images)
    train(engine_on(LoopEngine, full, BatchPlan.constant(4, 24)), steps=10)
    train(engine_on(FusedEngine, half, BatchPlan.constant(4, 24), precision="bf16", needs=("moments",)), steps=10)
    for ours, theirs in zip(half.parameters(), full.parameters(), strict=True):
        assert (ours - theirs).norm() < 0.05 * theirs.norm() + 1e-2


def test_fp16_finds_a_loss_scale_and_repeats_the_step_that_was_too_large() -> None:
    full, half = twins(no_norm)
    train(engine_on(LoopEngine, full, BatchPlan.constant(4, 24)), steps=10)
    engine = engine_on(FusedEngine, half, BatchPlan.constant(4, 24), precision="fp16", needs=("moments",))
    assert isinstance(engine, FusedEngine)
    engine._scale = 2.0**40  # far too large: halved until the gradients are finite, and no step is lost
    seen = train(engine, steps=10)
    assert 1 <= engine._scale < 2.0**30
    assert all(math.isfinite(g.loss) and g.measurement is not None and g.measurement.finite for g in seen)
    for ours, theirs in zip(half.parameters(), full.parameters(), strict=True):
        assert (ours - theirs).norm() < 0.02 * theirs.norm() + 1e-2


def test_a_nan_is_not_taken_for_a_loss_scale_that_is_too_large() -> None:
    model = no_norm()
    nn.init.constant_(model[1].weight, math.nan)
    engine = engine_on(FusedEngine, model, BatchPlan.constant(4, 24), precision="fp16")
    assert math.isnan(train(engine, steps=1)[0].loss)


class Activated(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


def patched() -> nn.Module:
    """A layer that was given another forward pass, as wrappers do it."""
    layer = nn.BatchNorm2d(3)
    layer.forward = lambda input: type(layer).forward(layer, input).relu()  # type: ignore[method-assign]
    return nn.Sequential(layer)


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (patched, {}, "layer 0 is a BatchNorm2d, a batch norm with a forward of its own: .* use the loop"),
        (no_norm, {"batch_norm": "globall"}, "batch_norm is 'globall'; .*local"),
        (no_norm, {"precision": "fp8"}, "precision is 'fp8'"),
        (
            images,
            {"batch_norm": "sync", "needs": ("moments",)},
            "synchronised batch norm computes a step in one micro-batch",
        ),
        (odd_norms, {"batch_norm": "frozen"}, "keeps no running statistics"),
        (lambda: nn.Sequential(Activated(3)), {}, "layer 0 is a Activated, .* use the loop"),
    ],
)
def test_what_cannot_be_fused_is_refused(model: Callable[[], nn.Module], settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_on(FusedEngine, model(), **settings)


class Rows(nn.Module):
    """Batch norm over several rows of each sample, here the rows of a picture: in the samples' order, or not."""

    def __init__(self, *, by_time: bool = False, words: bool = False) -> None:
        super().__init__()
        self.by_time = by_time
        self.embed = nn.Embedding(4, 3) if words else None
        self.first, self.second = nn.BatchNorm1d(12), nn.BatchNorm1d(12)
        self.out = nn.Linear(48, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            rows = self.embed((x.flatten(1)[:, :16] > 0).long()).view(len(x), 4, 12)
        else:
            x.mul_(0.5)  # in place, as some models normalise
            rows = x.view(len(x), 4, 12)
        if self.by_time:
            rows = rows.transpose(0, 1)
        normed = self.second(self.first(rows.flatten(0, 1))).view(*rows.shape[:2], 12)
        out: torch.Tensor = self.out((normed.transpose(0, 1) if self.by_time else normed).flatten(1))
        return out


def test_rows_of_a_sample_that_follow_each_other_are_fused() -> None:
    model = Rows().double()
    other = copy.deepcopy(model)
    for kind, each in ((LoopEngine, model), (FusedEngine, other)):
        train(engine_on(kind, each, BatchPlan.constant(4, 24)), steps=3)
    assert_same_state(model, other)


@pytest.mark.parametrize("settings", [{"by_time": True}, {"words": True}], ids=["by-time", "not-to-be-seen"])
def test_rows_that_may_be_another_worker_s_are_refused(settings: dict[str, bool]) -> None:
    engine = engine_on(FusedEngine, Rows(**settings), BatchPlan.constant(4, 24))
    with pytest.raises(ConfigError, match=r"a BatchNorm1d got 96 rows of 4 workers .* in another order .* the loop"):
        train(engine, steps=1)


def test_a_model_that_drops_samples_before_batch_norm_is_refused() -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept: torch.Tensor = self.norm(x[1:].flatten(1))
            return kept

    engine = engine_on(FusedEngine, Drops(), BatchPlan.constant(4, 24))
    with pytest.raises(ConfigError, match=r"a BatchNorm1d got 23 rows of 4 workers .* use the loop"):
        train(engine, steps=1)


def test_a_run_takes_the_engine_it_asks_for(tmp_path: Path) -> None:
    """By default the fused one, on a CPU too; and both end at the same loss."""
    ends = {}
    for engine in ("auto", "loop", "fused"):
        config = RunConfig(workload="digits-mlp(width=8)", engine=engine, epochs=1, seed=3, rule="linear")
        run = training.train(config, tmp_path / engine)
        ends[engine] = (run.header.config["emulation"]["engine"], run.validations[-1].metrics["loss"])
    assert [name for name, _ in ends.values()] == ["FusedEngine", "LoopEngine", "FusedEngine"]
    assert ends["auto"] == ends["fused"]
    assert ends["auto"][1] == pytest.approx(ends["loop"][1], rel=1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "loops"}, "engine is 'loops'; did you mean 'loop'"),
        ({"precision": "fp8"}, "precision is 'fp8'"),
        ({"fused_batch": 0}, "fused_batch is 0; expected a number above 0"),
        (
            {"engine": "loop", "fused_batch": 64},
            "fused_batch is a setting of the fused engine, but this run uses the loop",
        ),
        ({"engine": "loop", "precision": "fp16"}, "precision is 'fp16'"),
        ({"rule": "adascale", "batch_norm": "sync"}, "synchronised batch norm computes a step in one micro-batch"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        training.train(RunConfig(**{"workload": "digits-mlp", "epochs": 1} | settings), tmp_path / "run")


# Looking ahead -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [False, True])
def test_samples_that_were_fetched_ahead_are_those_that_would_have_been(
    lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawing(members: Callable[[int], StepSize]) -> Callable[[int], StepSize]:
        """Somebody else draws random numbers between two steps."""

        def after_a_draw(step: int) -> StepSize:
            torch.rand(3)
            return members(step)

        return after_a_draw

    def noisy() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(48, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))

    runs = []
    for prefetches in (False, True):
        model, _ = twins(noisy)
        faults = Faults().lose(worker=1, step=5).rejoin(worker=1, step=9) if lost else None
        engine = engine_on(FusedEngine, model, fused_batch=13, faults=faults)
        assert isinstance(engine, FusedEngine)
        engine.prefetches = prefetches
        monkeypatch.setattr(engine, "participants", drawing(engine.participants))
        fetch, fetched = engine.fetch, []

        def augmented(indices: Any, fetch: Any = fetch, fetched: Any = fetched) -> tuple[torch.Tensor, torch.Tensor]:
            fetched.append(len(indices))
            x, y = fetch(indices)
            return x + 0.1 * torch.randn_like(x), y

        engine.fetch = augmented
        losses = [g.loss for g in train(engine)]
        runs.append((losses, model.state_dict(), sum(fetched)))
    assert runs[0][0] == runs[1][0]
    torch.testing.assert_close(runs[0][1], runs[1][1], rtol=0, atol=0)
    spare = runs[1][2] - runs[0][2]  # what was fetched for steps that did not come
    assert spare < (100 if lost else 20), "looking ahead fetches what is needed, not twice as much"


def test_more_chunks_are_made_where_most_groups_are_together() -> None:
    # 4 groups of 8 and 3 of 7; for four chunks first the 4 are halved, then the 3, not the 4 again.
    assert cut_into_passes([8] * 4 + [7] * 3, samples=1000, at_least=4) == [
        PassShape(2, 8),
        PassShape(2, 8),
        PassShape(2, 7),
        PassShape(1, 7),
    ]


def test_the_usual_chunk_is_the_one_that_holds_most_samples_of_the_plan() -> None:
    # 2 steps of 3 workers of 6, then 10 of 5 workers in chunks of at most 13 samples: 2 + 2 + 1 groups.
    plan = BatchPlan.from_trace(Trace.parse("0s:3 2s:5 12s"), Follow(6), "1s")
    engine = engine_on(FusedEngine, twins(flat)[0], plan, fused_batch=13)
    assert isinstance(engine, FusedEngine)
    assert engine._usual_shape() == PassShape(count=2, size=6)
    # 10 chunks of one worker, 60 samples, and 8 of two workers, 96 samples.
    plan_of_small = BatchPlan.from_trace(Trace.parse("0s:1 10s:4 14s"), Follow(6), "1s")
    engine = engine_on(FusedEngine, twins(flat)[0], plan_of_small, fused_batch=13)
    assert isinstance(engine, FusedEngine)
    assert engine._usual_shape() == PassShape(count=2, size=6)
    whole = engine_on(FusedEngine, twins(flat)[0], plan, batch_norm="sync")
    assert isinstance(whole, FusedEngine)
    assert whole._usual_shape() == PassShape(count=1, size=30)


@pytest.mark.parametrize(("grows", "usual"), [(False, (4, 6)), (True, (2, 6))])
def test_of_a_growing_policy_the_first_pass_is_the_usual_one(grows: bool, usual: tuple[int, int]) -> None:
    """The plan has the whole fleet of 4 workers; the policy requests 12 samples at first."""
    plan = BatchPlan.from_trace(Trace.parse("0s:4 10s"), Follow(6), "1s")
    engine = engine_on(FusedEngine, twins(flat)[0], plan, compile=True)
    assert isinstance(engine, FusedEngine) and engine._compiled is not None
    if grows:
        engine.request(12)
    size = allow(engine.participants(0), 12)
    engine.gradients(Ledger(samples=SAMPLES).assign(size.samples), size)  # the first pass is not compiled: it checks
    engine.request(24)
    assert engine._compiled._usual == usual and not engine._first_is_usual
