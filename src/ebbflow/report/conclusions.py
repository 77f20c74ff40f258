"""What a user should conclude from the tables, in sentences: the verdicts of `decide` in words, and what is missing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from ebbflow.core.units import format_seconds
from ebbflow.report.intervals import CONFIDENCE, difference_interval
from ebbflow.report.summary import Cell, NumberFormat, Summary, Verdict
from ebbflow.report.targets import ToTarget

__all__ = ["takeaways"]

_FAR = 0.1
"""A rule is far behind if it is worse than the best by more than this fraction of the best."""


def takeaways(summary: Summary) -> list[str]:
    """The conclusions: one text per workload, then one about what is not in the table."""
    texts = [_conclusion(summary, workload) for workload in summary.workloads]
    return [text for text in [*texts, *_targets(summary), _losses(summary)] if text]


def _all_diverged(summary: Summary, workload: str) -> bool:
    """Whether all arms have ended, none with a result."""
    lost = [name for cell in summary.cells_of(workload) for name, _ in cell.lost]
    return set(lost) == {"diverged"} and not any(cell.missing for cell in summary.cells_of(workload))


def _conclusion(summary: Summary, workload: str) -> str:
    verdicts = summary.verdicts(workload)
    if not verdicts:
        if ended := sum(len(cell.not_validated) for cell in summary.cells_of(workload)):
            runs = "the run has" if ended == 1 else f"{ended} runs have"
            return f"On {workload} {runs} finished without a validation (a Session takes evaluate=): there is no score."
        yet = "" if _all_diverged(summary, workload) else " yet"
        return f"On {workload} no arm has finished, so nothing can be said{yet}."
    numbers = summary.number_format(workload)
    cells = [cell for cell in summary.cells_of(workload) if cell.mean is not None]
    if len({cell.rule for cell in cells}) == 1:
        results = _join(f"{_value(cell, numbers)} on {cell.trace}" for cell in cells)
        article = "an" if cells[0].metric[:1] in "aeiou" else "a"
        return f"On {workload}, {cells[0].rule} reaches {article} {cells[0].metric} of {results}."
    groups: dict[tuple[frozenset[str], str, str], list[tuple[str, str]]] = {}
    for verdict in verdicts:  # traces about which the same is to be said are named together
        names = [cell.rule for cell in (verdict.first, *verdict.tied)]
        what, where, after = _clause(verdict, numbers)
        groups.setdefault((frozenset(names), what, after), []).append((_join(names), where))
    clauses = [
        what.format(members[0][0]) + f" on {_join(where for _, where in members)}{after}"
        for (_, what, after), members in groups.items()
    ]
    return f"On {workload}, {'; '.join(clauses)}.{_far_behind(verdicts, numbers)}"


def _clause(verdict: Verdict, numbers: NumberFormat) -> tuple[str, str, str]:
    """What is said of the first rules ({}), the trace with its numbers, and what is said after it."""
    first, trace = verdict.first, verdict.first.trace
    where = f"{trace} ({_value(first, numbers)}{_lead(verdict, numbers)})"
    single = _join(cell.rule for cell in verdict.unknown) if verdict.unknown else ""
    if verdict.winners:
        what = "is best" if len(verdict.winners) == 1 else "share the lead"
        return f"{{}} {what}", where, f" ({single}: one run, no interval)" if single else ""
    if verdict.unclear:
        others = _join(f"{cell.rule} ({_value(cell, numbers)})" for cell in verdict.unclear)
        rest = f"; {single}: one run, no interval" if single else ""
        after = f", but {others} cannot be told apart from {first.rule} with these seeds{rest}"
        return f"{{}} {'are' if verdict.tied else 'is'} ahead", where, after
    if not verdict.tied and not verdict.unknown:
        return "only {} has a result", where, ""
    if not single and all(math.isclose(_mean(cell), _mean(first), rel_tol=1e-9) for cell in verdict.tied):
        return "{} give the same result", trace, ""
    if single and all(_same(cell, first, numbers) for cell in (*verdict.tied, *verdict.unknown)):
        return f"{{}} and {single} give the same result", trace, " to the digits shown"
    if single and (not verdict.tied or len(first.values) == 1):
        whose = "there is one run" if len(first.values) == 1 else f"{single} has one run"
        return f"{{}} {'are' if verdict.tied else 'is'} ahead", where, f", but {whose}: no interval"
    rest = f"; {single}: one run, no interval" if single else ""
    return "{} cannot be told apart", trace, f" with these seeds (the {CONFIDENCE} intervals include 0{rest})"


def _lead(verdict: Verdict, numbers: NumberFormat) -> str:
    """How much better the first is than the best of those that are behind, or of those that have only one run."""
    if not (others := verdict.behind or verdict.unknown):
        return ""
    first, second = verdict.first, others[0]
    points = " points" if numbers.unit == "%" else ""
    text = f", {numbers.number(abs(_mean(first) - _mean(second)))}{points} better than {second.rule}"
    interval = difference_interval(first.values, second.values)
    if interval is not None:
        low, high = sorted(map(abs, interval))  # it does not include zero
        text += f", {CONFIDENCE} interval {numbers.number(low)} to {numbers.number(high)}"
    return text


def _far_behind(verdicts: list[Verdict], numbers: NumberFormat) -> str:
    """The rules to avoid on a trace: worse than its best by more than a tenth, and not by chance as far as is known."""
    warned = [
        f"{cell.rule} on {cell.trace} ({_value(cell, numbers)}{'' if len(cell.values) > 1 else ', one run'})"
        for verdict in verdicts
        for cell in (*verdict.behind, *verdict.unknown)
        if abs(_mean(cell) - _mean(verdict.first)) > _FAR * abs(_mean(verdict.first))
        and not _same(cell, verdict.first, numbers)  # a tenth of next to nothing
    ]
    return f" Far behind: {_join(warned)}." if warned else ""


def _reached(to: ToTarget) -> str:
    """How many of the runs reach the target."""
    if not to.reached:
        return "never" if to.runs == 1 else f"none of {to.runs} runs"
    return f"{to.reached} of {to.runs} run{'s' if to.runs > 1 else ''}"


def _targets(summary: Summary) -> list[str]:
    """Which rule reaches each target first on each trace, and which never does."""
    texts = []
    for workload in summary.workloads:
        cells = summary.cells_of(workload)
        for number, target in enumerate(summary.targets_of(workload)):
            goal = summary.goal(workload, target)
            none: list[str] = []
            said = []
            for trace in summary.traces_of(workload):
                row = {c.rule: c.targets[number] for c in cells if c.trace == trace and c.targets[number].runs}
                if row and not any(to.reached for to in row.values()):
                    none.append(trace)
                elif row:
                    said.append(
                        f"On {workload}, {trace}: {_first_there(row, goal, fitted=workload in summary.fitted)}."
                    )
            texts += said
            if none:
                texts.append(f"On {workload}, {_join(none)}: no run reaches {goal}.")
    return texts


def _first_there(row: Mapping[str, ToTarget], goal: str, *, fitted: bool) -> str:
    """Which rules of a row reach a target first, and which runs do not; in epochs where times were fitted."""
    by = "epochs" if fitted else "time_s"
    whole = {rule: to.mean(by) or 0.0 for rule, to in row.items() if to.reached == to.runs}
    missed = [f"{rule} ({_reached(to)})" for rule, to in row.items() if rule not in whole]
    parts = []
    if whole:
        least = min(whole.values())
        quickest = [rule for rule, time in whole.items() if math.isclose(time, least)]
        verb = "reaches" if len(quickest) == 1 else "reach"
        first = " first," if len(row) > 1 else ""
        after = f"{least:.3g} epoch{'' if least == 1 else 's'}" if fitted else format_seconds(least)
        parts.append(f"{_join(quickest)} {verb} {goal}{first} after {after}")
    if missed:
        parts.append(f"not every run reaches {'it' if whole else goal}: {_join(missed)}")
    return "; ".join(parts)


def _losses(summary: Summary) -> str:
    """Which rules diverged on which traces, and how many arms have no result for another reason."""
    diverged = [
        f"{cell.rule} on {cell.trace} ({len(cell.diverged)} of {cell.seeds} seed{'s' if cell.seeds > 1 else ''}"
        + (f", {cell.workload})" if len(summary.workloads) > 1 else ")")
        for cell in summary.cells
        if cell.diverged
    ]
    parts = [f"Diverged: {_join(diverged)}."] if diverged else []
    scored = {cell.workload for cell in summary.cells if cell.mean is not None}  # of others it was said above
    counts = {
        "not validated": sum(len(cell.not_validated) for cell in summary.cells if cell.workload in scored),
        "failed": sum(len(cell.failed) for cell in summary.cells),
        "unfinished": sum(len(cell.interrupted) for cell in summary.cells),
        "missing": sum(len(cell.missing) for cell in summary.cells),
    }
    if any(counts.values()):
        parts.append(f"The table is not complete: {_join(f'{n} {name}' for name, n in counts.items() if n)}.")
    return " ".join(parts)


def _mean(cell: Cell) -> float:
    assert cell.mean is not None, "only cells with a result are ranked"
    return cell.mean


def _same(one: Cell, other: Cell, numbers: NumberFormat) -> bool:
    """Whether a reader of the table sees the same number for both."""
    return numbers.number(_mean(one)) == numbers.number(_mean(other))


def _value(cell: Cell, numbers: NumberFormat) -> str:
    return f"{numbers.number(_mean(cell))}{' %' if numbers.unit == '%' else ''}"


def _join(parts: Iterable[str]) -> str:
    """A list in words.

    >>> _join(["a", "b", "c"])
    'a, b and c'
    """
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last
