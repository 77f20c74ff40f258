"""Mean and deviation over seeds: the cells of the tables, and what a user should conclude from them.

The value of a run is the mean of its last three validations, as in Andre, Strati and Klimovic (DistributedML 2022,
Tables 1 to 3). A cell is the mean and the sample standard deviation (n - 1) of these values over the seeds. A run that
diverged, failed or did not finish is named in its cell and never averaged in.

In the conclusions two rules count as different on a trace if their means differ by more than the larger of their two
standard deviations. That is a reading aid for few seeds, not a test of significance.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ebbflow.report.results import ArmResult

__all__ = ["LAST", "Cell", "NumberFormat", "Summary", "outcome", "run_value", "summarise", "takeaways"]

LAST = 3
"""The value of a run is the mean of this many validations."""
_AXES = ("workloads", "traces", "rules")
_HUGE = 1e6
"""Larger numbers are written with an exponent."""
_FAR = 0.1
"""A rule is far behind if it is worse than the best by more than this fraction of the best."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One rule on one trace and workload, over its seeds."""

    workload: str
    trace: str
    rule: str
    metric: str
    higher_is_better: bool
    mean: float | None
    """Mean over the seeds that finished, as recorded (an accuracy is a fraction); None if none finished."""
    std: float | None
    """Sample standard deviation over the same seeds; None with fewer than two."""
    values: tuple[float, ...]
    """The value of each seed that finished, in the order of the seeds."""
    finished: tuple[int, ...] = ()
    """The seeds that finished; the next fields hold those that ended otherwise."""
    diverged: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    interrupted: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    best: bool = False
    """Whether this is the best mean of its row; False if the row has only one."""
    steps: float | None = None
    """Mean number of steps over the seeds that finished."""
    samples: float | None = None
    """Mean number of samples over the seeds that finished."""
    published: float | None = None
    """The value in the paper that the study follows, in the units of `mean`."""
    published_steps: float | None = None
    """The number of steps in that paper."""

    @property
    def seeds(self) -> int:
        """The number of runs that have a record, however they ended."""
        return len(self.finished) + len(self.diverged) + len(self.failed) + len(self.interrupted)

    @property
    def lost(self) -> list[tuple[str, tuple[int, ...]]]:
        """(what happened, seeds) for the seeds that are not in the mean."""
        kinds = {
            "diverged": self.diverged,
            "failed": self.failed,
            "unfinished": self.interrupted,
            "missing": self.missing,
        }
        return [(name, seeds) for name, seeds in kinds.items() if seeds]

    def as_json(self) -> dict[str, Any]:
        """The cell as `ebbflow report --json` prints it; the first seven keys are fixed."""
        return {
            "workload": self.workload,
            "trace": self.trace,
            "rule": self.rule,
            "mean": self.mean,
            "std": self.std,
            "seeds": self.seeds,
            "diverged": len(self.diverged),
            "failed": len(self.failed),
            "unfinished": len(self.interrupted),
            "missing": len(self.missing),
            "metric": self.metric,
            "higher_is_better": self.higher_is_better,
            "values": list(self.values),
            "best": self.best,
            "steps": self.steps,
            "samples": self.samples,
            "published": self.published,
            "published_steps": self.published_steps,
        }


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """How the values of a workload are written: accuracies in percent, with as many decimals as the spread needs."""

    factor: float
    unit: str
    decimals: int

    @classmethod
    def for_cells(cls, cells: Iterable[Cell]) -> NumberFormat:
        """The fewest decimals that show every deviation above zero, up to two more than usual."""
        cells = list(cells)
        percent = bool(cells) and cells[0].metric == "accuracy"
        factor, usual = (100.0, 1) if percent else (1.0, 3)
        spreads = [cell.std * factor for cell in cells if cell.std and cell.std > 1e-9]  # less is rounding
        decimals = usual
        while decimals < usual + 2 and any(round(spread, decimals) == 0 for spread in spreads):
            decimals += 1
        return cls(factor=factor, unit="%" if percent else "", decimals=decimals)

    def number(self, value: float) -> str:
        """A value without its unit; a huge one, such as the loss of a run that almost diverged, with an exponent.

        >>> NumberFormat(factor=100.0, unit="%", decimals=1).number(0.97213)
        '97.2'
        >>> NumberFormat(factor=1.0, unit="", decimals=3).number(11215563776.0)
        '1.12e+10'
        """
        shown = value * self.factor
        return f"{shown:.2e}" if abs(shown) >= _HUGE else f"{shown:.{self.decimals}f}"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The cells, and the order in which traces and rules are shown."""

    workloads: tuple[str, ...]
    traces: tuple[str, ...]
    rules: tuple[str, ...]
    cells: tuple[Cell, ...]
    short: tuple[str, ...] = ()
    """Descriptions of the runs whose value is the mean of fewer than three validations."""
    sources: tuple[str, ...] = ()
    """The sources of published values."""
    scaled: float | None = None
    """The fraction of its epochs to which the study was scaled down; then published values are not comparable."""
    _index: Mapping[tuple[str, str, str], Cell] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        index = {(cell.workload, cell.trace, cell.rule): cell for cell in self.cells}
        object.__setattr__(self, "_index", index)

    def cell(self, workload: str, trace: str, rule: str) -> Cell | None:
        """The cell, or None if the study has no such arm."""
        return self._index.get((workload, trace, rule))

    def cells_of(self, workload: str) -> list[Cell]:
        """The cells of a workload."""
        return [cell for cell in self.cells if cell.workload == workload]

    def traces_of(self, workload: str) -> list[str]:
        """The rows of the workload's table."""
        present = {cell.trace for cell in self.cells_of(workload)}
        return [trace for trace in self.traces if trace in present]

    def rules_of(self, workload: str) -> list[str]:
        """The columns of the workload's table."""
        present = {cell.rule for cell in self.cells_of(workload)}
        return [rule for rule in self.rules if rule in present]

    def number_format(self, workload: str) -> NumberFormat:
        """How the values of this workload are written."""
        return NumberFormat.for_cells(self.cells_of(workload))

    def as_json(self) -> dict[str, Any]:
        """What `ebbflow report --json` prints."""
        return {"cells": [cell.as_json() for cell in self.cells]}


