from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ebbflow.errors import ConfigError
from ebbflow.moments.estimate import Averages, Measurement
from ebbflow.moments.meters import FlatMeter, FusedMeter, HookMeter, Meter, squared_norms

SIZES = (5, 3, 4)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def make_micro_batches(step: int = 0, sizes: Sequence[int] = SIZES) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [
        (torch.randn(n, 6, generator=generator), torch.randint(3, (n,), generator=generator)) for n in sizes
    ]  # fmt: skip


def truth(model: nn.Module, micro_batches: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[list[float], list[float]]:
    """A and N of each parameter, from one separate backward pass per micro-batch."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    batch = sum(len(x) for x, _ in micro_batches)
    gradients = [torch.autograd.grad(F.cross_entropy(model(x), y), parameters) for x, y in micro_batches]
    weights = [len(x) / batch for x, _ in micro_batches]
    a, n = [], []
    for column in zip(*gradients, strict=True):
        a.append(sum(w * g.double().square().sum().item() for w, g in zip(weights, column, strict=True)))
        n.append(sum(w * g.double() for w, g in zip(weights, column, strict=True)).square().sum().item())
    return a, n


def run_step(model: nn.Module, meter: Meter, micro_batches: list[tuple[torch.Tensor, torch.Tensor]]) -> Measurement:
    """Accumulate the sample-weighted mean, as engines do."""
    model.zero_grad()
    batch = sum(len(x) for x, _ in micro_batches)
    for x, y in micro_batches:
        (F.cross_entropy(model(x), y) * len(x) / batch).backward()
        meter.close_micro_batch(len(x), scale=len(x) / batch)
    return meter.finish(batch)


@pytest.mark.parametrize("kind", [HookMeter, FusedMeter, FlatMeter])
@pytest.mark.parametrize("layers", [False, True])
def test_it_measures_what_separate_backward_passes_find(layers: bool, kind: Any) -> None:
    model = make_model()
    meter = kind(model.parameters(), layers=layers)
    a, n = truth(model, make_micro_batches())
    measured = run_step(model, meter, make_micro_batches())
    assert (measured.batch, measured.micro_batches) == (12, 3)
    assert measured.mean_sq == pytest.approx(a if layers else [sum(a)], rel=1e-6)
    assert measured.sq_mean == pytest.approx(n if layers else [sum(n)], rel=1e-6)


def test_no_step_remembers_the_one_before() -> None:
    """Code that takes a micro-batch as the difference to the last sum, and keeps that sum, reads 7.98 where 3.76 is
    true."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    meter = HookMeter(model.parameters(), layers=False)
    for step in range(4):
        micro_batches = make_micro_batches(step, sizes=(4, 2, 7, 1)[: 2 + step % 3])
        a, n = truth(model, micro_batches)
        measured = run_step(model, meter, micro_batches)
        assert measured.mean_sq == pytest.approx([sum(a)], rel=1e-6)
        assert measured.sq_mean == pytest.approx([sum(n)], rel=1e-6)
        optimizer.step()


def test_micro_batches_may_be_weighted_afterwards() -> None:
    """As in a user's own loop: each loss is the mean over its micro-batch, the sum is brought to the mean at the
    end."""
    model = make_model()
    meter = HookMeter(model.parameters(), layers=False)
    a, n = truth(model, make_micro_batches(sizes=(4, 4)))
    for x, y in make_micro_batches(sizes=(4, 4)):
        F.cross_entropy(model(x), y).backward()
        meter.close_micro_batch(4)
    measured = meter.finish(8, scale=2.0)  # .grad holds the sum of two means
    assert (measured.mean_sq[0], measured.sq_mean[0]) == pytest.approx((sum(a), sum(n)), rel=1e-6)


def test_a_shared_parameter_counts_once_with_its_whole_gradient() -> None:
    w = nn.Parameter(torch.tensor([2.0]))
    meter = HookMeter([w], layers=False)
    for factor in (1.0, 3.0):  # d/dw (w f + 4 w) = f + 4: 5 and 7
        ((w * factor + w * 4).sum() / 2).backward()
        meter.close_micro_batch(1, scale=0.5)
    assert meter.finish(2) == Measurement(batch=2, micro_batches=2, mean_sq=(37.0,), sq_mean=(36.0,))


def test_frozen_parameters_count_as_zero_until_they_are_unfrozen() -> None:
    model = make_model()
    model[0].requires_grad_(False)
    meter = HookMeter(model.parameters(), layers=True)
    assert not model[0].weight.requires_grad
    a, _ = truth(model, make_micro_batches())
    assert run_step(model, meter, make_micro_batches()).mean_sq == pytest.approx([0.0, 0.0, *a], rel=1e-6)
    model[0].requires_grad_(True)
    a, _ = truth(model, make_micro_batches())
    assert run_step(model, meter, make_micro_batches()).mean_sq == pytest.approx(a, rel=1e-6)
    model[2].requires_grad_(False)
    assert run_step(model, meter, make_micro_batches()).mean_sq == pytest.approx([*a[:2], 0.0, 0.0], rel=1e-6)


def test_a_parameter_without_a_gradient_in_some_micro_batches_counts_as_zero_there() -> None:
    used, rare = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    meter = HookMeter([used, rare], layers=True)
    (used.sum() * 3 / 2).backward()
    meter.close_micro_batch(1, scale=0.5)
    ((used.sum() + rare.sum() * 4) / 2).backward()
    meter.close_micro_batch(1, scale=0.5)
    # used: 3 and 1: A = 5, N = 4; rare: 0 and 4: A = 8, N = 4
    assert meter.finish(2) == Measurement(batch=2, micro_batches=2, mean_sq=(5.0, 8.0), sq_mean=(4.0, 4.0))
    used.grad = rare.grad = None
    used.sum().backward()
    meter.close_micro_batch(1)
    assert meter.finish(1).sq_mean == (1.0, 0.0)


def test_sparse_gradients_equal_dense_ones() -> None:
    measured = []
    for sparse in (False, True):
        torch.manual_seed(0)
        table = nn.Embedding(5, 2, sparse=sparse)
        head = nn.Linear(2, 3)
        meter = HookMeter([*table.parameters(), *head.parameters()], layers=True)
        for rows in ([1, 1, 3], [3, 0]):
            (head(table(torch.tensor(rows))).square().sum() / 5).backward()
            meter.close_micro_batch(len(rows), scale=len(rows) / 5)
        measured.append(meter.finish(5))
    assert measured[0].mean_sq == pytest.approx(measured[1].mean_sq, rel=1e-6)
    assert measured[0].sq_mean == pytest.approx(measured[1].sq_mean, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_precisions_are_summed_in_float32_at_least(dtype: torch.dtype) -> None:
    # 4,096 gradients of 1 and then 3: a sum in bfloat16 would stop growing at 256.
    w = nn.Parameter(torch.zeros(4096, dtype=dtype))
    meter = HookMeter([w], layers=False)
    for factor in (1.0, 3.0):
        (w * factor).sum().backward()
        meter.close_micro_batch(1)
    measured = meter.finish(2, scale=2.0)
    assert measured == Measurement(batch=2, micro_batches=2, mean_sq=(4096 * 5.0,), sq_mean=(4096 * 4.0,))


@pytest.mark.parametrize("count", [(1 << 17) + 1, 1 << 20, 3_000_001])
def test_large_tensors_are_summed_accurately_with_every_kernel(count: int) -> None:
    """Each row of 2^14 numbers is summed in float32, whose rounding errors are below 2^14/8 * 6e-8 = 1.2e-4 at the very
    worst and about 1e-7 in practice: a kernel adds at least eight partial sums, and the errors of the rows cancel."""
    generator = torch.Generator().manual_seed(0)
    gradient = torch.rand(count, generator=generator)
    exact = gradient.double().square().sum().item()
    assert squared_norms([gradient]).item() == pytest.approx(exact, rel=2e-6)


def test_gradients_that_do_not_lie_flat_in_memory_are_measured() -> None:
    w = nn.Parameter(torch.ones(3, 4))
    meter = HookMeter([w], layers=False)
    w.t()[:2].sum().backward()  # the transpose of a part
    meter.close_micro_batch(1)
    assert meter.finish(1).mean_sq == pytest.approx((6.0,), rel=1e-6)
    w.grad = None
    w.sum().backward()  # one number, expanded
    meter.close_micro_batch(1)
    assert meter.finish(1).mean_sq == pytest.approx((12.0,), rel=1e-6)


def test_a_graph_of_the_gradient_is_left_alone() -> None:
    w = nn.Parameter(torch.tensor([3.0, 1.0, 2.0]))
    meter = HookMeter([w], layers=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the cycle that create_graph makes
        w.pow(3).sum().backward(create_graph=True)
    meter.close_micro_batch(1)
    assert w.grad is not None
    assert w.grad.requires_grad
    measured = meter.finish(1)  # 3 w^2 = 27, 3, 12
    assert measured.mean_sq == measured.sq_mean == pytest.approx((27.0**2 + 9 + 144,), rel=1e-6)
    w.grad = None


def test_gradients_that_are_not_accumulated_are_not_measured() -> None:
    """A gradient penalty takes gradients of the parameters by autograd.grad, within the same micro-batch."""
    w = nn.Parameter(torch.tensor([3.0]))
    meter = HookMeter([w], layers=False)
    (first,) = torch.autograd.grad(w.square().sum(), w, create_graph=True)  # 2w
    (w.sum() + first.square().sum()).backward()  # w + 4 w^2: 1 + 8 w = 25
    meter.close_micro_batch(1)
    assert meter.finish(1).mean_sq == (625.0,)


def test_the_users_own_hooks_come_first() -> None:
    w = nn.Parameter(torch.tensor([3.0]))
    meter = HookMeter([w], layers=False)
    w.register_hook(lambda gradient: gradient.clamp(max=2.0))  # type: ignore[no-untyped-call]
    (5 * w).sum().backward()
    meter.close_micro_batch(1)
    assert meter.finish(1).mean_sq == (4.0,)


def test_a_second_backward_within_a_micro_batch_is_refused() -> None:
    model = make_model()
    meter = HookMeter(model.parameters(), layers=False)
    (x, y), *_ = make_micro_batches()
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(ConfigError, match=r"shape \(.*\) got a second gradient within one micro-batch"):
        F.cross_entropy(model(x), y).backward()
    meter.discard()
    assert run_step(model, meter, make_micro_batches()).micro_batches == 3


# Loss scaling and steps that do not count --------------------------------------------------------------------------


def test_under_a_grad_scaler_norms_are_unscaled_and_a_skipped_step_leaves_no_trace() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    meter = HookMeter(model.parameters(), layers=False)
    averages = Averages()
    for step, overflow in enumerate((False, True, False)):
        micro_batches = make_micro_batches(step)
        a, n = truth(model, micro_batches)
        before = averages
        factor = scaler.get_scale()
        for x, y in micro_batches:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
                loss = F.cross_entropy(model(x), y) * len(x) / 12
            scaler.scale(loss * (float("inf") if overflow else 1.0)).backward()
            meter.close_micro_batch(len(x), scale=factor * len(x) / 12)
        measured = meter.finish(12, scale=factor)
        averages = averages.updated(measured, memory=100)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert measured.finite is not overflow
        if overflow:
            assert averages is before
            assert scaler.get_scale() < factor, "the step was skipped"
        else:
            assert (measured.mean_sq[0], measured.sq_mean[0]) == pytest.approx((sum(a), sum(n)), rel=1e-5)


def test_after_unscale_the_mean_has_another_scale_than_the_micro_batches() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    meter = HookMeter(model.parameters(), layers=False)
    a, n = truth(model, make_micro_batches())
    for x, y in make_micro_batches():
        scaler.scale(F.cross_entropy(model(x), y) * len(x) / 12).backward()
        meter.close_micro_batch(len(x), scale=256.0 * len(x) / 12)
    scaler.unscale_(optimizer)
    measured = meter.finish(12)
    assert (measured.mean_sq[0], measured.sq_mean[0]) == pytest.approx((sum(a), sum(n)), rel=1e-5)


def test_autocast_in_bfloat16_is_close_to_float32() -> None:
    model = make_model()
    meter = HookMeter(model.parameters(), layers=False)
    a, n = truth(model, make_micro_batches())
    for x, y in make_micro_batches():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y) * len(x) / 12
        loss.backward()
        meter.close_micro_batch(len(x), scale=len(x) / 12)
    measured = meter.finish(12)
    assert (measured.mean_sq[0], measured.sq_mean[0]) == pytest.approx((sum(a), sum(n)), rel=0.03)


def test_a_discarded_step_leaves_no_trace() -> None:
    model = make_model()
    meter = HookMeter(model.parameters(), layers=True)
    (x, y), *_ = make_micro_batches(1)
    F.cross_entropy(model(x), y).backward()
    meter.close_micro_batch(len(x))
    F.cross_entropy(model(x), y).backward()  # and a worker dies within the next micro-batch
    meter.discard()
    assert run_step(model, meter, make_micro_batches()).mean_sq == pytest.approx(
        truth(model, make_micro_batches())[0], rel=1e-6
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_gradient_is_reported_and_not_hidden(bad: float) -> None:
    model = make_model()
    meter = HookMeter(model.parameters(), layers=True)
    micro_batches = make_micro_batches()
    micro_batches[1][0][0, 0] = bad
    assert not run_step(model, meter, micro_batches).finite
    assert run_step(model, meter, make_micro_batches()).finite


# .grad must be the mean of the micro-batches
# ------------------------------------------------------------------------------


def accumulate(model: nn.Module, meter: HookMeter) -> None:
    for x, y in make_micro_batches():
        (F.cross_entropy(model(x), y) * len(x) / 12).backward()
        meter.close_micro_batch(len(x), scale=len(x) / 12)


def test_gradients_clipped_before_they_are_measured_are_refused() -> None:
    model = make_model()
    meter = HookMeter(model.parameters(), layers=False)
    accumulate(model, meter)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
    with pytest.raises(ConfigError, match="Clip gradients after they are measured"):
        meter.finish(12)


def test_clipping_that_does_not_bind_is_no_error() -> None:
    model = make_model()
    meter = HookMeter(model.parameters(), layers=False)
    accumulate(model, meter)
    nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    assert meter.finish(12).sq_mean == pytest.approx([sum(truth(model, make_micro_batches())[1])], rel=1e-6)


@pytest.mark.parametrize("fast", ["foreach", "fused"])
def test_clipping_inside_the_optimizers_step_comes_after_the_measurement(fast: str) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, **{fast: True})  # type: ignore[arg-type]
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 1e-2) and None)
    meter = HookMeter(model.parameters(), layers=False)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    a, n = truth(model, make_micro_batches())
    accumulate(model, meter)
    measured = meter.finish(12)
    optimizer.step()
    assert (measured.mean_sq[0], measured.sq_mean[0]) == pytest.approx((sum(a), sum(n)), rel=1e-6)
    moved = nn.utils.parameters_to_vector(model.parameters()) - before
    assert moved.norm().item() == pytest.approx(1e-2, rel=1e-3)


