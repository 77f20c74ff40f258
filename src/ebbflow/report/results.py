"""The results of a study from its records: all arms, how each ended, and which are missing.

Three things can be read: a study folder (`study.json` and `arms/<id>/record.jsonl`), the folder of one run (with a
`record.jsonl` in it), and one record file. Every problem of an arm is reported: a damaged last line, a record that
cannot be read, an arm of the grid that has no record yet, several records of one arm.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from ebbflow.errors import RecordError
from ebbflow.live.accounting import read_fleet_run
from ebbflow.record import Header, Run, has_header, read_record

__all__ = ["ArmResult", "LayerCurves", "Status", "Results", "begun_records", "load_results"]

Array = npt.NDArray[np.float64]
Status = Literal["finished", "diverged", "failed", "interrupted", "unreadable", "missing"]

VERSION = 1
_COLUMNS = ("time_s", "duration_s", "epoch", "workers", "batch", "lr", "multiplier", "loss")
_EMPTY: Array = np.empty(0)
LARGEST = 1e100
"""A number that is larger counts as one that is not finite: it says only that a run diverged, the mean or the variance
of a few of them is no float, and no axis can show it beside others."""


def _numbers(values: Iterable[float | None]) -> Array:
    """An array of these numbers; NaN for None and for what is too large to be compared."""
    found = np.array([*values], dtype=np.float64)  # None becomes NaN
    return np.where(np.abs(found) <= LARGEST, found, math.nan)


@dataclass(frozen=True, kw_only=True)
class LayerCurves:
    """What a run recorded about its layers, in arrays of one row per recorded step and one column per layer."""

    names: tuple[str, ...]
    position: Array
    """Epochs that were committed after each of these steps."""
    batch: Array
    noise: Array
    signal: Array
    multiplier: Array
    warming: Array
    """How many layers were in their warm-up in each of these steps; NaN for rules that do not say."""
    warm_up: Array
    """How far the warm-up of each layer was, from 0 to 1; NaN where the record does not say."""

    @classmethod
    def from_run(cls, run: Run) -> LayerCurves | None:
        """The curves of a record; None if it has none. A layer without a name gets its number.

        As in `whole_steps`, the smaller last step of an epoch is left out.
        """
        short = {row.step for row, tail in zip(run.steps, _smaller_last_steps(_columns(run)), strict=True) if tail}
        rows = [row for row in run.layers if row.step not in short]
        if not rows:
            return None
        count = len(rows[0].noise)
        warming = {row.step: row.stats.get("warming") for row in run.steps}
        names = [str(name) for name in run.header.config.get("layers") or []]
        return cls(
            names=tuple(names if len(names) == count else map(str, range(count))),
            position=np.array([row.samples for row in rows]) / _epoch_samples(run),
            batch=np.array([row.batch for row in rows], dtype=np.float64),
            warming=np.array([warming.get(row.step) for row in rows], dtype=np.float64),  # None becomes NaN
            warm_up=np.array([_numbers(row.warm_up or [None] * count) for row in rows]),
            **{
                name: np.array([_numbers(getattr(row, name)) for row in rows])
                for name in ("noise", "signal", "multiplier")
            },
        )


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """One run of a study (workload x trace x rule x seed) and how it ended.

    The rows of the record are kept as one array per column, so that a study of many long arms fits into memory.
    """

    id: str
    workload: str
    trace: str
    rule: str
    seed: int
    status: Status
    metric: str = "accuracy"
    higher_is_better: bool = True
    note: str = ""
    """Why the run failed, where it stopped, how often it was resumed."""
    damage: str = ""
    """What is wrong with the last line of the record; empty if nothing is."""
    header: Header | None = None
    epochs: Array = field(default_factory=lambda: _EMPTY)
    """Epochs that were committed before each validation."""
    values: Array = field(default_factory=lambda: _EMPTY)
    """The metric at each validation; NaN where it was not a finite number."""
    times: Array = field(default_factory=lambda: _EMPTY)
    """Seconds on the clock of the trace at each validation, from the start of training."""
    counts: Array = field(default_factory=lambda: _EMPTY)
    """Samples before each validation."""
    updates: Array = field(default_factory=lambda: _EMPTY)
    """Steps that were committed before each validation."""
    walls: Array = field(default_factory=lambda: _EMPTY)
    """Seconds of computing before each validation is done, that of earlier validations and this one included."""
    simulated: Mapping[str, Array] = field(default_factory=dict)
    """Seconds at each validation by the clock of each step model that was asked for; see `clocks.py`."""
    train_values: Array = field(default_factory=lambda: _EMPTY)
    """The metric on training samples at each validation; NaN where it was not measured, empty if it never was."""
    scores: Mapping[str, Array] = field(default_factory=dict)
    """Every other score at each validation, by name; NaN where it was not measured."""
    columns: Mapping[str, Array] = field(default_factory=dict)
    """One array per column of the steps: position (in epochs), time_s, duration_s, epoch, workers, batch, lr, ..."""
    stats: tuple[str, ...] = ()
    """The columns that a rule or an engine added."""
    code: Mapping[str, str] = field(default_factory=dict)
    """The code of the run as far as the record knows it: number of parameters, digests of plugins, a change of them."""
    weights: str = ""
    """The digest of the final weights; empty if the run has not ended."""
    layers: LayerCurves | None = None
    """What a layer-wise rule recorded; None for other rules."""
    steps: int = 0
    samples: int = 0
    """Samples that were trained on."""
    dropped: int = 0
    """Samples that the policy `drop` dropped."""
    wall_s: float = 0.0
    end_s: float = 0.0
    """Seconds on the clock of the trace from the start of training to the end of the last step."""

    def first_at(self, target: float) -> int | None:
        """The number of the first validation that is at least as good as the target; None if none is."""
        with np.errstate(invalid="ignore"):
            good = self.values >= target if self.higher_is_better else self.values <= target
        return int(np.argmax(good)) if good.any() else None

    def worker_hours(self, until_s: float) -> float:
        """Available workers times hours from the start of training on: all are paid for, whether they take part or not.

        A record without a trace (of a live job, of a plan of batches) has only the workers that took part: those of a
        step for its duration, and until the next one those that are in both steps.
        """
        trace = self.header.trace if self.header else {}
        if not trace.get("times") or not trace.get("end"):
            starts, workers = (self.columns.get(name, _EMPTY) for name in ("time_s", "workers"))
            nexts = np.append(starts, self.end_s)[1:]
            ends = np.fmin(starts + self.columns.get("duration_s", math.nan), nexts)  # unknown: until the next step
            staying = np.minimum(workers, np.append(workers, 0)[1:])
            took, waited = (np.maximum(b - a, 0) for a, b in pairwise(np.minimum((starts, ends, nexts), until_s)))
            return float(workers @ took + staying @ waited) / 3600
        end, begin = float(trace["end"]), self.offset_s
        edges, workers = np.append(trace["times"], end), np.asarray(trace["workers"], dtype=np.float64)

        def worker_seconds(until: float) -> float:
            rounds, rest = divmod(until, end)  # a trace that is too short is repeated
            return rounds * float(np.diff(edges) @ workers) + float(np.diff(np.minimum(edges, rest)) @ workers)

        return (worker_seconds(begin + until_s) - worker_seconds(begin)) / 3600

    @property
    def offset_s(self) -> float:
        """Where on its trace the run began."""
        return float((self.header.plan if self.header else {}).get("offset_s") or 0.0)

    @property
    def ref_batch(self) -> int | None:
        """The reference batch, if the record has it."""
        config = self.header.config if self.header else {}
        value = config.get("ref_batch") or config.get("task", {}).get("recipe", {}).get("ref_batch")
        return int(value) if value else None

    def whole_steps(self, *names: str) -> tuple[Array, ...]:
        """These columns without the smaller last step of each epoch, which shows neither the fleet nor the rule."""
        tails = _smaller_last_steps(self.columns)
        return tuple(self.columns[name][~tails] for name in names)

    def over_epochs(self, name: str) -> tuple[Array, Array]:
        """A column of the whole steps by the epochs at their ends; one before a smaller last step ends with the epoch.

        So what changes with an epoch is drawn at its beginning, also where an epoch has few steps.
        """
        tails, ends = _smaller_last_steps(self.columns), self.columns["position"].copy()
        ends[:-1] = np.where(tails[1:], ends[1:], ends[:-1])
        return ends[~tails], self.columns[name][~tails]

    @classmethod
    def from_run(cls, run: Run, *, id: str = "") -> ArmResult:
        """The arm of a record."""
        config, rows = run.header.config, run.steps
        metric, higher_is_better = _metric_of(run)
        epochs, values = run.metric(metric)
        scored = [row for row in run.validations if metric in row.metrics]
        counts = np.array([row.samples for row in scored], dtype=np.float64)
        starts = run.column("time_s")
        ends = {row.step: row.time_s + row.duration_s for row in rows if row.duration_s is not None}
        usual_s = float(np.median(np.diff(starts))) if len(starts) > 1 else 0.0  # of older records, which do not say
        last = rows[-1] if rows else None
        own = _columns(run)
        stats = tuple(sorted({name for row in rows for name in row.stats} - set(own) - _BOOKKEEPING))
        return cls(
            id=id or run.path.parent.name,
            workload=str(config.get("workload", "run")),
            trace=str(config.get("trace") or run.header.trace.get("name") or "trace"),
            rule=str(config.get("rule", "rule")),
            seed=int(config.get("seed", 0)),
            status=cast("Status", run.status),
            metric=metric,
            higher_is_better=higher_is_better,
            note=_note(run),
            damage=run.damage,
            header=run.header,
            epochs=epochs,
            values=_numbers(values),
            times=np.array([ends.get(row.step - 1, row.time_s + usual_s) for row in scored], dtype=np.float64),
            counts=counts - run.dropped_until(counts),
            updates=np.array([row.step for row in scored], dtype=np.float64),
            walls=np.array([row.wall_s for row in scored], dtype=np.float64),
            train_values=_train_values([row.metrics for row in scored], f"train_{metric}"),
            scores={
                name: _numbers(row.metrics.get(name) for row in scored)
                for name in dict.fromkeys(name for row in scored for name in row.metrics)
                if name != metric
            },
            columns=own | {name: _numbers(run.column(name)) for name in stats},
            stats=stats,
            code=_code(run),
            weights=run.end.weights_sha256 if run.end else "",
            layers=LayerCurves.from_run(run),
            steps=len(rows),
            # The end that a study writes for a killed process has less than the last step.
            samples=max(run.end.samples if run.end else 0, last.samples if last else 0) - run.dropped,
            dropped=run.dropped,
            wall_s=max(run.end.wall_s if run.end else 0.0, last.wall_s if last else 0.0),
            end_s=ends.get(last.step, last.time_s + usual_s) if last else 0.0,
        )


@dataclass(frozen=True, kw_only=True)
class Results:
    """The results of a study or a run: all arms in the order of the configuration, and the content of study.json."""

    name: str
    folder: Path
    command: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    arms: tuple[ArmResult, ...]
    replaced: tuple[str, ...] = ()
    """Messages about records that are not used because another record of the same arm is newer, and about runs of
    other code, which have rows of their own."""

    def left_out(self, workload: str) -> list[str]:
        """What the runs of a workload did not use of their data, or changed: one line, unless their data differ."""
        lines = (arm.header.left_out for arm in self.arms if arm.workload == workload and arm.header is not None)
        return [line for line in dict.fromkeys(lines) if line]

    @property
    def problems(self) -> list[str]:
        """Messages about damaged last lines, records that cannot be read, and records that are not used."""
        damaged = [arm.damage or arm.note for arm in self.arms if arm.damage or arm.status == "unreadable"]
        return [*damaged, *self.replaced]


def _metric_of(run: Run) -> tuple[str, bool]:
    """The metric that runs are compared by, and whether more of it is better.

    That of the header; or the first that was measured, for a run whose own evaluation returns something else.
    """
    config = run.header.config
    metric = str(config.get("metric", "accuracy"))
    measured = [name for row in run.validations for name in row.metrics]
    if not measured or metric in measured:
        return metric, bool(config.get("higher_is_better", metric != "loss"))
    return measured[0], not any(word in measured[0] for word in ("loss", "error", "perplexity"))


def _train_values(metrics: Sequence[Mapping[str, float | None]], name: str) -> Array:
    """This metric of each validation, NaN where it is missing or None; empty if it always is."""
    values = _numbers(found.get(name) for found in metrics)
    return values if np.isfinite(values).any() else _EMPTY


_BOOKKEEPING = frozenset({"lineage", "parent", "fork", "given_back", "probe", "probed", "too_large_gb"})
"""Numbers in the rows that identify states and count samples, and are nothing to draw."""


def _note(run: Run) -> str:
    parts = []
    if run.end is None:
        parts.append(f"stopped after step {len(run.steps)}, without an end" if run.steps else "stopped before step 1")
    elif run.end.text:
        parts.append(run.end.text)
    if resumes := sum(event.what == "resumed" for event in run.events):
        parts.append(f"resumed {resumes} time{'s' if resumes > 1 else ''}")
    back = [row.stats for row in (*run.steps, *run.given_back) if "given_back" in row.stats]
    if given_back := [stats["given_back"] for stats in back if "probe" not in stats]:
        times = "once" if len(given_back) == 1 else f"{len(given_back)} times"
        parts.append(f"went back to a snapshot {times}, {sum(given_back):,.0f} samples were trained on again")
    if probed := [row.stats["probed"] for row in run.steps if "probed" in row.stats]:
        samples = sum(stats["given_back"] for stats in back if "probe" in stats)
        moved = sum(factor not in (0.0, 1.0) for factor in probed)
        parts.append(
            f"{len(probed)} probe{'s' if len(probed) > 1 else ''}, of which {moved} changed the coefficient; "
            f"{samples:,.0f} samples of other branches were given back"
        )
    if dropped := run.dropped:
        parts.append(f"{dropped:,} of {run.steps[-1].samples:,} samples were dropped")
    if changes := [event.text for event in run.events if event.what == "code changed"]:
        parts.append(f"continued by other code: {'; '.join(changes)}")
    return "; ".join(parts)


def _columns(run: Run) -> dict[str, Array]:
    """The columns of the steps that every record has."""
    return {"position": run.column("samples") / _epoch_samples(run)} | {
        name: _numbers(run.column(name)) for name in _COLUMNS
    }


def _smaller_last_steps(columns: Mapping[str, Array]) -> npt.NDArray[np.bool_]:
    """For each step, whether it is the last of its epoch and smaller than the one before with as many workers."""
    batch, workers, epoch = (columns[name] for name in ("batch", "workers", "epoch"))
    if not epoch.size:
        return np.zeros(0, dtype=bool)
    share = batch / np.maximum(workers, 1)
    same = epoch[1:] == epoch[:-1]
    smaller = np.append(False, same & (batch[1:] < batch[:-1]) & (share[1:] < share[:-1]))
    tails: npt.NDArray[np.bool_] = np.append(~same, True) & smaller
    return tails


def _epoch_samples(run: Run) -> float:
    """Samples per epoch, derived from the rows."""
    whole = [row.samples / row.epoch for row in run.validations if row.epoch > 0]
    if whole:
        return whole[-1]
    # No validation yet: the first epoch ends with its last step, if a second epoch has begun.
    first = [row.samples for row in run.steps if row.epoch == 0]
    return float(max(first or [row.samples for row in run.steps], default=1))


def _labels(value: Any) -> list[str]:
    """The entries of a list in the configuration, or the keys of a mapping."""
    return [str(item) for item in value] if isinstance(value, list | Mapping) else []


def _missing(config: Mapping[str, Any], arms: Iterable[ArmResult]) -> list[ArmResult]:
    """Arms of the configured grid that have no record, without those that the study skips."""
    there = {(arm.workload, arm.trace, arm.rule, arm.seed) for arm in arms}
    axes = [_labels(config.get(key)) for key in ("workloads", "traces", "rules", "seeds")]
    grid = ((w, t, r, int(s)) for w, t, r, s in product(*axes) if s.lstrip("-").isdigit())
    return [
        ArmResult(id="", workload=w, trace=t, rule=r, seed=s, status="missing", note="no record that can be read")
        for w, t, r, s in grid
        if (w, t, r, s) not in there and not any(_matches(entry, w, t, r, s) for entry in config.get("skip") or ())
    ]


def _matches(entry: Mapping[str, Any], workload: str, trace: str, rule: str, seed: int) -> bool:
    """Whether an entry of `skip` selects this arm: each of its selectors is a value, or a list of values."""
    own = {"workload": workload, "trace": trace, "rule": rule, "seed": seed}
    return all(own.get(key) in (value if isinstance(value, list) else [value]) for key, value in entry.items())


def _named_fits(arms: Sequence[ArmResult]) -> list[ArmResult]:
    """The arms, where fits of one estimator have the parameters in which they differ beside their rule.

    The candidates of a search differ in nothing else, and no cell must average them.
    """
    fits: dict[str, list[Mapping[str, str]]] = {}
    for arm in arms:
        if own := _estimator(arm):
            fits.setdefault(arm.workload, []).append(own)
    differing = {
        workload: [name for name in dict.fromkeys(chain(*every)) if len({own.get(name) for own in every}) > 1]
        for workload, every in fits.items()
    }

    def named(arm: ArmResult) -> str:
        own = _estimator(arm)
        shown = [f"{name}={own[name]}" for name in differing.get(arm.workload, ()) if name in own]
        return ", ".join([arm.rule, *shown])

    return [replace(arm, rule=named(arm)) for arm in arms]


def _estimator(arm: ArmResult) -> Mapping[str, str]:
    """The parameters of the estimator whose fit the arm is; empty for other runs, and in older records."""
    found = arm.header.config.get("estimator") if arm.header else None
    return found if isinstance(found, Mapping) else {}


def _newest(arms: Iterable[ArmResult]) -> tuple[list[ArmResult], list[str]]:
    """The newest record of each arm, and messages about the others.

    A seed must not count twice: another version of the package, or a study whose file was deleted, may have given the
    folders of the same arms other names, and the old folders are still there. Fits with the same parameters are on
    different data, as in the folds of a search, unless they have learned the same weights.
    """
    found: dict[tuple[str, str, str, int, str], ArmResult] = {}
    replaced = []
    for arm in sorted(arms, key=lambda arm: arm.header.created if arm.header else ""):
        key = (arm.workload, arm.trace, arm.rule, arm.seed, (arm.weights or arm.id) if _estimator(arm) else "")
        if (before := found.get(key)) is not None:
            what = f"{arm.rule} on {arm.trace}, seed {arm.seed}"
            replaced.append(f"arms/{before.id} is left out: arms/{arm.id} is a newer record of {what}")
        found[key] = arm
    return list(found.values()), replaced


def _code(run: Run) -> dict[str, str]:
    """What is known of a run's code, in words."""
    config = run.header.config
    count = (config.get("task") or {}).get("parameters")
    plugins = zip(config.get("plugins") or (), config.get("plugins_sha256") or (), strict=False)
    names = ((Path(path).name, digest) for path, digest in plugins)
    changes = [f"code changed at step {event.step}" for event in run.events if event.what == "code changed"]
    return {
        **({"parameters": f"{count:,} parameters"} if count else {}),
        **{name: f"{name} of digest {digest[:6]}" for name, digest in names},
        "change": ", ".join(changes) or "one code throughout",
    }


