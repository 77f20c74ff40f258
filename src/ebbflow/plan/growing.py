"""Policies that grow the batch while training: what a step wants, by its position or by what was measured.

A growing policy is a pure value, like a rule: `requested(seen, state) -> (batch, state)`, asked once before each step,
with what the step before showed; its state is JSON. What it wants knows no limits. Whoever asks takes the smallest of
that, of `max_batch` and of what the workers can do, and the learning rate pays for the difference (`growth.py`).

*Passive* policies look at the position alone, so that their steps can be counted beforehand; *adaptive* ones look at
losses and gradients of the run. All of them follow Holt and Sievert (2021), except `noise`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ebbflow.core.spec import param, render
from ebbflow.core.units import Span
from ebbflow.errors import PlanError
from ebbflow.plan.policies import POLICIES

__all__ = ["Ada", "AdaNorm", "Geo", "Growing", "NoiseScale", "Observation", "Pada", "PolicyState", "Rada"]

Ints = npt.NDArray[np.int64]
PolicyState = Any
"""What a policy remembers: None, or a value that survives JSON."""

_PAPER = "Holt and Sievert 2021"
_MAX_REQUEST = 2**53
"""No policy wants more: beyond it a float no longer counts samples one by one."""
_FOR_EVER = 2**53
"""Steps that no run has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What a policy may know when it is asked about a step: where training is, and what the step before showed."""

    step: int
    """Steps committed so far: the number of the step that is asked about."""
    samples: int
    """Samples committed so far."""
    epoch_samples: int
    ref_batch: int
    """The batch at which the base learning rate was tuned; policies begin with it."""
    batch: int = 0
    """Samples of the step before; 0 before the first step."""
    loss: float | None = None
    """Mean over the step before; None if there was none or it was not finite. So are the next three."""
    norm_sq: float | None = None
    """Squared norm of its mean gradient."""
    noise: float | None = None
    """Trace of the covariance of one sample's gradient, as the step's micro-batches show it; takes two
    micro-batches."""
    signal: float | None = None
    """Squared norm of the true gradient, without bias, so it may be below zero; takes two micro-batches."""


@dataclass(frozen=True, kw_only=True)
class Growing(ABC):
    """What all growing policies share: the batch they begin with, and its limits."""

    initial: int | None = param(None, doc="the batch to begin with; default: the reference batch")
    max_batch: int | None = param(None, doc="samples a step never exceeds; beyond it the learning rate falls instead")
    local_batch: int | None = param(None, doc="samples a worker takes in a step at most; default: the run's")

    needs: ClassVar[frozenset[str]] = frozenset()
    """What an engine must measure for the policy: "moments", or nothing."""
    needs_two_micro_batches: ClassVar[bool] = False
    """Whether steps of one micro-batch tell it nothing: among them alone it never grows."""
    passive: ClassVar[bool] = False
    """Whether the position decides alone."""

    def __post_init__(self) -> None:
        for name in ("initial", "max_batch", "local_batch"):
            self._check(name, at_least=1)
        if self.initial and self.max_batch and self.max_batch < self.initial:
            raise PlanError(f"{self}: max_batch={self.max_batch} is less than the initial batch of {self.initial}")

    def _check(self, name: str, *, at_least: float = 0.0, above: float | None = None) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if value < at_least or (above is not None and not value > above):
            limit = f"at least {at_least:g}" if above is None else f"a number above {above:g}"
            raise PlanError(f"{self}: {name} is {value:g}; expected {limit}")

    def sizes(self, workers: Ints) -> tuple[Ints, Ints]:
        """What the workers could do: all of them, local_batch samples each. A step takes less where less is
        requested."""
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
        """The batch that the next step wants, and the state for the question after it; called once a step."""

    def steady(self, seen: Observation, batch: int) -> int:
        """So many steps of `batch` samples from this one on surely want the same, if the position decides; 1 is safe.

        Counting the steps of a long run asks for it, in order not to ask for each of them.
        """
        return 1

    def first(self, seen: Observation) -> int:
        """b0: the batch of the first step."""
        return self.initial if self.initial is not None else seen.ref_batch

    def __str__(self) -> str:
        return render(_NAMES[type(self)], self)


_NAMES: dict[type[Growing], str] = {}


def _register(name: str, *, cite: str = _PAPER, needs: frozenset[str] = frozenset()) -> Any:
    """Register a policy under its name, which its text form shows."""

    def add(make: type[Growing]) -> type[Growing]:
        _NAMES[make] = name
        make.needs = needs
        POLICIES.register(name, kind="passive" if make.passive else "adaptive", cite=cite, needs=needs)(make)
        return make

    return add


def _whole(batch: float, least: int) -> int:
    """A batch from a formula's number: rounded up, not below `least`; 5.000000000001 is 5."""
    if not batch < _MAX_REQUEST:
        return _MAX_REQUEST
    return max(least, math.ceil(batch - 1e-9 * abs(batch)))


