"""Fits on a Dask cluster: which one, and how its workers share a step."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ebbflow.engines.base import Engine
from ebbflow.errors import ConfigError, DataError
from ebbflow.estimators.batches import Batches
from ebbflow.estimators.blocks import Blocks
from ebbflow.estimators.inputs import fetcher
from ebbflow.estimators.modules import ModelLoss
from ebbflow.estimators.settings import choose
from ebbflow.optim.elastic import ElasticOptimizer
from ebbflow.plan.policies import FixedTotal, Policy

__all__ = ["ENGINES", "Evenly", "OnCluster", "active_client", "dask_engine", "on_cluster"]

ENGINES = ("auto", "emulated", "dask")


def active_client() -> Any:
    """The Client that this process has made its default, or None; also None inside of a task of Dask.

    A task, such as a candidate of a search, must not ask the cluster that it runs on for more workers than its own.
    """
    distributed = sys.modules.get("distributed")
    if distributed is None:  # whoever has a Client has imported it
        return None
    try:
        distributed.get_worker()
    except ValueError:
        pass
    else:
        return None
    try:
        return distributed.default_client()
    except ValueError:
        return None


def on_cluster(engine: str, data: Any, settings: Mapping[str, Any]) -> bool:
    """Whether a fit shall run on a cluster."""
    name = choose("engine", engine, ENGINES)
    found = name == "dask" or (name == "auto" and active_client() is not None)
    if isinstance(data, Blocks) and not found:
        raise DataError(
            f"X is a Dask array of {data.text}, which would have to be gathered in this process: start a cluster "
            f"(distributed.Client()) and fit on it with engine='dask', or, if it fits, give X.compute() and y.compute()"
        )
    if settings and not found:
        raise ConfigError(
            f"engine__{next(iter(settings))} is a setting of the Dask engine, but this fit runs in this process; "
            f"set engine='dask', or leave it out"
        )
    return found


@dataclass
class Evenly:
    """A policy without limits: whoever is there shares the batch that is requested."""

    total: int

    def sizes(self, workers: npt.NDArray[np.int64]) -> tuple[Any, Any]:
        """As a fixed batch of the present total."""
        return FixedTotal(self.total).sizes(workers)


def _fleet(batches: Batches, settings: Mapping[str, Any], limited: bool) -> Policy:
    """How the workers that are there share a step.

    Where the cluster is scaled, or a limit for a worker was given, a step is at most so many samples a worker, and the
    rate pays for what a growing policy wants beyond; else everybody takes an equal part of whatever is requested.
    """
    if batches.growing is None:
        return batches.policy
    if settings.get("scale") or limited:
        return replace(batches.growing, local_batch=batches.local_batch)
    return Evenly(batches.base_batch)


@dataclass(kw_only=True)
class OnCluster:
    """An engine on a cluster, with what it needs to live and how it ends."""

    engine: Engine
    fleet: Policy
    client: Any
    own_client: bool
    held: Any
    """Blocks of Dask arrays stay on the workers as long as somebody holds them."""

    def want(self, samples: int) -> None:
        """A step of so many samples is requested."""
        if isinstance(self.fleet, Evenly):
            self.fleet.total = samples

    def close(self) -> None:
        """Remove the replicas and let the blocks go; a Client that was there before stays."""
        self.engine.close()  # type: ignore[attr-defined]
        self.held = None
        if self.own_client:
            self.client.close()


def dask_engine(
    model: torch.nn.Module,
    data: Any,
    loss: ModelLoss,
    batches: Batches,
    optimizer: ElasticOptimizer,
    *,
    settings: Mapping[str, Any],
    limited: bool,
    **options: Any,
) -> OnCluster:
    """The engine of a fit; `settings` are the `engine__` parameters, `options` go to the engine, too.

    `limited`: whether the user said how many samples a worker takes at most.
    """
    from ebbflow.engines.dask import DaskEngine, connect  # says what to install where distributed is missing
    from ebbflow.estimators.rows import hold

    settings = dict(settings)
    address = settings.pop("client", None)
    client = active_client() if address is None else connect(address)
    if client is None:
        raise ConfigError(
            "engine='dask', but there is no Client; start one (distributed.Client()), or give the address of a "
            "scheduler: engine__client='tcp://host:8786'"
        )
    fetch, held = hold(data, client) if isinstance(data, Blocks) else (fetcher(data, "cpu"), None)
    fleet, needs = _fleet(batches, settings, limited), batches.needs(optimizer)
    measured = {"needs": needs, "parameters": optimizer.layers, "micro_batch": batches.micro_batch if needs else None}
    options = {"samples": len(data), "optimizer": optimizer, **measured, **options, **settings}
    try:
        engine = DaskEngine(model, fetch, loss, fleet, client=client, **options)
    except TypeError as error:
        raise ConfigError(f"the Dask engine cannot be made with these engine__ settings: {error}") from error
    return OnCluster(
        engine=engine, fleet=fleet, client=client, own_client=address is not None and client is not address, held=held
    )
