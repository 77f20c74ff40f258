"""Regrets, guard, ablations and costs of `auto`, from the rows that `atlas.py collect` writes.

    python regrets.py arms.json [--cells]

The regret of a rule in a cell is the score of the best fixed rule minus its own, both as means over the seeds, in
points of accuracy or in nats of loss. It is negative where a rule is better than every fixed one, which only `auto` can
be. A run that diverged counts as 50 points (2 nats) behind the best. Cells in which a fixed rule or `auto` has no run
are left out.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, variance
from typing import Any

HALVES = ("development", "report")
NATS_PER_POINT = 0.04
"""The bar has 0.02 nats where it has 0.5 points."""
DIVERGED = 50.0
BAD = 5.0
"""A run this many points behind the best is a bad one, as the guard should see it."""
MEAN_BAR, WORST_BAR, ALARM_BAR, OVERHEAD_BAR = 0.5, 2.0, 0.10, 0.05
VOID_BELOW = 0.3

Row = Mapping[str, Any]


@dataclass(frozen=True)
class AtlasCell:
    """The runs of one cell, with scores in points: a nat of loss is 25 of them, and higher is better."""

    name: tuple[str, str, float, str]
    """Workload, fleet, factor of the base rate, length."""
    unit: str
    """What the score was: points or nats."""
    half: str
    fixed: Mapping[str, float]
    """Mean score by fixed rule."""
    auto: Mapping[str, float]
    """Mean score by text of the automatic rule and its ablations."""
    standard_error: float | None
    """Of the difference of two means, from the seeds of all rules of the cell; None with one seed."""
    rows: tuple[Row, ...]

    @property
    def best(self) -> float:
        """The score of the best fixed rule."""
        return max(self.fixed.values())

    def regret(self, rule: str) -> float:
        """How far a rule is behind the best fixed one, in points."""
        return self.best - {**self.fixed, **self.auto}[rule]


def family_name(rule: str) -> str:
    """The name of a rule without the length of a fixed warm-up, which differs between cells.

    >>> family_name("linear+warmup(0.15ep, start=0)"), family_name("adascale+statewarmup(0.05)")
    ('linear+warmup', 'adascale+statewarmup(0.05)')
    """
    return rule.partition("+warmup(")[0] + ("+warmup" if "+warmup(" in rule else "")


def make_cells(rows: Iterable[Row]) -> list[AtlasCell]:
    """The cells that have every fixed rule and `auto`, in the order of their names."""
    grouped: dict[tuple[str, str, float, str], list[Row]] = defaultdict(list)
    for row in rows:
        grouped[row["workload"], row["fleet"], row["rate"], row["length"]].append(row)
    rules: dict[tuple[str, str], set[str]] = defaultdict(set)  # the fixed rules of a model's runs of one length
    for (workload, _, _, length), runs in grouped.items():
        rules[workload, length] |= {row["rule"] for row in runs if not is_auto(row["rule"])}
    found = []
    for name, runs in sorted(grouped.items()):
        by_rule: dict[str, list[Row]] = defaultdict(list)
        for row in runs:
            by_rule[row["rule"]].append(row)
        fixed = rules[name[0], name[3]]
        if "auto" not in by_rule or not fixed or not fixed <= by_rule.keys():
            continue
        scores = _scores(by_rule)
        found.append(AtlasCell(
            name=name, unit="points" if runs[0]["higher"] else "nats", half=runs[0]["half"],
            fixed={rule: score for rule, score in scores.items() if not is_auto(rule)},
            auto={rule: score for rule, score in scores.items() if is_auto(rule)},
            standard_error=_standard_error(by_rule), rows=tuple(runs),
        ))  # fmt: skip
    return found


def is_auto(rule: str) -> bool:
    """Whether this is the automatic rule or one of its ablations."""
    return rule.partition("(")[0] == "auto"


def in_points(row: Row) -> float | None:
    """The score of a run in points, higher is better; None if it diverged.

    >>> in_points({"score": 0.5, "higher": True}), in_points({"score": 2.0, "higher": False})
    (50.0, -50.0)
    """
    if row["score"] is None:
        return None
    return 100 * float(row["score"]) if row["higher"] else -float(row["score"]) / NATS_PER_POINT


def _scores(by_rule: Mapping[str, Sequence[Row]]) -> dict[str, float]:
    """Mean score by rule, in points; a run that diverged is a fixed distance behind the best."""
    points = {rule: [in_points(row) for row in runs] for rule, runs in by_rule.items()}
    finite = [value for values in points.values() for value in values if value is not None]
    floor = max(finite) - DIVERGED if finite else 0.0
    return {rule: fmean(floor if value is None else value for value in values) for rule, values in points.items()}


def _standard_error(by_rule: Mapping[str, Sequence[Row]]) -> float | None:
    variances = []
    for runs in by_rule.values():
        values = [value for row in runs if (value := in_points(row)) is not None]
        if len(values) > 1:
            variances.append(variance(values) / len(values))
    return math.sqrt(2 * fmean(variances)) if variances else None


@dataclass(frozen=True)
class RegretSummary:
    """Regrets of one rule over cells, in points."""

    rule: str
    cells: int
    mean: float
    worst: float
    beyond: int
    """Cells whose regret is above two points and two standard errors."""
    wins: int
    """Cells in which no other rule of the table was better."""


def summarise_regrets(cells: Sequence[AtlasCell]) -> list[RegretSummary]:
    """One row per rule that all cells have, the smallest mean first."""
    names = [{family_name(rule): rule for rule in (*cell.fixed, "auto")} for cell in cells]
    shared = set.intersection(*(set(one) for one in names)) if names else set()
    found = []
    for rule in sorted(shared):
        regrets = [cell.regret(own[rule]) for cell, own in zip(cells, names, strict=True)]
        limits = [max(WORST_BAR, 2 * (cell.standard_error or 0.0)) for cell in cells]
        wins = sum(
            regret <= min(cell.regret(other) for other in own.values())
            for cell, own, regret in zip(cells, names, regrets, strict=True)
        )
        beyond = sum(regret > limit for regret, limit in zip(regrets, limits, strict=True))
        found.append(RegretSummary(rule, len(cells), fmean(regrets), max(regrets), beyond, wins))
    return sorted(found, key=lambda one: one.mean)


@dataclass(frozen=True)
class GuardSummary:
    """What the guard did, over the runs of `auto` and those without it."""

    runs: int
    alarms: int
    """Runs that went back at least once."""
    good: int
    """Runs that end less than five points behind the best fixed rule without the guard."""
    false_alarms: int
    """Of these, the ones in which the guard went back."""
    bad: int
    seen: int
    """Of the bad ones, the ones in which the guard went back."""

    @property
    def rate(self) -> float:
        """False alarms as a part of the good runs."""
        return self.false_alarms / self.good if self.good else 0.0


def summarise_guard(cells: Sequence[AtlasCell]) -> GuardSummary:
    """Whether the guard acts where the same run without it is a bad one, and only there."""
    alarms = good = false = bad = seen = runs = 0
    for cell in cells:
        unguarded = {row["seed"]: in_points(row) for row in cell.rows if row["rule"] == "auto(guard=false)"}
        for row in cell.rows:
            if row["rule"] != "auto" or row["seed"] not in unguarded:
                continue
            score, alarm = unguarded[row["seed"]], row["restores"] > 0
            fine = score is not None and score > cell.best - BAD
            runs, alarms = runs + 1, alarms + alarm
            good, false = good + fine, false + (fine and alarm)
            bad, seen = bad + (not fine), seen + (alarm and not fine)
    return GuardSummary(runs, alarms, good, false, bad, seen)


@dataclass(frozen=True)
class AblationSummary:
    """What a part of `auto` is worth: the score of `auto` minus that of a variant, in points."""

    rule: str
    cells: int
    mean: float
    least: float
    most: float
    changed: int
    """Cells in which the part changed the result at all."""


def summarise_ablations(cells: Sequence[AtlasCell]) -> list[AblationSummary]:
    """One row per ablation; both are compared over the seeds that the ablation has."""
    found = []
    for rule in sorted({rule for cell in cells for rule in cell.auto} - {"auto"}):
        gains = [_gain_of_part(cell, rule) for cell in cells if rule in cell.auto]
        found.append(AblationSummary(rule, len(gains), fmean(gains), min(gains), max(gains), sum(map(bool, gains))))
    return found


def _gain_of_part(cell: AtlasCell, rule: str) -> float:
    seeds = {row["seed"] for row in cell.rows if row["rule"] == rule}
    both = {one: [row for row in cell.rows if row["rule"] == one and row["seed"] in seeds] for one in ("auto", rule)}
    scores = _scores(both)
    return scores["auto"] - scores[rule]


def overhead(cells: Sequence[AtlasCell]) -> tuple[float, float]:
    """Samples that `auto` gave back, as a part of all: in the mean, and at most.

    Wall time is not among it: the rows come from machines with other loads. `benchmarks/auto_overhead.py` measures it.
    """
    parts = [
        row["given_back"] / row["samples"]
        for cell in cells for row in cell.rows if row["rule"] == "auto" and row["score"] is not None
    ]  # fmt: skip
    return (fmean(parts), max(parts)) if parts else (0.0, 0.0)


def verdicts(cells: Sequence[AtlasCell]) -> list[tuple[str, str, bool]]:
    """Each condition of the bar, what was found, and whether it is met."""
    found: list[tuple[str, str, bool]] = []
    for unit in sorted({cell.unit for cell in cells}):
        part = [cell for cell in cells if cell.unit == unit]
        factor = 1.0 if unit == "points" else NATS_PER_POINT
        regrets = summarise_regrets(part)
        (own,) = [one for one in regrets if one.rule == "auto"]
        found.append(
            (f"mean regret at most {MEAN_BAR * factor:g} {unit}", f"{own.mean * factor:.3f}", own.mean <= MEAN_BAR)
        )
        limit = f"{WORST_BAR * factor:g} {unit} or two standard errors"
        found.append((f"no regret above {limit}", f"{own.beyond} of {own.cells} cells", own.beyond == 0))
        for family in sorted({tuple(sorted(map(family_name, cell.fixed))) for cell in part}):
            cells_of = [cell for cell in part if tuple(sorted(map(family_name, cell.fixed))) == family]
            rows = summarise_regrets(cells_of)
            (ours,) = [one for one in rows if one.rule == "auto"]
            least = min((one for one in rows if one.rule != "auto"), key=lambda one: one.worst)
            shown = f"{ours.worst * factor:.3f}; {least.rule} {least.worst * factor:.3f}"
            found.append((f"worst regret below that of every fixed rule ({unit})", shown, ours.worst < least.worst))
    guard = summarise_guard(cells)
    shown = f"{guard.false_alarms} of {guard.good} good runs"
    found.append((f"guard false alarms at most {ALARM_BAR:.0%}", shown, guard.rate <= ALARM_BAR))
    mean, most = overhead(cells)
    found.append(
        (f"samples given back at most {OVERHEAD_BAR:.0%}", f"mean {mean:.1%}, most {most:.1%}", most <= OVERHEAD_BAR)
    )
    elsewhere = fmean(
        not max(cell.fixed, key=lambda rule, cell=cell: cell.fixed[rule]).startswith("adascale+") for cell in cells
    )  # fmt: skip
    found.append(
        (f"another rule than adascale is best in {VOID_BELOW:.0%} or more", f"{elsewhere:.0%}", elsewhere >= VOID_BELOW)
    )
    return found


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, [":--", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def tables(cells: Sequence[AtlasCell], *, each: bool = False) -> str:
    """All tables as Markdown, the report half first."""
    parts = []
    for which in (*reversed(HALVES), "both"):
        own = [cell for cell in cells if which in (cell.half, "both")]
        if not own:
            continue
        parts.append(f"## {which}: {len(own)} cells\n")
        parts.append(_table(["bar", "found", "met"], [(a, b, "yes" if c else "no") for a, b, c in verdicts(own)]))
        kinds = sorted({(cell.unit, cell.name[3], tuple(sorted(map(family_name, cell.fixed)))) for cell in own})
        for unit, length, rules in kinds:
            part = [cell for cell in own if (cell.unit, cell.name[3]) == (unit, length)
                    and tuple(sorted(map(family_name, cell.fixed))) == rules]  # fmt: skip
            factor = 1.0 if unit == "points" else NATS_PER_POINT
            parts.append(_table(
                [f"regret in {unit}, {len(part)} {length} cells", "mean", "worst", "beyond the bar", "best or equal"],
                [(f"`{one.rule}`", f"{one.mean * factor:.3f}", f"{one.worst * factor:.3f}",
                  str(one.beyond), str(one.wins)) for one in summarise_regrets(part)],
            ))  # fmt: skip
        parts.append(_table(
            ["auto minus this variant, in points", "cells", "changed", "mean", "least", "most"],
            [(f"`{one.rule}`", str(one.cells), str(one.changed), f"{one.mean:+.2f}", f"{one.least:+.2f}",
              f"{one.most:+.2f}") for one in summarise_ablations(own)],
        ))  # fmt: skip
        guard = summarise_guard(own)
        parts.append(
            f"Guard: {guard.alarms} of {guard.runs} runs went back; {guard.seen} of {guard.bad} bad runs were seen, "
            f"{guard.false_alarms} of {guard.good} good ones.\n"
        )
    if each:
        parts.append(_table(
            ["cell", "half", "best fixed rule", "its score", "auto", "regret", "standard error", "restores", "moves"],
            [_cell_row(cell) for cell in cells],
        ))  # fmt: skip
    return "\n".join(parts)


def _cell_row(cell: AtlasCell) -> list[str]:
    best = max(cell.fixed, key=lambda rule: cell.fixed[rule])
    factor = 1.0 if cell.unit == "points" else -NATS_PER_POINT
    error = "" if cell.standard_error is None else f"{cell.standard_error * abs(factor):.3f}"
    own = [row for row in cell.rows if row["rule"] == "auto"]
    workload, fleet, rate, length = cell.name
    return [
        f"{workload}, {fleet}, x{rate:g}, {length}", cell.half, f"`{best}`", f"{cell.best * factor:.3f}",
        f"{cell.auto['auto'] * factor:.3f}", f"{cell.regret('auto') * abs(factor):.3f}", error,
        str(sum(row["restores"] for row in own)), str(sum(row["moves"] for row in own)),
    ]  # fmt: skip


def main() -> None:
    """Print the tables of the rows in a file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, nargs="+")
    parser.add_argument("--cells", action="store_true", help="Also one row per cell.")
    asked = parser.parse_args()
    rows = [row for path in asked.file for row in json.loads(path.read_text(encoding="utf-8"))]
    print(tables(make_cells(rows), each=asked.cells))


if __name__ == "__main__":
    main()
