from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ebbflow.engines import allreduce
from ebbflow.engines.allreduce import AllReduce
from ebbflow.engines.process_group import PeerLost
from ebbflow.errors import ConfigError
from ebbflow.moments.meters import FlatMeter, FusedMeter, HookMeter
from engines.allreduce_rank import STEPS, train


@pytest.mark.process
@pytest.mark.parametrize("world", [1, 2, 3])
def test_any_number_of_ranks_agrees_with_one_process(world: int, tmp_path: Path) -> None:
    script = Path(__file__).with_name("allreduce_rank.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(world), tmp_path / "store", tmp_path / f"{rank}.pt"],
            env=environment,
        )
        for rank in range(world)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0] * world
    for layers in (False, True):
        reference = train(0, 1, layers=layers)
        for rank in range(world):
            result = torch.load(tmp_path / f"{rank}.pt")[layers]
            assert result["weights"] == pytest.approx(reference["weights"], rel=1e-6, abs=1e-7)
            for sizes, got, expected in zip(STEPS, result["measured"], reference["measured"], strict=True):
                assert (got["batch"], got["micro_batches"]) == (sum(sizes), len(sizes))
                assert len(got["mean_sq"]) == (4 if layers else 1)
                for key in ("mean_sq", "sq_mean"):
                    assert got[key] == pytest.approx(expected[key], rel=1e-6, abs=1e-9), (rank, sizes, key)


def test_the_only_rank_measures_what_the_meter_alone_does() -> None:
    w = nn.Parameter(torch.zeros(2))
    meter = HookMeter([w], layers=False)
    combine = AllReduce([w], meter=meter)
    for x in (3.0, 1.0):  # A = (9 + 1)/2 * 2 numbers = 10, N = 4 * 2 = 8
        (w * x / 2).sum().backward()
        meter.close_micro_batch(1, scale=0.5)
    measured = combine(samples=2, batch=2)
    assert measured is not None
    assert (measured.mean_sq, measured.sq_mean, measured.micro_batches) == ((10.0,), (8.0,), 2)
    assert w.grad is not None
    assert w.grad.tolist() == [2.0, 2.0]


def test_without_a_meter_gradients_are_combined_and_nothing_is_measured() -> None:
    w, unused = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    combine = AllReduce([w, unused])
    w.sum().backward()
    assert combine(samples=2, batch=8) is None
    assert w.grad is not None
    assert w.grad.tolist() == [0.25, 0.25]
    assert unused.grad is None, "a zero would let weight decay and momentum move it"


def test_gradients_lie_in_memory_as_their_parameters_do() -> None:
    """Otherwise a GPU would copy and update the tensors one by one."""
    image = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    turned = nn.Parameter(torch.randn(5, 2).t())
    parameters = [image.weight, image.bias, turned]
    (image(torch.randn(2, 3, 8, 8)).square().mean() + turned.square().sum()).backward()
    expected = [parameter.grad.clone() for parameter in parameters]  # type: ignore[union-attr]
    rows: list[torch.Tensor] = []
    AllReduce(parameters, all_reduce=lambda buffer: rows.append(buffer.clone()))(samples=4, batch=8)
    AllReduce(parameters, all_reduce=lambda buffer: buffer.add_(rows[0]))(samples=4, batch=8)
    for parameter, whole in zip(parameters, expected, strict=True):
        assert parameter.grad is not None and parameter.grad.stride() == parameter.stride()
        torch.testing.assert_close(parameter.grad, whole * 3 / 4)  # the half of a half, and a half


@pytest.mark.parametrize("on", [True, False])
def test_the_norm_of_the_mean_gradient_is_found_in_a_step_that_is_not_measured(on: bool) -> None:
    w = nn.Parameter(torch.zeros(2))
    meter = FlatMeter([w])
    meter.on = on
    combine = AllReduce([w], meter=meter, fields={"numbers": 2, "more": 3}, host_fields=2, norm=True)
    combine["numbers"].copy_(torch.tensor([5.0, 7.0]))
    (w * torch.tensor([3.0, 4.0])).sum().backward()
    meter.close_micro_batch(4)
    measured = combine(samples=4, batch=4)
    assert combine.host_values == [5.0, 7.0]
    assert (measured.norm if measured is not None else combine.norm) == pytest.approx(5.0)
    assert (combine.norm is None) is on


