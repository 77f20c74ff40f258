"""Growing policies, and the state of one in a run.

*Passive* policies (`geo`, `pada`) look at the position of training alone, so that their steps can be counted before
training. *Adaptive* policies (`ada`, `ada-norm`, `rada`, `noise`) look at losses and gradients of the run. All but
`noise` have a counterpart in AdaDamp, the software of Holt and Sievert (2021), and agree with its code; where they
differ, their docstrings say so. The paper itself uses `geo` alone; `ada` and `pada` are those of Sievert and Shah
(arXiv 1910.08222), and `ada-norm` and `rada` are published as code only. `Growth` calls a policy once per committed
step:

    growth = Growth(policy, ref_batch=128, epoch_samples=50_000)
    size = growth.allow(size)         # what the workers can do -> what the step takes
    ...
    growth.observe(batch=size.samples, loss=..., norm_sq=...)     # the step was committed; what the next one requests
"""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ebbflow.core.spec import param
from ebbflow.core.units import Span
from ebbflow.errors import CheckpointError, PlanError
from ebbflow.plan.batch_plan import StepSize
from ebbflow.plan.policies import GrowingPolicy, Observation, PolicyState, register_policy

__all__ = ["Ada", "AdaNorm", "Geo", "Growth", "NoiseScale", "Pada", "Rada", "allow", "workers_for"]

_SIEVERT = "Sievert and Shah 2019, arXiv 1910.08222"
_CODE = "Sievert's code, github.com/stsievert/adadamp 0.2.0rc8"
_MAX_REQUEST = 2**53
"""No policy requests more: beyond it a float no longer counts single samples."""
_ALL_STEPS = 2**53
"""More steps than any run has."""


def _whole(batch: float, least: int) -> int:
    """A batch from the value of a formula: rounded up (but 5.000000000001 is 5), and at least `least`."""
    if not batch < _MAX_REQUEST:
        return _MAX_REQUEST
    return max(least, math.ceil(batch - 1e-9 * abs(batch)))


# -- passive policies --------------------------------------------------------------------------------------------------


@register_policy("geo", cite="Holt and Sievert 2021; Smith et al. 2018, arXiv 1711.00489")
@dataclass(frozen=True)
class Geo(GrowingPolicy):
    """b0 factor^floor(t/delay): the batch grows where a step schedule would cut the learning rate.

    AdaDamp's GeoDamp, except that the batch may change in every step, not in every 20th, and is rounded up, not down.

    >>> seen = Observation(step=28_200, samples=6_000_000, epoch_samples=50_000, ref_batch=128)
    >>> Geo(Span(60, "ep"), 5).requested(seen, None)
    (3200, None)
    """

    delay: Span = param(Span(5, "ep"), doc="amount of training between two growths: 60ep, 1000steps, 64000samples")
    factor: float = param(2.0, doc="what the batch is multiplied by, at least 1")

    passive: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("factor", at_least=1.0)
        if not self.delay.value > 0:
            raise PlanError(f"{self}: delay is {self.delay}; expected an amount of training above 0, such as 5ep")

    def requested(self, seen: Observation, state: PolicyState) -> tuple[int, PolicyState]:
        """The batch after the growths that the committed samples amount to."""
        growths, _ = self._growths(seen)
        first = self.first_batch(seen)
        if growths * math.log(self.factor) > math.log(_MAX_REQUEST):  # the power would overflow
            return _MAX_REQUEST, state
        return _whole(first * self.factor**growths, first), state

    def unchanged_steps(self, seen: Observation, batch: int) -> int:
        """Steps before the next growth."""
        growths, delay = self._growths(seen)
        samples = (growths + 1) * delay * (1 - 1e-9) - seen.samples  # a little less, so that rounding decides nothing
        return _ALL_STEPS if self.factor == 1 else 1 + max(0, math.floor(samples / batch))

    def _growths(self, seen: Observation) -> tuple[int, float]:
        """(growths up to this position, samples between two growths)."""
        delay = self.delay.samples(epoch_samples=seen.epoch_samples, ref_batch=seen.ref_batch)
        return math.floor(seen.samples / delay * (1 + 1e-12)), delay


