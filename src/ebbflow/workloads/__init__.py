"""Workloads: models with their data, loss, metric and recipe, by name. Importing this package reads no data.

`build` and `recipe` are the entry points; `workload.py` says how to add a workload of your own.
"""

from __future__ import annotations

from ebbflow.engines.loss_sum import LossSum

# Importing a module registers its workloads.
from ebbflow.workloads import (  # noqa: F401
    detection,
    imagenet,
    images,
    library_models,
    quadratic,
    segmentation,
    shakespeare,
    token_files,
)
from ebbflow.workloads.prefetch import DatasetSource
from ebbflow.workloads.sources import Indices, Source, TensorSource, TokenSource, crop_and_flip
from ebbflow.workloads.token_files import TokenFiles
from ebbflow.workloads.workload import (
    WORKLOADS,
    Recipe,
    Task,
    ValidationMetric,
    Workload,
    build,
    cross_entropy,
    recipe,
    register,
    register_workload,
)

__all__ = [
    "WORKLOADS", "DatasetSource", "Indices", "LossSum", "Recipe", "Source", "Task", "TensorSource", "TokenFiles",
    "TokenSource", "ValidationMetric", "Workload",
    "build", "crop_and_flip", "cross_entropy", "recipe", "register", "register_workload",
]  # fmt: skip
