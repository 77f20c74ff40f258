"""The contract of a rule: `scale(context, state) -> (Scaling, state)`.

A rule sees one step at a time and nothing but the context; what it must remember it returns as a JSON value and gets
back at the next step. Each step starts from the base rate: a scaled rate is never multiplied again, so no rule can
drift however often the workers change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from ebbflow.errors import ConfigError
from ebbflow.moments.estimate import Moments

__all__ = ["Chain", "Modifier", "Rule", "Scaling", "State", "StepContext", "spread"]

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
    shortfall: float = 1.0
    """The part of the batch that a growing policy requested; rules need not look at it, the optimizer does."""
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
    gradient: float | tuple[float, ...] = 1.0
    """Multiplies the gradient, inside the momentum: one number, or one a layer; coupled weight decay with it."""
    weight_decay: float = 1.0
    """Multiplies the weight decay, of all layers alike."""
    betas: float | tuple[float, float] = 1.0
    """Exponent of Adam's betas, of both or of each: beta^1 is beta; kappa keeps a half-life constant in samples."""
    eps: float = 1.0
    """Multiplies the eps of an adaptive optimizer."""
    progress: float | None = None
    """Reference steps that this step is worth, where the schedule follows the gain; None: its samples count."""
    stats: Mapping[str, float] = field(default_factory=dict, compare=False)
    """What the rule has to say about this step; goes into the record, changes nothing."""

    @property
    def layers(self) -> tuple[float, ...]:
        """The multipliers of the rate as a tuple, which has one entry where all layers share one."""
        return self.lr if isinstance(self.lr, tuple) else (self.lr,)

    @property
    def multiplier(self) -> float:
        """How much larger the step is, outside and inside the momentum together; the mean over layers that differ.

        >>> Scaling(lr=(1.0, 3.0), gradient=2.0).multiplier
        4.0
        """
        count = max(len(self.layers), len(self._inside))
        return sum(self.by_layer(count)) / count

    @property
    def _inside(self) -> tuple[float, ...]:
        return self.gradient if isinstance(self.gradient, tuple) else (self.gradient,)

    def by_layer(self, count: int) -> list[float]:
        """How much larger the step of each of `count` layers is, outside and inside the momentum together."""
        pairs = zip(spread(self.layers, count), spread(self._inside, count), strict=True)
        return [lr * gradient for lr, gradient in pairs]

    def map_lr(self, change: Callable[[float], float]) -> Scaling:
        """The same scaling with other multipliers: what most modifiers do."""
        lr = tuple(map(change, self.lr)) if isinstance(self.lr, tuple) else change(self.lr)
        return replace(self, lr=lr)

    def with_lr(self, layers: Sequence[float]) -> Scaling:
        """The same scaling with these multipliers; one that all layers shared stays a single number."""
        return replace(self, lr=tuple(layers) if len(layers) > 1 or isinstance(self.lr, tuple) else layers[0])

    def with_stats(self, **stats: float) -> Scaling:
        """The same scaling with more to say."""
        return replace(self, stats={**self.stats, **stats})


def spread(values: Sequence[float], count: int) -> Sequence[float]:
    """One value for all layers, written out for each; values that differ already are returned as they are."""
    if len(values) == count:
        return values
    if len(values) == 1:
        return [values[0]] * count
    raise ConfigError(
        f"the state of the rule is of {len(values)} layers, the step of {count}; a model whose trainable tensors "
        f"change during the run needs a rule for the whole model, such as adascale"
    )


class _Part:
    """What rules and modifiers share."""

    registered_needs: ClassVar[frozenset[str]] = frozenset()
    """Written by the registry, from the `needs` of the registration."""

    @property
    def needs(self) -> frozenset[str]:
        """What must be measured for it: "moments" of the whole model, "layers" of each layer too."""
        return self.registered_needs

    def init(self) -> State:
        """The state before the first step."""
        return None


class Rule(_Part, ABC):
    """A learning-rate rule: subclass as a frozen dataclass and register it."""

    @abstractmethod
    def scale(self, context: StepContext, state: State) -> tuple[Scaling, State]:
        """The scaling of one step, and the state for the next one."""


class Modifier(_Part, ABC):
    """Changes the scaling that a rule gave: `linear+warmup(5ep)`."""

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

    @property
    def needs(self) -> frozenset[str]:
        """What any of the parts needs."""
        return self.rule.needs.union(*(modifier.needs for modifier in self.modifiers))

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
