"""What a fleet trained on, from the records of its replicas: the steps that survived, and what each change cost.

Every committed step is a row in the record of each replica that committed it, with two numbers among its `stats`: the
*lineage* of the state after it and the *parent*, the lineage of the state before it. The rows are thus the nodes of a
tree. The surviving steps are the path from the state that the fleet is on back to the first; steps beside it were
given back by the rule, which went back to an earlier state, or committed by replicas that then died or received the
state of others. Nothing that a launcher saw is used, and no clock of a file: which state the fleet is on follows from
the order of the rows in each record.

What an interruption cost is measured by the replicas that were there before and after it: how much later than usual
they began the next step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ebbflow.core.units import format_seconds, plural
from ebbflow.errors import RecordError
from ebbflow.record import Run, StepRow, ValidationRow, read_record

__all__ = [
    "Account", "FleetChange", "JobAccount", "account", "account_lines", "fleet_changes", "read_account", "read_fleet",
    "read_fleet_run", "surviving_steps",
]  # fmt: skip


_INTERRUPTIONS = ("lost", "members", "waiting")
"""Events in the record of a replica that belong to no ordinary step."""


# The surviving steps --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """The surviving steps of a fleet, and whether every sample of an epoch is in them once, or was dropped."""

    steps: tuple[StepRow, ...]
    """In order, each once."""
    given_up: int
    """Number of steps that a replica committed and the fleet lost with it."""
    given_back: tuple[StepRow, ...]
    """Steps that the rule gave back, because it went on from an earlier state, and whose samples were trained on
    again."""
    epoch_samples: int
    epochs: int
    """Epochs of which every sample was committed, or dropped by policy."""
    mistakes: tuple[str, ...]
    """Lost or repeated samples, and missing rows, one sentence each. If empty, every sample of these epochs counts
    exactly once."""
    missing: int = 0
    """Number of steps whose rows are in no record, so that nobody can say what they trained on."""

    @property
    def exactly_once(self) -> bool:
        """Whether no sample was lost and none counts twice."""
        return not self.mistakes

    @property
    def samples(self) -> int:
        """Committed samples of all epochs."""
        return sum(row.batch for row in self.steps)

    @property
    def dropped(self) -> int:
        """Samples that the policy `drop` dropped."""
        return sum(int(row.stats.get("dropped", 0)) for row in self.steps)


def account(*records: Iterable[StepRow], epoch_samples: int) -> Account:
    """Account for the steps of all replicas. `records`: the rows of each, in the order in which it wrote them."""
    rows = [list(record) for record in records]
    nodes = {_lineage(row): row for record in rows for row in record}
    steps = surviving_steps(*rows)
    mistakes, missing = [], 0
    expected, before = (0, 0), -1  # where the next step must begin, and the number of the last one
    for row, parent in zip(steps, [0, *map(_lineage, steps)], strict=False):
        covered = row.batch + int(row.stats.get("dropped", 0))
        start = row.samples - covered - row.epoch * epoch_samples
        stop = start + covered
        if row.step > before + 1 and parent != _parent(row):
            missing += row.step - before - 1
            mistakes.append(f"the rows of steps {before + 1} to {row.step - 1} are in no record")
        elif (row.epoch, start) != expected:
            mistakes.append(
                f"step {row.step} has samples {start} to {stop} of epoch {row.epoch}, but the step before ended at "
                f"sample {expected[1]} of epoch {expected[0]}"
            )
        expected, before = ((row.epoch + 1, 0) if stop == epoch_samples else (row.epoch, stop)), row.step
    given_back = _given_back(nodes, {_lineage(row) for row in steps})
    return Account(
        steps=tuple(steps),
        given_up=len(nodes) - len(steps) - len(given_back),
        given_back=tuple(given_back),
        epoch_samples=epoch_samples,
        epochs=expected[0],
        mistakes=tuple(mistakes),
        missing=missing,
    )


def surviving_steps(*records: Iterable[StepRow]) -> list[StepRow]:
    """The steps from the first one to the state that the fleet is on, in order.

    Every record ends with a step of the line on which its replica was last. A replica that has rows of one line and
    then rows of another has left the first one for the second: a line that was left, and not the other way round, is
    not the fleet's. Among lines of which the records do not say more, that with the most samples counts.
    """
    rows = [list(record) for record in records]
    nodes = {_lineage(row): row for record in rows for row in record}
    lines = [_path(_end(record[-1], nodes), nodes) for record in rows if record]
    ends = {_lineage(line[-1]): line for line in lines if line}
    inner = {_lineage(row) for line in ends.values() for row in line[:-1]}
    lines = [line for end, line in ends.items() if end not in inner]
    members = [{_lineage(row) for row in line} for line in lines]

    def left(one: set[int], other: set[int]) -> bool:
        """Whether a replica went over from the first line to the second."""
        only_one, only_other = one - other, other - one
        for record in rows:
            on_one = [i for i, row in enumerate(record) if _lineage(row) in only_one]
            on_other = [i for i, row in enumerate(record) if _lineage(row) in only_other]
            if on_one and on_other and on_one[0] < on_other[-1]:
                return True
        return False

    current = [
        line
        for line, own in zip(lines, members, strict=True)
        if not any(left(own, other) and not left(other, own) for other in members if other is not own)
    ]
    return max(reversed(current or lines), key=lambda line: line[-1].samples, default=[])


def _end(row: StepRow, nodes: Mapping[int, StepRow]) -> StepRow | None:
    """The state after a last row. A step after which the run went back leads nowhere: the snapshot is the state."""
    return nodes.get(int(_stat(row, "fork"))) if "given_back" in row.stats else row


def _given_back(nodes: Mapping[int, StepRow], surviving: Collection[int]) -> list[StepRow]:
    """The steps up to those after which the run went back, from where the state begins that it went on from.

    Of several branches that were compared, the steps of the one that was kept survive.
    """
    found: dict[int, StepRow] = {}
    for last in (row for row in nodes.values() if "given_back" in row.stats):
        again = nodes.get(int(_stat(last, "fork")))
        kept: set[int] = set(surviving)
        while again is not None and _lineage(again) not in kept:  # in the end, the state before the first step
            kept.add(_lineage(again))
            again = nodes.get(_parent(again))
        row: StepRow | None = last
        while row is not None and _lineage(row) not in kept:
            found[_lineage(row)] = row
            row = nodes.get(_parent(row))
    return sorted(found.values(), key=lambda row: row.step)


def _path(row: StepRow | None, nodes: Mapping[int, StepRow]) -> list[StepRow]:
    """Follow the parents to the first row. Where a parent's row is missing, the last row of an earlier step goes on."""
    path: list[StepRow] = []
    while row is not None:
        path.append(row)
        step, parent = row.step, _parent(row)
        row = nodes.get(parent)
        if row is None and step > 0:
            earlier = [node for node in nodes.values() if node.step < step and "given_back" not in node.stats]
            row = max(reversed(earlier), key=lambda node: node.step, default=None)
    return path[::-1]


