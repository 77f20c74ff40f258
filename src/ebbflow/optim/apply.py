"""Apply a scaling to an optimizer for the duration of one step: rates, gradients, decay, betas, eps.

Everything is restored afterwards, also if the step raises, so that between two steps the groups hold what the user set.

*A rate per layer.* An optimizer with one group per tensor cannot use the kernels that update many tensors at once.
There are two ways around that, both measured with 25 M parameters in 161 tensors (SGD with momentum and AdamW):

    split    For the step, the groups are split such that tensors with equal multipliers are together. This is exactly
             the arithmetic of one group per tensor, for every optimizer. CPU: 1.0 to 1.3 times the plain step (memory
             bandwidth decides, not the calls). H200: 8 to 14 times (kernel launches for each tensor).
    blend    One step at the largest rate, then w <- w_old + (m/max)(w - w_old). Correct for optimizers whose update is
             proportional to the rate and whose state does not depend on it; costs a copy of the weights.
             H200: 1.2 to 1.9 times the plain step, 0.3 to 0.6 ms; CPU: 1.1 to 2.4 times.

A CPU therefore splits groups. A GPU blends if the optimizer is known to be proportional and its weights are not of half
precision, and splits groups otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ebbflow.errors import ConfigError
from ebbflow.moments.meters import squared_norms
from ebbflow.rules.families import name_of_optimizer, optimizer_family
from ebbflow.rules.rule import Scaling
from ebbflow.torch_api import foreach_copy_, foreach_lerp_, foreach_mul_

__all__ = ["Applier", "gradient_norm", "scale_gradients"]

Group = dict[str, Any]

_PROPORTIONAL = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
)
"""Their update is the rate times a direction that does not depend on the rate, and so is decoupled decay."""
_CORRECTED = (torch.optim.Adam, torch.optim.AdamW)
"""Their averages start at zero and are corrected by 1 - beta^step, with `step` a tensor in the state."""
_SETTINGS = ("lr", "weight_decay", "betas", "alpha", "rho", "eps")
"""Settings of a group that a scaling may change."""
_MEMORY_KEYS = {torch.optim.RMSprop: "alpha", torch.optim.Adadelta: "rho"}
"""Decay of the only average, which is not bias-corrected; the exponent of the second beta applies."""


def gradient_norm(parameters: Sequence[torch.Tensor]) -> float:
    """The norm of all `.grad` together, which may be on several devices."""
    gradients: dict[torch.device, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            gradients.setdefault(parameter.device, []).append(parameter.grad)
    return math.sqrt(math.fsum(float(squared_norms(each).sum()) for each in gradients.values()))


def scale_gradients(parameters: Sequence[torch.Tensor], factors: float | Sequence[float]) -> None:
    """Multiply `.grad` in place by one factor, or by one factor per parameter; missing gradients are left out."""
    if not isinstance(factors, Sequence):
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients and factors != 1.0:
            foreach_mul_(gradients, factors)
        return
    pairs = [(p.grad, f) for p, f in zip(parameters, factors, strict=True) if p.grad is not None]
    if pairs:
        foreach_mul_([gradient for gradient, _ in pairs], [factor for _, factor in pairs])


class Applier:
    """Applies scalings to one optimizer; `steps` is its only state between two steps."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        if isinstance(inner, torch.optim.LBFGS):
            raise ConfigError(
                "LBFGS evaluates the loss several times per step, each time on all samples; use another, such as adamw"
            )
        self.adaptive = optimizer_family(name_of_optimizer(type(inner))) == "adam"
        """Whether the optimizer normalises the gradient."""
        self.refresh()
        begun = [float(state["step"]) for state in inner.state.values() if "step" in state and self._corrected]
        self.steps = (max(begun, default=0.0),) * 2
        """Sums of the exponents of the first and of the second beta so far, which are steps of the reference batch."""

    def refresh(self) -> None:
        """Read the parameter groups again, after one was added."""
        self.parameters: list[torch.nn.Parameter] = [p for g in self.inner.param_groups for p in g["params"]]
        self.layers = [p for p in self.parameters if p.requires_grad]
        """The layers of layer-wise rules: the trainable tensors, in the order of the groups."""
        self.frozen = [p for p in self.parameters if not p.requires_grad]
        self.blend = type(self.inner) in _PROPORTIONAL and all(
            p.device.type != "cpu" and p.dtype in (torch.float32, torch.float64) for p in self.layers
        )
        """Whether different rates per layer are applied by blending; otherwise the groups are split."""
        self._copies: dict[int, torch.Tensor] = {}

    @property
    def measurable(self) -> list[torch.nn.Parameter]:
        """The tensors that are measured for a rule of the whole model: frozen ones, too, which may be trained later."""
        devices = {p.device for p in self.layers}
        frozen = {id(p) for p in self.frozen if not (p.is_floating_point() and p.device in devices)}
        return [p for p in self.parameters if id(p) not in frozen]

    @property
    def noise_exponent(self) -> float:
        """The power of the batch by which the rate must fall for the noise of a step to stay the same.

        It is 1 if the step is proportional to the gradient, and 1/2 if the optimizer normalises the gradient.
        """
        return 0.5 if self.adaptive else 1.0

    @property
    def _corrected(self) -> bool:
        return isinstance(self.inner, _CORRECTED)

    # What the optimizer supports --------------------------------------------------------------------------------

    def check(self, scaling: Scaling, rule: object) -> None:
        """Refuse a scaling that the optimizer does not support; `rule` is named in the error."""
        name = type(self.inner).__name__
        multipliers = (*scaling.layers, *scaling.inside)
        try:
            strange = [value for value in multipliers if not 0 <= value < math.inf]
        except (TypeError, ValueError, RuntimeError):  # a rule of one's own may return anything
            raise ConfigError(f"the rule {rule} returned a Scaling with lr={scaling.lr!r} and "
                              f"gradient={scaling.gradient!r}; expected numbers, or a tuple with one per "
                              f"layer") from None  # fmt: skip
        if strange:
            expected = "0 or more: a step that is scaled by less climbs the loss"
            expected = expected if strange[0] < 0 else "a finite number, 0 or more"
            raise ConfigError(f"the rule {rule} returned the multiplier {strange[0]:g}; expected {expected}")
        betas = scaling.betas if isinstance(scaling.betas, tuple) else (scaling.betas,)
        others: dict[str, tuple[float, ...]]
        others = {"weight_decay": (scaling.weight_decay,), "betas": betas, "eps": (scaling.eps,),
                  "progress": () if scaling.progress is None else (scaling.progress,)}  # fmt: skip
        for setting, numbers in others.items():
            if not all(isinstance(value, int | float) and 0 <= value < math.inf for value in numbers):
                raise ConfigError(f"the rule {rule} returned a Scaling with {setting}={getattr(scaling, setting)!r}; "
                                  f"expected a finite number, 0 or more")  # fmt: skip
        for stat, value in scaling.stats.items():
            if not isinstance(value, int | float):
                raise ConfigError(f"the rule {rule} returned {stat}={value!r} among its stats; expected a number")
        if isinstance(scaling.lr, tuple) or isinstance(scaling.gradient, tuple):
            self.check_layers(rule)
            if any(p.requires_grad for p in self.frozen):
                raise ConfigError(
                    f"the rule {rule} gives each layer a rate, but a tensor is trained that was frozen when the "
                    f"optimizer was made; make a new optimizer, or use a rule for the whole model, such as adascale"
                )
            for values in (scaling.lr, scaling.gradient):
                if isinstance(values, tuple) and len(values) != len(self.layers):
                    raise ConfigError(
                        f"the rule {rule} returned multipliers for {len(values)} layers, but the optimizer has "
                        f"{len(self.layers)} trainable tensors; measure the parameters of the optimizer"
                    )
        if scaling.betas not in (1.0, (1.0, 1.0)) and self._memory_key() is None:
            raise ConfigError(
                f"the rule {rule} changes the betas, which {name} does not have, or not in a form that can be changed; "
                f"use adam, adamw or rmsprop, or a rule that changes the rate only, such as sqrt"
            )
        if scaling.eps != 1.0 and "eps" not in self.inner.param_groups[0]:
            raise ConfigError(f"the rule {rule} changes eps, which {name} does not have; use adam, adamw or rmsprop")

    def check_layers(self, rule: object) -> None:
        """Refuse an optimizer whose update does not depend on its rate."""
        if isinstance(self.inner, torch.optim.Rprop):
            raise ConfigError(
                f"the rule {rule} gives each layer a rate, but Rprop uses the rate for its first step only; "
                f"use sgd, adamw or another optimizer that a rate scales"
            )

    def _memory_key(self) -> str | None:
        """The setting with the decay of the optimizer's averages; None if it is not known."""
        if self._corrected or type(self.inner).__name__ == "Lamb":
            return "betas"
        return _MEMORY_KEYS.get(type(self.inner))

    # One step ---------------------------------------------------------------------------------------------------

    @contextmanager
    def scaled(self, scaling: Scaling) -> Iterator[None]:
        """A context in which the inner optimizer takes the scaled step; call `check` before."""
        with ExitStack() as stack:
            stack.enter_context(self._settings(scaling))
            stack.enter_context(self._memory(scaling))
            if scaling.gradient != 1.0:
                stack.enter_context(self._inside(scaling.gradient))
            if isinstance(scaling.gradient, tuple) or (isinstance(scaling.lr, tuple) and not self.blend):
                stack.enter_context(self._split(scaling))
            elif isinstance(scaling.lr, tuple):
                stack.enter_context(self._blended(scaling.lr))
            groups = list(self.inner.param_groups)
            rates = [group["lr"] for group in groups]
            yield
            for group, rate in zip(groups, rates, strict=True):
                if group["lr"] is not rate and bool(group["lr"] != rate):
                    raise ConfigError(
                        f"the learning rate was changed from {float(rate):g} to {float(group['lr']):g} while the "
                        f"optimizer stepped, by a step hook, for example, so that the change would be lost: the rates "
                        f"are those of the step then, and put back after it. Change them, or step a scheduler, after "
                        f"the step: if optimizer.updated: scheduler.step()"
                    )

    @contextmanager
    def _settings(self, scaling: Scaling) -> Iterator[None]:
        """Scale the settings that all layers share.

        The weight decay is also multiplied by `gradient`: coupled decay is part of the gradient, and decoupled decay
        removes lr times decay of the weights, which must grow with the step as it does if the rate is scaled.
        """
        groups = list(self.inner.param_groups)
        before: list[Group] = [{key: group[key] for key in _SETTINGS if key in group} for group in groups]
        decay = scaling.weight_decay * (1.0 if isinstance(scaling.gradient, tuple) else scaling.gradient)
        try:
            for group in groups:
                if not isinstance(scaling.lr, tuple) and scaling.lr != 1.0:
                    group["lr"] = group["lr"] * scaling.lr
                if decay != 1.0 and "weight_decay" in group:
                    group["weight_decay"] = group["weight_decay"] * decay
                if scaling.eps != 1.0:
                    group["eps"] = group["eps"] * scaling.eps
            yield
        finally:
            for group, values in zip(groups, before, strict=True):
                group.update(values)

    @contextmanager
    def _inside(self, factors: float | tuple[float, ...]) -> Iterator[None]:
        """Multiply the gradients; afterwards `.grad` is the mean gradient again, up to rounding."""
        parameters = self.layers if isinstance(factors, tuple) else self.parameters
        scale_gradients(parameters, factors)
        try:
            yield
        finally:
            inverse = (
                tuple(1 / f if f else 1.0 for f in factors) if isinstance(factors, tuple) else 1 / (factors or 1.0)
            )
            scale_gradients(parameters, inverse)

    @contextmanager
    def _memory(self, scaling: Scaling) -> Iterator[None]:
        """Raise the betas to the powers k1 and k2, with the bias corrected by the product of all betas that were used.

        With T the sum of the exponents up to this step, that product is beta^T. Torch corrects by 1 - beta'^s, where
        beta' = beta^k and s is the step count in the state, which is right for s = T/k. The state therefore holds T
        between steps (which is the number of steps if nothing was scaled) and T/k during a step. Both betas share s; if
        their sums differ, s is set for the second beta, and the rate compensates for the first, by
        (1 - beta1'^s)/(1 - beta1^T1). This assumes that all parameters had a gradient in the same steps; with one
        exponent for both betas each parameter has its own count.
        """
        first, second = scaling.betas if isinstance(scaling.betas, tuple) else (scaling.betas,) * 2
        t1, t2 = self.steps[0] + first, self.steps[1] + second
        key = self._memory_key()
        if key is not None and (first, second) != (1.0, 1.0):
            for group in self.inner.param_groups:
                group[key] = (
                    (group[key][0] ** first, group[key][1] ** second) if key == "betas" else group[key] ** second
                )
        if self._corrected and t1 * second != t2 * first:
            for group in self.inner.param_groups:
                beta = group["betas"][0]  # already raised to the power `first`
                rate = (1 - beta ** (t2 / second)) / (1 - beta ** (t1 / first))
                group["lr"] = group["lr"] * rate
                if isinstance(self.inner, torch.optim.AdamW) or group.get("decoupled_weight_decay", False):
                    group["weight_decay"] = group["weight_decay"] / rate  # decay is not an average: no correction
        moved = self._corrected and second != 1.0
        if moved:
            self._move_steps(1 / second)
        try:
            yield
            self.steps = (t1, t2)
        finally:
            if moved:
                self._move_steps(second)

    def _move_steps(self, factor: float) -> None:
        steps = [state["step"] for state in self.inner.state.values() if "step" in state]
        if steps:
            foreach_mul_(steps, factor)

    @contextmanager
    def _split(self, scaling: Scaling) -> Iterator[None]:
        """Split the groups by multiplier for the step; values that the step writes into a group are kept."""
        rates = scaling.lr if isinstance(scaling.lr, tuple) else (1.0,) * len(self.layers)
        decays = scaling.gradient if isinstance(scaling.gradient, tuple) else (1.0,) * len(self.layers)
        factors = {id(p): (m, d) for p, m, d in zip(self.layers, rates, decays, strict=True)}
        whole = self.inner.param_groups
        parts: list[tuple[Group, Group]] = []
        for group in whole:
            alike: dict[tuple[float, float], Group] = {}
            for p in group["params"]:
                rate, decay = factors.get(id(p), (1.0, 1.0))
                if (rate, decay) not in alike:
                    alike[rate, decay] = {**group, "params": [], "lr": group["lr"] * rate}
                    if decay != 1.0 and "weight_decay" in group:
                        alike[rate, decay]["weight_decay"] = group["weight_decay"] * decay
                alike[rate, decay]["params"].append(p)
            parts += [(group, part) for part in alike.values()]
        self.inner.param_groups = [part for _, part in parts]
        try:
            yield
        finally:
            self.inner.param_groups = whole
            for group, part in parts:  # counters that optimizers keep in groups; `_settings` restores the rest
                group.update({k: v for k, v in part.items() if k not in ("params", "lr", "weight_decay")})

    @contextmanager
    def _blended(self, rates: tuple[float, ...]) -> Iterator[None]:
        """Step at the largest rate, then move each layer back to where its own rate would have led.

        With the largest rate the correction makes steps shorter, so that rounding errors are not amplified.
        """
        most = max(rates)
        for group in self.inner.param_groups:
            group["lr"] = group["lr"] * most
        slower = [
            (p, rate / most) for p, rate in zip(self.layers, rates, strict=True) if rate != most and p.grad is not None
        ]
        if not slower:
            yield
            return
        if not self._copies:  # kept for all steps: cloning the tensors would cost more than the step
            self._copies = {id(p): torch.empty_like(p) for p in self.layers}
        weights: list[torch.Tensor] = [p for p, _ in slower]
        old = [self._copies[id(p)] for p in weights]
        with torch.no_grad():
            foreach_copy_(old, weights)
        yield
        with torch.no_grad():  # from the old weights: from the new ones, 1 - (1 - m/max) would lose digits
            foreach_lerp_(old, weights, [share for _, share in slower])
            foreach_copy_(weights, old)