def test_gradients_left_over_from_an_earlier_step_are_refused() -> None:
    model = make_model()
    meter = HookMeter(model.parameters(), layers=False)
    accumulate(model, meter)
    meter.finish(12)
    accumulate(model, meter)  # zero_grad forgotten
    with pytest.raises(ConfigError, match="clear them between steps"):
        meter.finish(12)


def test_a_wrong_scale_is_refused() -> None:
    model = make_model()
    meter = HookMeter(model.parameters(), layers=False)
    accumulate(model, meter)
    with pytest.raises(ConfigError, match="give the factor"):
        meter.finish(12, scale=2.0)


def test_micro_batches_that_cancel_are_no_error() -> None:
    # Mean zero up to rounding: what is left of it is all error, and no reason to complain.
    w = nn.Parameter(torch.zeros(16))
    meter = HookMeter([w], layers=False)
    g = torch.randn(16, generator=torch.Generator().manual_seed(0))
    for factor in (0.1, 0.2, -0.3):
        (w * g * factor / 3).sum().backward()
        meter.close_micro_batch(1, scale=1 / 3)
    assert meter.finish(3).sq_mean[0] < 1e-12


# What cannot be measured -------------------------------------------------------------------------------------------


def test_complex_and_integer_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"parameter 1 of shape .* is of type torch\.complex64"):
        HookMeter([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.complex64))], layers=False)
    with pytest.raises(ConfigError, match=r"torch\.int64"):
        HookMeter([nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)], layers=False)


