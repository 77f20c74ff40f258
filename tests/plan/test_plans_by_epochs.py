"""Plans whose trace counts epochs: the workers change after so many epochs, whatever the samples and the batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.core.units import Seconds
from ebbflow.errors import ConfigError, PlanError
from ebbflow.plan import BatchPlan, cut_step, plan_by_epochs
from ebbflow.run.config import RunConfig
from ebbflow.run.planning import make_plan
from ebbflow.traces import Trace

HOUR = Seconds(3600.0)


def by_hand(trace: Trace, local_batch: int, samples: int, epochs: int) -> list[int]:
    """One step after the other: the workers at the time that the samples before it stand for."""
    planned, done = [], 0
    while done < epochs * samples:
        batch = trace.at(Seconds(done * 3600.0 / samples)) * local_batch
        planned.append(batch)
        done += cut_step(batch, samples - done % samples)
    return planned


def test_a_change_at_the_end_of_an_epoch_takes_effect_exactly_there() -> None:
    # ImageNet on 8 and 96 workers of 128 samples: ceil(1281167/1024) = 1252 and ceil(1281167/12288) = 105 steps.
    plan = plan_by_epochs(Trace.parse("0h:8 20h:96 90h"), "follow(128)", HOUR, samples=1_281_167, epochs=90)
    assert plan.steps == 20 * 1252 + 70 * 105
    assert [plan.at(step).workers for step in (20 * 1252 - 1, 20 * 1252)] == [8, 96]
    assert plan.at(20 * 1252).time_s == 20 * 3600
    last = plan.at(plan.steps - 1)
    assert last.time_s + last.duration_s == pytest.approx(90 * 3600)


@given(
    samples=st.integers(1, 60),
    local_batch=st.integers(1, 7),
    levels=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    each=st.sampled_from([0.25, 1.0, 1.5]),
)
def test_every_step_has_the_workers_of_the_moment_at_which_it_begins(
    samples: int, local_batch: int, levels: list[int], each: float
) -> None:
    epochs = max(1, int(each * len(levels)))
    end = max(epochs, each * len(levels)) * 3600
    trace = Trace.from_points([(i * each * 3600, level) for i, level in enumerate(levels)], end=Seconds(end))
    plan = plan_by_epochs(trace, f"follow({local_batch})", HOUR, samples=samples, epochs=epochs)
    assert plan.batches().tolist() == by_hand(trace, local_batch, samples, epochs)
    assert plan.for_epochs(samples, epochs).steps == plan.steps


def test_a_trace_must_reach_and_have_workers_and_may_be_repeated() -> None:
    short = Trace.parse("0h:1 1h:2 2h")
    with pytest.raises(PlanError, match=r"at 3600 s per epoch it covers 2 of 4 epochs"):
        plan_by_epochs(short, "follow(5)", HOUR, samples=10, epochs=4)
    again = plan_by_epochs(short, "follow(5)", HOUR, samples=10, epochs=4, offset=HOUR, repeat=True)
    assert again.batches().tolist() == [10, 5, 5, 10, 5, 5]
    with pytest.raises(PlanError, match="has no workers at 1 epochs"):
        plan_by_epochs(Trace.parse("0h:1 1h:0 2h"), "follow(5)", HOUR, samples=10, epochs=2)


def planned(**settings: object) -> BatchPlan:
    values = {"workload": "x", "epochs": 4, "ref_batch": 5, "local_batch": 5, "step_time": "30min/ep", **settings}
    return make_plan(RunConfig(**values), 10)[0]  # type: ignore[arg-type]


def test_the_setting_takes_a_time_per_epoch() -> None:
    assert planned(trace="0h:1 1h:2 2h").batches().tolist() == [5, 5, 5, 5, 10, 10]
    assert planned(trace="0h:1 1h:2 2h", policy="fixed(5)").at(4).workers == 2
    for other in ({"policy": "geo(1ep)"}, {"on_change": "lose"}):
        with pytest.raises(ConfigError, match="a time per epoch, which is for policies that follow the workers"):
            planned(trace="0h:1 1h:2 2h", **other)


@pytest.mark.parametrize("settings", [{}, {"step_time": "fit"}, {"step_time": "1s", "repeat": True}])
def test_more_epochs_than_can_be_planned_are_refused_at_once(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"epochs is 1,000,000,000; expected at most 100,000, .*ConcatDataset"):
        planned(trace="constant(2)", epochs=10**9, **settings)
