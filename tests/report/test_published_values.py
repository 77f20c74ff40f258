"""What a published value is: the text `what`, its errors, and the values themselves."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.errors import ConfigError
from ebbflow.report.published import Quantity, parse_quantity, parse_value


@pytest.mark.parametrize(
    ("text", "found", "effort"),
    [
        ("metric", Quantity("metric"), None),
        ("steps", Quantity("steps"), None),
        ("epochs to 0.95", Quantity("epochs", 0.95), "epochs"),
        ("updates to 3.5", Quantity("updates", 3.5), "updates"),
        ("  seconds  to  0.95 ", Quantity("seconds", 0.95), "time_s"),  # seconds are our time_s
        ("pixel_accuracy", Quantity("pixel_accuracy"), None),
    ],
)
def test_a_text_says_what_a_value_is(text: str, found: Quantity, effort: str | None) -> None:
    assert parse_quantity(text, where="s.toml: paper") == found
    assert found.effort == effort
    assert parse_quantity(str(found), where="") == found


@given(st.sampled_from(["epochs", "updates", "seconds"]), st.integers(-10_000, 10_000), st.integers(0, 6))
def test_the_target_is_written_as_it_was_read(name: str, digits: int, decimals: int) -> None:
    quantity = Quantity(name, digits / 10**decimals)
    assert parse_quantity(str(quantity), where="") == quantity


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epochs", "^s.toml: paper: what is 'epochs'; did you mean 'epochs to 0.95'"),
        ("metrics", "what is 'metrics'; did you mean 'metric'"),
        ("step", "did you mean 'steps'"),
        ("second", "did you mean 'seconds to 0.95'"),
        ("hours to 0.95", "what is 'hours to 0.95'; 'hours' to a target is unknown; expected metric, steps, epochs to"),
        ("epochs to 95%", "the target '95%' is no score as recorded; expected metric"),
        ("epochs to 0.99x", "the target '0.99x' is no score as recorded"),
        ("epochs to inf", "the target 'inf' is no score"),
        ("epochs to", "what is 'epochs to'; did you mean 'epochs to 0.95'"),
        ("epochs to ", "the target '' is no score as recorded"),
        ("", "what is ''; expected metric"),
        (3, "what is 3; expected metric, steps, epochs to 0.95 .*such as pixel_accuracy"),
    ],
)
def test_what_is_wrong_in_the_text_is_named(text: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_quantity(text, where="s.toml: paper")


def test_a_target_may_never_be_reached_but_a_score_is_a_number() -> None:
    assert parse_value("never", Quantity("epochs", 0.95), where="") == "never"
    assert parse_value(109, Quantity("epochs", 0.95), where="") == 109.0
    for value in ("N/A", True, math.inf, math.nan, None):
        with pytest.raises(ConfigError, match=r"^here = .*; expected a finite number, or \"never\" for a target"):
            parse_value(value, Quantity("epochs", 0.95), where="here")
    for value in ("never", "0.9", False):
        with pytest.raises(ConfigError, match=r"expected a finite number$"):
            parse_value(value, Quantity("metric"), where="here")
