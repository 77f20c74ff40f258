"""The tables for a terminal, a README (Markdown), a spreadsheet (CSV), a paper (LaTeX) and a program (JSON).

All have the form of Andre, Strati and Klimovic (2022): one table per workload with one row per trace and one column per
rule, and the best of each row marked. CSV and JSON have one entry per cell instead, with unrounded numbers.
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

from ebbflow.core.units import format_seconds, plural
from ebbflow.report.intervals import CONFIDENCE
from ebbflow.report.summary import Cell, NumberFormat, Summary

__all__ = [
    "caption",
    "cell_text",
    "csv_text",
    "effort_caption",
    "effort_table",
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
    """What the numbers in the table of a workload mean."""
    cell = summary.cells_of(workload)[0]
    unit = " in %" if summary.number_format(workload).unit == "%" else ""
    better = "higher" if cell.higher_is_better else "lower"
    done = [found for found in summary.cells_of(workload) if found.finished]
    text = f"Validation {cell.metric}{unit} ({better} is better)"
    if done:
        text += f", mean of the last {_counts({c.window for c in done}, 'validation')} of each run"
        text += " (a third of them, at most three)"
        seeds = {len(c.finished) for c in done}
        several = {count for count in seeds if count > 1}
        if several:
            text += f"; mean ± half of the {CONFIDENCE} interval (Student's t) over {_counts(several, 'seed')}"
        if 1 in seeds:
            text += "; without ± one run: no interval" if several else "; one run each: no interval"
    if len(summary.rules_of(workload)) > 1:
        text += "; marked: the best of a row, if the interval of its lead over another rule excludes zero"
    return f"{text}.{sources_text(summary, workload)}"


def _counts(counts: set[int], what: str) -> str:
    """One count, or the least and the greatest, with a noun."""
    return f"{' to '.join(map(str, sorted({min(counts), max(counts)})))} {plural(max(counts), what)}"


def sources_text(summary: Summary, workload: str) -> str:
    """The sources of the published values of a table, and whether they are comparable; empty if it has none."""
    if not any(cell.published is not None or cell.published_steps is not None for cell in summary.cells_of(workload)):
        return ""
    text = f" Published: {'; '.join(summary.sources)}."
    if summary.scaled is not None:
        text += f" This study is scaled to {summary.scaled:g} of its epochs: not comparable with what was published."
    return text


def published_text(cell: Cell | None, numbers: NumberFormat) -> str:
    """The value of the paper, such as "paper 94.24" or "29,240 steps, paper 29,240"; empty if it has none.

    It keeps the digits of the paper: how our values are rounded depends on our spread.
    """
    if cell is None:
        return ""
    parts = [f"paper {cell.published * numbers.factor:.6g}"] if cell.published is not None else []
    if cell.published_steps is not None:
        steps = f"{cell.steps:,.0f} steps, " if cell.steps is not None else ""
        parts.append(f"{steps}paper {cell.published_steps:,.0f}")
    return "; ".join(parts)


def cell_text(cell: Cell | None, numbers: NumberFormat) -> str:
    """The number of a cell, such as 97.2 ± 0.3, or the word that replaces it, such as diverged."""
    if cell is None:
        return NOTHING
    if cell.mean is None:
        return cell.lost[0][0] if cell.lost else NOTHING
    return numbers.number(cell.mean) + ("" if cell.margin is None else f" ± {numbers.number(cell.margin)}")


def losses_text(cell: Cell | None) -> str:
    """What a reader must know besides the number, such as "1 of 3 diverged"; empty if all seeds count."""
    if cell is None or not cell.lost or (cell.mean is None and len(cell.lost) == 1):
        return ""
    total = cell.seeds + len(cell.missing)
    return ", ".join(f"{len(seeds)} of {total} {name}" for name, seeds in cell.lost)


def terminal(summary: Summary, *, width: int = 80) -> Group:
    """Tables for a terminal of this width; rules that do not fit go into further tables."""
    parts: list[Table | Padding | Text] = []
    for workload in summary.workloads:
        for block, rules in enumerate(_blocks(summary, workload, width)):
            # As Text, since a name in brackets is not a style. Above the table, since rich would break the table's own
            # title at the width of the table, in the middle of a longer name.
            parts.append(Text(workload if block == 0 else f"{workload} (continued)", style="bold"))
            table = Table()
            table.add_column("trace", style="dim", no_wrap=True)
            for rule in rules:
                table.add_column(_header(rule), justify="right")
            numbers = summary.number_format(workload)
            for trace in summary.traces_of(workload):
                cells = [summary.cell(workload, trace, rule) for rule in rules]
                table.add_row(Text(trace), *(_rich_cell(cell, numbers) for cell in cells))
            parts.append(table)
        parts.append(Padding(Text(caption(summary, workload), style="dim"), (0, 0, 1, 1)))
        for to_target in (False, True):
            if rows := effort_table(summary, workload, to_target=to_target):
                table = Table(box=None, pad_edge=False, header_style="bold")
                for i, name in enumerate(rows[0]):
                    table.add_column(Text(name), justify="left" if i < 2 else "right")
                for row in rows[1:]:
                    table.add_row(*map(Text, row))
                parts.append(Padding(table, (0, 0, 0, 1)))
                parts.append(
                    Padding(Text(effort_caption(summary, workload, to_target=to_target), style="dim"), (0, 0, 1, 1))
                )
    return Group(*parts)


# -- time and cost -----------------------------------------------------------------------------------------------------


def effort_table(summary: Summary, workload: str, *, to_target: bool = False) -> list[list[str]]:
    """Time, worker-hours, money and samples beside the score, the names of the columns first; empty without records.

    Rules of a trace that took the same share a line. With `to_target`, what it took to the target: one line per rule.
    """
    numbers = summary.number_format(workload)
    cells = [c for c in summary.cells_of(workload) if c.finished and (c.target is not None or not to_target)]
    if not any(cell.time_s for cell in cells):
        return []
    priced = any(cell.usd_per_hour is not None for cell in cells)
    lines: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        if to_target:
            effort = (cell.target_time_s, cell.target_worker_hours, cell.target_samples)
        else:
            effort = (cell.time_s, cell.worker_hours, cell.samples)
        time, hours, samples = effort
        texts = (
            NOTHING if time is None else format_seconds(time),
            NOTHING if hours is None else f"{hours:,.3g}" if hours < 1000 else f"{hours:,.0f}",
            *([_money(cell.cost_usd(hours))] if priced else []),
            NOTHING if samples is None else f"{samples:,.0f}",
        )
        own = (cell.rule, f"{cell.target_reached} of {len(cell.finished)}") if to_target else ()
        lines.setdefault((cell.trace, *own, *texts), []).append(cell)
    rows = [["trace", "rule", *(["runs"] if to_target else []), numbers.heading(cells[0].metric), "time",
             "worker-hours", *(["USD"] if priced else []), "samples"]]  # fmt: skip
    for (trace, *line), same in lines.items():
        names = [cell.rule for cell in same]
        everyone = len(names) > 1 and len(names) == len([c for c in cells if c.trace == trace])
        means = sorted(cell.mean for cell in same if cell.mean is not None)
        score = " to ".join(dict.fromkeys(numbers.number(mean) for mean in (means[0], means[-1])))
        shown = [*line[1:2], score, *line[2:]] if to_target else [score, *line]
        rows.append([trace, "all rules" if everyone else ", ".join(names), *shown])
    return rows


def _money(usd: float | None) -> str:
    return NOTHING if usd is None else f"{usd:,.2f}"


def effort_caption(summary: Summary, workload: str, *, to_target: bool = False) -> str:
    """What the numbers of `effort_table` mean."""
    cell = next(cell for cell in summary.cells_of(workload) if cell.finished)
    text = "Time on the clock of the trace, and available workers x hours, which are paid for whether they take part "
    text += "or not; means over seeds."
    if to_target and cell.target is not None:
        numbers = summary.number_format(workload)
        goal = f"{cell.metric} of {numbers.number(cell.target)}{' %' if numbers.unit else ''}"
        article = "an" if goal[0] in "aeiou" else "a"
        text = f"Until the first validation with {article} {goal}; means over the runs that reach it."
    if workload in summary.fitted:
        text += " The step time was fitted to the trace: times compare rules, not machines."
    return text


def _header(rule: str) -> Text:
    return Text(rule.replace("+", "\n+"))


def _rich_cell(cell: Cell | None, numbers: NumberFormat) -> Text:
    style = "bold green" if cell and cell.best else "yellow" if cell and cell.mean is None else ""
    text = Text(cell_text(cell, numbers), style=style)
    if cell and cell.best:
        text.append(" *", style="bold green")  # visible without colours, too: in a file, in a pipe
    if note := losses_text(cell):
        text.append("\n" + note.replace(", ", "\n"), style="yellow")
    if published := published_text(cell, numbers):
        text.append("\n" + published.replace("; ", "\n").replace("steps, ", "steps\n"), style="dim")
    return text


def _blocks(summary: Summary, workload: str, width: int) -> Iterator[list[str]]:
    """The rules of a workload, in groups that fit next to the names of the traces."""
    numbers, traces = summary.number_format(workload), summary.traces_of(workload)
    room = width - max(map(len, ["trace", *traces])) - 4  # borders and padding
    block: list[str] = []
    used = 0
    for rule in summary.rules_of(workload):
        cells = [summary.cell(workload, trace, rule) for trace in traces]
        texts = [_header(rule), *(_rich_cell(cell, numbers) for cell in cells)]
        lines = [line for text in texts for line in text.plain.split("\n")]
        needed = max(map(len, lines)) + 3
        if block and used + needed > room:
            yield block
            block, used = [], 0
        block.append(rule)
        used += needed
    yield block


def markdown(summary: Summary) -> str:
    """One table per workload; the best of each row is bold."""
    texts = []
    for workload in summary.workloads:
        rules, numbers = summary.rules_of(workload), summary.number_format(workload)
        lines = ["| trace | " + " | ".join(map(_pipe, rules)) + " |", "|:--|" + "--:|" * len(rules)]
        for trace in summary.traces_of(workload):
            cells = [summary.cell(workload, trace, rule) for rule in rules]
            lines.append(f"| {_pipe(trace)} | " + " | ".join(_markdown_cell(cell, numbers) for cell in cells) + " |")
        texts.append(f"**{workload}**\n\n" + "\n".join(lines) + f"\n\n{caption(summary, workload)}\n")
    return "\n".join(texts)


def _pipe(text: str) -> str:
    return text.replace("|", "\\|")


def _markdown_cell(cell: Cell | None, numbers: NumberFormat) -> str:
    text = f"**{cell_text(cell, numbers)}**" if cell and cell.best else cell_text(cell, numbers)
    note = "; ".join(part for part in (losses_text(cell), published_text(cell, numbers)) if part)
    return f"{text} ({note})" if note else text


def latex(summary: Summary) -> str:
    """One table per workload; needs the package booktabs."""
    texts = []
    for workload in summary.workloads:
        rules, numbers = summary.rules_of(workload), summary.number_format(workload)
        rows = []
        for trace in summary.traces_of(workload):
            cells = [summary.cell(workload, trace, rule) for rule in rules]
            rows.append(" & ".join([_tex(trace), *(_latex_cell(cell, numbers) for cell in cells)]) + r" \\")
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


def _latex_cell(cell: Cell | None, numbers: NumberFormat) -> str:
    text = _tex(cell_text(cell, numbers))
    text = rf"\textbf{{{text}}}" if cell and cell.best else text
    note = _tex("; ".join(part for part in (losses_text(cell), published_text(cell, numbers)) if part))
    return f"{text} ({note})" if note else text


def csv_text(summary: Summary) -> str:
    """One line per cell, numbers as recorded (an accuracy is a fraction); an empty field if there is none."""
    rows = [cell.as_json() for cell in summary.cells]
    out = io.StringIO()
    if rows:
        writer = csv.DictWriter(out, [key for key in rows[0] if key != "values"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return out.getvalue()


def json_text(summary: Summary) -> str:
    """What `ebbflow report --json` prints."""
    return json.dumps(summary.as_json(), indent=2, allow_nan=False)