def run_value(arm: ArmResult) -> float | None:
    """The mean of the last three validations (of all, if there are fewer); None unless each is a finite number."""
    last = [float(value) for value in arm.values[-LAST:]]
    return statistics.fmean(last) if last and all(map(math.isfinite, last)) else None


def outcome(arm: ArmResult) -> str:
    """The status of an arm. One that finished without a finite result counts as diverged, or as failed."""
    if arm.status != "finished" or run_value(arm) is not None:
        return arm.status
    return "diverged" if arm.values.size else "failed"


def summarise(arms: Iterable[ArmResult], config: Mapping[str, Any] | None = None) -> Summary:
    """The cells of these arms; workloads, traces and rules in the order of the configuration, then of appearance.

    The configuration of the study also has the published values: `paper`, a list of {workload, trace, rule, value,
    source, what}, where `what` is metric or steps.
    """
    config = config or {}
    paper = [entry for entry in config.get("paper") or () if isinstance(entry, Mapping)]
    groups: dict[tuple[str, str, str], list[ArmResult]] = {}
    examples: dict[str, ArmResult] = {}  # an arm of each workload that has its metric; one without a record has none
    for arm in arms:
        if arm.status == "unreadable":
            continue
        groups.setdefault((arm.workload, arm.trace, arm.rule), []).append(arm)
        if arm.workload not in examples or examples[arm.workload].header is None:
            examples[arm.workload] = arm
    workloads, traces, rules = (
        _ordered_names(config.get(key), [found[axis] for found in groups]) for axis, key in enumerate(_AXES)
    )
    keys = [(w, t, r) for w in workloads for t in traces for r in rules if (w, t, r) in groups]
    short = [
        f"{arm.workload}, {arm.trace}, {arm.rule}, seed {arm.seed}: {arm.values.size}"
        for key in keys
        for arm in groups[key]
        if outcome(arm) == "finished" and arm.values.size < LAST
    ]
    cells = [replace(_make_cell(key, groups[key], examples[key[0]]), **_published(paper, key)) for key in keys]
    return Summary(
        workloads=workloads,
        traces=traces,
        rules=rules,
        cells=tuple(_mark_best(cells)),
        short=tuple(short),
        sources=tuple(dict.fromkeys(str(entry["source"]) for entry in paper if entry.get("source"))),
        scaled=config.get("scale"),
    )


