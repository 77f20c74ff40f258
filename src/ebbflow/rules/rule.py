"""The contract of a rule, `scale(context, state) -> (Scaling, state)`, and the registry of rules and modifiers.

A rule sees one step at a time and nothing but its context. What it has to remember it returns as a JSON value, which it
gets back at the next step. Every step starts from the base rate: a scaled rate is never multiplied again, so that no
rule can drift, however often the workers change.

The text form of a rule is its name with arguments, followed by modifiers: `linear`, `power(0.75)`, `sqrt+warmup(5ep)`.
All modules of this package are imported before a text is read, so that a new rule needs no further line anywhere. Rules
of your own come from plugin files (`ebbflow train --plugin mine.py`) or from any module that was imported.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ebbflow.core.plugins import raise_naming
from ebbflow.core.spec import Entry, Registry, bind, parse_calls
from ebbflow.errors import ConfigError, SpecError
from ebbflow.moments.estimate import Moments

__all__ = [
    "RULES", "Modifier", "Rule", "RuleChain", "Scaling", "State", "StepContext", "Verdict", "checked", "damp",
    "make_rule", "plain_numbers", "register_modifier", "register_rule", "rule_entries", "spread",
]  # fmt: skip

State = Any
"""What a rule remembers: None, or a value that JSON can hold."""
Verdict = Literal[
    "continue", "snapshot", "confirm", "restore", "release",
    "branch", "average", "score", "score average", "next", "lead", "adopt", "adopt last",
]  # fmt: skip
"""What a rule asks for after a step.

    continue        go on
    snapshot        keep the present state, beside the one to go back to; an unconfirmed one is confirmed thereby
    confirm         the state that was kept last is from now on the one to go back to
    restore         go back to the last confirmed state; the first is that before the first step
    release         go on without any state that was kept

A rule compares branches from one state, of which one is kept:

    branch          keep the present state; the first branch begins
    average         add the present weights to the average of the branch
    score           the branch ends: keep the present state as its end, and go on in order to score it
    score average   the same, with the average of the branch, the present weights included, as the weights
    next            give up the branch that was scored; the next one begins at the state of `branch`
    lead            the same, but its end is the best so far
    adopt           give it up, and go on from the best end so far
    adopt last      go on from its end
