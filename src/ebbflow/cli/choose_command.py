"""`ebbflow choose`: which rule and base rate suit a model on a trace, by a tournament within a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress
from rich.table import Column, Table

from ebbflow.cli.common import AsJson, command_line, err, interruptible, out, print_json, text_column
from ebbflow.cli.options import takes_settings
from ebbflow.cli.study_command import Jobs
from ebbflow.core.endings import Ending
from ebbflow.errors import ConfigError
from ebbflow.run.config import RunConfig

__all__ = ["choose_verb"]

_NOT_HERE = ("label", "rule", "seed", "plan")
"""Settings that a tournament determines, or that cannot be shortened."""


@takes_settings("command", argument="workload", leave_out=_NOT_HERE)
def choose_verb(
    config: RunConfig,
    *,
    budget: Annotated[
        str, typer.Option(help="How much it may take: 30min, 0.5gpuh, or 20% of training all candidates.")
    ],
    rule: Annotated[
        list[str] | None,
        typer.Option(help="A rule to compare, with its warm-up. Repeatable. Default: those that suit the optimizer."),
    ] = None,
    rates: Annotated[str, typer.Option(help="Factors of the base rate, separated by commas.")] = "1,4,0.25",
    seeds: Annotated[int, typer.Option(help="Number of seeds of a candidate at most, where noise could decide.")] = 3,
    out_folder: Annotated[Path | None, typer.Option("--out", help="Folder; default: below runs/.")] = None,
    jobs: Jobs = None,
    json: AsJson = False,
) -> None:
    """Find the rule and the base rate that suit a model on a trace, and write them to choice.toml.

    Candidates train for 5, 15 and 45 % of the epochs, each with its complete schedule, and the best third goes on. The
    same command continues after a kill, and with a larger budget. Exit code 4: nothing was decided within the budget,
    and choice.toml holds the fallback.

    ebbflow choose digits-mlp --trace spot.csv --budget 5min
    ebbflow train digits-mlp --trace spot.csv --choice runs/.../choice.toml
    """
    from ebbflow.studies.choosing import choose
    from ebbflow.studies.tournament import ChooseProgress

    settings = {name: value for name, value in config if value != RunConfig.model_fields[name].default}
    settings.setdefault("trace", config.trace)
    with (
        interruptible(),
        Progress(
            # The leader goes on in a second line where the terminal is narrow; the bar is what can be short.
            text_column("{task.description}"),
            BarColumn(bar_width=12),
            text_column("{task.fields[leader]}", table_column=Column(overflow="fold")),
            console=err,
        ) as bar,
    ):
        task = bar.add_task("preparing", total=None, leader="")

        def on_progress(progress: ChooseProgress) -> None:
            if progress.message:
                err.print(progress.message, soft_wrap=True)
            bar.update(
                task, total=progress.arms, completed=progress.done, leader=progress.leader,
                description=f"rung {progress.rung}/{progress.rungs}, {progress.epochs} epochs, {progress.spent}",
            )  # fmt: skip

        chosen = choose(
            **settings, budget=budget, rules=rule or (), rates=_numbers(rates), seeds=seeds, out=out_folder, jobs=jobs,
            command=command_line(), on_progress=on_progress,
        )  # fmt: skip
    answer = {**chosen.answer, "choice": str(chosen.path), "page": str(chosen.page)}
    if json:
        print_json(answer)
    else:
        _print(answer)
    raise typer.Exit((Ending.FINISHED if answer["decided_by"] == "tournament" else Ending.INCOMPLETE).code)


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"rates is {text!r}; expected numbers separated by commas, such as 1,4,0.25") from None


def _print(answer: dict[str, Any]) -> None:
    from ebbflow.report.choice_page import cost_text, score_text

    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "rule", "rate", answer["metric"], "epochs", "seeds"):
        shown.add_column(name, justify="left" if name in ("", "rule") else "right")
    for row in answer["ranking"]:
        shown.add_row(
            str(row["place"]), row["rule"], f"x{row['rate']:g}", score_text(row), str(row["epochs"]), str(row["seeds"])
        )
    if answer["ranking"]:
        out.print(shown)
    if answer["note"]:
        out.print(answer["note"])
    out.print(f"rule {answer['rule']}, base rate {answer['lr']:g}", style="bold")
    out.print(cost_text(answer))
    for text in answer["more"]:
        out.print(f"With a larger budget: {text}")
    for name in ("choice", "page"):
        out.print(f"{name}: {answer[name]}", soft_wrap=True)
