"""What each stretch gives as long as no epoch ends: for all stretches at once, so that a walk can leap over most.

Where a step begins depends on the steps before it only until a change throws the step under way away; there the clock
is that of the change. Between two such changes lies a *chain* of stretches. The first stretches of all chains are
worked out together, then all second ones, and so on: as many rounds as the longest chain has stretches.

With steps on a grid, or when the duration of a step never depends on its samples and nothing is lost, epochs do not
move the clock, and every stretch is a chain of its own. When every step is finished and an epoch's last step is
shorter, each epoch has a table of its own (`finished`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ebbflow.simulate.legs import SNAP, Legs, Runs
from ebbflow.simulate.recovery import FINISH, LOSE

__all__ = ["SECONDS", "Overshoots", "Table", "always_finished", "leap_table"]

SECONDS = ("waiting", "lost", "restart", "checkpoint")
"""What a stretch spends besides its steps."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
_LONGEST_CHAIN = 200
_NO_TIME = 2.0**-60
"""Seconds; a power of two far below what a clock can tell."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """One entry a stretch."""

    counts: Ints
    begins: Floats
    """When the first step of each stretch begins."""
    after: Floats
    """The clock at the end of each stretch: when the step under way ends, or the change."""
    waiting: Floats
    lost: Floats
    restart: Floats
    checkpoint: Floats
    chains: Ints
    """The first stretch of each chain, and the number of stretches."""
    most_lost: int = 0
    """Samples of the steps that one loss took, at most: an epoch or the work might have ended among them."""
    offset: int = 0
    """The number of the stretch that the first entry is about."""

    def runs(self, first: int, stop: int, legs: Legs) -> Runs:
        """The runs of the entries from `first` up to but without `stop`."""
        entries = first + np.flatnonzero(self.counts[first:stop])
        index = entries + self.offset
        return Runs(
            legs=index,
            counts=self.counts[entries],
            sizes=legs.samples[index],
            starts=self.begins[entries],
            seconds=legs.seconds[index],
        )


def always_finished(legs: Legs) -> bool:
    """Whether no change costs more than the wait for the step under way."""
    reaction = legs.reaction
    return bool((reaction.ends == FINISH).all()) and not (reaction.pauses.any() or reaction.every.any() or legs.grid)


def leap_table(legs: Legs, *, cut: bool = True) -> Table | None:
    """The table, or None where no table holds for the whole trace.

    That is: epochs' ends (`cut`) move the clock, chains do not end, or a checkpoint never holds some steps.
    """
    reaction = legs.reaction
    if reaction.every.any():
        held = (reaction.ends == LOSE) | reaction.saves
        return _by_chains(legs, _Saving) if held[:-1].all() else None
    if legs.grid:
        return _on_grid(legs)
    if always_finished(legs):
        return Overshoots(legs).table() if not cut or np.array_equal(legs.empty, legs.seconds) else None
    return _by_chains(legs, _Going)


def _starts(legs: Legs) -> Floats:
    return np.append(0.0, legs.stops[:-1])


def _apart(counts: Ints, begins: Floats, after: Floats, waiting: Floats, offset: int = 0) -> Table:
    """A table in which every stretch is a chain."""
    none = np.zeros(len(counts))
    return Table(
        counts=counts, begins=begins, after=after, waiting=waiting, lost=none, restart=none, checkpoint=none,
        chains=np.arange(len(counts) + 1), offset=offset,
    )  # fmt: skip


def _on_grid(legs: Legs) -> Table:
    """Steps on multiples of the step time; a position without workers gives no step."""
    edges = np.ceil(np.append(0.0, legs.stops) / legs.grid - SNAP)
    begins, after, someone = edges[:-1] * legs.grid, edges[1:] * legs.grid, legs.samples > 0
    counts = np.where(someone, np.diff(edges), 0).astype(np.int64)
    return _apart(counts, begins, after, np.where(someone, 0.0, after - begins))


class Overshoots:
    """Steps that are all finished: how late, after the end of its stretch, the last step of each ends.

    One modulo a stretch: a stretch of length L that is entered r late ends (r - L) mod step late. The moduli differ, so
    that there is no closed form; but the loop does nothing else, and the steps are counted for all stretches at once.
    """

    def __init__(self, legs: Legs) -> None:
        self.legs, self.starts, self.someone = legs, _starts(legs), legs.samples > 0
        self.lengths = legs.stops - self.starts
        # A step that ends up to a SNAP early ends at the change, so lates lie between -snap and step - snap. The loop
        # counts from -snap on. Nobody there is a step so short that waiting is never late.
        self.steps = np.where(self.someone, legs.seconds, _NO_TIME)
        self.snaps = np.append(0.0, SNAP * self.steps)
        self.drops = self.lengths - np.diff(self.snaps)

    def table(self, first: int = 0, stop: int | None = None, now: float = 0.0) -> Table:
        """Of the stretches from `first` up to but without `stop`, the first of which is entered at `now`."""
        stop = len(self.starts) if stop is None else stop
        part, edges = slice(first, stop), slice(first, stop + 1)
        x = 0.0
        late = now - float(self.starts[first]) + float(self.snaps[first])
        rows = zip(self.drops[part].tolist(), self.steps[part].tolist(), strict=True)
        lates = [late, *[late := (x % step if (x := late - drop) < step else x) for drop, step in rows]]
        over = np.array(lates) - self.snaps[edges]
        lengths, someone = self.lengths[part], self.someone[part]
        room = np.maximum(lengths - over[:-1], 0.0)  # none where a step from before is still under way
        steps = np.rint((lengths - over[:-1] + over[1:]) / self.steps[part])
        return _apart(
            np.where(someone & (room > 0), steps, 0).astype(np.int64), self.starts[part] + over[:-1],
            self.legs.stops[part] + over[1:], np.where(someone, 0.0, room), first,
        )  # fmt: skip


class _Going:
    """All stretches of one position in their chains at a time; survivors go on, no step is repeated but the last."""

    def __init__(self, legs: Legs) -> None:
        size = len(legs.stops)
        self.legs, self.starts = legs, _starts(legs)
        self.counts, self.begins, self.after = np.zeros(size, np.int64), np.zeros(size), np.zeros(size)
        self.waiting, self.lost, self.restart = np.zeros(size), np.zeros(size), np.zeros(size)
        self.checkpoint, self.pending = np.zeros(size), np.zeros(size)
        self.latest = np.full(size, -1)
        """The stretch in which the latest step began."""
        self.most_lost = 0

    def work_out(self, index: Ints, *, fresh: bool) -> None:
        """The stretches with these numbers; `fresh`: they begin with a change that threw all before it away."""
        legs, reaction = self.legs, self.legs.reaction
        now = self.starts[index] if fresh else self.after[index - 1]
        pause = reaction.pauses[index] if fresh else np.maximum(self.pending[index - 1], reaction.pauses[index])
        before = self.latest[index] if fresh else self.latest[index - 1]
        stop, step, lose = legs.stops[index], legs.seconds[index], reaction.ends[index] == LOSE
        over = now >= stop
        vacant = ~over & (legs.samples[index] == 0)
        live = ~over & ~vacant
        self.waiting[index] = np.where(vacant, stop - now, 0.0)
        paused = np.where(live, np.minimum(pause, stop - now), 0.0)
        self.restart[index] = paused
        self.pending[index] = np.where(vacant, 0.0, pause - paused)
        self.begins[index] = begin = now + paused
        room = (stop - begin) / step
        fit = np.where(reaction.ends[index] == FINISH, np.ceil(room - SNAP), np.floor(room + SNAP))
        self.counts[index] = fit = np.where(live, np.maximum(fit, 0), 0).astype(np.int64)
        self.latest[index] = np.where(fit > 0, index, before)
        end = np.where(vacant, stop, begin + fit * step)
        self.lost[index] = np.where(lose & live, stop - end, 0.0)
        hit = np.flatnonzero(over & lose)
        if len(hit):  # the step under way since an earlier stretch is lost, too
            hit = hit[now[hit] > stop[hit] + SNAP * legs.seconds[before[hit]]]
            self.counts[before[hit]] -= 1
            self.lost[index[hit]] = legs.seconds[before[hit]] - (now[hit] - stop[hit])
        self.after[index] = np.where(lose, stop, end)


class _Saving(_Going):
    """The same with checkpoints: a loss takes all steps after the last one, a gain writes one first."""

    def __init__(self, legs: Legs) -> None:
        super().__init__(legs)
        self.since = np.zeros(len(legs.stops), np.int64)
        """Steps after the last checkpoint; they are all of the stretch `latest`, and the next thing is to write one."""

    def work_out(self, index: Ints, *, fresh: bool) -> None:
        """The stretches with these numbers."""
        legs, reaction, write = self.legs, self.legs.reaction, self.legs.reaction.write
        none = np.zeros(len(index), np.int64)
        now = self.starts[index] if fresh else self.after[index - 1]
        pause = reaction.pauses[index] if fresh else np.maximum(self.pending[index - 1], reaction.pauses[index])
        before = self.latest[index] if fresh else self.latest[index - 1]
        since = none if fresh else self.since[index - 1]
        stop, step, every = legs.stops[index], legs.seconds[index], reaction.every[index]
        lose, finish = reaction.ends[index] == LOSE, reaction.ends[index] == FINISH
        over = now >= stop
        vacant = ~over & (legs.samples[index] == 0)
        saving = ~over & ~vacant & (since > 0)
        hit = (over & lose) | (saving & lose & (now + write > stop))  # before the steps since then could be saved
        gone = np.flatnonzero(hit & (since > 0))
        self.counts[before[gone]] -= since[gone]
        lost = np.where(hit, stop - now, 0.0)
        lost[gone] += since[gone] * legs.seconds[before[gone]]
        taken = np.append(since[gone] * legs.samples[before[gone]], 0)
        saved = saving & ~hit
        now = now + np.where(saved, write, 0.0)
        since = np.where(saved, 0, since)
        live = ~over & ~vacant & ~hit & (now < stop)
        self.waiting[index] = np.where(vacant, stop - now, 0.0)
        paused = np.where(live, np.minimum(pause, stop - now), 0.0)
        self.restart[index] = paused
        self.pending[index] = np.where(vacant | lose, 0.0, pause - paused)
        self.begins[index] = begin = now + paused
        drained = ~lose & ~finish
        until = stop - np.where(drained, write, 0.0)
        writes, rest = _fits(until - begin, step, every, write, finish)
        none_fits = ~live | (writes < 0)
        writes[none_fits] = rest[none_fits] = 0
        fit = writes * every + rest
        late = (writes > 0) & (rest == 0) & (begin + fit * step + writes * write > until + SNAP * step)
        writes, rest = writes - late, np.where(late, every, rest)
        end = np.where(vacant, stop, begin + fit * step + writes * write)
        kept = np.where(live & lose, fit - rest, fit)
        lost += np.where(live & lose, rest * step + stop - end, 0.0)
        self.most_lost = max(self.most_lost, int(taken.max()), int(((fit - kept) * legs.samples[index]).max()))
        drained_write = live & drained & (rest > 0)
        self.lost[index] = lost
        self.checkpoint[index] = write * (saved + writes + drained_write)
        self.counts[index] = kept
        self.latest[index] = np.where(fit > 0, index, before)
        self.since[index] = np.where(lose | drained_write, 0, np.where(live, rest, since))
        self.after[index] = np.where(lose, stop, end + np.where(drained_write, write, 0.0))


def _fits(room: Floats, step: Floats, every: Ints, write: float, finish: Bools) -> tuple[Ints, Ints]:
    """`walker.fit_saving` for many stretches, each of which begins with a checkpoint: whole cycles, steps after them.

    Where not a step fits, the cycles may be negative.
    """
    cycle = every * step + write
    cycles = np.floor(room / cycle + SNAP)
    rest = (room - cycles * cycle) / step
    partial = np.where(finish, np.ceil(rest - SNAP), np.floor(rest + SNAP))
    full, short = partial >= every, partial < 0  # all but the write of one more cycle; a cycle that is not quite whole
    rest = np.where(full, 0.0, partial + short * every)
    return (cycles + full - short).astype(np.int64), rest.astype(np.int64)


def _by_chains(legs: Legs, kind: type[_Going]) -> Table | None:
    size = len(legs.stops)
    fresh = np.append(True, legs.reaction.ends[:-1] == LOSE)
    position = np.arange(size) - np.maximum.accumulate(np.where(fresh, np.arange(size), 0))
    rounds = int(position.max()) + 1
    if rounds > _LONGEST_CHAIN:
        return None
    position = position.astype(np.int16)  # so that sorting takes a moment
    order = np.argsort(position, kind="stable")
    bounds = np.append(0, np.cumsum(np.bincount(position)))
    found = kind(legs)
    for k in range(rounds):
        found.work_out(order[bounds[k] : bounds[k + 1]], fresh=k == 0)
    return Table(
        counts=found.counts, begins=found.begins, after=found.after, waiting=found.waiting, lost=found.lost,
        restart=found.restart, checkpoint=found.checkpoint, chains=np.append(np.flatnonzero(fresh), size),
        most_lost=found.most_lost,
    )  # fmt: skip