"""
MEASURABLE = frozenset({"moments", "layers"})
"""What a rule may need: noise and signal of the whole model, and of each layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepContext:
    """What a rule may know about the step that it scales."""

    step: int
    """Number of the step, counted from 0."""
    batch: int
    """Samples in the step, over all workers."""
    ref_batch: int
    """The batch at which the base learning rate was tuned."""
    samples: int
    """Samples committed before the step, with those that were dropped."""
    workers: int = 1
    """Workers that take part in the step."""
    epoch_samples: int = 0
    """Samples in an epoch; 0 if there are no epochs."""
    total_samples: int = 0
    """Samples in the whole run; 0 if the run has no end."""
    shortfall: float = 1.0
    """`batch` divided by the batch that a growing policy requested; rules need not look at it (see `damp`)."""
    dropped: int = 0
    """Samples that the step drops, in addition to those of `batch`."""
    adaptive: bool = False
    """Whether the optimizer normalises the gradient, as Adam and similar ones do."""
    moments: Moments | None = None
    """Averaged noise and signal, including this step; None if no rule needs them or nothing was measured yet."""
    hypothetical: bool = False
    """Whether the step does not happen, and the rule is only asked what it would do: a ramp, which follows the batches
    that there were, does not begin for it."""
    slopes: tuple[float, float] | None = None
    """Slopes of the loss along the step before this one, where it began and where it ended; for rules that follow
    them, where they are known."""

    @property
    def ratio(self) -> float:
        """The batch ratio: batch of the step divided by the reference batch. It may be below one."""
        return self.batch / self.ref_batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """How a step differs from a step at the reference batch; `Scaling()` changes nothing."""

    lr: float | tuple[float, ...] = 1.0
    """Multiplies the learning rate, outside the momentum: one number, or one per layer in the order of the
    parameters."""
    gradient: float | tuple[float, ...] = 1.0
    """Multiplies the gradient, and coupled weight decay with it, inside the momentum: one number, or one per layer."""
    weight_decay: float = 1.0
    """Multiplies the weight decay of all layers."""
    betas: float | tuple[float, float] = 1.0
    """Exponent of Adam's betas, one for both or one for each. The batch ratio keeps their half-life in samples."""
    eps: float = 1.0
    """Multiplies the eps of an adaptive optimizer."""
    progress: float | None = None
    """Reference steps that the step is worth, where the schedule follows the gain; None: it follows the samples."""
    stats: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Values for the record; they have no effect."""
    warm_up: tuple[float, ...] | None = field(default=None, compare=False)
    """For the record: how far the warm-up of each layer is, from 0 to 1, where each layer has one of its own."""

    @property
    def layers(self) -> tuple[float, ...]:
        """The multipliers of the rate as a tuple, with a single entry if all layers share one multiplier."""
        return self.lr if isinstance(self.lr, tuple) else (self.lr,)

    @property
    def multiplier(self) -> float:
        """The factor of the whole step, `lr` times `gradient`; the mean over the layers if they differ.

        >>> Scaling(lr=(1.0, 3.0), gradient=2.0).multiplier
        4.0
        """
        if not isinstance(self.lr, tuple) and not isinstance(self.gradient, tuple):
            return self.lr * self.gradient
        count = max(len(self.layers), len(self.inside))
        return sum(self.by_layer(count)) / count

    @property
    def inside(self) -> tuple[float, ...]:
        """The multipliers inside the momentum as a tuple, with a single entry if all layers share one."""
        return self.gradient if isinstance(self.gradient, tuple) else (self.gradient,)

    def by_layer(self, count: int) -> list[float]:
        """The factor of the whole step, `lr` times `gradient`, for each of `count` layers."""
        pairs = zip(spread(self.layers, count), spread(self.inside, count), strict=True)
        return [lr * gradient for lr, gradient in pairs]

    def map_lr(self, change: Callable[[float], float]) -> Scaling:
        """The same scaling with every multiplier of the rate changed by a function."""
        lr = tuple(map(change, self.lr)) if isinstance(self.lr, tuple) else change(self.lr)
        return replace(self, lr=lr)

    def with_lr(self, layers: Sequence[float]) -> Scaling:
        """The same scaling with these multipliers of the rate; a single one stays a number, not a tuple."""
        return replace(self, lr=tuple(layers) if len(layers) > 1 or isinstance(self.lr, tuple) else layers[0])

    def with_stats(self, **stats: float) -> Scaling:
        """The same scaling with more values for the record."""
        return replace(self, stats={**self.stats, **stats})


def checked(answer: tuple[Scaling, State], what: str) -> tuple[Scaling, State]:
    """What a rule or a modifier returned, if it is a scaling and a state; one of your own may return something else."""
    if not isinstance(answer, tuple | list) or len(answer) != 2 or not isinstance(answer[0], Scaling):
        raise ConfigError(f"{what} returned {answer!r}; expected a pair: a Scaling, and the state for the next step")
    scaling, state = answer
    return _in_plain_numbers(scaling), state


_NUMBERS = ("lr", "gradient", "weight_decay", "betas", "eps", "progress")


def _in_plain_numbers(scaling: Scaling) -> Scaling:
    """The same scaling with numbers of Python where a rule of one's own has those of numpy or torch: records and
    checkpoints have no others."""
    plain = {name: plain_numbers(value) for name in _NUMBERS if (value := getattr(scaling, name)) is not None}
    changed = {name: value for name, value in plain.items() if value is not getattr(scaling, name)}
    if any(type(value) is not float for value in scaling.stats.values()):
        changed["stats"] = {name: plain_numbers(value) for name, value in scaling.stats.items()}
    return replace(scaling, **changed) if changed else scaling


def plain_numbers(value: Any) -> Any:
    """The same numbers, in any nesting of containers, as Python has them; a value that has none of other libraries is
    returned as it is."""
    if type(value) in (float, int, str, bool):
        return value
    if type(value) in (list, tuple):
        if all(type(one) is float for one in value):
            return value
        return type(value)(plain_numbers(one) for one in value)
    if type(value) is dict:
        return {key: plain_numbers(one) for key, one in value.items()}
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def spread(values: Sequence[float], count: int) -> Sequence[float]:
    """`count` values: those given, or a single one repeated for each layer."""
    if len(values) == count:
        return values
    if len(values) == 1:
        return [values[0]] * count
    raise ConfigError(
        f"the state of the rule has {len(values)} layers, but the step has {count}; a model whose trainable tensors "
        f"change during the run needs a rule for the whole model, such as adascale"
    )


class _Part:
    """What rules and modifiers have in common."""

    needs: frozenset[str] = frozenset()
    """What must be measured: "moments" of the whole model, "layers" of each layer, too. Set by the registration."""

    def init(self) -> State:
        """The state before the first step."""
        return None


class Rule(_Part, ABC):
    """A learning-rate rule. Subclasses are frozen dataclasses, registered by `register_rule`."""

    @property
    def guards(self) -> bool:
        """Whether `review` may ask to go back to an earlier state, so that states are kept."""
        return False

    def suited(self, *, adaptive: bool) -> Rule:
        """The same rule for an optimizer that normalises the gradient, or for one that does not; it may need less."""
        return self

    def follows_slopes(self, state: State) -> bool:
        """Whether the next steps need the slopes along a step in their context."""
        return False

    @abstractmethod
    def scale(self, context: StepContext, state: State) -> tuple[Scaling, State]:
        """The scaling of one step, and the state for the next one."""

    def review(self, context: StepContext, loss: float, state: State) -> tuple[Verdict, State]:
        """What follows from the loss of a step that this rule has scaled; only a rule that `guards` is asked."""
        return "continue", state

    def after_restore(self, snapshot: State, state: State) -> State:
        """The state with which the run goes on from a snapshot; `state` is that of `review`, which asked for it."""
        return snapshot

    def interrupted(self, state: State) -> State:
        """The state with which the run goes on where the states that it had kept were not saved with it."""
        return state

    def unkept(self, state: State) -> State:
        """The state with which the run goes on where no states can be kept; it must not ask for one again."""
        return state


class Modifier(_Part, ABC):
    """Changes the scaling of the rule before it, as in `linear+warmup(5ep)`; registered by `register_modifier`."""

    @abstractmethod
    def modify(self, context: StepContext, scaling: Scaling, state: State) -> tuple[Scaling, State]:
        """The changed scaling, and the state for the next step."""


@dataclass(frozen=True)
class RuleChain(Rule):
    """A rule and its modifiers, which are applied from left to right as they are written.

    An exception in a rule or modifier of your own becomes a ConfigError that says which one raised it, and where.
    """

    rule: Rule
    modifiers: tuple[Modifier, ...]
    text: str
    """The text form, which records and reports show."""
    needs: frozenset[str] = field(init=False, compare=False, repr=False)
    """What any of the parts needs."""

    def __post_init__(self) -> None:
        needs = self.rule.needs.union(*(modifier.needs for modifier in self.modifiers))
        object.__setattr__(self, "needs", needs)

    @property
    def guards(self) -> bool:
        """Whether the rule guards; modifiers do not."""
        return self.rule.guards

    def suited(self, *, adaptive: bool) -> Rule:
        """The chain with the rule that suits the optimizer; modifiers are the same for all."""
        rule: Any = self.rule.suited(adaptive=adaptive)
        if not isinstance(rule, Rule):
            raise ConfigError(f"{self.text}: suited() returned {rule!r}; expected a rule, such as self")
        return replace(self, rule=rule)

    def follows_slopes(self, state: State) -> bool:
        """Whether the rule does; modifiers do not."""
        return self.rule.follows_slopes(state[0])

    def init(self) -> State:
        """The states of all parts, in order."""
        states = []
        for part in (self.rule, *self.modifiers):
            try:
                states.append(part.init())
            except Exception as error:
                raise_naming(error, part, f"{self.text}: init()")
        return states

    def scale(self, context: StepContext, state: State) -> tuple[Scaling, State]:
        """The scaling of the rule, changed by each modifier in turn."""
        try:
            answer = self.rule.scale(context, state[0])
        except Exception as error:
            raise_naming(error, self.rule, f"{self.text}: scale()")
        scaling, first = checked(answer, f"{self.text}: scale()")
        states = [first]
        for modifier, old in zip(self.modifiers, state[1:], strict=True):
            try:
                answer = modifier.modify(context, scaling, old)
            except Exception as error:
                raise_naming(error, modifier, f"{self.text}: modify()")
            scaling, new = checked(answer, f"{self.text}: modify()")
            states.append(new)
        return scaling, states

    def review(self, context: StepContext, loss: float, state: State) -> tuple[Verdict, State]:
        """The verdict of the rule; modifiers have none."""
        try:
            verdict, first = self.rule.review(context, loss, state[0])
        except Exception as error:
            raise_naming(error, self.rule, f"{self.text}: review()")
        return verdict, [first, *state[1:]]

    def after_restore(self, snapshot: State, state: State) -> State:
        """What the rule keeps; modifiers are as they were at the snapshot."""
        return [self.rule.after_restore(snapshot[0], state[0]), *snapshot[1:]]

    def interrupted(self, state: State) -> State:
        """What the rule keeps; modifiers keep all."""
        return [self.rule.interrupted(state[0]), *state[1:]]

    def unkept(self, state: State) -> State:
        """What the rule keeps; modifiers keep all."""
        return [self.rule.unkept(state[0]), *state[1:]]

    def __str__(self) -> str:
        return self.text


def damp(scaling: Scaling, rule: Rule, context: StepContext, state: State, *, exponent: float) -> Scaling:
    """Reduce the rate of a step that has fewer samples than a growing policy requested.

    `scaling` is what the rule returned for the step. A step of B samples where D were requested should have the
    multiplier of the rule for D times (B/D)^exponent. The exponent is 1 for SGD, whose noise grows with rate/B, and 1/2
    for optimizers that normalise the gradient. A rule that follows the batch reduces the rate itself (`linear` by B/D);
    it is only reduced further as far as that is not enough, and never raised; of a layer-wise rule this holds for each
    layer. A ramp that is under way goes on, at the reduced rate. With `constant` this is the damping of Holt and
    Sievert (2021), the rate times max_batch/D.
    """
    if context.shortfall >= 1 or not scaling.multiplier > 0:
        return scaling
    # A rule is a pure function, so that asking it about steps that do not happen changes nothing.
    wanted = round(context.batch / context.shortfall)
    taken, requested = (
        rule.scale(replace(context, batch=batch, shortfall=1.0, hypothetical=True), state)[0]
        for batch in (context.batch, wanted)
    )
    count = max(len(values) for one in (scaling, taken, requested) for values in (one.layers, one.inside))
    factors = [
        min(1.0, context.shortfall**exponent * ours / theirs) if theirs > 0 else 1.0
        for ours, theirs in zip(requested.by_layer(count), taken.by_layer(count), strict=True)
    ]
    lr = [m * factor for m, factor in zip(spread(scaling.layers, count), factors, strict=True)]
    damped = scaling.with_lr(lr)
    return damped.with_stats(damping=damped.multiplier / scaling.multiplier)


# -- the registry ------------------------------------------------------------------------------------------------------

RULES: Registry[Rule | Modifier] = Registry("rule")


def register_rule(
    name: str, *, cite: str = "", needs: Iterable[str] = (), exempt: Mapping[str, str] | None = None
) -> Callable[[Any], Any]:
    """Return a decorator that adds a rule.

    `needs` is what must be measured for it ("moments", "layers"). `exempt` names laws (see tests/laws) that the rule
    does not have to pass, each with the reason.
    """
    return _register(name, "rule", cite, needs, exempt)


def register_modifier(
    name: str, *, cite: str = "", needs: Iterable[str] = (), exempt: Mapping[str, str] | None = None
) -> Callable[[Any], Any]:
    """Return a decorator that adds a modifier, which is written after a rule: `linear+NAME`. See `register_rule`."""
    return _register(name, "modifier", cite, needs, exempt)


def _register(
    name: str, kind: str, cite: str, needs: Iterable[str], exempt: Mapping[str, str] | None
) -> Callable[[Any], Any]:
    measured = frozenset(needs)
    if not measured <= MEASURABLE:
        raise SpecError(
            f"the {kind} {name!r} needs {', '.join(sorted(measured - MEASURABLE))}, which cannot be measured; "
            f"known are {', '.join(sorted(MEASURABLE))}"
        )

    def add(make: Any) -> Any:
        RULES.register(name, kind=kind, cite=cite, needs=measured, exempt=exempt)(make)
        make.needs = measured
        return make

    return add


@functools.cache
def _import_rules() -> None:
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"ebbflow.rules.{module.name}")


def rule_entries() -> list[Entry[Rule | Modifier]]:
    """All registered rules and modifiers, rules first."""
    _import_rules()
    return sorted(RULES, key=lambda entry: (entry.kind != "rule", entry.name))


def make_rule(text: str | Rule) -> Rule:
    """The rule of a text; an argument that is a rule already is returned unchanged.

    >>> make_rule("linear+warmup(5ep)").text
    'linear+warmup(5ep)'
    >>> make_rule("lineer")
    Traceback (most recent call last):
    ...
    ebbflow.errors.SpecError: unknown rule 'lineer'; did you mean 'linear'? Known: ...
    """
    if isinstance(text, Rule):
        return text
    _import_rules()
    first, *rest = parse_calls(text)
    rule = bind(first, RULES.entry(first.name).make)
    if not isinstance(rule, Rule):
        raise SpecError(f"{text!r} starts with the modifier {first.name!r}; put a rule before it: linear+{first}")
    modifiers = []
    for call in rest:
        part = bind(call, RULES.entry(call.name).make)
        if not isinstance(part, Modifier):
            raise SpecError(
                f"{text!r} has {call.name!r}, a rule, after a +; only modifiers can follow a rule: "
                f"{', '.join(RULES.names('modifier'))}"
            )
        modifiers.append(part)
    return RuleChain(rule, tuple(modifiers), text="+".join(str(call) for call in (first, *rest)))
