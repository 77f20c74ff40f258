"""Modifiers, which change the scaling of the rule before them: warmup, statewarmup, ramp, inside, cap and keepdecay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ebbflow.core.spec import param
from ebbflow.core.units import Span
from ebbflow.errors import ConfigError, SpecError
from ebbflow.plan.batch_plan import cut_step
from ebbflow.rules.noise_rules import noise_stats, whole_gain
from ebbflow.rules.rule import Modifier, Scaling, State, StepContext, register_modifier, spread

__all__ = ["Cap", "Inside", "KeepDecay", "Ramp", "StateWarmup", "Warmup"]


@register_modifier("warmup", cite="Goyal et al. 2017, arXiv 1706.02677")
@dataclass(frozen=True)
class Warmup(Modifier):
    """m climbs linearly from `start` to the value of the rule over the given span, counted in samples.

    Since it is counted in samples, the warm-up ends at the same point of training whatever the workers do. Where the
    rule returns less than `start` (for a batch below the reference batch), its value is used: a warm-up never raises
    the rate.

    Suits: large batches from the first step on, while the weights still change fast.

    Example: linear+warmup(5ep)
    """

    length: Span = param(doc="length: 5ep (epochs), 1000steps (of the reference batch) or 64000samples")
    start: float = param(1.0, doc="multiplier at the first step; 1 is the base rate, 0 starts from zero")

    def __post_init__(self) -> None:
        if not 0 <= self.start <= 1:
            raise SpecError(f"warmup: start is {self.start:g}; expected 0 (from zero) to 1 (from the base rate)")

    def modify(self, context: StepContext, scaling: Scaling, state: State) -> tuple[Scaling, State]:
        """start + (m - start) * s/S while s < S, with s the samples up to the middle of the step."""
        length = self.length.samples(epoch_samples=context.epoch_samples, ref_batch=context.ref_batch)
        if context.samples >= length:
            return scaling, state
        # The middle of the step, so that the first step of a warm-up from zero has a rate above zero, and so that a
        # large step does not get the rate of its first sample.
        done = min(1.0, (context.samples + context.batch / 2) / length)
        return scaling.map_lr(lambda m: self.start + (m - self.start) * done if m > self.start else m), state


@register_modifier(
    "statewarmup",
    cite="Ko et al. 2022, WWW, doi 10.1145/3485447.3511989",
    needs={"moments"},
    exempt={
        "identity": "warms up from zero at the reference batch, too",
        "no less than the base rate": "warms up from zero",
    },
)
@dataclass(frozen=True)
class StateWarmup(Modifier):
    """m_l is multiplied by p_l/theta until p_l, the sum of the measured gains so far, reaches theta.

    theta = alpha T1, with T1 = samples of the run/B0, the number of steps of the reference run. As in Algorithm 1 of
    the paper, the gain of the step is added before the comparison. With any rule of the whole model there is one sum,
    of the gain that AdaScale would have, whatever multiplier the rule returned: much noise ends the warm-up of linear
    soon, too. With a layer-wise rule every layer has a sum of its own multipliers, which for lena are the gains of the
    layer, so that layers with much noise end their warm-up sooner; where a layer's gain is the batch ratio itself, that
    of the model is added, as in the authors' code (Algorithm 1 has no such exception). Sums only grow, so that a
    warm-up that has ended does not start again. Before anything was measured the gain is 1, or the ratio below the
    reference batch. The record holds the number of layers that are still warming up (warming; 1 for a rule of the whole
    model), and the gain.

    With by=multiplier the multipliers of the rule are added instead, S for linear and sqrt(S) for sqrt, and nothing is
    measured. This is not the paper's method: the warm-up of linear then takes alpha of the run whatever the noise, and
    that of sqrt takes alpha sqrt(S). It may suit optimizers that normalise the gradient, such as AdamW, which early in
    training bear more than the gain says (seen in short runs of one small language model only).

    Suits: large batches from the first step on, instead of a warm-up whose length must be tuned. The run must have an
    end. Where the gain is small it grows slowly, and the warm-up can take most of the run.
    """

    alpha: float = param(0.05, doc="length of the warm-up as a part of the reference run, 0 to 1")
    by: Literal["gain", "multiplier"] = param(
        "gain", doc="what is added up: the measured gain, or the multiplier of the rule, which needs no measurement"
    )

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise SpecError(f"statewarmup: alpha is {self.alpha:g}; expected 0 (none) to 1; the paper advises 0.05")
        if self.by == "multiplier":
            object.__setattr__(self, "needs", frozenset())

    def init(self) -> State:
        """The sum of the model, or of each layer."""
        return [0.0]

    def modify(self, context: StepContext, scaling: Scaling, state: State) -> tuple[Scaling, State]:
        """Add, then compare: lines 17 to 21 of Algorithm 1."""
        if context.total_samples <= 0:
            raise ConfigError(
                "statewarmup lasts for a part of the run, but the run has no end; "
                "give the optimizer its number of epochs, or use a warm-up of a given length: warmup(5ep)"
            )
        theta = self.alpha * context.total_samples / context.ref_batch
        added: Sequence[float] = scaling.layers
        if self.by == "gain":
            whole = whole_gain(context)
            layer_wise = isinstance(scaling.lr, tuple)
            added = [whole if m == context.ratio else m for m in added] if layer_wise else [whole]
            scaling = scaling.with_stats(gain=whole, **noise_stats(context.moments))
        count = max(len(state), len(added))
        layers = spread(scaling.layers, count)
        sums = [before + more for before, more in zip(spread(state, count), spread(added, count), strict=True)]
        warmed = [m * p / theta if p < theta else m for m, p in zip(layers, sums, strict=True)]
        warmed_up = scaling.with_lr(warmed).with_stats(warming=float(sum(p < theta for p in sums)))
        if count > 1:
            warmed_up = replace(warmed_up, warm_up=tuple(p / theta if p < theta else 1.0 for p in sums))
        return warmed_up, sums


@register_modifier("ramp", cite="Lin et al. 2019, arXiv 1904.12043, eq. 6")
@dataclass(frozen=True)
class Ramp(Modifier):
    """After an increase m climbs linearly from the current value to the rule's, over T = 8k steps, k = new/old.

    The momentum still holds gradients of the smaller batch, whose noise a larger rate would amplify by k^2; during the
    ramp they decay. A decrease is applied at once (footnote 3 of the paper). T counts steps of the new batch, and the
    first of them still has the old multiplier, as in eq. 6. The first step of a run has no momentum and needs no ramp.

    k is the new multiplier of the rule divided by the current one, which for linear is the ratio of the batches, as in
    the paper. A ramp begins only when the batch changes. Where a rule changes a little at every step, as AdaScale does,
    the ramp multiplies its value: m = c m*, with c climbing from 1/k to 1. Each layer has a ramp of its own.

    If the batch changes during a ramp, which the paper leaves open, let m be the current value and m* the new target:
    m* <= m is applied at once and ends the ramp; otherwise a new ramp leads from m to m*, with k = m*/m. If changes
    come faster than T, the target is never reached; the record holds m/m* as `ramp` (of the lowest layer).

    The smaller last step of an epoch is not a change of the fleet: its rate is lower, and the ramp neither advances nor
    begins anew after it. Otherwise every epoch would begin with a long ramp. The same holds for the step before it, if
    that takes one sample less so that the last one has two.

    Suits: SGD with momentum on a fleet that grows in jumps. If changes are more frequent than T, consider `inside`.
    """

    steps: float = param(8.0, doc="steps of the ramp per unit of k; the paper advises 8")

    def __post_init__(self) -> None:
        if self.steps <= 0:
            raise SpecError(f"ramp: steps is {self.steps:g}; expected a positive number; the paper advises 8")

    def modify(self, context: StepContext, scaling: Scaling, state: State) -> tuple[Scaling, State]:
        """c m*, and the new state: the batch, the targets, the initial c of each layer and the steps since then."""
        if context.hypothetical:
            return scaling, state
        targets = scaling.layers
        if state is None:
            state = {"batch": context.batch, "targets": list(targets), "begin": [1.0], "step": 0}
        count = max(len(targets), len(state["targets"]), len(state["begin"]))
        targets = tuple(spread(targets, count))
        begin, step = list(spread(state["begin"], count)), state["step"] + 1
        if context.batch != state["batch"]:
            current = [m * self._part(b, step) for m, b in zip(spread(state["targets"], count), begin, strict=True)]
            if _cut_by_epoch(context, state["batch"]):
                lowered = [min(m, target) for m, target in zip(current, targets, strict=True)]
                return self._scaling(scaling, lowered, targets), state
            # There is no way up from a rate of zero by a factor, nor any to it.
            begin = [min(1.0, m / target) if m and target else 1.0 for m, target in zip(current, targets, strict=True)]
            step = 0
        climbed = [target * self._part(b, step) for target, b in zip(targets, begin, strict=True)]
        new = {"batch": context.batch, "targets": list(targets), "begin": begin, "step": step}
        return self._scaling(scaling, climbed, targets), new

    def _part(self, begin: float, step: int) -> float:
        """c after `step` steps of a ramp that began at 1/k: linear, 1 after T = 8k steps."""
        return begin + (1.0 - begin) * min(1.0, step * begin / self.steps)

    def _scaling(self, scaling: Scaling, layers: list[float], targets: tuple[float, ...]) -> Scaling:
        lowest = min(m / target if target else 1.0 for m, target in zip(layers, targets, strict=True))
        return scaling.with_lr(layers).with_stats(ramp=lowest)


def _cut_by_epoch(context: StepContext, before: int) -> bool:
    """Whether the batch of the step differs from the previous one only because the epoch ends."""
    if context.epoch_samples <= 0:
        return False
    remaining = context.epoch_samples - context.samples % context.epoch_samples
    if context.dropped:  # a step that drops samples is cut in proportion; at most two samples follow it
        return context.batch < before and remaining - context.batch - context.dropped <= 2
    return context.batch == cut_step(before, remaining)


@register_modifier("inside", cite="Lin et al. 2019, arXiv 1904.12043, eq. 13")
@dataclass(frozen=True)
class Inside(Modifier):
    """m multiplies the gradient before it enters the momentum; the learning rate stays.

    The paper has v <- mu v + eta sum(gradients), w <- w - v: the sum over the batch, with a step size that does not
    depend on the batch. This is the mean gradient times B/B0 in the buffer of u <- mu u + g. Old gradients keep the
    multiplier of their own step, so that a change needs no ramp in either direction and no hyper-parameter. Coupled
    weight decay is multiplied with the gradient, since it would otherwise be lost. Modifiers further right see an
    unchanged rate, so write it last, as in linear+warmup(5ep)+inside.

    Suits: SGD with momentum on fleets that change often. Adam and similar optimizers, LARS and LAMB divide by the size
    of the gradient, which undoes it: their rate then does not follow the batch.
    """

    def modify(self, context: StepContext, scaling: Scaling, state: State) -> tuple[Scaling, State]:
        """Move the multipliers from `lr` to `gradient`; a rate of zero stays, or momentum would move the weights."""
        count = max(len(scaling.inside), len(scaling.layers))
        inside = tuple(scaling.by_layer(count))
        stay = tuple(float(m > 0) for m in scaling.layers)
        lr = 1.0 if all(stay) else stay if len(stay) > 1 else 0.0
        single = not isinstance(scaling.lr, tuple) and not isinstance(scaling.gradient, tuple)
        return replace(scaling, lr=lr, gradient=inside[0] if single else inside), state


@register_modifier("cap", cite="a safeguard, not a published method")
@dataclass(frozen=True)
class Cap(Modifier):
    """m = min(m, x): no more than x times the base rate.

    Where the schedule follows the gain, a step is worth no more than x reference steps.

    Suits: a fleet that may grow beyond the largest batch at which the rule is known to work.

    Example: linear+cap(8)
    """

    x: float = param(doc="the largest multiplier, at least 1")

    def __post_init__(self) -> None:
        if self.x < 1:
            raise SpecError(f"cap: x is {self.x:g}; expected at least 1: the reference batch keeps the base rate")

    def modify(self, context: StepContext, scaling: Scaling, state: State) -> tuple[Scaling, State]:
        """The smaller of the multiplier and x, for every layer."""
        progress = None if scaling.progress is None else min(scaling.progress, self.x)
        return replace(scaling.map_lr(lambda m: min(m, self.x)), progress=progress), state


@register_modifier("keepdecay", cite="Bergsma et al. 2025, arXiv 2505.13738 (the timescale of weight decay)")
@dataclass(frozen=True)
class KeepDecay(Modifier):
    """lambda is multiplied by S/m, S = B/B0: the decay over a number of samples stays the same.

    A step shrinks the weights by lr lambda, coupled or decoupled, and there are S times fewer steps. With a rate of m
    times the base rate, lr lambda/B stays the same if lambda is multiplied by S/m: unchanged for linear, sqrt(S) for
    sqrt. A multiplier inside the momentum is part of m. Optimizers have one decay for all layers, so that with a
    layer-wise rule m is the mean over the layers.

    Suits: rules far from linear, above all sqrt with AdamW; also warm-ups and ramps of SGD that should not weaken the
    regularisation.

    Example: sqrt+keepdecay
    """

    def modify(self, context: StepContext, scaling: Scaling, state: State) -> tuple[Scaling, State]:
        """Multiply the decay by the batch ratio over the multiplier; a rate of zero decays nothing anyway."""
        factor = context.ratio / scaling.multiplier if scaling.multiplier else 1.0
        return replace(scaling, weight_decay=scaling.weight_decay * factor), state
