"""Money: flat prices, histories, zones, minimum billing; edges by hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ebbflow.core.units import Seconds
from ebbflow.errors import ConfigError, PlanError
from ebbflow.simulate.prices import FlatPrice, PriceHistory, cost, cost_over_time, read_prices, usd_until
from ebbflow.traces import Trace

HOURS = 3600.0


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "prices.csv"
    path.write_text(text)
    return path


def test_worker_hours_times_the_price() -> None:
    trace = Trace.parse("0s:4 1h:2 3h")
    # 4 for an hour, then 2 for half an hour.
    assert cost(trace, 1.5 * HOURS, FlatPrice(2.0)) == pytest.approx(10.0)
    np.testing.assert_allclose(cost_over_time(trace, np.array([0.0, 1.0, 2.0]) * HOURS, FlatPrice(2.0)), [0, 8, 12])


def test_the_last_step_may_end_after_the_trace_and_is_paid_at_its_last_count() -> None:
    assert cost(Trace.parse("0s:4 1h"), 1.5 * HOURS, FlatPrice(1.0)) == pytest.approx(6.0)


def test_a_history_is_a_step_function_of_time() -> None:
    history = PriceHistory(np.array([0.0, HOURS]), np.array([1.0, 3.0]), 3 * HOURS)
    # 2 workers: an hour at 1, half an hour at 3.
    assert cost(Trace.parse("0s:2 3h"), 1.5 * HOURS, history) == pytest.approx(2 * 1 + 2 * 1.5)


def test_a_worker_shorter_than_the_minimum_is_billed_for_the_minimum() -> None:
    trace = Trace.parse("0s:2 100s:3 130s:2 1h")
    price = FlatPrice(3600.0)  # a dollar per second
    # 2 x 600 s, and one worker of 30 s that is billed for 60 s.
    assert cost(trace, 600.0, price, minimum=Seconds(60.0)) == pytest.approx(1260.0)
    assert cost(trace, 600.0, price, minimum=Seconds(30.0)) == pytest.approx(1230.0)


def test_the_newest_worker_is_taken_to_leave_first() -> None:
    # One more at 100 s, one less at 150 s: the new one had 50 s. Oldest first would be two long rentals.
    trace = Trace.parse("0s:1 100s:2 150s:1 1h")
    assert cost(trace, 1000.0, FlatPrice(3600.0), minimum=Seconds(120.0)) == pytest.approx(1000 + 120)


def test_workers_given_back_at_the_end_are_billed_for_the_minimum_too() -> None:
    assert cost(Trace.parse("0s:3 1h"), 20.0, FlatPrice(3600.0), minimum=Seconds(60.0)) == pytest.approx(180.0)


def test_a_file_of_zones_gives_one_zone_or_the_mean_of_those_known(tmp_path: Path) -> None:
    path = write(tmp_path, "time_s,zone,usd_per_hour\n0,a,1\n3600,b,3\n7200,a,2\n10800,b,4\n")
    both, only = read_prices(path), read_prices(path, zone="a")
    # The mean: 1 alone, then (1 + 3) / 2, then (2 + 3) / 2. The file's last row ends what is known.
    assert both.usd_per_hour.tolist() == [1.0, 2.0, 2.5]
    assert both.integral(np.array([10800.0])) == pytest.approx([5.5])
    assert only.integral(np.array([10800.0])) == pytest.approx([1 + 1 + 2.0])


def test_a_history_can_begin_later(tmp_path: Path) -> None:
    path = write(tmp_path, "time_s,usd_per_hour\n0,1\n3600,3\n10800,3\n")
    later = read_prices(path, offset=Seconds(1800.0))
    assert later.end == 9000.0
    assert later.integral(np.array([3600.0])) == pytest.approx([0.5 + 1.5])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "expected time_s,zone,usd_per_hour"),
        ("time_s,usd_per_hour\n0,-1\n", r"prices.csv:2: the price is -1 USD per hour"),
        ("time_s,usd_per_hour\n0,\n", r"prices.csv:2: '0,' has no time and price"),
        ("time_s,usd_per_hour\n0,nan\n", "not negative"),
        ("time_s,usd_per_hour\n5,1\n4,1\n", "expected times that increase"),
        ("time_s,usd_per_hour\n-5,1\n", "expected seconds from 0 on"),
        ("time_s,usd_per_hour\n", "has no prices"),
        ("time_s,usd_per_hour\n50,1\n90,1\n", "has prices from 50 to 90 s"),
    ],
)
def test_bad_histories_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_prices(write(tmp_path, text))


def test_an_unknown_zone_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    path = write(tmp_path, "time_s,zone,usd_per_hour\n0,us-east-1a,1\n10,us-east-1b,1\n")
    with pytest.raises(ConfigError, match="did you mean 'us-east-1"):
        read_prices(path, zone="us-east-1c")


def test_a_history_that_ends_too_early_says_how_far_it_reaches() -> None:
    history = PriceHistory(np.array([0.0]), np.array([1.0]), HOURS, "h.csv")
    with pytest.raises(PlanError, match=r"h.csv covers 60.0 min, the run takes 120.0 min"):
        cost(Trace.parse("0s:1 3h"), 2 * HOURS, history)


@pytest.mark.parametrize("usd", [-0.1, float("nan"), float("inf")])
def test_a_price_that_is_no_price_is_refused(usd: float) -> None:
    with pytest.raises(ConfigError, match="expected a finite number that is not negative"):
        FlatPrice(usd)


@dataclass
class Given:
    usd: list[float]

    def integral(self, times: Any) -> Any:
        return np.array(self.usd)


TIMES = np.array([20.0, 0.0, 10.0])
"""Not in order, since nobody promises that."""


def test_an_integral_that_never_falls_is_accepted_up_to_rounding() -> None:
    assert usd_until(Given([2.0, 0.0, 2.0 + 1e-12]), TIMES).tolist() == [2.0, 0.0, 2.0 + 1e-12]
    assert usd_until(Given([]), np.array([])).tolist() == []


@pytest.mark.parametrize(
    ("usd", "message"),
    [
        ([2.0, 0.5, 1.0], r"returned 0\.5 USD for 0 s; expected"),
        ([1.0, 0.0, 2.0], "returned 1 USD for 20 s after 2 USD for 10 s; expected"),
        ([-1.0, 0.0, -1.0], "returned -1 USD for 10 s after 0 USD for 0 s; expected"),
        ([2.0, 0.0, np.nan], "returned nan USD for 10 s after 0 USD for 0 s; expected"),
        ([np.nan, 0.0, 1.0], "returned nan USD for 20 s after 1 USD for 10 s; expected"),
        ([np.inf, 0.0, np.inf], "returned inf USD for 10 s after 0 USD for 0 s; expected"),
        ([-np.inf, 0.0, 1.0], "returned -inf USD for 20 s after 1 USD for 10 s; expected"),
    ],
)
def test_an_integral_that_no_price_has_is_refused(usd: list[float], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"the price model Given: integral\(\) {message}"):
        usd_until(Given(usd), TIMES)


def test_the_real_history_lies_between_its_extremes(shared: Path) -> None:
    prices = read_prices(shared / "traces" / "prices" / "aws_p3_2xlarge_us-east-1_2019-12_2020-02.csv")
    hourly = float(prices.integral(np.array([86400.0]))[0]) / 24
    assert 0.918 <= hourly <= 1.156
