"""The stretches of a simulated trace, what is to be done on them, and the runs of steps that come out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ebbflow.simulate.recovery import Reaction

__all__ = ["SNAP", "Legs", "Runs", "Walk", "Work"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SNAP = 1e-6
"""Times that a user writes in decimals are not exact in binary: an event within this part of a step of a step's end
counts as being there."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is to be done."""

    epoch: int
    """Samples of an epoch."""
    needed: float
    """Reference samples after which training ends; a step of B samples is worth B times its efficiency."""
    cut: bool = True
    """Whether an epoch's last step is cut to what the epoch has left."""
    noise_scale: float = math.inf
    ref_batch: int = 1

    def worth(self, samples: int) -> float:
        """Reference samples that a step is worth: Pollux's efficiency, 1 up to the reference batch.

        >>> Work(epoch=1, needed=1, noise_scale=300, ref_batch=100).worth(500)  # 500 x (300 + 100) / (300 + 500)
        250.0
        """
        if self.noise_scale == math.inf or samples <= self.ref_batch:
            return float(samples)
        return samples * (self.noise_scale + self.ref_batch) / (self.noise_scale + samples)

    def worths(self, samples: Ints) -> Floats:
        """`worth` of each."""
        sizes = samples.astype(np.float64)
        if self.noise_scale == math.inf:
            return sizes
        return sizes * np.minimum((self.noise_scale + self.ref_batch) / (self.noise_scale + sizes), 1.0)


@dataclass(frozen=True, kw_only=True)
class Legs:
    """Stretches of constant fleet and batch, back to back from 0 s on, one entry each."""

    stops: Floats
    samples: Ints
    """Of a whole step; 0 where nobody is there."""
    seconds: Floats
    """Of a whole step; not looked at where `samples` is 0."""
    empty: Floats
    """Of a step without a sample: what a step that is cut pays anyway."""
    reaction: Reaction
    grid: float = 0.0
    """Above 0: steps sit on multiples of so many seconds, as in a plan of constant step time."""

    def part(self, first: int, stop: int) -> Legs:
        """From one stretch up to but without another."""
        within = slice(first, stop)
        return replace(
            self,
            stops=self.stops[within],
            samples=self.samples[within],
            seconds=self.seconds[within],
            empty=self.empty[within],
            reaction=self.reaction.part(first, stop),
        )


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Equal steps in a row."""

    legs: Ints
    """The stretch that each run began in."""
    counts: Ints
    sizes: Ints
    """Samples of each of the run's steps."""
    starts: Floats
    seconds: Floats


@dataclass(kw_only=True)
class Walk:
    """What comes of following a trace: runs of steps, and the seconds in which no step was made or a step was lost."""

    done: bool = False
    time: float = 0.0
    """When the last step, or what the trace has, ended."""
    reference: float = 0.0
    """Reference samples that were made."""
    waiting: float = 0.0
    """Nobody was there."""
    lost: float = 0.0
    """Spent on steps that did not count."""
    restart: float = 0.0
    checkpoint: float = 0.0
    rows: list[tuple[int, int, int, float, float]] = field(default_factory=list)
    """(stretch, steps, samples of each, start, seconds of each) of the latest runs."""
    blocks: list[Runs] = field(default_factory=list)
    """The runs before them."""

    def take_back(self, steps: int) -> list[tuple[int, int]]:
        """Undo the last steps: their time is lost. (How many, samples of each) of them."""
        undone = []
        while steps:
            leg, count, size, start, seconds = self.rows.pop()
            last = min(steps, count)
            self.lost += last * seconds
            undone.append((last, size))
            steps -= last
            if last < count:
                self.rows.append((leg, count - last, size, start, seconds))
        return undone

    def close(self) -> None:
        """Move the latest runs to the blocks."""
        if self.rows:
            legs, counts, sizes, starts, seconds = zip(*self.rows, strict=True)
            self.blocks.append(
                Runs(
                    legs=np.array(legs, np.int64), counts=np.array(counts, np.int64), sizes=np.array(sizes, np.int64),
                    starts=np.array(starts), seconds=np.array(seconds),
                )
            )  # fmt: skip
            self.rows = []

    def runs(self) -> Runs:
        """All runs, in order."""
        self.close()
        if len(self.blocks) == 1:
            return self.blocks[0]
        names = ("legs", "counts", "sizes", "starts", "seconds")
        return Runs(**{name: np.concatenate([getattr(block, name) for block in self.blocks]) for name in names})
