"""Plans on the published traces: the numbers of Andre, Strati and Klimovic (2022), recomputed."""

from __future__ import annotations

import pytest

from ebbflow.core.units import Seconds
from ebbflow.errors import PlanError
from ebbflow.plan.batch_plan import BatchPlan, fit_step_time
from ebbflow.traces.availability import Trace
from ebbflow.traces.synthetic import load

IMAGENET = (1_281_167, 90)
COCO = (118_287, 65)


@pytest.fixture(scope="module")
def a100() -> Trace:
    return load("gcp-a100-2022-05(stop=13545s)")


@pytest.fixture(scope="module")
def tpu() -> Trace:
    return load("gcp-tpuv2-2022-04")


def minutes(trace: Trace, local_batch: int, step_time: str, task: tuple[int, int], start_min: int = 0) -> float | None:
    """Minutes from a start on, steps running across epoch ends; None where the trace is too short."""
    plan = BatchPlan.from_trace(trace, f"follow({local_batch})", step_time, offset=Seconds(start_min * 60.0))
    try:
        return plan.for_epochs(*task, cut=False).time_s / 60
    except PlanError:
        return None


def starts_between(
    trace: Trace, local_batch: int, step_time: str, task: tuple[int, int], low: float, high: float, until: int
) -> set[int]:
    found = {start: minutes(trace, local_batch, step_time, task, start) for start in range(until)}
    return {start for start, length in found.items() if length is not None and low <= length <= high}


def test_resnet_on_the_a100_trace_when_epochs_cut_steps(a100: Trace) -> None:
    summary = BatchPlan.from_trace(a100, "follow(128)", "0.6s").for_epochs(*IMAGENET)
    assert abs(summary.steps - 18_837) <= 2
    assert summary.time_s / 60 == pytest.approx(188.4, abs=0.06)
    assert summary.samples == 115_305_030
    assert summary.batch_max == 7_168  # 56 workers of 128
    assert summary.batch_min < 3_712  # 29 workers have 3,712; the last step of an epoch has what is left
    assert summary.batch_mean == pytest.approx(115_305_030 / 18_837, abs=1)


def test_resnet_on_the_a100_trace_when_steps_run_across_epochs(a100: Trace) -> None:
    summary = BatchPlan.from_trace(a100, "follow(128)", "0.6s").for_epochs(*IMAGENET, cut=False)
    assert abs(summary.steps - 18_803) <= 2
    assert summary.time_s / 60 == pytest.approx(188.0, abs=0.06)
    assert (summary.batch_min, summary.batch_max) == (3_712, 7_168)  # 29 and 56 workers of 128
    assert summary.batch_mean == pytest.approx(6_133, abs=1)
    # The trace changes 46 times before the run ends (its last change before that is at 10,584 of 11,282 s), each one
    # at least 63 s = 105 steps after the one before, so that none is missed.
    assert summary.changes == sum(0 < time < summary.time_s for time in a100.times.tolist()) == 46


def test_resnet_on_the_a100_trace_from_every_start(a100: Trace) -> None:
    lengths = [minutes(a100, 128, "0.6s", IMAGENET, start) for start in range(40)]
    assert [length is not None for length in lengths] == [True] * 35 + [False] * 5  # feasible: 0 .. 34 min
    feasible = [length for length in lengths if length is not None]
    assert min(feasible) == pytest.approx(183.6, abs=0.06)
    assert max(feasible) == pytest.approx(189.7, abs=0.06)
    assert minutes(a100, 128, "0.638s", IMAGENET) == pytest.approx(200, abs=0.2)


def test_the_step_time_that_uses_the_whole_a100_trace(a100: Trace) -> None:
    usable = a100.slice(Seconds(0.0), Seconds(13_104.0))
    # Published: 0.697 s, when steps run across epochs. Cut at 90 epoch ends, each costs half a step: 34 of 18,837.
    step = fit_step_time(usable, "follow(128)", samples=IMAGENET[0], epochs=IMAGENET[1])
    assert step == pytest.approx(0.697 * 18_803 / 18_837, rel=0.001)
    summary = BatchPlan.from_trace(usable, "follow(128)", step).for_epochs(*IMAGENET)
    assert summary.time_s / 60 == pytest.approx(218.4, abs=0.05)


def test_resnet_on_the_tpu_trace(tpu: Trace) -> None:
    assert minutes(tpu, 128, "0.6s", IMAGENET) == pytest.approx(75.6, abs=0.06)
    slowest = minutes(tpu, 128, "0.6s", IMAGENET, 274)
    assert slowest == pytest.approx(277.9, abs=0.06)
    in_band = starts_between(tpu, 128, "0.6s", IMAGENET, 200, 275, until=500)
    assert in_band == {*range(212, 270), *range(286, 456)}


def test_ssd_on_both_traces(a100: Trace, tpu: Trace) -> None:
    lengths = [minutes(a100, 32, "0.3s", COCO, start) for start in range(0, 190, 5)]
    assert all(length is not None and 22 <= length <= 30.5 for length in lengths)
    assert minutes(a100, 4, "0.3s", COCO) == pytest.approx(200.6, abs=0.06)
    assert starts_between(a100, 4, "0.3s", COCO, 199.95, 275, until=25) == set(range(18))
    in_band = starts_between(tpu, 4, "0.3s", COCO, 200, 275, until=500)
    assert in_band == {*range(204, 245), *range(315, 475)}
