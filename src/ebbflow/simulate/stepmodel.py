"""Where the time of a step goes: computing, the network, waiting for data.

    WholeStep          a step time that somebody measured: all of it counts as computing
    ComputeAndNetwork  computing by the local batch, the exchange by the workers, what of it computing hides

A step that an epoch's end cuts takes a time between that of an empty step and that of a whole one, in proportion to its
samples: what does not depend on the samples is paid in full.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ebbflow.core.units import Seconds, parse_seconds
from ebbflow.errors import ConfigError, PlanError
from ebbflow.plan.steptime import ConstantStepTime, StepTime, TableStepTime
from ebbflow.simulate.network import Network

__all__ = ["ComputeAndNetwork", "Parts", "StepModel", "WholeStep", "emulated_passes", "parse_step_time"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_NONE = Seconds(0.0)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Seconds of a step by what they are spent on, for each of several steps; they add up to the step."""

    compute: Floats
    network: Floats
    """The part of the exchange that computing does not hide."""
    waiting: Floats

    @property
    def total(self) -> Floats:
        """The whole step."""
        return self.compute + self.network + self.waiting

    @classmethod
    def joined(cls, parts: Sequence[Parts]) -> Parts:
        """One after the other."""
        return cls(
            compute=np.concatenate([one.compute for one in parts]),
            network=np.concatenate([one.network for one in parts]),
            waiting=np.concatenate([one.waiting for one in parts]),
        )

    def take(self, index: Ints | slice) -> Parts:
        """The steps with these numbers."""
        return Parts(compute=self.compute[index], network=self.network[index], waiting=self.waiting[index])


@runtime_checkable
class StepModel(Protocol):
    """Time of a step from its workers and samples."""

    def parts(self, workers: Ints, samples: Ints) -> Parts:
        """For steps of so many samples over so many workers (at least one); zero samples give what is paid anyway."""
        ...


@dataclass(frozen=True)
class WholeStep:
    """A measured step time, constant or by the number of workers, whatever the samples."""

    step_time: StepTime

    def parts(self, workers: Ints, samples: Ints) -> Parts:
        """All of it is computing."""
        seconds = self.step_time.seconds(workers)
        none = np.zeros(len(workers))
        return Parts(compute=seconds, network=none, waiting=none)

    def __str__(self) -> str:
        return str(self.step_time)


@dataclass(frozen=True, kw_only=True)
class ComputeAndNetwork:
    """A worker computes on its share of the samples, then all exchange gradients.

    >>> from ebbflow.simulate.network import NETWORKS
    >>> model = ComputeAndNetwork(per_step=0.1, per_sample=0.01, network=NETWORKS.make("affine(0.5s)"), overlap=0.5)
    >>> parts = model.parts(np.array([1, 2]), np.array([20, 40]))
    >>> parts.compute, parts.network  # 0.1 + 20 x 0.01; half of it hides the exchange
    (array([0.3, 0.3]), array([0.  , 0.35]))
    """

    per_update: Seconds = _NONE
    """Once a step, however many micro-batches it has: the optimizer, the record."""
    per_step: Seconds = _NONE
    """Computing that does not depend on the samples, for each micro-batch (see `micro_batch`)."""
    per_sample: Seconds
    """Computing for each sample of a worker."""
    network: Network | None = None
    overlap: float = 0.0
    """Share of the computing that can hide the exchange, between 0 and 1: gradients of late layers travel first."""
    loading: Seconds = _NONE
    """Time in which a worker reads one sample; it reads ahead, so only what takes longer than the step counts."""
    micro_batch: int | None = None
    """Samples that fit into a worker's memory at once; a larger share is accumulated in so many micro-batches.
    Emulated: the samples of one pass, see `emulated_passes`."""
    serial: bool = False
    """The workers are emulated, one machine computes for all: the time goes by the samples of the whole step."""

    def __post_init__(self) -> None:
        times = {
            "per_update": self.per_update,
            "per_step": self.per_step,
            "per_sample": self.per_sample,
            "loading": self.loading,
        }
        for name, value in times.items():
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} is {value:g} s; expected a finite time that is not negative")
        if self.per_update + self.per_step + self.per_sample <= 0:
            raise ConfigError("a step would take no time; give a computing time a step, a sample, or both")
        if not 0 <= self.overlap <= 1:
            raise ConfigError(f"overlap is {self.overlap:g}; expected a share between 0 and 1")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise ConfigError(f"micro-batch is {self.micro_batch}; expected at least 1 sample")

    def parts(self, workers: Ints, samples: Ints) -> Parts:
        """The slowest worker, which has the largest share, sets the pace."""
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
        return Parts(
            compute=compute,
            network=network,
            waiting=np.maximum(share * float(self.loading) - compute - network, 0.0),
        )

    def __str__(self) -> str:
        said = [f"{self.per_update:.6g}s an update"] if self.per_update else []
        said += [
            f"{self.per_step:.6g}s a {'micro-batch' if self.per_update else 'step'}",
            f"{self.per_sample:.6g}s a sample",
        ]
        said += [str(self.network)] if self.network is not None else []
        said += [f"overlap {self.overlap:g}"] if self.network is not None and self.overlap else []
        said += [f"loading {self.loading:.6g}s"] if self.loading else []
        said += [f"micro-batches of {self.micro_batch}"] if self.micro_batch else []
        return ", ".join(said + (["emulated"] if self.serial else []))


def emulated_passes(workers: Ints, samples: Ints, micro_batch: int) -> Ints:
    """Passes in which an emulated step is computed: as many whole shares of one size in each as `micro_batch` holds.

    Where the samples cannot be shared evenly there are shares of two sizes, which do not go into one pass: the last
    step of an epoch takes more passes than its samples alone would.

    >>> emulated_passes(np.array([16, 16, 16]), np.array([512, 413, 0]), 128)  # of 413: 13 shares of 26 and 3 of 25
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
