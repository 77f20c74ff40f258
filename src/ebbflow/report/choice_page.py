"""The page of a tournament: the choice, the ranking with intervals, the rungs and what they cost."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ebbflow.core.units import format_seconds, plural
from ebbflow.errors import RecordError
from ebbflow.report.plotting import INK, PALETTE, Drawing, drawing_style, legend, panels
from ebbflow.report.report_page import render_template, replace_folder, write_figures

__all__ = ["cost_text", "score_text", "write_choice_page"]

Answer = Mapping[str, Any]


def write_choice_page(folder: Path) -> Path:
    """Write the page of a tournament that has ended into `folder`/report; an earlier one is replaced as a whole."""
    path = folder / "choose.json"
    try:
        answer: Answer = json.loads(path.read_text(encoding="utf-8"))["answer"]
    except (OSError, ValueError, KeyError):
        raise RecordError(f"{path} has no result of a tournament; run `ebbflow choose` to its end") from None
    with replace_folder(folder / "report") as partial:
        page = render_template(
            "choice.html",
            name=f"{answer['source']['workload']} on {answer['source']['trace']}",
            takeaways=[
                _decision(answer), cost_text(answer), *(f"With a larger budget: {one}" for one in answer["more"]),
            ],
            rows=[{**row, "text": score_text(row)} for row in answer["ranking"]],
            metric=answer["metric"],
            rungs=answer["rungs"],
            left_out=answer["left_out"],
            source=answer["source"],
            figures=write_figures(_figures(answer), partial),
            command=answer["command"],
        )  # fmt: skip
        (partial / "index.html").write_text(page, encoding="utf-8")
    return folder / "report" / "index.html"


def _decision(answer: Answer) -> str:
    if answer["note"]:
        return str(answer["note"])
    first = answer["ranking"][0]
    return (
        f"Use {answer['rule']} with a base rate of {answer['lr']:g} ({answer['rate']:g} times the one given): "
        f"{answer['metric']} {score_text(first)} after {first['epochs']} of {answer['source']['epochs']} epochs."
    )


def score_text(row: Mapping[str, Any]) -> str:
    """The score of a row of the ranking, with half of its 95 % interval if that is known.

    >>> score_text({"score": 0.91234, "margin": 0.004}), score_text({"score": None, "status": "diverged"})
    ('0.9123 ± 0.0040', 'diverged')
    """
    if row["score"] is None:
        return str(row["status"])
    return f"{row['score']:.4f}" + (f" ± {row['margin']:.4f}" if row["margin"] is not None else "")


def cost_text(answer: Answer) -> str:
    """What the tournament cost, in a sentence."""
    cost = answer["cost"]
    return (
        f"It took {format_seconds(cost['wall_s'])}, with a budget of {answer['budget']}: {cost['runs']} "
        f"{plural(cost['runs'], 'run')}, {cost['samples']:,} samples, {cost['share']:.0%} of training every candidate "
        f"to its end once."
    )


def _figures(answer: Answer) -> Iterator[Drawing]:
    rows = [row for row in answer["ranking"] if row["score"] is not None]
    if not rows:
        return
    with drawing_style():
        figure, (axis,) = panels([""], height=0.34 * len(rows) + 0.9)
        lengths = sorted({row["epochs"] for row in rows}, reverse=True)
        for colour, epochs in zip(PALETTE, lengths, strict=False):
            own = [(place, row) for place, row in enumerate(rows) if row["epochs"] == epochs]
            axis.errorbar(
                [row["score"] for _, row in own], [place for place, _ in own],
                xerr=[row["margin"] or 0.0 for _, row in own], fmt="o", color=colour, markersize=5, capsize=2,
                label=f"{epochs} epochs",
            )  # fmt: skip
        axis.set_yticks(range(len(rows)), [f"{row['rule']}  x{row['rate']:g}" for row in rows])
        axis.invert_yaxis()
        axis.grid(visible=False, axis="y")
        axis.tick_params(axis="y", labelcolor=INK, length=0)
        axis.set_xlabel(answer["metric"])
        legend(figure, [axis])
        yield Drawing(
            stem="ranking", kind="ranking", title="The ranking",
            caption="The last validation of each candidate in the longest rung that it took part in. Only points of "
            "one colour are comparable. Lines: 95 % intervals, without what a seed does to all candidates alike.",
            figure=figure,
        )  # fmt: skip
