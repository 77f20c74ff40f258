"""The contract of a rule: `scale(context, state) -> (Scaling, state)`.

A rule sees one step at a time and nothing but the context; what it must remember it returns as a JSON value and gets
back at the next step. Each step starts from the base rate: a scaled rate is never multiplied again, so no rule can
drift however often the workers change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ebbflow.moments.estimate import Moments

__all__ = ["Chain", "Modifier", "Rule", "Scaling", "State", "StepContext"]

State = Any
"""What a rule remembers: None, or a value that survives JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepContext:
    """What a rule may know about the step it scales."""

    step: int
    """Number of the step, from 0."""
    batch: int
    """Samples in this step."""
    ref_batch: int
    """The batch at which the base learning rate was tuned."""
    samples: int
    """Samples committed before this step."""
    workers: int = 1
    epoch_samples: int = 0
    """Samples in an epoch; 0 if there is no such thing."""
    total_samples: int = 0
    """Samples in the whole run; 0 if it has no end."""
    moments: Moments | None = None
    """Averaged noise and signal, this step's included; None if no rule needs them or nothing was measured yet."""

    @property
    def ratio(self) -> float:
        """Batch of this step over the reference batch: any positive number, also below one."""
        return self.batch / self.ref_batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """How the step differs from a step at the reference batch; `Scaling()` changes nothing."""

    lr: float | tuple[float, ...] = 1.0
    """Multiplies the learning rate, outside the momentum: one number, or one a layer in the order of the parameters."""
    gradient: float = 1.0
    """Multiplies the gradient, inside the momentum; coupled weight decay too, or it would be lost."""
    weight_decay: float = 1.0
    """Multiplies the weight decay."""
    betas: float = 1.0
    """Exponent of Adam's betas: beta^1 is beta; kappa keeps their half-lives constant in samples."""
    eps: float = 1.0
    """Multiplies the eps of an adaptive optimizer."""
    progress: float | None = None
    """Reference steps that this step is worth, where the schedule follows the gain; None: its samples count."""
    stats: Mapping[str, float] = field(default_factory=dict, compare=False)
    """What the rule has to say about this step; goes into the record, changes nothing."""

    def map_lr(self, change: Callable[[float], float]) -> Scaling:
        """The same scaling with other multipliers: what most modifiers do."""
        lr = tuple(map(change, self.lr)) if isinstance(self.lr, tuple) else change(self.lr)
        return replace(self, lr=lr)


class Rule(ABC):
    """A learning-rate rule: subclass as a frozen dataclass and register it."""

    def init(self) -> State:
        """The state before the first step."""
        return None

    @abstractmethod
    def scale(self, context: StepContext, state: State) -> tuple[Scaling, State]:
        """The scaling of one step, and the state for the next one."""


class Modifier(ABC):
    """Changes the scaling that a rule gave: `linear+warmup(5ep)`."""

    def init(self) -> State:
        """The state before the first step."""
        return None

    @abstractmethod
    def modify(self, context: StepContext, scaling: Scaling, state: State) -> tuple[Scaling, State]:
        """The changed scaling, and the state for the next step."""


@dataclass(frozen=True)
class Chain(Rule):
    """A rule followed by modifiers, applied from left to right as they are written."""

    rule: Rule
    modifiers: tuple[Modifier, ...]
    text: str
    """The text form: what the user asked for, shown in records and reports."""

    def init(self) -> State:
        """The states of all parts, in order."""
        return [self.rule.init(), *(modifier.init() for modifier in self.modifiers)]

    def scale(self, context: StepContext, state: State) -> tuple[Scaling, State]:
        """The rule's scaling, changed by each modifier in turn."""
        scaling, first = self.rule.scale(context, state[0])
        states = [first]
        for modifier, old in zip(self.modifiers, state[1:], strict=True):
            scaling, new = modifier.modify(context, scaling, old)
            states.append(new)
        return scaling, states

    def __str__(self) -> str:
        return self.text
