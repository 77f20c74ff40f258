"""Step models from short trainings on this machine, or from the records of a run or a live job (`ebbflow profile`)."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from ebbflow.core.memory import keep_freed_memory
from ebbflow.core.units import Seconds
from ebbflow.errors import ConfigError
from ebbflow.live.accounting import read_account
from ebbflow.record import Run, read_record
from ebbflow.run.config import RunConfig
from ebbflow.simulate.profiles import (
    MeasuredStep,
    StepModelFit,
    emulated_micro_batch,
    fit_runs,
    fit_steps,
    measured_steps,
    record_path,
)
from ebbflow.simulate.recovery import StepRecovery

__all__ = ["live_records", "live_recovery", "measure_workload", "profile_records", "profile_workload"]

_WARM_UP = 3
"""Steps that are not measured: memory is allocated, kernels are chosen."""
_SEVERAL = 3
"""Number of steps from which on the smaller last steps of epochs are used, too."""


def profile_workload(
    config: RunConfig, *, local_batches: Sequence[int], workers: Sequence[int] | None = None, steps: int = 40,
    progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> StepModelFit:  # fmt: skip
    """The step model of a workload, measured in short trainings on this machine.

    Without `workers` it is the model of one worker of a fleet. With them that many workers are emulated, and it is the
    model of an emulated run. `progress` wraps the sequence of trainings, to show how far the measurement is.
    """
    measured, micro_batch = measure_workload(config, local_batches, workers or (1,), steps=steps, progress=progress)
    return fit_steps(measured, serial=workers is not None, micro_batch=micro_batch)


def measure_workload(
    config: RunConfig, local_batches: Sequence[int], workers: Sequence[int] = (1,), *, steps: int,
    progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> tuple[list[MeasuredStep], int | None]:  # fmt: skip
    """The time of steps for each local batch and number of emulated workers, and the samples of one pass.

    The smaller last steps of epochs are included if there were several. The samples of a pass are those of
    `emulated_micro_batch`.
    """
    found: list[MeasuredStep] = []
    micro_batch = None
    rules: dict[int, str] = {}  # by number of workers, where none is named: the default is decided, and told, once
    for count, size in progress(list(itertools.product(workers, local_batches))):
        rule = config.rule or rules.get(count)
        fleet = config.replace(trace=f"constant({count})", local_batch=size, step_time="1s", repeat=True, rule=rule)
        run = _short_run(fleet, steps)
        rules[count] = run.header.config["rule"]
        micro_batch = emulated_micro_batch(run)
        kinds = measured_steps(run)
        if count * size > max(kind.samples for kind in kinds):
            raise ConfigError(f"the data set is too small for steps of {count * size} samples; leave this one out")
        found += [kind for kind in kinds if kind.samples == count * size or kind.steps >= _SEVERAL]
    return found, micro_batch


def _short_run(config: RunConfig, steps: int) -> Run:
    """The record of a training that is stopped after `steps` steps, without the steps of the warm-up."""
    from ebbflow.run import loop, training  # imports torch, which reading records does not need

    done = 0

    def count(row: object) -> None:
        nonlocal done
        done += 1

    keep_freed_memory()
    with tempfile.TemporaryDirectory(prefix="ebbflow-profile-") as folder:
        callbacks = loop.Callbacks(on_step=count, should_stop=lambda: done >= steps + _WARM_UP)
        try:
            training.train(config, Path(folder), callbacks=callbacks, checkpoint_every_s=1e9, keep_weights=False)
        except KeyboardInterrupt:
            if done < steps + _WARM_UP:
                raise
        run = read_record(Path(folder) / training.RECORD)
    return replace(run, steps=run.steps[_WARM_UP:] if len(run.steps) > _WARM_UP + 1 else run.steps)


def profile_records(path: Path | str, *, emulated: bool | None = None) -> tuple[StepModelFit, StepRecovery | None]:
    """The step model of a run, or of all replicas of a live job, and for a live job what changes cost.

    `emulated` says whether one machine computed for all workers; by default the engine in the record decides.
    """
    path = Path(path)
    records = live_records(path)
    if records and emulated is None:
        emulated = False
    runs = [read_record(record) for record in records or [record_path(path)]]
    return fit_runs(runs, emulated=emulated), live_recovery(path) if records else None


def live_records(folder: Path | str) -> list[Path]:
    """The records of the replicas of a live job; none if the folder is not that of a live job."""
    return sorted(Path(folder).glob("replicas/*/record.jsonl"))


def live_recovery(folder: Path | str) -> StepRecovery | None:
    """The median time that a loss, and a gain, cost a live job; None if its fleet never changed."""
    costs = [
        (one.after - one.before, one.lost_s) for one in read_account(Path(folder)).changes if one.lost_s is not None
    ]
    if not costs:
        return None
    losses, gains = ([cost for more, cost in costs if more * sign > 0] for sign in (-1, 1))
    return StepRecovery(detect=Seconds(median(losses or [0.0])), join=Seconds(median(gains or [0.0])))