def _apart(arms: list[ArmResult]) -> tuple[list[ArmResult], list[str]]:
    """The arms, and messages about those that were made by other code than the newest run of their workload.

    Such arms get another name of their workload, so that no cell averages runs of different code and no table compares
    them. What a record does not know about its code counts as equal.
    """
    result: list[ArmResult] = []
    messages = []
    for workload in dict.fromkeys(arm.workload for arm in arms):
        own = [arm for arm in arms if arm.workload == workload]
        newest = max(own, key=lambda arm: arm.header.created if arm.header else "").code
        counts: dict[str, int] = {}
        for arm in own:
            other = ", ".join(text for key, text in arm.code.items() if newest.get(key, text) != text)
            if other:
                counts[other] = counts.get(other, 0) + 1
            result.append(replace(arm, workload=f"{workload}, other code ({other})") if other else arm)
        for other, number in counts.items():
            runs = f"{number} run{'s' if number > 1 else ''} of {workload}"
            messages.append(f"{runs} made by other code ({other}) than the newest run are shown apart")
    return result, messages


def _ordered(config: Mapping[str, Any], arms: list[ArmResult]) -> tuple[ArmResult, ...]:
    """The arms in the order of the configuration; names that it does not have keep their order of appearance."""

    def rank(key: str, names: Iterable[str]) -> dict[str, int]:
        return {name: i for i, name in enumerate(dict.fromkeys([*_labels(config.get(key)), *names]))}

    workloads = rank("workloads", (arm.workload for arm in arms))
    traces = rank("traces", (arm.trace for arm in arms))
    rules = rank("rules", (arm.rule for arm in arms))
    return tuple(sorted(arms, key=lambda a: (workloads[a.workload], traces[a.trace], rules[a.rule], a.seed)))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}; expected the file of a study") from error
    except ValueError as error:
        raise RecordError(f"{path} is not JSON ({error}); expected the file that ebbflow study writes") from None
    if not isinstance(body, dict) or not isinstance(body.get("config", {}), dict):
        raise RecordError(f'{path} is not the file of a study; expected {{"version", "command", "config"}}')
    version = body.get("version", VERSION)
    if not isinstance(version, int) or version > VERSION:
        raise RecordError(f"{path} has study version {version}, this ebbflow reads up to {VERSION}; upgrade ebbflow")
    return body


