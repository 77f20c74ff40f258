from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from ebbflow.errors import MissingExtra
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.optim.optimizers import build_optimizer, norms_and_biases

LAMB = {"weight_decay": 0.01, "weight_decouple": False, "adam_debias": True}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2), nn.LayerNorm([2]))


def names(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    by_id = {id(p): name for name, p in net.named_parameters()}
    return [[by_id[id(p)] for p in group["params"]] for group in optimizer.param_groups]


@pytest.mark.parametrize(
    "text", ["sgd(weight_decay=0.1, decay_norms=false)", "adamw(weight_decay=0.1, decay_norms=no)"]
)
def test_biases_and_norms_can_go_without_decay(text: str) -> None:
    net = model()
    optimizer = build_optimizer(text, net, lr=0.1)
    excluded = ["0.bias", "1.weight", "1.bias", "3.bias", "4.weight", "4.bias"]
    assert names(net, optimizer) == [["0.weight", "3.weight"], excluded]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_by_default_all_parameters_are_one_group() -> None:
    net = model()
    assert len(build_optimizer("sgd(weight_decay=0.1)", net, lr=0.1).param_groups) == 1
    assert len(build_optimizer("sgd(weight_decay=0.1)", net.parameters(), lr=0.1).param_groups) == 1


def test_a_norm_of_several_dimensions_counts_as_one() -> None:
    net = nn.Sequential(nn.LayerNorm([2, 3]), nn.Linear(3, 1, bias=False))
    assert norms_and_biases(net) == {id(net[0].weight), id(net[0].bias)}


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(MissingExtra, match=r"pip install 'ebbflow\[optimizers\]'"):
        build_optimizer("lamb", model(), lr=0.1)


def gradients(net: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in net.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


@pytest.mark.parametrize(
    ("text", "name", "settings", "norms"),
    [
        ("lars(weight_decay=0.01)", "LARS", {"weight_decay": 0.01, "trust_coefficient": 1e-3, "momentum": 0.9}, {}),
        ("lamb(weight_decay=0.01)", "Lamb", LAMB, {"adam": True}),
    ],
)
def test_lars_and_lamb_equal_pytorch_optimizer_used_directly(text: str, name: str, settings: dict, norms: dict) -> None:
    package = pytest.importorskip("pytorch_optimizer")
    ours, theirs = model(), model()
    wrapped = ElasticOptimizer(build_optimizer(text, ours, lr=0.1), "sqrt", base_batch=16)
    left_out = norms_and_biases(theirs)
    groups = [
        {"params": [p for p in theirs.parameters() if id(p) not in left_out]},
        {"params": [p for p in theirs.parameters() if id(p) in left_out], "weight_decay": 0.0, **norms},
    ]
    direct = getattr(package, name)(groups, lr=0.1, **settings)
    for step, batch in enumerate([16, 64, 16, 4]):
        gradients(ours, step)
        gradients(theirs, step)
        wrapped.step(samples=batch)
        for group in direct.param_groups:
            group["lr"] = 0.1 * (batch / 16) ** 0.5
        direct.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def test_lars_by_hand() -> None:
    """q = c |w|/(|g| + lambda |w|); v = 0.9 v + q (g + lambda w); w <- w - lr v; a bias: plain momentum, no decay."""
    pytest.importorskip("pytorch_optimizer")
    net = nn.Linear(2, 1).double()
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[3.0, 4.0]]))  # |w| = 5
        net.bias.fill_(1.0)
    optimizer = build_optimizer("lars(weight_decay=0.1, trust=0.01)", net, lr=2.0)
    velocity, w, v_bias, bias = torch.zeros(1, 2).double(), net.weight.detach().clone(), 0.0, 1.0
    for _ in range(3):
        gradient = torch.tensor([[0.6, 0.8]]).double()  # |g| = 1
        net.weight.grad, net.bias.grad = gradient.clone(), torch.ones(1).double()
        optimizer.step()
        q = 0.01 * w.norm() / (1.0 + 0.1 * w.norm())
        velocity = 0.9 * velocity + q * (gradient + 0.1 * w)
        w = w - 2.0 * velocity
        v_bias = 0.9 * v_bias + 1.0
        bias -= 2.0 * v_bias
    torch.testing.assert_close(net.weight.detach(), w)
    assert net.bias.item() == pytest.approx(bias)


def test_lamb_by_hand() -> None:
    """d = m/(sqrt(v) + eps) + lambda w; w <- w - lr min(|w|, 10)/|d| d; a bias: Adam's direction alone."""
    pytest.importorskip("pytorch_optimizer")
    net = nn.Linear(2, 1).double()
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[3.0, 4.0]]))
        net.bias.fill_(1.0)
    optimizer = build_optimizer("lamb(weight_decay=0.1)", net, lr=0.1)
    w, bias = net.weight.detach().clone(), net.bias.detach().clone()
    m, v = torch.zeros(1, 2).double(), torch.zeros(1, 2).double()
    mb, vb = torch.zeros(1).double(), torch.zeros(1).double()
    for step in range(3):
        gradient = torch.tensor([[0.6, -0.8 + step]]).double()
        net.weight.grad, net.bias.grad = gradient.clone(), torch.full((1,), 0.5).double()
        optimizer.step()
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        d = m / (v.sqrt() + 1e-6) + 0.1 * w
        w = w - 0.1 * w.norm().clamp(max=10) / (d.norm() + 1e-6) * d
        mb, vb = 0.9 * mb + 0.1 * 0.5, 0.999 * vb + 0.001 * 0.25
        bias = bias - 0.1 * mb / (vb.sqrt() + 1e-6)
    torch.testing.assert_close(net.weight.detach(), w)
    torch.testing.assert_close(net.bias.detach(), bias)
