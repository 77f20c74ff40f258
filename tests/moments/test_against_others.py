"""Our moments beside other people's, in one process, on the same gradients."""

from __future__ import annotations

import logging
import math
import signal
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ebbflow.moments.estimate import Averages, Moments
from ebbflow.moments.meters import HookMeter

BASE = 32
"""Samples of a micro-batch; also the reference batch."""
MICRO_BATCHES = 4


def gradients(step: int) -> list[torch.Tensor]:
    """Micro-batches' gradients with more signal than noise, so that no limit takes effect in a single step."""
    generator = torch.Generator().manual_seed(step)
    signal = torch.linspace(0.5, 1.5, 50)
    return [signal + 0.5 * torch.randn(50, generator=generator) for _ in range(MICRO_BATCHES)]


def backward(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """A loss whose gradient is the given one, as a share of a step of several micro-batches."""
    ((parameter * gradient).sum() / MICRO_BATCHES).backward()


def measure(
    meter: HookMeter, parameter: nn.Parameter, micro_batches: list[torch.Tensor], averages: Averages
) -> Averages:
    parameter.grad = None
    for gradient in micro_batches:
        backward(parameter, gradient)
        meter.close_micro_batch(BASE, scale=1 / MICRO_BATCHES)
    return averages.updated(meter.finish(MICRO_BATCHES * BASE), memory=1000 * BASE)


def gain(moments: Moments | None, scale: float) -> float:
    assert moments is not None
    sigma2 = moments.noise / BASE
    return (sigma2 + moments.signal) / (sigma2 / scale + moments.signal)


def fairscale_adascale(parameter: nn.Parameter) -> Any:
    """Its optimizer, with the memory that ours has: 1000 reference steps."""
    adascale = pytest.importorskip("fairscale.optim.adascale").AdaScale
    return adascale(
        torch.optim.SGD([parameter], lr=0.1),
        world_size=1,
        num_gradients_to_accumulate=MICRO_BATCHES,
        smoothing=math.exp(-MICRO_BATCHES / 1000),
    )


def test_fairscale_finds_the_same_gain_at_a_fixed_scale() -> None:
    ours, theirs = nn.Parameter(torch.zeros(50)), nn.Parameter(torch.zeros(50))
    meter, averages, peer = HookMeter([ours], layers=False), Averages(), fairscale_adascale(theirs)
    for step in range(20):
        averages = measure(meter, ours, gradients(step), averages)
        theirs.grad = None
        for gradient in gradients(step):
            backward(theirs, gradient)
        assert gain(averages.moments(), MICRO_BATCHES) == pytest.approx(peer.gain(), rel=1e-5)
    moments = averages.moments()
    assert moments is not None
    # noise of one sample: 32 times the variance of a micro-batch, 0.25 * 50; signal |linspace|^2 = 54.3
    assert moments.noise / BASE == pytest.approx(12.5, rel=0.1)
    assert peer.gain() == pytest.approx((12.5 + 54.3) / (12.5 / 4 + 54.3), rel=0.01)


def test_when_the_workers_change_fairscale_reads_a_third_of_the_gain() -> None:
    # G = (sqrt 97, 0, 0) and four micro-batches G + e_i with e_i = +-sqrt 288 along two axes: N = 97, A = 97 + 288, so
    # V/b0 = 4 (385 - 97)/3 = 384 and S = 97 - 384/4 = 1. The gain of 4 is 385/97 = 3.97, of 64 it is 385/7 = 55.
    x = math.sqrt(288.0)
    micro_batches = [torch.tensor([math.sqrt(97.0), a, b]) for a, b in ((x, 0.0), (-x, 0.0), (0.0, x), (0.0, -x))]
    ours, theirs = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    meter, averages, peer = HookMeter([ours], layers=False), Averages(), fairscale_adascale(theirs)
    for _ in range(5):
        averages = measure(meter, ours, micro_batches, averages)
        theirs.grad = None
        for gradient in micro_batches:
            backward(theirs, gradient)
    assert gain(averages.moments(), 4) == pytest.approx(385 / 97, rel=1e-4)
    assert peer.gain() == pytest.approx(385 / 97, rel=1e-3)
    peer.set_scale(64)
    assert gain(averages.moments(), 64) == pytest.approx(55.0, rel=1e-3)
    # It multiplies the variance by 4/64, as if each worker's batch had grown: (24 + 1)/(24/64 + 1).
    assert peer.gain() == pytest.approx(25 / 1.375, rel=1e-2)


@pytest.fixture
def adaptdl_noise_scale() -> Iterator[Any]:
    """adaptdl's GradientNoiseScale. Its import needs a module that setuptools no longer has, though it calls it only in
    a cluster; and takes over logging and signals, which are put back."""
    handlers, signals = logging.root.handlers[:], {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    level = logging.root.level
    stand_in = "pkg_resources" not in sys.modules
    if stand_in:
        sys.modules["pkg_resources"] = types.ModuleType("pkg_resources")
    try:
        yield pytest.importorskip("adaptdl.torch.gradient_noise_scale").GradientNoiseScale
    finally:
        if stand_in:
            del sys.modules["pkg_resources"]
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
        for number, handler in signals.items():
            signal.signal(number, handler)


def test_adaptdl_finds_the_same_noise_and_signal(adaptdl_noise_scale: Any) -> None:
    ours, theirs = nn.Parameter(torch.zeros(50)), nn.Parameter(torch.zeros(50))
    meter, averages = HookMeter([ours], layers=False), Averages()
    wrapped = types.SimpleNamespace(require_backward_grad_sync=False)
    peer = adaptdl_noise_scale(wrapped, torch.optim.SGD([theirs], lr=0.1), num_replicas=1, accum_scale=1.0)
    peer._smoothing = math.exp(-1 / 1000)  # a reference step, as ours
    for step in range(20):
        averages = measure(meter, ours, gradients(step), averages)
        peer.reset_accumulation()
        for number, gradient in enumerate(gradients(step)):
            wrapped.require_backward_grad_sync = number == MICRO_BATCHES - 1
            (theirs * gradient).sum().backward()  # it divides by the number of micro-batches itself
        moments = averages.moments()
        assert moments is not None
        assert moments.signal == pytest.approx(peer.sqr_avg(), rel=1e-5)
        assert moments.noise / BASE == pytest.approx(peer.var_avg(), rel=1e-5)
        assert gain(moments, MICRO_BATCHES) == pytest.approx(peer.gain(MICRO_BATCHES), rel=1e-5)
