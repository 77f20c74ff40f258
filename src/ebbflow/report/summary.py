"""Scores, times and costs over seeds: the cells of the tables, and which rules of a row are best.

The score of a run is the mean of its last validations: a third of them, at least one and at most three. (Three are
those of Andre, Strati and Klimovic, DistributedML 2022, Tables 1 to 3.) A cell is the mean of the scores over the
seeds, with the 95 % interval of that mean. A run that diverged, failed, did not finish or was never validated is named
in its cell and never averaged in.

`decide` says which rules of a row are best, or that nothing can be told. Tables mark what it says, and the conclusions
(`conclusions.py`) put it into words.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ebbflow.errors import ConfigError
from ebbflow.report.intervals import difference_interval, mean_margin
from ebbflow.report.published import PaperValue, read_paper
from ebbflow.report.results import ArmResult, Array
from ebbflow.report.targets import Target, ToTarget, at_reference_batch, effort_to, parse_target, speed_ups

__all__ = [
    "Cell",
    "NumberFormat",
    "Summary",
    "Verdict",
    "decide",
    "ended_well",
    "outcome",
    "run_value",
    "score_window",
    "summarise",
]

_MOST_VALIDATIONS = 3
_PART_OF_VALIDATIONS = 3
"""A score covers at most one in this many validations."""
_NOT_VALIDATED = "not validated"
_AXES = ("workloads", "traces", "rules")
_HUGE = 1e6
"""Larger numbers are written with an exponent."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One rule on one trace and workload, over its seeds."""

    workload: str
    trace: str
    rule: str
    metric: str
    higher_is_better: bool
    values: tuple[float, ...]
    """The score of each seed that finished, in the order of the seeds; as recorded: an accuracy is a fraction."""
    finished: tuple[int, ...] = ()
    """The seeds that finished and have a score; the next fields hold the others."""
    not_validated: tuple[int, ...] = ()
    """The seeds that finished without any validation: they have no score."""
    diverged: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    interrupted: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    best: bool = False
    """Whether `decide` calls this rule one of the best of its row."""
    window: int = 0
    """The most validations that the score of one of these runs is the mean of."""
    steps: float | None = None
    """Mean number of steps over the seeds that finished, validated or not, as in the next five fields."""
    samples: float | None = None
    """Mean number of samples that were trained on."""
    dropped: float | None = None
    """Mean number of samples that the policy `drop` dropped."""
    time_s: float | None = None
    """Mean time on the clock of the trace, or of the workers if there was none."""
    worker_hours: float | None = None
    """Mean of the available workers times the hours: what had to be paid for."""
    usd_per_hour: float | None = None
    """Price of one worker; None if it is not known."""
    simulated_s: Mapping[str, float] = field(default_factory=dict)
    """Mean simulated time of the whole run by each clock, over the seeds that finished."""
    targets: tuple[ToTarget, ...] = ()
    """What it took to each target that was asked for."""
    published: float | None = None
    """The value in the paper that the study follows, in the units of `mean`."""
    published_steps: float | None = None
    """The number of steps in that paper."""
    scores: Mapping[str, float | None] = field(default_factory=dict)
    """The other scores of the record, by name: means over the seeds that finished; None if one was not finite."""
    published_scores: Mapping[str, float] = field(default_factory=dict)
    """Other scores in that paper, by their names in the record."""

    @property
    def mean(self) -> float | None:
        """Mean score over the seeds that finished; None if none did."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def std(self) -> float | None:
        """Sample standard deviation of the scores; None with fewer than two."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def margin(self) -> float | None:
        """Half the width of the 95 % interval of the mean; None with fewer than two runs."""
        return mean_margin(self.values)

    def cost_usd(self, worker_hours: float | None) -> float | None:
        """What these hours cost; None if the price or the hours are not known."""
        return None if worker_hours is None or self.usd_per_hour is None else worker_hours * self.usd_per_hour

    @property
    def seeds(self) -> int:
        """The number of runs that have a record, however they ended."""
        ended = (self.finished, self.not_validated, self.diverged, self.failed, self.interrupted)
        return sum(map(len, ended))

    @property
    def lost(self) -> list[tuple[str, tuple[int, ...]]]:
        """(what happened, seeds) for the seeds that are not in the mean."""
        kinds = {
            _NOT_VALIDATED: self.not_validated,
            "diverged": self.diverged,
            "failed": self.failed,
            "unfinished": self.interrupted,
            "missing": self.missing,
        }
        return [(name, seeds) for name, seeds in kinds.items() if seeds]

    def as_json(self, target: int = 0) -> dict[str, Any]:
        """The cell as `ebbflow report --json` prints it; the first seven keys are fixed.

        The keys that begin with target_ are about the first target, or that of this number; `targets` has all.
        """
        to = self.targets[target] if self.targets else None
        hours = to.mean("worker_hours") if to else None
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
            "not_validated": len(self.not_validated),
            "metric": self.metric,
            "higher_is_better": self.higher_is_better,
            "values": list(self.values),
            "best": self.best,
            "steps": self.steps,
            "samples": self.samples,
            "dropped": self.dropped,
            "published": self.published,
            "published_steps": self.published_steps,
            "margin_95": self.margin,
            "window": self.window,
            "time_s": self.time_s,
            "worker_hours": self.worker_hours,
            "cost_usd": self.cost_usd(self.worker_hours),
            "target": to.target if to else None,
            "target_reached": to.reached if to else None,
            "target_time_s": to.mean("time_s") if to else None,
            "target_worker_hours": hours,
            "target_cost_usd": self.cost_usd(hours),
            "target_samples": to.mean("samples") if to else None,
            "target_runs": to.runs if to else None,
            "target_epochs": to.mean("epochs") if to else None,
            "target_epochs_std": to.std("epochs") if to else None,
            "target_updates": to.mean("updates") if to else None,
            "target_updates_std": to.std("updates") if to else None,
            "target_time_s_std": to.std("time_s") if to else None,
            "target_wall_s": to.mean("wall_s") if to else None,
            "target_wall_s_std": to.std("wall_s") if to else None,
            "target_speed_up_updates": to.speed_ups.get("updates") if to else None,
            "target_published_epochs": to.published.get("epochs") if to else None,
            "target_published_updates": to.published.get("updates") if to else None,
            "target_published_time_s": to.published.get("time_s") if to else None,
            "targets": [each.as_json() for each in self.targets],
            "simulated_s": dict(self.simulated_s),
            "scores": dict(self.scores),
            "published_scores": dict(self.published_scores),
        }


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """How the values of a workload are written: accuracies in percent, with as many decimals as the spread needs."""

    factor: float
    unit: str
    decimals: int

    @classmethod
    def for_cells(cls, cells: Iterable[Cell]) -> NumberFormat:
        """The fewest decimals that show every interval above zero, up to two more than usual."""
        cells = list(cells)
        percent = bool(cells) and cells[0].metric == "accuracy"
        factor, usual = (100.0, 1) if percent else (1.0, 3)
        spreads = [cell.margin * factor for cell in cells if cell.margin and cell.margin > 1e-9]  # less is rounding
        decimals = usual
        while decimals < usual + 2 and any(round(spread, decimals) == 0 for spread in spreads):
            decimals += 1
        return cls(factor=factor, unit="%" if percent else "", decimals=decimals)

    def heading(self, metric: str) -> str:
        """The name of a column of these values."""
        return f"{metric} (%)" if self.unit else metric

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
    sources: tuple[str, ...] = ()
    """The sources of published values, without those that are about a target."""
    scaled: float | None = None
    """The fraction of its epochs to which the study was scaled down; then published values are not comparable."""
    baselines: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """(trace, rule) of the runs at the reference batch, for each workload that has some: what speed-ups are over."""
    stand_in: str | None = None
    """The data that stands in for the paper's; then published values are not comparable."""
    fitted: frozenset[str] = frozenset()
    """Workloads whose step time was fitted to their trace or epoch, so that times are not those of any machine."""
    measured: frozenset[str] = frozenset()
    """Workloads whose steps nothing planned, as in a live fleet: times are those of the real workers."""
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

    def verdicts(self, workload: str) -> list[Verdict]:
        """What `decide` says about each row of the workload's table that has a result."""
        cells = self.cells_of(workload)
        rows = ([cell for cell in cells if cell.trace == trace] for trace in self.traces_of(workload))
        return [verdict for row in rows if (verdict := decide(row))]

    def number_format(self, workload: str) -> NumberFormat:
        """How the values of this workload are written."""
        return NumberFormat.for_cells(self.cells_of(workload))

    def baseline(self, workload: str) -> Cell | None:
        """The cell whose runs are at the reference batch; None if the study has none."""
        return self.cell(workload, *self.baselines[workload]) if workload in self.baselines else None

    def targets_of(self, workload: str) -> list[float]:
        """The scores that were asked for."""
        return [to.target for to in self.cells_of(workload)[0].targets]

    def goal(self, workload: str, target: float) -> str:
        """A target with its metric, in words: accuracy 90.0 %."""
        numbers = self.number_format(workload)
        return f"{self.cells_of(workload)[0].metric} {numbers.number(target)}{' %' if numbers.unit else ''}"

    def as_json(self) -> dict[str, Any]:
        """What `ebbflow report --json` prints."""
        return {"cells": [cell.as_json() for cell in self.cells]}