@register_policy("pada", cite=_SIEVERT)
@dataclass(frozen=True)
class Pada(GrowingPolicy):
    """b0 + rate k in step k: the batch grows by `rate` samples per step.

    AdaDamp's PadaDamp, except that the batch may change in every step, not from step 100 on in every 20th.
    """

    rate: float = param(1e-3, doc="by how many samples a step is larger than the previous one")

    passive: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("rate")

    def requested(self, seen: Observation, state: PolicyState) -> tuple[int, PolicyState]:
        """The formula, rounded up to whole samples."""
        first = self.first_batch(seen)
        return _whole(first + self.rate * seen.step, first), state

    def unchanged_steps(self, seen: Observation, batch: int) -> int:
        """Steps before the rounded batch changes."""
        if self.rate == 0:
            return _ALL_STEPS
        grown = self.requested(seen, None)[0] - self.first_batch(seen)
        last = math.floor(grown / self.rate * (1 - 1e-9))  # number of the last step with this batch
        return 1 + max(0, last - seen.step)


# -- adaptive policies -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _AdaptivePolicy(GrowingPolicy):
    """Collects values of every step; may change the batch every `dwell` steps, from step `wait` on."""

    dwell: int = param(20, doc="steps between two decisions about the batch")
    wait: int = param(100, doc="steps before the batch grows for the first time")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("dwell", at_least=1)
        self._check("wait")

    def requested(self, seen: Observation, state: PolicyState) -> tuple[int, PolicyState]:
        """The batch of the last decision, or of a new one every `dwell` steps."""
        memory: Mapping[str, Any] = self._collect(seen, state or {})
        first = self.first_batch(seen)
        batch = int(memory.get("batch", first))
        if seen.step and seen.step % self.dwell == 0:
            growth, memory = self._decide(seen, memory)
            if growth is not None and seen.step >= self.wait:
                batch = _whole(first * growth, first)
        return batch, {**memory, "batch": batch}

    @abstractmethod
    def _collect(self, seen: Observation, memory: Mapping[str, Any]) -> dict[str, Any]:
        """The memory after one more step, whose values may be missing."""

    @abstractmethod
    def _decide(self, seen: Observation, memory: Mapping[str, Any]) -> tuple[float | None, dict[str, Any]]:
        """(requested batch over b0, or None if unknown; the memory at the start of the next `dwell` steps)."""


def _add(memory: Mapping[str, Any], name: str, value: float | None) -> dict[str, Any]:
    """Add a value to the sum and count under `name`; a value that is missing or not finite is left out."""
    if value is None or not math.isfinite(value):
        return dict(memory)
    total, count = memory.get(name, (0.0, 0))
    return {**memory, name: [total + value, count + 1]}


def _mean(memory: Mapping[str, Any], name: str) -> float | None:
    total, count = memory.get(name, (0.0, 0))
    return total / count if count else None


@dataclass(frozen=True, kw_only=True)
class _RelativeToStart(_AdaptivePolicy):
    """b0 x_0/x, at least b0: how far a value has fallen since the start.

    x is the mean over the last `dwell` steps. AdaDamp evaluates it over the whole training set, or a tenth of it, each
    time that it decides; the mean over the steps costs nothing and lags by half of `dwell` steps. AdaDamp also allows
    batches below b0, where x is above x_0.
    """

    @abstractmethod
    def _value(self, seen: Observation) -> float | None:
        """x of the previous step."""

    def _collect(self, seen: Observation, memory: Mapping[str, Any]) -> dict[str, Any]:
        return _add(memory, "window", self._value(seen))

    def _decide(self, seen: Observation, memory: Mapping[str, Any]) -> tuple[float | None, dict[str, Any]]:
        value = _mean(memory, "window")
        rest = {key: kept for key, kept in memory.items() if key != "window"}
        if value is None or value <= 0:  # nothing was measured, or the estimate is lost in noise
            return None, rest
        start = rest.setdefault("start", value)
        return start / value, rest


@register_policy("ada", cite=f"{_SIEVERT}: AdaDamp")
@dataclass(frozen=True)
class Ada(_RelativeToStart):
    """b0 (F0 - F*)/(F - F*), at least b0: the batch grows as the training loss F falls.

    F0 is the loss of the initial model, over the samples of the first step whose loss is known and above F*; F is the
    mean over the last `dwell` steps. AdaDamp evaluates both over the training set or a tenth of it.
    """

    best: float = param(0.0, doc="F*, the lowest loss that can be reached")

    def _value(self, seen: Observation) -> float | None:
        return None if seen.loss is None else seen.loss - self.best

    def _collect(self, seen: Observation, memory: Mapping[str, Any]) -> dict[str, Any]:
        collected = super()._collect(seen, memory)
        value = self._value(seen)
        if value is not None and 0 < value < math.inf:
            collected.setdefault("start", value)
        return collected


