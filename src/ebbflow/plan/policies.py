"""Policies: how many of the available workers take part in a step, and how many samples the step has.

Two kinds are in the registry. *Fleet* policies look at the available workers alone; `follow`, `fixed`, `capped` and
`drop` are below. *Growing* policies look at the progress of training; their base class is here, `growing.py` has the
policies. A policy of your own is a frozen dataclass, registered by `register_policy`.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ebbflow.core.plugins import raise_naming
from ebbflow.core.spec import Call, Registry, bind, param, parse_call
from ebbflow.core.units import whole_number
from ebbflow.core.wording import called
from ebbflow.errors import PlanError, SpecError

__all__ = [
    "MAX_REQUEST", "POLICIES", "Capped", "Drop", "FixedTotal", "Follow", "GrowingPolicy", "Observation", "Policy",
    "PolicyState", "computed_samples", "make_policy", "register_policy", "sizes_of",
]  # fmt: skip

Ints = npt.NDArray[np.int64]
MAX_REQUEST = 2**53
"""No policy requests more: beyond it a float no longer counts single samples."""
PolicyState = Any
"""What a growing policy remembers between steps: None, or a value that JSON can hold."""


@runtime_checkable
class Policy(Protocol):
    """Decides from the available workers who takes part in a step, and how many samples the step has."""

    def sizes(self, workers: Ints) -> tuple[Ints, Ints]:
        """(workers that take part, samples of the whole step) for each count; both are 0 where the count is 0."""
        ...

    def __str__(self) -> str:
        return POLICIES.text(self)


POLICIES: Registry[Policy] = Registry("policy")


def register_policy(name: str, *, cite: str = "", needs: Iterable[str] = ()) -> Callable[[Any], Any]:
    """Return a decorator that adds a policy, a frozen dataclass, to those that can be chosen by name.

    A subclass of `GrowingPolicy` is a growing policy; any other class with a method `sizes` is a fleet policy. `needs`
    says what engines must measure for a growing policy: "moments" (noise and signal), or nothing.
    """

    def add(make: Any) -> Any:
        kind = "fleet"
        if inspect.isclass(make) and issubclass(make, GrowingPolicy):
            kind = "passive" if make.passive else "adaptive"
            make.needs = frozenset(needs)
        return POLICIES.register(name, kind=kind, cite=cite, needs=needs)(make)

    return add


def make_policy(text: str | Call | Policy, local_batch: int | None = None) -> Policy:
    """A policy from its text form; `local_batch` is used where the text leaves the local batch out.

    >>> make_policy("follow", local_batch=128)
    Follow(local_batch=128)
    >>> make_policy("follow(32)", local_batch=128)
    Follow(local_batch=32)
    >>> str(make_policy("geo(delay=60ep, factor=5)", local_batch=128))
    'geo(60ep, factor=5, local_batch=128)'
    """
    if isinstance(text, Policy):
        return text
    if not isinstance(text, str | Call):
        raise SpecError(
            f"the policy is {text!r}; expected a text or a policy: 'follow(32)' for 32 samples per worker, 'fixed(32)' "
            f"for 32 samples in every step"
        )
    call = parse_call(text)
    make = POLICIES.entry(call.name).make
    parameters = {p.name: p.default for p in inspect.signature(make).parameters.values()}
    fields = list(parameters)
    given = {*fields[: len(call.args)], *(key for key, _ in call.kwargs)}
    if local_batch is None and parameters.get("local_batch") is inspect.Parameter.empty and "local_batch" not in given:
        raise SpecError(
            f"the policy {call} lacks local_batch, the samples that a worker takes per step; give "
            f"{called('local_batch', 32)}, or write it into the policy: "
            f"{Call(call.name, ('32', *call.args), call.kwargs)}"
        )
    if local_batch is not None and "local_batch" in fields and "local_batch" not in given:
        call = Call(call.name, call.args, (*call.kwargs, ("local_batch", str(local_batch))))
    return bind(call, make)


def sizes_of(policy: Policy, workers: Ints) -> tuple[Ints, Ints]:
    """What `policy.sizes` returns, checked; an exception in a policy of a plugin is a ConfigError with its line.

    >>> sizes_of(Follow(32), np.array([0, 2]))
    (array([0, 2]), array([ 0, 64]))
    """
    try:
        answer: Any = policy.sizes(workers)
    except Exception as error:
        raise_naming(error, policy, f"{policy}: sizes()")
    pair: Any = answer if isinstance(answer, tuple | list) and len(answer) == 2 else [None]
    kinds = [(part.dtype.kind, part.shape) for part in pair if isinstance(part, np.ndarray)]
    if len(kinds) != 2 or any(kind not in "iu" or shape != workers.shape for kind, shape in kinds):
        found = " ".join(repr(answer).split())
        raise PlanError(
            f"{policy}: sizes() returned {found[:200]} for {len(workers)} counts of workers; expected a pair of "
            f"integer arrays of that length: the workers that take part, and the samples of the whole step"
        )
    used, samples = pair
    wrong = (used < 0) | (used > workers) | (samples < 0) | ((used > 0) != (samples > 0))
    if wrong.any():
        first = int(np.argmax(wrong))
        raise PlanError(
            f"{policy}: sizes() returned {used[first]} workers and {samples[first]} samples for {workers[first]} "
            f"available workers; expected at most as many workers and a sample or more, or 0 and 0; a product above "
            f"2^63 is negative"
        )
    return used, samples


# -- the base of growing policies --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What a growing policy may know about a step: the position of training, and results of the previous step."""

    step: int
    """Number of the step that is asked about, which is the number of steps committed so far."""
    samples: int
    """Samples committed so far."""
    epoch_samples: int
    """Samples in an epoch."""
    ref_batch: int
    """The batch at which the base learning rate was tuned; policies begin with it."""
    batch: int = 0
    """Samples of the previous step; 0 before the first step."""
    loss: float | None = None
    """Mean loss of the previous step. This and the fields below are None if there was no such step, if it did not
    measure the value, or if the value was not finite."""
    norm_sq: float | None = None
    """Squared norm of the mean gradient of the previous step."""
    noise: float | None = None
    """Noise V, estimated from the previous step alone, which needs two micro-batches."""
    signal: float | None = None
    """Signal S, estimated from the previous step alone, without bias, so that it may be negative."""
    workers: int = 0
    """Workers that took part in the previous step; 0 before the first step."""
    seconds: float | None = None
    """How long the previous step took, as all processes agree on it (`Gradients.seconds`); emulated: by the plan."""


