"""Through a trace, stretch by stretch: how many steps each gives, and where the rest of the time goes.

The time is not cut into steps: in a stretch of constant fleet all steps are equal, so the walk goes from event to event
(a change of the fleet, the end of an epoch) and counts the steps between them. On a long trace it leaps over all that
lies between the ends of two epochs (`leap.py`). `tests/sim` has the same rules written step by step, and compares.
"""

from __future__ import annotations

import math

import numpy as np

from ebbflow.plan.epochs import cut_step
from ebbflow.sim.leap import SECONDS, Table, leap_table
from ebbflow.sim.legs import SNAP, Legs, Walk, Work
from ebbflow.sim.recovery import DRAIN, FINISH, LOSE

__all__ = ["walk"]

_ENDLESS = 2**62
_LEAP_FROM = 1000
"""Stretches from which on a table of leaps is worth its time."""


def walk(legs: Legs, work: Work, *, leap_from: int = _LEAP_FROM) -> Walk:
    """Follow the stretches until the work is done or they end."""
    table = leap_table(legs) if len(legs.stops) >= leap_from else None
    return _Walker(legs, work).walk() if table is None else _leap(_Walker(legs, work), table)


class _Walker:
    """The clock and what has been done so far."""

    def __init__(self, legs: Legs, work: Work) -> None:
        self.legs, self.work = legs, work
        self.found = Walk()
        self.now = 0.0
        self.pending = 0.0
        """What is left of a pause."""
        self.left = work.epoch if work.cut else _ENDLESS
        """Samples that this epoch has left."""
        self.reference = 0.0
        self.needed = work.needed - min(0.5, 1e-9 * work.needed)
        """Sums of efficiencies are not exact; samples are whole."""
        self.since = 0
        """Steps after the last checkpoint."""
        self.saving = False
        """A checkpoint is to be written before anything else."""

    def walk(self, first: int = 0, stop_leg: int | None = None) -> Walk:
        """From one stretch up to but without another; returns early when the work is done."""
        legs, work, found = self.legs, self.work, self.found
        reaction, write, grid, needed = legs.reaction, legs.reaction.write, legs.grid, self.needed
        ceil, floor = math.ceil, math.floor
        part_of = slice(first, stop_leg)
        worths = work.worths(legs.samples[part_of])
        columns = (legs.stops, legs.samples, legs.seconds, legs.empty, reaction.ends, reaction.pauses,
                   reaction.every, reaction.saves)  # fmt: skip
        rows = zip(worths.tolist(), *(column[part_of].tolist() for column in columns), strict=True)
        for leg, (worth, stop, size, step, empty, end, pause, every, saves) in enumerate(rows, start=first):
            now = self.now
            if self.reference >= needed and now <= stop:
                break
            self.pending = max(self.pending, pause)
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
                if after >= size + 2 and self.reference + fit * worth < needed:  # most stretches: no end of an epoch
                    if fit > 0:
                        found.rows.append((leg, fit, size, now, step))
                        now += fit * step
                        self.left, self.reference = after, self.reference + fit * worth
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
                if count <= 0:
                    break
                found.rows.append((leg, count, part, now, seconds))
                now += count * seconds
                self.reference += count * value
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
            self.now = now
            if self.reference >= needed:
                continue  # done, unless the last step is still under way and one of the next changes is a loss
            if end == LOSE:
                self._hit(stop, every)
            elif saves and self.since:
                self.saving = True
                if end == DRAIN:
                    self._save(write)
        return self._close()

    def _close(self) -> Walk:
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
            if self.work.cut:
                self.left = (self.left - 1) % self.work.epoch + 1
        found.lost += stop - self.now
        self.now, self.pending, self.since, self.saving = stop, 0.0, 0, False


def _leap(walker: _Walker, table: Table) -> Walk:
    """Leap over whole chains while neither an epoch nor the work ends in them; walk through the others."""
    legs, found, chains = walker.legs, walker.found, table.chains
    samples = np.append(0, np.cumsum(table.counts * legs.samples))
    worth = np.append(0.0, np.cumsum(table.counts * walker.work.worths(legs.samples)))
    sums = {name: np.append(0.0, np.cumsum(getattr(table, name))) for name in SECONDS}
    chain_samples, chain_worth = samples[chains], worth[chains]
    chain, last, spare = 0, len(chains) - 1, int(legs.samples.max()) + table.most_lost + 2
    while chain < last:
        # After the leap a whole step still fits into the epoch: a smaller one might have fitted into the time, too.
        by_epoch = chain_samples[chain] + min(walker.left, _ENDLESS // 2) - spare
        by_work = chain_worth[chain] + walker.needed - walker.reference - table.most_lost
        beyond = min(
            np.searchsorted(chain_samples, by_epoch, side="right"), np.searchsorted(chain_worth, by_work, side="left")
        )
        to = int(beyond) - 1
        first, stop = int(chains[chain]), int(chains[max(to, chain)])
        if to > chain:
            found.close()
            found.blocks.append(table.runs(first, stop, legs))
            walker.left -= int(samples[stop] - samples[first])
            walker.reference += float(worth[stop] - worth[first])
            walker.now = float(table.after[stop - 1])
            for name, summed in sums.items():
                setattr(found, name, getattr(found, name) + float(summed[stop] - summed[first]))
            chain = to
        else:
            walker.walk(first, int(chains[chain + 1]))
            chain += 1
            if found.done:
                break
    return walker._close()


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