def _lineage(row: StepRow) -> int:
    return int(_stat(row, "lineage"))


def _parent(row: StepRow) -> int:
    return int(_stat(row, "parent"))


def _stat(row: StepRow, name: str) -> float:
    if name not in row.stats:
        raise RecordError(f"step {row.step} has no {name}: expected the record of a replica in a live fleet")
    return row.stats[name]


def read_fleet(folder: Path) -> tuple[Account, Sequence[Run]]:
    """Read the records in `replicas/*/record.jsonl` in the folder of a job, and account for them."""
    runs = [read_record(path) for path in sorted(folder.glob("replicas/*/record.jsonl"))]
    if not runs:
        raise RecordError(f"{folder} has no replicas/*/record.jsonl; expected the folder of a live job")
    sizes = {int(run.header.config["epoch_samples"]) for run in runs}
    if len(sizes) != 1:
        raise RecordError(f"{folder}: the replicas' records are of epochs of {sorted(sizes)} samples; expected one job")
    return account(*(run.steps for run in runs), epoch_samples=sizes.pop()), runs


def read_fleet_run(folder: Path) -> Run:
    """One record of a live job, as if one process had trained it: the surviving steps and validations of all replicas.

    Its end is that of a replica that finished, else the last one that a replica wrote, else there is none.
    """
    found, runs = read_fleet(folder)
    steps = {row.step: row for row in _on_one_clock(found.steps, runs)}
    validations = {
        row.step: replace(row, time_s=steps[row.step - 1].time_s)
        for run in runs
        for row in run.validations
        if row.step - 1 in steps
    }
    layers = {row.step: row for run in runs for row in run.layers if row.step in steps}
    ends = [run.end for run in runs if run.end is not None]
    return Run(
        path=folder / "replicas",
        header=runs[0].header,
        steps=list(steps.values()),
        validations=[validations[step] for step in sorted(validations)],
        events=sorted((event for run in runs for event in run.events), key=lambda event: event.step),
        layers=[layers[step] for step in sorted(layers)],
        given_back=list(found.given_back),
        end=max(ends, key=lambda end: (end.status == "finished", end.steps), default=None),
    )


