"""Hours and dollars of a training before anything is rented: trace + policy + step model + prices, without torch.

network.py, stragglers.py, stepmodel.py   how long a step takes, and on what
recovery.py                               what a change of the fleet costs
fleet.py, scenario.py, stretches.py       who is paid for, who computes, and what their steps are like
legs.py, walker.py, walk.py, leap.py      from event to event through the trace
grow.py                                   the same for a batch that grows, phase by phase
prices.py, efficiency.py                  dollars; samples that a larger batch needs more
simulate.py                               one scenario; `Simulation` has the figures
montecarlo.py, search.py, fit.py          many scenarios: intervals, the best setting, a fitted step model
"""

from ebbflow.simulate.prices import FlatPrice, PriceHistory, read_prices
from ebbflow.simulate.recovery import RECOVERIES, Ideal
from ebbflow.simulate.scenario import Scenario
from ebbflow.simulate.simulate import Simulation, on_demand, simulate
from ebbflow.simulate.stepmodel import ComputeAndNetwork, WholeStep, parse_step_time

__all__ = [
    "RECOVERIES",
    "ComputeAndNetwork",
    "FlatPrice",
    "Ideal",
    "PriceHistory",
    "Scenario",
    "Simulation",
    "WholeStep",
    "on_demand",
    "parse_step_time",
    "read_prices",
    "simulate",
]
