"""Any number of virtual workers on one machine: to find out which rule suits a model before renting a fleet."""

from ebbflow.engines.emulated.emulated_engine import EmulatedEngine, LoopEngine, Ranks
from ebbflow.engines.emulated.fused import FusedEngine

__all__ = ["EmulatedEngine", "FusedEngine", "LoopEngine", "Ranks"]
