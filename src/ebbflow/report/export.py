"""The tables for a terminal, a README (Markdown), a spreadsheet (CSV), a paper (LaTeX) and a program (JSON).

All have the shape of Andre, Strati and Klimovic (2022): one table a workload, rows are traces, columns are rules, the
best of each row marked. CSV and JSON have one entry a cell instead, with unrounded numbers.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ebbflow.report.tables import LAST, Cell, Scale, Summary

__all__ = [
    "caption",
    "cell_text",
    "csv_text",
    "json_text",
    "latex",
    "losses_text",
    "markdown",
    "published_text",
    "sources_text",
    "terminal",
]

NOTHING = "–"  # noqa: RUF001  # an en dash: the study has no such arm


def caption(summary: Summary, workload: str) -> str:
    """What the numbers of a workload's table are."""
    cell = summary.of(workload)[0]
    unit = " in %" if summary.scale(workload).unit == "%" else ""
    better = "higher" if cell.higher_is_better else "lower"
    text = f"Validation {cell.metric}{unit} ({better} is better), mean of the last {LAST} validations"
    if summary.short:
        text += ", or of all where a run has fewer"
    counts = {len(c.finished) for c in summary.of(workload) if c.finished}
    if counts and max(counts) > 1:
        text += f"; mean ± standard deviation over {' to '.join(map(str, sorted({min(counts), max(counts)})))} seeds"
    return f"{text}; best of each row marked.{sources_text(summary, workload)}"


def sources_text(summary: Summary, workload: str) -> str:
    """Where the published values of a table come from, and whether they can be compared; empty if it has none."""
    if not any(cell.published is not None or cell.published_steps is not None for cell in summary.of(workload)):
        return ""
    text = f" Published: {'; '.join(summary.sources)}."
    if summary.scaled is not None:
        text += f" This study is scaled to {summary.scaled:g} of its epochs: not comparable with what was published."
    return text


def published_text(cell: Cell | None, scale: Scale) -> str:
    """What the paper has in this place, such as "paper 94.24" or "29,240 steps, paper 29,240"; empty if nothing.

    With the paper's own digits: how ours are rounded follows from our spread, not from its.
    """
    if cell is None:
        return ""
    parts = [f"paper {cell.published * scale.factor:.6g}"] if cell.published is not None else []
    if cell.published_steps is not None:
        steps = f"{cell.steps:,.0f} steps, " if cell.steps is not None else ""
        parts.append(f"{steps}paper {cell.published_steps:,.0f}")
    return "; ".join(parts)


def cell_text(cell: Cell | None, scale: Scale) -> str:
    """The number of a cell, such as 97.2 ± 0.3, or the word that stands for it."""
    if cell is None:
        return NOTHING
    if cell.mean is None:
        return cell.lost[0][0] if cell.lost else NOTHING
    return scale.number(cell.mean) + ("" if cell.std is None else f" ± {scale.number(cell.std)}")


def losses_text(cell: Cell | None) -> str:
    """What a reader must know beside the number: 1 of 3 diverged; empty if all seeds count."""
    if cell is None or not cell.lost or (cell.mean is None and len(cell.lost) == 1):
        return ""
    total = cell.seeds + len(cell.missing)
    return ", ".join(f"{len(seeds)} of {total} {name}" for name, seeds in cell.lost)


def terminal(summary: Summary, *, width: int = 80) -> Group:
    """Tables for a terminal of this width; the rules go into several blocks where one does not fit."""
    parts: list[Table | Padding | Text] = []
    for workload in summary.workloads:
        for block, rules in enumerate(_blocks(summary, workload, width)):
            # As Text: a name in brackets is a name, not a style. Above the table: a table's own title is broken to its
            # width, in the middle of a name that is longer.
            parts.append(Text(workload if block == 0 else f"{workload} (continued)", style="bold"))
            table = Table()
            table.add_column("trace", style="dim", no_wrap=True)
            for rule in rules:
                table.add_column(_header(rule), justify="right")
            scale = summary.scale(workload)
            for trace in summary.traces_of(workload):
                cells = [summary.cell(workload, trace, rule) for rule in rules]
                table.add_row(Text(trace), *(_rich_cell(cell, scale) for cell in cells))
            parts.append(table)
        parts.append(Padding(Text(caption(summary, workload), style="dim"), (0, 0, 1, 1)))
    return Group(*parts)


def _header(rule: str) -> Text:
    return Text(rule.replace("+", "\n+"))


