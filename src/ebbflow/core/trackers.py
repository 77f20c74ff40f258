"""Where else the numbers of a run go: TensorBoard, Weights & Biases, MLflow.

A tracker is named by a text: `tensorboard`, `wandb`, `mlflow`, several of them with commas, each with a folder in
parentheses if it is not to be that of the run: `tensorboard(logs), wandb`.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from ebbflow.core.extras import require
from ebbflow.core.spec import nearest
from ebbflow.errors import ConfigError, EbbflowError, MissingExtra, OutputError

__all__ = ["TRACKERS", "Tracker", "check_tracker", "open_tracker", "tracked_numbers"]

_LOG = logging.getLogger(__name__)


class Tracker(Protocol):
    """Takes numbers and texts of a run."""

    def settings(self, values: Mapping[str, Any]) -> None:
        """The settings of the run, once."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers by name, at a step."""

    def event(self, step: int, what: str, text: str) -> None:
        """Something that happened at a step."""

    def close(self) -> None:
        """Write what is left."""


class _TensorBoard:
    """Event files in `tensorboard/` of the run's folder; `tensorboard --logdir` finds those of all runs below it."""

    def __init__(self, folder: Path, name: str, step: int, number: int) -> None:
        needed = "the tracker tensorboard"
        require("tensorboard", extra="tensorboard", needed_for=needed)
        module = require("torch.utils.tensorboard", extra="tensorboard", needed_for=needed)
        # What an earlier part of the run wrote beyond the step from which it continues is not shown.
        place = folder / "tensorboard" / (str(number) if number > 1 else "")
        self._writer = module.SummaryWriter(str(place), purge_step=step or None)

    def settings(self, values: Mapping[str, Any]) -> None:
        lines = [f"| {key} | {value} |" for key, value in values.items()]
        self._writer.add_text("settings", "\n".join(["| setting | value |", "|---|---|", *lines]), 0)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def event(self, step: int, what: str, text: str) -> None:
        self._writer.add_text(f"events/{what}", text or what, step)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """A run of Weights & Biases in `wandb/` of the run's folder, offline unless WANDB_MODE says otherwise.

    `wandb sync` uploads it. The parts of a run that was interrupted have the same id, and so become one run.
    """

    def __init__(self, folder: Path, name: str, step: int, number: int) -> None:
        wandb = require("wandb", extra="wandb", needed_for="the tracker wandb")
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "ebbflow"),
            name=name,
            id=_identity(folder, number),
            resume="allow",
            dir=str(folder),
            mode=os.environ.get("WANDB_MODE", "offline"),
            settings=wandb.Settings(silent=True),
            reinit="create_new",
        )
        self._run.define_metric("*", step_metric="step")  # its own counter cannot go back, as a resumed run does

    def settings(self, values: Mapping[str, Any]) -> None:
        self._run.config.update(dict(values), allow_val_change=True)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def event(self, step: int, what: str, text: str) -> None:
        self._run.log({"event": f"{what}: {text}" if text else what, "step": step})

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    """A run of MLflow, in a file store in `mlflow/` of the run's folder unless MLFLOW_TRACKING_URI says otherwise.

    A run that continues after an interruption is the same run there.
    """

    def __init__(self, folder: Path, name: str, step: int, number: int) -> None:
        mlflow = require("mlflow", extra="mlflow", needed_for="the tracker mlflow", package=_PACKAGES["mlflow"])
        place = os.environ.get("MLFLOW_TRACKING_URI")
        if place is None:
            place = (folder.resolve() / "mlflow").as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # asked for by MLflow 3.17 for any file store
        self._metric = mlflow.entities.Metric
        self._client = mlflow.MlflowClient(tracking_uri=place)
        title = os.environ.get("MLFLOW_EXPERIMENT_NAME", "ebbflow")
        found = self._client.get_experiment_by_name(title)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(title)
        tag = {"ebbflow.run": _identity(folder, number)}
        runs = self._client.search_runs([experiment], f"tags.`ebbflow.run` = '{tag['ebbflow.run']}'", max_results=1)
        run = runs[0] if runs else self._client.create_run(experiment, run_name=name, tags=tag)
        self._id = run.info.run_id

    def settings(self, values: Mapping[str, Any]) -> None:
        known = self._client.get_run(self._id).data.params
        for name, value in values.items():
            text = str(value)[:500]
            if value is not None and name not in known:
                self._client.log_param(self._id, name, text)
            elif value is not None and known[name] != text:  # MLflow lets no parameter change
                self._client.set_tag(self._id, f"changed.{name}", text)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._id, [self._metric(name, value, now, step) for name, value in values.items()])

    def event(self, step: int, what: str, text: str) -> None:
        self._client.set_tag(self._id, f"event.{step:08d}.{what.replace(' ', '-')}", text or what)

    def close(self) -> None:
        self._client.set_terminated(self._id)


