"""The page of a live job that refreshes while it runs: `ebbflow status FOLDER --serve`.

The history is read from the records of the replicas, in which only new lines are read each time. The time axis adds up
the times between consecutive surviving steps, each as a replica measured it: standstills during which no replica lived
are not in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

from ebbflow.errors import RecordError
from ebbflow.live.accounting import surviving_steps
from ebbflow.live.fleet_status import FleetStatus
from ebbflow.record import Event, Header, StepRow, ValidationRow, decode
from ebbflow.report.report_page import render_template

__all__ = ["FleetHistory", "fleet_page", "fleet_view"]

POINTS = 400
"""Points of a curve at most: more cannot be seen, and a page of a long job stays small."""
EVENTS = 40
RECENT_S = 60.0
"""The speed now, and with it the time to the end, is taken over about this many seconds."""


@dataclass
class _Tail:
    """One growing record: what was read of it, and how far."""

    path: Path
    position: int = 0
    header: Header | None = None
    steps: list[StepRow] = field(default_factory=list)
    validations: list[ValidationRow] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def read(self) -> None:
        """Read the whole lines that were added. A line that is not a row is passed over: `ebbflow report` names it."""
        with self.path.open("rb") as file:
            file.seek(self.position)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self.position += whole
        for line in data[:whole].splitlines():
            try:
                row = decode(line.decode())
            except ValueError:
                continue
            if isinstance(row, Header):
                self.header = row
            elif isinstance(row, StepRow):
                self.steps.append(row)
            elif isinstance(row, ValidationRow):
                self.validations.append(row)
            elif isinstance(row, Event):
                self.events.append(row)


class FleetHistory:
    """What the replicas of a job have recorded so far. `read` takes time in proportion to what was added."""

    def __init__(self, folder: Path | None) -> None:
        """`folder`: of the job; None if only the fleet itself can be asked, and then there is no history."""
        self.folder = folder
        self._tails: dict[Path, _Tail] = {}

    def read(self) -> None:
        """Take up what was added to the records since the last call."""
        for path in sorted(self.folder.glob("replicas/*/record.jsonl")) if self.folder else ():
            self._tails.setdefault(path, _Tail(path)).read()

    @property
    def header(self) -> Header | None:
        """The header of the first record, if there is one."""
        return next((tail.header for tail in self._tails.values() if tail.header), None)

    def steps(self) -> list[StepRow]:
        """The surviving steps in order; empty if the records are not those of a live job."""
        try:
            return surviving_steps(*(tail.steps for tail in self._tails.values()))
        except RecordError:
            return []

    def seconds(self, steps: Sequence[StepRow]) -> list[float]:
        """How long each step took, up to the beginning of the next; of the last one, how long it took itself."""
        gaps: dict[tuple[float, float], float] = {}
        for tail in self._tails.values():
            for before, after in pairwise(tail.steps):
                gap = after.time_s - before.time_s
                if gap > 0:  # the clock of a record starts again with each incarnation of its replica
                    key = (before.stats["lineage"], after.stats["lineage"])
                    gaps[key] = min(gap, gaps.get(key, gap))
        found = [gaps.get((a.stats["lineage"], b.stats["lineage"]), 0.0) for a, b in pairwise(steps)]
        if not steps:
            return []
        last = steps[-1].duration_s
        return [*found, *(found[-1:] or [0.0] if last is None else [last])]

    def validations(self) -> list[ValidationRow]:
        """All validations, each once, in order."""
        rows = {row.step: row for tail in self._tails.values() for row in tail.validations}
        return [rows[step] for step in sorted(rows)]

    def events(self) -> Iterator[tuple[str, Event]]:
        """All events with the name of the replica that recorded them, by step."""
        found = [(tail.path.parent.name, event) for tail in self._tails.values() for event in tail.events]
        return iter(sorted(found, key=lambda pair: pair[1].step))


def fleet_view(
    status: FleetStatus, history: FleetHistory, *, price: float | None = None, note: str = ""
) -> dict[str, Any]:
    """What the page shows, as JSON: the fleet now, its progress and cost, curves, validations and the last events.

    `note`: why the fleet is not asked any more, if so.
    """
    steps = history.steps()
    seconds = history.seconds(steps)
    config: Mapping[str, Any] = history.header.config if history.header else {}
    return {
        "now": asdict(status),
        "note": note,
        "job": {name: config.get(name) for name in ("workload", "rule", "policy", "epochs", "epoch_samples")},
        "progress": _progress(steps, seconds, config, price),
        "series": _series(steps, seconds),
        "validations": [
            {"epoch": round(row.epoch, 4), "metrics": dict(row.metrics)} for row in history.validations()[-POINTS:]
        ],
        "events": [
            {"replica": name, "step": event.step, "what": event.what, "text": event.text}
            for name, event in list(history.events())[-EVENTS:][::-1]
        ],
    }


def _progress(
    steps: Sequence[StepRow], seconds: Sequence[float], config: Mapping[str, Any], price: float | None
) -> dict[str, float | None]:
    """Samples, time and cost so far and to the end. The rest is assumed to go on at the speed of the last minute.

    `price`: USD per hour of one worker.
    """
    total = (config.get("epochs") or 0) * (config.get("epoch_samples") or 0)
    done = steps[-1].samples if steps else 0
    dropped = [int(row.stats.get("dropped", 0)) for row in steps]
    hours = sum(row.workers * time for row, time in zip(steps, seconds, strict=True)) / 3600
    recent, samples, covered, worker_s = 0.0, 0, 0, 0.0
    for row, time, drops in zip(reversed(steps), reversed(seconds), reversed(dropped), strict=True):
        recent, samples, worker_s = recent + time, samples + row.batch, worker_s + row.workers * time
        covered += row.batch + drops
        if recent >= RECENT_S:
            break
    speed = samples / recent if recent > 0 else None
    left_s = 0.0 if total and done >= total else None
    if total > done and recent > 0:
        left_s = (total - done) * recent / covered  # what is dropped brings the end nearer, too
    left_hours = None if left_s is None else left_s * (worker_s / recent if recent > 0 else 0.0) / 3600
    return {
        "samples": done - sum(dropped),
        "dropped": sum(dropped),
        "total_samples": total or None,
        "seconds": sum(seconds),
        "worker_hours": hours,
        "samples_per_s": speed,
        "left_s": left_s,
        "usd": None if price is None else price * hours,
        "usd_left": None if price is None or left_hours is None else price * left_hours,
    }


def _series(steps: Sequence[StepRow], seconds: Sequence[float]) -> dict[str, list[float | None]]:
    """The curves, over the time of training: at most `POINTS`, each of a group of consecutive steps.

    Loss and speed are means over the group; workers, batch and rate are those of its largest step, so that the short
    last step of an epoch is drawn only where every step is.
    """
    group = max(1, -(-len(steps) // POINTS))
    names = ("time_s", "workers", "batch", "lr", "loss", "samples_per_s")
    series: dict[str, list[float | None]] = {name: [] for name in names}
    clock = 0.0
    for start in range(0, len(steps), group):
        rows, times = steps[start : start + group], seconds[start : start + group]
        took, samples = sum(times), sum(row.batch for row in rows)
        losses = [row.loss * (row.batch / samples) for row in rows if row.loss is not None]
        largest = max(rows, key=lambda row: row.batch)
        values = (
            clock,
            largest.workers,
            largest.batch,
            largest.lr,
            sum(losses) if len(losses) == len(rows) else None,
            samples / took if took > 0 else None,
        )
        for name, value in zip(names, values, strict=True):
            series[name].append(value)
        clock += took
    return series


def fleet_page(name: str) -> str:
    """The page, which asks for `status.json` beside it every two seconds."""
    from markupsafe import Markup

    script = resources.files("ebbflow.report").joinpath("fleet.js").read_text(encoding="utf-8")
    return render_template("fleet.html", name=name, takeaways=[], fleet_script=Markup(script))
