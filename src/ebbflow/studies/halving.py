"""The decisions of `ebbflow choose`, as pure functions: which candidates go on, what a rung costs, and what fits.

Candidates are compared in *rungs*. All candidates of a rung train for the same number of epochs, each with its complete
schedule compressed into them; the best third goes on to the next rung, which is longer. Scores are oriented so that
more is better. A seed changes the scores of all candidates alike (an easier initialisation, a luckier order) and of
each one by itself. The former is removed, since candidates are compared by the same seeds; the latter is the noise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from ebbflow.report.intervals import t_quantile

__all__ = [
    "FRACTIONS", "Candidate", "RunNoise", "Pace", "Scores", "fitting", "in_doubt", "ladder", "ladder_seconds",
    "measured_noise", "rank", "rung_epochs", "rung_seconds", "seed_adjusted",
]  # fmt: skip

FRACTIONS = (0.05, 0.15, 0.45)
"""Lengths of the rungs, as parts of the epochs of the whole run."""
_GO_ON = 3
"""One candidate in so many goes on to the next rung."""
_ENOUGH_ERRORS = 2.0
"""A gap of so many standard errors is not called noise."""
_ROUNDING = 1e-9
"""Largest deviation that counts as none."""


@dataclass(frozen=True, order=True)
class Candidate:
    """A rule, warm-up included, and a factor of the base rate."""

    rule: str
    rate: float

    def __str__(self) -> str:
        return f"{self.rule}, rate x{self.rate:g}"


Scores = Mapping[Candidate, Mapping[int, float | None]]
"""By candidate and seed: more is better, and None is a run that diverged. All candidates have the first seed, 0."""


# -- who goes on -------------------------------------------------------------------------------------------------------


def seed_adjusted(scores: Scores) -> dict[Candidate, float]:
    """The mean score of each candidate over its seeds, less what a seed does to all; -inf if any run diverged.

    The effect of a seed is the mean of its difference to seed 0, over the candidates that have both; it is taken
    relative to the mean effect of all seeds, so that a candidate that has all of them keeps its plain mean. So one that
    was given a lucky seed is not ahead of one that was not.

    >>> scores = {Candidate("a", 1): {0: 1.0, 1: 3.0}, Candidate("b", 1): {0: 1.5, 1: 3.5}, Candidate("c", 1): {0: 1.4}}
    >>> list(seed_adjusted(scores).values())
    [2.0, 2.5, 2.4]
    """
    sound = {one: runs for one, runs in scores.items() if None not in runs.values()}
    seeds = {seed for runs in sound.values() for seed in runs}
    effect = {
        seed: statistics.fmean([_score(runs, seed) - _score(runs, 0) for runs in sound.values() if seed in runs])
        for seed in seeds
    }
    usual = statistics.fmean(effect.values()) if effect else 0.0
    return {
        one: statistics.fmean([_score(runs, seed) - effect[seed] + usual for seed in runs])
        if one in sound
        else -math.inf
        for one, runs in scores.items()
    }


def _score(runs: Mapping[int, float | None], seed: int) -> float:
    value = runs[seed]
    assert value is not None
    return value


def rank(scores: Scores) -> list[Candidate]:
    """The candidates, best first; of equal ones the earlier one, so that an order of preference decides ties."""
    adjusted = seed_adjusted(scores)
    return sorted(scores, key=lambda one: -adjusted[one])


@dataclass(frozen=True)
class RunNoise:
    """How much the score of one run varies beyond what its seed does to all candidates."""

    deviation: float
    """Standard deviation of a run."""
    freedom: int
    """Degrees of freedom of that estimate."""

    def margin(self, seeds: int) -> float:
        """Half of the 95 % interval of the mean over so many seeds."""
        return t_quantile(self.freedom) * self.deviation / math.sqrt(seeds)


def measured_noise(scores: Scores) -> RunNoise | None:
    """The noise, from pairs of candidates with two common seeds or more; None as long as too little is known of it.

    The differences of two candidates vary by twice the variance of one. All pairs are pooled; they are not independent,
    so the degrees of freedom are those of the candidates, not of the pairs. One degree of freedom says next to nothing:
    its interval is 12.7 deviations wide. Nor do differences that are all equal, as scores of few samples may be.

    >>> a, b, c = (Candidate(name, 1) for name in "abc")
    >>> measured_noise({a: {0: 1.0, 1: 3.0}, b: {0: 1.0, 1: 5.0}})   # 0 and -2, one degree of freedom
    >>> measured_noise({a: {0: 1.0, 1: 3.0, 2: 1.0}, b: {0: 2.0, 1: 2.0, 2: 2.0}, c: {0: 1.0}})     # -1, 1 and -1
    RunNoise(deviation=0.816496580927726, freedom=2)
    """
    sound = [runs for runs in scores.values() if len(runs) > 1 and None not in runs.values()]
    squares, pooled = 0.0, 0
    for first, second in combinations(sound, 2):
        common = sorted(first.keys() & second.keys())
        if len(common) > 1:
            differences = [_score(first, seed) - _score(second, seed) for seed in common]
            squares += statistics.variance(differences) * (len(common) - 1)
            pooled += len(common) - 1
    if not pooled:
        return None
    freedom = min(pooled, max(1, (len(sound) - 1) * (min(len(runs) for runs in sound) - 1)))
    deviation = math.sqrt(squares / pooled / 2)
    return RunNoise(deviation=deviation, freedom=freedom) if freedom > 1 and deviation > _ROUNDING else None


def in_doubt(scores: Scores, keep: int, *, most_seeds: int) -> list[Candidate]:
    """The candidates that need another seed before `keep` of them go on, because noise could flip the decision.

    As long as too little is known about the noise, these are the last one that would go on and the first that would
    not. Then all whose distance to the nearest candidate on the other side of the cut is below two standard errors of
    that difference. A candidate that has `most_seeds`, or diverged, needs none; nor does anybody if all would go on.
    """
    order, adjusted = rank(scores), seed_adjusted(scores)
    if keep >= len(order) or adjusted[order[keep]] == -math.inf:
        return []
    inside, outside = order[keep - 1], order[keep]
    noise = measured_noise(scores)

    def doubtful(place: int) -> bool:
        one, other = order[place], outside if place < keep else inside
        if noise is None or adjusted[one] == -math.inf:
            return noise is None and one in (inside, outside)
        error = noise.deviation * math.sqrt(1 / len(scores[one]) + 1 / len(scores[other]))
        return abs(adjusted[one] - adjusted[other]) < _ENOUGH_ERRORS * error

    return [one for place, one in enumerate(order) if doubtful(place) and len(scores[one]) < most_seeds]


# -- how long, and what it costs ---------------------------------------------------------------------------------------


def rung_epochs(epochs: int, fractions: Sequence[float] = FRACTIONS) -> tuple[int, ...]:
    """The epochs of each rung of a run of `epochs`: whole, at least 1, each more than the one before.

    >>> rung_epochs(30), rung_epochs(10), rung_epochs(1)
    ((2, 4, 14), (1, 2, 4), (1,))
    """
    return tuple(sorted({max(1, round(epochs * fraction)) for fraction in fractions}))


def ladder(candidates: int, rungs: int) -> tuple[int, ...]:
    """How many candidates each rung has, if the first has `candidates`: a third, but at least two, go on.

    >>> ladder(12, 3), ladder(3, 3), ladder(1, 3)
    ((12, 4, 2), (3, 2, 2), (1, 1, 1))
    """
    counts = [candidates]
    while len(counts) < rungs:
        counts.append(min(counts[-1], max(2, math.ceil(counts[-1] / _GO_ON))))
    return tuple(counts)


@dataclass(frozen=True)
class Pace:
    """How long an arm takes while as many run at once as always do."""

    start_s: float
    """From the start of its process to the first step, and from the last step to its end."""
    epoch_s: float
    """One epoch of training."""

    @classmethod
    def measured(cls, arms: Sequence[tuple[int, float, float]]) -> Pace:
        """From arms that ended: (epochs, seconds of training, seconds from start to end) of each.

        The start is the median, since the very first arms also start the server that arms are forked from.

        >>> Pace.measured([(2, 4.0, 5.0), (2, 8.0, 9.0)])
        Pace(start_s=1.0, epoch_s=3.0)
        """
        epochs = sum(one for one, _, _ in arms)
        training = sum(one for _, one, _ in arms)
        return cls(start_s=statistics.median([max(0.0, whole - part) for _, part, whole in arms]),
                   epoch_s=training / max(1, epochs))  # fmt: skip


def rung_seconds(arms: int, epochs: int, pace: Pace, jobs: int) -> float:
    """How long so many arms take, of which `jobs` run at once: an upper bound if all are as fast as measured.

    >>> rung_seconds(5, 2, Pace(start_s=1.0, epoch_s=3.0), jobs=2)      # three turns of 7 s
    21.0
    """
    return math.ceil(arms / jobs) * (pace.start_s + epochs * pace.epoch_s)


def ladder_seconds(counts: Sequence[int], lengths: Sequence[int], pace: Pace, jobs: int, *, done: int = 0) -> float:
    """How long rungs of so many candidates take with one seed each; `done` arms of the first rung have ended."""
    left = [max(0, counts[0] - done), *counts[1:]]
    return sum(rung_seconds(arms, epochs, pace, jobs) for arms, epochs in zip(left, lengths, strict=False))


def fitting(
    candidates: int, lengths: Sequence[int], pace: Pace, jobs: int, *, left_s: float, done: int = 0
) -> tuple[int, int]:
    """How many candidates to begin with and how many rungs to plan, so that it takes at most `left_s`; (0, 0): none.

    All rungs for at least half of the candidates, or else fewer rungs for as many as possible. At least two candidates
    are compared; `done` of them have run in the first rung already.

    >>> pace = Pace(start_s=0.0, epoch_s=1.0)
    >>> fitting(12, (1, 3, 9), pace, 1, left_s=60)      # 12 + 4 x 3 + 2 x 9 = 42
    (12, 3)
    >>> fitting(12, (1, 3, 9), pace, 1, left_s=40), fitting(12, (1, 3, 9), pace, 1, left_s=14)
    ((10, 3), (6, 2))
    >>> fitting(12, (1, 3, 9), pace, 1, left_s=1.5)
    (0, 0)
    """
    least = min(2, candidates)
    for rungs in range(len(lengths), 0, -1):
        enough = max(least, math.ceil(candidates / 2)) if rungs > 1 else least
        for count in range(candidates, enough - 1, -1):
            counts = ladder(count, rungs)
            if ladder_seconds(counts, lengths, pace, jobs, done=done) <= left_s:
                return count, len(counts)
    return 0, 0
