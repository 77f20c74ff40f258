"""What is trained: model, data, loss, metric and recipe, by name. Importing this imports torch but reads no data.

Start with `build` and `recipe`; `base.py` says how to add a workload of your own.
"""

from __future__ import annotations

# Importing a module registers its workloads.
from ebbflow.workloads import cifar, digits, fashion, folders, quadratic, shakespeare  # noqa: F401
from ebbflow.workloads.base import (
    WORKLOADS,
    Indices,
    PrefetchingSource,
    Recipe,
    Source,
    Task,
    Workload,
    build,
    cross_entropy,
    recipe,
    register,
    register_workload,
)
from ebbflow.workloads.sources import DatasetSource, TensorSource, TokenSource, crop_and_flip

__all__ = [
    "WORKLOADS",
    "DatasetSource",
    "Indices",
    "PrefetchingSource",
    "Recipe",
    "Source",
    "Task",
    "TensorSource",
    "TokenSource",
    "Workload",
    "build",
    "crop_and_flip",
    "cross_entropy",
    "recipe",
    "register",
    "register_workload",
]
