from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ebbflow.errors import ConfigError
from ebbflow.optim.apply import Applier, gradient_norm
from ebbflow.rules.rule import Scaling

SHAPES = [(7, 5), (5,), (4, 3, 2), (1,), (6, 6)]
STEPS = 20

Make = Callable[..., torch.optim.Optimizer]
OPTIMIZERS: dict[str, tuple[Make, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "dampening": 0.1}),
    "nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "amsgrad": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "weight_decay": 0.01}),
    "adadelta": (torch.optim.Adadelta, {"lr": 0.5, "weight_decay": 0.01}),
}
KERNELS = [{"foreach": False}, {"foreach": True}, {"fused": True}]
FUSED = ("sgd", "momentum", "nesterov", "adam", "adamw", "amsgrad")


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for s in SHAPES]


def give_gradients(step: int, *nets: list[torch.nn.Parameter]) -> None:
    """The same random gradients for all; now and then a parameter has none."""
    generator = torch.Generator().manual_seed(100 + step)
    for i, shape in enumerate(SHAPES):
        gradient = torch.randn(shape, generator=generator, dtype=torch.float64)
        for net in nets:
            net[i].grad = None if i == 2 and step in (3, 4) else gradient.to(net[i].dtype)


def difference(ours: list[torch.nn.Parameter], theirs: list[torch.nn.Parameter]) -> float:
    """The largest relative difference of a tensor."""
    with torch.no_grad():
        return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))


def step(applier: Applier, scaling: Scaling) -> None:
    applier.check(scaling, "test")
    with applier.scaled(scaling):
        applier.inner.step()


