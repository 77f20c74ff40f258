"""The first row of a record: what makes the run repeatable."""

from __future__ import annotations

import datetime
import platform
import subprocess
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ebbflow._version import __version__
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.plan import BatchPlan
from ebbflow.record import Header
from ebbflow.run.config import RunConfig
from ebbflow.traces import Trace
from ebbflow.workloads import Task

__all__ = ["make_header"]


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
    described = {} if trace is None else {
        "name": trace.name or config.trace,
        "times": trace.times.tolist(),
        "workers": trace.workers.tolist(),
        "end": trace.end,
    }  # fmt: skip
    recipe = task.require_recipe()
    names = {id(parameter): name for name, parameter in task.model.named_parameters()}
    return Header(
        config={
            **config.recorded(),
            "trace": config.label,
            "trace_text": config.plan or config.trace,
            "progress": "gain" if optimizer.by_gain else "samples",
            "layers": [names[id(layer)] for layer in optimizer.layers] if "layers" in optimizer.rule.needs else [],
            "metric": recipe.metric,
            "higher_is_better": recipe.higher_is_better,
            "task": task.describe(),
            "emulation": emulation,
        },
        trace=described,
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