def _on_one_clock(steps: Sequence[StepRow], runs: Iterable[Run]) -> Iterator[StepRow]:
    """These steps of several records on one clock, which begins with that of the first step.

    Every replica counts from its own beginning, and again from 0 when it was started anew. Between two steps lies the
    shortest time that a replica measured; where none saw both, as long as the first of them took.
    """
    number = {_lineage(row): i for i, row in enumerate(steps)}
    gaps: dict[int, float] = {}
    for run in runs:
        own = [(number[_lineage(row)], row.time_s) for row in run.steps if _lineage(row) in number]
        for (i, before), (j, after) in pairwise(own):
            if j == i + 1 and after > before:
                gaps[j] = min(after - before, gaps.get(j, math.inf))
    now = steps[0].time_s if steps else 0.0
    for i, row in enumerate(steps):
        if i > 0:
            now += gaps.get(i, steps[i - 1].duration_s or 0.0)
        yield replace(row, time_s=now)


# The account of a job -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetChange:
    """A step before which the fleet changed, or stood still: another number of workers than in the step before, a
    quorum group that was formed anew, a lighthouse that did not answer, or a fleet that begins again."""

    step: int
    """The first step after the change."""
    before: int
    after: int
    lost_s: float | None
    """How much longer than usual the others waited for that step; None if no replica was there before and after."""


@dataclass(frozen=True, kw_only=True)
class JobAccount:
    """The account of a job; the field names are keys of the `--json` answer of `launch` and `replay`."""

    steps: int = 0
    """Number of surviving steps."""
    samples: int = 0
    epochs: int = 0
    """Epochs of which every sample was committed."""
    epoch_samples: int = 0
    exactly_once: bool = True
    problems: tuple[str, ...] = ()
    """Lost or repeated samples and missing rows, one sentence each; or why the records cannot be read."""
    missing_steps: int = 0
    """Steps whose rows are in no record: whether their samples count once cannot be said."""
    given_up_steps: int = 0
    """Steps that a replica committed and the fleet did not keep, because the replica or the whole fleet was lost."""
    given_up_samples: int = 0
    """Samples of those steps. They were trained on again and count once."""
    given_back_steps: int = 0
    """Steps that the rule gave back, because it went on from an earlier state."""
    given_back_samples: int = 0
    """Samples of those steps. They were trained on again and count once."""
    changes: tuple[FleetChange, ...] = ()
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """Metrics of the last validation."""
    dropped: int = 0
    """Samples that the policy `drop` dropped."""

    def to_json(self) -> dict[str, Any]:
        """Give the account for `--json`."""
        return {
            **asdict(self),
            "problems": list(self.problems),
            "changes": [asdict(change) for change in self.changes],
            "lost_s_a_change": _spread(_costs(self.changes)),
        }


def read_account(folder: Path) -> JobAccount:
    """Read the account of a job from its folder. Records that cannot be read are a problem in it, not an error."""
    if not any(folder.glob("replicas/*/record.jsonl")):
        return JobAccount()
    try:
        found, runs = read_fleet(folder)
    except (RecordError, KeyError) as problem:
        return JobAccount(exactly_once=False, problems=(str(problem),))
    known = {_lineage(row) for row in (*found.steps, *found.given_back)}
    given_up = {lineage: row for run in runs for row in run.steps if (lineage := _lineage(row)) not in known}
    validations = [row for run in runs for row in run.validations]
    last: ValidationRow | None = max(validations, key=lambda row: row.samples, default=None)
    return JobAccount(
        steps=len(found.steps),
        samples=found.samples,
        epochs=found.epochs,
        epoch_samples=found.epoch_samples,
        exactly_once=found.exactly_once,
        problems=found.mistakes,
        missing_steps=found.missing,
        given_up_steps=len(given_up),
        given_up_samples=sum(row.batch for row in given_up.values()),
        given_back_steps=len(found.given_back),
        given_back_samples=sum(row.batch for row in found.given_back),
        changes=tuple(fleet_changes(found.steps, runs)),
        metrics=dict(last.metrics) if last else {},
        dropped=found.dropped,
    )