def begun_records(folder: Path) -> list[Path]:
    """The records of the arms of a study that have written their header; the others count as missing."""
    return [path for path in sorted((folder / "arms").glob("*/record.jsonl")) if has_header(path)]


def _read_arm(path: Path) -> ArmResult:
    """The arm of a record. A record that cannot be read gives an arm with that status, and the report goes on."""
    try:
        return ArmResult.from_run(read_record(path))
    except RecordError as error:
        note = str(error)
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # a row of JSON, with values of other types
        note = f"{path} has a row whose values are not those of a record ({error}); it was damaged or edited"
    return ArmResult(id=path.parent.name, workload="", trace="", rule="", seed=0, status="unreadable", note=note)


def load_results(path: Path | str) -> Results:
    """The results of the study or run at a path; a RecordError if there is no record that can be read."""
    path = Path(path)
    if path.is_file():
        return _single(path)
    if (path / "record.jsonl").is_file():
        return _single(path / "record.jsonl")
    if not path.is_dir():
        raise RecordError(f"{path} does not exist; give the folder that ebbflow study or ebbflow train wrote")
    if (path / "replicas").is_dir():
        return _of_run(read_fleet_run(path), folder=path)
    if not (path / "study.json").is_file() and not (path / "arms").is_dir():
        raise RecordError(
            f"{path} is not the folder of a study or a run; expected study.json with arms/, or a record.jsonl in it"
        )
    body = _read_json(path / "study.json") if (path / "study.json").is_file() else {}
    config = body.get("config", {})
    arms = [_read_arm(record) for record in begun_records(path)]
    if not arms:
        raise RecordError(
            f"{path} has no records yet; expected arms/*/record.jsonl; run the study, or wait until it begins"
        )
    if all(arm.status == "unreadable" for arm in arms):
        raise RecordError(f"{path} has no record that can be read; the first says: {arms[0].note}")
    readable, replaced = _newest(_named_fits([arm for arm in arms if arm.status != "unreadable"]))
    readable, other_code = _apart(readable)
    lost = [arm for arm in arms if arm.status == "unreadable"]
    return Results(
        name=str(body.get("name") or config.get("name") or path.resolve().name),
        folder=path,
        command=str(body.get("command", "")),
        config=config,
        arms=(*_ordered(config, [*readable, *_missing(config, readable)]), *lost),
        replaced=(*replaced, *other_code),
    )


def _single(path: Path) -> Results:
    return _of_run(read_record(path), folder=path.parent)


def _of_run(run: Run, *, folder: Path) -> Results:
    arm = ArmResult.from_run(run, id=folder.resolve().name)
    return Results(
        name=f"{arm.workload} on {arm.trace}",
        folder=folder,
        command=run.header.command,
        config=run.header.config,
        arms=(arm,),
    )
