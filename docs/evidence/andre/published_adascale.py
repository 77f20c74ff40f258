"""AdaScale with the two defects of published code, for this study alone: what did they do to the published curves?

The defects, in code for fleets that change, as their repositories have it in 2022:

*memory*: a piece's gradient is taken as the difference to the sum before it, but that sum is not cleared between steps.
So the first piece of a step is measured as g_1 - K gbar', where gbar' is the mean gradient of the step before and K the
number of pieces. With independent pieces of variance s2 around the same mean of squared norm mu2, that adds
K^2 (mu2 + s2/K) - 2 K mu2 to the sum of the pieces' squared norms, and the estimators then read

    s2 + K ((K - 2) mu2 + s2)/(K - 1)   for s2,     (mu2 - s2)/(K - 1), at least 0,   for mu2.

*rescaling*: when the scale changes, the average of the variance is multiplied by old/new scale, which is right where
each worker's batch changes and wrong where the number of workers does. New observations mend it within about 1000/S
steps.

A rule sees averages, not gradients. Both defects are therefore applied to the averages, as they are on average: what is
missing is the scatter of single steps, which a model with millions of parameters has little of.
"""

from __future__ import annotations

from dataclasses import dataclass

from ebbflow import register_rule
from ebbflow.core.spec import param
from ebbflow.rules.noise_rules import gain, noise_stats, unmeasured
from ebbflow.rules.rule import Rule, Scaling, State, StepContext


@register_rule("adascale-published", cite="after Andre et al. 2022, and fairscale's set_scale", needs={"moments"})
@dataclass(frozen=True)
class PublishedAdaScale(Rule):
    """The gain that published code would have read; not a rule to train with."""

    memory: bool = param(True, doc="whether the first piece of a step remembers the step before")
    rescaling: bool = param(True, doc="whether a change of the scale multiplies the variance")

    def init(self) -> State:
        """(scale of the step before, what the average of the variance is multiplied with)."""
        return [0.0, 1.0]

    def scale(self, context: StepContext, state: State) -> tuple[Scaling, State]:
        """The gain, from noise and signal as they would have been read."""
        before, factor = state
        ratio = context.ratio
        if self.rescaling and before:
            factor *= before / ratio
            keep = max(0.0, 1.0 - ratio / 1000)
            factor = keep * factor + (1 - keep)  # of the newest observations, which are right
        if context.moments is None:
            return Scaling(lr=unmeasured(ratio)), [ratio, factor]
        pieces = context.workers
        size = context.batch / pieces
        s2, mu2 = max(context.moments.noise, 0.0) / size, max(context.moments.signal, 0.0)
        if self.memory and pieces > 1:
            s2, mu2 = s2 + pieces * ((pieces - 2) * mu2 + s2) / (pieces - 1), max(0.0, (mu2 - s2) / (pieces - 1))
        r = gain(factor * s2 * size / context.ref_batch, mu2, ratio)
        return Scaling(lr=r, stats={"gain": r, **noise_stats(context.moments)}), [ratio, factor]
