from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.errors import OutputError
from ebbflow.report.trace_drawing import chart, figure
from ebbflow.traces.availability import Trace
from ebbflow.traces.synthetic import load

BEGINS = {".svg": b"<?xml", ".png": b"\x89PNG", ".pdf": b"%PDF"}


@pytest.mark.parametrize("text", ["gcp-tpu-like", "constant(0)", "constant(123456, duration=0.5s)", "constant(1)"])
@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_chart_fits_its_width(text: str, width: int) -> None:
    lines = chart(load(text), width=width).splitlines()
    assert max(map(len, lines)) == width
    assert lines[0].split()[0] == str(load(text).stats().max)


def test_heights_show_the_count_to_an_eighth_of_a_line() -> None:
    # Width 40 leaves 37 columns; the greatest count 8 is one line high, so a worker is an eighth.
    bars = chart(Trace.parse("0s:8 100s:1 200s:0 300s:4 370s"), width=40, height=1).splitlines()[0]
    assert bars == "8 ┤" + "█" * 10 + "▁" * 10 + " " * 10 + "▄" * 7


def test_the_unit_of_the_time_axis_follows_the_duration() -> None:
    assert [chart(load(f"constant(1, duration={d})"))[-3:].split()[-1] for d in ("60s", "60min", "60h")] == [
        "s",
        "min",
        "h",
    ]


@given(st.floats(1e-3, 1e9))
def test_a_chart_of_any_duration_has_times_below_it(end: float) -> None:
    labels = chart(Trace.from_points([(0, 1)], end=end)).splitlines()[-1].split()
    assert labels[0] == "0"
    assert len(labels) >= 4


@pytest.mark.parametrize("suffix", BEGINS)
def test_a_figure_is_of_the_kind_of_its_suffix_and_the_same_each_time(suffix: str, tmp_path: Path) -> None:
    first, again = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    for path in (first, again):
        figure(load("gcp-a100-like(seed=2)"), path)
    assert first.read_bytes().startswith(BEGINS[suffix])
    assert first.read_bytes() == again.read_bytes()


def test_a_figure_that_cannot_be_drawn_or_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"x\.bmp: .* expected \.svg, \.png, \.pdf"):
        figure(load("constant(1)"), tmp_path / "x.bmp")
    with pytest.raises(OutputError, match="cannot be written"):
        figure(load("constant(1)"), tmp_path / "no" / "x.svg")
