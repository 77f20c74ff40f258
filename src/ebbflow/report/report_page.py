"""The report folder: one self-contained page, the figures as SVG and PNG, the tables in four formats.

    report/index.html          everything in one file that can be mailed; it loads nothing from the network
    report/figures/*.svg|png   each figure by itself
    report/tables.md|csv|tex|json

The folder is built next to its place and moved there at the end, so a reader never sees half a report. The content of
the page is made here as plain values; how it looks is in `frame.html`, which all pages share, `page.html` and
`page.css`.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

from ebbflow.core.printable import printable
from ebbflow.core.units import format_seconds, plural
from ebbflow.core.wording import called
from ebbflow.errors import ConfigError, OutputError
from ebbflow.report.clocks import Clock, read_clocks
from ebbflow.report.conclusions import takeaways
from ebbflow.report.export import (
    caption,
    csv_text,
    effort_caption,
    effort_table,
    json_text,
    latex,
    losses_text,
    markdown,
    published_text,
    target_caption,
    target_table,
)
from ebbflow.report.figures import all_figures
from ebbflow.report.plotting import BAND, GRID, INK, MUTED, PALETTE, Drawing, save, slugs
from ebbflow.report.results import ArmResult, Results, load_results
from ebbflow.report.summary import Cell, NumberFormat, Summary, ended_well, outcome, run_value, summarise

__all__ = [
    "CSS_VARIABLES",
    "ReportPaths",
    "page_content",
    "render_page",
    "render_template",
    "replace_folder",
    "write_figures",
    "write_report",
]

_GENERATOR = "ebbflow report"
"""The mark by which an earlier report is recognized, which may be replaced."""
CSS_VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", BAND: "--band"} | {
    colour: f"--rule-{i}" for i, colour in enumerate(PALETTE)
}
"""Colours of the figures, and the variables that the page uses for them in its light and dark schemes."""


@dataclass(frozen=True, kw_only=True)
class ReportPaths:
    """Where the report is, and what it was made from."""

    folder: Path
    page: Path
    results: Results
    summary: Summary


def write_report(
    folder: Path | str,
    *,
    out: Path | str | None = None,
    targets: Sequence[float | str] = (),
    clocks: Sequence[Clock] = (),
    usd_per_hour: float | None = None,
) -> ReportPaths:
    """Make the report of a study folder, a run folder or one record file; by default in `report` beside the records.

    An earlier report there is replaced as a whole; a folder that holds anything else is refused. For `targets` and
    `usd_per_hour` see `summarise`; `clocks` add simulated times (`make_clocks`).
    """
    results = read_clocks(load_results(folder), clocks)
    summary = summarise(results.arms, results.config, targets=targets, usd_per_hour=usd_per_hour)
    place = results.folder / "report" if out is None else Path(out)
    with replace_folder(place) as partial:
        figures = write_figures(all_figures(results, summary), partial)
        for suffix, text in _tables(summary).items():
            (partial / f"tables.{suffix}").write_text(text, encoding="utf-8")
        (partial / "index.html").write_text(render_page(results, summary, figures), encoding="utf-8")
    return ReportPaths(folder=place, page=place / "index.html", results=results, summary=summary)


def render_page(results: Results, summary: Summary, figures: list[dict[str, Any]]) -> str:
    """The page as text."""
    return render_template(
        "page.html",
        **page_content(results, summary),
        figures=figures,
        exports={name: _tables(summary)[name] for name in ("md", "tex", "csv")},
    )


def _tables(summary: Summary) -> Mapping[str, str]:
    return {
        "md": printable(markdown(summary)),
        "tex": printable(latex(summary)),
        "csv": printable(csv_text(summary)),
        "json": json_text(summary) + "\n",
    }


def render_template(template: str, **content: Any) -> str:
    """A page as text. All content is escaped, unless it is `Markup`, which only our own figures and styles are."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("ebbflow", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["thousands"] = lambda value: f"{value:,.0f}"
    files = resources.files("ebbflow.report")
    return environment.get_template(template).render(
        **content,
        generator=_GENERATOR,
        written=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        style=Markup(files.joinpath("page.css").read_text(encoding="utf-8")),
        script=Markup(files.joinpath("page.js").read_text(encoding="utf-8")),
    )