# Per layer ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blend", [False, True], ids=["groups", "blend"])
@pytest.mark.parametrize("kernel", KERNELS, ids=["plain", "foreach", "fused"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rates_by_layer_equal_an_optimizer_with_one_group_a_tensor(
    name: str, kernel: dict[str, bool], blend: bool
) -> None:
    if "fused" in kernel and name not in FUSED:
        pytest.skip("torch has no fused kernel for it")
    make, settings = OPTIMIZERS[name]
    ours, theirs = parameters(torch.float64), parameters(torch.float64)  # rounding of float32 depends on the CPU
    applier = Applier(make(ours, **settings, **kernel))
    applier.blend = blend  # a GPU's way is as right on a CPU
    reference = make([{"params": [p]} for p in theirs], **settings, **kernel)
    rng = random.Random(1)
    for number in range(STEPS):
        rates = tuple(rng.choice([1.0, 64.0 ** rng.random(), 0.3]) for _ in SHAPES)
        give_gradients(number, ours, theirs)
        step(applier, Scaling(lr=rates))
        for group, rate in zip(reference.param_groups, rates, strict=True):
            group["lr"] = settings["lr"] * rate
        reference.step()
        assert difference(ours, theirs) < 1e-12
        assert [group["lr"] for group in applier.inner.param_groups] == [settings["lr"]]
        assert applier.inner.param_groups[0]["params"] == ours


def test_tensors_with_equal_rates_are_updated_together() -> None:
    applier = Applier(torch.optim.SGD(parameters(), lr=0.1))
    seen: list[list[int]] = []
    applier.inner.register_step_pre_hook(
        lambda opt, *_: seen.append([len(group["params"]) for group in opt.param_groups])
    )
    give_gradients(0, applier.layers)
    step(applier, Scaling(lr=(2.0, 3.0, 2.0, 2.0, 3.0)))
    assert seen == [[3, 2]]


def test_gradients_by_layer_go_into_the_momentum_with_their_decay() -> None:
    settings = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
    ours, theirs = parameters(torch.float64), parameters(torch.float64)
    applier = Applier(torch.optim.SGD(ours, **settings))
    reference = torch.optim.SGD([{"params": [p]} for p in theirs], **settings)
    rng = random.Random(2)
    for number in range(STEPS):
        factors = tuple(8 * rng.random() for _ in SHAPES)
        give_gradients(number, ours, theirs)
        step(applier, Scaling(gradient=factors))
        for group, p, factor in zip(reference.param_groups, theirs, factors, strict=True):
            group["weight_decay"] = 0.1 * factor
            if p.grad is not None:
                p.grad = p.grad * factor
        reference.step()
    assert difference(ours, theirs) < 1e-12


def test_counters_that_an_optimizer_keeps_in_its_groups_go_on() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            for group in self.param_groups:
                group["steps"] = group.get("steps", 0) + 1
            return super().step(closure)

    applier = Applier(Counting(parameters(), lr=0.1))
    for number in range(3):
        give_gradients(number, applier.layers)
        step(applier, Scaling(lr=(1.0, 2.0, 3.0, 4.0, 5.0)))
    assert applier.inner.param_groups[0]["steps"] == 3


# Inside and outside the momentum -------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_equation_13_equals_the_gradient_inside_the_momentum(decay: float) -> None:
    """v <- mu v + lr kappa (g + lambda w), w <- w - v, which is the sum of the gradients with a fixed step size."""
    ours, theirs = parameters(torch.float64), parameters(torch.float64)
    applier = Applier(torch.optim.SGD(ours, lr=0.05, momentum=0.9, weight_decay=decay))
    velocity = [torch.zeros_like(p) for p in theirs]
    rng = random.Random(3)
    for number in range(50):
        kappa = 16 * rng.random()
        give_gradients(number + 10, ours, theirs)
        step(applier, Scaling(gradient=kappa))
        with torch.no_grad():
            for p, v in zip(theirs, velocity, strict=True):
                assert p.grad is not None
                v.mul_(0.9).add_(p.grad + decay * p, alpha=0.05 * kappa)
                p.sub_(v)
    assert difference(ours, theirs) < 1e-12


def test_the_rate_outside_the_momentum_is_goyals_corrected_velocity_form() -> None:
    """v <- mu (lr_t/lr_{t-1}) v + lr_t g, w <- w - v: torch's form needs no correction."""
    ours, theirs = parameters(torch.float64), parameters(torch.float64)
    applier = Applier(torch.optim.SGD(ours, lr=0.05, momentum=0.9))
    velocity = [torch.zeros_like(p) for p in theirs]
    rng, last = random.Random(4), 1.0
    for number in range(50):
        kappa = 0.5 + 16 * rng.random()
        give_gradients(number + 10, ours, theirs)
        step(applier, Scaling(lr=kappa))
        with torch.no_grad():
            for p, v in zip(theirs, velocity, strict=True):
                assert p.grad is not None
                v.mul_(0.9 * kappa / last).add_(p.grad, alpha=0.05 * kappa)
                p.sub_(v)
        last = kappa
    assert difference(ours, theirs) < 1e-12


def test_decoupled_decay_grows_with_a_gradient_that_is_scaled_inside() -> None:
    # Without gradients AdamW does nothing but w <- w (1 - lr lambda): 1 - 0.1 * 0.2 * 3 = 0.94.
    p = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    p.grad = torch.zeros(2, dtype=torch.float64)
    step(Applier(torch.optim.AdamW([p], lr=0.1, weight_decay=0.2)), Scaling(gradient=3.0))
    assert p.tolist() == pytest.approx([0.94, 0.94], rel=1e-12)


def test_the_mean_gradient_is_restored_after_the_step() -> None:
    net = parameters(torch.float64)
    give_gradients(0, net)
    before = [p.grad.clone() for p in net if p.grad is not None]
    step(Applier(torch.optim.SGD(net, lr=0.1)), Scaling(gradient=3.0))
    torch.testing.assert_close([p.grad for p in net], before, rtol=1e-15, atol=0)


def test_weight_decay_is_multiplied_for_the_step() -> None:
    # w <- 1 - 0.1 (1 + 0.5 * 4 * 1) = 0.7
    p = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    p.grad = torch.ones(1, dtype=torch.float64)
    applier = Applier(torch.optim.SGD([p], lr=0.1, weight_decay=0.5))
    step(applier, Scaling(weight_decay=4.0))
    assert p.item() == pytest.approx(0.7, rel=1e-12)
    assert applier.inner.param_groups[0]["weight_decay"] == 0.5


# The memory of adaptive optimizers ----------------------------------------------------------------------


def adam_by_hand(
    net: list[torch.nn.Parameter], state: dict[int, Any], k1: float, k2: float, eps: float, decoupled: bool
) -> None:
    """Adam with a beta of its own in each step; the bias is corrected by the running products of the betas."""
    lr, beta1, beta2, decay = 0.01, 0.9, 0.98, 0.1
    with torch.no_grad():
        for i, p in enumerate(net):
            if p.grad is None:
                continue
            m, v, product1, product2 = state.get(i, (torch.zeros_like(p), torch.zeros_like(p), 1.0, 1.0))
            gradient = p.grad if decoupled else p.grad + decay * p
            b1, b2 = beta1**k1, beta2**k2
            m, v = b1 * m + (1 - b1) * gradient, b2 * v + (1 - b2) * gradient**2
            product1, product2 = product1 * b1, product2 * b2
            if decoupled:
                p.mul_(1 - lr * decay)
            p.sub_(lr * (m / (1 - product1)) / ((v / (1 - product2)).sqrt() + eps))
            state[i] = (m, v, product1, product2)


@pytest.mark.parametrize("kernel", KERNELS, ids=["plain", "foreach", "fused"])
@pytest.mark.parametrize("exponents", ["both", "second", "each"])
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW])
def test_betas_of_each_step_are_corrected_by_their_running_product(
    make: Make, exponents: str, kernel: dict[str, bool]
) -> None:
    ours, theirs = parameters(torch.float64), parameters(torch.float64)
    applier = Applier(make(ours, lr=0.01, betas=(0.9, 0.98), weight_decay=0.1, **kernel))
    state: dict[int, Any] = {}
    rng = random.Random(5)
    for number in range(60):
        kappa = 16.0 ** rng.uniform(-1, 1)
        k1, k2 = {"both": (kappa, kappa), "second": (1.0, kappa), "each": (16.0 ** rng.uniform(-1, 1), kappa)}[
            exponents
        ]
        # Parameters that miss a step have counts of their own, which both betas must share (see Applier._memory).
        give_gradients(number if exponents == "both" else number + 10, ours, theirs)
        betas = kappa if exponents == "both" else (k1, k2)
        step(applier, Scaling(betas=betas, eps=2.0))
        adam_by_hand(theirs, state, k1, k2, 2e-8, decoupled=make is torch.optim.AdamW)
        assert difference(ours, theirs) < 1e-6, number
    group = applier.inner.param_groups[0]
    assert (group["betas"], group["eps"], group["lr"], group["weight_decay"]) == ((0.9, 0.98), 1e-8, 0.01, 0.1)