TRACKERS: dict[str, Callable[[Path, str, int, int], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WandB,
    "mlflow": _MLflow,
}
_PACKAGES = {"mlflow": "mlflow-skinny"}
"""What pip calls a library, where that is not the name of the tracker."""


def tracked_numbers(
    *, workers: int, batch: int, ref_batch: int, multiplier: float, stats: Mapping[str, float]
) -> dict[str, float]:
    """What trackers and the logs of frameworks show of a step: the fleet, the batch, and what the rule made of it.

    >>> tracked_numbers(workers=4, batch=128, ref_batch=256, multiplier=0.5, stats={"noise_scale": 90.0})
    {'workers': 4, 'batch': 128, 'batch_ratio': 0.5, 'multiplier': 0.5, 'noise_scale': 90.0}
    """
    shown: dict[str, float] = {"workers": workers, "batch": batch, "batch_ratio": batch / ref_batch}
    shown["multiplier"] = multiplier
    if stats.get("noise_scale") is not None:
        shown["noise_scale"] = stats["noise_scale"]
    return shown


def _identity(folder: Path, number: int) -> str:
    """The same for all parts of a run: its folder, and its number there, say which run it is."""
    identity = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    return f"{identity}-{number}" if number > 1 else identity


def _number(folder: Path, *, anew: bool) -> int:
    """Which of the runs in a folder this is, from 1 on: the next one if it begins anew."""
    path = folder / "tracked-runs.txt"
    number = int(path.read_text(encoding="utf-8")) if path.exists() else 0
    if anew or not number:
        number += 1
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{number}\n", encoding="utf-8")
    return number


class _Several:
    """Several trackers by name, with numbers that are finite.

    A tracker that fails is left out from then on, with a warning: a server that cannot be reached ends no training.
    They are closed at the end of the process if nobody has done so, before the libraries end their own processes.
    """

    def __init__(self) -> None:
        self._trackers: list[tuple[str, Tracker]] = []
        atexit.register(self.close)

    def add(self, kind: str, tracker: Tracker) -> None:
        self._trackers.append((kind, tracker))

    def settings(self, values: Mapping[str, Any]) -> None:
        self._each(lambda tracker: tracker.settings(values))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        self._each(lambda tracker: tracker.scalars(step, finite))

    def event(self, step: int, what: str, text: str) -> None:
        self._each(lambda tracker: tracker.event(step, what, text))

    def close(self) -> None:
        atexit.unregister(self.close)
        self._each(lambda tracker: tracker.close())
        self._trackers = []

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for kind, tracker in list(self._trackers):
            try:
                call(tracker)
            except Exception as error:  # whatever these libraries raise; the record has every number
                self._trackers.remove((kind, tracker))
                _LOG.warning("the tracker %s fails and gets nothing from here on: %s", kind, _in_one_line(error))


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def check_tracker(text: str) -> list[tuple[str, str]]:
    """The names of trackers in a text and their folders.

    Raises ConfigError if there is no such tracker, and MissingExtra if its library is not installed; the library is
    not imported, which would take seconds.

    >>> check_tracker("tensorboard(logs/first), tensorboard")
    [('tensorboard', 'logs/first'), ('tensorboard', '')]
    """
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"([^()]*)(?:\((.*)\))?", part.strip())
        name = match[1].strip() if match is not None else part.strip()
        if match is None or name not in TRACKERS:
            raise ConfigError(f"tracker is {text!r}; {nearest(name, list(TRACKERS))}")
        if find_spec(name) is None:
            raise MissingExtra(_PACKAGES.get(name, name), extra=name, needed_for=f"the tracker {name}")
        found.append((name, match[2] or ""))
    if len(set(found)) < len(found):
        raise ConfigError(f"tracker is {text!r}, which has an entry twice; name each of them once")
    return found


def open_tracker(text: str, folder: Path | str, *, name: str, step: int = 0, several_runs: bool = False) -> Tracker:
    """Open the trackers that a text names. `folder`: that of the run. `step`: from which a resumed run continues.

    `several_runs`: the folder may hold earlier runs, and one that begins at step 0 is another one. Raises OutputError
    if one cannot be opened; one that fails later is left out, with a warning.
    """
    named = [(kind, Path(own or folder)) for kind, own in check_tracker(text)]
    opened = _Several()
    try:
        numbers = {
            place: _number(place, anew=step == 0) if several_runs else 1 for place in {place for _, place in named}
        }
        for kind, place in named:
            opened.add(kind, TRACKERS[kind](place, name, step, numbers[place]))
    except EbbflowError:
        opened.close()
        raise
    except Exception as error:  # whatever these libraries raise
        opened.close()
        raise OutputError(
            f"the tracker {text} cannot be opened ({_in_one_line(error)}); check its folder or server, or leave it out"
        ) from error
    return opened
