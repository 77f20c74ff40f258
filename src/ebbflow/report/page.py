"""What the page says, as plain values; how it looks is `page.html` and `page.css`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from ebbflow.core.units import format_seconds, plural
from ebbflow.report.export import caption, losses_text, published_text
from ebbflow.report.results import ArmResult, Results
from ebbflow.report.style import PALETTE, slugs
from ebbflow.report.tables import Cell, Scale, Summary, outcome, run_value
from ebbflow.report.takeaway import takeaways

__all__ = ["page_content"]


def page_content(results: Results, summary: Summary) -> dict[str, Any]:
    """Everything but the figures and the export texts."""
    rules = [{"index": i, "colour": i % len(PALETTE), "name": name} for i, name in enumerate(summary.rules)]
    return {
        "name": results.name,
        "takeaways": takeaways(summary),
        "facts": _facts(results, summary),
        "traces": [fact for trace in summary.traces if (fact := _trace_fact(results, trace)) is not None],
        "rules": rules,
        "tables": [_table(summary, workload) for workload in summary.workloads],
        "short": _few(summary.short, separator="; "),
        "arms": [_arm(arm, summary) for arm in results.arms],
        "origin": _origin(results),
    }


def _facts(results: Results, summary: Summary) -> list[dict[str, str]]:
    """The tiles: a number, what it counts, and what more there is to say."""
    arms = results.arms
    done = sum(outcome(arm) == "finished" for arm in arms)
    counts = {status: sum(outcome(arm) == status for arm in arms) for status in dict.fromkeys(map(outcome, arms))}
    others = [f"{count} {status}" for status, count in counts.items() if status != "finished"]
    seeds = sorted({arm.seed for arm in arms if arm.status != "unreadable"})
    wall = sum(arm.wall_s for arm in arms)
    return [
        {
            "value": str(done) if done == len(arms) else f"{done}/{len(arms)}",
            "label": plural(len(arms), "arm") + " finished",
            "more": ", ".join(others) or "all of the grid",
        },
        {"value": str(len(summary.rules)), "label": plural(len(summary.rules), "rule"), "more": _few(summary.rules)},
        {"value": str(len(seeds)), "label": plural(len(seeds), "seed"), "more": _few(map(str, seeds))},
        {
            "value": _short(sum(arm.samples for arm in arms)),
            "label": "samples trained on",
            "more": f"in {_short(sum(arm.steps for arm in arms))} steps, {format_seconds(wall)} of computing",
        },
    ]


def _few(names: Iterable[str], limit: int = 6, separator: str = ", ") -> str:
    listed = list(names)
    return separator.join(listed[:limit]) + (f" and {len(listed) - limit} more" if len(listed) > limit else "")


def _short(count: float) -> str:
    """A count in a few characters.

    >>> _short(950), _short(43_110), _short(1_281_167)
    ('950', '43.1k', '1.28M')
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:.0f}"


def _trace_fact(results: Results, name: str) -> dict[str, Any] | None:
    """Fewest, mean (over time) and most workers of a trace, with a small picture of it."""
    traces = [arm.header.trace for arm in results.arms if arm.trace == name and arm.header is not None]
    trace = next((trace for trace in traces if trace.get("times")), None)
    if trace is None:
        return None
    times, workers = [float(t) for t in trace["times"]], [float(w) for w in trace["workers"]]
    end = max(float(trace.get("end") or 0), times[-1])
    spans = [b - a for a, b in pairwise([*times, end])]
    length = sum(spans)
    mean = sum(s * w for s, w in zip(spans, workers, strict=True)) / length if length > 0 else workers[0]
    return {
        "name": name,
        "min": f"{min(workers):g}",
        "mean": f"{mean:.3g}",
        "max": f"{max(workers):g}",
        "length": format_seconds(length),
        "changes": sum(a != b for a, b in pairwise(workers)),
        "spark": _spark(times, workers, end),
    }


