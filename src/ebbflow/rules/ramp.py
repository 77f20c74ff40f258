"""Momentum compensation: after an increase of the batch the multiplier climbs to its new value."""

from __future__ import annotations

from dataclasses import dataclass

from ebbflow.core.spec import param
from ebbflow.errors import SpecError
from ebbflow.plan.epochs import cut_step
from ebbflow.rules.base import Modifier, Scaling, State, StepContext, spread
from ebbflow.rules.registry import register_modifier

__all__ = ["Ramp"]


@register_modifier("ramp", cite="Lin et al. 2019, arXiv 1904.12043, eq. 6")
@dataclass(frozen=True)
class Ramp(Modifier):
    """After an increase m climbs linearly from the value in force to the rule's, over T = 8k steps, k = new/old.

    The momentum still holds gradients of the smaller batch, whose noise a larger rate would amplify by k^2; the ramp
    gives them time to fade. A decrease is applied at once (footnote 3 of the paper). T counts steps of the new batch,
    and the first of them still has the old multiplier, as in eq. 6. The first step of a run has no momentum: no ramp.

    What k is: the rule's new multiplier over the one in force, which for linear is the ratio of the batches, as in the
    paper. A ramp begins when the batch changes, and only then. Where a rule moves a little at every step, as AdaScale
    does, the ramp scales whatever it says: m = c m*, with c climbing from 1/k to 1. Layers have ramps of their own.

    A change inside a ramp, which the paper leaves open: with m the value that the old ramp has reached and m* the new
    target, m* <= m is applied at once and ends the ramp; else a new ramp leads from m to m*, with k = m*/m. Where
    changes come faster than T, the target is never reached: the record holds m/m* as `ramp` (of the lowest layer).

    The short last step of an epoch is no change of the fleet: its rate falls with it, and the ramp neither moves nor
    begins anew behind it. Otherwise every epoch would begin with a long ramp. The same holds for the step before it
    where that gives up one sample, so that the last one has two.

    Suits: SGD with momentum on a fleet that grows in jumps. With changes more frequent than T consider `inside`.
    """

    steps: float = param(8.0, doc="length of the ramp in steps for each unit of k; the paper advises 8")

    def __post_init__(self) -> None:
        if self.steps <= 0:
            raise SpecError(f"ramp: steps is {self.steps:g}; expected a positive number; the paper advises 8")

    def modify(self, context: StepContext, scaling: Scaling, state: State) -> tuple[Scaling, State]:
        """c m*, and the new state: batch, targets, where each c began and how many steps ago."""
        targets = scaling.layers
        if state is None:
            state = {"batch": context.batch, "targets": list(targets), "begin": [1.0], "step": 0}
        count = max(len(targets), len(state["targets"]), len(state["begin"]))
        targets = tuple(spread(targets, count))
        begin, step = list(spread(state["begin"], count)), state["step"] + 1
        if context.batch != state["batch"]:
            in_force = [m * self._part(b, step) for m, b in zip(spread(state["targets"], count), begin, strict=True)]
            if _cut_by_epoch(context, state["batch"]):
                lowered = [min(m, target) for m, target in zip(in_force, targets, strict=True)]
                return self._scaling(scaling, lowered, targets), state
            begin = [min(1.0, m / target) for m, target in zip(in_force, targets, strict=True)]
            step = 0
        climbed = [target * self._part(b, step) for target, b in zip(targets, begin, strict=True)]
        new = {"batch": context.batch, "targets": list(targets), "begin": begin, "step": step}
        return self._scaling(scaling, climbed, targets), new

    def _part(self, begin: float, step: int) -> float:
        """c after some steps of a ramp that began at 1/k: in a straight line to 1 over T = 8k steps."""
        return begin + (1.0 - begin) * min(1.0, step * begin / self.steps)

    def _scaling(self, scaling: Scaling, layers: list[float], targets: tuple[float, ...]) -> Scaling:
        lowest = min(m / target for m, target in zip(layers, targets, strict=True))
        return scaling.with_lr(layers).with_stats(ramp=lowest)


def _cut_by_epoch(context: StepContext, before: int) -> bool:
    """Whether a fleet that still asks for the batch of before is given this one, by the end of the epoch."""
    if context.epoch_samples <= 0:
        return False
    remaining = context.epoch_samples - context.samples % context.epoch_samples
    return context.batch == cut_step(before, remaining)