def test_a_gradient_that_only_another_rank_has_arrives() -> None:
    w, theirs, unused = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    rows: list[torch.Tensor] = []
    other = AllReduce([w, theirs, unused], all_reduce=lambda buffer: rows.append(buffer.clone()))
    (w.sum() + 2 * theirs.sum()).backward()
    other(samples=2, batch=8)
    for parameter in (w, theirs):
        parameter.grad = None
    w.sum().backward()
    AllReduce([w, theirs, unused], all_reduce=lambda buffer: buffer.add_(rows[0]))(samples=6, batch=8)  # type: ignore[arg-type]
    assert w.grad is not None
    assert theirs.grad is not None
    assert w.grad.tolist() == [1.0, 1.0]  # 2/8 + 6/8
    assert theirs.grad.tolist() == [0.5, 0.5]  # 2 x 2/8
    assert unused.grad is None


def test_an_idle_rank_contributes_nothing_even_if_its_gradient_is_bad() -> None:
    w = nn.Parameter(torch.zeros(2))
    w.grad = torch.tensor([float("nan"), 1.0])
    gradient = torch.tensor([1.0, 2.0, 1.0])  # of the other rank, and that it has one
    AllReduce([w], all_reduce=lambda buffer: buffer.add_(gradient))(samples=0, batch=8)  # type: ignore[arg-type]
    assert w.grad.tolist() == [1.0, 2.0]


def test_half_precision_gradients_are_added_in_float32() -> None:
    w = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    meter = HookMeter([w], layers=False)
    combine = AllReduce([w], meter=meter)
    w.sum().backward()
    meter.close_micro_batch(4)
    measured = combine(samples=4, batch=4)
    assert measured is not None
    assert measured.sq_mean == (2.0,)
    assert w.grad is not None
    assert w.grad.dtype == torch.bfloat16


def test_gradients_kept_between_steps_are_still_right() -> None:
    """With set_to_none=False the next step accumulates into the buffer itself."""
    w = nn.Parameter(torch.zeros(2))
    combine = AllReduce([w])
    for step in range(3):
        (w * (step + 1)).sum().backward()
        combine(samples=1, batch=1)
        assert w.grad is not None
        assert w.grad.tolist() == [step + 1.0] * 2
        w.grad.zero_()


def test_a_change_between_pieces_and_reduction_is_refused() -> None:
    w = nn.Parameter(torch.zeros(9))
    meter = HookMeter([w], layers=False)
    combine = AllReduce([w], meter=meter)
    w.sum().backward()
    meter.close_micro_batch(1)
    nn.utils.clip_grad_norm_([w], 0.1)
    with pytest.raises(ConfigError, match="not the mean of the step's micro-batches"):
        combine(samples=1, batch=1)


