"""The tables for a terminal, a README (Markdown), a spreadsheet (CSV), a paper (LaTeX) and a program (JSON).

All have the form of Andre, Strati and Klimovic (2022): one table per workload with one row per trace and one column per
rule, and the best of each row marked. CSV and JSON have one entry per cell instead, with unrounded numbers.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ebbflow.core.units import format_seconds, plural
from ebbflow.report.intervals import CONFIDENCE
from ebbflow.report.published import NEVER, PublishedValue
from ebbflow.report.summary import Cell, NumberFormat, Summary
from ebbflow.report.targets import CLOCK

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
    "target_caption",
    "target_table",
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
        windows = {c.window for c in done}
        if windows == {1}:
            text += ", that of the last validation of each run"
        else:
            text += f", mean of the last {_counts(windows, 'validation')} of each run (a third of them, at most three)"
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
    cells = summary.cells_of(workload)
    if not any(
        cell.published is not None or cell.published_steps is not None or cell.published_scores for cell in cells
    ):
        return ""
    return _sources(summary, summary.sources)


def _sources(summary: Summary, sources: Iterable[str]) -> str:
    text = f" Published: {'; '.join(sources)}."
    if summary.stand_in is not None:
        text += f" The data here is {summary.stand_in}, which stands in for the paper's: not comparable with it."
    if summary.scaled is not None:
        text += f" This study is scaled to {summary.scaled:g} of its epochs: not comparable with what was published."
    return text


def published_text(cell: Cell | None, numbers: NumberFormat) -> str:
    """The values of the paper, such as "paper 94.24" or "29,240 steps, paper 29,240"; empty if it has none."""
    return "; ".join(", ".join(part) for part in _published_parts(cell, numbers))


def _published_parts(cell: Cell | None, numbers: NumberFormat) -> list[tuple[str, ...]]:
    """Each value of the paper, behind ours where the cell does not have it yet.

    It keeps the digits of the paper: how our values are rounded depends on our spread.
    """
    if cell is None:
        return []
    parts: list[tuple[str, ...]] = []
    if cell.published is not None:
        parts.append((f"paper {cell.published * numbers.factor:.6g}",))
    if cell.published_steps is not None:
        ours = [f"{cell.steps:,.0f} steps"] if cell.steps is not None else []
        parts.append((*ours, f"paper {cell.published_steps:,.0f}"))
    for name, value in cell.published_scores.items():
        score = cell.scores.get(name)
        parts.append((f"{name} {NOTHING if score is None else f'{score:.4g}'}", f"paper {value:.6g}"))
    return parts


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
            table.add_column("trace", style="dim", overflow="fold", max_width=_trace_width(summary, workload, width))
            for rule in rules:
                table.add_column(_header(rule), justify="right")
            numbers = summary.number_format(workload)
            for trace in summary.traces_of(workload):
                cells = [summary.cell(workload, trace, rule) for rule in rules]
                table.add_row(Text(trace), *(_rich_cell(cell, numbers) for cell in cells))
            parts.append(table)
        parts.append(Padding(Text(caption(summary, workload), style="dim"), (0, 0, 1, 1)))
        if rows := effort_table(summary, workload):
            table = Table(box=None, pad_edge=False, header_style="bold")
            for i, name in enumerate(rows[0]):
                short = name.replace("worker-hours", "worker-\nhours")
                table.add_column(Text(short), justify="left" if i < 2 else "right", overflow="fold")
            for row in rows[1:]:
                table.add_row(*map(Text, row))
            parts.append(Padding(table, (0, 0, 0, 1)))
            parts.append(Padding(Text(effort_caption(summary, workload), style="dim"), (0, 0, 1, 1)))
        for number in range(len(summary.targets_of(workload))):
            if target_table(summary, workload, number):
                tables = _terminal_targets(summary, workload, number, width)
                parts += [Padding(found, (int(i > 0), 0, 0, 1)) for i, found in enumerate(tables)]
                parts.append(Padding(Text(target_caption(summary, workload, number), style="dim"), (0, 0, 1, 1)))
    return Group(*parts)


# -- time and cost -----------------------------------------------------------------------------------------------------


def effort_table(summary: Summary, workload: str) -> list[list[str]]:
    """Time, worker-hours, money and samples beside the score, the names of the columns first; empty without records.

    Rules of a trace that took the same share a line. Simulated times replace the samples, and times that were fitted.
    Dropped samples, where there are any, have a column of their own.
    """
    numbers = summary.number_format(workload)
    cells = [c for c in summary.cells_of(workload) if c.finished or c.not_validated]
    if not any(cell.time_s for cell in cells):
        return []
    clocks = list(dict.fromkeys(name for cell in cells for name in cell.simulated_s))
    timed = not (clocks and workload in summary.fitted)
    priced = timed and any(cell.usd_per_hour is not None for cell in cells)
    drops = any(cell.dropped for cell in cells)
    lines: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        texts = (
            *([_time(cell.time_s), _hours(cell.worker_hours)] if timed else []),
            *([_money(cell.cost_usd(cell.worker_hours))] if priced else []),
            *([_time(cell.simulated_s.get(name)) for name in clocks] or [_count(cell.samples)]),
            *([_count(cell.dropped)] if drops else []),
        )
        lines.setdefault((cell.trace, *texts), []).append(cell)
    rows = [["trace", "rule", numbers.heading(cells[0].metric), *(["time", "worker-hours"] if timed else []),
             *(["USD"] if priced else []), *(clocks or ["samples"]), *(["dropped"] if drops else [])]]  # fmt: skip
    for (trace, *line), same in lines.items():
        names = [cell.rule for cell in same]
        everyone = len(names) > 1 and len(names) == len([c for c in cells if c.trace == trace])
        means = sorted(cell.mean for cell in same if cell.mean is not None)
        score = " to ".join(dict.fromkeys(numbers.number(mean) for mean in (*means[:1], *means[-1:]))) or NOTHING
        rows.append([trace, "all rules" if everyone else ", ".join(names), score, *line])
    return rows


def _money(usd: float | None) -> str:
    return NOTHING if usd is None else f"{usd:,.2f}"


def _time(seconds: float | None) -> str:
    return NOTHING if seconds is None else format_seconds(seconds)


def _hours(hours: float | None) -> str:
    return NOTHING if hours is None else f"{hours:,.3g}" if hours < 1000 else f"{hours:,.0f}"


def _count(count: float | None) -> str:
    return NOTHING if count is None else f"{count:,.0f}"


def _epochs(epochs: float | None) -> str:
    return NOTHING if epochs is None else f"{epochs:,.3g}" if epochs < 100 else f"{epochs:,.0f}"


def effort_caption(summary: Summary, workload: str) -> str:
    """What the numbers of `effort_table` mean."""
    clocks = dict.fromkeys(name for cell in summary.cells_of(workload) for name in cell.simulated_s)
    simulated = f"{', '.join(clocks)}: simulated time, the steps of the record priced with a step model"
    if clocks and workload in summary.fitted:
        return f"{simulated}; means over seeds."
    if workload in summary.measured:
        text = "Time as the workers measured it, and workers that took part x hours; "
    else:
        text = "Time on the clock of the trace, and available workers x hours, which are paid for whether they take "
        text += "part or not; "
    text += f"{f'{simulated}; ' if clocks else ''}means over seeds."
    return text + _fitted(summary, workload)


def _fitted(summary: Summary, workload: str) -> str:
    known = " The step time was fitted to the trace or the epoch: times compare rules, not machines."
    return known if workload in summary.fitted else ""


# -- to a target -------------------------------------------------------------------------------------------------------

TargetTable = list[list[tuple[str, ...]]]
"""Rows of cells, the names of the columns first. A cell has up to four lines: a mean, "± 7", "(3.1x)", "(paper 9)"."""


def target_table(summary: Summary, workload: str, number: int) -> TargetTable:
    """What each rule took to a target on each trace; empty if no run has ended or nobody asked for a target."""
    return [
        [(*lines, f"(paper {theirs})") if theirs else lines for lines, theirs in zip(row, published, strict=True)]
        for row, published in _target_rows(summary, workload, number)
    ]


def _target_rows(summary: Summary, workload: str, number: int) -> list[tuple[list[tuple[str, ...]], list[str]]]:
    """The rows of the table of a target, each with what was published for its columns; the names first."""
    cells = [cell for cell in summary.cells_of(workload) if cell.targets and cell.targets[number].runs]
    if not cells:
        return []
    clocks = [name for name in cells[0].targets[number].values if name.startswith(CLOCK)]
    fitted = workload in summary.fitted
    # Times that were fitted to a trace mean nothing beside simulated ones; a published time is then by itself.
    timed = not (fitted and clocks)
    paper_times = any("time_s" in cell.targets[number].published for cell in cells)
    columns: dict[str, tuple[str, Callable[[float | None], str]]] = {
        "epochs": ("epochs", _epochs),
        "updates": ("updates", _count),
        **({"time_s": ("time", _time)} if timed or paper_times else {}),
        **({"worker_hours": ("worker-hours", _hours)} if timed else {}),
        "wall_s": ("wall-clock", _time),
        **{name: (name.removeprefix(CLOCK), _time) for name in clocks},
    }
    priced = any(cell.usd_per_hour is not None for cell in cells) and timed
    faster = {"updates", *clocks, *(() if fitted else ("time_s",))}
    heading: list[tuple[str, ...]] = [("trace",), ("rule",), ("reached",), *((title,) for title, _ in columns.values())]
    heading += [("USD",)] if priced else []
    rows = [(heading, [""] * len(heading))]
    for cell in cells:
        to = cell.targets[number]
        row: list[tuple[str, ...]] = [(cell.trace,), (cell.rule,), (f"{to.reached} of {to.runs}",)]
        published = ["", "", ""]
        for name, (_, write) in columns.items():
            std, speed_up = to.std(name), to.speed_ups.get(name) if name in faster else None
            row.append((NOTHING,) if name == "time_s" and not timed else (
                write(to.mean(name)),
                *([f"± {_like(write(to.mean(name)), std) or write(std)}"] if std is not None else []),
                *([f"({speed_up:.3g}x)"] if speed_up is not None else []),
            ))  # fmt: skip
            published.append(_published_effort(to.published.get(name), unit=" s" if name == "time_s" else ""))
        row += [(_money(cell.cost_usd(to.mean("worker_hours"))),)] if priced else []
        rows.append((row, published + [""] * priced))
    return rows


def _published_effort(value: PublishedValue | None, *, unit: str) -> str:
    """What a paper reports, with its digits; empty if it does not.

    >>> _published_effort(4580.0, unit=""), _published_effort(579.0, unit=" s"), _published_effort("never", unit=" s")
    ('4,580', '579 s', 'never')
    """
    return "" if value is None else NEVER if value == NEVER else f"{value:,.10g}{unit}"


def _like(mean: str, std: float) -> str:
    """A time in the unit of its mean, so that the two can be compared; empty if the mean is no time.

    >>> _like("1.5 h", 5400.0), _like("1,837", 173.0)
    ('1.5 h', '')
    """
    unit = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}.get(mean.partition(" ")[2])
    return "" if unit is None else f"{std / unit:.1f} {mean.partition(' ')[2]}"


def target_caption(summary: Summary, workload: str, number: int) -> str:
    """What the numbers of `target_table` mean."""
    cells = summary.cells_of(workload)
    to, numbers = cells[0].targets[number], summary.number_format(workload)
    goal = f"{cells[0].metric} of {numbers.number(to.target)}{' %' if numbers.unit else ''}"
    if to.asked.relative:
        goal += f" ({to.asked} the score at the reference batch)"
    text = f"Until the first validation with {'an' if goal[0] in 'aeiou' else 'a'} {goal}"
    several = any(cell.targets[number].reached > 1 for cell in cells)
    text += "; mean ± standard deviation over the runs that reach it." if several else "."
    text += " Reached: of the runs that finished or diverged; a run that does not reach it is in no mean."
    text += " Wall-clock: the computing of the run itself, with its validations."
    simulated = any(name.startswith(CLOCK) for name in to.values)
    if simulated:
        text += " All further times are simulated: the steps of the record, priced with a step model."
    if workload in summary.baselines and any(cell.targets[number].speed_ups for cell in cells):
        trace, rule = summary.baselines[workload]
        text += f" In parentheses: speed-up over {rule} on {trace}, the runs at the reference batch."
    if not simulated:
        text += _fitted(summary, workload)
    sources = dict.fromkeys(source for cell in cells for source in cell.targets[number].sources)
    return text + (_sources(summary, sources) if sources else "")


def _terminal_targets(summary: Summary, workload: str, number: int, width: int) -> list[Table]:
    """The table of a target with one group of lines per trace; columns that do not fit go into further tables.

    A cell is one line, so that rules can be compared by eye. What was published is a line of its own below ours. The
    first table has all rules; further ones have those for which they say something.
    """
    (head, _), *rows = _target_rows(summary, workload, number)
    clocks = sum(name.startswith(CLOCK) for name in summary.cells_of(workload)[0].targets[number].values)
    own = len(head) - clocks - any(name == ("USD",) for name in head)
    names = [_target_rule(row[1][0], width) for row, _ in rows]
    labels = [row[0][0] for row, _ in rows] + [line for name in names for line in name.split("\n")]

    def needed(column: int) -> int:
        texts = [text for row, published in rows for text in (" ".join(row[column]), published[column])]
        return max(map(len, [*head[column], *texts])) + _GAP

    tables: list[Table] = []
    room = width - 1 - max(map(len, labels)) - needed(2)  # the tables are indented by one
    # Simulated times are compared with each other.
    for block in [
        *_columns_that_fit([*range(3, own), *range(own + clocks, len(head))], needed, room),
        *_columns_that_fit(range(own, own + clocks), needed, room),
    ]:
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, _GAP, 0, 0))
        table.add_column("rule", overflow="fold")
        for i in (2, *block):
            table.add_column(Text(head[i][0]), justify="right", overflow="fold")
        before = None
        for name, (row, published) in zip(names, rows, strict=True):
            if tables and all(row[i] == (NOTHING,) and not published[i] for i in block):
                continue
            if row[0] != before:
                table.add_row(Text(row[0][0], style="dim"))
            before = row[0]
            table.add_row(Text(name), *(Text(" ".join(row[i])) for i in (2, *block)))
            if any(published[i] for i in block):
                table.add_row("    paper", "", *(Text(published[i]) for i in block), style="dim")
        if table.row_count:
            tables.append(table)
    return tables


_GAP = 2  # blanks between the columns of the table of a target


def _target_rule(rule: str, width: int) -> str:
    """The name of a rule below that of its trace: on one line, unless it would take half of the table."""
    return "  " + (rule if len(rule) <= width // 2 - 4 else rule.replace("+", "\n   +"))


def _columns_that_fit(columns: Iterable[int], needed: Callable[[int], int], room: int) -> Iterator[list[int]]:
    """The columns in groups that need no more than the room; a column that needs more is a group of its own."""
    group: list[int] = []
    used = 0
    for column in columns:
        if group and used + needed(column) > room:
            yield group
            group, used = [], 0
        group.append(column)
        used += needed(column)
    if group:
        yield group


def _header(rule: str) -> Text:
    return Text(rule.replace("+", "\n+"))


def _rich_cell(cell: Cell | None, numbers: NumberFormat) -> Text:
    style = "bold green" if cell and cell.best else "yellow" if cell and cell.mean is None else ""
    text = Text(cell_text(cell, numbers), style=style)
    if cell and cell.best:
        text.append(" *", style="bold green")  # visible without colours, too: in a file, in a pipe
    if note := losses_text(cell):
        text.append("\n" + note.replace(", ", "\n"), style="yellow")
    for part in _published_parts(cell, numbers):
        text.append("\n" + "\n".join(part), style="dim")
    return text


def _trace_width(summary: Summary, workload: str, width: int) -> int:
    """Of the first column: half of the terminal at most, so that a long path does not take the place of the numbers."""
    return min(max(map(len, ["trace", *summary.traces_of(workload)])), width // 2)


def _blocks(summary: Summary, workload: str, width: int) -> Iterator[list[str]]:
    """The rules of a workload, in groups that fit next to the names of the traces."""
    numbers, traces = summary.number_format(workload), summary.traces_of(workload)
    room = width - _trace_width(summary, workload, width) - 4  # borders and padding
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
        for number in range(len(summary.targets_of(workload))):
            if rows := target_table(summary, workload, number):
                body = ["| " + " | ".join(_pipe(" ".join(cell)) for cell in row) + " |" for row in rows]
                body.insert(1, "|:--|:--|" + "--:|" * (len(rows[0]) - 2))
                texts.append("\n".join(body) + f"\n\n{target_caption(summary, workload, number)}\n")
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
        head = ["Trace", *map(_tex, rules)]
        texts.append(_latex_table(head, rows, f"{workload}. {caption(summary, workload)}", left=1))
        for number in range(len(summary.targets_of(workload))):
            if found := target_table(summary, workload, number):
                head, *body = ([_tex(" ".join(cell)) for cell in row] for row in found)
                lines = [" & ".join(row) + r" \\" for row in body]
                texts.append(
                    _latex_table(head, lines, f"{workload}. {target_caption(summary, workload, number)}", left=2)
                )
    return "\n".join(texts)


def _latex_table(head: list[str], rows: list[str], text: str, *, left: int) -> str:
    """A table whose first `left` columns are text."""
    lines = [
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{_tex(text)}}}",
        rf"  \begin{{tabular}}{{{'l' * left}{'r' * (len(head) - left)}}}",
        r"    \toprule",
        "    " + " & ".join(head) + r" \\",
        r"    \midrule",
        *(f"    {row}" for row in rows),
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


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
    """One line per cell, numbers as recorded (an accuracy is a fraction); an empty field if there is none.

    With several targets a cell has one line for each of them. Other scores that were published have two columns each.
    A text that a spreadsheet would take for a formula stands behind an apostrophe.
    """
    names = dict.fromkeys(name for cell in summary.cells for name in cell.published_scores)
    rows = [
        cell.as_json(target)
        | {f"score_{name}": cell.scores.get(name) for name in names}
        | {f"published_{name}": cell.published_scores.get(name) for name in names}
        for cell in summary.cells
        for target in range(max(len(cell.targets), 1))
    ]
    out = io.StringIO()
    if rows:
        plain = [key for key, value in rows[0].items() if not isinstance(value, list | dict)]
        writer = csv.DictWriter(out, plain, extrasaction="ignore")
        writer.writeheader()
        writer.writerows({key: _no_formula(value) for key, value in row.items()} for row in rows)
    return out.getvalue()


def _no_formula(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def json_text(summary: Summary) -> str:
    """What `ebbflow report --json` prints."""
    return json.dumps(summary.as_json(), indent=2, allow_nan=False)
