"""Which kind an optimizer is of: one decision, for the default rule, for the steps and for a tournament."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ebbflow.optim.optimizers import OPTIMIZERS, OptimizerChoice, name_of_text, register_optimizer
from ebbflow.optim.rule_optimizer import RuleOptimizer
from ebbflow.rules.families import name_of_optimizer, optimizer_family
from ebbflow.rules.rule import StepContext


class Mine(torch.optim.Optimizer):
    """An optimizer of somebody's own, without eps and betas."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        return None


@pytest.mark.parametrize(
    ("make", "adaptive"),
    [
        (torch.optim.SGD, False), (torch.optim.ASGD, False), (type("Own", (torch.optim.SGD,), {}), False),
        (torch.optim.Rprop, True), (torch.optim.AdamW, True), (torch.optim.Adadelta, True), (Mine, True),
    ],
)  # fmt: skip
def test_the_default_rule_and_the_steps_take_an_optimizer_for_the_same_kind(make: Any, adaptive: bool) -> None:
    inner = make([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    kind = "adam" if adaptive else "sgd"
    assert optimizer_family(name_of_optimizer(make)) == kind
    # With the root of 4 for a batch that is 4 times the reference batch, or the gain, which is 1 as long as nothing was
    # measured; the warm-up of `auto` is without a limit, so it is over.
    optimizer = RuleOptimizer(inner, "auto(limit=0, guard=false, ramp=0)", base_batch=8)
    assert (optimizer.rule.needs == frozenset()) is adaptive
    inner.param_groups[0]["params"][0].grad = torch.ones(2)
    update = optimizer.update(StepContext(step=0, batch=32, ref_batch=8, samples=0))
    assert update.multiplier == (2.0 if adaptive else 1.0)


def test_an_optimizer_of_a_plugin_is_of_the_kind_of_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OPTIMIZERS, "_entries", dict(OPTIMIZERS._entries))

    @register_optimizer("plain-descent")
    def plain_descent(momentum: float = 0.0) -> OptimizerChoice:
        return OptimizerChoice(make=torch.optim.SGD, settings={"momentum": momentum})

    assert name_of_text("plain-descent(momentum=0.5)") == "SGD"
    assert name_of_text("adamw(eps=1e-6)") == "adamw"
