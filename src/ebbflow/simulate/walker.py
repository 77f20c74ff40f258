"""One step of the way after another: the clock of a simulation, from stretch to stretch in a plain loop.

In a stretch of constant fleet all steps are equal, so they are counted, not made. `walk.py` leaps over most stretches
of a long trace; what lies around the ends of epochs, and all of a short trace, is walked here.
"""

from __future__ import annotations

import math

from ebbflow.plan.batch_plan import cut_step
from ebbflow.simulate.legs import SNAP, Legs, Walk, Work
from ebbflow.simulate.recovery import DRAIN, FINISH, LOSE

__all__ = ["ENDLESS", "Walker", "fit_saving"]

ENDLESS = 2**62
"""More samples, or steps, than there can be."""


class Walker:
    """The clock and what has been done so far."""

    def __init__(self, legs: Legs, work: Work) -> None:
        self.legs, self.work = legs, work
        self.found = Walk()
        self.now = 0.0
        self.pending = 0.0
        """What is left of a pause."""
        self.left = work.epoch if work.cut else ENDLESS
        """Samples that this epoch has left."""
        self.reference = 0.0
        self.needed = work.needed - min(0.5, 1e-9 * work.needed)
        """Sums of efficiencies are not exact; samples are whole."""
        self.since = 0
        """Steps after the last checkpoint."""
        self.saving = False
        """A checkpoint is to be written before anything else."""
        self.steps = self.samples = 0
        """That counted."""
        self.growing = False
        """The stretches hold only until so many steps or samples: the batch grows (`grow.py`)."""
        self.until_steps = self.until_samples = ENDLESS
        self.took_back = False
        """A loss took steps back since then."""
        self.next: tuple[int, bool] | None = None
        """The stretch to go on with when a walk returned because of that, and whether it was begun already."""

    def enter(self, legs: Legs, *, until_steps: int, until_samples: int) -> None:
        """Go on with other stretches, which hold only until so many steps or samples are done."""
        self.legs, self.until_steps, self.until_samples = legs, until_steps, until_samples
        self.growing, self.took_back = True, False

    def walk(self, first: int = 0, stop_leg: int | None = None, *, begun: bool = False, mark: int = 0) -> Walk:
        """From one stretch up to but without another; returns early when the work is done or `until` is reached.

        `begun`: the first stretch was begun by the walk before. Runs have the numbers of their stretches plus `mark`.
        """
        legs, work, found = self.legs, self.work, self.found
        reaction, write, grid, needed = legs.reaction, legs.reaction.write, legs.grid, self.needed
        ceil, floor, growing = math.ceil, math.floor, self.growing
        part_of = slice(first, stop_leg)
        self.next = None
        worths = work.worths(legs.samples[part_of])
        columns = (legs.stops, legs.samples, legs.seconds, legs.empty, reaction.ends, reaction.pauses,
                   reaction.every, reaction.saves)  # fmt: skip
        rows = zip(worths.tolist(), *(column[part_of].tolist() for column in columns), strict=True)
        for leg, (worth, stop, size, step, empty, end, pause, every, saves) in enumerate(rows, start=first):
            now = self.now
            if self.reference >= needed and now <= stop:
                break
            if not begun:
                self.pending = max(self.pending, pause)
            begun = False
            if growing and self._elsewhere():  # what the change costs has been told by the stretches that it ended
                self.next = (leg, True)
                break
            if now >= stop:  # a step from before is still under way
                if end == LOSE:
                    self._hit(stop, every)
                self.saving |= saves and self.since > 0
                continue
            if not size:
                self.now = ceil(stop / grid - SNAP) * grid if grid else stop
                found.waiting += self.now - now
                self.pending = 0.0
                continue
            if self.saving or 0 < every <= self.since:
                if now + write > stop and end == LOSE:
                    self._hit(stop, every)
                    continue
                self._save(write)
                now = self.now
                if now >= stop:
                    if end == LOSE:
                        self._hit(stop, every)
                    continue
            if self.pending:
                paused = min(self.pending, stop - now)
                found.restart += paused
                now += paused
                self.pending -= paused
            if not every:
                fit = ceil((stop - now) / step - SNAP) if end == FINISH else floor((stop - now) / step + SNAP)
                after = self.left - fit * size
                if (
                    after >= size + 2  # most stretches: no end of an epoch
                    and self.reference + fit * worth < needed
                    and (not growing or self._room(size) > fit)
                ):
                    if fit > 0:
                        found.rows.append((leg + mark, fit, size, now, step))
                        now += fit * step
                        self.left, self.reference = after, self.reference + fit * worth
                        self.steps, self.samples = self.steps + fit, self.samples + fit * size
                    if end == LOSE:
                        found.lost += stop - now
                        now, self.pending = stop, 0.0
                    self.now = now
                    continue
            until = stop - write if end == DRAIN and saves else stop
            while True:
                count = self.left // size  # the next steps are whole, or one that the epoch's end cuts: see `cut_step`
                if count and self.left - count * size == 1 and size > 1:
                    count -= 1
                if count:
                    part, seconds, value = size, step, worth
                else:
                    count, part = 1, cut_step(size, self.left)
                    seconds, value = empty + (step - empty) * part / size, work.worth(part)
                if every:
                    fit = fit_saving(until - now, seconds, self.since, every, write, finish=end == FINISH)
                else:
                    room = (until - now) / seconds
                    fit = ceil(room - SNAP) if end == FINISH else floor(room + SNAP)
                count = min(count, fit, ceil((needed - self.reference) / value))
                if growing:
                    count = min(count, self._room(part))
                if count <= 0:
                    break
                found.rows.append((leg + mark, count, part, now, seconds))
                now += count * seconds
                self.reference += count * value
                self.steps, self.samples = self.steps + count, self.samples + count * part
                self.left = self.left - count * part or work.epoch
                done = self.reference >= needed
                if every:
                    writes, self.since = divmod(self.since + count, every)
                    late = writes and not self.since and now + writes * write > until + SNAP * step
                    if writes and not self.since and (done or late):  # the last is not needed, or has no time
                        writes -= 1
                        self.since, self.saving = every, end == FINISH
                    now += writes * write
                    found.checkpoint += writes * write
                    if late:
                        break
                if done:
                    break
                if growing and self._elsewhere() and now < stop - SNAP * step:
                    self.now, self.next = now, (leg, True)
                    return self.close()
            self.now = now
            if self.reference >= needed:
                continue  # done, unless the last step is still under way and one of the next changes is a loss
            if end == LOSE:
                self._hit(stop, every)
            elif saves and self.since:
                self.saving = True
                if end == DRAIN:
                    self._save(write)
        return self.close()

    def _room(self, size: int) -> int:
        """Steps of a size after which the stretches are others."""
        return min(self.until_steps - self.steps, -((self.samples - self.until_samples) // size))

    def _elsewhere(self) -> bool:
        """Whether the next step is not one of these stretches."""
        return self.took_back or self.steps >= self.until_steps or self.samples >= self.until_samples

    def close(self) -> Walk:
        """What has been found so far."""
        self.found.done = self.reference >= self.needed
        self.found.time, self.found.reference = self.now, self.reference
        return self.found

    def _save(self, write: float) -> None:
        self.now += write
        self.found.checkpoint += write
        self.since, self.saving = 0, False

    def _hit(self, stop: float, every: int) -> None:
        """A loss: the step under way, if it began before this stretch, and all steps after the last checkpoint go."""
        found, steps = self.found, self.since
        if not every and found.rows and self.now > stop + SNAP * found.rows[-1][4]:
            steps = 1
        if steps:
            undone = found.take_back(steps)
            self.reference -= sum(count * self.work.worth(size) for count, size in undone)
            self.left += sum(count * size for count, size in undone)
            self.steps -= steps
            self.samples -= sum(count * size for count, size in undone)
            self.took_back = self.growing
            if self.work.cut:
                self.left = (self.left - 1) % self.work.epoch + 1
        found.lost += stop - self.now
        self.now, self.pending, self.since, self.saving = stop, 0.0, 0, False


def fit_saving(room: float, step: float, since: int, every: int, write: float, *, finish: bool) -> int:
    """Steps that end (or, `finish`, begin) within the room, when a checkpoint is written after each `every` of them.

    >>> fit_saving(10.0, 1.0, 0, 3, 2.0, finish=False)  # three, a write, three, a write
    6
    >>> fit_saving(10.0, 1.0, 2, 3, 2.0, finish=False)  # one, a write, three, a write, two
    6
    """
    cycle = every * step + write
    room += since * step  # as if the steps since the last checkpoint were still to be made
    cycles = math.floor(room / cycle + SNAP)
    rest = (room - cycles * cycle) / step
    return cycles * every + min(every, math.ceil(rest - SNAP) if finish else math.floor(rest + SNAP)) - since
