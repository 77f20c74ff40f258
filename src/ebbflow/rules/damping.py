"""A step that is smaller than a growing policy requested: the learning rate pays for the difference."""

from __future__ import annotations

from dataclasses import replace

from ebbflow.rules.base import Rule, Scaling, State, StepContext

__all__ = ["scale_damped"]


def scale_damped(rule: Rule, context: StepContext, state: State, *, exponent: float) -> tuple[Scaling, State]:
    """What the rule says of the step, less what the rate has to pay where the step falls short of what was requested.

    A step of B samples where D were requested should be as large as the rule says of D, times (B/D)^exponent: 1 for
    SGD, whose noise grows with rate/B, 1/2 for optimizers that normalise the gradient. A rule that follows the batch
    has paid already, as far as it follows it: `linear` says B/D less of B by itself. Nobody pays twice, or gets
    anything back. With `constant` this is the damping of Holt and Sievert (2021): the rate times max_batch/D."""
    scaling, following = rule.scale(context, state)
    if context.shortfall >= 1 or not scaling.multiplier > 0:
        return scaling, following
    # A rule is a pure function, so asking about a step that never happens changes nothing.
    wished, _ = rule.scale(replace(context, batch=round(context.batch / context.shortfall), shortfall=1.0), state)
    damping = min(1.0, context.shortfall**exponent * wished.multiplier / scaling.multiplier)
    return scaling.map_lr(lambda lr: lr * damping).with_stats(damping=damping), following
