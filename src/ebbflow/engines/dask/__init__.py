"""Training on a Dask cluster: Dask starts, stops and scales the workers, gloo or Dask's messages carry the gradients.

engine.py    the driver: three verbs, for replicas that step themselves and for gradients that come home
cluster.py   who is there, messages, scaling                         (the driver's rim)
service.py   what a worker answers                                   (the worker's rim)
replica.py   the model on a worker
"""

from __future__ import annotations

from ebbflow.errors import MissingExtra

try:
    import distributed as _distributed  # noqa: F401
except ImportError as error:
    raise MissingExtra("distributed", extra="dask", needed_for="training on a Dask cluster") from error

from ebbflow.engines.dask.cluster import connect
from ebbflow.engines.dask.engine import DaskEngine

__all__ = ["DaskEngine", "connect"]
