"""`ebbflow train`: one run."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from ebbflow.cli.common import AsJson, command_line, err, interruptible, out, print_json
from ebbflow.cli.options import takes_settings
from ebbflow.cli.train_progress import TrainProgress, number_text
from ebbflow.core.endings import Ending
from ebbflow.core.memory import keep_freed_memory
from ebbflow.core.signals import StopSignal
from ebbflow.core.units import format_seconds, parse_seconds
from ebbflow.errors import OutputError
from ebbflow.record import Run
from ebbflow.run.config import RunConfig

__all__ = ["train"]


@takes_settings("command", argument="workload", leave_out=("label",), choice=True)
def train(
    config: RunConfig,
    *,
    out_folder: Annotated[Path | None, typer.Option("--out", help="Folder of the run; default: below runs/.")] = None,
    checkpoint_every: Annotated[str, typer.Option(help="Time between checkpoints.")] = "60s",
    allow_code_change: Annotated[
        bool, typer.Option("--allow-code-change", help="Continue a run although its plugin, model or recipe changed.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Train one workload on one trace by one rule. The same command continues a run that was interrupted.

    Exit codes: 0 finished, 1 failed, 2 wrong input, 3 stopped (the same command continues), 5 diverged.

    ebbflow train digits-mlp --trace spot.csv --rule "linear+warmup(2ep)"
    """
    every = parse_seconds(checkpoint_every)
    from ebbflow.run import torchrun, training
    from ebbflow.run.loop import Callbacks

    here = torchrun.rank_info(os.environ)
    prints = here is None or here.rank == 0
    name = f"{config.workload}_{config.plan or config.trace}_{config.rule or 'default'}_s{config.seed}"
    folder = out_folder or Path("runs") / _slug(name)
    with (
        interruptible(tell=prints),
        StopSignal() as stop,
        TrainProgress(folder, silent=not prints, quiet=json) as shown,
    ):
        callbacks = Callbacks(
            on_start=shown.on_start, on_resume=shown.on_resume, on_step=shown.on_step,
            on_validation=shown.on_validation, should_stop=lambda: stop.requested,
        )  # fmt: skip
        keep_freed_memory()
        try:
            run = training.train(
                config, folder, command=command_line(), callbacks=callbacks, checkpoint_every_s=every,
                allow_code_change=allow_code_change,
            )  # fmt: skip
        except OutputError as error:
            if not shown.trains:
                raise
            err.print(f"failed: {error}", soft_wrap=True)
            raise typer.Exit(Ending.FAILED.code) from None
    if prints:
        _print(run, folder, trained=shown.trains, as_json=json)
    raise typer.Exit(Ending.named(run.status).code)


def _print(run: Run, folder: Path, *, trained: bool, as_json: bool) -> None:
    answer = _answer(run, folder)
    if not trained:
        err.print(
            f"nothing was trained: {folder} holds this run, which has ended; give another --out to repeat it",
            soft_wrap=True,
        )
    if as_json:
        print_json(answer)
        return
    dropped = f" ({answer['dropped']:,} more were dropped)" if answer["dropped"] else ""
    out.print(Text(run.status, style="bold"), f"after {answer['steps']} steps, {answer['samples']:,} samples{dropped}, "
              f"{format_seconds(answer['wall_s'])} of computing")  # fmt: skip
    if run.end is not None and run.end.text:
        out.print(run.end.text, soft_wrap=True)
    for name, value in answer["metrics"].items():
        out.print(f"  {name:10s} {number_text(value, 4) if value is not None else 'not a number'}")
    if run.header.left_out:
        out.print(f"left out of the data, or changed: {run.header.left_out}", soft_wrap=True)
    # On one line each, whatever the terminal's width, and quoted: the command is there to be copied.
    out.print(f"record: {run.path}", soft_wrap=True)
    command = shlex.join(["ebbflow", "report", str(folder)])
    out.print("report:", Text(command, style="bold"), soft_wrap=True)


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+_-]+", "-", text).strip("-")


def _answer(run: Run, folder: Path) -> dict[str, Any]:
    assert run.end is not None  # train() returns runs that have ended
    return {
        "status": run.status,
        "steps": run.end.steps,
        "samples": run.end.samples - run.dropped,
        "dropped": run.dropped,
        "wall_s": run.end.wall_s,
        "metrics": dict(run.validations[-1].metrics) if run.validations else {},
        "weights_sha256": run.end.weights_sha256,
        "left_out": run.header.left_out,
        "folder": str(folder),
    }
