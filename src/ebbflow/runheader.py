"""The first row of a record: what makes the run repeatable, and what a run that goes on is compared with."""

from __future__ import annotations

import datetime
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ebbflow._version import __version__
from ebbflow.config import RunConfig
from ebbflow.errors import ConfigError, RecordError
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.plan import BatchPlan
from ebbflow.record import Header, decode
from ebbflow.traces import Trace
from ebbflow.workloads import Task

__all__ = ["check_same_fleet", "make_header"]


def make_header(
    config: RunConfig,
    task: Task,
    plan: BatchPlan,
    trace: Trace | None,
    optimizer: ElasticOptimizer,
    *,
    command: str,
    emulation: Mapping[str, Any],
) -> Header:
    """What makes a run repeatable: its settings, trace and plan, the versions and the machine."""
    recipe = task.recipe
    names = {id(parameter): name for name, parameter in task.model.named_parameters()}
    return Header(
        config={
            **config.as_dict(),
            "trace": config.label,
            "trace_text": config.plan or config.trace,
            "progress": "gain" if optimizer.by_gain else "samples",
            "layers": [names[id(layer)] for layer in optimizer.layers] if "layers" in optimizer.rule.needs else [],
            "metric": recipe.metric,
            "higher_is_better": recipe.higher_is_better,
            "task": task.describe(),
            "emulation": emulation,
        },
        trace={} if trace is None else {"name": trace.name or config.trace, **_changes(trace)},
        plan=plan.describe(),
        versions={
            "python": platform.python_version(),
            "ebbflow": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        command=command,
        git_commit=_git_commit(),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        device=_device_name(config.device),
    )


def _changes(trace: Trace) -> dict[str, Any]:
    return {"times": trace.times.tolist(), "workers": trace.workers.tolist(), "end": trace.end}


def check_same_fleet(record: Path, config: RunConfig, fleet: Trace | BatchPlan | None) -> None:
    """Refuse to take a record for that of this configuration if it followed another fleet than this one, if any.

    The settings name a file; somebody may have written to it since.
    """
    if fleet is None:
        return
    with record.open("rb") as file:
        line = file.readline()
    try:
        header = decode(line.decode("utf-8"))
    except (ValueError, TypeError):
        header = None
    if not isinstance(header, Header):
        raise RecordError(
            f"{record} does not begin with a header; the file is damaged: delete the folder to start anew"
        )
    then, now = (header.trace, _changes(fleet)) if isinstance(fleet, Trace) else (header.plan, fleet.describe())
    if any(then[key] != value for key, value in now.items() if key in then):
        raise ConfigError(
            f"{record.parent} holds a run that followed another fleet than {config.plan or config.trace} describes "
            f"now; choose another folder, or bring the file back as it was"
        )


def _git_commit() -> str:
    """The commit of the working folder, where the user's own code lies; empty outside a repository."""
    try:
        answer = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""


def _device_name(device: str) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device} ({platform.machine()}, {torch.get_num_threads()} threads)"
