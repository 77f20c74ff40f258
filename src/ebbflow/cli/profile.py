"""`ebbflow profile`: how long a step takes on this machine, as a model that simulate reads."""

from __future__ import annotations

import itertools
import json as json_format
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.progress import track
from rich.table import Table

from ebbflow.cli.common import AsJson, err, out, print_json
from ebbflow.cli.whatif import numbers
from ebbflow.core.files import write_whole
from ebbflow.core.memory import keep_freed_memory
from ebbflow.core.units import Seconds, format_seconds
from ebbflow.errors import ConfigError
from ebbflow.live.accounting import read_account
from ebbflow.record import Run, read_record
from ebbflow.run.config import RunConfig
from ebbflow.simulate.efficiency import record_file
from ebbflow.simulate.fit import Fit, Measured, emulated_micro_batch, fit_steps, measured_steps
from ebbflow.simulate.recovery import PerStep

__all__ = ["live_records", "live_recovery", "measure_workload", "profile"]

EMULATED = frozenset({"auto", "loop", "fused"})
"""Engines of a record in which one machine computed for all workers."""
_WARM_UP = 3
"""Steps that are not counted: memory is found, kernels are chosen."""
_SEVERAL = 3
"""Steps from which on a kind that was not asked for counts."""


def profile(
    workload: Annotated[str | None, typer.Argument(help="What to train; ebbflow workloads lists them.")] = None,
    record: Annotated[
        Path | None, typer.Option("--from", help="Fit the steps of this run or live job, of any engine, instead.")
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
    recovery = None
    if record is not None:
        found, recovery = _fit_run(record, emulated)
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
        measured, micro_batch = measure_workload(
            config, numbers(local_batch, what="--local-batch"), fleets, steps=steps
        )
        found = fit_steps(measured, serial=workers is not None, micro_batch=micro_batch)
    answer = {**found.as_json(), "recovery": None if recovery is None else str(recovery)}
    if out_file is not None:
        write_whole(out_file, (json_format.dumps(answer, indent=2) + "\n").encode())
        err.print(f"wrote {out_file}", markup=False, soft_wrap=True)
    if json:
        print_json(answer)
        return
    out.print(_table(found))
    out.print(f"\n{found.model}\nfits with an error of {found.error:.1%}", highlight=False)
    if recovery is not None:
        out.print(f'changes of the fleet: --recovery "{recovery}"', highlight=False, markup=False, soft_wrap=True)


def measure_workload(
    config: dict[str, Any], sizes: Sequence[int], fleets: Sequence[int] = (1,), *, steps: int
) -> tuple[list[Measured], int | None]:
    """The steps at each local batch and number of emulated workers, in short trainings on this machine.

    The smaller last steps of epochs are among them where there were several. Also the samples of a pass
    (`emulated_micro_batch`).
    """
    found: list[Measured] = []
    micro_batch = None
    shapes = list(itertools.product(fleets, sizes))
    for workers, size in track(shapes, description="measuring", console=err, transient=True):
        shape: dict[str, Any] = {
            "trace": f"constant({workers})",
            "local_batch": size,
            "step_time": "1s",
            "repeat": True,
        }
        run = _short_run(RunConfig(**config, **shape), steps)
        micro_batch = emulated_micro_batch(run)
        kinds = measured_steps(run)
        if workers * size > max(one.samples for one in kinds):
            raise ConfigError(f"the data set is too small for steps of {workers * size} samples; leave this one out")
        found += [one for one in kinds if one.samples == workers * size or one.steps >= _SEVERAL]
    return found, micro_batch


def _short_run(config: RunConfig, steps: int) -> Run:
    """A training that is stopped after its first steps; its record, without them."""
    import dataclasses

    from ebbflow.run import training

    done = 0

    def count(row: object) -> None:
        nonlocal done
        done += 1

    keep_freed_memory()
    with tempfile.TemporaryDirectory(prefix="ebbflow-profile-") as folder:
        callbacks = training.Callbacks(on_step=count, should_stop=lambda: done >= steps + _WARM_UP)
        try:
            training.train(config, Path(folder), callbacks=callbacks, checkpoint_every_s=1e9, keep_weights=False)
        except KeyboardInterrupt:
            if done < steps + _WARM_UP:
                raise
        run = read_record(Path(folder) / training.RECORD)
    return dataclasses.replace(run, steps=run.steps[_WARM_UP:] if len(run.steps) > _WARM_UP + 1 else run.steps)


def _fit_run(path: Path, emulated: bool | None) -> tuple[Fit, PerStep | None]:
    """The model of a run, or of all replicas of a live job, and what changes cost there."""
    records = live_records(path)
    runs = [read_record(one) for one in records or [record_file(path)]]
    # A replica that was there for a moment has no two steps in a row.
    runs = [run for run in runs if len(run.steps) > 1] or runs
    serial = runs[0].header.config.get("engine") in EMULATED if emulated is None else emulated
    measured = [one for run in runs for one in measured_steps(run)]
    return fit_steps(measured, serial=serial, micro_batch=emulated_micro_batch(runs[0])), live_recovery(
        path
    ) if records else None


def live_records(folder: Path) -> list[Path]:
    """The records of the replicas of a live job; none if the folder is not that of one."""
    return sorted(folder.glob("replicas/*/record.jsonl"))


def live_recovery(folder: Path) -> PerStep | None:
    """What a loss and a gain held a live job up for, each the median; None where there was no change."""
    costs = [(one.after - one.before, one.lost_s) for one in read_account(folder).changes if one.lost_s is not None]
    if not costs:
        return None
    losses, gains = ([cost for more, cost in costs if more * sign > 0] for sign in (-1, 1))
    return PerStep(detect=Seconds(median(losses or [0.0])), join=Seconds(median(gains or [0.0])))


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
