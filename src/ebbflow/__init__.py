"""Train PyTorch models on workers that come and go.

    traces      who is available when          Trace: a step function  time -> workers
      v
    plan        how big each step is           BatchPlan: step -> workers, samples
      v
    data        which samples                  Ledger, ElasticSampler: every sample exactly once an epoch
      v
    engines     who computes                   emulated | live (torchft) | dask
      v
    moments     what the gradients say         noise and signal
      v
    rules       how the step scales            Rule: StepContext -> Scaling
      v
    optim       the step                       ElasticOptimizer: the one place that writes parameter groups
      v
    record      what happened                  one row a step, one a validation
      v
    studies, report                            rule x trace x workload x seed -> tables, figures, one HTML page

Read the folders in this order and you have read the program. `sim` walks the flow without training; `live` and
`sklearn` are for a user's own script. The names below are the public ones; they are loaded on first use, so that
`import ebbflow` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ebbflow._version import __version__

if TYPE_CHECKING:
    from ebbflow.data.sampler import ElasticSampler as ElasticSampler
    from ebbflow.engines.base import register_engine as register_engine
    from ebbflow.errors import EbbflowError as EbbflowError
    from ebbflow.optim.elastic import ElasticOptimizer as ElasticOptimizer
    from ebbflow.plan.plan import BatchPlan as BatchPlan
    from ebbflow.record import read_record as read_record
    from ebbflow.rules.base import Scaling as Scaling
    from ebbflow.rules.base import StepContext as StepContext
    from ebbflow.rules.registry import make_rule as make_rule
    from ebbflow.run.config import RunConfig as RunConfig
    from ebbflow.run.session import Session as Session
    from ebbflow.run.training import train as train
    from ebbflow.simulate.prices import register_price as register_price
    from ebbflow.traces.trace import Trace as Trace
    from ebbflow.workloads import register_workload as register_workload

_HOME = {
    "BatchPlan": "ebbflow.plan.plan",
    "EbbflowError": "ebbflow.errors",
    "ElasticOptimizer": "ebbflow.optim.elastic",
    "ElasticSampler": "ebbflow.data.sampler",
    "RunConfig": "ebbflow.run.config",
    "Scaling": "ebbflow.rules.base",
    "Session": "ebbflow.run.session",
    "StepContext": "ebbflow.rules.base",
    "Trace": "ebbflow.traces.trace",
    "make_rule": "ebbflow.rules.registry",
    "read_record": "ebbflow.record",
    "register_engine": "ebbflow.engines.base",
    "register_workload": "ebbflow.workloads",
    "train": "ebbflow.run.training",
    "register_price": "ebbflow.simulate.prices",
}
_PACKAGES = ("live", "simulate", "sklearn")
"""Packages with public names of their own."""

__all__ = [
    "BatchPlan",
    "EbbflowError",
    "ElasticOptimizer",
    "ElasticSampler",
    "RunConfig",
    "Scaling",
    "Session",
    "StepContext",
    "Trace",
    "__version__",
    "make_rule",
    "read_record",
    "register_engine",
    "register_workload",
    "train",
    "register_price",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"ebbflow.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'ebbflow' has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