def test_bad_input_is_refused() -> None:
    w, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    with pytest.raises(ConfigError, match="no parameters"):
        AllReduce([])
    with pytest.raises(ConfigError, match="complex parameters"):
        AllReduce([w, nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    with pytest.raises(ConfigError, match="other parameters"):
        AllReduce([w], meter=HookMeter([other], layers=False))
    with pytest.raises(ConfigError, match="9 of a step's 8 samples"):
        AllReduce([w])(samples=9, batch=8)
    meter = HookMeter([w], layers=False)
    w.sum().backward()
    meter.close_micro_batch(3)
    with pytest.raises(ConfigError, match="closed micro-batches of 3 samples, but says that it has 4"):
        AllReduce([w], meter=meter)(samples=4, batch=8)
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="sparse"):
        AllReduce(table.parameters())(samples=1, batch=1)


# Buckets --------------------------------------------------------------------------------------------------------------


class TwoEqualRanks:
    """A reduction that doubles what it gets, as if another rank had the same; it notes what began inside a pass."""

    def __init__(self) -> None:
        self.inside = False
        self.begun: list[tuple[bool, int]] = []

    def begin(self, part: torch.Tensor) -> Callable[[], None]:
        self.begun.append((self.inside, part.numel()))

        def wait() -> None:
            part.mul_(2)

        return wait

    def backward(self, loss: torch.Tensor) -> None:
        self.inside = True
        loss.backward()
        self.inside = False


METERS = [None, HookMeter, FlatMeter, FusedMeter]


@pytest.mark.parametrize("kind", METERS)
def test_buckets_are_sent_while_the_last_backward_pass_goes_on(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of 2 x 2 + 2 numbers: a bucket has at least 24 bytes, so that each layer is one."""
    monkeypatch.setattr(allreduce, "BUCKET_BYTES", 24)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    parameters, x = [*model.parameters()], torch.randn(6, 2)
    meter = kind(parameters, layers=False) if kind is not None else None
    ranks = TwoEqualRanks()
    combine = AllReduce(parameters, meter=meter, begin=ranks.begin)
    expected = torch.autograd.grad(model(x).square().sum(1).mean(), parameters)
    for step in range(3):
        model.zero_grad()
        if meter is not None:
            meter.discard()
        ranks.begun = []
        for start, stop in ((0, 4), (4, 6)):
            if stop == 6:
                combine.overlap()
            # Each rank has 6 of 12 samples, and each micro-batch is weighted with its part of all of them.
            ranks.backward(model(x[start:stop]).square().sum(1).sum() / 12)
            if meter is not None:
                meter.close_micro_batch(stop - start, (stop - start) / 12)
        measured = combine(samples=6, batch=12, scale=6 / 12)
        torch.testing.assert_close([parameter.grad for parameter in parameters], [*expected])
        assert measured is None or measured.micro_batches == 4
        # The first pass shows whether every parameter gets one gradient; the last bucket has the statistics, too.
        assert [inside for inside, _ in ranks.begun] == [step > 0] * 3 + [False]
        assert [numbers for _, numbers in ranks.begun[:3]] == [6, 6, 6]


def test_a_rank_without_samples_or_without_a_gradient_sends_the_same_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allreduce, "BUCKET_BYTES", 8)
    first, second, third = parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    ranks = TwoEqualRanks()
    combine = AllReduce(parameters, begin=ranks.begin)
    sent = []
    for step, used in enumerate(([*parameters], [first, third], [])):
        for parameter in parameters:
            parameter.grad = None
        ranks.begun = []
        if used:
            combine.overlap()
            ranks.backward(torch.stack([parameter.sum() for parameter in used]).sum() / 2)
        combine(samples=4 if used else 0, batch=8, scale=0.5)
        sent.append([numbers for _, numbers in ranks.begun])
        if step == 1:  # the bucket of the parameter without a gradient, and the one after it, wait for the end
            assert [inside for inside, _ in ranks.begun] == [True, False, False]
            assert first.grad is not None and first.grad.tolist() == [1.0, 1.0] and second.grad is None
    assert sent[0] == sent[1] == sent[2]


def test_a_parameter_with_several_gradients_in_one_pass_waits_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reentrant checkpointing of a shared layer: its gradient comes in two parts."""
    monkeypatch.setattr(allreduce, "BUCKET_BYTES", 8)
    shared, last = nn.Linear(2, 2), nn.Linear(2, 2)
    parameters = [*shared.parameters(), *last.parameters()]
    ranks = TwoEqualRanks()
    combine = AllReduce(parameters, begin=ranks.begin)
    x = torch.randn(4, 2, requires_grad=True)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = None
        combine.overlap()
        hidden = checkpoint(shared, checkpoint(shared, x, use_reentrant=True), use_reentrant=True)
        ranks.backward(last(hidden).sum() / 2)
        combine(samples=4, batch=8, scale=0.5)
    assert not any(inside for inside, _ in ranks.begun)
    expected = torch.autograd.grad(last(shared(shared(x))).sum(), parameters)
    torch.testing.assert_close([parameter.grad for parameter in parameters], [*expected])


def test_a_second_gradient_that_no_pass_before_had_counts_if_the_first_one_is_not_sent_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bucket of the second parameter waits for that of the third; then all but the first are sent."""
    monkeypatch.setattr(allreduce, "BUCKET_BYTES", 8)
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    ranks = TwoEqualRanks()
    combine = AllReduce(parameters, begin=ranks.begin)

    def find_gradients(numbers: list[int]) -> None:
        for parameter in parameters:
            parameter.grad = None
        ranks.begun = []
        combine.overlap()
        for number in numbers:
            ranks.backward(parameters[number].sum() / 2)

    for twice in (False, True):  # the first pass is watched
        find_gradients([1, 1, 2, 0] if twice else [2, 1, 0])
        combine(samples=4, batch=8, scale=0.5)
        assert [inside for inside, _ in ranks.begun] == [twice, twice, False]
        assert [one.grad.tolist()[0] for one in parameters] == [1.0, 1.0 + twice, 1.0]  # type: ignore[union-attr]
    find_gradients([2, 2, 1, 0])
    with pytest.raises(ConfigError, match="got a second gradient in one backward pass, after the first one was sent"):
        combine(samples=4, batch=8, scale=0.5)


def test_a_loss_of_a_peer_inside_a_backward_pass_is_raised_when_the_step_is_combined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(allreduce, "BUCKET_BYTES", 8)
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    ranks, lost = TwoEqualRanks(), [False]

    def begin(part: torch.Tensor) -> Callable[[], None]:
        if lost[0]:
            raise PeerLost("gone")
        return ranks.begin(part)

    combine = AllReduce(parameters, begin=begin)
    for lost[0] in (False, True, False):
        for parameter in parameters:
            parameter.grad = None
        combine.overlap()
        ranks.backward(torch.stack([parameter.sum() for parameter in parameters]).sum() / 2)
        if lost[0]:
            with pytest.raises(PeerLost, match="gone"):
                combine(samples=1, batch=2, scale=0.5)
            assert [parameter.grad.tolist() for parameter in parameters] == [[0.5, 0.5], [0.5, 0.5]], "kept"  # type: ignore[union-attr]
            combine.renew()
        else:
            combine(samples=1, batch=2, scale=0.5)
    assert [parameter.grad.tolist() for parameter in parameters] == [[1.0, 1.0], [1.0, 1.0]]  # type: ignore[union-attr]


def test_a_rank_that_holds_a_part_of_the_parameters_sends_buckets_of_the_same_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It holds all of the first, none of the second and one of two numbers of the third; a bucket has two of the whole.

    The rank sends nothing for the bucket of the second one, and what an earlier pass has left is part of the gradient.
    """
    monkeypatch.setattr(allreduce, "BUCKET_BYTES", 8)
    whole = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    held = [
        nn.Parameter(parameter.detach()[:length].clone()) for parameter, length in zip(whole, (2, 0, 1), strict=True)
    ]

    def collect(number: int) -> None:
        found, own = whole[number].grad, held[number]
        if found is not None:
            part = found[: own.numel()]
            own.grad = part if own.grad is None else own.grad + part
            whole[number].grad = None

    ranks = TwoEqualRanks()
    combine = AllReduce(held, begin=ranks.begin, sources=whole, collect=collect, lengths=[2, 2, 2])
    for step in range(2):
        ranks.begun = []
        for own in held:
            own.grad = torch.full_like(own, 0.25)
        combine.overlap()
        ranks.backward(torch.stack([parameter.sum() for parameter in whole]).sum() / 2)
        for number in range(3):
            collect(number)
        combine(samples=4, batch=8, scale=0.5)
        assert [own.grad.tolist() for own in held] == [[1.5, 1.5], [], [1.5]]  # type: ignore[union-attr]
        assert [inside for inside, _ in ranks.begun] == [step > 0, False]
        assert ranks.begun[0][1] == 1, "of the third, whose gradient is found first"
