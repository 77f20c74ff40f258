"""`ebbflow profile`: how long a step takes on this machine, as a model that simulate reads."""

from __future__ import annotations

import itertools
import json as json_format
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track
from rich.table import Table

from ebbflow.cli.common import AsJson, err, out, print_json
from ebbflow.cli.whatif import numbers
from ebbflow.config import RunConfig
from ebbflow.errors import ConfigError
from ebbflow.files import write_whole
from ebbflow.record import Run, read_record
from ebbflow.sim.efficiency import record_file
from ebbflow.sim.fit import Fit, Measured, fit_steps, measured_steps
from ebbflow.units import format_seconds

__all__ = ["measure_workload", "profile"]

EMULATED = frozenset({"auto", "loop", "fused"})
"""Engines of a record in which one machine computed for all workers."""
_WARM_UP = 3
"""Steps that are not counted: memory is found, kernels are chosen."""


def profile(
    workload: Annotated[str | None, typer.Argument(help="What to train; ebbflow workloads lists them.")] = None,
    record: Annotated[
        Path | None, typer.Option("--from", help="Fit the steps of this record, of any engine, instead.")
    ] = None,
    local_batch: Annotated[str, typer.Option(help="Local batches to measure: '16,32,64' or '16:256:16'.")] = (
        "16,32,64,128,256"
    ),
    workers: Annotated[
        str | None, typer.Option(help="Emulate so many workers, '1,2,8': the model of an emulated run, not of a fleet.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps to measure at each local batch.", min=1)] = 40,
    rule: Annotated[str, typer.Option(help="The rule; one that measures noise takes longer.")] = "linear",
    emulated: Annotated[
        bool | None, typer.Option(help="In the record one machine computed for all workers; default: by its engine.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="The data set, for workloads that need one.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Write the model here, for simulate --profile.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Measure how long a step of one worker takes here, by its samples, or fit the steps of a record."""
    if (workload is None) == (record is None):
        raise ConfigError("give a workload to measure, or a record to fit with --from, one of the two")
    if record is not None:
        run = read_record(record_file(record))
        serial = run.header.config.get("engine") in EMULATED if emulated is None else emulated
        found = fit_steps(measured_steps(run), serial=serial)
    else:
        assert workload is not None
        config: dict[str, Any] = {
            "workload": workload,
            "rule": rule,
            "data": data,
            "device": device,
            "threads": threads,
        }
        fleets = [1] if workers is None else numbers(workers, what="--workers")
        measured = measure_workload(config, numbers(local_batch, what="--local-batch"), fleets, steps=steps)
        found = fit_steps(measured, serial=workers is not None)
    if out_file is not None:
        write_whole(out_file, (json_format.dumps(found.as_json(), indent=2) + "\n").encode())
        err.print(f"wrote {out_file}", markup=False, soft_wrap=True)
    if json:
        print_json(found.as_json())
        return
    out.print(_table(found))
    out.print(f"\n{found.model}\nfits with an error of {found.error:.1%}", highlight=False)


def measure_workload(
    config: dict[str, Any], sizes: Sequence[int], fleets: Sequence[int] = (1,), *, steps: int
) -> list[Measured]:
    """The typical step at each local batch and number of emulated workers, in short trainings on this machine."""
    found: list[Measured] = []
    shapes = list(itertools.product(fleets, sizes))
    for workers, size in track(shapes, description="measuring", console=err, transient=True):
        shape: dict[str, Any] = {
            "trace": f"constant({workers})",
            "local_batch": size,
            "step_time": "1s",
            "repeat": True,
        }
        kinds = measured_steps(_short_run(RunConfig(**config, **shape), steps))
        whole = [one for one in kinds if one.samples == workers * size]
        if not whole and workers * size > max(one.samples for one in kinds):
            raise ConfigError(f"the data set is too small for steps of {workers * size} samples; leave this one out")
        found += whole
    return found


def _short_run(config: RunConfig, steps: int) -> Run:
    """A training that is stopped after its first steps; its record, without them."""
    import dataclasses

    from ebbflow import training

    done = 0

    def count(row: object) -> None:
        nonlocal done
        done += 1

    with tempfile.TemporaryDirectory(prefix="ebbflow-profile-") as folder:
        callbacks = training.Callbacks(on_step=count, should_stop=lambda: done >= steps + _WARM_UP)
        try:
            training.train(config, Path(folder), callbacks=callbacks, checkpoint_every_s=1e9, keep_weights=False)
        except KeyboardInterrupt:
            if done < steps + _WARM_UP:
                raise
        run = read_record(Path(folder) / training.RECORD)
    return dataclasses.replace(run, steps=run.steps[_WARM_UP:] if len(run.steps) > _WARM_UP + 1 else run.steps)


def _table(found: Fit) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("workers", "samples", "steps", "measured", "model"):
        table.add_column(column, justify="right")
    for one in found.measured:
        table.add_row(
            f"{one.workers}", f"{one.samples:,}", f"{one.steps:,}", _fine(one.seconds), _fine(found.seconds(one))
        )
    return table


def _fine(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else format_seconds(seconds)
