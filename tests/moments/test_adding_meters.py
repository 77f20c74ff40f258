"""FusedMeter and FlatMeter, which add up the micro-batches themselves: one for GPUs, one for small models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ebbflow.errors import ConfigError
from ebbflow.moments.estimate import Measurement
from ebbflow.moments.meters import FlatMeter, FusedMeter, HookMeter
from moments.test_meters import make_micro_batches, make_model, run_step, truth

KINDS = pytest.mark.parametrize("kind", [FusedMeter, FlatMeter])
Kind = type[FusedMeter] | type[FlatMeter]


@KINDS
def test_it_leaves_the_gradient_that_autograd_would_have_left(kind: Kind) -> None:
    gradients = []
    for each in (HookMeter, kind):
        model = make_model()
        meter = each(model.parameters(), layers=False)
        for step in range(2):
            meter.discard()
            run_step(model, meter, make_micro_batches(step))
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1])


@KINDS
def test_several_backward_passes_may_make_one_micro_batch(kind: Kind) -> None:
    w = nn.Parameter(torch.tensor([1.0]))
    sums = kind([w])
    (2 * w).sum().backward()
    (3 * w).sum().backward()
    sums.close_micro_batch(1)
    assert w.grad is None
    w.sum().backward()
    sums.close_micro_batch(1)  # 5 and 1: A = (25 + 1)/2 = 13; their sum, twice the mean, is 6: N = 9
    assert sums.finish(2, scale=2.0) == Measurement(batch=2, micro_batches=2, mean_sq=(13.0,), sq_mean=(9.0,))
    assert w.grad == torch.tensor([6.0])


@KINDS
def test_a_discarded_step_is_forgotten(kind: Kind) -> None:
    model = make_model()
    sums = kind(model.parameters(), layers=True)
    run_step(model, sums, make_micro_batches(9))
    sums.discard()
    assert run_step(model, sums, make_micro_batches()).mean_sq == pytest.approx(
        truth(model, make_micro_batches())[0], rel=1e-6
    )
    model.zero_grad()
    with pytest.raises(ConfigError, match="no gradient arrived"):
        sums.close_micro_batch(1)


@KINDS
def test_a_scale_is_taken_out_of_the_micro_batches(kind: Kind) -> None:
    # Micro-batches of 1 and 3 samples with gradients 2 and 1, weighted 1/4 and 3/4, in a loss scaled by 8.
    w = nn.Parameter(torch.tensor([1.0]))
    sums = kind([w])
    for samples, slope in ((1, 2.0), (3, 1.0)):
        (8 * samples / 4 * slope * w).sum().backward()
        sums.close_micro_batch(samples, scale=8 * samples / 4)
    sums.put_back()
    assert w.grad is not None
    w.grad.div_(8)
    # A = (1*4 + 3*1)/4 = 1.75; the mean gradient is 1.25, its square 1.5625.
    assert sums.finish(4) == Measurement(batch=4, micro_batches=2, mean_sq=(1.75,), sq_mean=(1.5625,))


@pytest.mark.parametrize("kind", [HookMeter, FusedMeter, FlatMeter])
def test_a_step_whose_sums_were_taken_can_be_resumed_or_is_over(kind: type[HookMeter] | Kind) -> None:
    # Micro-batches of 1, 3 and 4 samples with gradients 2, 1 and 3, each weighted with its part of all 8 samples.
    w = nn.Parameter(torch.tensor([1.0]))
    meter = kind([w])

    def micro_batch(samples: int, slope: float) -> None:
        (samples / 8 * slope * w).sum().backward()
        meter.close_micro_batch(samples, scale=samples / 8)

    micro_batch(1, 2.0)
    micro_batch(3, 1.0)
    taken = meter.take(scale=4 / 8)
    assert (taken.samples, taken.micro_batches, taken.squares.tolist()) == (4, 2, [1 * 4 + 3 * 1])
    assert w.grad == torch.tensor([5 / 8])
    meter.resume()
    micro_batch(4, 3.0)
    taken = meter.take(scale=8 / 8)
    assert (taken.samples, taken.micro_batches, taken.squares.tolist()) == (8, 3, [1 * 4 + 3 * 1 + 4 * 9])
    assert w.grad == torch.tensor([(1 * 2 + 3 * 1 + 4 * 3) / 8])
    meter.check(float(taken.mismatch))
    w.grad = None
    meter.discard()
    micro_batch(2, 1.0)
    assert meter.take().samples == 2


def test_a_hook_meter_whose_sums_were_taken_begins_the_next_step_by_itself() -> None:
    w = nn.Parameter(torch.tensor([1.0]))
    meter = HookMeter([w])
    for samples in (2, 3):
        w.sum().backward()
        meter.close_micro_batch(samples)
        assert meter.take().samples == samples


@KINDS
def test_parameters_without_a_gradient_stay_without_one(kind: Kind) -> None:
    used, unused = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(1))
    sums = kind([used, unused], layers=True)
    used.sum().backward()
    sums.close_micro_batch(2)
    assert sums.finish(2) == Measurement(batch=2, micro_batches=1, mean_sq=(4.0, 0.0), sq_mean=(4.0, 0.0))
    assert unused.grad is None


@KINDS
def test_sparse_and_dense_gradients_are_measured_alike(kind: Kind) -> None:
    measured = []
    for each in (HookMeter, kind):
        torch.manual_seed(0)
        table, rare = nn.Embedding(5, 2, sparse=True), nn.Parameter(torch.ones(1))
        meter = each([table.weight, rare], layers=True)
        for rows, factor in (([1, 1, 3], 0.0), ([3, 0], 1.0)):
            loss = table(torch.tensor(rows)).square().sum() / 5
            (loss + rare.sum() if factor else loss).backward()
            meter.close_micro_batch(len(rows), scale=len(rows) / 5)
        measured.append(meter.finish(5))
    assert measured[0].mean_sq == pytest.approx(measured[1].mean_sq, rel=1e-6)
    assert measured[0].sq_mean == pytest.approx(measured[1].sq_mean, rel=1e-6)


def test_without_measuring_it_only_adds_up() -> None:
    model, reference = make_model(), make_model()
    sums = FusedMeter(model.parameters(), measured=False)
    for x, y in make_micro_batches():
        nn.functional.cross_entropy(model(x), y).backward()
        sums.close_micro_batch(len(x))
        nn.functional.cross_entropy(reference(x), y).backward()
    sums.put_back()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])


@KINDS
def test_a_step_of_another_size_than_its_micro_batches_is_refused(kind: Kind) -> None:
    w = nn.Parameter(torch.tensor([1.0]))
    sums = kind([w])
    w.sum().backward()
    sums.close_micro_batch(3)
    with pytest.raises(ConfigError, match=r"a step of 4 samples .* micro-batches have 3"):
        sums.finish(4)


def test_flat_sums_are_for_small_models_of_one_type_on_a_cpu() -> None:
    assert FlatMeter.suits(make_model().parameters())
    assert not FlatMeter.suits(make_model().bfloat16().parameters())
    assert not FlatMeter.suits([*make_model().parameters(), *make_model().double().parameters()])
    assert not FlatMeter.suits(nn.Linear(1000, 1000).parameters())
    assert not FlatMeter.suits([])


@pytest.mark.parametrize("kind", [HookMeter, FusedMeter, FlatMeter])
def test_one_that_is_off_leaves_the_gradients_to_autograd_and_goes_on_as_if_nothing_had_been(
    kind: type[HookMeter] | Kind,
) -> None:
    plain, model = make_model(), make_model()
    meter = kind(model.parameters(), layers=True)
    run_step(model, meter, make_micro_batches(1))
    for on in (False, True):
        meter.on = on
        meter.discard()
        for net in (plain, model):
            net.zero_grad()
            for x, y in make_micro_batches(2):
                nn.functional.cross_entropy(net(x), y, reduction="sum").backward()
                if net is model:
                    meter.close_micro_batch(len(x), scale=len(x))
        if on:
            batch = sum(len(x) for x, _ in make_micro_batches(2))
            measured = meter.finish(batch, scale=batch)
            assert measured.mean_sq == pytest.approx(truth(model, make_micro_batches(2))[0], rel=1e-5)
        assert all(torch.allclose(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
