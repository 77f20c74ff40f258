"""The report folder: one self-contained page, the figures as SVG and PNG, the tables in four formats.

    report/index.html          everything, inlined: it can be mailed; it loads nothing and asks the network for nothing
    report/figures/*.svg|png   each figure by itself
    report/tables.md|csv|tex|json

The folder is built beside its place and moved there at the end, so a reader never sees half a report.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebbflow.errors import ConfigError, OutputError
from ebbflow.report.export import csv_text, json_text, latex, markdown
from ebbflow.report.figures import all_figures
from ebbflow.report.page import page_content
from ebbflow.report.results import Results, load_results
from ebbflow.report.style import BAND, GRID, INK, MUTED, PALETTE, Drawing, save
from ebbflow.report.tables import Summary, summarise
from ebbflow.report.templates import GENERATOR, render

__all__ = ["VARIABLES", "ReportPaths", "embedded", "render_page", "replacing", "write_report"]

VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", BAND: "--band"} | {
    colour: f"--rule-{i}" for i, colour in enumerate(PALETTE)
}


@dataclass(frozen=True, kw_only=True)
class ReportPaths:
    """Where the report lies, and what it was made of."""

    folder: Path
    page: Path
    results: Results
    summary: Summary


def write_report(folder: Path, *, out: Path | None = None) -> ReportPaths:
    """Make the report of a study folder, a run folder or one record file; by default in `report` beside the records.

    An earlier report at that place is replaced as a whole; a folder that holds anything else is refused.
    """
    results = load_results(folder)
    summary = summarise(results.arms, results.config)
    target = out if out is not None else results.folder / "report"
    with replacing(target) as partial:
        (partial / "figures").mkdir()
        figures = []
        for drawing in all_figures(results, summary):
            svg, _ = save(drawing.figure, partial / "figures", drawing.stem)
            figures.append(embedded(drawing, svg.read_text(encoding="utf-8")))
        for suffix, text in _tables(summary).items():
            (partial / f"tables.{suffix}").write_text(text, encoding="utf-8")
        (partial / "index.html").write_text(render_page(results, summary, figures), encoding="utf-8")
    return ReportPaths(folder=target, page=target / "index.html", results=results, summary=summary)


def render_page(results: Results, summary: Summary, figures: list[dict[str, Any]]) -> str:
    """The page as text. All that comes from records is escaped; only our own figures and styles are not."""
    return render(
        "page.html",
        **page_content(results, summary),
        figures=figures,
        exports={name: _tables(summary)[name] for name in ("md", "tex", "csv")},
    )


def _tables(summary: Summary) -> Mapping[str, str]:
    return {
        "md": markdown(summary),
        "tex": latex(summary),
        "csv": csv_text(summary),
        "json": json_text(summary) + "\n",
    }


def embedded(drawing: Drawing, svg: str) -> dict[str, Any]:
    """A figure as a template takes it."""
    from markupsafe import Markup

    return {
        "stem": drawing.stem,
        "kind": drawing.kind,
        "title": drawing.title,
        "caption": drawing.caption,
        "workload": drawing.workload,
        "svg": Markup(inline_svg(svg, stem=drawing.stem)),
    }


def inline_svg(svg: str, *, stem: str) -> str:
    """An SVG of matplotlib as a part of a page: own ids, colours by variable, sized by the page.

    The text in it was escaped by matplotlib. Lines of rule i get the class `rule-i`, so that the page can highlight it.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    opening, rest = svg.split(">", 1)
    svg = re.sub(r' (xmlns|xmlns:xlink|width|height|version)="[^"]*"', "", opening) + ">" + rest
    # A hundredth of a point is finer than any screen, and a third of the bytes are digits beyond it.
    svg = re.sub(r' d="[^"]*"', lambda m: re.sub(r"(\.\d\d)\d+", r"\1", m[0]), svg)
    svg = re.sub(r'\bid="rule-(\d+)"', r'class="line rule-\1"', svg)
    svg = re.sub(r'\bid="', f'id="{stem}-', svg)
    svg = svg.replace("url(#", f"url(#{stem}-").replace('xlink:href="#', f'href="#{stem}-')
    svg = re.sub(r"#[0-9a-f]{6}\b", lambda m: f"var({VARIABLES[m[0]]})" if m[0] in VARIABLES else m[0], svg)
    return svg.replace("<svg", f'<svg role="img" aria-labelledby="{stem}-caption"', 1).strip()


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A new folder that takes the target's place at the end, or disappears if something goes wrong."""
    _refuse_foreign(target)
    partial: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        partial.chmod(0o755)  # mkdtemp makes it private; a report is made to be shown
        yield partial
        _swap(partial, target)
    except OSError as error:
        if isinstance(error, OutputError):
            raise
        raise OutputError(
            f"{target} cannot be written: {error.strerror or error}; free some space or choose another with --out"
        ) from error
    finally:
        if partial is not None and partial.exists():
            shutil.rmtree(partial, ignore_errors=True)


def _swap(new: Path, target: Path) -> None:
    """Put the new folder in the target's place; the old one comes back if that fails."""
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


def _refuse_foreign(target: Path) -> None:
    """The target is replaced as a whole, so it must be an earlier report, an empty folder, or not there."""
    if not target.exists():
        return
    if not target.is_dir():
        raise ConfigError(f"{target} is a file; give a folder for the report with --out")
    if not os.access(target, os.R_OK) or not any(target.iterdir()):
        return
    page = target / "index.html"
    if not page.is_file() or GENERATOR not in page.read_text(encoding="utf-8", errors="replace")[:2000]:
        raise ConfigError(
            f"{target} holds files that are not a report of ebbflow, and a report replaces its folder; "
            f"choose another folder with --out"
        )