# -- by the position alone -----------------------------------------------------------------------------------------


@_register("geo", cite="Holt and Sievert 2021; Smith et al. 2018, arXiv 1711.00489")
@dataclass(frozen=True)
class Geo(Growing):
    """b0 factor^floor(t/delay): the batch grows where a step schedule would cut the learning rate.

    >>> seen = Observation(step=28_200, samples=6_000_000, epoch_samples=50_000, ref_batch=128)
    >>> Geo(Span(60, "ep"), 5).requested(seen, None)
    (3200, None)
    """

    delay: Span = param(Span(5, "ep"), doc="between two growths: 60ep, 1000steps, 64000samples")
    factor: float = param(2.0, doc="what the batch is multiplied by, at least 1")

    passive: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("factor", at_least=1.0)
        if not self.delay.value > 0:
            raise PlanError(f"{self}: delay is {self.delay}; expected an amount of training above 0, such as 5ep")

    def requested(self, seen: Observation, state: PolicyState) -> tuple[int, PolicyState]:
        """By the samples committed so far."""
        growths, _ = self._growths(seen)
        first = self.first(seen)
        if growths * math.log(self.factor) > math.log(_MAX_REQUEST):  # no overflow, however late it is
            return _MAX_REQUEST, state
        return _whole(first * self.factor**growths, first), state

    def steady(self, seen: Observation, batch: int) -> int:
        """Up to the next growth."""
        growths, delay = self._growths(seen)
        room = (growths + 1) * delay * (1 - 1e-9) - seen.samples  # well before it, where rounding decides nothing
        return _FOR_EVER if self.factor == 1 else 1 + max(0, math.floor(room / batch))

    def _growths(self, seen: Observation) -> tuple[int, float]:
        """(growths before a position, samples between two of them)."""
        delay = self.delay.samples(epoch_samples=seen.epoch_samples, ref_batch=seen.ref_batch)
        return math.floor(seen.samples / delay * (1 + 1e-12)), delay


@_register("pada")
@dataclass(frozen=True)
class Pada(Growing):
    """b0 + rate k: the batch grows by so many samples a step."""

    rate: float = param(1e-3, doc="samples that a step is larger than the one before")

    passive: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("rate")

    def requested(self, seen: Observation, state: PolicyState) -> tuple[int, PolicyState]:
        """By the number of the step."""
        first = self.first(seen)
        return _whole(first + self.rate * seen.step, first), state

    def steady(self, seen: Observation, batch: int) -> int:
        """Until the whole number changes."""
        if self.rate == 0:
            return _FOR_EVER
        last = (self.requested(seen, None)[0] - self.first(seen)) / self.rate * (1 - 1e-9)  # step with the same number
        return 1 + max(0, math.floor(last) - seen.step)


# -- by what the run shows -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Watching(Growing):
    """Looks at every step, and changes its mind once in `dwell` steps, not before step `wait`."""

    dwell: int = param(20, doc="steps between two looks at the batch")
    wait: int = param(100, doc="steps before the batch grows for the first time")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("dwell", at_least=1)
        self._check("wait")

    def requested(self, seen: Observation, state: PolicyState) -> tuple[int, PolicyState]:
        """What was requested at the last look, or a new number if it is time for one."""
        memory: Mapping[str, Any] = self._watch(seen, state or {})
        first = self.first(seen)
        batch = int(memory.get("batch", first))
        if seen.step and seen.step % self.dwell == 0:
            growth, memory = self._look(seen, memory)
            if growth is not None and seen.step >= self.wait:
                batch = _whole(first * growth, first)
        return batch, {**memory, "batch": batch}

    @abstractmethod
    def _watch(self, seen: Observation, memory: Mapping[str, Any]) -> dict[str, Any]:
        """The memory with one more step in it; `seen` may have nothing to say."""

    @abstractmethod
    def _look(self, seen: Observation, memory: Mapping[str, Any]) -> tuple[float | None, dict[str, Any]]:
        """(D/b0, or None where nothing can be told; the memory with which the next window begins)."""


def _add(memory: Mapping[str, Any], name: str, value: float | None) -> dict[str, Any]:
    """One more value in the window that `name` is collected in."""
    if value is None or not math.isfinite(value):
        return dict(memory)
    total, count = memory.get(name, (0.0, 0))
    return {**memory, name: [total + value, count + 1]}


def _mean(memory: Mapping[str, Any], name: str) -> float | None:
    total, count = memory.get(name, (0.0, 0))
    return total / count if count else None


