"""Student's t: quantiles as tables have them, and intervals with the coverage that they promise."""

from __future__ import annotations

import numpy as np
import pytest

from ebbflow.report.intervals import difference_interval, mean_margin, t_quantile

GOLDEN = {
    1: 12.7062, 2: 4.3027, 3: 3.1824, 5: 2.5706, 9: 2.2622, 12: 2.1788, 13: 2.1604, 15: 2.1314, 20: 2.0860, 30: 2.0423,
    60: 2.0003, 120: 1.9799, 1000: 1.9623,
}  # fmt: skip


@pytest.mark.parametrize(("freedom", "value"), GOLDEN.items())
def test_quantiles_are_those_of_the_published_tables(freedom: int, value: float) -> None:
    assert t_quantile(freedom) == pytest.approx(value, abs=1e-4)


def test_one_run_has_no_interval() -> None:
    assert mean_margin([0.9]) is None
    assert mean_margin([]) is None
    assert difference_interval([0.9], [0.1, 0.2]) is None
    assert difference_interval([0.9, 0.8], [0.1]) is None


@pytest.mark.parametrize("runs", [2, 3, 8])
def test_nineteen_of_twenty_intervals_hold_the_truth_however_few_runs_there_are(runs: int) -> None:
    random = np.random.default_rng(0)
    draws = 4000
    means = differences = 0
    for _ in range(draws):
        one, other = random.normal(5.0, 2.0, runs).tolist(), random.normal(3.0, 2.0, runs).tolist()
        margin, interval = mean_margin(one), difference_interval(one, other)
        assert margin is not None
        assert interval is not None
        means += abs(np.mean(one) - 5.0) <= margin
        differences += interval[0] <= 2.0 <= interval[1]
    four_errors = 4 * (0.95 * 0.05 / draws) ** 0.5
    assert means / draws == pytest.approx(0.95, abs=four_errors)
    assert differences / draws == pytest.approx(0.95, abs=four_errors)
