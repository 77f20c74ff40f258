"""How long a step takes: computing, exchanging gradients, waiting for data and for the slowest worker.

    WholeStep          a measured step time; all of it counts as computing
    ComputeAndNetwork  computing by the local batch, the exchange by the workers, less what computing hides
    NETWORKS           how long an exchange takes: ring, tree, server, affine
    STRAGGLERS         how much slower the slowest worker is: exponential, rare, lognormal

The last step of an epoch, which is smaller, takes a time between that of an empty and that of a whole step, in
proportion to its samples: what does not depend on the samples is paid in full.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ebbflow.core.columns import Columns
from ebbflow.core.spec import Registry, param
from ebbflow.core.units import Seconds, parse_seconds
from ebbflow.errors import ConfigError, PlanError
from ebbflow.plan.steptime import ConstantStepTime, StepTime, TableStepTime

__all__ = [
    "NETWORKS", "STRAGGLERS", "Affine", "ComputeAndNetwork", "ExponentialDelay", "LognormalSpread", "Network",
    "ParameterServer", "RareDelay", "Ring", "StepBreakdown", "StepModel", "Stragglers", "Tree", "WholeStep",
    "emulated_passes", "parse_step_time",
]  # fmt: skip

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_NONE = Seconds(0.0)


# -- step models -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StepBreakdown(Columns):
    """Seconds of steps by what they are spent on, with one entry per step; they add up to the whole step."""

    compute: Floats
    network: Floats
    """The part of the exchange that computing does not hide."""
    waiting: Floats

    @property
    def total(self) -> Floats:
        """Seconds of the whole step."""
        return self.compute + self.network + self.waiting


@runtime_checkable
class StepModel(Protocol):
    """The time of a step from its workers and samples."""

    def breakdown(self, workers: Ints, samples: Ints) -> StepBreakdown:
        """The time of steps with these workers (at least one) and samples; with no samples, what is paid anyway."""
        ...


@dataclass(frozen=True)
class WholeStep:
    """A measured step time, constant or by the number of workers, whatever the samples."""

    step_time: StepTime

    def breakdown(self, workers: Ints, samples: Ints) -> StepBreakdown:
        """All of the time counts as computing."""
        seconds = self.step_time.seconds(workers)
        none = np.zeros(len(workers))
        return StepBreakdown(compute=seconds, network=none, waiting=none)

    def __str__(self) -> str:
        return str(self.step_time)


@dataclass(frozen=True, kw_only=True)
class ComputeAndNetwork:
    """Every worker computes on its share of the samples, then all exchange gradients.

    >>> model = ComputeAndNetwork(per_step=0.1, per_sample=0.01, network=NETWORKS.make("affine(0.5s)"), overlap=0.5)
    >>> found = model.breakdown(np.array([1, 2]), np.array([20, 40]))
    >>> found.compute, found.network  # 0.1 + 20 x 0.01; half of it hides the exchange
    (array([0.3, 0.3]), array([0.  , 0.35]))
    """

    per_update: Seconds = _NONE
    """Time per step, however many micro-batches it has: the optimizer, the record."""
    per_step: Seconds = _NONE
    """Computing time per micro-batch (per step without `micro_batch`) that does not depend on the samples."""
    per_sample: Seconds
    """Computing time per sample of a worker."""
    network: Network | None = None
    overlap: float = 0.0
    """Fraction of the computing that can hide the exchange, 0 to 1: gradients of late layers are sent first."""
    loading: Seconds = _NONE
    """Time in which a worker reads one sample. It prefetches, so only what takes longer than the step counts."""
    micro_batch: int | None = None
    """Largest micro-batch that fits into a worker's memory; larger worker batches are accumulated. Emulated: the
    samples of one pass, see `emulated_passes`."""
    serial: bool = False
    """The workers are emulated: one machine computes for all, so the time depends on the samples of the whole step."""

    def __post_init__(self) -> None:
        for name in ("per_update", "per_step", "per_sample", "loading"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} is {value:g} s; expected a finite time that is not negative")
        if self.per_update + self.per_step + self.per_sample <= 0:
            raise ConfigError("a step would take no time; give a computing time per step, per sample, or both")
        if not 0 <= self.overlap <= 1:
            raise ConfigError(f"overlap is {self.overlap:g}; expected a fraction between 0 and 1")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise ConfigError(f"micro-batch is {self.micro_batch}; expected at least 1 sample")

    def breakdown(self, workers: Ints, samples: Ints) -> StepBreakdown:
        """The slowest worker, which has the largest worker batch, determines the time."""
        share = samples if self.serial else -(-samples // workers)
        if self.micro_batch is None:
            micro_batches = np.ones(len(share), np.int64)
        elif self.serial:
            micro_batches = emulated_passes(workers, samples, self.micro_batch)
        else:
            micro_batches = np.maximum(-(-share // self.micro_batch), 1)
        compute = float(self.per_update) + micro_batches * float(self.per_step) + share * float(self.per_sample)
        exchange = np.zeros(len(share)) if self.network is None else self.network.seconds(workers)
        network = np.maximum(exchange - self.overlap * compute, 0.0)
        return StepBreakdown(
            compute=compute, network=network, waiting=np.maximum(share * float(self.loading) - compute - network, 0.0)
        )

    def __str__(self) -> str:
        parts = [f"{self.per_update:.6g}s per update"] if self.per_update else []
        parts += [
            f"{self.per_step:.6g}s per {'micro-batch' if self.per_update else 'step'}",
            f"{self.per_sample:.6g}s per sample",
        ]
        parts += [str(self.network)] if self.network is not None else []
        parts += [f"overlap {self.overlap:g}"] if self.network is not None and self.overlap else []
        parts += [f"loading {self.loading:.6g}s"] if self.loading else []
        parts += [f"micro-batches of {self.micro_batch}"] if self.micro_batch else []
        return ", ".join(parts + (["emulated"] if self.serial else []))


def emulated_passes(workers: Ints, samples: Ints, micro_batch: int) -> Ints:
    """Passes in which one machine computes an emulated step, each with as many whole worker batches as fit.

    A pass holds at most `micro_batch` samples, in worker batches of one size. Where the samples cannot be shared evenly
    there are worker batches of two sizes, so the last step of an epoch takes more passes than its samples alone would.

    >>> emulated_passes(np.array([16, 16, 16]), np.array([512, 413, 0]), 128)  # 413: 13 workers of 26 and 3 of 25
    array([4, 5, 1])
    """
    low, larger = np.divmod(samples, workers)
    passes: Ints = -(-larger // np.maximum(micro_batch // (low + 1), 1))
    passes += np.where(low > 0, -(-(workers - larger) // np.maximum(micro_batch // np.maximum(low, 1), 1)), 0)
    return np.maximum(passes, 1, out=passes)


def parse_step_time(text: str) -> WholeStep:
    """A constant ("0.6s") or a table by the number of workers ("1:0.5s 8:0.62s").

    >>> str(parse_step_time("8:0.62s 1:500ms"))
    '1:0.5s 8:0.62s'
    """
    if ":" not in text:
        return WholeStep(ConstantStepTime(parse_seconds(text)))
    table: dict[int, float] = {}
    for word in text.replace(",", " ").split():
        count, colon, seconds = word.partition(":")
        if not colon or not count.isdecimal():
            raise PlanError(f"{word!r} in the step times {text!r} is not workers:time; write for example 8:0.62s")
        if int(count) in table:
            raise PlanError(f"the step times {text!r} have {int(count)} workers twice; give one time for each count")
        table[int(count)] = parse_seconds(seconds)
    return WholeStep(TableStepTime(table))


# -- networks ----------------------------------------------------------------------------------------------------------


@runtime_checkable
class Network(Protocol):
    """The duration of one exchange of gradients by the number of workers."""

    def seconds(self, workers: Ints) -> Floats:
        """The duration of an exchange for each number of workers, which is at least one."""
        ...

    def __str__(self) -> str:
        return NETWORKS.text(self)


NETWORKS: Registry[Network] = Registry("network")


@dataclass(frozen=True)
class _Links(Network):
    """The parameters that all network topologies share: the message, the links, and the workers on one machine.

    Workers on one machine exchange at no cost: a link inside a machine is ten or more times faster than one between
    machines.
    """

    megabytes: float = param(doc="size of all gradients, in 10^6 bytes (4 bytes per parameter in single precision)")
    gbps: float = param(doc="bandwidth of a machine's link in one direction, in 10^9 bits per second")
    latency: Seconds = param(_NONE, doc="time until the first byte of a message arrives")
    per_machine: int = param(1, doc="workers on one machine, which exchange at no cost")

    def __post_init__(self) -> None:
        for name in ("megabytes", "gbps"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"network: {name} is {value:g}; expected a number above 0")
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise ConfigError(f"network: latency is {self.latency:g} s; expected a time that is not negative")
        if self.per_machine < 1:
            raise ConfigError(f"network: per_machine is {self.per_machine}; expected at least 1")

    @property
    def transfer_s(self) -> float:
        """Seconds that all gradients take through one link."""
        return self.megabytes * 8e-3 / self.gbps

    def machines(self, workers: Ints) -> Ints:
        """The machines that these workers fill."""
        return -(-workers // self.per_machine)


@NETWORKS.register("ring", cite="Patarasuk, Yuan 2009")
@dataclass(frozen=True)
class Ring(_Links):
    """Ring all-reduce: 2(W-1) rounds, each of which moves 1/W of the gradients over every link.

    >>> Ring(megabytes=100, gbps=8, latency=0.001).seconds(np.array([1, 2, 4]))
    array([0.   , 0.102, 0.156])
    """

    def seconds(self, workers: Ints) -> Floats:
        """2(W-1) (latency + size / (W bandwidth)); nothing for one machine."""
        count = self.machines(workers)
        return 2.0 * (count - 1) * (self.latency + self.transfer_s / count)


@NETWORKS.register("tree", cite="Sanders, Speck, Traff 2009")
@dataclass(frozen=True)
class Tree(_Links):
    """Pipelined tree all-reduce: down and up log2 W levels, while the gradients stream through.

    >>> Tree(megabytes=100, gbps=8, latency=0.001).seconds(np.array([1, 2, 5]))
    array([0.   , 0.202, 0.206])
    """

    def seconds(self, workers: Ints) -> Floats:
        """2 (ceil(log2 W) latency + size / bandwidth); nothing for one machine."""
        levels = np.ceil(np.log2(self.machines(workers)))
        return np.where(levels > 0, 2.0 * (levels * self.latency + self.transfer_s), 0.0)


@NETWORKS.register("server", cite="Li et al. 2014")
@dataclass(frozen=True)
class ParameterServer(_Links):
    """Centralized: every machine sends its gradients to the servers and gets the weights back.

    The servers' links carry the traffic of all machines, so the time grows with their number. Several servers hold one
    part of the weights each.

    >>> ParameterServer(megabytes=100, gbps=8).seconds(np.array([1, 4]))
    array([0.2, 0.8])
    """

    servers: int = param(1, doc="machines that share the weights")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.servers < 1:
            raise ConfigError(f"network: servers is {self.servers}; expected at least 1")

    def seconds(self, workers: Ints) -> Floats:
        """2 (latency + size / bandwidth x machines per server, which count as one at least)."""
        return 2.0 * (self.latency + self.transfer_s * np.maximum(self.machines(workers) / self.servers, 1.0))


@NETWORKS.register("affine", cite="Qiao et al. 2021")
@dataclass(frozen=True)
class Affine(Network):
    """The model of Pollux: a fixed time for two workers, and more for each further one. Fits of real steps give it.

    >>> Affine(first=0.02, more=0.001).seconds(np.array([1, 2, 12]))
    array([0.  , 0.02, 0.03])
    """

    first: Seconds = param(doc="an exchange of two workers")
    more: Seconds = param(_NONE, doc="for each further worker")

    def __post_init__(self) -> None:
        if not (math.isfinite(self.first) and math.isfinite(self.more) and self.first >= 0 and self.more >= 0):
            raise ConfigError(f"network: {self.first:g} s and {self.more:g} s; expected times that are not negative")

    def seconds(self, workers: Ints) -> Floats:
        """first + more (W-2); nothing for one worker."""
        return np.where(workers > 1, self.first + self.more * np.maximum(workers - 2, 0), 0.0)


# -- stragglers --------------------------------------------------------------------------------------------------------


@runtime_checkable
class Stragglers(Protocol):
    """How much slower the slowest of W workers is: a synchronous step waits for it.

    The computing time of a worker in a step is its usual time times a random factor, independent of all others. A step
    waits for the largest of W such factors, whose mean and variance are all that a long sequence of steps needs.
    """

    def slowest(self, workers: Ints) -> tuple[Floats, Floats]:
        """(mean, variance) of the largest factor among the workers, for each number of workers."""
        ...

    def __str__(self) -> str:
        return STRAGGLERS.text(self)


STRAGGLERS: Registry[Stragglers] = Registry("straggler model")


def _check_not_negative(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"stragglers: {name} is {value:g}; expected a number that is not negative")


@STRAGGLERS.register("exponential", cite="Dutta et al. 2018")
@dataclass(frozen=True)
class ExponentialDelay(Stragglers):
    """The usual time plus an exponential delay; the slowest of W adds 1 + 1/2 + ... + 1/W mean delays.

    >>> ExponentialDelay(0.1).slowest(np.array([1, 3]))[0].round(6)
    array([1.1     , 1.183333])
    """

    delay: float = param(doc="mean delay, as a fraction of the computing time")

    def __post_init__(self) -> None:
        _check_not_negative("delay", self.delay)

    def slowest(self, workers: Ints) -> tuple[Floats, Floats]:
        """1 + delay H(W), and delay^2 (1 + 1/4 + ... + 1/W^2)."""
        ranks = 1.0 / np.arange(1, int(workers.max()) + 1)
        return (1.0 + self.delay * np.cumsum(ranks)[workers - 1], self.delay**2 * np.cumsum(ranks**2)[workers - 1])


@STRAGGLERS.register("rare")
@dataclass(frozen=True)
class RareDelay(Stragglers):
    """Sometimes a worker takes several times as long; with W workers that happens about W times as often.

    >>> RareDelay(0.5, factor=3).slowest(np.array([1, 2]))
    (array([2. , 2.5]), array([1.  , 0.75]))
    """

    chance: float = param(doc="probability for one worker in one step, between 0 and 1")
    factor: float = param(2.0, doc="how many times the usual time it takes then")

    def __post_init__(self) -> None:
        if not 0 <= self.chance <= 1 or not (math.isfinite(self.factor) and self.factor >= 1):
            raise ConfigError(f"stragglers: a chance of {self.chance:g} for {self.factor:g} times the time; expected a "
                              f"chance between 0 and 1 and a factor of at least 1")  # fmt: skip

    def slowest(self, workers: Ints) -> tuple[Floats, Floats]:
        """1 + (factor - 1) p and (factor - 1)^2 p (1 - p), where p = 1 - (1 - chance)^W."""
        delayed = 1.0 - (1.0 - self.chance) ** workers.astype(np.float64)
        return 1.0 + (self.factor - 1) * delayed, (self.factor - 1) ** 2 * delayed * (1 - delayed)


@STRAGGLERS.register("lognormal")
@dataclass(frozen=True)
class LognormalSpread(Stragglers):
    """Factors whose logarithm is normally distributed, with the usual time as their median.

    The largest of W has the distribution function F^W. Its moments are sums over quantiles, accurate to one part in a
    thousand for spreads up to 1.
    """

    spread: float = param(doc="standard deviation of the logarithm; 0.1: most are within 10 %")

    def __post_init__(self) -> None:
        _check_not_negative("spread", self.spread)
        if self.spread > 3:
            raise ConfigError(f"stragglers: a spread of {self.spread:g} means factors of e^{self.spread:g}; "
                              f"expected at most 3")  # fmt: skip

    def slowest(self, workers: Ints) -> tuple[Floats, Floats]:
        """Mean and variance of the largest factor, from the quantiles of F^W."""
        counts, where = np.unique(workers, return_inverse=True)
        normal = NormalDist()
        # The levels of the quantiles are evenly spaced in the logarithm of their distance to both ends.
        edges = np.concatenate([np.geomspace(1e-12, 0.5, 400), 1.0 - np.geomspace(1e-12, 0.5, 400)[-2::-1]])
        levels, weights = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
        moments = []
        for count in counts.tolist():
            # u^(1/W) is 1 - tail; the tail keeps its digits where u^(1/W) would round to 1.
            tails = -np.expm1(np.log(levels) / count)
            factors = np.exp(-self.spread * np.array([normal.inv_cdf(max(tail, 1e-300)) for tail in tails.tolist()]))
            mean = float(weights @ factors) / float(weights.sum())
            moments.append((mean, float(weights @ (factors - mean) ** 2) / float(weights.sum())))
        table = np.array(moments)
        return table[where, 0], table[where, 1]
