"""What each stretch gives as long as no epoch ends: for all stretches at once, so that a walk can leap over most.

Where a step begins depends on the steps before it only until a change throws the step under way away; there the clock
is that of the change. Between two such changes lies a *chain* of stretches. The first stretches of all chains are
worked out together, then all second ones, and so on: as many rounds as the longest chain has stretches.

With steps on a grid, or when the duration of a step never depends on its samples and nothing is lost, epochs do not
move the clock, and every stretch is a chain of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ebbflow.plan.timeline import Stretches, steps_finished
from ebbflow.sim.legs import SNAP, Legs, Runs
from ebbflow.sim.recovery import FINISH, LOSE

__all__ = ["SECONDS", "Table", "leap_table"]

SECONDS = ("waiting", "lost", "restart", "checkpoint")
"""What a stretch spends besides its steps."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_LONGEST_CHAIN = 200


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

    def runs(self, first: int, stop: int, legs: Legs) -> Runs:
        """The runs of the stretches from `first` up to but without `stop`."""
        index = first + np.flatnonzero(self.counts[first:stop])
        return Runs(
            legs=index,
            counts=self.counts[index],
            sizes=legs.samples[index],
            starts=self.begins[index],
            seconds=legs.seconds[index],
        )


def leap_table(legs: Legs) -> Table | None:
    """The table, or None where only a walk will do: chains that do not end, steps that a checkpoint never holds."""
    reaction = legs.reaction
    if reaction.every.any():
        held = (reaction.ends == LOSE) | reaction.saves
        return _by_chains(legs, _Saving) if held[:-1].all() else None
    if legs.grid:
        return _on_grid(legs)
    if (reaction.ends == FINISH).all() and not reaction.pauses.any():
        return _finished(legs) if np.array_equal(legs.empty, legs.seconds) else None
    return _by_chains(legs, _Going)


def _starts(legs: Legs) -> Floats:
    return np.append(0.0, legs.stops[:-1])


def _apart(legs: Legs, counts: Ints, begins: Floats, after: Floats) -> Table:
    """A table in which every stretch is a chain; what is no step is waiting."""
    none = np.zeros(len(counts))
    gaps = np.diff(after, prepend=0.0) - counts * legs.seconds
    return Table(
        counts=counts, begins=begins, after=after, waiting=np.where(legs.samples == 0, np.maximum(gaps, 0.0), 0.0),
        lost=none, restart=none, checkpoint=none, chains=np.arange(len(counts) + 1),
    )  # fmt: skip


def _on_grid(legs: Legs) -> Table:
    """Steps on multiples of the step time; a position without workers gives no step."""
    edges = np.ceil(np.append(0.0, legs.stops) / legs.grid - SNAP)
    counts = np.where(legs.samples > 0, np.diff(edges), 0).astype(np.int64)
    return _apart(legs, counts, edges[:-1] * legs.grid, edges[1:] * legs.grid)


def _finished(legs: Legs) -> Table:
    """Each step ends as it began: one loop over the stretches, as a plan does it."""
    begins = _starts(legs)
    stretches = Stretches(
        times=begins, end=float(legs.stops[-1]), workers=np.arange(len(begins)), samples=legs.samples,
        seconds=legs.seconds,
    )  # fmt: skip
    runs = steps_finished(stretches)  # the workers are numbers of stretches here: no two are joined
    counts = np.zeros(len(begins), np.int64)
    counts[runs.workers] = runs.counts
    begins[runs.workers] = runs.start_s
    ends = np.where(legs.samples > 0, np.where(counts > 0, begins + counts * legs.seconds, 0.0), legs.stops)
    return _apart(legs, counts, begins, np.maximum.accumulate(ends))


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
        fit = np.where(live, np.maximum(_fits(until - begin, step, every, write, finish), 0), 0)
        writes, rest = np.divmod(fit, every)
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


def _fits(room: Floats, step: Floats, every: Ints, write: float, finish: npt.NDArray[np.bool_]) -> Ints:
    """`walk.fit_saving` for many stretches, each of which begins with a checkpoint."""
    cycle = every * step + write
    cycles = np.floor(room / cycle + SNAP)
    rest = (room - cycles * cycle) / step
    partial = np.minimum(every, np.where(finish, np.ceil(rest - SNAP), np.floor(rest + SNAP)))
    return (cycles * every + partial).astype(np.int64)


def _by_chains(legs: Legs, kind: type[_Going]) -> Table | None:
    size = len(legs.stops)
    fresh = np.append(True, legs.reaction.ends[:-1] == LOSE)
    position = np.arange(size) - np.maximum.accumulate(np.where(fresh, np.arange(size), 0))
    rounds = int(position.max()) + 1
    if rounds > _LONGEST_CHAIN:
        return None
    order = np.argsort(position, kind="stable")
    bounds = np.searchsorted(position[order], np.arange(rounds + 1))
    found = kind(legs)
    for k in range(rounds):
        found.work_out(order[bounds[k] : bounds[k + 1]], fresh=k == 0)
    return Table(
        counts=found.counts, begins=found.begins, after=found.after, waiting=found.waiting, lost=found.lost,
        restart=found.restart, checkpoint=found.checkpoint, chains=np.append(np.flatnonzero(fresh), size),
        most_lost=found.most_lost,
    )  # fmt: skip
