"""`ebbflow profile`: how long a step takes on this machine, as a step model that simulate reads."""

from __future__ import annotations

import json as json_format
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track
from rich.table import Table

from ebbflow.cli.common import AsJson, PluginFiles, err, out, print_json
from ebbflow.cli.scenario_options import numbers
from ebbflow.core.files import write_whole
from ebbflow.core.plugins import load_plugins
from ebbflow.core.units import format_seconds
from ebbflow.errors import ConfigError
from ebbflow.run.config import RunConfig
from ebbflow.simulate.profiles import StepModelFit
from ebbflow.studies.profiling import profile_records, profile_workload

__all__ = ["profile"]


_OF_A_MEASUREMENT = ("local_batch", "workers", "steps", "rule", "data", "device", "threads")
_OF_A_RECORD = ("emulated",)


def profile(
    typed: typer.Context,
    workload: Annotated[str | None, typer.Argument(help="What to train; ebbflow workloads lists them.")] = None,
    record: Annotated[
        Path | None, typer.Option("--from", help="Fit the steps of this run or live job, of any engine, instead.")
    ] = None,
    local_batch: Annotated[str, typer.Option(help="Local batches to measure: '16,32,64' or '16:256:16'.")] = (
        "16,32,64,128,256"
    ),
    workers: Annotated[
        str | None,
        typer.Option(help="Emulate these numbers of workers, '1,2,8': the model of an emulated run, not of a fleet."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps to measure for each local batch.", min=1)] = 40,
    rule: Annotated[
        str | None, typer.Option(help="The rule; one that measures noise takes longer. Default: as train has it.")
    ] = None,
    emulated: Annotated[
        bool | None,
        typer.Option(help="In the record, one machine computed for all workers. Default: if its engine did."),
    ] = None,
    data: Annotated[str | None, typer.Option(help="The data set, for workloads that need one.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    plugin: PluginFiles = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Write the model into this file, for simulate --profile.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Measure how long a step of one worker takes here, by its samples, or fit the steps of a record.

    ebbflow profile digits-cnn --out profile.json
    ebbflow profile --from runs/train
    """
    if (workload is None) == (record is None):
        raise ConfigError("give a workload to measure, or a record to fit with --from, one of the two")
    _refuse_what_is_ignored(typed, measures=record is None)
    load_plugins(plugin or [])
    recovery = None
    if record is not None:
        found, recovery = profile_records(record, emulated=emulated)
    else:
        assert workload is not None
        found = profile_workload(
            RunConfig(
                workload=workload, rule=rule, data=data, device=device, threads=threads, plugins=tuple(plugin or ())
            ),
            local_batches=numbers(local_batch, what="--local-batch"),
            workers=None if workers is None else numbers(workers, what="--workers"),
            steps=steps,
            progress=_progress,
        )
    answer = {**found.as_json(), "recovery": None if recovery is None else str(recovery)}
    if out_file is not None:
        write_whole(out_file, (json_format.dumps(answer, indent=2) + "\n").encode())
        err.print(f"wrote {out_file}", soft_wrap=True)
    if json:
        print_json(answer)
        return
    out.print(_table(found))
    out.print(f"\n{found.model}\nfits with an error of {found.error:.1%}", highlight=False)
    if recovery is not None:
        out.print(f'changes of the fleet: --recovery "{recovery}"', soft_wrap=True)


def _refuse_what_is_ignored(typed: typer.Context, *, measures: bool) -> None:
    """Refuse options that are for measuring a workload where a record is read, and the other way round."""
    why = "a record (--from), and a workload is measured" if measures else "measuring, and a record is read (--from)"
    for name in _OF_A_RECORD if measures else _OF_A_MEASUREMENT:
        source = typed.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ConfigError(f"--{name.replace('_', '-')} is for {why}; leave it out")


def _progress(trainings: Sequence[Any]) -> Iterable[Any]:
    return track(trainings, description="measuring", console=err, transient=True)


def _table(found: StepModelFit) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("workers", "samples", "steps", "measured", "model"):
        table.add_column(column, justify="right")
    for step in found.measured:
        times = (_precise(step.seconds), _precise(found.seconds(step)))
        table.add_row(f"{step.workers}", f"{step.samples:,}", f"{step.steps:,}", *times)
    return table


def _precise(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else format_seconds(seconds)