@dataclass(frozen=True, kw_only=True)
class GrowingPolicy(Policy):
    """Base class of policies whose requested batch depends on the progress of training.

    Like a rule, a growing policy is a pure value: `requested(seen, state) -> (batch, state)` is called once before each
    step, and the state is a JSON value. The step takes the smallest of the requested batch, `max_batch` and what the
    workers can do; where it takes less than was requested, the learning rate is reduced (unless `damps` is False).
    """

    initial: int | None = param(None, doc="the batch to begin with; default: the reference batch")
    max_batch: int | None = param(
        None, doc="largest number of samples in a step; where more is requested, the learning rate falls instead"
    )
    local_batch: int | None = param(
        None, doc="largest number of samples that a worker takes per step; default: the run's"
    )

    needs: ClassVar[frozenset[str]] = frozenset()
    """What engines must measure for the policy; set by `register_policy`."""
    needs_two_micro_batches: ClassVar[bool] = False
    """Whether the policy learns nothing from steps of a single micro-batch, so that it never grows among them."""
    damps: ClassVar[bool] = True
    """Whether the learning rate is reduced where a step takes less than was requested."""
    passive: ClassVar[bool] = False
    """Whether the position of training alone decides, so that the steps can be computed before training."""

    def __post_init__(self) -> None:
        _check_counts(str(self), initial=self.initial, max_batch=self.max_batch, local_batch=self.local_batch)
        if self.initial and self.max_batch and self.max_batch < self.initial:
            raise PlanError(f"{self}: max_batch={self.max_batch} is less than the initial batch of {self.initial}")

    def _check(self, name: str, *, at_least: float = 0.0, above: float | None = None) -> None:
        """Refuse a value of the named field that is out of range."""
        value = getattr(self, name)
        if value is None:
            return
        if value < at_least or (above is not None and not value > above):
            limit = f"at least {at_least:g}" if above is None else f"a number above {above:g}"
            raise PlanError(f"{self}: {name} is {value:g}; expected {limit}")

    def sizes(self, workers: Ints) -> tuple[Ints, Ints]:
        """What the workers can do: all of them, with local_batch samples each. A step may request less."""
        if self.local_batch is None:
            raise PlanError(
                f"{self} does not say how many samples a worker takes at most; write local_batch=32, for example"
            )
        return workers, workers * self.local_batch

    def init(self) -> PolicyState:
        """The state before the first step."""
        return None

    @abstractmethod
    def requested(self, seen: Observation, state: PolicyState) -> tuple[int, PolicyState]:
        """The batch that the next step requests, and the state for the step after it."""

    def ask(self, seen: Observation, state: PolicyState) -> tuple[int, PolicyState]:
        """What `requested` returns, checked: steps of less than one sample would never reach the end of an epoch."""
        try:
            answer = self.requested(seen, state)
        except Exception as error:
            raise_naming(error, self, f"{self}: requested()")
        if not isinstance(answer, tuple | list) or len(answer) != 2:
            raise PlanError(f"{self}: requested() returned {answer!r}; expected a pair: the batch, and the state")
        batch, state = answer
        if type(batch) is not int or batch < 1:  # the text of a policy takes longer than most of them do
            batch = whole_number(batch, f"{self}: the batch that requested() returned", most=None, error=PlanError)
        return min(batch, MAX_REQUEST), state

    def unchanged_steps(self, seen: Observation, batch: int) -> int:
        """Lower bound on how many consecutive steps of `batch` samples request the same batch, counted from this one.

        1 is always correct. A larger number makes counting the steps of a long run faster; it is used for passive
        policies only.
        """
        return 1

    def stats(self, state: PolicyState) -> dict[str, float]:
        """Values for the record, from the state after a step; they have no effect."""
        return {}

    def first_batch(self, seen: Observation) -> int:
        """b0: the batch that the first step requests."""
        return self.initial if self.initial is not None else seen.ref_batch


