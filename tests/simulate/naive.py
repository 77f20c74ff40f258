"""A reference simulator that makes every step by itself, and the random scenarios on which it is compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import strategies as st

from ebbflow.plan.batch_plan import cut_step
from ebbflow.simulate.recovery import DRAIN, FINISH, LOSE, CheckpointRecovery, Ideal, Recovery, StepRecovery
from ebbflow.simulate.scenario import TrainingWork
from ebbflow.simulate.segments import SNAP, Segments, SegmentSteps, SimulatedSteps
from ebbflow.simulate.step_models import StepBreakdown

__all__ = ["NaiveSimulator", "assert_same", "fleets", "recoveries", "segments_of", "steps_of", "works"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass
class NaiveSimulator:
    """The same rules, one step at a time: a clock, a list of steps, and what is in progress at a change."""

    segments: Segments | Callable[[int, int], Segments]  # or the segments after this many steps and samples
    work: TrainingWork
    steps: list[tuple[int, float, float]] = field(default_factory=list)  # samples, start, duration; one each
    now: float = 0.0
    waiting: float = 0.0
    lost: float = 0.0
    restart: float = 0.0
    checkpoint: float = 0.0
    done: bool = False

    def run(self) -> NaiveSimulator:
        count, index, fresh = len(self._segments().stops), 0, True
        kept = 0  # steps that a checkpoint holds
        saving, pause, before = False, 0.0, None
        while index < count:
            segments = self._segments()
            reaction, write, stop = segments.reaction, segments.reaction.write, float(segments.stops[index])
            end, every, size = int(reaction.ends[index]), int(reaction.every[index]), int(segments.steps.samples[index])
            if self._reference() >= self._needed and self.now <= stop:
                break
            if fresh:  # what a change costs depends on the workers before it
                pause = max(pause, float((before or segments).reaction.pauses[index]))
            before = segments
            index, fresh, here = index + 1, True, index
            if self.now < stop and size == 0:
                begin = math.ceil(stop / segments.grid - SNAP) * segments.grid if segments.grid else stop
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
                    samples, seconds = self._next(segments, here)
                    within = until - self.now if end == FINISH else until - self.now - seconds
                    if within <= SNAP * seconds if end == FINISH else within < -SNAP * seconds:
                        break
                    self.steps.append((samples, self.now, seconds))
                    self.now += seconds
                    if self._reference() >= self._needed:
                        break
                    if every and len(self.steps) - kept == every:
                        if self.now + write > until + SNAP * float(segments.steps.seconds[here]):
                            saving = end == FINISH
                            break
                        self.now, self.checkpoint = self.now + write, self.checkpoint + write
                        kept = len(self.steps)
                    if self._segments() is not segments and self.now < stop - SNAP * float(
                        segments.steps.seconds[here]
                    ):
                        index, fresh = here, False  # the rest of this segment has other steps
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

    def _segments(self) -> Segments:
        if isinstance(self.segments, Segments):
            return self.segments
        return self.segments(len(self.steps), sum(samples for samples, _, _ in self.steps))

    def _next(self, segments: Segments, index: int) -> tuple[int, float]:
        steps = segments.steps
        size, whole, empty = int(steps.samples[index]), float(steps.seconds[index]), float(steps.empty_seconds[index])
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


def steps_of(workers: Ints, samples: Ints, seconds: Floats, fixed: float) -> SegmentSteps:
    """Steps that take these seconds, of which the fraction `fixed` does not depend on the samples."""
    none = np.zeros(len(workers))
    whole, empty = (StepBreakdown(compute=time, network=none, waiting=none) for time in (seconds, seconds * fixed))
    return SegmentSteps(workers=workers, samples=samples, whole=whole, empty=empty)


def segments_of(
    fleet: list[tuple[float, int]], recovery: Recovery, *, batch: int, step: float, more: float, fixed: float,
    grid: bool = False,
) -> Segments:  # fmt: skip
    """The segments of a fleet, which is a list of (seconds, workers)."""
    lengths, workers = np.array([s[0] for s in fleet]), np.array([s[1] for s in fleet], np.int64)
    # Where there are no workers `SegmentSteps.seconds` is 1.
    steps = steps_of(workers, workers * batch, np.where(workers > 0, step + more * workers, 1.0), fixed)
    return Segments(
        stops=np.cumsum(lengths),
        steps=steps,
        reaction=recovery.react(workers, steps.seconds),
        grid=step if grid else 0.0,
    )


recoveries = st.one_of(
    st.sampled_from([Ideal("finish"), Ideal("lose")]),
    st.builds(
        StepRecovery,
        detect=st.sampled_from([0.0, 0.7, 4.0]),
        restart=st.sampled_from([0.0, 1.3]),
        join=st.sampled_from([0.0, 2.1]),
        notice=st.sampled_from([0.0, 1.1, 30.0]),
    ),
    st.builds(
        CheckpointRecovery,
        every=st.sampled_from([0.1, 3.0, 11.0]),
        write=st.sampled_from([0.0, 0.9]),
        detect=st.sampled_from([0.0, 0.7]),
        restart=st.sampled_from([0.0, 2.3]),
        notice=st.sampled_from([0.0, 30.0]),
    ),
)
fleets = st.lists(
    st.tuples(st.floats(0.05, 30.0).map(lambda x: round(x, 3)), st.integers(0, 4)), min_size=1, max_size=12
)
works = st.builds(
    TrainingWork,
    epoch=st.integers(1, 97),
    needed=st.integers(1, 400).map(float),
    cut=st.booleans(),
    noise_scale=st.sampled_from([math.inf, 7.0]),
    ref_batch=st.integers(1, 6),
)


def assert_same(found: SimulatedSteps, naive: NaiveSimulator) -> None:
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
        # A checkpoint may be written among equal steps, so only the first of them is known to begin at its start.
        np.testing.assert_allclose(runs.starts, starts, atol=1e-6)