def _ordered_names(configured: Any, found: list[str]) -> tuple[str, ...]:
    """The names that were found; those of the configuration first, in its order."""
    known = [str(name) for name in configured] if isinstance(configured, list | Mapping) else []
    return tuple(name for name in dict.fromkeys([*known, *found]) if name in set(found))


def _published(paper: Iterable[Mapping[str, Any]], key: tuple[str, str, str]) -> dict[str, Any]:
    """The fields of a cell that the paper has values for."""
    fields = {"metric": "published", "steps": "published_steps"}
    return {
        fields[entry.get("what", "metric")]: float(entry["value"])
        for entry in paper
        if (entry.get("workload"), entry.get("trace"), entry.get("rule")) == key
    }


def _make_cell(key: tuple[str, str, str], arms: list[ArmResult], example: ArmResult) -> Cell:
    good = [arm for arm in arms if outcome(arm) == "finished"]
    values = [value for arm in good if (value := run_value(arm)) is not None]

    def seeds(status: str) -> tuple[int, ...]:
        return tuple(arm.seed for arm in arms if outcome(arm) == status)

    return Cell(
        workload=key[0],
        trace=key[1],
        rule=key[2],
        metric=example.metric,
        higher_is_better=example.higher_is_better,
        mean=statistics.fmean(values) if values else None,
        std=statistics.stdev(values) if len(values) > 1 else None,
        values=tuple(values),
        steps=statistics.fmean(arm.steps for arm in good) if good else None,
        samples=statistics.fmean(arm.samples for arm in good) if good else None,
        finished=seeds("finished"),
        diverged=seeds("diverged"),
        failed=seeds("failed"),
        interrupted=seeds("interrupted"),
        missing=seeds("missing"),
    )


def _mark_best(cells: list[Cell]) -> list[Cell]:
    """Mark the best mean of each row, and all that equal it; the only one of a row is not marked."""
    rows: dict[tuple[str, str], list[float]] = {}
    for cell in cells:
        if cell.mean is not None:
            rows.setdefault((cell.workload, cell.trace), []).append(cell.mean)

    def best(cell: Cell) -> bool:
        means = rows.get((cell.workload, cell.trace), [])
        if cell.mean is None or len(means) < 2:
            return False
        return math.isclose(cell.mean, max(means) if cell.higher_is_better else min(means), rel_tol=1e-9)

    return [replace(cell, best=best(cell)) for cell in cells]


# -- conclusions -------------------------------------------------------------------------------------------------------


def takeaways(summary: Summary) -> list[str]:
    """The conclusions: one text per workload, then one about what is not in the table."""
    texts = [_conclusion(summary, workload) for workload in summary.workloads]
    return [text for text in [*texts, _losses(summary)] if text]


@dataclass(frozen=True, kw_only=True)
class _Ranking:
    """Which rules are best on one trace."""

    trace: str
    leaders: tuple[str, ...]
    """The best rule first, then those that cannot be told apart from it."""
    same: bool
    """Whether all leaders have exactly the same mean."""
    everyone: bool
    """Whether no rule with a result is behind the leaders."""
    one_seed: bool
    """Whether the leader and the next rule have only one seed each, so that the spread is unknown."""
    detail: str
    """The numbers."""


def _conclusion(summary: Summary, workload: str) -> str:
    cells = [cell for cell in summary.cells_of(workload) if cell.mean is not None]
    if not cells:
        return f"On {workload} no arm has finished, so nothing can be said yet."
    numbers = summary.number_format(workload)
    if len({cell.rule for cell in cells}) == 1:
        results = _join(f"{_value(cell, numbers)} on {cell.trace}" for cell in cells)
        return f"On {workload}, {cells[0].rule} reaches {_metric(cells[0])} {results}."
    by_trace = [[cell for cell in cells if cell.trace == trace] for trace in summary.traces_of(workload)]
    rankings = [_rank(row, numbers) for row in by_trace if row]
    text = f"On {workload}, {'; '.join(_clauses(rankings))}."
    if any(ranking.one_seed for ranking in rankings):
        text += " Where rules have only one seed each the spread is unknown: repeat with more before you rely on it."
    return text + _far_behind(cells, numbers)


def _far_behind(cells: list[Cell], numbers: NumberFormat) -> str:
    """The rules to avoid on a trace: worse than its best by more than a tenth, and by more than the spread."""
    warned = []
    for cell in cells:
        best = _by_rank([other for other in cells if other.trace == cell.trace])[0]
        if abs(_mean(cell) - _mean(best)) > max(_FAR * abs(_mean(best)), _spread(best, cell)):
            warned.append(f"{cell.rule} on {cell.trace} ({_value(cell, numbers)})")
    return f" Far behind: {_join(warned)}." if warned else ""