def score_window(validations: int) -> int:
    """How many of the last validations the score of a run is the mean of.

    >>> [score_window(count) for count in (1, 3, 6, 9, 90)]
    [1, 1, 2, 3, 3]
    """
    return min(max(validations // _PART_OF_VALIDATIONS, 1), _MOST_VALIDATIONS)


def run_value(arm: ArmResult) -> float | None:
    """The score of a run: the mean of its last validations (`score_window`); None unless each is a finite number."""
    return _last_mean(arm.values)


def _last_mean(values: Array) -> float | None:
    last = [float(value) for value in values[-score_window(values.size) :]]
    return statistics.fmean(last) if last and all(map(math.isfinite, last)) else None


def outcome(arm: ArmResult) -> str:
    """The status of an arm. One that finished without a finite result counts as diverged.

    One that finished without any validation has ended well, but has no score: it is not validated.
    """
    if arm.status != "finished" or run_value(arm) is not None:
        return arm.status
    return "diverged" if arm.values.size else _NOT_VALIDATED


def ended_well(arm: ArmResult) -> bool:
    """Whether a run trained to its end, and no result of it is not finite."""
    return outcome(arm) in ("finished", _NOT_VALIDATED)


def summarise(
    arms: Iterable[ArmResult],
    config: Mapping[str, Any] | None = None,
    *,
    targets: Sequence[float | str] = (),
    usd_per_hour: float | None = None,
) -> Summary:
    """The cells of these arms; workloads, traces and rules in the order of the configuration, then of appearance.

    The configuration of the study also has the published values: `paper`, a list of {workload, trace, rule, value,
    source, what}, where `parse_quantity` reads `what`. `targets` are scores to reach, as `parse_target` reads them.
    Without any, they are the targets that were published for each workload, unless the study is scaled or on data that
    stands in for the paper's: such runs would hardly reach them. `usd_per_hour` is the price of one worker.
    """
    config = config or {}
    paper = read_paper(config)
    groups: dict[tuple[str, str, str], list[ArmResult]] = {}
    examples: dict[str, ArmResult] = {}  # an arm of each workload, one whose header has the metric if there is one
    for arm in arms:
        if arm.status == "unreadable":
            continue
        groups.setdefault((arm.workload, arm.trace, arm.rule), []).append(arm)
        if arm.workload not in examples or not _has_metric(examples[arm.workload]):
            examples[arm.workload] = arm
    workloads, traces, rules = (
        _ordered_names(config.get(key), [found[axis] for found in groups]) for axis, key in enumerate(_AXES)
    )
    keys = [(w, t, r) for w in workloads for t in traces for r in rules if (w, t, r) in groups]
    more: dict[str, Any] = {"usd_per_hour": usd_per_hour}
    cells = [replace(_make_cell(key, groups[key], examples[key[0]]), **more) for key in keys]
    cells = [replace(cell, **_published(paper, cell)) for cell in cells]
    baselines = _baselines(keys, groups)
    given = [parse_target(str(target)) for target in targets]
    _check_targets(given, cells)
    comparable = config.get("scale") is None and config.get("stand_in") is None
    asked = {name: given or (_published_targets(paper, name) if comparable else []) for name in workloads}
    cells = _with_published(paper, _with_targets(asked, cells, groups, baselines))
    present = [arm for key in keys for arm in groups[key]]
    return Summary(
        workloads=workloads,
        traces=traces,
        rules=rules,
        cells=tuple(_mark_best(cells)),
        sources=tuple(dict.fromkeys(value.source for value in paper if value.quantity.target is None)),
        scaled=config.get("scale"),
        baselines=baselines,
        stand_in=config.get("stand_in"),
        fitted=frozenset(
            arm.workload for arm in present if not _measured(arm) and _step_time(arm).endswith(("fit", "/ep"))
        ),
        measured=frozenset(arm.workload for arm in present if _measured(arm)),
    )


def _measured(arm: ArmResult) -> bool:
    """Whether real workers made the times of a record. Where they are emulated, a trace or a plan has made them.

    The header of every record has a step time, "fit" by default, also if nothing was fitted to anything.
    """
    return arm.header is not None and not arm.header.trace and not arm.header.plan and bool(arm.end_s)


def _step_time(arm: ArmResult) -> str:
    return "" if arm.header is None else str(arm.header.config.get("step_time"))


def _ordered_names(configured: Any, found: list[str]) -> tuple[str, ...]:
    """The names that were found; those of the configuration first, in its order."""
    known = [str(name) for name in configured] if isinstance(configured, list | Mapping) else []
    return tuple(name for name in dict.fromkeys([*known, *found]) if name in set(found))


def _published(paper: Iterable[PaperValue], cell: Cell) -> dict[str, Any]:
    """The fields of a cell that are about the whole run, and for which the paper has values."""
    values = {value.quantity.name: value.value for value in _of_cell(paper, cell) if value.quantity.target is None}
    found = {
        "published": values.pop("metric", values.pop(cell.metric, None)),  # by either name
        "published_steps": values.pop("steps", None),
        "published_scores": values,
    }
    return {name: value for name, value in found.items() if value is not None}


def _published_targets(paper: Iterable[PaperValue], workload: str) -> list[Target]:
    """The targets to which the paper says what a workload took, in the order of the file."""
    scores = (value.quantity.target for value in paper if value.workload == workload)
    return [Target(score) for score in dict.fromkeys(scores) if score is not None]


def _with_published(paper: Sequence[PaperValue], cells: Iterable[Cell]) -> list[Cell]:
    """The cells with what the paper says about exactly these targets."""

    def beside(to: ToTarget, cell: Cell) -> ToTarget:
        if to.asked.relative:  # a multiple of our own baseline, which no paper has
            return to
        about = [value for value in _of_cell(paper, cell) if value.quantity.target == to.asked.value]
        return replace(
            to,
            published={effort: value.value for value in about if (effort := value.quantity.effort)},
            sources=tuple(dict.fromkeys(value.source for value in about)),
        )

    return [replace(cell, targets=tuple(beside(to, cell) for to in cell.targets)) for cell in cells]


def _of_cell(paper: Iterable[PaperValue], cell: Cell) -> list[PaperValue]:
    key = (cell.workload, cell.trace, cell.rule)
    return [value for value in paper if (value.workload, value.trace, value.rule) == key]


def _baselines(
    keys: Iterable[tuple[str, str, str]], groups: Mapping[tuple[str, str, str], list[ArmResult]]
) -> dict[str, tuple[str, str]]:
    """(trace, rule) of the runs at the reference batch for each workload, that of the rule constant before others.

    Runs that have finished come before those that have not, which have no score yet."""
    found: dict[str, tuple[str, str]] = {}
    ordered = sorted(keys, key=lambda key: key[2] != "constant")  # stable
    for finished in (True, False):
        for key in ordered:
            ran = [arm for arm in groups[key] if arm.steps and (not finished or outcome(arm) == "finished")]
            if ran and all(map(at_reference_batch, ran)):
                found.setdefault(key[0], key[1:])
    return found


def _with_targets(
    asked: Mapping[str, Sequence[Target]],
    cells: Sequence[Cell],
    groups: Mapping[tuple[str, str, str], list[ArmResult]],
    baselines: Mapping[str, tuple[str, str]],
) -> list[Cell]:
    """The cells with what their runs took to each target of their workload, and the speed-ups over its baseline."""
    named = {(cell.workload, cell.trace, cell.rule): cell for cell in cells}
    base = {workload: named[(workload, *where)] for workload, where in baselines.items()}

    def efforts(cell: Cell) -> list[ToTarget]:
        arms = groups[cell.workload, cell.trace, cell.rule]
        ended = [arm for arm in arms if outcome(arm) in ("finished", "diverged")]
        finished = [arm for arm in ended if outcome(arm) == "finished"]
        return [
            effort_to(target, _score(target, cell, base.get(cell.workload)), ended, finished)
            for target in asked[cell.workload]
        ]

    found = {key: efforts(cell) for key, cell in named.items()}
    return [
        replace(
            cell,
            targets=tuple(
                replace(own, speed_ups=speed_ups(own, before))
                for own, before in zip(
                    found[key],
                    found[(key[0], *baselines[key[0]])] if key[0] in baselines else [None] * len(found[key]),
                    strict=True,
                )
            ),
        )
        for key, cell in named.items()
    ]


def _check_targets(asked: Sequence[Target], cells: Iterable[Cell]) -> None:
    metrics = sorted({cell.metric for cell in cells})
    for target in asked:
        if not target.relative and len(metrics) > 1:
            raise ConfigError(
                f"a target of {target} cannot be one of {' and '.join(metrics)} alike; report one workload"
            )
        if target.relative and not (math.isfinite(target.value) and target.value > 0):
            raise ConfigError(f"the target is {target}; expected a finite multiple above 0, such as 0.99x")
        if not math.isfinite(target.value) or (
            not target.relative and metrics == ["accuracy"] and not 0 <= target.value <= 1
        ):
            raise ConfigError(f"the target is {target}; expected a finite score as recorded: 95 % accuracy is 0.95")


def _score(target: Target, cell: Cell, baseline: Cell | None) -> float:
    """The score that a target stands for."""
    if not target.relative:
        return target.value
    if baseline is None or baseline.mean is None:
        raise ConfigError(
            f"the target {target} is a multiple of the score at the reference batch, but {cell.workload} has no "
            f"finished runs whose every batch is the reference batch; give a score, such as 0.95"
        )
    return target.value * baseline.mean


def _has_metric(arm: ArmResult) -> bool:
    return arm.header is not None and ("metric" in arm.header.config or bool(arm.values.size))


def _make_cell(key: tuple[str, str, str], arms: list[ArmResult], example: ArmResult) -> Cell:
    good = [arm for arm in arms if outcome(arm) == "finished"]
    ended = [arm for arm in arms if ended_well(arm)]

    def seeds(status: str) -> tuple[int, ...]:
        return tuple(arm.seed for arm in arms if outcome(arm) == status)

    return Cell(
        workload=key[0],
        trace=key[1],
        rule=key[2],
        metric=example.metric,
        higher_is_better=example.higher_is_better,
        values=tuple(value for arm in good if (value := run_value(arm)) is not None),
        window=max((score_window(arm.values.size) for arm in good), default=0),
        steps=_mean(arm.steps for arm in ended),
        samples=_mean(arm.samples for arm in ended),
        dropped=_mean(arm.dropped for arm in ended),
        time_s=_mean(arm.end_s for arm in ended),
        worker_hours=_mean(arm.worker_hours(arm.end_s) for arm in ended),
        simulated_s={
            name: statistics.fmean(float(arm.simulated[name][-1]) for arm in good)
            for name in dict.fromkeys(name for arm in good for name in arm.simulated)
        },
        scores=_scores(good),
        finished=seeds("finished"),
        not_validated=seeds(_NOT_VALIDATED),
        diverged=seeds("diverged"),
        failed=seeds("failed"),
        interrupted=seeds("interrupted"),
        missing=seeds("missing"),
    )


def _scores(good: Sequence[ArmResult]) -> dict[str, float | None]:
    """The mean over these runs of every score that they have besides their metric; None unless each is finite."""
    names = dict.fromkeys(name for arm in good for name in arm.scores)
    result: dict[str, float | None] = {}
    for name in names:
        values = [_last_mean(arm.scores[name]) if name in arm.scores else None for arm in good]
        finite = [value for value in values if value is not None]
        result[name] = statistics.fmean(finite) if len(finite) == len(values) else None
    return result


def _mean(values: Iterable[float]) -> float | None:
    found = [float(value) for value in values]
    return statistics.fmean(found) if found else None


# -- which rules are best ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What can be said about the rules with a result in one row of a table (one workload on one trace)."""

    first: Cell
    """The best mean."""
    tied: tuple[Cell, ...] = ()
    """Rules that cannot be told apart from the first: the interval of the difference includes zero, or it is zero."""
    unclear: tuple[Cell, ...] = ()
    """Such rules, but with a worse mean than one that is behind: their own runs differ too much to say anything."""
    behind: tuple[Cell, ...] = ()
    """Rules that are worse than the first: the interval of the difference does not include zero. The best first."""
    unknown: tuple[Cell, ...] = ()
    """Rules that have no interval with the first, since one of the two has only one run."""

    @property
    def winners(self) -> tuple[Cell, ...]:
        """The best rules: the first and those that cannot be told apart from it.

        None if no rule is behind them, or if it is unclear whether another one is.
        """
        return (self.first, *self.tied) if self.behind and not self.unclear else ()


def decide(cells: Sequence[Cell]) -> Verdict | None:
    """The verdict on the cells of one row; None if none has a result."""
    ranked = sorted((cell for cell in cells if cell.mean is not None), key=_rank)
    if not ranked:
        return None
    first, *others = ranked
    found: dict[str, list[Cell]] = {"tied": [], "unclear": [], "behind": [], "unknown": []}
    for cell in others:
        interval = difference_interval(first.values, cell.values)
        if math.isclose(_rank(cell), _rank(first), rel_tol=1e-9):
            found["tied"].append(cell)
        elif interval is None:
            found["unknown"].append(cell)
        elif interval[0] <= 0 <= interval[1]:
            found["unclear" if found["behind"] else "tied"].append(cell)  # the better means come first
        else:
            found["behind"].append(cell)
    return Verdict(first=first, **{name: tuple(some) for name, some in found.items()})


def _rank(cell: Cell) -> float:
    """Smaller is better."""
    assert cell.mean is not None, "only cells with a result are ranked"
    return -cell.mean if cell.higher_is_better else cell.mean


def _mark_best(cells: list[Cell]) -> list[Cell]:
    rows: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        rows.setdefault((cell.workload, cell.trace), []).append(cell)
    winners = [cell for row in rows.values() if (verdict := decide(row)) for cell in verdict.winners]
    return [replace(cell, best=any(cell is winner for winner in winners)) for cell in cells]