def _rich_cell(cell: Cell | None, scale: Scale) -> Text:
    style = "bold green" if cell and cell.best else "yellow" if cell and cell.mean is None else ""
    text = Text(cell_text(cell, scale), style=style)
    if cell and cell.best:
        text.append(" *", style="bold green")  # also where colours do not reach: a file, a pipe
    if note := losses_text(cell):
        text.append("\n" + note.replace(", ", "\n"), style="yellow")
    if published := published_text(cell, scale):
        text.append("\n" + published.replace("; ", "\n").replace("steps, ", "steps\n"), style="dim")
    return text


def _blocks(summary: Summary, workload: str, width: int) -> Iterator[list[str]]:
    """The rules of a workload, in groups that fit beside the names of the traces."""
    scale, traces = summary.scale(workload), summary.traces_of(workload)
    room = width - max(map(len, ["trace", *traces])) - 4  # borders and padding
    block: list[str] = []
    used = 0
    for rule in summary.rules_of(workload):
        cells = [summary.cell(workload, trace, rule) for trace in traces]
        lines = [*_header(rule).plain.split("\n"), *(x for c in cells for x in _rich_cell(c, scale).plain.split("\n"))]
        needed = max(map(len, lines)) + 3
        if block and used + needed > room:
            yield block
            block, used = [], 0
        block.append(rule)
        used += needed
    yield block


def markdown(summary: Summary) -> str:
    """One table a workload; the best of each row is bold."""
    texts = []
    for workload in summary.workloads:
        rules, scale = summary.rules_of(workload), summary.scale(workload)
        lines = ["| trace | " + " | ".join(map(_pipe, rules)) + " |", "|:--|" + "--:|" * len(rules)]
        for trace in summary.traces_of(workload):
            cells = [summary.cell(workload, trace, rule) for rule in rules]
            lines.append(f"| {_pipe(trace)} | " + " | ".join(_markdown_cell(cell, scale) for cell in cells) + " |")
        texts.append(f"**{workload}**\n\n" + "\n".join(lines) + f"\n\n{caption(summary, workload)}\n")
    return "\n".join(texts)


def _pipe(text: str) -> str:
    return text.replace("|", "\\|")


def _markdown_cell(cell: Cell | None, scale: Scale) -> str:
    text = f"**{cell_text(cell, scale)}**" if cell and cell.best else cell_text(cell, scale)
    note = "; ".join(part for part in (losses_text(cell), published_text(cell, scale)) if part)
    return f"{text} ({note})" if note else text


def latex(summary: Summary) -> str:
    """One table a workload; needs the package booktabs."""
    texts = []
    for workload in summary.workloads:
        rules, scale = summary.rules_of(workload), summary.scale(workload)
        rows = []
        for trace in summary.traces_of(workload):
            cells = [summary.cell(workload, trace, rule) for rule in rules]
            rows.append(" & ".join([_tex(trace), *(_latex_cell(cell, scale) for cell in cells)]) + r" \\")
        lines = [
            r"\begin{table}",
            r"  \centering",
            rf"  \caption{{{_tex(workload)}. {_tex(caption(summary, workload))}}}",
            rf"  \begin{{tabular}}{{l{'r' * len(rules)}}}",
            r"    \toprule",
            "    " + " & ".join(["Trace", *map(_tex, rules)]) + r" \\",
            r"    \midrule",
            *(f"    {row}" for row in rows),
            r"    \bottomrule",
            r"  \end{tabular}",
            r"\end{table}",
        ]
        texts.append("\n".join(lines) + "\n")
    return "\n".join(texts)


_TEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", NOTHING: "--",
}  # fmt: skip


def _tex(text: str) -> str:
    return "".join(_TEX.get(char, char) for char in text)


def _latex_cell(cell: Cell | None, scale: Scale) -> str:
    text = _tex(cell_text(cell, scale))
    text = rf"\textbf{{{text}}}" if cell and cell.best else text
    note = _tex("; ".join(part for part in (losses_text(cell), published_text(cell, scale)) if part))
    return f"{text} ({note})" if note else text


def csv_text(summary: Summary) -> str:
    """One line a cell, numbers as recorded (an accuracy is a fraction); an empty field where there is none."""
    rows = [cell.as_json() for cell in summary.cells]
    out = io.StringIO()
    if rows:
        writer = csv.DictWriter(out, [key for key in rows[0] if key != "values"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return out.getvalue()


def json_text(summary: Summary) -> str:
    """The fixed shape of `ebbflow report --json`."""
    return json.dumps(summary.as_json(), indent=2, allow_nan=False)