# -- figures on a page -------------------------------------------------------------------------------------------------


def write_figures(drawings: Iterable[Drawing], folder: Path) -> list[dict[str, Any]]:
    """Write the figures into `folder`/figures; returns each as `figure.html` uses it."""
    from markupsafe import Markup

    (folder / "figures").mkdir()
    figures = []
    for drawing in drawings:
        svg, _ = save(drawing.figure, folder / "figures", drawing.stem)
        figures.append(
            {
                "stem": drawing.stem,
                "kind": drawing.kind,
                "title": drawing.title,
                "caption": drawing.caption,
                "workload": drawing.workload,
                "svg": Markup(inline_svg(svg.read_text(encoding="utf-8"), stem=drawing.stem)),
            }
        )
    return figures


def inline_svg(svg: str, *, stem: str) -> str:
    """An SVG of matplotlib as a part of a page: with ids of its own, colours by variable, and the size of the page.

    Matplotlib has escaped the text in it. Lines of rule i get the class `rule-i`, so that the page can highlight them.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    opening, rest = svg.split(">", 1)
    svg = re.sub(r' (xmlns|xmlns:xlink|width|height|version)="[^"]*"', "", opening) + ">" + rest
    # A hundredth of a point is finer than any screen, and a third of the bytes are digits beyond it.
    svg = re.sub(r' d="[^"]*"', lambda m: re.sub(r"(\.\d\d)\d+", r"\1", m[0]), svg)
    svg = re.sub(r'\bid="(rule|trace)-(\d+)"', r'class="line \1-\2"', svg)
    svg = re.sub(r'\bid="', f'id="{stem}-', svg)
    svg = svg.replace("url(#", f"url(#{stem}-").replace('xlink:href="#', f'href="#{stem}-')
    svg = re.sub(r"#[0-9a-f]{6}\b", lambda m: f"var({CSS_VARIABLES[m[0]]})" if m[0] in CSS_VARIABLES else m[0], svg)
    return svg.replace("<svg", f'<svg role="img" aria-labelledby="{stem}-caption"', 1).strip()


# -- the content of the page -------------------------------------------------------------------------------------------


def page_content(results: Results, summary: Summary) -> dict[str, Any]:
    """Everything on the page but the figures and the exported tables."""
    rules = [{"index": i, "colour": i % len(PALETTE), "name": name} for i, name in enumerate(summary.rules)]
    return {
        "name": results.name,
        "takeaways": takeaways(summary),
        "facts": _facts(results, summary),
        "traces": [fact for trace in summary.traces if (fact := _trace_fact(results, trace)) is not None],
        "rules": rules,
        "tables": [_table(results, summary, workload) for workload in summary.workloads],
        "arms": [_arm(arm, summary) for arm in results.arms],
        "origin": _origin(results),
    }


def _facts(results: Results, summary: Summary) -> list[dict[str, str]]:
    """The tiles: a number, what it counts, and details."""
    arms = results.arms
    done = sum(map(ended_well, arms))
    counts = {status: sum(outcome(arm) == status for arm in arms) for status in dict.fromkeys(map(outcome, arms))}
    others = [f"{count} {status}" for status, count in counts.items() if status != "finished"]
    seeds = sorted({arm.seed for arm in arms if arm.status != "unreadable"})
    wall = sum(arm.wall_s for arm in arms)
    steps = sum(arm.steps for arm in arms)
    return [
        {
            "value": str(done) if done == len(arms) else f"{done}/{len(arms)}",
            "label": plural(len(arms), "arm") + " finished",
            "more": ", ".join(others) or "all of the grid",
        },
        {
            "value": str(len(summary.rules)),
            "label": plural(len(summary.rules), "rule"),
            "more": _first_few(summary.rules),
        },
        {"value": str(len(seeds)), "label": plural(len(seeds), "seed"), "more": _first_few(map(str, seeds))},
        {
            "value": _short_count(sum(arm.samples for arm in arms)),
            "label": "samples trained on",
            "more": f"in {_short_count(steps)} steps, {format_seconds(wall)} of computing",
        },
    ]


def _first_few(names: Iterable[str], limit: int = 6) -> str:
    listed = list(names)
    return ", ".join(listed[:limit]) + (f" and {len(listed) - limit} more" if len(listed) > limit else "")


def _short_count(count: float) -> str:
    """A count in a few characters.

    >>> _short_count(950), _short_count(43_110), _short_count(1_281_167)
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
        "spark": _sparkline(times, workers, end),
    }