@register_policy("ada-norm", cite=f"{_CODE}: AdaDampNN", needs={"moments"})
@dataclass(frozen=True)
class AdaNorm(_RelativeToStart):
    """b0 |grad F0|^2/|grad F|^2, at least b0: the batch grows as the gradient shrinks.

    The squared norm is the measured signal. The squared norm of a mini-batch gradient contains noise, which a larger
    batch reduces, so that growth would cause more growth. Steps need at least two micro-batches. The signal of a single
    step is too uncertain to compare a whole run with, and may be negative: |grad F0|^2 is the mean over the first
    `dwell` steps, where AdaDampNN evaluates the initial model over the training set.
    """

    needs_two_micro_batches: ClassVar[bool] = True

    def _value(self, seen: Observation) -> float | None:
        return seen.signal


@register_policy("rada", cite=f"{_CODE}: RadaDamp", needs={"moments"})
@dataclass(frozen=True)
class Rada(_AdaptivePolicy):
    """b0/mean(F/F0, |g|^2/|g0|^2), at least b0: loss and gradient norm, the lowest of each window, smoothed.

    F0 and |g0|^2 are the lowest values of the steps before the first decision, in step `wait` (or `dwell`, if that is
    more). The window of the second decision still contains those steps; every later window is `dwell` steps. Each
    decision sets F to rho F + (1 - rho) times the lowest loss of the window, and |g|^2 in the same way.
    """

    rho: float = param(0.2, doc="weight of the old values in the moving averages, at least 0 and below 1")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("rho")
        if self.rho >= 1:
            raise PlanError(f"{self}: rho is {self.rho:g}; expected a weight of at least 0 and below 1")

    def _collect(self, seen: Observation, memory: Mapping[str, Any]) -> dict[str, Any]:
        if seen.loss is None or seen.norm_sq is None or not math.isfinite(seen.loss + seen.norm_sq):
            return dict(memory)
        loss, norm = memory.get("window", (math.inf, math.inf))
        return {**memory, "window": [min(loss, seen.loss), min(norm, seen.norm_sq)]}

    def _decide(self, seen: Observation, memory: Mapping[str, Any]) -> tuple[float | None, dict[str, Any]]:
        if seen.step < self.wait or "window" not in memory:
            return None, dict(memory)
        lowest = memory["window"]
        if "start" not in memory:
            return None, {**memory, "start": lowest, "smooth": lowest}
        smooth = [self.rho * old + (1 - self.rho) * new for old, new in zip(memory["smooth"], lowest, strict=True)]
        rest = {key: kept for key, kept in memory.items() if key != "window"} | {"smooth": smooth}
        loss, norm = memory["start"]
        if not (loss > 0 and norm > 0):
            return None, rest
        part = 0.5 * (smooth[0] / loss + smooth[1] / norm)
        return (1 / part if part > 0 else None), rest


@register_policy("noise", cite="McCandlish et al. 2018, arXiv 1812.06162", needs={"moments"})
@dataclass(frozen=True)
class NoiseScale(_AdaptivePolicy):
    """part V/S: the batch follows the measured noise scale, up and down, but not below b0.

    At a batch of the noise scale, noise and signal of the mean gradient are equal; a larger batch saves few steps, a
    smaller one few samples. V and S are averaged over about `memory` before the ratio is taken. Steps need at least two
    micro-batches.
    """

    part: float = param(1.0, doc="the batch as a multiple of the noise scale")
    memory: Span = param(Span(200, "steps"), doc="length of the moving averages of noise and signal")

    needs_two_micro_batches: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("part", above=0.0)
        if not self.memory.value > 0:
            raise PlanError(f"{self}: memory is {self.memory}; expected an amount of training above 0")

    def _collect(self, seen: Observation, memory: Mapping[str, Any]) -> dict[str, Any]:
        if seen.noise is None or seen.signal is None or not math.isfinite(seen.noise + seen.signal):
            return dict(memory)
        length = self.memory.samples(epoch_samples=seen.epoch_samples, ref_batch=seen.ref_batch)
        keep = math.exp(-seen.batch / length)  # both averages start at zero; their ratio has no bias
        noise, signal = memory.get("average", (0.0, 0.0))
        new = [keep * noise + (1 - keep) * seen.noise, keep * signal + (1 - keep) * seen.signal]
        return {**memory, "average": new}

    def _decide(self, seen: Observation, memory: Mapping[str, Any]) -> tuple[float | None, dict[str, Any]]:
        noise, signal = memory.get("average", (0.0, 0.0))
        if not (noise > 0 and signal > 0):  # nothing was measured, or the signal is lost in the noise
            return None, dict(memory)
        return self.part * noise / signal / self.first_batch(seen), dict(memory)


