"""Growing policies, and the state of one in a run.

*Passive* policies (`geo`, `pada`) look at the position of training alone, so that their steps can be counted before
training. *Adaptive* policies (`ada`, `ada-norm`, `rada`, `noise`, `goodput`) look at losses and gradients of the run,
and `goodput` at the durations of its steps, too. The first five have a counterpart in AdaDamp, the software of Holt and
Sievert (2021), and agree with its code; where they differ, their docstrings say so. The paper itself uses `geo` alone;
`ada` and `pada` are those of Sievert and Shah (arXiv 1910.08222), and `ada-norm` and `rada` are published as code only.
`Growth` calls a policy once per committed step:

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
from typing import Any, ClassVar, Literal

from ebbflow.core.spec import param
from ebbflow.core.units import Seconds, Span
from ebbflow.errors import CheckpointError, PlanError
from ebbflow.plan.batch_plan import StepSize
from ebbflow.plan.goodput import StepTimes, TimedStep, batch_candidates, fit_times, value_of
from ebbflow.plan.policies import MAX_REQUEST, GrowingPolicy, Observation, PolicyState, register_policy

__all__ = ["Ada", "AdaNorm", "Geo", "Goodput", "Growth", "NoiseScale", "Pada", "Rada", "allow", "workers_for"]

_SIEVERT = "Sievert and Shah 2019, arXiv 1910.08222"
_CODE = "Sievert's code, github.com/stsievert/adadamp 0.2.0rc8"
_ALL_STEPS = 2**53
"""More steps than any run has."""
_TIMED_STEPS, _TIMED_KINDS = 20, 64
"""Steps that a mean duration covers, and kinds of steps whose durations are remembered."""


def _whole(batch: float, least: int) -> int:
    """A batch from the value of a formula: rounded up (but 5.000000000001 is 5), and at least `least`."""
    if not batch < MAX_REQUEST:
        return MAX_REQUEST
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
        if growths * math.log(self.factor) > math.log(MAX_REQUEST):  # the power would overflow
            return MAX_REQUEST, state
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


def _check_memory(policy: GrowingPolicy, memory: Span) -> None:
    if not memory.value > 0:
        raise PlanError(f"{policy}: memory is {memory}; expected an amount of training above 0")


def _averaged(seen: Observation, memory: Mapping[str, Any], span: Span) -> dict[str, Any]:
    """Add noise and signal of a step to their moving averages over about `span`."""
    if seen.noise is None or seen.signal is None or not math.isfinite(seen.noise + seen.signal):
        return dict(memory)
    length = span.samples(epoch_samples=seen.epoch_samples, ref_batch=seen.ref_batch)
    keep = math.exp(-seen.batch / length)  # both averages start at zero; their ratio has no bias
    noise, signal = memory.get("average", (0.0, 0.0))
    new = [keep * noise + (1 - keep) * seen.noise, keep * signal + (1 - keep) * seen.signal]
    return {**memory, "average": new}


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
        _check_memory(self, self.memory)

    def _collect(self, seen: Observation, memory: Mapping[str, Any]) -> dict[str, Any]:
        return _averaged(seen, memory, self.memory)

    def _decide(self, seen: Observation, memory: Mapping[str, Any]) -> tuple[float | None, dict[str, Any]]:
        noise, signal = memory.get("average", (0.0, 0.0))
        if not (noise > 0 and signal > 0):  # nothing was measured, or the signal is lost in the noise
            return None, dict(memory)
        return self.part * noise / signal / self.first_batch(seen), dict(memory)


@register_policy("goodput", cite="Qiao et al. 2021, arXiv 2008.12260: Pollux", needs={"moments"})
@dataclass(frozen=True)
class Goodput(_AdaptivePolicy):
    """The batch at which progress per hour, or per dollar, is best, up and down, but not below b0.

    Progress is that of Pollux: a step of B samples makes B (phi + B0)/(phi + B) reference samples, where phi is the
    measured noise scale V/S. If the signal is lost in the noise, phi is infinite and every sample counts in full; if
    there is no noise, phi is 0 and samples beyond B0 count nothing. Before both are measured the batch stays. Steps
    need at least two micro-batches.

    A step takes `step` + `sample` x (samples of a worker) + `exchange` x (workers - 1). Unless these are given, they
    are fitted to the durations of the steps so far. All replicas of a live fleet must decide alike, so each of them
    says in the all-reduce how long its step took, and all use the mean. On Dask the driver decides. An emulated run
    has the durations of its plan; where they do not depend on the workers, more workers are always better per hour.
    What was not observed yet counts as free, and a request is at most twice the largest step since the last decision,
    so that the batch grows until a further worker turns out not to pay. It changes only if that is better by `margin`.

    Per dollar, the workers that take part are paid, and `fixed` for the job: with `fixed=0` few workers are always
    best. It is for fleets that give idle workers back; where these are paid anyway, progress per hour is progress per
    dollar. A step that takes less than was requested does not reduce the learning rate.
    """

    per: Literal["hour", "dollar"] = param("hour", doc="what progress is divided by: hour or dollar")
    price: float | None = param(None, doc="USD per hour of one worker; needed for per=dollar")
    fixed: float = param(0.0, doc="USD per hour of the job, whatever its workers; for per=dollar")
    step: Seconds | None = param(
        None, doc="time of a step that does not depend on samples and workers; default: fitted"
    )
    sample: Seconds | None = param(None, doc="time per sample of a worker")
    exchange: Seconds | None = param(None, doc="time that each further worker adds to a step")
    margin: float = param(0.05, doc="by which part another batch must be better before the batch changes")
    memory: Span = param(Span(200, "steps"), doc="length of the moving averages of noise and signal")

    needs_two_micro_batches: ClassVar[bool] = True
    damps: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_memory(self, self.memory)
        for name in ("fixed", "step", "sample", "exchange", "margin"):
            self._check(name)
        self._check("price", above=0.0)
        if self.per == "dollar" and self.price is None:
            raise PlanError(f"{self}: the price is missing; write price=0.74, in USD per hour of one worker, or "
                            f"per=hour")  # fmt: skip
        if self.per == "hour" and (self.price is not None or self.fixed):
            raise PlanError(f"{self}: progress per hour does not depend on a price; leave it out, or write per=dollar")
        if (given := self.given_times) is not None and given.step + given.sample <= 0:
            raise PlanError(f"{self}: a step would take no time; give step=50ms, sample=4ms, or both")

    @property
    def given_times(self) -> StepTimes | None:
        """The times that the text gives; None if they are to be measured."""
        if self.step is None and self.sample is None and self.exchange is None:
            return None
        return StepTimes(step=self.step or 0.0, sample=self.sample or 0.0, exchange=self.exchange or 0.0)

    def score(self, batch: int, workers: int, seconds: float, *, noise_scale: float, ref_batch: int) -> float:
        """Progress per hour, or per dollar, of steps of `batch` samples that take `seconds` on this many workers."""
        progress = 3600 * value_of(workers, batch, seconds, noise_scale=noise_scale, ref_batch=ref_batch).goodput
        return progress if self.per == "hour" else progress / ((self.price or 0.0) * workers + self.fixed)

    def stats(self, state: PolicyState) -> dict[str, float]:
        """The noise scale, if it is known and finite, and the mean duration of the latest kind of step (`step_s`)."""
        memory: Mapping[str, Any] = state or {}
        phi, kinds = _noise_scale(memory), memory.get("kinds")
        known = {} if phi is None or math.isinf(phi) else {"noise_scale": phi}
        return {**known, "step_s": kinds[-1][2]} if kinds else known

    def _collect(self, seen: Observation, memory: Mapping[str, Any]) -> dict[str, Any]:
        collected = _averaged(seen, memory, self.memory)
        if not seen.batch:
            return collected
        collected["taken"] = max(collected.get("taken", 0), seen.batch)
        if self.given_times is None and seen.workers and seen.seconds is not None and 0 < seen.seconds < math.inf:
            kind = [seen.workers, seen.batch]
            if kind == collected.get("last"):  # the first step after a change contains the cost of the change
                collected["kinds"] = _add_time(collected.get("kinds", []), kind, seen.seconds)
            collected["last"] = kind
        return collected

    def _decide(self, seen: Observation, memory: Mapping[str, Any]) -> tuple[float | None, dict[str, Any]]:
        rest = {key: kept for key, kept in memory.items() if key != "taken"}
        phi, first = _noise_scale(memory), self.first_batch(seen)
        times = self.given_times or fit_times([TimedStep(*kind[:3]) for kind in memory.get("kinds", [])])
        if phi is None or times is None:
            return None, rest
        local = self.local_batch or first

        def score(batch: int) -> float:
            workers = workers_for(batch, local)
            return self.score(batch, workers, times.seconds(workers, batch), noise_scale=phi, ref_batch=seen.ref_batch)

        current = int(memory.get("batch", first))
        most = max(current, 2 * memory.get("taken", first))
        most = min(most, self.max_batch or most)
        best = max(batch_candidates(first, local_batch=local, most=most), key=score)
        return (best if score(best) > (1 + self.margin) * score(current) else current) / first, rest


def _noise_scale(memory: Mapping[str, Any]) -> float | None:
    """V/S of the averages: infinite without signal, 0 without noise, None if there is neither."""
    noise, signal = (max(0.0, float(value)) for value in memory.get("average", (0.0, 0.0)))
    if signal > 0:
        return noise / signal
    return math.inf if noise > 0 else None


def _add_time(kinds: list[list[float]], kind: list[int], seconds: float) -> list[list[float]]:
    """[workers, samples, mean seconds, steps] of each kind of step, the latest last, with one more step.

    The mean covers the last 20 steps. A step may count for three times the mean at most, since the machine may have
    slept or validated.
    """
    mean, steps = next(((old[2], old[3]) for old in kinds if old[:2] == kind), (seconds, 0))
    steps = min(steps + 1, _TIMED_STEPS)
    new = [*kind, mean + (min(seconds, 3 * mean) - mean) / steps, steps]
    others = [old for old in kinds if old[:2] != kind]
    return [*others[1 - _TIMED_KINDS :], new]


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
        self.requested, self._state = policy.ask(self._seen, self._state)

    @property
    def useful(self) -> int:
        """Samples that the next step would take if there were enough workers."""
        return min(self.requested, self.policy.max_batch or self.requested)

    def allow(self, size: StepSize) -> StepSize:
        """What the next step takes if the workers can do `size`."""
        taken = allow(size, self.requested, self.policy.max_batch)
        return taken if self.policy.damps else replace(taken, requested=None)

    @property
    def stats(self) -> dict[str, float]:
        """Values of the policy for the record, after the last committed step."""
        stats: Any = self.policy.stats(self._state)
        if not isinstance(stats, Mapping):
            raise PlanError(f"{self.policy}: stats() returned {stats!r}; expected values by name, such as {{}}")
        return stats  # type: ignore[return-value]

    def observe(
        self,
        *,
        batch: int,
        loss: float | None = None,
        norm_sq: float | None = None,
        noise: float | None = None,
        signal: float | None = None,
        workers: int = 0,
        seconds: float | None = None,
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
            workers=workers,
            seconds=seconds,
        )
        self.requested, self._state = self.policy.ask(self._seen, self._state)

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
