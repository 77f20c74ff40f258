"""Train PyTorch models on workers that come and go.

    traces      who is available when          Trace: the number of workers over time
      v
    plan        how big each step is           BatchPlan: step -> workers, samples
      v
    data        which samples                  Ledger, ElasticSampler: every sample exactly once per epoch
      v
    engines     who computes                   emulated | live (torchft) | dask
      v
    moments     what the gradients say         noise and signal
      v
    rules       how the step scales            Rule: StepContext -> Scaling
      v
    optim       the step                       RuleOptimizer: the one place that writes parameter groups
      v
    record      what happened                  one row per step, one per validation
      v
    run         one training, on any engine    RunConfig, train, Session
      v
    studies, report                            rule x trace x workload x seed -> tables, figures, one HTML page

`simulate` computes time and money of a fleet without training; `live` and `sklearn` are for scripts of your own. The
names below are the public ones. They are imported on first use, so that `import ebbflow` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ebbflow._version import __version__

if TYPE_CHECKING:
    from ebbflow.core.preemption import PreemptionNotice as PreemptionNotice
    from ebbflow.core.preemption import register_notice as register_notice
    from ebbflow.data.sampler import ElasticSampler as ElasticSampler
    from ebbflow.engines.base import register_engine as register_engine
    from ebbflow.errors import EbbflowError as EbbflowError
    from ebbflow.optim.elastic import ElasticOptimizer as ElasticOptimizer
    from ebbflow.optim.optimizers import register_optimizer as register_optimizer
    from ebbflow.optim.schedules import register_schedule as register_schedule
    from ebbflow.plan.batch_plan import BatchPlan as BatchPlan
    from ebbflow.plan.policies import register_policy as register_policy
    from ebbflow.record import read_record as read_record
    from ebbflow.rules.rule import Scaling as Scaling
    from ebbflow.rules.rule import StepContext as StepContext
    from ebbflow.rules.rule import make_rule as make_rule
    from ebbflow.rules.rule import register_modifier as register_modifier
    from ebbflow.rules.rule import register_rule as register_rule
    from ebbflow.run.config import RunConfig as RunConfig
    from ebbflow.run.session import Session as Session
    from ebbflow.run.training import train as train
    from ebbflow.simulate.prices import register_price as register_price
    from ebbflow.studies.choosing import choose as choose
    from ebbflow.traces.availability import Trace as Trace
    from ebbflow.traces.formats import register_trace_format as register_trace_format
    from ebbflow.traces.synthetic import register_trace as register_trace
    from ebbflow.workloads import register_workload as register_workload

_HOME = {
    "BatchPlan": "ebbflow.plan.batch_plan",
    "EbbflowError": "ebbflow.errors",
    "ElasticOptimizer": "ebbflow.optim.elastic",
    "ElasticSampler": "ebbflow.data.sampler",
    "PreemptionNotice": "ebbflow.core.preemption",
    "RunConfig": "ebbflow.run.config",
    "Scaling": "ebbflow.rules.rule",
    "Session": "ebbflow.run.session",
    "StepContext": "ebbflow.rules.rule",
    "Trace": "ebbflow.traces.availability",
    "choose": "ebbflow.studies.choosing",
    "make_rule": "ebbflow.rules.rule",
    "read_record": "ebbflow.record",
    "register_engine": "ebbflow.engines.base",
    "register_modifier": "ebbflow.rules.rule",
    "register_notice": "ebbflow.core.preemption",
    "register_optimizer": "ebbflow.optim.optimizers",
    "register_policy": "ebbflow.plan.policies",
    "register_price": "ebbflow.simulate.prices",
    "register_rule": "ebbflow.rules.rule",
    "register_schedule": "ebbflow.optim.schedules",
    "register_trace": "ebbflow.traces.synthetic",
    "register_trace_format": "ebbflow.traces.formats",
    "register_workload": "ebbflow.workloads",
    "train": "ebbflow.run.training",
}
_PACKAGES = ("live", "simulate", "sklearn")
"""Packages with public names of their own."""

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"ebbflow.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'ebbflow' has no attribute {name!r}; public names: {', '.join(sorted(__all__))}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