# -- a policy in a run -------------------------------------------------------------------------------------------------


def workers_for(batch: int, local_batch: int) -> int:
    """How many workers it takes to compute a batch with at most `local_batch` samples each.

    >>> workers_for(128, 32), workers_for(129, 32)
    (4, 5)
    """
    return -(-batch // local_batch)


def allow(size: StepSize, requested: int, max_batch: int | None = None) -> StepSize:
    """The step that is taken: the smallest of the requested batch, `max_batch` and what the workers can do (`size`).

    Workers that the step does not need are idle. Where the step is smaller than requested, the result says so.

    >>> four = StepSize(workers=4, samples=128, time_s=0.0, duration_s=1.0)
    >>> small, large = allow(four, 40), allow(four, 512)
    >>> (small.workers, small.samples, small.shortfall), (large.workers, large.samples, large.shortfall)
    ((2, 40, 1.0), (4, 128, 0.25))
    """
    batch = min(requested, size.samples, max_batch if max_batch is not None else requested)
    workers = min(size.workers, max(1, batch // 2), workers_for(batch * size.workers, size.samples))
    return replace(size, workers=workers, samples=batch, requested=requested if requested > batch else None)


class Growth:
    """A growing policy and its state in one run; `requested` is the batch that the next step requests.

    The policy is called once per committed step. A step that was lost and is repeated therefore requests the same batch
    again, and a run that continues from `state_dict` requests what an uninterrupted one does.
    """

    def __init__(self, policy: GrowingPolicy, *, ref_batch: int, epoch_samples: int) -> None:
        self.policy = policy
        self._start = Observation(step=0, samples=0, ref_batch=ref_batch, epoch_samples=epoch_samples)
        self._seen = self._start
        self._state: PolicyState = policy.init()
        self.requested, self._state = policy.requested(self._seen, self._state)

    @property
    def useful(self) -> int:
        """Samples that the next step would take if there were enough workers."""
        return min(self.requested, self.policy.max_batch or self.requested)

    def allow(self, size: StepSize) -> StepSize:
        """What the next step takes if the workers can do `size`."""
        return allow(size, self.requested, self.policy.max_batch)

    def observe(
        self,
        *,
        batch: int,
        loss: float | None = None,
        norm_sq: float | None = None,
        noise: float | None = None,
        signal: float | None = None,
    ) -> None:
        """Note a committed step of `batch` samples and what was measured in it; compute the next request."""
        self._seen = replace(
            self._start,
            step=self._seen.step + 1,
            samples=self._seen.samples + batch,
            batch=batch,
            loss=loss,
            norm_sq=norm_sq,
            noise=noise,
            signal=signal,
        )
        self.requested, self._state = self.policy.requested(self._seen, self._state)

    def state_dict(self) -> dict[str, Any]:
        """The requested batch, the policy's state and the position, as JSON values."""
        return {
            "policy": str(self.policy),
            "requested": self.requested,
            "state": json.dumps(self._state),
            "step": self._seen.step,
            "samples": self._seen.samples,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; the state of another policy is refused."""
        if state.get("policy") != str(self.policy):
            raise CheckpointError(f"the saved batch policy is {state.get('policy')!r}, this run's is {self.policy}")
        try:
            self.requested, self._state = int(state["requested"]), json.loads(state["state"])
            self._seen = replace(self._start, step=int(state["step"]), samples=int(state["samples"]))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the saved state of the batch policy {self.policy} is damaged: {error!r}") from None
