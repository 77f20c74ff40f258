"""What a simulation learns from recorded runs: a step model, the file that keeps it (a profile), and the noise scale.

The time of a step is modelled as  a + b x share + [W > 1] (c + d x (W - 2)),  where `share` is the largest worker batch
and a, b, c, d are not negative: computing per step and per sample, an exchange of two workers, and more for each
further worker. This is the model of Pollux without overlap, which step times alone do not show. For emulated steps the
number of passes is a further term. The fit minimizes the relative error, so short steps count as much as long ones.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ebbflow.core.files import read_text
from ebbflow.core.units import Seconds
from ebbflow.errors import ConfigError, EbbflowError, RecordError
from ebbflow.record import Run, read_record
from ebbflow.simulate.step_models import NETWORKS, Affine, ComputeAndNetwork, emulated_passes

__all__ = [
    "MeasuredStep", "StepModelFit", "emulated_micro_batch", "fit_runs", "fit_steps", "measured_steps", "noise_scale_of",
    "read_noise_scale", "read_profile", "record_path",
]  # fmt: skip

Floats = npt.NDArray[np.float64]
_FLEETS = frozenset({"dask", "live"})
"""Engines whose workers compute at the same time; in all other records one machine computed for all of them."""
_FULL_WEIGHT = 5
"""Measured steps that give a kind of step its full weight: small steps are frequent, but not more important."""
_ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """The mean time of the steps with this number of workers and samples."""

    workers: int
    samples: int
    seconds: float
    steps: int = 1
    """How many steps were measured."""


@dataclass(frozen=True, kw_only=True)
class StepModelFit:
    """A fitted step model, and how well it describes the measurements."""

    model: ComputeAndNetwork
    measured: tuple[MeasuredStep, ...]
    error: float
    """Root of the mean squared relative error; 0.05 means 5 %."""

    def seconds(self, step: MeasuredStep) -> float:
        """The time that the model gives for a measured kind of step."""
        return float(self.model.breakdown(np.array([step.workers]), np.array([step.samples])).total[0])

    def as_json(self) -> dict[str, Any]:
        """What `ebbflow profile --json` prints and `read_profile` reads."""
        model = self.model
        return {
            "per_update_s": float(model.per_update),
            "per_step_s": float(model.per_step),
            "per_sample_s": float(model.per_sample),
            "network": None if model.network is None else str(model.network),
            "piece": model.micro_batch,  # the name in files of earlier versions
            "serial": model.serial,
            "error": self.error,
            "measured": [
                {"workers": step.workers, "samples": step.samples, "seconds": step.seconds, "steps": step.steps}
                for step in self.measured
            ],
        }


def read_profile(path: Path | str) -> ComputeAndNetwork:
    """The step model that `ebbflow profile --out` wrote."""
    try:
        body = json.loads(read_text(Path(path), error=ConfigError))
        return ComputeAndNetwork(
            per_update=Seconds(float(body["per_update_s"])),
            per_step=Seconds(float(body["per_step_s"])),
            per_sample=Seconds(float(body["per_sample_s"])),
            network=None if body["network"] is None else NETWORKS.make(body["network"]),
            micro_batch=None if body["piece"] is None else int(body["piece"]),
            serial=bool(body["serial"]),
        )
    except EbbflowError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: is not a profile ({error}); expected what ebbflow profile --out writes") from None


# -- fits --------------------------------------------------------------------------------------------------------------


def fit_runs(runs: Sequence[Run], *, emulated: bool | None = None) -> StepModelFit:
    """The step model of recorded runs: of one run, or of all replicas of a live job.

    `emulated` says whether one machine computed for all workers; by default the engine in the record decides, and a
    record that names none counts as emulated.
    """
    # A replica that took part for a moment only has no two steps in a row.
    runs = [run for run in runs if len(run.steps) > 1] or runs
    serial = runs[0].header.config.get("engine") not in _FLEETS if emulated is None else emulated
    measured = [step for run in runs for step in measured_steps(run)]
    return fit_steps(measured, serial=serial, micro_batch=emulated_micro_batch(runs[0]))


def fit_steps(
    measured: Sequence[MeasuredStep], *, serial: bool = False, micro_batch: int | None = None
) -> StepModelFit:
    """The step model that fits best. Terms that were not observed (one batch size, one number of workers) are left out.

    With `serial`, one machine computed for all workers: the time depends on the samples of the whole step, and the
    extra time of more workers is not an exchange but the work of emulating them. `micro_batch` is then the samples of
    one pass.
    """
    if not measured:
        raise ConfigError("no step was measured; a step model needs at least one")
    measured = _means_by_kind(measured)
    workers = np.array([step.workers for step in measured], np.float64)
    samples = np.array([step.samples for step in measured], np.float64)
    seconds = np.array([step.seconds for step in measured])
    if not (np.isfinite(seconds).all() and (seconds > 0).all()):
        raise ConfigError("a measured step took no time or no finite time; measure again")
    share = samples if serial else np.ceil(samples / workers)
    several = (workers > 1).astype(np.float64)
    passes = np.zeros_like(share)
    if serial and micro_batch is not None:
        passes += emulated_passes(workers.astype(np.int64), samples.astype(np.int64), micro_batch)
    columns = np.stack([np.ones_like(share), share, passes, several, several * np.maximum(workers - 2, 0)], axis=1)
    weight = np.sqrt([min(step.steps, _FULL_WEIGHT) for step in measured])
    observed, expected = _observed(columns), seconds
    for _ in range(_ROUNDS):
        # Errors are relative to the model's time. Relative to the measured time, a slow step in a noisy measurement
        # would count for less than a fast one, and the model would be too fast.
        solution = _least_squares(columns * (weight / expected)[:, None], weight * seconds / expected, observed)
        expected = columns @ solution
    fixed, per_sample, per_pass, first, more = map(float, solution)
    relative = seconds / expected - 1
    model = ComputeAndNetwork(
        per_update=Seconds(fixed if per_pass else 0.0),
        per_step=Seconds(per_pass or fixed),
        per_sample=Seconds(per_sample),
        micro_batch=micro_batch if per_pass else None,
        network=Affine(first=Seconds(first), more=Seconds(more)) if first or more else None,
        serial=serial,
    )
    error = math.sqrt(float(np.average(relative**2, weights=weight**2)))
    return StepModelFit(model=model, measured=tuple(measured), error=error)


def _means_by_kind(measured: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """One entry per kind of step, with the mean over all its measured steps."""
    kinds: dict[tuple[int, int], list[MeasuredStep]] = {}
    for step in measured:
        kinds.setdefault((step.workers, step.samples), []).append(step)
    found = []
    for (workers, samples), same in kinds.items():
        steps = sum(step.steps for step in same)
        mean = sum(step.seconds * step.steps for step in same) / steps
        found.append(MeasuredStep(workers=workers, samples=samples, seconds=mean, steps=steps))
    return found


def _observed(columns: Floats) -> list[int]:
    """The columns that the measurements determine: the share first, then the others while they are independent."""
    kept: list[int] = []
    for column in (1, 0, 2, 3, 4):
        if np.linalg.matrix_rank(columns[:, [*kept, column]]) > len(kept):
            kept.append(column)
    return sorted(kept)


def _least_squares(rows: Floats, target: Floats, allowed: Sequence[int]) -> Floats:
    """Least squares with coefficients >= 0: the best of all subsets of the columns, of which there are at most 31."""
    best, least = np.zeros(rows.shape[1]), math.inf
    for size in range(1, len(allowed) + 1):
        for subset in map(list, itertools.combinations(allowed, size)):
            part = np.linalg.lstsq(rows[:, subset], target, rcond=None)[0]
            error = float(((rows[:, subset] @ part - target) ** 2).sum())
            if (part >= 0).all() and error < least * (1 - 1e-6) - 1e-15:  # of equal fits the smaller model wins
                best, least = np.zeros(rows.shape[1]), error
                best[subset] = part
    return best


# -- measurements in records -------------------------------------------------------------------------------------------


def record_path(path: Path | str) -> Path:
    """The record file, also when the folder of a run is given."""
    path = Path(path)
    return path / "record.jsonl" if path.is_dir() else path


def measured_steps(run: Run) -> list[MeasuredStep]:
    """The mean time of each kind of step in a record; validations are not counted.

    Left out are the first step after each change of the workers, which includes the cost of the change, and steps that
    took more than ten times the median, during which the machine slept or compiled.
    """
    wall, workers, batch = run.column("wall_s"), run.column("workers"), run.column("batch")
    validated = {row.step for row in run.validations}
    kinds: dict[tuple[int, int], list[float]] = {}
    for i in range(1, len(wall)):
        follows = run.steps[i].step == run.steps[i - 1].step + 1 and workers[i] == workers[i - 1]
        if follows and run.steps[i].step not in validated:
            kinds.setdefault((int(workers[i]), int(batch[i])), []).append(float(wall[i] - wall[i - 1]))
    if not kinds:
        raise RecordError(
            f"{run.path} has {len(wall)} steps, no two of which follow each other with the same workers; a longer run "
            f"is needed"
        )
    return [
        MeasuredStep(workers=count, samples=size, seconds=_mean_without_outliers(times), steps=len(times))
        for (count, size), times in sorted(kinds.items())
    ]


def _mean_without_outliers(times: list[float]) -> float:
    """The mean of all times up to ten times the median.

    >>> _mean_without_outliers([1.0, 2.0, 3.0, 500.0])
    2.0
    """
    array = np.asarray(times)
    return max(float(array[array <= 10 * np.median(array)].mean()), 1e-9)


def emulated_micro_batch(run: Run) -> int | None:
    """The samples of one pass of the emulated engine that wrote a record; None if a step is one pass."""
    emulation = run.header.config.get("emulation", {})
    if emulation.get("engine") == "LoopEngine":
        return 1  # one pass per worker
    return None if emulation.get("batch_norm") == "sync" else emulation.get("chunk")


def noise_scale_of(run: Run) -> float:
    """The noise scale of a run in samples: mean noise divided by mean signal, both weighted by the samples of steps.

    The ratios of single steps are far too noisy to be averaged.
    """
    noise, signal, batch = run.column("noise"), run.column("signal"), run.column("batch")
    known = np.isfinite(noise) & np.isfinite(signal)
    if not known.any():
        raise RecordError(f"{run.path} has no noise and signal: its rule measured none; give the noise scale in "
                          f"samples, or train with a rule that measures, such as adascale")  # fmt: skip
    mean_noise = float(np.average(noise[known], weights=batch[known]))
    mean_signal = float(np.average(signal[known], weights=batch[known]))
    if not (mean_noise > 0 and mean_signal > 0):
        raise RecordError(f"{run.path}: noise {mean_noise:g} and signal {mean_signal:g} give no noise scale; "
                          f"the run is too short")  # fmt: skip
    return mean_noise / mean_signal


def read_noise_scale(text: str | Path) -> float:
    """A noise scale given as a number of samples, or as a record to take it from."""
    try:
        value = float(str(text))
    except ValueError:
        return noise_scale_of(read_record(record_path(Path(text))))
    if not (np.isfinite(value) and value > 0):
        raise ConfigError(f"the noise scale is {text} samples; expected a finite number above 0, or a record")
    return value