def _spark(times: list[float], workers: list[float], end: float, *, width: int = 240, height: int = 36) -> str:
    """The path of a step function in a box; at most two points a pixel, the extremes of each."""
    start, top = times[0], max(max(workers), 1.0)
    columns: dict[int, list[float]] = {}
    for t, w in zip(times, workers, strict=True):
        x = int((t - start) / (end - start) * width) if end > start else 0
        columns.setdefault(min(x, width), []).append(w)

    def y(value: float) -> str:
        return f"{height - 2 - (height - 4) * value / top:.1f}"

    parts: list[str] = []
    for x, values in sorted(columns.items()):
        parts.append(f"H{x}" if parts else f"M{x},{y(values[0])}")
        parts += [f"V{y(v)}" for v in dict.fromkeys([min(values), max(values), values[-1]])]
    return "".join([*parts, f"H{width}"])


def _table(summary: Summary, workload: str) -> dict[str, Any]:
    scale, rules = summary.scale(workload), summary.rules_of(workload)
    rows = [
        {"trace": trace, "cells": [_cell(summary.cell(workload, trace, rule), scale) for rule in rules]}
        for trace in summary.traces_of(workload)
    ]
    return {
        "workload": workload,
        "id": slugs(summary.workloads)[workload],
        "caption": caption(summary, workload),
        "rules": [summary.rules.index(rule) for rule in rules],
        "rows": rows,
    }


def _cell(cell: Cell | None, scale: Scale) -> dict[str, Any]:
    if cell is None:
        return {
            "mean": "",
            "std": "",
            "word": "not in the study",
            "best": False,
            "lost": "",
            "published": "",
            "title": "",
        }
    lost = [f"{name}: seed {', '.join(map(str, seeds))}" for name, seeds in cell.lost]
    values = ", ".join(
        f"{scale.number(value)} (seed {seed})" for value, seed in zip(cell.values, cell.finished, strict=True)
    )
    return {
        "mean": "" if cell.mean is None else scale.number(cell.mean),
        "std": "" if cell.std is None else scale.number(cell.std),
        "word": cell.lost[0][0] if cell.mean is None and cell.lost else "",
        "best": cell.best,
        "lost": losses_text(cell),
        "published": published_text(cell, scale),
        "title": "; ".join(text for text in [values, *lost] if text),
    }


def _arm(arm: ArmResult, summary: Summary) -> dict[str, Any]:
    value = run_value(arm) if arm.status != "unreadable" else None
    scale = summary.scale(arm.workload) if arm.workload in summary.workloads else None
    text = f"{scale.number(value)} {scale.unit}".strip() if scale and value is not None else ""
    return {
        "id": arm.id,
        "workload": arm.workload,
        "trace": arm.trace,
        "rule": arm.rule,
        "colour": summary.rules.index(arm.rule) % len(PALETTE) if arm.rule in summary.rules else None,
        "seed": arm.seed if arm.status != "unreadable" else "",
        "status": outcome(arm),
        "steps": arm.steps,
        "samples": arm.samples,
        "value": text if outcome(arm) == "finished" or not text else f"({text})",
        "wall": format_seconds(arm.wall_s) if arm.wall_s else "",
        "notes": [text for text in (arm.note, arm.damage) if text],
    }


def _origin(results: Results) -> dict[str, Any]:
    """Where the numbers come from: what is needed to make them again."""
    headers = [arm.header for arm in results.arms if arm.header is not None]
    versions: dict[str, list[str]] = {}
    for header in headers:
        for package, version in header.versions.items():
            versions.setdefault(package, []).append(str(version))
    created = sorted({header.created for header in headers if header.created})
    commands = [results.command] if results.command else _distinct(header.command for header in headers)
    return {
        "commands": commands,
        "config": json.dumps(dict(results.config), indent=2, ensure_ascii=False),
        "versions": {package: ", ".join(_distinct(found)) for package, found in versions.items()},
        "commits": _distinct(header.git_commit for header in headers),
        "devices": _distinct(header.device for header in headers),
        "created": " to ".join(dict.fromkeys([created[0], created[-1]])) if created else "",
    }


def _distinct(texts: Iterable[str]) -> list[str]:
    return [text for text in dict.fromkeys(texts) if text]
