"""AdaScale as the code of Andre, Strati and Klimovic (2022) has it, on the eight cores that they ran it on.

A step of B samples is cut into K pieces of b samples, which are dealt out to C cores; S of the code is K, so that gain
and averages refer to a batch of b, and the rate is that of the reference batch B0 times b/B0 times the gain. Two
defects, each of which can be switched off:

*memory*: every core takes the gradient of a piece as the difference to the sum of its own pieces before it, and does
not clear that sum between steps. So the first piece of a core with n pieces is measured as g_1 - n gbar', where gbar'
is the mean gradient of the core's pieces in the step before. With independent pieces of variance s2 around the same
mean of squared norm mu2, that adds n^2 (mu2 + s2/n) - 2 n mu2 to the sum of the pieces' squared norms, over all cores

    D = (sum of n^2 - 2 K) mu2 + K s2,       K ((K/C - 2) mu2 + s2) if all cores have as many,

and the estimators then read s2 + D/(K - 1) for s2 and mu2 - D/(K (K - 1)), at least 0, for mu2. `../andre` has the case
of one core, C = 1, where the gain is the batch ratio wherever s2 >= mu2.

*rescaling*: when K changes, the average of the variance is multiplied by old K/new K, which is right where the pieces
change and wrong where their number does. New observations mend it within about 1000/K steps.

A rule sees averages, not gradients. Both defects are therefore applied to the averages, as they are on average. What is
missing: the scatter of single steps, and that the code clips each estimate before it averages; that its averages begin
at 0 and 1, which it forgets within about 1000/K steps; and the one step after a change in which a core remembers
another number of pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

from ebbflow import register_rule
from ebbflow.core.spec import param
from ebbflow.rules.noise_rules import gain, noise_stats
from ebbflow.rules.rule import Rule, Scaling, State, StepContext


def misread(s2: float, mu2: float, *, pieces: int, cores: int) -> tuple[float, float]:
    """What is read for the variance of a piece and for the squared norm of the mean gradient."""
    each, more = divmod(pieces, cores)
    squares = (cores - more) * each**2 + more * (each + 1) ** 2
    added = (squares - 2 * pieces) * mu2 + pieces * s2
    return s2 + added / (pieces - 1), max(0.0, mu2 - added / (pieces * (pieces - 1)))


@register_rule("adascale-on-cores", cite="after Andre et al. 2022, and fairscale's set_scale", needs={"moments"})
@dataclass(frozen=True)
class AdaScaleOnCores(Rule):
    """The gain that published code would have read; not a rule to train with."""

    cores: int = param(8, doc="cores, each with a memory of its own")
    pieces: int = param(4, doc="pieces per worker: 128 samples in pieces of 32 in the paper")
    memory: bool = param(True, doc="whether the first piece of a core remembers the step before")
    rescaling: bool = param(True, doc="whether a change of the scale multiplies the variance")

    def init(self) -> State:
        """(pieces of the step before, what the average of the variance is multiplied with)."""
        return [0, 1.0]

    def scale(self, context: StepContext, state: State) -> tuple[Scaling, State]:
        """b/B0 times the gain of K pieces, from noise and signal as they would have been read."""
        before, factor = state
        count = self.pieces * context.workers
        size = context.batch / count
        if self.rescaling and before:
            keep = max(0.0, 1.0 - count / 1000)
            factor = keep * factor * before / count + (1 - keep)  # the newest observations are right
        new = [count, factor]
        if context.moments is None:
            return Scaling(lr=size / context.ref_batch), new
        s2, mu2 = max(context.moments.noise, 0.0) / size, max(context.moments.signal, 0.0)
        if self.memory:
            s2, mu2 = misread(s2, mu2, pieces=count, cores=self.cores)
        m = size / context.ref_batch * gain(factor * s2, mu2, count)
        return Scaling(lr=m, stats={"gain": m, **noise_stats(context.moments)}), new
