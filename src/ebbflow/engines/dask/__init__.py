"""Training on a Dask cluster: Dask starts, stops and scales the workers; gloo or Dask's messages carry the gradients.

dask_engine   the driver: the engine contract on a cluster
transport     how gradients are added up: among the workers, or through the driver
cluster       the driver's connection to the workers: who is there, messages, scaling
dask_worker   the worker's side: the replica, and the handler that answers to the driver
"""

from __future__ import annotations

from ebbflow.core.extras import require

require("distributed", extra="dask", needed_for="training on a Dask cluster")

from ebbflow.engines.dask.cluster import connect  # noqa: E402
from ebbflow.engines.dask.dask_engine import DaskEngine  # noqa: E402

__all__ = ["DaskEngine", "connect"]