def _sparkline(times: list[float], workers: list[float], end: float, *, width: int = 240, height: int = 36) -> str:
    """The SVG path of a step function in a box; at each pixel it goes through the extremes."""
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


def _table(results: Results, summary: Summary, workload: str) -> dict[str, Any]:
    numbers, rules = summary.number_format(workload), summary.rules_of(workload)
    rows = [
        {"trace": trace, "cells": [_cell(summary.cell(workload, trace, rule), numbers) for rule in rules]}
        for trace in summary.traces_of(workload)
    ]
    effort = effort_table(summary, workload)
    return {
        "workload": workload,
        "id": slugs(summary.workloads)[workload],
        "caption": caption(summary, workload),
        "left_out": results.left_out(workload),
        "rules": [summary.rules.index(rule) for rule in rules],
        "rows": rows,
        "effort": {"caption": effort_caption(summary, workload), "rows": effort},
        "targets": [
            {
                "goal": summary.goal(workload, target),
                "caption": target_caption(summary, workload, number),
                "rows": found,
            }
            for number, target in enumerate(summary.targets_of(workload))
            if (found := target_table(summary, workload, number))
        ],
    }


def _cell(cell: Cell | None, numbers: NumberFormat) -> dict[str, Any]:
    if cell is None:
        empty = dict.fromkeys(("mean", "margin", "lost", "published", "title"), "")
        return {**empty, "word": "not in the study", "best": False}
    lost = [f"{name}: seed {', '.join(map(str, seeds))}" for name, seeds in cell.lost]
    values = ", ".join(
        f"{numbers.number(value)} (seed {seed})" for value, seed in zip(cell.values, cell.finished, strict=True)
    )
    return {
        "mean": "" if cell.mean is None else numbers.number(cell.mean),
        "margin": "" if cell.margin is None else numbers.number(cell.margin),
        "word": cell.lost[0][0] if cell.mean is None and cell.lost else "",
        "best": cell.best,
        "lost": losses_text(cell),
        "published": published_text(cell, numbers),
        "title": "; ".join(text for text in [values, *lost] if text),
    }


def _arm(arm: ArmResult, summary: Summary) -> dict[str, Any]:
    value = run_value(arm) if arm.status != "unreadable" else None
    numbers = summary.number_format(arm.workload) if arm.workload in summary.workloads else None
    text = f"{numbers.number(value)} {numbers.unit}".strip() if numbers and value is not None else ""
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
    """What is needed to reproduce the numbers."""
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


# -- the folder --------------------------------------------------------------------------------------------------------


@contextmanager
def replace_folder(target: Path) -> Iterator[Path]:
    """A new folder that takes the place of the target at the end, or is removed if something goes wrong."""
    _refuse_other_content(target)
    partial: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        partial.chmod(0o755)  # mkdtemp makes it private; others should be able to read a report
        yield partial
        _swap(partial, target)
    except OSError as error:
        if isinstance(error, OutputError):
            raise
        raise OutputError(
            f"{target} cannot be written: {error.strerror or error}; free some space or choose another with "
            f"{called('out')}"
        ) from error
    finally:
        if partial is not None and partial.exists():
            shutil.rmtree(partial, ignore_errors=True)


def _swap(new: Path, target: Path) -> None:
    """Put the new folder in the place of the target; if that fails, the old one is put back."""
    old = new.with_name(new.name + "-old")
    if target.exists():
        target.rename(old)
    try:
        new.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _refuse_other_content(target: Path) -> None:
    """The target is replaced as a whole, so it must be an earlier report, an empty folder, or missing."""
    if not target.exists():
        return
    if not target.is_dir():
        raise ConfigError(f"{target} is a file; give a folder for the report with {called('out')}")
    if not os.access(target, os.R_OK) or not any(target.iterdir()):
        return
    page = target / "index.html"
    if not page.is_file() or _GENERATOR not in page.read_text(encoding="utf-8", errors="replace")[:2000]:
        raise ConfigError(
            f"{target} holds files that are not a report of ebbflow, and a report replaces its folder; "
            f"choose another folder with {called('out')}"
        )
