"""Optimizers by name: `sgd(momentum=0.9, weight_decay=5e-4)`, `lamb(weight_decay=0.01)`.

An optimizer of your own is a function that is registered by `register_optimizer`:

    @register_optimizer("signsgd", cite="Bernstein et al. 2018")
    def signsgd(momentum: float = 0.9) -> OptimizerChoice:
        return OptimizerChoice(make=SignSGD, settings={"momentum": momentum})
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ebbflow.core.extras import require
from ebbflow.core.plugins import raise_naming
from ebbflow.core.spec import Registry, parse_call
from ebbflow.errors import SpecError
from ebbflow.rules.families import known_optimizer, name_of_optimizer
from ebbflow.torch_api import NormBase

__all__ = [
    "OPTIMIZERS", "OptimizerChoice", "build_optimizer", "name_of_text", "norms_and_biases", "register_optimizer",
]  # fmt: skip

_NORMS = (NormBase, torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.RMSNorm)


@dataclass(frozen=True, kw_only=True)
class OptimizerChoice:
    """An optimizer class and its settings, before it is made for a model."""

    make: Callable[..., torch.optim.Optimizer]
    """Called as make(parameters or parameter groups, lr=..., **settings)."""
    settings: Mapping[str, Any]
    norms: Mapping[str, Any] = field(default_factory=dict)
    """Other settings for biases and norm parameters; if empty, they are treated like all others."""


OPTIMIZERS: Registry[OptimizerChoice] = Registry("optimizer")


def register_optimizer(name: str, *, cite: str = "") -> Callable[[Any], Any]:
    """Return a decorator that adds an optimizer: a function of annotated settings that returns an `OptimizerChoice`."""
    return OPTIMIZERS.register(name, cite=cite)


def _decay(decay_norms: bool) -> dict[str, Any]:
    return {} if decay_norms else {"weight_decay": 0.0}


@register_optimizer("sgd")
def sgd(
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    dampening: float = 0.0,
    decay_norms: bool = True,
) -> OptimizerChoice:
    """Stochastic gradient descent, with momentum if given."""
    return OptimizerChoice(
        make=torch.optim.SGD,
        settings={"momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov, "dampening": dampening},
        norms=_decay(decay_norms),
    )


@register_optimizer("adamw", cite="Loshchilov and Hutter 2019, arXiv 1711.05101")
def adamw(
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    decay_norms: bool = True,
) -> OptimizerChoice:
    """Adam with decoupled weight decay."""
    settings = {"betas": (beta1, beta2), "eps": eps, "weight_decay": weight_decay}
    return OptimizerChoice(make=torch.optim.AdamW, settings=settings, norms=_decay(decay_norms))


@register_optimizer("adam", cite="Kingma and Ba 2015, arXiv 1412.6980")
def adam(
    beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0, decay_norms: bool = True
) -> OptimizerChoice:
    """Adam."""
    settings = {"betas": (beta1, beta2), "eps": eps, "weight_decay": weight_decay}
    return OptimizerChoice(make=torch.optim.Adam, settings=settings, norms=_decay(decay_norms))


@register_optimizer("adadelta", cite="Zeiler 2012, arXiv 1212.5701")
def adadelta(
    rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0.0, decay_norms: bool = True
) -> OptimizerChoice:
    """Adadelta."""
    settings = {"rho": rho, "eps": eps, "weight_decay": weight_decay}
    return OptimizerChoice(make=torch.optim.Adadelta, settings=settings, norms=_decay(decay_norms))


@register_optimizer("rmsprop")
def rmsprop(
    alpha: float = 0.99,
    eps: float = 1e-8,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    decay_norms: bool = True,
) -> OptimizerChoice:
    """RMSprop."""
    settings = {"alpha": alpha, "eps": eps, "momentum": momentum, "weight_decay": weight_decay}
    return OptimizerChoice(make=torch.optim.RMSprop, settings=settings, norms=_decay(decay_norms))


@register_optimizer("lars", cite="You et al. 2017, arXiv 1708.03888")
def lars(
    momentum: float = 0.9, weight_decay: float = 0.0, trust: float = 1e-3, nesterov: bool = False
) -> OptimizerChoice:
    """SGD with the rate trust |w|/(|g| + weight_decay |w|) in each layer; plain SGD without decay for biases and
    norms."""
    settings = {"momentum": momentum, "weight_decay": weight_decay, "trust_coefficient": trust, "nesterov": nesterov}
    # The package itself treats scalars and vectors as plain SGD; their decay has to be switched off here.
    return OptimizerChoice(make=_from_extra("LARS"), settings=settings, norms={"weight_decay": 0.0})


@register_optimizer("lamb", cite="You et al. 2020, arXiv 1904.00962")
def lamb(beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-6, weight_decay: float = 0.01) -> OptimizerChoice:
    """Adam's update plus decay, scaled in each layer to the norm of the weights; Adam without decay for biases and
    norms.

    As in version 3 of the paper the averages are not corrected for their start, so that a warm-up is needed.
    """
    settings = {"betas": (beta1, beta2), "eps": eps, "weight_decay": weight_decay, "weight_decouple": False}
    # Otherwise the package divides the whole step, including trust ratio and decay, by 1 - beta1^t, which makes the
    # first rates ten times too large.
    settings["adam_debias"] = True
    return OptimizerChoice(make=_from_extra("Lamb"), settings=settings, norms={"weight_decay": 0.0, "adam": True})


def _from_extra(name: str) -> Callable[..., torch.optim.Optimizer]:
    """An optimizer class of the package pytorch_optimizer, which is imported when the optimizer is made."""

    def make(*args: Any, **settings: Any) -> torch.optim.Optimizer:
        package = require("pytorch_optimizer", extra="optimizers", needed_for=f"the optimizer {name}")
        optimizer: torch.optim.Optimizer = getattr(package, name)(*args, **settings)
        return optimizer

    return make


def norms_and_biases(model: torch.nn.Module) -> set[int]:
    """The ids of the parameters to which decay and layer-wise adaptation are usually not applied.

    These are all scalars and vectors, and all parameters of normalisation layers.
    """
    chosen = {id(p) for p in model.parameters() if p.ndim <= 1}
    return chosen | {id(p) for m in model.modules() if isinstance(m, _NORMS) for p in m.parameters(recurse=False)}


def name_of_text(text: str) -> str:
    """The name by which the family of an optimizer is known, given its text form; one of a plugin has its class's name.

    >>> name_of_text("adamw(eps=1e-6)")
    'adamw'
    """
    name = text.partition("(")[0].strip()
    if known_optimizer(name):
        return name
    return name_of_optimizer(type(build_optimizer(text, [torch.nn.Parameter(torch.zeros(1, 1))], lr=1.0)))


def build_optimizer(
    text: str, model: torch.nn.Module | Iterable[torch.nn.Parameter], *, lr: float
) -> torch.optim.Optimizer:
    """Make an optimizer for a model from its text form.

    Where biases and norm parameters have settings of their own (`lars`, `lamb`, and `decay_norms=false`), there are two
    parameter groups, theirs the second. If plain parameters are given instead of a model, scalars and vectors count as
    biases and norm parameters. Values that torch refuses, such as nesterov without momentum, are a SpecError.
    """
    choice: Any = OPTIMIZERS.make(text)
    if not isinstance(choice, OptimizerChoice):
        raise SpecError(f"the optimizer {text} is a {type(choice).__name__}; expected that its function returns an "
                        f"OptimizerChoice(make=..., settings=...)")  # fmt: skip
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
        made: Any = choice.make(groups, lr=lr, **choice.settings)
    except ValueError as error:  # torch checks the values only here
        raise SpecError(f"the optimizer {text} cannot be made: {error}; change its values") from None
    except Exception as error:
        raise_naming(error, OPTIMIZERS.entry(parse_call(text).name).make, f"the optimizer {text}: make()")
    if not isinstance(made, torch.optim.Optimizer):
        raise SpecError(f"the optimizer {text} cannot be made: make() returned a {type(made).__name__}; expected a "
                        f"torch.optim.Optimizer")  # fmt: skip
    return made
