"""Optimizers by name: `sgd(momentum=0.9, weight_decay=5e-4)`, `lamb(weight_decay=0.01)`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from ebbflow.core.spec import Registry
from ebbflow.errors import MissingExtra, SpecError

__all__ = ["OPTIMIZERS", "Choice", "build_optimizer", "norms_and_biases"]

OPTIMIZERS: Registry[Choice] = Registry("optimizer")

_NORMS = (_NormBase, torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.RMSNorm)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """An optimizer that was chosen by name, before it meets a model."""

    make: Callable[..., torch.optim.Optimizer]
    settings: Mapping[str, Any]
    norms: Mapping[str, Any] = field(default_factory=dict)
    """Other settings for biases and norm parameters; empty: they are treated like all others."""


def _decay(decay_norms: bool) -> dict[str, Any]:
    return {} if decay_norms else {"weight_decay": 0.0}


@OPTIMIZERS.register("sgd")
def sgd(
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    dampening: float = 0.0,
    decay_norms: bool = True,
) -> Choice:
    """Stochastic gradient descent, with momentum if given."""
    return Choice(
        make=torch.optim.SGD,
        settings={"momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov, "dampening": dampening},
        norms=_decay(decay_norms),
    )


@OPTIMIZERS.register("adamw", cite="Loshchilov and Hutter 2019, arXiv 1711.05101")
def adamw(
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    decay_norms: bool = True,
) -> Choice:
    """Adam with decoupled weight decay."""
    settings = {"betas": (beta1, beta2), "eps": eps, "weight_decay": weight_decay}
    return Choice(make=torch.optim.AdamW, settings=settings, norms=_decay(decay_norms))


@OPTIMIZERS.register("adam", cite="Kingma and Ba 2015, arXiv 1412.6980")
def adam(
    beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0, decay_norms: bool = True
) -> Choice:
    """Adam."""
    settings = {"betas": (beta1, beta2), "eps": eps, "weight_decay": weight_decay}
    return Choice(make=torch.optim.Adam, settings=settings, norms=_decay(decay_norms))


@OPTIMIZERS.register("adadelta", cite="Zeiler 2012, arXiv 1212.5701")
def adadelta(rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0.0, decay_norms: bool = True) -> Choice:
    """Adadelta."""
    settings = {"rho": rho, "eps": eps, "weight_decay": weight_decay}
    return Choice(make=torch.optim.Adadelta, settings=settings, norms=_decay(decay_norms))


@OPTIMIZERS.register("rmsprop")
def rmsprop(
    alpha: float = 0.99,
    eps: float = 1e-8,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    decay_norms: bool = True,
) -> Choice:
    """RMSprop."""
    settings = {"alpha": alpha, "eps": eps, "momentum": momentum, "weight_decay": weight_decay}
    return Choice(make=torch.optim.RMSprop, settings=settings, norms=_decay(decay_norms))


@OPTIMIZERS.register("lars", cite="You et al. 2017, arXiv 1708.03888")
def lars(momentum: float = 0.9, weight_decay: float = 0.0, trust: float = 1e-3, nesterov: bool = False) -> Choice:
    """SGD whose rate in each layer is trust |w|/(|g| + weight_decay |w|); biases and norms: plain, without decay."""
    settings = {"momentum": momentum, "weight_decay": weight_decay, "trust_coefficient": trust, "nesterov": nesterov}
    # The package leaves scalars and vectors alone by itself; the decay is what else belongs to the exclusion.
    return Choice(make=_extra("LARS"), settings=settings, norms={"weight_decay": 0.0})


@OPTIMIZERS.register("lamb", cite="You et al. 2020, arXiv 1904.00962")
def lamb(beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-6, weight_decay: float = 0.01) -> Choice:
    """Adam's direction with the decay added, scaled in each layer to the norm of the weights; biases and norms: Adam.

    As in version 3 of the paper the averages are not corrected for their start: use a warm-up.
    """
    settings = {"betas": (beta1, beta2), "eps": eps, "weight_decay": weight_decay, "weight_decouple": False}
    # Else the package divides the whole step by 1 - beta1^t, trust ratio and decay included: ten times the rate at
    # first.
    settings["adam_debias"] = True
    return Choice(make=_extra("Lamb"), settings=settings, norms={"weight_decay": 0.0, "adam": True})


def _extra(name: str) -> Callable[..., torch.optim.Optimizer]:
    """An optimizer of the package pytorch_optimizer, imported when it is made."""

    def make(*args: Any, **settings: Any) -> torch.optim.Optimizer:
        try:
            package = importlib.import_module("pytorch_optimizer")
        except ImportError:
            raise MissingExtra("pytorch_optimizer", extra="optimizers", needed_for=f"the optimizer {name}") from None
        optimizer: torch.optim.Optimizer = getattr(package, name)(*args, **settings)
        return optimizer

    return make


def norms_and_biases(model: torch.nn.Module) -> set[int]:
    """The parameters, by id, that decay and layer-wise adaptation usually leave out: biases and norm parameters.

    That is every scalar and vector, and whatever a normalisation layer owns.
    """
    chosen = {id(p) for p in model.parameters() if p.ndim <= 1}
    return chosen | {id(p) for m in model.modules() if isinstance(m, _NORMS) for p in m.parameters(recurse=False)}


def build_optimizer(
    text: str, model: torch.nn.Module | Iterable[torch.nn.Parameter], *, lr: float
) -> torch.optim.Optimizer:
    """An optimizer over a model from its text form.

    Where biases and norm parameters are treated apart (`lars`, `lamb`, and `decay_norms=false`) there are two parameter
    groups, theirs the second. Of plain parameters without a model, scalars and vectors count as biases and norms.
    Values that torch refuses, such as nesterov without momentum, are a SpecError.
    """
    choice = OPTIMIZERS.make(text)
    parameters = list(model.parameters() if isinstance(model, torch.nn.Module) else model)
    groups: list[Any] = parameters
    if choice.norms:
        left_out = (
            norms_and_biases(model)
            if isinstance(model, torch.nn.Module)
            else {id(p) for p in parameters if p.ndim <= 1}
        )
        both = [
            {"params": [p for p in parameters if id(p) not in left_out]},
            {"params": [p for p in parameters if id(p) in left_out], **choice.norms},
        ]
        groups = [group for group in both if group["params"]]
    try:
        return choice.make(groups, lr=lr, **choice.settings)
    except ValueError as error:  # torch looks at the values only now
        raise SpecError(f"the optimizer {text} cannot be made: {error}; change its values") from None
