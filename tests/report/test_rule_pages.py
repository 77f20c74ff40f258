"""Curves and plots of the rules, and the cards of the documentation."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ebbflow.report.rule_pages import RuleCurves, cards, chart, curves, figure
from ebbflow.rules.rule import RULES, rule_entries

ROOT = Path(__file__).resolve().parents[2]
OWN = [entry for entry in rule_entries() if entry.make.__module__.startswith("ebbflow.")]
NAMES = [entry.name for entry in OWN]


def test_a_rule_that_needs_the_noise_has_a_line_for_each_level() -> None:
    lines = curves(RULES.entry("adascale"), points=9)  # a point for each power of two from 1/4 to 64
    assert list(lines.lines) == ["phi 0.1", "phi 1", "phi 10", "phi 100"]
    assert lines.x == pytest.approx([2.0**e for e in range(-2, 7)])
    # phi = 1, S = 4: 2/(1/4 + 1) = 8/5; phi = 10, S = 64: 11/(10/64 + 1) = 704/74
    assert lines.lines["phi 1"][4] == pytest.approx(8 / 5)
    assert lines.lines["phi 10"][8] == pytest.approx(704 / 74)
    assert curves(RULES.entry("lena"), points=9).lines["phi 1"][4] == pytest.approx(8 / 5, rel=1e-5)


def test_a_rule_without_noise_has_one_line() -> None:
    lines = curves(RULES.entry("sqrt"), points=9)
    assert list(lines.lines) == ["sqrt"]
    assert lines.lines["sqrt"] == pytest.approx([2 ** (e / 2) for e in range(-2, 7)])


def test_a_modifier_is_shown_over_a_run() -> None:
    ramp = curves(RULES.entry("ramp")).lines
    assert list(ramp) == ["linear", "linear+ramp: rate"]
    # 192 steps of 8, 96 of 1, then 8 again: k = 8, T = 64; 32 steps into the ramp 1 + 7/2
    assert [ramp["linear+ramp: rate"][step] for step in (0, 191, 192, 288, 320, 352)] == [8, 8, 1, 1, 4.5, 8]
    inside = curves(RULES.entry("inside")).lines
    assert set(inside["linear+inside: rate"]) == {1.0}
    assert inside["linear+inside: gradient"] == inside["linear"]
    decay = curves(RULES.entry("keepdecay")).lines["sqrt+keepdecay: decay"]
    assert (decay[0], decay[200], decay[400]) == pytest.approx((math.sqrt(8), 1, math.sqrt(8)))


def test_a_small_plot_by_hand() -> None:
    # y = 1, 2, 4 at three points: three rows of an octave each; the axis begins at 1 and ends at 4
    lines = RuleCurves(title="t", x_label="x", x=(1.0, 2.0, 4.0), lines={"y": (1.0, 2.0, 4.0)}, log_x=True)
    assert chart(lines, width=8, height=3) == "\n".join(
        [
            "t",
            "  4 ┤  ·",
            "    │ ·",
            "  1 ┤·",
            "    └───",
            "     124",
            "     x",
        ]
    )


def test_a_flat_line_has_a_plot_too() -> None:
    lines = chart(curves(RULES.entry("constant"))).splitlines()
    assert lines[-4].startswith("  1 ┤····")


@pytest.mark.parametrize("name", ["adascale", "linear", "ramp", "inside"])
def test_a_figure_is_the_same_every_time(name: str, tmp_path: Path) -> None:
    lines = curves(RULES.entry(name))
    for file in ("one.svg", "two.svg"):
        figure(lines, tmp_path / file)
    text = (tmp_path / "one.svg").read_text(encoding="utf-8")
    assert text == (tmp_path / "two.svg").read_text(encoding="utf-8")
    assert lines.x_label in text
    assert all(label in text for label in lines.lines)


def test_a_figure_of_a_rule_in_another_format_is_the_same_every_time_too(tmp_path: Path) -> None:
    lines = curves(RULES.entry("linear"))
    for file in ("one.PDF", "two.pdf"):
        figure(lines, tmp_path / file)
    assert (tmp_path / "one.PDF").read_bytes() == (tmp_path / "two.pdf").read_bytes()


def test_the_cards_are_up_to_date() -> None:
    folder = ROOT / "docs" / "rules"
    written = {page.name: page.read_text(encoding="utf-8") for page in folder.glob("*.md")}
    stale = sorted(name for name, text in cards(OWN).items() if written.pop(name, None) != text)
    assert (stale, sorted(written)) == ([], []), "stale or left over; run: ebbflow rules cards docs/rules"
