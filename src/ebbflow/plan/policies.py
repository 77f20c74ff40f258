"""How many of the available workers take part in a step, and with how many samples in all.

A policy is a frozen dataclass in a registry. What it wants may be less than what the workers could do, never more. The
policies here look at the workers alone; those of `growing.py`, in the same registry, look at the progress of training.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ebbflow.core.spec import Call, Registry, bind, param, parse_call, render
from ebbflow.errors import PlanError, SpecError

__all__ = ["POLICIES", "Capped", "FixedTotal", "Follow", "Policy", "make_policy"]

Ints = npt.NDArray[np.int64]


@runtime_checkable
class Policy(Protocol):
    """From available workers to the step."""

    def sizes(self, workers: Ints) -> tuple[Ints, Ints]:
        """(workers that take part, samples of the whole step) for each count; both are 0 where the count is 0."""
        ...


POLICIES: Registry[Policy] = Registry("policy")


def _at_least_one(policy: str, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            raise PlanError(f"{policy}: {name} is {value}; expected at least 1")


@POLICIES.register("follow", kind="fleet", cite="Andre, Strati, Klimovic 2022")
@dataclass(frozen=True)
class Follow:
    """The batch follows the workers: each always takes the same local batch."""

    local_batch: int = param(doc="samples a worker takes in a step")

    def __post_init__(self) -> None:
        _at_least_one("follow", local_batch=self.local_batch)

    def sizes(self, workers: Ints) -> tuple[Ints, Ints]:
        """All workers, local_batch samples each."""
        return workers, workers * self.local_batch

    def __str__(self) -> str:
        return render("follow", self)


@POLICIES.register("fixed", kind="fleet", cite="Lin et al. 2019")
@dataclass(frozen=True)
class FixedTotal:
    """The batch stays the same and is shared, as evenly as whole samples allow, by the workers that are there.

    A worker takes part only while at least two samples fall to it (a lone sample has no variance, which batch norm
    needs); workers beyond that idle.
    """

    total: int = param(doc="samples of every step")

    def __post_init__(self) -> None:
        _at_least_one("fixed", total=self.total)

    def sizes(self, workers: Ints) -> tuple[Ints, Ints]:
        """At most total // 2 workers, total samples."""
        return np.minimum(workers, max(1, self.total // 2)), np.where(workers > 0, self.total, 0)

    def __str__(self) -> str:
        return render("fixed", self)


@POLICIES.register("capped", kind="fleet")
@dataclass(frozen=True)
class Capped:
    """The batch follows the workers up to a limit; workers above it idle.

    The limit is a number of workers, or a batch that is not to be exceeded: then as many whole local batches as fit.
    """

    local_batch: int = param(doc="samples a worker takes in a step")
    max_batch: int | None = param(None, doc="samples that a step never exceeds")
    max_workers: int | None = param(None, doc="workers that a step never exceeds")

    def __post_init__(self) -> None:
        _at_least_one("capped", local_batch=self.local_batch, max_batch=self.max_batch, max_workers=self.max_workers)
        if self.max_batch is None and self.max_workers is None:
            raise PlanError("capped has no limit; write capped(max_batch=4096) or capped(max_workers=32)")
        if self.max_batch is not None and self.max_batch < self.local_batch:
            raise PlanError(f"capped: max_batch={self.max_batch} is less than local_batch={self.local_batch}; "
                            f"one worker alone would exceed it")  # fmt: skip

    def sizes(self, workers: Ints) -> tuple[Ints, Ints]:
        """The workers up to the limit, local_batch samples each."""
        limits = [] if self.max_workers is None else [self.max_workers]
        limits += [] if self.max_batch is None else [self.max_batch // self.local_batch]
        used = np.minimum(workers, min(limits))
        return used, used * self.local_batch

    def __str__(self) -> str:
        return render("capped", self)


def make_policy(text: str | Call | Policy, local_batch: int | None = None) -> Policy:
    """A policy from its text; where the text leaves the local batch out, the given one is used.

    >>> make_policy("follow", local_batch=128)
    Follow(local_batch=128)
    >>> make_policy("follow(32)", local_batch=128)
    Follow(local_batch=32)
    >>> str(make_policy("geo(delay=60ep, factor=5)", local_batch=128))
    'geo(60ep, factor=5, local_batch=128)'
    """
    if isinstance(text, Policy):
        return text
    call = parse_call(text) if isinstance(text, str) else text
    make = POLICIES.entry(call.name).make
    parameters = {p.name: p.default for p in inspect.signature(make).parameters.values()}
    fields = list(parameters)
    given = {*fields[: len(call.args)], *(key for key, _ in call.kwargs)}
    if local_batch is None and parameters.get("local_batch") is inspect.Parameter.empty and "local_batch" not in given:
        raise SpecError(
            f"the policy {call} lacks local_batch, the samples a worker takes in a step; give --local-batch 32, or "
            f"write it into the policy: {Call(call.name, ('32', *call.args), call.kwargs)}"
        )
    if local_batch is not None and "local_batch" in fields and "local_batch" not in given:
        call = Call(call.name, call.args, (*call.kwargs, ("local_batch", str(local_batch))))
    return bind(call, make)
