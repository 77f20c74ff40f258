"""Through a trace, stretch by stretch: how many steps each gives, and where the rest of the time goes.

The time is not cut into steps: in a stretch of constant fleet all steps are equal, so the walk goes from event to event
(a change of the fleet, the end of an epoch) and counts the steps between them. On a long trace it leaps over all that
lies between the ends of two epochs (`leap.py`). `tests/simulate` has the same rules written step by step, and compares.
"""

from __future__ import annotations

import numpy as np

from ebbflow.simulate.leap import SECONDS, Overshoots, Table, always_finished, leap_table
from ebbflow.simulate.legs import Legs, Walk, Work
from ebbflow.simulate.walker import ENDLESS, Walker

__all__ = ["walk"]

_LEAP_FROM = 1000
"""Stretches from which on a table of leaps is worth its time."""
_LEAP_OVER = 20
"""Stretches that an epoch must have on average for a table of its own."""


def walk(legs: Legs, work: Work, *, leap_from: int = _LEAP_FROM, leap_over: float = _LEAP_OVER) -> Walk:
    """Follow the stretches until the work is done or they end."""
    walker = Walker(legs, work)
    if len(legs.stops) < leap_from:
        return walker.walk()
    table = leap_table(legs, cut=work.cut)
    if table is not None:
        return _leap(walker, table)
    return _leap_by_epochs(walker, leap_over) if always_finished(legs) else walker.walk()


class _Leaps:
    """Over whole chains of a table, as long as neither an epoch nor the work ends in them."""

    def __init__(self, walker: Walker, table: Table) -> None:
        part = slice(table.offset, table.offset + len(table.counts))
        sizes = walker.legs.samples[part]
        self.walker, self.table = walker, table
        self.samples = np.append(0, np.cumsum(table.counts * sizes))
        self.worth = np.append(0.0, np.cumsum(table.counts * walker.work.worths(sizes)))
        self.chain_samples, self.chain_worth = self.samples[table.chains], self.worth[table.chains]
        self.spare = int(sizes.max()) + table.most_lost + 2
        """After a leap a whole step still fits into the epoch: a smaller one might have fitted into the time, too."""

    def leap(self, chain: int) -> int:
        """From the beginning of a chain as far as it goes; the chain that is next, which may be the same."""
        walker, table = self.walker, self.table
        by_epoch = self.chain_samples[chain] + min(walker.left, ENDLESS // 2) - self.spare
        by_work = self.chain_worth[chain] + walker.needed - walker.reference - table.most_lost
        beyond = min(
            np.searchsorted(self.chain_samples, by_epoch, side="right"),
            np.searchsorted(self.chain_worth, by_work, side="left"),
        )
        to = int(beyond) - 1
        if to <= chain:
            return chain
        first, stop, found = int(table.chains[chain]), int(table.chains[to]), walker.found
        found.close()
        found.blocks.append(table.runs(first, stop, walker.legs))
        walker.left -= int(self.samples[stop] - self.samples[first])
        walker.reference += float(self.worth[stop] - self.worth[first])
        walker.now = float(table.after[stop - 1])
        for name in SECONDS:
            setattr(found, name, getattr(found, name) + float(getattr(table, name)[first:stop].sum()))
        return to


def _leap(walker: Walker, table: Table) -> Walk:
    """Leap over chains; walk through those in which an epoch ends."""
    leaps, chain, chains = _Leaps(walker, table), 0, table.chains.tolist()
    while chain < len(chains) - 1 and not walker.found.done:
        chain = leaps.leap(chain)
        if chain < len(chains) - 1:
            walker.walk(chains[chain], chains[chain + 1])
            chain += 1
    return walker.close()


def _leap_by_epochs(walker: Walker, leap_over: float) -> Walk:
    """The end of an epoch moves the clock: a table from there about to where the next epoch ends, and so on."""
    legs, overshoots = walker.legs, Overshoots(walker.legs)
    fits = np.divide(overshoots.lengths, legs.seconds, out=np.zeros(len(legs.stops)), where=legs.samples > 0)
    likely = np.append(0.0, np.cumsum(fits * legs.samples))
    leg, last = 0, len(legs.stops)
    if likely[-1] * leap_over > last * walker.left:
        return walker.walk()
    while leg < last and not walker.found.done:
        stop = min(int(np.searchsorted(likely, likely[leg] + walker.left)) + 1, last)
        leg += _Leaps(walker, overshoots.table(leg, stop, walker.now)).leap(0)
        if leg < last:
            walker.walk(leg, leg + 1)
            leg += 1
    return walker.close()
