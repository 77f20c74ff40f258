"""The hours and dollars of a training before anything is rented, from a trace, a policy, a step model and prices.

    step_models.py   how long a step takes: computing, network, stragglers
    prices.py        what workers cost
    recovery.py      what a change of the fleet costs
    profiles.py      step models and noise scales from recorded runs
    scenario.py      what is simulated, as objects and as a user writes it
    segments.py      segments of constant fleet and batch, and the steps that come out
    advance.py       from segment to segment in a loop, also for a batch that grows
    skip.py          skipping most segments of a long trace
    simulation.py    `simulate`: one scenario, or many draws of it (Monte Carlo)
    search.py        many scenarios: comparisons, the best setting, sensitivity

`simulate(ScenarioSettings(...).scenario("spot.csv"))` answers one question; nothing here imports torch.
"""

from ebbflow.simulate.prices import FlatPrice, PriceHistory, make_price, read_prices, register_price
from ebbflow.simulate.recovery import RECOVERIES, Ideal
from ebbflow.simulate.scenario import Scenario, ScenarioSettings
from ebbflow.simulate.simulation import Simulation, on_demand, simulate
from ebbflow.simulate.step_models import NETWORKS, STRAGGLERS, ComputeAndNetwork, WholeStep, parse_step_time

__all__ = [
    "NETWORKS",
    "RECOVERIES",
    "STRAGGLERS",
    "ComputeAndNetwork",
    "FlatPrice",
    "Ideal",
    "PriceHistory",
    "Scenario",
    "ScenarioSettings",
    "Simulation",
    "WholeStep",
    "make_price",
    "on_demand",
    "parse_step_time",
    "read_prices",
    "register_price",
    "simulate",
]
