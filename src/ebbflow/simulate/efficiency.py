"""The noise scale of a training, given or taken from a record: how far a larger batch pays.

A step of B samples is worth B (phi + B0) / (phi + B) samples at the reference batch B0, where phi is the noise scale in
samples: the efficiency of Pollux (Qiao et al. 2021), which is AdaScale's gain over the growth of the batch.
`Work.worth` computes it. One noise scale stands for the whole training, although it usually grows on the way;
`ebbflow whatif` shows how much hangs on it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ebbflow.errors import ConfigError, RecordError
from ebbflow.record import Run, read_record

__all__ = ["noise_scale_of", "read_noise_scale", "record_file"]


def noise_scale_of(run: Run) -> float:
    """Mean noise over mean signal, each step counted by its samples; single steps' ratios say nothing."""
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


def read_noise_scale(text: str) -> float:
    """A number of samples, or a record to take it from."""
    try:
        value = float(text)
    except ValueError:
        return noise_scale_of(read_record(record_file(Path(text))))
    if not (np.isfinite(value) and value > 0):
        raise ConfigError(f"the noise scale is {text} samples; expected a finite number above 0, or a record")
    return value


def record_file(path: Path) -> Path:
    """The record itself, also when the folder of a run is given."""
    return path / "record.jsonl" if path.is_dir() else path