def fleet_changes(steps: Sequence[StepRow], runs: Iterable[Run]) -> Iterable[FleetChange]:
    """Find the steps before which the fleet changed or stood still, and what that cost.

    The usual time is the median between two steps of the fleet before, or of all fleets if that made only one step.
    """
    runs = list(runs)
    gaps = _gaps(runs)
    interrupted = {event.step for run in runs for event in run.events if event.what in _INTERRUPTIONS}
    went_back = {
        after.stats["lineage"] for run in runs for before, after in pairwise(run.steps) if "given_back" in before.stats
    }
    pairs = [
        (before, after, gaps.get((before.stats["lineage"], after.stats["lineage"])))
        for before, after in pairwise(steps)
    ]
    usual: dict[int, list[float]] = {}
    for before, after, gap in pairs:
        if gap is not None and before.workers == after.workers and after.step not in interrupted:
            usual.setdefault(before.workers, []).append(gap)
    every = [gap for some in usual.values() for gap in some] or [0.0]
    for before, after, gap in pairs:
        unknown = gap is None and after.stats["lineage"] not in went_back
        if before.workers != after.workers or unknown or after.step in interrupted:
            typical = statistics.median(usual.get(before.workers) or every)
            lost = None if gap is None else round(max(0.0, gap - typical), 4)
            yield FleetChange(step=after.step, before=before.workers, after=after.workers, lost_s=lost)


def _gaps(runs: Iterable[Run]) -> dict[tuple[float, float], float]:
    """Seconds between the beginnings of two consecutive steps, by their lineages: the shortest that a replica measured.

    The clock of a record starts again with each incarnation of its replica, so a time that decreases measures nothing.
    """
    found: dict[tuple[float, float], float] = {}
    for run in runs:
        for before, after in pairwise(run.steps):
            gap = after.time_s - before.time_s
            if after.stats["parent"] == before.stats["lineage"] and gap > 0:
                key = (before.stats["lineage"], after.stats["lineage"])
                found[key] = min(gap, found.get(key, gap))
    return found


def _costs(changes: Iterable[FleetChange]) -> list[float]:
    return [change.lost_s for change in changes if change.lost_s is not None]


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {"mean": None, "median": None, "max": None}
    return {
        "mean": round(statistics.fmean(values), 4),
        "median": round(statistics.median(values), 4),
        "max": round(max(values), 4),
    }


def _doubt(account: JobAccount) -> str:
    only_missing = account.missing_steps and all(problem.startswith("the rows of") for problem in account.problems)
    return "whether every sample was committed exactly once cannot be said:" if only_missing else "NOT exactly once:"


def account_lines(launcher: Mapping[str, Any], account: JobAccount | None) -> list[str]:
    """Write the account for people: what the launcher saw, then what the records say, if they are here."""

    def count(what: str) -> str:
        return f"{launcher[what + 's']} {plural(launcher[what + 's'], what)}"

    by_trace = f", {count('kill')} and {count('notice')} by the trace" if "kills" in launcher else ""
    lines = [
        f"{launcher['job']}: {launcher['status']} after {format_seconds(launcher['seconds'])}, {count('start')}, "
        f"{count('death')}{by_trace}"
    ]
    if account is None:
        return lines
    if not account.steps and not account.problems:
        return [*lines, f"no step was committed; logs are in {launcher['folder']}/replicas"]
    lines.append(
        f"{account.steps} steps, {account.samples} samples, {account.epochs} whole epochs of {account.epoch_samples}"
    )
    if account.epochs or not account.exactly_once:
        once = "every sample was committed exactly once per epoch"
        if account.dropped:
            once = f"every sample was committed at most once per epoch; {account.dropped} were dropped by the policy"
        lines.append(once if account.exactly_once else _doubt(account))
    lines += [f"    {problem}" for problem in account.problems[:20]]
    if account.given_up_steps:
        lines.append(
            f"{account.given_up_steps} steps ({account.given_up_samples} samples) were lost with the replicas that had "
            f"committed them, and computed again"
        )
    if account.given_back_steps:
        lines.append(
            f"{account.given_back_steps} steps ({account.given_back_samples} samples) were given back by the rule, "
            f"which went on from an earlier state, and trained on again"
        )
    costs = _costs(account.changes)
    if costs:
        usual, worst = format_seconds(statistics.median(costs)), format_seconds(max(costs))
        lines.append(f"changes of the fleet: {len(account.changes)}, delay {usual} (median), at most {worst}")
    if account.metrics:
        values = ((name, "nan" if value is None else f"{value:.4f}") for name, value in account.metrics.items())
        lines.append("last validation: " + ", ".join(f"{name} {value}" for name, value in values))
    return lines