# -- fleet policies ----------------------------------------------------------------------------------------------------


def _check_counts(policy: str, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None:
            whole_number(value, f"{policy}: {name}", most=1 << 62, error=PlanError)  # as fits into 64 bits


@register_policy("follow", cite="Andre, Strati, Klimovic 2022")
@dataclass(frozen=True)
class Follow(Policy):
    """The batch follows the workers: each worker always takes the same local batch."""

    local_batch: int = param(doc="samples that a worker takes per step")

    def __post_init__(self) -> None:
        _check_counts("follow", local_batch=self.local_batch)

    def sizes(self, workers: Ints) -> tuple[Ints, Ints]:
        """All workers, with local_batch samples each."""
        return workers, workers * self.local_batch


@register_policy("fixed", cite="Lin et al. 2019")
@dataclass(frozen=True)
class FixedTotal(Policy):
    """The batch stays the same; the available workers share it as evenly as whole samples allow.

    Each worker that takes part has at least two samples, since batch norm needs a variance, which a single sample does
    not have. Workers beyond that are idle.
    """

    total: int = param(doc="samples of every step")

    def __post_init__(self) -> None:
        _check_counts("fixed", total=self.total)

    def sizes(self, workers: Ints) -> tuple[Ints, Ints]:
        """At most total // 2 workers, and always total samples."""
        return np.minimum(workers, max(1, self.total // 2)), np.where(workers > 0, self.total, 0)


@register_policy("capped")
@dataclass(frozen=True)
class Capped(Policy):
    """The batch follows the workers up to a limit; workers above the limit are idle.

    The limit is a number of workers, or a largest batch, into which as many whole local batches are put as fit.
    """

    local_batch: int = param(doc="samples that a worker takes per step")
    max_batch: int | None = param(None, doc="largest number of samples in a step")
    max_workers: int | None = param(None, doc="largest number of workers in a step")

    def __post_init__(self) -> None:
        _check_counts("capped", local_batch=self.local_batch, max_batch=self.max_batch, max_workers=self.max_workers)
        if self.max_batch is None and self.max_workers is None:
            raise PlanError("capped has no limit; write capped(max_batch=4096) or capped(max_workers=32)")
        if self.max_batch is not None and self.max_batch < self.local_batch:
            raise PlanError(f"capped: max_batch={self.max_batch} is less than local_batch={self.local_batch}; "
                            f"one worker alone would exceed it")  # fmt: skip

    def sizes(self, workers: Ints) -> tuple[Ints, Ints]:
        """The workers up to the limit, with local_batch samples each."""
        limits = [] if self.max_workers is None else [self.max_workers]
        limits += [] if self.max_batch is None else [self.max_batch // self.local_batch]
        used = np.minimum(workers, min(limits))
        return used, used * self.local_batch


@register_policy("drop", cite="Andre, Strati, Klimovic 2022, section 6; Thorpe et al. 2022, arXiv 2204.12013")
@dataclass(frozen=True)
class Drop(Policy):
    """The data lie on the workers, in `parts` equal parts; what absent workers hold of a step is dropped.

    A step covers `parts` times `local_batch` samples of the epoch, whatever the number of workers, and trains on
    `local_batch` of them for each worker that is there: a sample counts at most once per epoch, and the record says how
    many were dropped. The order of the samples is another one in each epoch, so that other samples are dropped, as if
    the parts were distributed anew; with parts that stay, a worker that is absent for long would hide the same samples
    in every epoch. Workers beyond `parts` hold nothing and are idle. Plans and simulations count the samples that a
    step covers.
    """

    local_batch: int = param(doc="samples that a worker takes per step")
    parts: int = param(doc="parts of the data, one on each worker of the complete fleet")

    def __post_init__(self) -> None:
        _check_counts("drop", local_batch=self.local_batch, parts=self.parts)
        _check_counts("drop", **{"local_batch times parts": self.local_batch * self.parts})

    def sizes(self, workers: Ints) -> tuple[Ints, Ints]:
        """At most `parts` workers, and all samples that a step covers, including those that are dropped."""
        return np.minimum(workers, self.parts), np.where(workers > 0, self.parts * self.local_batch, 0)

    def split(self, workers: int) -> tuple[int, int]:
        """(samples that a step trains on, samples that it drops) if this many workers take part.

        >>> Drop(32, parts=4).split(3)
        (96, 32)
        """
        return workers * self.local_batch, (self.parts - workers) * self.local_batch


def computed_samples(policy: Policy, workers: Ints, samples: Ints) -> Ints:
    """Of what `policy.sizes` returned, the samples that the workers compute: all but those that are dropped."""
    return workers * policy.local_batch if isinstance(policy, Drop) else samples