def test_unscaled_steps_of_adam_count_as_one() -> None:
    applier = Applier(torch.optim.Adam(parameters(), lr=0.01))
    for number, kappa in enumerate([1.0, 4.0, 1.0]):
        give_gradients(number, applier.layers)
        step(applier, Scaling(betas=kappa))
    assert applier.steps == (6.0, 6.0)
    assert float(applier.inner.state[applier.layers[0]]["step"]) == pytest.approx(6.0)


def test_rmsprops_memory_follows_the_batch() -> None:
    # v = (1 - 0.99^2) g^2, w <- 1 - 0.1 g/(sqrt(v) + eps/2), g = 1
    p = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    p.grad = torch.ones(1, dtype=torch.float64)
    step(Applier(torch.optim.RMSprop([p], lr=0.1, alpha=0.99, eps=1e-2)), Scaling(betas=2.0, eps=0.5))
    assert p.item() == pytest.approx(1 - 0.1 / (math.sqrt(1 - 0.99**2) + 5e-3), rel=1e-12)


# Put back, and refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scaling",
    [
        Scaling(lr=3.0, gradient=2.0, weight_decay=5.0, betas=4.0, eps=0.5),
        Scaling(lr=(1.0, 2.0, 3.0, 4.0, 5.0), betas=(1.0, 2.0)),
        Scaling(gradient=(1.0, 2.0, 3.0, 4.0, 5.0)),
    ],
)
@pytest.mark.parametrize("blend", [False, True])
def test_everything_is_put_back_when_the_step_raises(scaling: Scaling, blend: bool) -> None:
    net = parameters(torch.float64)
    applier = Applier(torch.optim.AdamW(net, lr=0.01))
    applier.blend = blend
    give_gradients(0, net)
    step(applier, Scaling())
    groups = applier.inner.param_groups
    before = ({k: v for k, v in groups[0].items() if k != "params"}, [p.detach().clone() for p in net], applier.steps)
    gradients = [p.grad.clone() for p in net if p.grad is not None]

    def fail(*_: object) -> None:
        raise RuntimeError("no")

    applier.inner.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no"):
        step(applier, scaling)
    assert applier.inner.param_groups is groups
    assert groups[0]["params"] == net
    assert ({k: v for k, v in groups[0].items() if k != "params"}, applier.steps) == (before[0], before[2])
    assert all(torch.equal(a, b) for a, b in zip(net, before[1], strict=True))
    torch.testing.assert_close([p.grad for p in net], gradients, rtol=1e-15, atol=0)
    assert float(applier.inner.state[net[0]]["step"]) == 1.0


def test_optimizers_that_a_scaling_does_not_fit_are_refused() -> None:
    net = parameters()
    with pytest.raises(ConfigError, match="LBFGS evaluates the loss several times"):
        Applier(torch.optim.LBFGS(net))
    with pytest.raises(ConfigError, match="Rprop uses the rate for its first step only"):
        Applier(torch.optim.Rprop(net)).check(Scaling(lr=(1.0,) * 5), "lena")
    with pytest.raises(ConfigError, match="returned multipliers for 3 layers, but the optimizer has 5"):
        Applier(torch.optim.SGD(net)).check(Scaling(lr=(1.0, 2.0, 3.0)), "lena")
    with pytest.raises(ConfigError, match="adamsde changes the betas, which SGD does not have"):
        Applier(torch.optim.SGD(net)).check(Scaling(betas=2.0), "adamsde")
    with pytest.raises(ConfigError, match="changes eps, which SGD does not have"):
        Applier(torch.optim.SGD(net)).check(Scaling(eps=2.0), "mine")


def test_a_complex_gradient_has_the_norm_of_its_two_parts() -> None:
    weights = [torch.nn.Parameter(torch.zeros(1, dtype=kind)) for kind in (torch.complex64, torch.float32)]
    weights[0].grad, weights[1].grad = torch.tensor([2.0 - 3.0j]), torch.tensor([6.0])
    assert gradient_norm(weights) == pytest.approx(7.0)  # 4 + 9 + 36 = 49
