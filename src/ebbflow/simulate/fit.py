"""A step model from measured steps, and the file that keeps it.

The time of a step is taken to be  a + b x share + [W > 1] (c + d x (W - 2))  with a, b, c, d not negative: computing a
step and a sample, an exchange of two workers, and more for each further one (Pollux without overlap, which single step
times do not show). Of emulated steps the passes count, too, each of which takes a time of its own. The relative error
is made small, so that short steps count as much as long ones.
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
from ebbflow.record import Run
from ebbflow.simulate.network import NETWORKS, Affine
from ebbflow.simulate.stepmodel import ComputeAndNetwork, emulated_passes

__all__ = ["Fit", "Measured", "emulated_micro_batch", "fit_steps", "measured_steps", "read_profile"]

Floats = npt.NDArray[np.float64]
_ENOUGH = 5
"""Steps from which on a kind of step counts in full: small steps are many, and not more important for that."""
_ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Steps of one kind: the mean time of so many samples on so many workers."""

    workers: int
    samples: int
    seconds: float
    steps: int = 1
    """How many were measured."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A fitted model, and how well it says what was measured."""

    model: ComputeAndNetwork
    measured: tuple[Measured, ...]
    error: float
    """Root of the mean squared relative error; 0.05: 5 %."""

    def seconds(self, one: Measured) -> float:
        """What the model says of a measured kind of step."""
        return float(self.model.parts(np.array([one.workers]), np.array([one.samples])).total[0])

    def as_json(self) -> dict[str, Any]:
        """What `ebbflow profile --json` prints and `read_profile` reads."""
        model = self.model
        return {
            "per_update_s": float(model.per_update),
            "per_step_s": float(model.per_step),
            "per_sample_s": float(model.per_sample),
            "network": None if model.network is None else str(model.network),
            "piece": model.micro_batch,
            "serial": model.serial,
            "error": self.error,
            "measured": [
                {"workers": one.workers, "samples": one.samples, "seconds": one.seconds, "steps": one.steps}
                for one in self.measured
            ],
        }


def fit_steps(measured: Sequence[Measured], *, serial: bool = False, micro_batch: int | None = None) -> Fit:
    """The model that fits best; what was not observed (one batch size, one number of workers) is left out.

    `serial`: one machine computed for all workers, so the time goes by the samples of the whole step, and what more
    workers take longer is not an exchange but the work of emulating them; `micro_batch`: in passes of so many samples.
    """
    if not measured:
        raise ConfigError("no step was measured; a step model needs at least one")
    measured = _by_kind(measured)
    workers = np.array([one.workers for one in measured], np.float64)
    samples = np.array([one.samples for one in measured], np.float64)
    seconds = np.array([one.seconds for one in measured])
    if not (np.isfinite(seconds).all() and (seconds > 0).all()):
        raise ConfigError("a measured step took no time or no finite time; measure again")
    share = samples if serial else np.ceil(samples / workers)
    several = (workers > 1).astype(np.float64)
    passes = np.zeros_like(share)
    if serial and micro_batch is not None:
        passes += emulated_passes(workers.astype(np.int64), samples.astype(np.int64), micro_batch)
    columns = np.stack([np.ones_like(share), share, passes, several, several * np.maximum(workers - 2, 0)], axis=1)
    weight = np.sqrt([min(one.steps, _ENOUGH) for one in measured])
    observed, expected = _observed(columns), seconds
    for _ in range(_ROUNDS):
        # Errors count relative to what the model says: relative to what was measured, one slow step in a noisy
        # measurement would count for less than one fast step, and the model would be too fast.
        solution = _not_negative(columns * (weight / expected)[:, None], weight * seconds / expected, observed)
        expected = columns @ solution
    fixed, each, a_pass, first, more = map(float, solution)
    relative = seconds / expected - 1
    model = ComputeAndNetwork(
        per_update=Seconds(fixed if a_pass else 0.0),
        per_step=Seconds(a_pass or fixed),
        per_sample=Seconds(each),
        micro_batch=micro_batch if a_pass else None,
        network=Affine(first=Seconds(first), more=Seconds(more)) if first or more else None,
        serial=serial,
    )
    error = math.sqrt(float(np.average(relative**2, weights=weight**2)))
    return Fit(model=model, measured=tuple(measured), error=error)


def _by_kind(measured: Sequence[Measured]) -> list[Measured]:
    """One entry for each kind of step: what was measured several times is the mean of all steps."""
    kinds: dict[tuple[int, int], list[Measured]] = {}
    for one in measured:
        kinds.setdefault((one.workers, one.samples), []).append(one)
    found = []
    for (workers, samples), same in kinds.items():
        steps = sum(one.steps for one in same)
        mean = sum(one.seconds * one.steps for one in same) / steps
        found.append(Measured(workers=workers, samples=samples, seconds=mean, steps=steps))
    return found


def _observed(columns: Floats) -> list[int]:
    """Columns that tell something new: the share first, then the others while they are independent."""
    kept: list[int] = []
    for column in (1, 0, 2, 3, 4):
        if np.linalg.matrix_rank(columns[:, [*kept, column]]) > len(kept):
            kept.append(column)
    return sorted(kept)


def _not_negative(rows: Floats, target: Floats, allowed: Sequence[int]) -> Floats:
    """Least squares with coefficients >= 0: the best of all subsets of columns, of which there are at most 31."""
    best, least = np.zeros(rows.shape[1]), math.inf
    for size in range(1, len(allowed) + 1):
        for subset in map(list, itertools.combinations(allowed, size)):
            part = np.linalg.lstsq(rows[:, subset], target, rcond=None)[0]
            error = float(((rows[:, subset] @ part - target) ** 2).sum())
            if (part >= 0).all() and error < least * (1 - 1e-6) - 1e-15:  # a smaller model wins a draw
                best, least = np.zeros(rows.shape[1]), error
                best[subset] = part
    return best


def measured_steps(run: Run) -> list[Measured]:
    """The mean time of each kind of step in a record; validations are not counted.

    The mean is what adds up to a training. Left out are the first step after each change of the workers, which holds
    what the change cost, and steps that took more than ten times the median: the machine slept, or compiled.
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
        Measured(workers=count, samples=size, seconds=_usual_mean(times), steps=len(times))
        for (count, size), times in sorted(kinds.items())
    ]


def emulated_micro_batch(run: Run) -> int | None:
    """Samples of a pass of the emulated engine that wrote a record; None where a step is one pass."""
    emulation = run.header.config.get("emulation", {})
    if emulation.get("engine") == "LoopEngine":
        return 1  # a pass for every worker
    return None if emulation.get("batch_norm") == "sync" else emulation.get("chunk")


def _usual_mean(times: list[float]) -> float:
    """Without what took more than ten times the median.

    >>> _usual_mean([1.0, 2.0, 3.0, 500.0])
    2.0
    """
    array = np.asarray(times)
    return max(float(array[array <= 10 * np.median(array)].mean()), 1e-9)


def read_profile(path: Path) -> ComputeAndNetwork:
    """The model that `ebbflow profile` wrote."""
    try:
        body = json.loads(read_text(path, error=ConfigError))
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
