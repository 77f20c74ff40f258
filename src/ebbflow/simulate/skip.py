"""Skipping segments: what each segment gives as long as no epoch ends, computed for all segments at once.

When a step begins depends on the steps before it only until a change discards the step in progress; then the next
segment starts at the time of the change. Between two such changes lies a *chain* of segments. The first segments of all
chains are computed together, then all second ones, and so on: as many rounds as the longest chain has segments.

With steps on a grid, or when the duration of a step never depends on its samples and nothing is lost, the ends of
epochs do not move the clock, and every segment is a chain of its own. When every step is finished and the last step of
an epoch is shorter, each epoch has a table of its own (`_Overshoots`).

`tests/simulate` has the same rules written step by step, and compares.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ebbflow.simulate.advance import ENDLESS, Simulator
from ebbflow.simulate.recovery import FINISH, LOSE
from ebbflow.simulate.scenario import TrainingWork
from ebbflow.simulate.segments import SNAP, Segments, SimulatedRuns, SimulatedSteps

__all__ = ["simulate_segments"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
_TIMES = ("waiting", "lost", "restart", "checkpoint")
"""The seconds of a segment that are not spent on its steps."""
_SKIP_FROM = 1000
"""Number of segments from which on a table is worth the time that it takes."""
_SEGMENTS_PER_EPOCH = 20
"""Mean number of segments that an epoch must have for a table of its own."""
_LONGEST_CHAIN = 200
_NO_TIME = 2.0**-60
"""Seconds; a power of two far below what matters."""


def simulate_segments(
    segments: Segments, work: TrainingWork, *, skip_from: int = _SKIP_FROM,
    segments_per_epoch: float = _SEGMENTS_PER_EPOCH,
) -> SimulatedSteps:  # fmt: skip
    """Go through the segments until the work is done or they end.

    Tables are used for `skip_from` segments or more, and tables per epoch if epochs have this many segments on average.
    """
    simulator = Simulator(segments, work)
    if len(segments.stops) < skip_from:
        return simulator.advance()
    table = _skip_table(segments, cut=work.cut)
    if table is not None:
        return _skip_chains(simulator, table)
    return _skip_by_epochs(simulator, segments_per_epoch) if _always_finished(segments) else simulator.advance()


def _skip_chains(simulator: Simulator, table: _SkipTable) -> SimulatedSteps:
    """Skip all chains but those in which an epoch ends, which are simulated."""
    skips, chain, chains = _Skips(simulator, table), 0, table.chains.tolist()
    while chain < len(chains) - 1 and not simulator.result.done:
        chain = skips.skip(chain)
        if chain < len(chains) - 1:
            simulator.advance(chains[chain], chains[chain + 1])
            chain += 1
    return simulator.finish()


def _skip_by_epochs(simulator: Simulator, segments_per_epoch: float) -> SimulatedSteps:
    """The end of an epoch moves the clock: make a table from there to about the end of the next epoch, and so on."""
    segments, steps, overshoots = simulator.segments, simulator.segments.steps, _Overshoots(simulator.segments)
    fits = np.divide(overshoots.lengths, steps.seconds, out=np.zeros(len(segments.stops)), where=steps.samples > 0)
    likely = np.append(0.0, np.cumsum(fits * steps.samples))
    segment, last = 0, len(segments.stops)
    if likely[-1] * segments_per_epoch > last * simulator.epoch_left:
        return simulator.advance()
    while segment < last and not simulator.result.done:
        stop = min(int(np.searchsorted(likely, likely[segment] + simulator.epoch_left)) + 1, last)
        segment += _Skips(simulator, overshoots.table(segment, stop, simulator.now)).skip(0)
        if segment < last:
            simulator.advance(segment, segment + 1)
            segment += 1
    return simulator.finish()


class _Skips:
    """Skips whole chains of a table, as long as neither an epoch nor the work ends in them."""

    def __init__(self, simulator: Simulator, table: _SkipTable) -> None:
        within = slice(table.offset, table.offset + len(table.counts))
        sizes = simulator.segments.steps.samples[within]
        self.simulator, self.table = simulator, table
        self.samples = np.append(0, np.cumsum(table.counts * sizes))
        self.worth = np.append(0.0, np.cumsum(table.counts * simulator.work.worths(sizes)))
        self.chain_samples, self.chain_worth = self.samples[table.chains], self.worth[table.chains]
        self.spare = int(sizes.max()) + table.most_lost + 2
        """After a skip a whole step still fits into the epoch; a smaller one might have fitted into the time, too."""

    def skip(self, chain: int) -> int:
        """Skip from the beginning of a chain as far as possible; returns the next chain, which may be the same."""
        simulator, table = self.simulator, self.table
        by_epoch = self.chain_samples[chain] + min(simulator.epoch_left, ENDLESS // 2) - self.spare
        by_work = self.chain_worth[chain] + simulator.needed - simulator.reference - table.most_lost
        beyond = min(
            np.searchsorted(self.chain_samples, by_epoch, side="right"),
            np.searchsorted(self.chain_worth, by_work, side="left"),
        )
        to = int(beyond) - 1
        if to <= chain:
            return chain
        first, stop, result = int(table.chains[chain]), int(table.chains[to]), simulator.result
        result.append(table.runs(first, stop, simulator.segments))
        simulator.epoch_left -= int(self.samples[stop] - self.samples[first])
        simulator.reference += float(self.worth[stop] - self.worth[first])
        simulator.now = float(table.after[stop - 1])
        for name in _TIMES:
            setattr(result, name, getattr(result, name) + float(getattr(table, name)[first:stop].sum()))
        return to


# -- tables ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _SkipTable:
    """What segments give as long as no epoch ends, with one entry per segment."""

    counts: Ints
    """Steps that begin in each segment and count."""
    begins: Floats
    """When the first step of each segment begins."""
    after: Floats
    """The time at the end of each segment: when the step in progress ends, or the change."""
    waiting: Floats
    lost: Floats
    restart: Floats
    checkpoint: Floats
    chains: Ints
    """The first segment of each chain, and the number of segments."""
    most_lost: int = 0
    """The most samples that one loss discarded: an epoch or the work might have ended among them."""
    offset: int = 0
    """The index of the segment that the first entry describes."""

    @classmethod
    def without_chains(
        cls, counts: Ints, begins: Floats, after: Floats, waiting: Floats, offset: int = 0
    ) -> _SkipTable:
        """A table in which nothing is lost and every segment is a chain of its own."""
        none = np.zeros(len(counts))
        return cls(
            counts=counts, begins=begins, after=after, waiting=waiting, lost=none, restart=none, checkpoint=none,
            chains=np.arange(len(counts) + 1), offset=offset,
        )  # fmt: skip

    def runs(self, first: int, stop: int, segments: Segments) -> SimulatedRuns:
        """The steps of the entries from `first` up to but not including `stop`."""
        entries = first + np.flatnonzero(self.counts[first:stop])
        index = entries + self.offset
        return SimulatedRuns(
            segments=index,
            counts=self.counts[entries],
            sizes=segments.steps.samples[index],
            starts=self.begins[entries],
            seconds=segments.steps.seconds[index],
        )


def _always_finished(segments: Segments) -> bool:
    """Whether changes cost nothing but the wait for the step in progress."""
    reaction = segments.reaction
    finished = bool((reaction.ends == FINISH).all())
    return finished and not (reaction.pauses.any() or reaction.every.any() or segments.grid)


def _skip_table(segments: Segments, *, cut: bool) -> _SkipTable | None:
    """The table of all segments, or None if there is none for the whole trace.

    That is the case if the ends of epochs (`cut`) move the clock, if chains do not end, or if some steps are never held
    by a checkpoint.
    """
    reaction = segments.reaction
    if reaction.every.any():
        held = (reaction.ends == LOSE) | reaction.saves
        return _table_by_chains(segments, _CheckpointRounds) if held[:-1].all() else None
    if segments.grid:
        return _table_on_grid(segments)
    if _always_finished(segments):
        independent = not cut or np.array_equal(segments.steps.empty_seconds, segments.steps.seconds)
        return _Overshoots(segments).table() if independent else None
    return _table_by_chains(segments, _StepRounds)


def _table_on_grid(segments: Segments) -> _SkipTable:
    """Steps at multiples of the step time; a position without workers gives no step."""
    edges = np.ceil(np.append(0.0, segments.stops) / segments.grid - SNAP)
    begins, after, someone = edges[:-1] * segments.grid, edges[1:] * segments.grid, segments.steps.samples > 0
    counts = np.where(someone, np.diff(edges), 0).astype(np.int64)
    return _SkipTable.without_chains(counts, begins, after, np.where(someone, 0.0, after - begins))


def _starts(segments: Segments) -> Floats:
    return np.append(0.0, segments.stops[:-1])


class _Overshoots:
    """Steps that are all finished: how late, after the end of its segment, the last step of each segment ends.

    That is one modulo operation per segment: a segment of length L that is entered r late ends (r - L) mod step late.
    The moduli differ, so there is no closed form; but the loop does nothing else, and the steps are counted for all
    segments at once.
    """

    def __init__(self, segments: Segments) -> None:
        self.segments, self.starts, self.someone = segments, _starts(segments), segments.steps.samples > 0
        self.lengths = segments.stops - self.starts
        # A step that ends up to SNAP early ends at the change, so delays lie between -snap and step - snap. The loop
        # counts from -snap on. A segment without workers has steps so short that waiting is never late.
        self.steps = np.where(self.someone, segments.steps.seconds, _NO_TIME)
        self.snaps = np.append(0.0, SNAP * self.steps)
        self.drops = self.lengths - np.diff(self.snaps)

    def table(self, first: int = 0, stop: int | None = None, now: float = 0.0) -> _SkipTable:
        """The segments from `first`, which is entered at `now`, up to but not including `stop`."""
        stop = len(self.starts) if stop is None else stop
        within, edges = slice(first, stop), slice(first, stop + 1)
        x = 0.0
        late = now - float(self.starts[first]) + float(self.snaps[first])
        rows = zip(self.drops[within].tolist(), self.steps[within].tolist(), strict=True)
        lates = [late, *[late := (x % step if (x := late - drop) < step else x) for drop, step in rows]]
        over = np.array(lates) - self.snaps[edges]
        lengths, someone = self.lengths[within], self.someone[within]
        room = np.maximum(lengths - over[:-1], 0.0)  # none while a step from before is still in progress
        steps = np.rint((lengths - over[:-1] + over[1:]) / self.steps[within])
        return _SkipTable.without_chains(
            np.where(someone & (room > 0), steps, 0).astype(np.int64), self.starts[within] + over[:-1],
            self.segments.stops[within] + over[1:], np.where(someone, 0.0, room), first,
        )  # fmt: skip


class _StepRounds:
    """Computes all segments of one position in their chains at a time; of the steps, a loss costs only the last."""

    def __init__(self, segments: Segments) -> None:
        size = len(segments.stops)
        self.segments, self.starts = segments, _starts(segments)
        self.counts, self.begins, self.after = np.zeros(size, np.int64), np.zeros(size), np.zeros(size)
        self.waiting, self.lost, self.restart = np.zeros(size), np.zeros(size), np.zeros(size)
        self.checkpoint, self.pause_left = np.zeros(size), np.zeros(size)
        self.latest = np.full(size, -1)
        """The segment in which the latest step began."""
        self.most_lost = 0

    def compute(self, index: Ints, *, fresh: bool) -> None:
        """The segments with these indices; `fresh`: they begin with a change that discarded all before it."""
        steps, reaction = self.segments.steps, self.segments.reaction
        now = self.starts[index] if fresh else self.after[index - 1]
        pause = reaction.pauses[index] if fresh else np.maximum(self.pause_left[index - 1], reaction.pauses[index])
        before = self.latest[index] if fresh else self.latest[index - 1]
        stop, step, lose = self.segments.stops[index], steps.seconds[index], reaction.ends[index] == LOSE
        over = now >= stop
        vacant = ~over & (steps.samples[index] == 0)
        active = ~over & ~vacant
        self.waiting[index] = np.where(vacant, stop - now, 0.0)
        paused = np.where(active, np.minimum(pause, stop - now), 0.0)
        self.restart[index] = paused
        self.pause_left[index] = np.where(vacant, 0.0, pause - paused)
        self.begins[index] = begin = now + paused
        room = (stop - begin) / step
        fit = np.where(reaction.ends[index] == FINISH, np.ceil(room - SNAP), np.floor(room + SNAP))
        self.counts[index] = fit = np.where(active, np.maximum(fit, 0), 0).astype(np.int64)
        self.latest[index] = np.where(fit > 0, index, before)
        end = np.where(vacant, stop, begin + fit * step)
        self.lost[index] = np.where(lose & active, stop - end, 0.0)
        hit = np.flatnonzero(over & lose)
        if len(hit):  # the step in progress since an earlier segment is lost, too
            hit = hit[now[hit] > stop[hit] + SNAP * steps.seconds[before[hit]]]
            self.counts[before[hit]] -= 1
            self.lost[index[hit]] = steps.seconds[before[hit]] - (now[hit] - stop[hit])
        self.after[index] = np.where(lose, stop, end)


class _CheckpointRounds(_StepRounds):
    """The same with checkpoints: a loss discards all steps since the latest one, a gain writes one first."""

    def __init__(self, segments: Segments) -> None:
        super().__init__(segments)
        self.unsaved = np.zeros(len(segments.stops), np.int64)
        """Steps since the latest checkpoint. They are all of segment `latest`, and a checkpoint is written next."""

    def compute(self, index: Ints, *, fresh: bool) -> None:
        """The segments with these indices."""
        steps, reaction, write = self.segments.steps, self.segments.reaction, self.segments.reaction.write
        none = np.zeros(len(index), np.int64)
        now = self.starts[index] if fresh else self.after[index - 1]
        pause = reaction.pauses[index] if fresh else np.maximum(self.pause_left[index - 1], reaction.pauses[index])
        before = self.latest[index] if fresh else self.latest[index - 1]
        unsaved = none if fresh else self.unsaved[index - 1]
        stop, step, every = self.segments.stops[index], steps.seconds[index], reaction.every[index]
        lose, finish = reaction.ends[index] == LOSE, reaction.ends[index] == FINISH
        over = now >= stop
        vacant = ~over & (steps.samples[index] == 0)
        saving = ~over & ~vacant & (unsaved > 0)
        hit = (over & lose) | (saving & lose & (now + write > stop))  # a loss before the unsaved steps could be saved
        gone = np.flatnonzero(hit & (unsaved > 0))
        self.counts[before[gone]] -= unsaved[gone]
        lost = np.where(hit, stop - now, 0.0)
        lost[gone] += unsaved[gone] * steps.seconds[before[gone]]
        discarded = np.append(unsaved[gone] * steps.samples[before[gone]], 0)
        saved = saving & ~hit
        now = now + np.where(saved, write, 0.0)
        unsaved = np.where(saved, 0, unsaved)
        active = ~over & ~vacant & ~hit & (now < stop)
        self.waiting[index] = np.where(vacant, stop - now, 0.0)
        paused = np.where(active, np.minimum(pause, stop - now), 0.0)
        self.restart[index] = paused
        self.pause_left[index] = np.where(vacant | lose, 0.0, pause - paused)
        self.begins[index] = begin = now + paused
        drained = ~lose & ~finish
        until = stop - np.where(drained, write, 0.0)
        writes, rest = _cycles_that_fit(until - begin, step, every, write, finish)
        none_fits = ~active | (writes < 0)
        writes[none_fits] = rest[none_fits] = 0
        fit = writes * every + rest
        late = (writes > 0) & (rest == 0) & (begin + fit * step + writes * write > until + SNAP * step)
        writes, rest = writes - late, np.where(late, every, rest)
        end = np.where(vacant, stop, begin + fit * step + writes * write)
        kept = np.where(active & lose, fit - rest, fit)
        lost += np.where(active & lose, rest * step + stop - end, 0.0)
        self.most_lost = max(self.most_lost, int(discarded.max()), int(((fit - kept) * steps.samples[index]).max()))
        drained_write = active & drained & (rest > 0)
        self.lost[index] = lost
        self.checkpoint[index] = write * (saved + writes + drained_write)
        self.counts[index] = kept
        self.latest[index] = np.where(fit > 0, index, before)
        self.unsaved[index] = np.where(lose | drained_write, 0, np.where(active, rest, unsaved))
        self.after[index] = np.where(lose, stop, end + np.where(drained_write, write, 0.0))


def _cycles_that_fit(room: Floats, step: Floats, every: Ints, write: float, finish: Bools) -> tuple[Ints, Ints]:
    """(whole cycles of steps and write, steps after them) that fit: `steps_that_fit` for many segments at once.

    Each segment begins with a checkpoint. Where no step fits, the cycles may be negative.
    """
    cycle = every * step + write
    cycles = np.floor(room / cycle + SNAP)
    rest = (room - cycles * cycle) / step
    partial = np.where(finish, np.ceil(rest - SNAP), np.floor(rest + SNAP))
    full, short = partial >= every, partial < 0  # one more cycle without its write; a cycle that is not quite whole
    rest = np.where(full, 0.0, partial + short * every)
    return (cycles + full - short).astype(np.int64), rest.astype(np.int64)


def _table_by_chains(segments: Segments, kind: type[_StepRounds]) -> _SkipTable | None:
    """The table of all chains; None if a chain has too many segments."""
    size = len(segments.stops)
    fresh = np.append(True, segments.reaction.ends[:-1] == LOSE)
    position = np.arange(size) - np.maximum.accumulate(np.where(fresh, np.arange(size), 0))
    count = int(position.max()) + 1
    if count > _LONGEST_CHAIN:
        return None
    position = position.astype(np.int16)  # makes sorting fast
    order = np.argsort(position, kind="stable")
    bounds = np.append(0, np.cumsum(np.bincount(position)))
    rounds = kind(segments)
    for k in range(count):
        rounds.compute(order[bounds[k] : bounds[k + 1]], fresh=k == 0)
    return _SkipTable(
        counts=rounds.counts, begins=rounds.begins, after=rounds.after, waiting=rounds.waiting, lost=rounds.lost,
        restart=rounds.restart, checkpoint=rounds.checkpoint, chains=np.append(np.flatnonzero(fresh), size),
        most_lost=rounds.most_lost,
    )  # fmt: skip
