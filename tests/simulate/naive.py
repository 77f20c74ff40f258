"""The rules of a walk once more, a step at a time, and what random walks are made of."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import strategies as st

from ebbflow.plan.batch_plan import cut_step
from ebbflow.simulate.legs import SNAP, Legs, Walk, Work
from ebbflow.simulate.recovery import DRAIN, FINISH, LOSE, Checkpoint, Ideal, PerStep, Recovery

__all__ = ["Naive", "assert_same", "legs_of", "recoveries", "stretches", "works"]


@dataclass
class Naive:
    """The rules once more, a step at a time: a clock, a list of steps, and what is under way at a change."""

    legs: Legs | Callable[[int, int], Legs]  # the stretches, or those after so many steps and samples
    work: Work
    steps: list[tuple[int, float, float]] = field(default_factory=list)  # samples, start, duration; one each
    now: float = 0.0
    waiting: float = 0.0
    lost: float = 0.0
    restart: float = 0.0
    checkpoint: float = 0.0
    done: bool = False

    def run(self) -> Naive:
        count, leg, fresh = len(self._legs().stops), 0, True
        kept = 0  # steps that a checkpoint holds
        saving, pause, before = False, 0.0, None
        while leg < count:
            legs = self._legs()
            reaction, write, stop = legs.reaction, legs.reaction.write, float(legs.stops[leg])
            end, every, size = int(reaction.ends[leg]), int(reaction.every[leg]), int(legs.samples[leg])
            if self._reference() >= self._needed and self.now <= stop:
                break
            if fresh:  # what a change costs is a matter of those who were at work before it
                pause = max(pause, float((before or legs).reaction.pauses[leg]))
            before = legs
            leg, fresh, here = leg + 1, True, leg
            if self.now < stop and size == 0:
                begin = math.ceil(stop / legs.grid - SNAP) * legs.grid if legs.grid else stop
                self.waiting += begin - self.now
                self.now, pause = begin, 0.0
                continue
            saving = saving or 0 < every <= len(self.steps) - kept
            if self.now < stop and saving and not (end == LOSE and self.now + write > stop):
                self.now, self.checkpoint = self.now + write, self.checkpoint + write
                kept, saving = len(self.steps), False
            if self.now < stop and not saving:
                idle = min(pause, stop - self.now)
                self.now, self.restart, pause = self.now + idle, self.restart + idle, pause - idle
                until = stop - write if end == DRAIN and reaction.saves[here] else stop
                while True:
                    samples, seconds = self._next(legs, here)
                    within = until - self.now if end == FINISH else until - self.now - seconds
                    if within <= SNAP * seconds if end == FINISH else within < -SNAP * seconds:
                        break
                    self.steps.append((samples, self.now, seconds))
                    self.now += seconds
                    if self._reference() >= self._needed:
                        break
                    if every and len(self.steps) - kept == every:
                        if self.now + write > until + SNAP * float(legs.seconds[here]):
                            saving = end == FINISH
                            break
                        self.now, self.checkpoint = self.now + write, self.checkpoint + write
                        kept = len(self.steps)
                    if self._legs() is not legs and self.now < stop - SNAP * float(legs.seconds[here]):
                        leg, fresh = here, False  # the rest of this stretch has other steps
                        break
                if not fresh or self._reference() >= self._needed:
                    continue
                if reaction.saves[here] and len(self.steps) > kept:
                    saving = True
                    if end == DRAIN:
                        self.now, self.checkpoint = self.now + write, self.checkpoint + write
                        kept, saving = len(self.steps), False
            elif reaction.saves[here] and len(self.steps) > kept:
                saving = True
            if end == LOSE:
                if not every:
                    hit = self.steps and self.now > stop + SNAP * self.steps[-1][2]
                    kept = len(self.steps) - bool(hit)
                self.lost += sum(seconds for _, _, seconds in self.steps[kept:]) + stop - self.now
                del self.steps[kept:]
                self.now, saving, pause = stop, False, 0.0
        self.done = self._reference() >= self._needed
        return self

    def _legs(self) -> Legs:
        if isinstance(self.legs, Legs):
            return self.legs
        return self.legs(len(self.steps), sum(samples for samples, _, _ in self.steps))

    def _next(self, legs: Legs, leg: int) -> tuple[int, float]:
        size, whole, empty = int(legs.samples[leg]), float(legs.seconds[leg]), float(legs.empty[leg])
        if not self.work.cut:
            return size, whole
        left = self.work.epoch - sum(samples for samples, _, _ in self.steps) % self.work.epoch
        samples = cut_step(size, left)
        return samples, whole if samples == size else empty + (whole - empty) * samples / size

    @property
    def _needed(self) -> float:
        return self.work.needed - min(0.5, 1e-9 * self.work.needed)

    def _reference(self) -> float:
        return sum(self.work.worth(samples) for samples, _, _ in self.steps)


def legs_of(
    stretches: list[tuple[float, int]], recovery: Recovery, *, batch: int, step: float, more: float, fixed: float,
    grid: bool = False,
) -> Legs:  # fmt: skip
    lengths, workers = np.array([s[0] for s in stretches]), np.array([s[1] for s in stretches], np.int64)
    seconds = step + more * np.maximum(workers, 1)
    return Legs(
        stops=np.cumsum(lengths),
        samples=workers * batch,
        seconds=seconds,
        empty=seconds * fixed,
        reaction=recovery.react(workers, seconds),
        grid=step if grid else 0.0,
    )


recoveries = st.one_of(
    st.sampled_from([Ideal("finish"), Ideal("lose")]),
    st.builds(
        PerStep,
        detect=st.sampled_from([0.0, 0.7, 4.0]),
        restart=st.sampled_from([0.0, 1.3]),
        join=st.sampled_from([0.0, 2.1]),
        notice=st.sampled_from([0.0, 1.1, 30.0]),
    ),
    st.builds(
        Checkpoint,
        every=st.sampled_from([0.1, 3.0, 11.0]),
        write=st.sampled_from([0.0, 0.9]),
        detect=st.sampled_from([0.0, 0.7]),
        restart=st.sampled_from([0.0, 2.3]),
        notice=st.sampled_from([0.0, 30.0]),
    ),
)
stretches = st.lists(
    st.tuples(st.floats(0.05, 30.0).map(lambda x: round(x, 3)), st.integers(0, 4)), min_size=1, max_size=12
)
works = st.builds(
    Work,
    epoch=st.integers(1, 97),
    needed=st.integers(1, 400).map(float),
    cut=st.booleans(),
    noise_scale=st.sampled_from([math.inf, 7.0]),
    ref_batch=st.integers(1, 6),
)


def assert_same(found: Walk, naive: Naive) -> None:
    assert found.done == naive.done
    assert found.time == pytest.approx(naive.now)
    for name in ("waiting", "lost", "restart", "checkpoint"):
        assert getattr(found, name) == pytest.approx(getattr(naive, name), abs=1e-6), name
    runs = found.runs() if found.rows or found.blocks else None
    sizes = np.repeat(runs.sizes, runs.counts).tolist() if runs else []
    assert sizes == [samples for samples, _, _ in naive.steps]
    if runs:
        firsts = np.cumsum(runs.counts) - runs.counts
        starts = np.array([start for _, start, _ in naive.steps])[firsts]
        # A checkpoint is written inside a run, so only the first step of a run is known to begin where it says.
        np.testing.assert_allclose(runs.starts, starts, atol=1e-6)
