"""Simulated time: the steps of a record, priced with a step model, without training again.

Holt and Sievert (2021, Figures 4 to 10 and Table 2) train each schedule once and ask how long it would have taken on
three networks. A `Clock` is such a question: a name and a step model of `ebbflow.simulate`. Every step of a record has
its workers and samples, from which the model gives its seconds; their sum is the time on that clock.

The workers are those of the record. What a changing fleet would have done at other times is not simulated (that is
`ebbflow simulate`), and times without workers, changes of the fleet and validations take no time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ebbflow.core.wording import called
from ebbflow.errors import ConfigError
from ebbflow.report.results import ArmResult, Results
from ebbflow.simulate.scenario import ScenarioSettings
from ebbflow.simulate.step_models import StepModel

__all__ = ["Clock", "make_clocks", "read_clocks", "simulated_seconds"]

Array = npt.NDArray[np.float64]
_NAMED = re.compile(r"\s*([^=(]+?)\s*=\s*(.+)", re.DOTALL)


@dataclass(frozen=True)
class Clock:
    """A step model under the name that tables and figures give it."""

    name: str
    model: StepModel


def make_clocks(settings: ScenarioSettings, networks: Sequence[str] = ()) -> tuple[Clock, ...]:
    """One clock for each network, or one for the step model alone if there is none.

    A network is written as in `ebbflow simulate`, and may have a name in front: "fast=ring(megabytes=11, gbps=800)".
    """
    clocks = []
    asked: Sequence[str | None] = networks or [None]
    for text in asked:
        named = _NAMED.match(text) if text is not None else None
        network = named[2] if named else text
        model = replace(settings, network=network).step_model()
        if getattr(model, "serial", False):
            raise ConfigError(
                f"{settings.profile} is of emulated workers: one machine computed for all of them. For the time of a "
                f"fleet, measure one worker (ebbflow profile WORKLOAD) or give {called('compute_sample')}"
            )
        clocks.append(Clock(named[1] if named else network or str(model), model))
    names = [clock.name for clock in clocks]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"two networks are called {twice[0]!r}; write NAME=NETWORK with a name for each")
    return tuple(clocks)


def simulated_seconds(arm: ArmResult, model: StepModel) -> Array:
    """Seconds from the start of a run to the end of each of its steps, by the workers and samples of each step."""
    workers, samples = (arm.columns[name].astype(np.int64) for name in ("workers", "batch"))
    return np.cumsum(model.breakdown(np.maximum(workers, 1), samples).total)


def read_clocks(results: Results, clocks: Sequence[Clock]) -> Results:
    """The results with the time of every validation on each of these clocks."""
    if not clocks:
        return results
    return replace(results, arms=tuple(_with_clocks(arm, clocks) for arm in results.arms))


def _with_clocks(arm: ArmResult, clocks: Sequence[Clock]) -> ArmResult:
    if not arm.steps:
        return arm
    done = np.clip(arm.updates.astype(np.int64), 0, arm.steps)  # steps before each validation
    seconds = {clock.name: np.append(0.0, simulated_seconds(arm, clock.model)) for clock in clocks}
    return replace(arm, simulated={name: after[done] for name, after in seconds.items()})
