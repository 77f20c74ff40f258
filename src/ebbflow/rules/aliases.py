"""Names of published methods that are a rule and its modifiers."""

from __future__ import annotations

import functools
from abc import abstractmethod
from dataclasses import dataclass

from ebbflow.core.spec import param
from ebbflow.core.units import Span
from ebbflow.rules.base import Rule, Scaling, State, StepContext
from ebbflow.rules.registry import make_rule, register

__all__ = ["Alias", "Dynamic", "Lsw"]


class Alias(Rule):
    """A rule that stands for a text."""

    @property
    @abstractmethod
    def stands_for(self) -> str:
        """The text."""

    @property
    def needs(self) -> frozenset[str]:
        """What the text needs."""
        return _made(self.stands_for).needs

    def init(self) -> State:
        """The state of the text's rule."""
        return _made(self.stands_for).init()

    def scale(self, context: StepContext, state: State) -> tuple[Scaling, State]:
        """What the text's rule says."""
        return _made(self.stands_for).scale(context, state)


_made = functools.cache(make_rule)
"""Rules are values, so one of each is enough."""


@register("dynamic", cite="Lin et al. 2019, arXiv 1904.12043")
@dataclass(frozen=True)
class Dynamic(Alias):
    """Dynamic SGD; stands for linear+ramp.

    Suits: SGD with momentum on a fleet that grows in jumps and stays for hundreds of steps.
    """

    @property
    def stands_for(self) -> str:
        """linear+ramp."""
        return "linear+ramp"


@register("lsw", cite="Goyal et al. 2017, arXiv 1706.02677 (so named by Ko et al. 2022)")
@dataclass(frozen=True)
class Lsw(Alias):
    """Linear scaling with warm-up; stands for linear+warmup(5ep).

    Both papers warm up over the first 5.5 % of training, which is 5 of 90 epochs: give a shorter run a shorter one,
    as lsw(2ep).

    Suits: SGD with momentum, batches up to about 8000 on image classification.
    """

    length: Span = param(Span(5.0, "ep"), doc="the warm-up: 5ep (epochs), 1000steps or 64000samples")

    @property
    def stands_for(self) -> str:
        """linear+warmup of the length."""
        return f"linear+warmup({self.length})"
