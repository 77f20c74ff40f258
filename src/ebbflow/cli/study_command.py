"""`ebbflow study`: a grid of runs, and its report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TimeElapsedColumn
from rich.table import Table

from ebbflow.cli.common import AsJson, PluginFiles, command_line, err, interruptible, out, print_json, text_column
from ebbflow.cli.options import ChoiceFile, compared
from ebbflow.cli.report_command import show_report_of
from ebbflow.core.choices import read_choice
from ebbflow.core.endings import Ending
from ebbflow.core.units import format_seconds, parse_seconds
from ebbflow.errors import ConfigError
from ebbflow.report.results import begun_records
from ebbflow.studies.grid import (
    Study,
    check_arms,
    load_study,
    recipe_names,
    recipe_text,
    study_text,
    with_choice,
    with_plugins,
    with_settings,
)
from ebbflow.studies.runner import ArmProgress, run_study
from ebbflow.studies.scaling import scaled, with_stand_in

__all__ = ["Jobs", "run_with_progress", "study"]

Jobs = Annotated[int | None, typer.Option(help="Arms that run at once. Default: one per core, or three on a GPU.")]


def study(
    config: Annotated[str | None, typer.Argument(help="A study file (.toml, .yaml), or the name of a recipe.")] = None,
    out_folder: Annotated[Path | None, typer.Option("--out", help="Folder of the study. Default: below runs/.")] = None,
    scale: Annotated[
        float, typer.Option(help="Shrink the study: this fraction of the epochs, narrower models, same structure.")
    ] = 1.0,
    stand_in: Annotated[
        str | None, typer.Option(help="Run on data that stands in for the paper's, such as digits or cifar10.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Number of seeds. Default: as in the study.")] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A setting for every run without an override of its own, such as device=cuda; repeatable.",
        ),
    ] = None,
    choice: ChoiceFile = None,
    plugin: PluginFiles = None,
    jobs: Jobs = None,
    checkpoint_every: Annotated[str, typer.Option(help="Time between checkpoints of an arm.")] = "30s",
    keep_weights: Annotated[bool, typer.Option("--keep-weights", help="Keep the final weights of every arm.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Run only these arms now, such as seed=0 or trace=spot; repeatable. The others stay as they are.",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="How long this call may take, such as 50min: arms that would not end by then are not started, those "
            "that run have ten seconds for a checkpoint, and the same command continues. Exit code 4."
        ),
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the recipes that come with ebbflow.")] = False,
    shown: Annotated[
        bool,
        typer.Option(
            "--show", help="Print the file of a recipe, or the study that other options make of it, to start your own."
        ),
    ] = False,
    json: AsJson = False,
) -> None:
    """Run rules x traces x workloads x seeds in parallel and report. The same command continues after a kill.

    The report shows what there is. Exit code 1: some arms failed; 5: some diverged; 4: --budget left some.

    ebbflow study study.toml --jobs 4
    ebbflow study lena-table1 --stand-in digits
    """
    if listed:
        _list(as_json=json)
        return
    if config is None:
        raise ConfigError(
            f"no study was given; write one (see the guide) or name a recipe: {', '.join(recipe_names())}"
        )
    changed = setting or plugin or scale != 1 or any(value is not None for value in (stand_in, choice, seeds))
    if shown and not changed and config in recipe_names():
        print(recipe_text(config), end="")
        return
    chosen = load_study(config)
    if stand_in is not None:
        chosen = with_stand_in(chosen, stand_in)
    chosen = with_plugins(with_settings(chosen, setting or []), plugin or [])
    for text in setting or []:
        _tell_overrides(chosen, text.partition("=")[0].strip())
    if choice is not None:
        chosen = _with_choice(chosen, choice, setting or [])
    if seeds is not None:
        if seeds < 1:
            raise ConfigError(f"seeds is {seeds}; expected how many, 1 or more")
        chosen = replace(chosen, seeds=tuple(range(seeds)))
    chosen = scaled(chosen, scale)
    if shown:
        check_arms(chosen.arms())
        print(study_text(chosen), end="")
        return
    folder = out_folder or Path("runs") / chosen.name.replace("/", "-")
    ended = run_with_progress(
        chosen, folder, jobs=jobs, checkpoint_every=checkpoint_every, keep_weights=keep_weights,
        only=_by_axis(only or []), within_s=math.inf if budget is None else _limit(budget),
    )  # fmt: skip
    if begun_records(folder):
        ended = show_report_of(folder, ended, as_json=json)
    elif json:  # the time was over before the first arm began
        print_json({"cells": []})
    raise typer.Exit(ended.code)


def _tell_overrides(study: Study, name: str) -> None:
    """Say which runs do not take a setting that was given for every run."""
    kept = study.overridden(name)
    if kept:
        values = ", ".join(dict.fromkeys(map(str, kept)))
        err.print(
            f"--set {name}: {len(kept)} of {len(study.arms())} runs keep their own, by an [[override]] of the study: "
            f"{values}", soft_wrap=True, markup=False,
        )  # fmt: skip


def _by_axis(only: list[str]) -> dict[str, list[str]]:
    """What `--only` says, by axis: several values of an axis are alternatives."""
    chosen: dict[str, list[str]] = {}
    for text in only:
        axis, found, value = text.partition("=")
        if not found:
            raise ConfigError(f"--only {text!r}: expected NAME=VALUE, such as seed=0, trace=spot or rule=linear")
        chosen.setdefault(axis.strip(), []).append(value.strip())
    return chosen


def _limit(budget: str) -> float:
    seconds = parse_seconds(budget)
    if seconds <= 0:
        raise ConfigError(f"--budget {budget}: expected how long the call may take, such as 50min")
    return seconds


def _with_choice(study: Study, path: Path, given: list[str]) -> Study:
    """The study with the rule of a choice and its base rate; a rate on the command line is used instead of it."""
    choice = read_choice(path)
    if any(text.partition("=")[0].strip() == "lr" for text in given):
        err.print(f"{path}: rule {choice.rule}; not lr {choice.lr:g}, since --set lr was given", soft_wrap=True)
        return replace(study, rules=tuple(dict.fromkeys((*study.rules, choice.rule))))
    err.print(
        f"{path}: the runs of {choice.rule} take lr {choice.lr:g}, unless an override says otherwise", soft_wrap=True
    )
    changed = with_choice(study, choice)
    taken = [arm.config for arm in changed.arms() if (arm.config.rule, arm.config.lr) == (choice.rule, choice.lr)]
    for text in dict.fromkeys(text for config in taken for text in compared(choice, config, origin=str(path))):
        err.print(f"{path}: {text}", soft_wrap=True)
    return changed


def _list(*, as_json: bool) -> None:
    recipes = [(name, load_study(name)) for name in recipe_names()]
    if as_json:
        print_json([{"name": name, "arms": len(study.arms()), "summary": study.summary} for name, study in recipes])
        return
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("name", no_wrap=True)
    shown.add_column("runs", justify="right")
    shown.add_column("description")
    for name, study in recipes:
        shown.add_row(name, str(len(study.arms())), study.summary)
    out.print(shown)


def run_with_progress(
    chosen: Study,
    folder: Path,
    *,
    jobs: int | None = None,
    checkpoint_every: str = "30s",
    keep_weights: bool = False,
    only: Mapping[str, list[str]] | None = None,
    within_s: float = math.inf,
) -> Ending:
    """Run a study with one progress bar, and print failures at once on standard error; failed if an arm has failed."""
    arms = chosen.only(only or {})
    fractions = dict.fromkeys((arm.id for arm in arms), 0.0)
    ended: dict[str, str] = {}
    warned: set[str] = set()
    said: set[str] = set()
    found = 0
    with interruptible(), Progress(
        text_column("{task.description}"), BarColumn(), text_column("{task.percentage:3.0f} %"), TimeElapsedColumn(),
        text_column("{task.fields[left]}"), console=err,
    ) as bar:  # fmt: skip
        task = bar.add_task(f"0/{len(arms)} arms", total=len(arms), left="")

        def on_progress(progress: ArmProgress) -> None:
            nonlocal found
            fractions[progress.arm] = max(fractions[progress.arm], progress.fraction)
            if progress.what in ("found", "finished", "diverged", "failed"):
                ended[progress.arm] = progress.text if progress.what == "found" else progress.what
                found += progress.what == "found"
            if progress.other_data and progress.other_data not in warned:
                warned.add(progress.other_data)
                err.print(
                    f"warning: {progress.arm} has ended before and is kept, but {progress.other_data}; for other data "
                    f"choose another folder with --out", soft_wrap=True,
                )  # fmt: skip
            if progress.what == "diverged" or (progress.what == "failed" and progress.text not in said):
                said.add(progress.text)  # many arms may fail for one reason, which their records have for each
                err.print(f"{progress.arm} {progress.what}: {progress.text}", soft_wrap=True)
            left = f"{format_seconds(progress.left_s)} left" if progress.left_s else ""
            bar.update(task, completed=sum(fractions.values()), description=f"{len(ended)}/{len(arms)} arms", left=left)

        run_study(
            chosen,
            folder,
            jobs=jobs,
            command=command_line(),
            checkpoint_every_s=parse_seconds(checkpoint_every),
            keep_weights=keep_weights,
            only={arm.id for arm in arms},
            within_s=within_s,
            on_progress=on_progress,
        )
    if found == len(arms):
        err.print(f"nothing was trained: all {found} arms have ended before; give another --out to repeat them")
    for ending in (Ending.FAILED, Ending.DIVERGED):
        if count := sum(what == ending.word for what in ended.values()):
            err.print(f"{ending.word}: {count} of {len(arms)} arms")
            return ending
    if len(ended) == len(arms):
        return Ending.FINISHED
    err.print(f"{len(ended)} of {len(arms)} arms have ended; the same command continues with the others")
    return Ending.INCOMPLETE
