"""The first row of a record: what makes the run repeatable. Every engine and front end writes this one."""

from __future__ import annotations

import datetime
import platform
import subprocess
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ebbflow._version import __version__
from ebbflow.plan import BatchPlan
from ebbflow.record import Header
from ebbflow.traces import Trace

__all__ = ["make_header"]


def make_header(
    config: Mapping[str, Any],
    *,
    device: str,
    plan: BatchPlan | None = None,
    trace: Trace | None = None,
    command: str = "",
    versions: Mapping[str, str] | None = None,
) -> Header:
    """The header of a run with these settings; `versions`: of further packages that took part."""
    described = {} if trace is None else {
        "name": trace.name or str(config.get("trace", "")),
        "times": trace.times.tolist(),
        "workers": trace.workers.tolist(),
        "end": trace.end,
    }  # fmt: skip
    return Header(
        config=config,
        trace=described,
        plan=plan.describe() if plan is not None else {},
        versions={
            "python": platform.python_version(),
            "ebbflow": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            **(versions or {}),
        },
        command=command,
        git_commit=_git_commit(),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        device=_device_name(device),
    )


def _git_commit() -> str:
    """The commit of the working folder, where the user's own code is; empty outside a repository."""
    try:
        answer = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""


def _device_name(device: str) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device} ({platform.machine()}, {torch.get_num_threads()} threads)"
