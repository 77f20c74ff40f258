"""Warm-up: the multiplier climbs to what the rule says over the first part of training."""

from __future__ import annotations

from dataclasses import dataclass

from ebbflow.core.spec import param
from ebbflow.core.units import Span
from ebbflow.errors import SpecError
from ebbflow.rules.base import Modifier, Scaling, State, StepContext
from ebbflow.rules.registry import register_modifier

__all__ = ["Warmup"]


@register_modifier("warmup", cite="Goyal et al. 2017, arXiv 1706.02677")
@dataclass(frozen=True)
class Warmup(Modifier):
    """m climbs linearly from `start` to the rule's value over the given span, counted in samples.

    Counted in samples, the warm-up ends at the same point of training whatever the workers do. Where the rule asks
    for less than `start` (a batch below the reference), that is applied at once: a warm-up never raises the rate.

    Suits: large batches from the first step on, when the weights still change fast.

    Example: linear+warmup(5ep)
    """

    length: Span = param(doc="how long: 5ep (epochs), 1000steps (of the reference batch) or 64000samples")
    start: float = param(1.0, doc="multiplier at the first step; 1 is the base rate, 0 starts from nothing")

    def __post_init__(self) -> None:
        if not 0 <= self.start <= 1:
            raise SpecError(f"warmup: start is {self.start:g}; expected 0 (from nothing) to 1 (from the base rate)")

    def modify(self, context: StepContext, scaling: Scaling, state: State) -> tuple[Scaling, State]:
        """start + (m - start) * s/S while s < S, with s the samples in the middle of the step."""
        length = self.length.samples(epoch_samples=context.epoch_samples, ref_batch=context.ref_batch)
        if context.samples >= length:
            return scaling, state
        # The middle of the step, so that the first step of a warm-up from nothing still moves, and so that a large
        # step is not given the rate of its first sample.
        done = min(1.0, (context.samples + context.batch / 2) / length)
        return scaling.map_lr(lambda m: self.start + (m - self.start) * done if m > self.start else m), state
