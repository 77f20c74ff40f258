"""A batch that grows while training goes on: phases in which the policy wants the same, each with its own stretches.

Only *passive* policies can be simulated: their wish follows from the steps or the samples so far. Where a phase ends
inside a stretch, the walk goes on in the same stretch with the larger steps; where a loss takes steps back over the
beginning of a phase, the phase before it comes again, as in training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ebbflow.plan.policies import GrowingPolicy, Observation
from ebbflow.simulate.legs import Legs, Walk, Work
from ebbflow.simulate.walker import ENDLESS, Walker

__all__ = ["Part", "Phase", "Phases", "limited", "walk_growing"]

Ints = npt.NDArray[np.int64]
_SMALLEST, _LARGEST = 16, 4096
"""Stretches that are made in one go: a phase may end long before the trace does."""


def limited(workers: Ints, samples: Ints, requested: int) -> tuple[Ints, Ints]:
    """(workers, samples) of steps of at most `requested` samples, where the workers could do so many: `growth.allow`.

    >>> limited(np.array([0, 1, 4, 16]), np.array([0, 32, 128, 512]), 100)
    (array([0, 1, 4, 4]), array([  0,  32, 100, 100]))
    """
    batch = np.minimum(samples, requested)
    needed = -(-batch * workers // np.maximum(samples, 1))
    return np.minimum(np.minimum(workers, np.maximum(batch // 2, 1)), needed), batch


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Where the policy wants the same."""

    requested: int
    until_steps: int
    """Another wish may come with this step, counted from 0."""
    until_samples: int
    """Another wish may come when so many samples are done."""


@dataclass(frozen=True, kw_only=True)
class Phases:
    """The wishes of a passive policy, never more than `most`, which is all that the workers can ever do."""

    policy: GrowingPolicy
    ref_batch: int
    epoch_samples: int
    most: int

    def requested(self, steps: int, samples: int) -> int:
        """The wish after so many steps and samples."""
        seen = Observation(step=steps, samples=samples, epoch_samples=self.epoch_samples, ref_batch=self.ref_batch)
        requested, _ = self.policy.requested(seen, self.policy.init())
        return min(requested, self.most, self.policy.max_batch or requested)

    def at(self, steps: int, samples: int) -> Phase:
        """The phase at a position; the wish grows with the steps or with the samples, and never falls."""
        requested = self.requested(steps, samples)
        return Phase(
            requested=requested,
            until_steps=_first(lambda later: self.requested(later, samples) > requested, steps),
            until_samples=_first(lambda later: self.requested(steps, later) > requested, samples),
        )


def _first(grown: Callable[[int], bool], position: int) -> int:
    """The first whole number above `position` at which `grown` holds, which then holds for good; or ENDLESS.

    >>> _first(lambda x: x >= 1234, 100)
    1234
    """
    if not grown(ENDLESS):
        return ENDLESS
    step = 1
    while not grown(position + step):
        step *= 2
    low, high = position + step // 2, position + step  # not yet grown, or the position itself; grown
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if grown(middle) else (middle, high)
    return high


class Part(Protocol):
    """Some stretches, as a phase has them."""

    @property
    def legs(self) -> Legs:
        """What is walked."""
        ...


P = TypeVar("P", bound=Part)


def walk_growing(
    phases: Phases, part_of: Callable[[int, int, int], P], count: int, work: Work
) -> tuple[Walk, list[tuple[P, int]]]:
    """Follow `count` stretches; `part_of(requested, first, stop)` makes some of them, as they are with a wish.

    Also the parts, in order, and how many stretches of each were walked: runs are numbered by these, all in a row.
    """
    used: list[tuple[P, int]] = []
    walker, begin, begun, made, window = None, 0, False, 0, _SMALLEST
    while True:
        phase = phases.at(0, 0) if walker is None else phases.at(walker.steps, walker.samples)
        stop = min(begin + window, count)
        part = part_of(phase.requested, begin, stop)
        walker = walker or Walker(part.legs, work)
        walker.enter(part.legs, until_steps=phase.until_steps, until_samples=phase.until_samples)
        walker.walk(begun=begun, mark=made)
        over = walker.next is None and (stop == count or (walker.found.done and walker.now <= part.legs.stops[-1]))
        walked, begun = walker.next or (stop - begin, False)
        kept = min(walked + 1, stop - begin)
        used.append((part, kept))
        made += kept
        if over:
            return walker.close(), used
        window = _SMALLEST if walker.next else min(2 * window, _LARGEST)  # a phase may be short, or very long
        begin += walked