def test_impossible_parameters_are_refused() -> None:
    w = nn.Parameter(torch.ones(2))
    with pytest.raises(ConfigError, match="no parameters"):
        HookMeter([], layers=False)
    with pytest.raises(ConfigError, match="given twice"):
        HookMeter([w, w], layers=False)
    with pytest.raises(ConfigError, match="computed from others"):
        HookMeter([w * 2], layers=False)
    with pytest.raises(ConfigError, match="several devices"):
        HookMeter([w, nn.Parameter(torch.ones(2, device="meta"))], layers=False)
    with pytest.raises(ConfigError, match="parameter 1 has no shape yet"):
        HookMeter([w, nn.LazyLinear(3).weight], layers=False)


def test_a_micro_batch_without_a_gradient_and_a_step_with_other_samples_are_refused() -> None:
    model = make_model()
    meter = HookMeter(model.parameters(), layers=False)
    with pytest.raises(ConfigError, match="no gradient arrived"):
        meter.close_micro_batch(4)
    accumulate(model, meter)
    with pytest.raises(ConfigError, match="a step of 16 samples was finished, but its micro-batches have 12"):
        meter.finish(16)
    with pytest.raises(ConfigError, match="a micro-batch of 0 samples"):
        meter.close_micro_batch(0)


def test_a_model_cast_after_the_meter_was_made_is_noticed() -> None:
    model = make_model()
    meter = HookMeter(model.parameters(), layers=False)
    model.double()
    model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    with pytest.raises(ConfigError, match="moved to a device or cast"):
        meter.close_micro_batch(2)


def test_hooks_go_with_the_meter() -> None:
    model = make_model()
    meter = HookMeter(model.parameters(), layers=False)
    assert run_step(model, meter, make_micro_batches()).micro_batches == 3
    meter.close()
    forgotten = HookMeter(model.parameters(), layers=False)
    keeper = HookMeter(model.parameters(), layers=False)
    del forgotten
    gc.collect()
    for _ in range(
        2
    ):  # a meter that is still there would refuse the second micro-batch, since the first was not closed
        run_step(model, keeper, make_micro_batches())
    with pytest.raises(ConfigError, match="no gradient arrived"):
        meter.close_micro_batch(1)
