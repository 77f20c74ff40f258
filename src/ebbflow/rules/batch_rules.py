"""Rules that look at the batch alone: constant, linear, sqrt, power, adamsde, legw, and the aliases dynamic and lsw."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

from ebbflow.core.spec import param
from ebbflow.core.units import Span
from ebbflow.errors import SpecError
from ebbflow.rules.rule import Rule, Scaling, State, StepContext, make_rule, register_rule

__all__ = ["AdamSde", "Alias", "Constant", "Dynamic", "Legw", "Linear", "Lsw", "Power", "Sqrt"]


@register_rule("constant", cite="the baseline of every study")
@dataclass(frozen=True)
class Constant(Rule):
    """m = 1: the base rate, whatever the batch.

    Suits: optimizers and batches for which the rate hardly matters; the baseline of a comparison.
    """

    def scale(self, context: StepContext, state: State) -> tuple[Scaling, State]:
        """A scaling that changes nothing."""
        return Scaling(), state


@register_rule("linear", cite="Goyal et al. 2017, arXiv 1706.02677")
@dataclass(frozen=True)
class Linear(Rule):
    """m = B/B0: k times the batch, k times the rate.

    Suits: SGD with momentum while noise dominates the gradient, that is, for batches below the noise scale of the
    model.
    """

    def scale(self, context: StepContext, state: State) -> tuple[Scaling, State]:
        """The batch ratio."""
        return Scaling(lr=context.ratio), state


@register_rule("sqrt", cite="Krizhevsky 2014, arXiv 1404.5997")
@dataclass(frozen=True)
class Sqrt(Rule):
    """m = sqrt(B/B0): keeps the variance of the update.

    Suits: Adam and similar optimizers; SGD at batches for which linear is too large. Below the reference batch linear
    is safer.
    """

    def scale(self, context: StepContext, state: State) -> tuple[Scaling, State]:
        """The square root of the batch ratio."""
        return Scaling(lr=math.sqrt(context.ratio)), state


@register_rule("power", cite="Shallue et al. 2019, arXiv 1811.03600 (no single exponent fits all workloads)")
@dataclass(frozen=True)
class Power(Rule):
    """m = (B/B0)^p: constant, sqrt and linear are p = 0, 1/2 and 1.

    Suits: a workload that was tuned at two batch sizes: p = log(rate ratio)/log(batch ratio).
    """

    p: float = param(0.75, doc="the exponent, 0 to 1")

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise SpecError(f"power: p is {self.p:g}; expected a number from 0 (constant) to 1 (linear)")

    def scale(self, context: StepContext, state: State) -> tuple[Scaling, State]:
        """The batch ratio to the power p."""
        return Scaling(lr=context.ratio**self.p), state


@register_rule("adamsde", cite="Malladi et al. 2022, arXiv 2205.10287; Marek et al. 2025, arXiv 2507.07101")
@dataclass(frozen=True)
class AdamSde(Rule):
    """m = sqrt(S), betas -> beta^S, eps -> eps/sqrt(S), with S = B/B0: Adam as the same process in samples.

    The published rule is 1 - beta' = S(1 - beta), which is negative at S > 10 for beta = 0.9. The half-life form beta'
    = beta^S is equal to it to first order, keeps the memory of the averages constant in samples, and holds for every S.
    The optimizer corrects the bias of its averages with the product of the betas that were used.

    Suits: Adam, AdamW, RMSprop and similar optimizers, while noise dominates the gradient. Not SGD.
    """

    beta1: bool = param(True, doc="whether beta1 follows the batch, too; many published recipes keep it: false")

    def scale(self, context: StepContext, state: State) -> tuple[Scaling, State]:
        """Multipliers of rate and eps, and the exponents of the betas."""
        ratio = context.ratio
        betas = ratio if self.beta1 else (1.0, ratio)
        return Scaling(lr=math.sqrt(ratio), betas=betas, eps=1 / math.sqrt(ratio)), state


@register_rule(
    "legw",
    cite="You et al. 2019, arXiv 1901.08256",
    exempt={
        "identity": "warms up from zero at the reference batch, too",
        "no less than the base rate": "warms up from zero",
    },
)
@dataclass(frozen=True)
class Legw(Rule):
    """m = sqrt(S) min(1, s/(S W)): sqrt, warmed up over S times the epochs, S = B/B0.

    W is the length of the warm-up at the reference batch, and s the samples up to the middle of the step. At S times
    the batch the warm-up takes S times the epochs, which is the same number of steps. If the batch changes during the
    warm-up, the end of the warm-up moves; once it has ended, it does not start again, however large a later batch is.

    Suits: LSTMs, transformers and other models whose warm-up was tuned at the reference batch; with LARS or LAMB.

    Example: legw(1ep)
    """

    warmup: Span = param(doc="warm-up at the reference batch: 1ep (epochs), 200steps or 64000samples")

    def init(self) -> State:
        """Whether the warm-up has ended."""
        return False

    def scale(self, context: StepContext, state: State) -> tuple[Scaling, State]:
        """The square root of the batch ratio, times the completed part of the warm-up."""
        length = self.warmup.samples(epoch_samples=context.epoch_samples, ref_batch=context.ref_batch) * context.ratio
        middle = context.samples + context.batch / 2  # as in `warmup`, so that the first step has a rate above zero
        over = state or middle >= length
        return Scaling(lr=math.sqrt(context.ratio) * (1.0 if over else middle / length)), over


# -- names of published methods that are a rule with modifiers ---------------------------------------------------------


class Alias(Rule):
    """A rule that stands for the text of another rule with modifiers."""

    @property
    @abstractmethod
    def stands_for(self) -> str:
        """The text."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_rule", make_rule(self.stands_for))
        object.__setattr__(self, "needs", self._rule.needs)

    _rule: Rule

    def init(self) -> State:
        """The state of the rule that the text names."""
        return self._rule.init()

    def scale(self, context: StepContext, state: State) -> tuple[Scaling, State]:
        """The scaling of the rule that the text names."""
        return self._rule.scale(context, state)


@register_rule("dynamic", cite="Lin et al. 2019, arXiv 1904.12043")
@dataclass(frozen=True)
class Dynamic(Alias):
    """Dynamic SGD; stands for linear+ramp.

    Suits: SGD with momentum on a fleet that grows in jumps and then stays the same for hundreds of steps.
    """

    @property
    def stands_for(self) -> str:
        """The text linear+ramp."""
        return "linear+ramp"


@register_rule("lsw", cite="Goyal et al. 2017, arXiv 1706.02677 (so named by Ko et al. 2022)")
@dataclass(frozen=True)
class Lsw(Alias):
    """Linear scaling with warm-up; stands for linear+warmup(5ep).

    Both papers warm up over the first 5.5 % of training, which is 5 of 90 epochs. Give a shorter run a shorter warm-up,
    such as lsw(2ep).

    Suits: SGD with momentum, batches up to about 8000 on image classification.
    """

    length: Span = param(Span(5.0, "ep"), doc="the warm-up: 5ep (epochs), 1000steps or 64000samples")

    @property
    def stands_for(self) -> str:
        """The text linear+warmup with this length."""
        return f"linear+warmup({self.length})"
