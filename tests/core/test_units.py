from __future__ import annotations

import pytest

from ebbflow.core.units import Span, format_seconds, parse_seconds, parse_span
from ebbflow.errors import UnitError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("0.6s", 0.6),
        ("600ms", 0.6),
        ("250us", 0.00025),
        ("5 sec", 5),
        ("4m", 240),
        ("3h", 10800),
        ("1h30m", 5400),
        ("2 min", 120),
        ("1d", 86400),
        ("0s", 0),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a number with a unit"),
        ("90", "has no unit; write 90s"),
        ("90x", "unknown unit 'x'"),
        ("5ep", "unknown unit 'ep'"),
        ("-3s", "not negative"),
        ("1h-30m", "not negative, in all its parts"),
        ("soon", "not a number with a unit"),
        ("1e999s", "finite"),
    ],
)
def test_wrong_durations(text: str, message: str) -> None:
    with pytest.raises(UnitError, match=message):
        parse_seconds(text)


def test_spans_in_samples() -> None:
    # 1.5 epochs of 1000; 20 steps of the reference batch of 32; samples as they are
    sizes = [parse_span(text).samples(epoch_samples=1000, ref_batch=32) for text in ("1.5ep", "20steps", "7samples")]
    assert sizes == [1500, 640, 7]
    assert str(Span(5, "ep")) == "5ep"


@pytest.mark.parametrize("text", ["5", "5s", "ep", "5ep3ep", "-1ep", "1e999ep"])
def test_wrong_spans(text: str) -> None:
    with pytest.raises(UnitError):
        parse_span(text)


def test_a_span_in_epochs_needs_to_know_an_epoch() -> None:
    with pytest.raises(UnitError, match="size of an epoch is not known"):
        parse_span("5ep").samples(epoch_samples=0, ref_batch=32)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.999, "999 ms"),
        (1, "1.0 s"),  # from a second on in seconds, from 2 min on in minutes, from 5 h on in hours
        (119.9, "119.9 s"),
        (120, "2.0 min"),
        (17_994, "299.9 min"),
        (18_000, "5.0 h"),
    ],
)
def test_a_duration_for_people_changes_its_unit_where_the_next_one_reads_better(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
