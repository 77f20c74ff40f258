"""AdaScale: the rate follows the gain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ebbflow.core.spec import param
from ebbflow.rules.base import Rule, Scaling, State, StepContext
from ebbflow.rules.gain import noise_stats, whole_gain
from ebbflow.rules.registry import register

__all__ = ["AdaScale"]


@register("adascale", cite="Johnson et al. 2020, arXiv 2007.05105", needs={"moments"})
@dataclass(frozen=True)
class AdaScale(Rule):
    """m = r = (s2 + mu2)/(s2/S + mu2): the reference steps that a step of S = B/B0 is worth.

    s2 = V/B0 is the variance that a reference batch leaves in its mean gradient, mu2 the squared norm of the true
    gradient; both are averages over about 1000 reference steps, and the ratio is taken last. Noise asks for the linear
    rule (r = S), signal for a constant rate (r = 1). V and mu2 belong to the model and not to the fleet, so the gain is
    right at once when the workers change; S may be any positive number, also a fraction or below 1.

    Progress: by default the schedule follows the samples, and the run has as many as the reference run. With
    progress=gain it follows the sum of the gains, as in the paper: a step counts as r reference steps, and the run ends
    when they add up to the reference run. Since r <= S, that takes more samples than the reference run, never fewer.

    Before anything was measured (in a single gradient micro-batch noise and signal cannot be told apart) r is 1, the
    paper's r_0, and S below the reference batch. A step's own measurement counts: with two micro-batches the first step
    has a gain.

    Suits: SGD with momentum, where the noise of the model is not known: it is linear where noise rules and stops
    growing where more samples no longer help. Needs two gradient micro-batches in most steps.
    """

    progress: Literal["samples", "gain"] = param(
        "samples", doc="what the schedule follows: samples, or gain (the paper's; takes more samples)"
    )

    def scale(self, context: StepContext, state: State) -> tuple[Scaling, State]:
        """The gain of the whole model."""
        r = whole_gain(context)
        progress = r if self.progress == "gain" else None
        return Scaling(lr=r, progress=progress, stats={"gain": r, **noise_stats(context.moments)}), state
