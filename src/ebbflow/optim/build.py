"""Torch optimizers by name: `sgd(momentum=0.9, weight_decay=5e-4)`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ebbflow.spec import Registry, bind, parse_call

__all__ = ["OPTIMIZERS", "build_optimizer"]

OPTIMIZERS: Registry[Any] = Registry("optimizer")

Parameters = Iterable[torch.nn.Parameter]


@OPTIMIZERS.register("sgd")
def sgd(momentum: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False, dampening: float = 0.0) -> Any:
    """Stochastic gradient descent, with momentum if given."""
    return torch.optim.SGD, {
        "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov, "dampening": dampening
    }  # fmt: skip


@OPTIMIZERS.register("adamw", cite="Loshchilov and Hutter 2019, arXiv 1711.05101")
def adamw(beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01) -> Any:
    """Adam with decoupled weight decay."""
    return torch.optim.AdamW, {"betas": (beta1, beta2), "eps": eps, "weight_decay": weight_decay}


@OPTIMIZERS.register("adam", cite="Kingma and Ba 2015, arXiv 1412.6980")
def adam(beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0) -> Any:
    """Adam."""
    return torch.optim.Adam, {"betas": (beta1, beta2), "eps": eps, "weight_decay": weight_decay}


@OPTIMIZERS.register("adadelta", cite="Zeiler 2012, arXiv 1212.5701")
def adadelta(rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0.0) -> Any:
    """Adadelta."""
    return torch.optim.Adadelta, {"rho": rho, "eps": eps, "weight_decay": weight_decay}


@OPTIMIZERS.register("rmsprop")
def rmsprop(alpha: float = 0.99, eps: float = 1e-8, momentum: float = 0.0, weight_decay: float = 0.0) -> Any:
    """RMSprop."""
    return torch.optim.RMSprop, {"alpha": alpha, "eps": eps, "momentum": momentum, "weight_decay": weight_decay}


def build_optimizer(text: str, parameters: Parameters, *, lr: float) -> torch.optim.Optimizer:
    """A torch optimizer over the parameters from its text form."""
    call = parse_call(text)
    make, settings = bind(call, OPTIMIZERS.entry(call.name).make)
    optimizer: torch.optim.Optimizer = make(parameters, lr=lr, **settings)
    return optimizer
