"""What a user should take from the table, in plain words.

Two rules count as different on a trace when their means are further apart than the larger of their two standard
deviations; otherwise they cannot be told apart with these seeds. It is a reading aid for few seeds, not a test of
significance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ebbflow.report.tables import Cell, Scale, Summary

__all__ = ["takeaway", "takeaways"]

_FAR = 0.1


@dataclass(frozen=True, kw_only=True)
class _Row:
    """How one trace's race ended."""

    trace: str
    leaders: tuple[str, ...]
    """The best rule first, then those that cannot be told apart from it."""
    same: bool
    """All leaders have exactly the same mean: the rules did nothing different."""
    everyone: bool
    """No rule with a result is behind the leaders."""
    guess: bool
    """The leader and the next one have one seed each, so nobody knows how far chance would carry them."""
    detail: str
    """The numbers."""


def takeaway(summary: Summary) -> str:
    """All sentences, as one text."""
    return " ".join(takeaways(summary))


def takeaways(summary: Summary) -> list[str]:
    """One text a workload, then one on what is not in the table."""
    texts = [_workload(summary, workload) for workload in summary.workloads]
    return [text for text in [*texts, _losses(summary)] if text]


def _workload(summary: Summary, workload: str) -> str:
    cells = [cell for cell in summary.of(workload) if cell.mean is not None]
    if not cells:
        return f"On {workload} no arm has finished, so nothing can be said yet."
    scale = summary.scale(workload)
    if len({cell.rule for cell in cells}) == 1:
        results = _join(f"{_value(cell, scale)} on {cell.trace}" for cell in cells)
        return f"On {workload}, {cells[0].rule} reaches {_metric(cells[0])} {results}."
    rows = [_race([cell for cell in cells if cell.trace == trace], scale) for trace in summary.traces_of(workload)]
    text = f"On {workload}, {'; '.join(_clauses([row for row in rows if row is not None]))}."
    if any(row is not None and row.guess for row in rows):
        text += (
            " Where one seed stands against one seed the spread is not known: repeat with more before you rely on it."
        )
    return text + _far_behind(cells, scale)


def _far_behind(cells: list[Cell], scale: Scale) -> str:
    """Rules that a user should keep away from on a trace: worse than its best by more than a tenth of it.

    One that cannot be told apart from the best, as `_race` sees it, is not behind at all.
    """
    warned = []
    for cell in cells:
        best = _by_rank([other for other in cells if other.trace == cell.trace])[0]
        if abs(_mean(cell) - _mean(best)) > max(_FAR * abs(_mean(best)), _spread(best, cell)):
            warned.append(f"{cell.rule} on {cell.trace} ({_value(cell, scale)})")
    return f" Far behind: {_join(warned)}." if warned else ""


def _race(cells: list[Cell], scale: Scale) -> _Row | None:
    """Who leads among the cells of one trace; None if none has a result."""
    if not cells:
        return None
    first, *others = _by_rank(cells)
    tied = [
        cell
        for cell in others
        if abs(_mean(cell) - _mean(first)) <= _spread(first, cell) or math.isclose(_mean(cell), _mean(first))
    ]
    behind = [cell for cell in others if cell not in tied]
    detail = _value(first, scale)
    if behind:
        gap, spread = abs(_mean(behind[0]) - _mean(first)), _spread(first, behind[0])
        points = " points" if scale.unit == "%" else ""
        detail += f", {scale.number(gap)}{points} better than {behind[0].rule}"
        detail += f" = {gap / spread:.1f} standard deviations" if spread else ""
    guess = bool(behind) and first.std is None and behind[0].std is None
    return _Row(
        trace=first.trace,
        leaders=(first.rule, *(cell.rule for cell in tied)),
        same=bool(tied) and all(math.isclose(_mean(cell), _mean(first), rel_tol=1e-9) for cell in tied),
        everyone=not behind,
        guess=guess,
        detail=detail,
    )


def _clauses(rows: list[_Row]) -> list[str]:
    """One clause for all traces on which the same rules lead."""
    groups: dict[tuple[frozenset[str], bool, bool, bool], list[_Row]] = {}
    for row in rows:
        groups.setdefault((frozenset(row.leaders), row.same, row.everyone, row.guess), []).append(row)
    clauses = []
    for (leaders, same, everyone, guess), members in groups.items():
        traces = _join(row.trace for row in members)
        names = _join(members[0].leaders)
        if len(leaders) == 1 and everyone:
            clauses.append(f"only {names} has a result on {_join(f'{row.trace} ({row.detail})' for row in members)}")
        elif len(leaders) == 1:
            verb = "is ahead" if guess else "is best"
            clauses.append(f"{names} {verb} on {_join(f'{row.trace} ({row.detail})' for row in members)}")
        elif same:
            clauses.append(f"{names} give the same result on {traces}")
        elif everyone:
            clauses.append(f"{names} cannot be told apart on {traces} with these seeds (within one standard deviation)")
        else:
            details = _join(f"{row.trace} ({row.detail})" for row in members)
            clauses.append(f"{names} share the lead on {details}")
    return clauses


def _losses(summary: Summary) -> str:
    """Which rules diverged where, and how many arms have no result for another reason."""
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
        told = _join(f"{count} {name}" for name, count in counts.items() if count)
        parts.append(f"The table is not complete: {told}.")
    return " ".join(parts)


def _by_rank(cells: list[Cell]) -> list[Cell]:
    """The best mean first."""
    return sorted(cells, key=lambda cell: _mean(cell) * (-1 if cell.higher_is_better else 1))


def _mean(cell: Cell) -> float:
    assert cell.mean is not None, "only cells with a result take part"
    return cell.mean


def _spread(a: Cell, b: Cell) -> float:
    return max(a.std or 0.0, b.std or 0.0)


def _value(cell: Cell, scale: Scale) -> str:
    return f"{scale.number(_mean(cell))}{' %' if scale.unit == '%' else ''}"


def _metric(cell: Cell) -> str:
    return f"{'an' if cell.metric[:1] in 'aeiou' else 'a'} {cell.metric} of"


def _join(parts: Iterable[str]) -> str:
    """A list in words.

    >>> _join(["a", "b", "c"])
    'a, b and c'
    """
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last
