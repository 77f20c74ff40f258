from __future__ import annotations

import numpy as np
import pytest

from ebbflow.core.units import Seconds
from ebbflow.errors import EbbflowError, PlanError, UnitError
from ebbflow.plan.steptime import ConstantStepTime, StepTimeLike, TableStepTime, make_step_time

COUNTS = np.array([1, 3, 5, 9])


def test_a_table_is_interpolated_and_constant_beyond_its_ends() -> None:
    # Between 2 (0.4 s) and 6 (1.2 s) each worker adds 0.2 s: 3 -> 0.6 s, 5 -> 1.0 s.
    assert make_step_time({6: 1.2, 2: 0.4}).seconds(COUNTS).tolist() == pytest.approx([0.4, 0.6, 1.0, 1.2])


def test_a_function_is_called_once_for_each_count() -> None:
    asked: list[int] = []

    def step(workers: int) -> float:
        asked.append(workers)
        return 0.5 + workers / 10

    assert make_step_time(step).seconds(np.array([3, 1, 3, 3])).tolist() == pytest.approx([0.8, 0.6, 0.8, 0.8])
    assert sorted(asked) == [1, 3]


def test_a_constant_from_text_or_number() -> None:
    assert make_step_time("600ms") == make_step_time(0.6) == ConstantStepTime(Seconds(0.6))
    assert make_step_time("0.6s").seconds(COUNTS).tolist() == [0.6] * 4
    assert [str(make_step_time(v)) for v in ("600ms", {8: 1.0, 1: 0.5})] == ["0.6s", "1:0.5s 8:1s"]


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        ("0.6", UnitError, "has no unit"),
        ("0s", PlanError, "step time is 0 s"),
        (-1.0, PlanError, "step time is -1 s"),
        (float("nan"), PlanError, "step time is nan s"),
        ({}, PlanError, "table of step times is empty"),
        ({0: 1.0}, PlanError, "step time for 0 workers"),
        ({4: 0.0}, PlanError, "step time for 4 workers is 0 s"),
    ],
)
def test_a_bad_step_time_is_refused(value: StepTimeLike, kind: type[EbbflowError], message: str) -> None:
    with pytest.raises(kind, match=message):
        make_step_time(value)


def test_a_function_that_gives_no_time_is_refused() -> None:
    with pytest.raises(PlanError, match="step time for 5 workers is 0 s"):
        make_step_time(lambda workers: 5.0 - workers if workers < 6 else 1.0).seconds(COUNTS)


def test_a_table_does_not_follow_later_changes_of_its_source() -> None:
    source = {1: 0.5}
    model = make_step_time(source)
    source[1] = 9.0
    assert model == TableStepTime({1: 0.5})
