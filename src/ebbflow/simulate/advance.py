"""The clock of a simulation: it advances from segment to segment in a plain loop, also when the batch grows.

Within a segment of constant fleet all steps are equal, so they are counted, not made one by one. `skip.py` skips most
segments of a long trace; the segments in which an epoch ends, and all segments of a short trace, are simulated here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ebbflow.plan.batch_plan import cut_step
from ebbflow.plan.policies import GrowingPolicy, Observation
from ebbflow.simulate.recovery import DRAIN, FINISH, LOSE
from ebbflow.simulate.scenario import TrainingWork
from ebbflow.simulate.segments import SNAP, Segments, SimulatedSteps

__all__ = ["ENDLESS", "GrowthPhase", "GrowthPhases", "Simulator", "simulate_growing", "steps_that_fit"]

ENDLESS = 2**62
"""More samples, or steps, than there can be."""
_SMALLEST_WINDOW, _LARGEST_WINDOW = 16, 4096
"""Segments of a growing batch that are made at once: a phase may end long before the trace does."""


class Simulator:
    """The time, and what has been done so far."""

    def __init__(self, segments: Segments, work: TrainingWork) -> None:
        self.segments, self.work = segments, work
        self.result = SimulatedSteps()
        self.now = 0.0
        self.pause_left = 0.0
        """Seconds that are left of a pause."""
        self.epoch_left = work.epoch if work.cut else ENDLESS
        """Samples that this epoch has left."""
        self.reference = 0.0
        """Reference samples so far."""
        self.needed = work.needed - min(0.5, 1e-9 * work.needed)
        """Reference samples after which training ends; a little less, since sums of efficiencies are not exact."""
        self.unsaved = 0
        """Steps since the latest checkpoint."""
        self.saving = False
        """A checkpoint has to be written before anything else."""
        self.steps = self.samples = 0
        """Steps that count, and their samples."""
        self.growing = False
        """The batch grows: the segments hold only until `until_steps` or `until_samples`."""
        self.until_steps = self.until_samples = ENDLESS
        self.went_back = False
        """A loss has discarded steps since the present segments were entered."""
        self.resume: tuple[int, bool] | None = None
        """Set when `advance` returned because the batch may change: the index of the segment with which to go on, and
        whether it has been begun already."""

    def enter(self, segments: Segments, *, until_steps: int, until_samples: int) -> None:
        """Go on with other segments, which hold only until this many steps or samples are done."""
        self.segments, self.until_steps, self.until_samples = segments, until_steps, until_samples
        self.growing, self.went_back = True, False

    def advance(
        self, first: int = 0, stop_segment: int | None = None, *, begun: bool = False, numbered_from: int = 0
    ) -> SimulatedSteps:
        """Simulate the segments from `first` up to but not including `stop_segment`.

        Returns early when the work is done, or when the batch may change. `begun` says that the call before began the
        first segment. `numbered_from` is added to the indices of segments in the result.
        """
        segments, work, result = self.segments, self.work, self.result
        steps, reaction = segments.steps, segments.reaction
        write, grid, needed = reaction.write, segments.grid, self.needed
        ceil, floor, growing = math.ceil, math.floor, self.growing
        within = slice(first, stop_segment)
        self.resume = None
        worths = work.worths(steps.samples[within])
        columns = (segments.stops, steps.samples, steps.seconds, steps.empty_seconds, reaction.ends, reaction.pauses,
                   reaction.every, reaction.saves)  # fmt: skip
        rows = zip(worths.tolist(), *(column[within].tolist() for column in columns), strict=True)
        for index, (worth, stop, size, step, empty, end, pause, every, saves) in enumerate(rows, start=first):
            now = self.now
            if self.reference >= needed and now <= stop:
                break
            if not begun:
                self.pause_left = max(self.pause_left, pause)
            begun = False
            if growing and self._phase_ended():  # the segments that the change ended have its cost already
                self.resume = (index, True)
                break
            if now >= stop:  # a step from before is still in progress
                if end == LOSE:
                    self._lose(stop, every)
                self.saving |= saves and self.unsaved > 0
                continue
            if not size:
                self.now = ceil(stop / grid - SNAP) * grid if grid else stop
                result.waiting += self.now - now
                self.pause_left = 0.0
                continue
            if self.saving or 0 < every <= self.unsaved:
                if now + write > stop and end == LOSE:
                    self._lose(stop, every)
                    continue
                self._save(write)
                now = self.now
                if now >= stop:
                    if end == LOSE:
                        self._lose(stop, every)
                    continue
            if self.pause_left:
                paused = min(self.pause_left, stop - now)
                result.restart += paused
                now += paused
                self.pause_left -= paused
            if not every:
                fit = ceil((stop - now) / step - SNAP) if end == FINISH else floor((stop - now) / step + SNAP)
                after = self.epoch_left - fit * size
                if (
                    after >= size + 2  # in most segments no epoch ends
                    and self.reference + fit * worth < needed
                    and (not growing or self._steps_of_phase(size) > fit)
                ):
                    if fit > 0:
                        result.rows.append((index + numbered_from, fit, size, now, step))
                        now += fit * step
                        self.epoch_left, self.reference = after, self.reference + fit * worth
                        self.steps, self.samples = self.steps + fit, self.samples + fit * size
                    if end == LOSE:
                        result.lost += stop - now
                        now, self.pause_left = stop, 0.0
                    self.now = now
                    continue
            until = stop - write if end == DRAIN and saves else stop
            while True:
                count = self.epoch_left // size  # the next steps are whole, or one step that the epoch's end cuts
                if count and self.epoch_left - count * size == 1 and size > 1:  # see `cut_step`
                    count -= 1
                if count:
                    part, seconds, value = size, step, worth
                else:
                    count, part = 1, cut_step(size, self.epoch_left)
                    seconds, value = empty + (step - empty) * part / size, work.worth(part)
                if every:
                    fit = steps_that_fit(until - now, seconds, self.unsaved, every, write, finish=end == FINISH)
                else:
                    room = (until - now) / seconds
                    fit = ceil(room - SNAP) if end == FINISH else floor(room + SNAP)
                count = min(count, fit, ceil((needed - self.reference) / value))
                if growing:
                    count = min(count, self._steps_of_phase(part))
                if count <= 0:
                    break
                result.rows.append((index + numbered_from, count, part, now, seconds))
                now += count * seconds
                self.reference += count * value
                self.steps, self.samples = self.steps + count, self.samples + count * part
                self.epoch_left = self.epoch_left - count * part or work.epoch
                done = self.reference >= needed
                if every:
                    writes, self.unsaved = divmod(self.unsaved + count, every)
                    late = writes and not self.unsaved and now + writes * write > until + SNAP * step
                    if writes and not self.unsaved and (done or late):  # the last one is not needed, or has no time
                        writes -= 1
                        self.unsaved, self.saving = every, end == FINISH
                    now += writes * write
                    result.checkpoint += writes * write
                    if late:
                        break
                if done:
                    break
                if growing and self._phase_ended() and now < stop - SNAP * step:
                    self.now, self.resume = now, (index, True)
                    return self.finish()
            self.now = now
            if self.reference >= needed:
                continue  # done, unless the last step is still in progress and one of the next changes is a loss
            if end == LOSE:
                self._lose(stop, every)
            elif saves and self.unsaved:
                self.saving = True
                if end == DRAIN:
                    self._save(write)
        return self.finish()

    def finish(self) -> SimulatedSteps:
        """The result so far."""
        self.result.done = self.reference >= self.needed
        self.result.time, self.result.reference = self.now, self.reference
        return self.result

    def _steps_of_phase(self, size: int) -> int:
        """The number of steps of this size after which the batch may change."""
        return min(self.until_steps - self.steps, -((self.samples - self.until_samples) // size))

    def _phase_ended(self) -> bool:
        """Whether the next step may have another batch than the present segments."""
        return self.went_back or self.steps >= self.until_steps or self.samples >= self.until_samples

    def _save(self, write: float) -> None:
        self.now += write
        self.result.checkpoint += write
        self.unsaved, self.saving = 0, False

    def _lose(self, stop: float, every: int) -> None:
        """A loss at `stop`. Discards the step in progress, if it began earlier, and all steps since the checkpoint."""
        result, steps = self.result, self.unsaved
        if not every and result.rows and self.now > stop + SNAP * result.rows[-1][4]:
            steps = 1
        if steps:
            undone = result.undo(steps)
            self.reference -= sum(count * self.work.worth(size) for count, size in undone)
            self.epoch_left += sum(count * size for count, size in undone)
            self.steps -= steps
            self.samples -= sum(count * size for count, size in undone)
            self.went_back = self.growing
            if self.work.cut:
                self.epoch_left = (self.epoch_left - 1) % self.work.epoch + 1
        result.lost += stop - self.now
        self.now, self.pause_left, self.unsaved, self.saving = stop, 0.0, 0, False


def steps_that_fit(room: float, step: float, unsaved: int, every: int, write: float, *, finish: bool) -> int:
    """Steps that end (with `finish`: begin) within `room` seconds, with one checkpoint written after each `every`.

    >>> steps_that_fit(10.0, 1.0, 0, 3, 2.0, finish=False)  # three, a write, three, a write
    6
    >>> steps_that_fit(10.0, 1.0, 2, 3, 2.0, finish=False)  # one, a write, three, a write, two
    6
    """
    cycle = every * step + write
    room += unsaved * step  # as if the steps since the latest checkpoint were still to be made
    cycles = math.floor(room / cycle + SNAP)
    rest = (room - cycles * cycle) / step
    return cycles * every + min(every, math.ceil(rest - SNAP) if finish else math.floor(rest + SNAP)) - unsaved


# -- a batch that grows ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GrowthPhase:
    """A part of the training in which a growing policy requests the same batch."""

    requested: int
    until_steps: int
    """The phase ends with this number of steps at the latest."""
    until_samples: int
    """The phase ends with this number of samples at the latest."""


@dataclass(frozen=True, kw_only=True)
class GrowthPhases:
    """The requested batches of a passive policy, whose batch depends only on the steps or the samples so far."""

    policy: GrowingPolicy
    ref_batch: int
    epoch_samples: int
    most: int
    """The largest batch that the workers can ever do; larger requests count as this one."""

    def requested(self, steps: int, samples: int) -> int:
        """The requested batch after this many steps and samples."""
        seen = Observation(step=steps, samples=samples, epoch_samples=self.epoch_samples, ref_batch=self.ref_batch)
        requested, _ = self.policy.ask(seen, self.policy.init())
        return min(requested, self.most, self.policy.max_batch or requested)

    def at(self, steps: int, samples: int) -> GrowthPhase:
        """The phase at a position. The requested batch grows with the steps or with the samples, and never falls."""
        requested = self.requested(steps, samples)
        return GrowthPhase(
            requested=requested,
            until_steps=_first(lambda later: self.requested(later, samples) > requested, steps),
            until_samples=_first(lambda later: self.requested(steps, later) > requested, samples),
        )


def _first(holds: Callable[[int], bool], position: int) -> int:
    """The first whole number above `position` for which `holds` is true, as it is for all later ones; or ENDLESS.

    >>> _first(lambda x: x >= 1234, 100)
    1234
    """
    if not holds(ENDLESS):
        return ENDLESS
    step = 1
    while not holds(position + step):
        step *= 2
    low, high = position + step // 2, position + step  # false, or the position itself; true
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def simulate_growing(
    phases: GrowthPhases, segments_for: Callable[[int, int, int], Segments], count: int, work: TrainingWork
) -> tuple[SimulatedSteps, list[tuple[Segments, int]]]:
    """Simulate `count` segments, phase by phase; `segments_for(requested, first, stop)` makes some of them.

    Where a phase ends within a segment, the rest of that segment is simulated with the larger steps. Where a loss
    discards steps from before the beginning of a phase, the phase before it comes again, as in training.

    Also returns the parts that were made, and how many segments of each were used: the result numbers the segments in
    this order.
    """
    used: list[tuple[Segments, int]] = []
    simulator, begin, begun, made, window = None, 0, False, 0, _SMALLEST_WINDOW
    while True:
        phase = phases.at(0, 0) if simulator is None else phases.at(simulator.steps, simulator.samples)
        stop = min(begin + window, count)
        part = segments_for(phase.requested, begin, stop)
        simulator = simulator or Simulator(part, work)
        simulator.enter(part, until_steps=phase.until_steps, until_samples=phase.until_samples)
        simulator.advance(begun=begun, numbered_from=made)
        over = simulator.resume is None and (
            stop == count or (simulator.result.done and simulator.now <= part.stops[-1])
        )
        passed, begun = simulator.resume or (stop - begin, False)
        kept = min(passed + 1, stop - begin)
        used.append((part, kept))
        made += kept
        if over:
            return simulator.finish(), used
        window = _SMALLEST_WINDOW if simulator.resume else min(2 * window, _LARGEST_WINDOW)
        begin += passed