@dataclass(frozen=True, kw_only=True)
class _AgainstTheStart(_Watching):
    """D = b0 x_0/x: how far a number, averaged over the steps since the last look, has fallen since the first look.

    The paper takes it over the whole training set or a tenth of it. The mean over the steps costs nothing; it lags by
    half a window.
    """

    @abstractmethod
    def _value(self, seen: Observation) -> float | None:
        """The number, as the step before shows it."""

    def _watch(self, seen: Observation, memory: Mapping[str, Any]) -> dict[str, Any]:
        return _add(memory, "window", self._value(seen))

    def _look(self, seen: Observation, memory: Mapping[str, Any]) -> tuple[float | None, dict[str, Any]]:
        value = _mean(memory, "window")
        rest = {key: kept for key, kept in memory.items() if key != "window"}
        if value is None or value <= 0:  # nothing was seen, or less than noise lets tell
            return None, rest
        start = rest.setdefault("start", value)
        return start / value, rest


@_register("ada")
@dataclass(frozen=True)
class Ada(_AgainstTheStart):
    """b0 (F0 - F*)/(F - F*): the batch grows as the training loss falls."""

    best: float = param(0.0, doc="F*, the least loss that can be reached")

    def _value(self, seen: Observation) -> float | None:
        return None if seen.loss is None else seen.loss - self.best


@_register("ada-norm", needs=frozenset({"moments"}))
@dataclass(frozen=True)
class AdaNorm(_AgainstTheStart):
    """b0 |grad F0|^2/|grad F|^2: the batch grows as the gradient shrinks.

    The squared norm is the signal: that of a mini-batch gradient would hold the noise too, which a larger batch makes
    smaller, so that growth would feed itself. Steps take two micro-batches at least.
    """

    needs_two_micro_batches: ClassVar[bool] = True

    def _value(self, seen: Observation) -> float | None:
        return seen.signal


@_register("rada", needs=frozenset({"moments"}))
@dataclass(frozen=True)
class Rada(_Watching):
    """b0/mean(F/F0, |g|^2/|g0|^2): loss and gradient norm together, the least of each window, smoothed."""

    rho: float = param(0.2, doc="weight of a new window in the moving averages, above 0 and at most 1")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("rho", above=0.0)
        if self.rho > 1:
            raise PlanError(f"{self}: rho is {self.rho:g}; expected a weight above 0 and at most 1")

    def _watch(self, seen: Observation, memory: Mapping[str, Any]) -> dict[str, Any]:
        if seen.loss is None or seen.norm_sq is None or not math.isfinite(seen.loss + seen.norm_sq):
            return dict(memory)
        loss, norm = memory.get("window", (math.inf, math.inf))
        return {**memory, "window": [min(loss, seen.loss), min(norm, seen.norm_sq)]}

    def _look(self, seen: Observation, memory: Mapping[str, Any]) -> tuple[float | None, dict[str, Any]]:
        rest = {key: kept for key, kept in memory.items() if key != "window"}
        if "window" not in memory:
            return None, rest
        window = memory["window"]
        start = rest.setdefault("start", window)
        before = rest.get("smooth", window)
        smooth = [(1 - self.rho) * old + self.rho * new for old, new in zip(before, window, strict=True)]
        rest["smooth"] = smooth
        if not all(value > 0 for value in start):
            return None, rest
        part = 0.5 * (smooth[0] / start[0] + smooth[1] / start[1])
        return (1 / part if part > 0 else None), rest


@_register("noise", cite="McCandlish et al. 2018, arXiv 1812.06162", needs=frozenset({"moments"}))
@dataclass(frozen=True)
class NoiseScale(_Watching):
    """part V/S: the batch follows the measured noise scale, up and down, but not below b0.

    At the noise scale noise and signal of a step's gradient are equal; a larger batch saves few steps, a smaller one
    few samples. Both are averaged over about `memory` before the ratio is taken. Steps take two micro-batches at least.
    """

    part: float = param(1.0, doc="of the noise scale that the batch should be")
    memory: Span = param(Span(200, "steps"), doc="what the averages of noise and signal remember")

    needs_two_micro_batches: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("part", above=0.0)
        if not self.memory.value > 0:
            raise PlanError(f"{self}: memory is {self.memory}; expected an amount of training above 0")

    def _watch(self, seen: Observation, memory: Mapping[str, Any]) -> dict[str, Any]:
        if seen.noise is None or seen.signal is None or not math.isfinite(seen.noise + seen.signal):
            return dict(memory)
        length = self.memory.samples(epoch_samples=seen.epoch_samples, ref_batch=seen.ref_batch)
        keep = math.exp(-seen.batch / length)  # what starts at zero is too small in both alike: the ratio is right
        noise, signal = memory.get("average", (0.0, 0.0))
        new = [keep * noise + (1 - keep) * seen.noise, keep * signal + (1 - keep) * seen.signal]
        return {**memory, "average": new}

    def _look(self, seen: Observation, memory: Mapping[str, Any]) -> tuple[float | None, dict[str, Any]]:
        noise, signal = memory.get("average", (0.0, 0.0))
        if not (noise > 0 and signal > 0):  # nothing was measured, or no signal stands out of the noise
            return None, dict(memory)
        return self.part * noise / signal / self.first(seen), dict(memory)
