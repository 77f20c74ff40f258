"""Mean and deviation over seeds: the cells of the tables, pure arithmetic.

The value of a run is the mean of its last three validations, as in Andre, Strati and Klimovic (DistributedML 2022,
Tables 1 to 3); a cell is the mean and the sample standard deviation (n - 1) of these values over the seeds. A run that
diverged, failed or did not finish is named in its cell and never averaged in.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ebbflow.report.results import ArmResult

__all__ = ["LAST", "Cell", "Scale", "Summary", "outcome", "run_value", "summarise"]

LAST = 3
"""Validations that the value of a run is the mean of."""
_AXES = ("workloads", "traces", "rules")
_HUGE = 1e6
"""From here on digits after the point, or before it, say nothing to a reader."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One rule on one trace and workload, over its seeds."""

    workload: str
    trace: str
    rule: str
    metric: str
    higher_is_better: bool
    mean: float | None
    """Over the seeds that finished, as recorded (an accuracy is a fraction); None if none did."""
    std: float | None
    """Sample standard deviation over the same seeds; None with fewer than two."""
    values: tuple[float, ...]
    """One a seed that finished, in the order of the seeds."""
    finished: tuple[int, ...] = ()
    diverged: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    interrupted: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    """Seeds by what became of them."""
    best: bool = False
    """The best mean of its row, when the row has at least two."""
    steps: float | None = None
    samples: float | None = None
    """Means over the seeds that finished."""
    published: float | None = None
    """What the paper has here that the study follows, in the units of `mean`."""
    published_steps: float | None = None
    """The paper's number of steps, in the same way."""

    @property
    def seeds(self) -> int:
        """Runs that have a record, whatever became of them."""
        return len(self.finished) + len(self.diverged) + len(self.failed) + len(self.interrupted)

    @property
    def lost(self) -> list[tuple[str, tuple[int, ...]]]:
        """(what happened, seeds) of the seeds that are not in the mean."""
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
class Scale:
    """How the values of a workload are written: accuracies in percent, with as many decimals as the spread deserves."""

    factor: float
    unit: str
    decimals: int

    @classmethod
    def of(cls, cells: Iterable[Cell]) -> Scale:
        """The fewest decimals at which no deviation above zero is written as zero, up to two more than usual."""
        cells = list(cells)
        percent = bool(cells) and cells[0].metric == "accuracy"
        factor, usual = (100.0, 1) if percent else (1.0, 3)
        spreads = [cell.std * factor for cell in cells if cell.std and cell.std > 1e-9]  # less is rounding
        decimals = usual
        while decimals < usual + 2 and any(round(spread, decimals) == 0 for spread in spreads):
            decimals += 1
        return cls(factor=factor, unit="%" if percent else "", decimals=decimals)

    def number(self, value: float) -> str:
        """A value, without its unit; one that is huge, as the loss of a run that all but diverged, by its power of ten.

        >>> Scale(factor=100.0, unit="%", decimals=1).number(0.97213)
        '97.2'
        >>> Scale(factor=1.0, unit="", decimals=3).number(11215563776.0)
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
    """Runs whose value is the mean of fewer than three validations, as text."""
    sources: tuple[str, ...] = ()
    """Where published values come from."""
    scaled: float | None = None
    """The part of its epochs to which the study was scaled down; then published values are not comparable."""
    _index: Mapping[tuple[str, str, str], Cell] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        index = {(cell.workload, cell.trace, cell.rule): cell for cell in self.cells}
        object.__setattr__(self, "_index", index)

    def cell(self, workload: str, trace: str, rule: str) -> Cell | None:
        """The cell, or None where the study has no such arm."""
        return self._index.get((workload, trace, rule))

    def of(self, workload: str) -> list[Cell]:
        """The cells of a workload."""
        return [cell for cell in self.cells if cell.workload == workload]

    def traces_of(self, workload: str) -> list[str]:
        """The rows of the workload's table."""
        present = {cell.trace for cell in self.of(workload)}
        return [trace for trace in self.traces if trace in present]

    def rules_of(self, workload: str) -> list[str]:
        """The columns of the workload's table."""
        present = {cell.rule for cell in self.of(workload)}
        return [rule for rule in self.rules if rule in present]

    def scale(self, workload: str) -> Scale:
        """How this workload's values are written."""
        return Scale.of(self.of(workload))

    def as_json(self) -> dict[str, Any]:
        """What `ebbflow report --json` prints."""
        return {"cells": [cell.as_json() for cell in self.cells]}


