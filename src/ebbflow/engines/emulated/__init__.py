"""Any number of workers on one machine: to find out which rule suits a model before renting a fleet."""

from ebbflow.engines.emulated.fused import FusedEngine
from ebbflow.engines.emulated.loop import LoopEngine

__all__ = ["FusedEngine", "LoopEngine"]
