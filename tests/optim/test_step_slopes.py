"""Slopes along a step, on a parabola where they are known."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.optim.step_slopes import StepSlopes
from ebbflow.rules.rule import StepContext

# The loss is 2 w^2: its gradient is 4 w, and a step of rate 0.1 goes from w to 0.6 w.
CURVATURE = 4.0


def stepped(times: int, *, rule: str = "auto(limit=0.25)", **settings: Any) -> ElasticOptimizer:
    """So many reference steps from w = 1, of a run of 100, of which the first has a fifth of the rate."""
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = ElasticOptimizer(
        torch.optim.SGD([weight], lr=0.1), rule, base_batch=1, epochs=1, epoch_samples=100, **settings
    )
    for number in range(times):
        gradient(optimizer)
        optimizer.update(StepContext(step=number, batch=1, ref_batch=1, samples=number, total_samples=100))
    return optimizer


def gradient(optimizer: ElasticOptimizer) -> float:
    """Set the gradient where the weight is now, and return it."""
    (weight,) = optimizer.layers
    weight.grad = CURVATURE * weight.detach()
    return float(weight.grad)


def test_the_slope_at_the_end_is_that_of_the_next_gradient() -> None:
    optimizer = stepped(1)
    assert gradient(optimizer) == pytest.approx(3.68)
    # The step was 0.2 x 0.1 x 4 = 0.08 long and went down from a gradient of 4 to one of 3.68.
    assert optimizer.slopes() == pytest.approx((-0.08 * 4, -0.08 * 3.68))
    assert stepped(0).slopes() is None


def test_clipping_shortens_the_step_and_not_the_slope() -> None:
    """At a norm of 1 instead of 4 the step is a fourth as long: 0.02."""
    optimizer = stepped(1, clip=1.0)
    assert gradient(optimizer) == pytest.approx(3.92)
    assert optimizer.slopes() == pytest.approx((-0.02 * 4, -0.02 * 3.92))


def test_they_are_part_of_the_state_as_long_as_the_rule_follows_them() -> None:
    saved = stepped(3).state_dict()
    other = stepped(0)
    other.load_state_dict(saved)
    with torch.no_grad():
        other.layers[0].fill_(0.5)
    gradient(other)
    began, ended = other.slopes() or (0.0, 0.0)
    (step,) = saved["slopes"]["step"]
    assert (began, ended) == pytest.approx((saved["slopes"]["slope"], 2.0 * float(step)))
    # Half of the 25 steps of the longest warm-up; after them nothing is kept, and other rules never keep anything.
    assert stepped(12).state_dict()["slopes"] is not None
    assert stepped(26).state_dict()["slopes"] is None
    assert stepped(3, rule="linear").state_dict()["slopes"] is None


def test_where_the_gradient_is_elsewhere_the_slopes_come_from_there() -> None:
    optimizer = stepped(0)
    optimizer.layers[0].grad = None
    assert optimizer.slopes() is None
    context = StepContext(step=0, batch=1, ref_batch=1, samples=0, total_samples=100)
    optimizer.update(context, slopes=(-1.0, -0.5))
    assert optimizer.state_dict()["rule_state"][0]["slopes"] == [-1.0, -0.5, 1]


def test_a_complex_weight_has_the_slope_of_its_two_parts() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0 + 1.0j]))
    slopes = StepSlopes([weight])
    weight.grad = torch.tensor([2.0 - 3.0j])
    slopes.begin()
    with torch.no_grad():
        weight -= 0.1 * weight.grad
    slopes.end()
    # The loss changes by Re(g) Re(d) + Im(g) Im(d): -0.1 (2^2 + 3^2).
    assert slopes.measure() == pytest.approx((-1.3, -1.3))