def _rank(cells: list[Cell], numbers: NumberFormat) -> _Ranking:
    """The ranking of the cells of one trace."""
    first, *others = _by_rank(cells)
    tied = [
        cell
        for cell in others
        if abs(_mean(cell) - _mean(first)) <= _spread(first, cell) or math.isclose(_mean(cell), _mean(first))
    ]
    behind = [cell for cell in others if cell not in tied]
    detail = _value(first, numbers)
    if behind:
        gap, spread = abs(_mean(behind[0]) - _mean(first)), _spread(first, behind[0])
        points = " points" if numbers.unit == "%" else ""
        detail += f", {numbers.number(gap)}{points} better than {behind[0].rule}"
        detail += f" = {gap / spread:.1f} standard deviations" if spread else ""
    return _Ranking(
        trace=first.trace,
        leaders=(first.rule, *(cell.rule for cell in tied)),
        same=bool(tied) and all(math.isclose(_mean(cell), _mean(first), rel_tol=1e-9) for cell in tied),
        everyone=not behind,
        one_seed=bool(behind) and first.std is None and behind[0].std is None,
        detail=detail,
    )


def _clauses(rankings: list[_Ranking]) -> list[str]:
    """One clause for all traces on which the same rules lead."""
    groups: dict[tuple[frozenset[str], bool, bool, bool], list[_Ranking]] = {}
    for ranking in rankings:
        key = (frozenset(ranking.leaders), ranking.same, ranking.everyone, ranking.one_seed)
        groups.setdefault(key, []).append(ranking)
    clauses = []
    for (leaders, same, everyone, one_seed), members in groups.items():
        traces = _join(ranking.trace for ranking in members)
        details = _join(f"{ranking.trace} ({ranking.detail})" for ranking in members)
        names = _join(members[0].leaders)
        if len(leaders) == 1 and everyone:
            clauses.append(f"only {names} has a result on {details}")
        elif len(leaders) == 1:
            clauses.append(f"{names} {'is ahead' if one_seed else 'is best'} on {details}")
        elif same:
            clauses.append(f"{names} give the same result on {traces}")
        elif everyone:
            clauses.append(f"{names} cannot be told apart on {traces} with these seeds (within one standard deviation)")
        else:
            clauses.append(f"{names} share the lead on {details}")
    return clauses


def _losses(summary: Summary) -> str:
    """Which rules diverged on which traces, and how many arms have no result for another reason."""
    diverged = [
        f"{cell.rule} on {cell.trace} ({len(cell.diverged)} of {cell.seeds} seed{'s' if cell.seeds > 1 else ''}"
        + (f", {cell.workload})" if len(summary.workloads) > 1 else ")")
        for cell in summary.cells
        if cell.diverged
    ]
    parts = [f"Diverged: {_join(diverged)}."] if diverged else []
    counts = {
        "failed": sum(len(cell.failed) for cell in summary.cells),
        "unfinished": sum(len(cell.interrupted) for cell in summary.cells),
        "missing": sum(len(cell.missing) for cell in summary.cells),
    }
    if any(counts.values()):
        parts.append(f"The table is not complete: {_join(f'{n} {name}' for name, n in counts.items() if n)}.")
    return " ".join(parts)


def _by_rank(cells: list[Cell]) -> list[Cell]:
    """The cells with the best mean first."""
    return sorted(cells, key=lambda cell: _mean(cell) * (-1 if cell.higher_is_better else 1))


def _mean(cell: Cell) -> float:
    assert cell.mean is not None, "only cells with a result are ranked"
    return cell.mean


def _spread(a: Cell, b: Cell) -> float:
    return max(a.std or 0.0, b.std or 0.0)


def _value(cell: Cell, numbers: NumberFormat) -> str:
    return f"{numbers.number(_mean(cell))}{' %' if numbers.unit == '%' else ''}"


def _metric(cell: Cell) -> str:
    return f"{'an' if cell.metric[:1] in 'aeiou' else 'a'} {cell.metric} of"


def _join(parts: Iterable[str]) -> str:
    """A list in words.

    >>> _join(["a", "b", "c"])
    'a, b and c'
    """
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last
