"""The end of a job, as its records tell it: what was committed once, what was given up, what each change cost.

Which steps survived is found by `ebbflow.live.lineage`, from the rows that every replica wrote; nothing that a launcher
saw goes into it. What a change cost is measured by the replicas that were there before and after: how much later than
usual they began the next step.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ebbflow.core.units import format_seconds, plural
from ebbflow.errors import RecordError
from ebbflow.live.lineage import read_fleet
from ebbflow.record import Run, StepRow, ValidationRow

__all__ = ["Change", "JobAccount", "account_lines", "changes", "read_account"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Another number of workers than in the step before, or a fleet that begins anew."""

    step: int
    """The first step with the new fleet."""
    before: int
    after: int
    lost_s: float | None
    """How much longer than usual the others waited for that step; None where nobody was there before and after."""


@dataclass(frozen=True, kw_only=True)
class JobAccount:
    """A job in numbers; the field names are keys of the `--json` answer of `launch` and `replay`."""

    steps: int = 0
    """In the line of steps that survived."""
    samples: int = 0
    epochs: int = 0
    """Epochs of which every sample was committed."""
    epoch_samples: int = 0
    exactly_once: bool = True
    problems: tuple[str, ...] = ()
    """Samples lost or repeated, each in a sentence; or why that cannot be said."""
    given_up_steps: int = 0
    """Committed by some replica and not kept: it died with them, or the whole fleet was lost."""
    given_up_samples: int = 0
    """Of those steps; they were trained on again, and count once."""
    changes: tuple[Change, ...] = ()
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """Of the last validation."""

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            **asdict(self),
            "problems": list(self.problems),
            "changes": [asdict(change) for change in self.changes],
            "lost_s_a_change": _spread(_costs(self.changes)),
        }


def read_account(folder: Path) -> JobAccount:
    """The account of a job's folder; records that cannot be read are a problem in it, not an error."""
    if not any(folder.glob("replicas/*/record.jsonl")):
        return JobAccount()
    try:
        found, runs = read_fleet(folder)
    except (RecordError, KeyError) as problem:
        return JobAccount(exactly_once=False, problems=(str(problem),))
    kept = {row.stats["lineage"] for row in found.steps}
    given_up = {row.stats["lineage"]: row for run in runs for row in run.steps if row.stats["lineage"] not in kept}
    validations = [row for run in runs for row in run.validations]
    last: ValidationRow | None = max(validations, key=lambda row: row.samples, default=None)
    return JobAccount(
        steps=len(found.steps),
        samples=found.samples,
        epochs=found.epochs,
        epoch_samples=found.epoch_samples,
        exactly_once=found.exactly_once,
        problems=found.mistakes,
        given_up_steps=len(given_up),
        given_up_samples=sum(row.batch for row in given_up.values()),
        changes=tuple(changes(found.steps, runs)),
        metrics=dict(last.metrics) if last else {},
    )


def changes(line: Sequence[StepRow], runs: Iterable[Run]) -> Iterable[Change]:
    """Where the fleet of a step is not that of the step before, with what it cost.

    The usual time is the median between two steps of the fleet before, or of all where that fleet made only one.
    """
    gaps = _gaps(runs)
    pairs = [(before, after, gaps.get((_mark(before), _mark(after)))) for before, after in pairwise(line)]
    usual: dict[int, list[float]] = {}
    for before, after, gap in pairs:
        if gap is not None and before.workers == after.workers:
            usual.setdefault(before.workers, []).append(gap)
    every = [gap for some in usual.values() for gap in some] or [0.0]
    for before, after, gap in pairs:
        if before.workers != after.workers or gap is None:
            typical = statistics.median(usual.get(before.workers) or every)
            lost = None if gap is None else round(max(0.0, gap - typical), 4)
            yield Change(step=after.step, before=before.workers, after=after.workers, lost_s=lost)


def _mark(row: StepRow) -> float:
    return row.stats["lineage"]


def _gaps(runs: Iterable[Run]) -> dict[tuple[float, float], float]:
    """Seconds between the beginnings of two consecutive steps, by their lineages, as the quickest witness has it.

    The clock of a record starts anew with each start of its replica, so a time that runs backwards is no witness.
    """
    found: dict[tuple[float, float], float] = {}
    for run in runs:
        for before, after in pairwise(run.steps):
            gap = after.time_s - before.time_s
            if after.stats["parent"] == _mark(before) and gap > 0:
                key = (_mark(before), _mark(after))
                found[key] = min(gap, found.get(key, gap))
    return found


def _costs(some: Iterable[Change]) -> list[float]:
    return [change.lost_s for change in some if change.lost_s is not None]


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    """Mean, median and greatest of some values; None where there is none."""
    if not values:
        return {"mean": None, "median": None, "max": None}
    return {
        "mean": round(statistics.fmean(values), 4),
        "median": round(statistics.median(values), 4),
        "max": round(max(values), 4),
    }


def account_lines(launcher: Mapping[str, Any], account: JobAccount | None) -> list[str]:
    """The account for people: what the launcher saw, then what the records say, where they are."""

    def seen(what: str) -> str:
        return f"{launcher[what + 's']} {plural(launcher[what + 's'], what)}"

    by_trace = f", {seen('kill')} and {seen('notice')} by the trace" if "kills" in launcher else ""
    lines = [
        f"{launcher['job']}: {launcher['status']} after {format_seconds(launcher['seconds'])}, {seen('start')}, "
        f"{seen('death')}{by_trace}"
    ]
    if account is None:
        return lines
    if not account.steps and not account.problems:
        return [*lines, f"no step was committed; logs are in {launcher['folder']}/replicas"]
    lines.append(
        f"{account.steps} steps, {account.samples} samples, {account.epochs} whole epochs of {account.epoch_samples}"
    )
    lines.append("every sample was committed exactly once an epoch" if account.exactly_once else "NOT exactly once:")
    lines += [f"    {problem}" for problem in account.problems[:20]]
    if account.given_up_steps:
        lines.append(
            f"{account.given_up_steps} steps ({account.given_up_samples} samples) were given up with those who had "
            f"committed them, and done again"
        )
    costs = _costs(account.changes)
    if costs:
        usual, worst = format_seconds(statistics.median(costs)), format_seconds(max(costs))
        lines.append(f"changes of the fleet: {len(account.changes)}, held up for {usual} (median), at most {worst}")
    if account.metrics:
        values = ((name, "nan" if value is None else f"{value:.4f}") for name, value in account.metrics.items())
        lines.append("last validation: " + ", ".join(f"{name} {value}" for name, value in values))
    return lines