def run_value(arm: ArmResult) -> float | None:
    """Mean of the last three validations (of all, if there are fewer); None unless each is a finite number."""
    last = [float(value) for value in arm.values[-LAST:]]
    return statistics.fmean(last) if last and all(map(math.isfinite, last)) else None


def outcome(arm: ArmResult) -> str:
    """The status that counts: a run that finished without a number to show for it did not succeed."""
    if arm.status != "finished" or run_value(arm) is not None:
        return arm.status
    return "diverged" if arm.values.size else "failed"


def summarise(arms: Iterable[ArmResult], config: Mapping[str, Any] | None = None) -> Summary:
    """The cells of these arms; workloads, traces and rules in the order of the configuration, then of appearance.

    The configuration of the study tells what was published: `paper`, a list of {workload, trace, rule, value, source,
    what}, with `what` metric or steps.
    """
    config = config or {}
    paper = [entry for entry in config.get("paper") or () if isinstance(entry, Mapping)]
    groups: dict[tuple[str, str, str], list[ArmResult]] = {}
    told: dict[str, ArmResult] = {}  # an arm of each workload that knows its metric; one without a record does not
    for arm in arms:
        if arm.status == "unreadable":
            continue
        groups.setdefault((arm.workload, arm.trace, arm.rule), []).append(arm)
        if arm.workload not in told or told[arm.workload].header is None:
            told[arm.workload] = arm
    workloads, traces, rules = (
        _names(config.get(key), [found[axis] for found in groups]) for axis, key in enumerate(_AXES)
    )
    keys = [(w, t, r) for w in workloads for t in traces for r in rules if (w, t, r) in groups]
    short = [
        f"{arm.workload}, {arm.trace}, {arm.rule}, seed {arm.seed}: {arm.values.size}"
        for key in keys
        for arm in groups[key]
        if outcome(arm) == "finished" and arm.values.size < LAST
    ]
    cells = [replace(_cell(key, groups[key], told[key[0]]), **_published(paper, key)) for key in keys]
    return Summary(
        workloads=workloads,
        traces=traces,
        rules=rules,
        cells=tuple(_mark_best(cells)),
        short=tuple(short),
        sources=tuple(dict.fromkeys(str(entry["source"]) for entry in paper if entry.get("source"))),
        scaled=config.get("scale"),
    )


def _names(configured: Any, found: list[str]) -> tuple[str, ...]:
    """The names that were found: those of the configuration first, in its order, whichever arm came first."""
    known = [str(name) for name in configured] if isinstance(configured, list | Mapping) else []
    return tuple(name for name in dict.fromkeys([*known, *found]) if name in set(found))


def _published(paper: Iterable[Mapping[str, Any]], key: tuple[str, str, str]) -> dict[str, Any]:
    """The fields of a cell that a paper knows."""
    fields = {"metric": "published", "steps": "published_steps"}
    return {
        fields[entry.get("what", "metric")]: float(entry["value"])
        for entry in paper
        if (entry.get("workload"), entry.get("trace"), entry.get("rule")) == key
    }


def _cell(key: tuple[str, str, str], arms: list[ArmResult], told: ArmResult) -> Cell:
    good = [arm for arm in arms if outcome(arm) == "finished"]
    values = [value for arm in good if (value := run_value(arm)) is not None]

    def seeds(status: str) -> tuple[int, ...]:
        return tuple(arm.seed for arm in arms if outcome(arm) == status)

    return Cell(
        workload=key[0],
        trace=key[1],
        rule=key[2],
        metric=told.metric,
        higher_is_better=told.higher_is_better,
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
    """Mark the best mean of each row; equal ones are all best; the only one of a row is not marked."""
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
