"""How long the exchange of gradients takes: latency and bandwidth, by the shape of the traffic.

The size of what is exchanged is in megabytes (10^6 bytes; four bytes a parameter in single precision), bandwidth in
gigabits a second of one machine's link in one direction. Workers on one machine (`per_machine`) exchange at no cost: a
link inside a machine is ten or more times faster than one between machines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ebbflow.core.spec import Registry, param, render
from ebbflow.core.units import Seconds
from ebbflow.errors import ConfigError

__all__ = ["NETWORKS", "Affine", "Network", "ParameterServer", "Ring", "Tree"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_NONE = Seconds(0.0)


@runtime_checkable
class Network(Protocol):
    """Seconds that one exchange takes among so many workers; asked for counts of at least one."""

    def seconds(self, workers: Ints) -> Floats:
        """The duration of an exchange for each count."""
        ...


NETWORKS: Registry[Network] = Registry("network")


@dataclass(frozen=True)
class _Links:
    """What all shapes share: the message, the links, and who is on one machine."""

    megabytes: float = param(doc="size of all gradients, in 10^6 bytes")
    gbps: float = param(doc="bandwidth of a machine's link, in 10^9 bits a second")
    latency: Seconds = param(_NONE, doc="time until the first byte of a message arrives")
    per_machine: int = param(1, doc="workers on one machine, which exchange at no cost")

    def __post_init__(self) -> None:
        for name, value, least in (("megabytes", self.megabytes, 0.0), ("gbps", self.gbps, 0.0)):
            if not (math.isfinite(value) and value > least):
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
        """Machines that so many workers fill."""
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

    def __str__(self) -> str:
        return render("ring", self)


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

    def __str__(self) -> str:
        return render("tree", self)


@NETWORKS.register("server", cite="Li et al. 2014")
@dataclass(frozen=True)
class ParameterServer(_Links):
    """Centralized: every machine sends its gradients to the servers and gets the weights back.

    The servers' links carry the traffic of all machines, so the time grows with their number; several servers hold a
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
        """2 (latency + size / bandwidth x machines a server, but at least one)."""
        return 2.0 * (self.latency + self.transfer_s * np.maximum(self.machines(workers) / self.servers, 1.0))

    def __str__(self) -> str:
        return render("server", self)


@NETWORKS.register("affine", cite="Qiao et al. 2021")
@dataclass(frozen=True)
class Affine:
    """As Pollux has it: a fixed time for two workers, and more for each further one. What a fit of real steps gives.

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

    def __str__(self) -> str:
        return render("affine", self)
