"""Figures: the right data in the right panels, short enough to draw, the same bytes each time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from ebbflow.record import End, Header, RecordWriter, StepRow, ValidationRow
from ebbflow.report.figures import all_figures
from ebbflow.report.plotting import (
    PALETTE,
    Drawing,
    RuleStyle,
    changes,
    envelope,
    over_seeds,
    save,
    ticks_at_powers_of_two,
)
from ebbflow.report.report_page import ReportPaths, inline_svg, write_report
from ebbflow.report.results import load_results
from ebbflow.report.summary import summarise


def drawings(path: Path) -> dict[str, Drawing]:
    results = load_results(path)
    return {drawing.stem: drawing for drawing in all_figures(results, summarise(results.arms))}


@pytest.fixture(scope="module")
def drawn(study: Path) -> dict[str, Drawing]:
    return drawings(study)


def test_each_workload_has_its_figures_and_the_traces_one_of_their_own(drawn: dict[str, Drawing]) -> None:
    kinds = ("validation", "validation-updates", "validation-wall", "scores", "loss", "schedules", "batch", "rate",
             "multiplier")  # fmt: skip
    assert set(drawn) == {f"{kind}-{name}" for kind in kinds for name in ("digits-mlp", "tiny-gpt")} | {"traces"}


def test_a_panel_a_trace_and_a_line_a_rule_with_the_means_of_the_seeds(drawn: dict[str, Drawing]) -> None:
    static, gpu = drawn["validation-digits-mlp"].figure.axes
    assert (static.get_title("left"), gpu.get_title("left")) == ("static", "gpu")
    line = next(line for line in gpu.lines if line.get_label() == "constant")
    # Last validations of seeds 0 and 1 on gpu: 0.90 + 0.01 and 0.92 + 0.01, in percent; 92 is their mean.
    assert np.asarray(line.get_ydata())[-1] == pytest.approx(92.0)
    assert line.get_color() == PALETTE[0]


def test_a_run_that_diverged_ends_in_a_cross_and_is_not_in_the_mean(drawn: dict[str, Drawing]) -> None:
    _, gpu = drawn["validation-digits-mlp"].figure.axes
    lines = [line for line in gpu.lines if line.get_label() == "linear+warmup(2ep)"]
    assert np.asarray(lines[0].get_ydata())[-1] == pytest.approx(95.0)  # seed 0 alone: 0.94 + 0.01
    crosses = [line for line in gpu.lines if line.get_marker() == "x"]
    assert sorted(line.get_gid() for line in crosses) == ["rule-1", "rule-2"]  # sqrt failed, linear diverged


def test_the_batch_is_zero_while_the_trace_has_no_worker(drawn: dict[str, Drawing]) -> None:
    _, gpu = drawn["batch-digits-mlp"].figure.axes
    x, y = (np.asarray(values) for values in gpu.lines[0].get_data())
    # No worker from 700 s to 760 s, then 8 workers x 8 samples.
    (at,) = np.flatnonzero(y == 0)
    assert x[at] == pytest.approx(700 / 60)
    assert (x[at + 1], y[at + 1]) == (pytest.approx(760 / 60), 64)


def test_an_axis_with_less_than_two_powers_of_two_has_ticks_between_them() -> None:
    axes = Figure().add_subplot()
    axes.set_xscale("log", base=2)
    for low, high, expected in ((7.2, 14.1, [8, 10, 12, 14]), (0.9, 17, [1, 2, 4, 8, 16])):
        axes.set_xlim(low, high)
        ticks_at_powers_of_two(axes.xaxis)
        shown = [tick for tick in axes.xaxis.get_majorticklocs() if low <= tick <= high]
        assert shown == pytest.approx(expected)
        axes.xaxis.set_major_locator(LogLocator(base=2))


def test_the_used_part_of_the_trace_is_shaded(drawn: dict[str, Drawing]) -> None:
    _, gpu = drawn["traces"].figure.axes
    assert np.asarray(gpu.lines[0].get_ydata()).max() == 28
    shade = gpu.patches[0].get_extents().transformed(gpu.transData.inverted())
    assert 0 < shade.x1 < 40  # in minutes; the trace ends at 2400 s, training before


def test_a_run_that_begins_within_the_trace_is_shaded_and_drawn_from_there(
    tmp_path: Path, make_record: Callable[..., Path]
) -> None:
    path = make_record(tmp_path / "record.jsonl", last=(0.9,), trace="gpu")
    (arm,) = load_results(path).arms
    assert arm.header is not None
    # Training begins 600 s after the beginning of the trace, which has no workers from 700 s to 760 s.
    later = replace(arm, header=replace(arm.header, plan={"offset_s": 600.0}))
    results = replace(load_results(path), arms=(later,))
    drawn = {drawing.stem: drawing for drawing in all_figures(results, summarise(results.arms))}
    (axis,) = drawn["traces"].figure.axes
    shade = axis.patches[0].get_extents().transformed(axis.transData.inverted())
    assert (shade.x0, shade.x1) == (pytest.approx(10), pytest.approx(10 + arm.end_s / 60))
    (axis,) = drawn["batch-digits-mlp"].figure.axes
    x, y = (np.asarray(values) for values in axis.lines[0].get_data())
    assert x[np.flatnonzero(y == 0)[0]] == pytest.approx(100 / 60)
    assert x[-1] == pytest.approx(arm.end_s / 60)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(
    ("huge", "status", "diverged"),
    [
        ((1e300, 1.5e308, 1e308, 1e300), "finished", True),
        ((2.0, 1e300, 3e37, None), "diverged", True),
        ((0.7, 0.6, 1e37, 1e38), "finished", False),
    ],
)
def test_huge_losses_leave_the_figures_and_tables_of_other_runs_readable(
    tmp_path: Path, huge: tuple[float | None, ...], status: Literal["finished", "diverged"], diverged: bool
) -> None:
    for rule, values, end in (("wild", huge, status), ("sqrt", (1.0, 0.9, 0.8, 0.7), "finished")):
        for seed in (0, 1):
            with RecordWriter(tmp_path / "arms" / f"{rule}-{seed}" / "record.jsonl") as record:
                config = {"workload": "w", "trace": "t", "rule": rule, "seed": seed, "ref_batch": 10, "metric": "loss"}
                record.write(Header(config=config | {"higher_is_better": False}))
                for i, value in enumerate(values):
                    loss = value and value * (1 + 0.1 * seed)
                    row = StepRow(
                        step=i, time_s=2.0 * i, duration_s=2.0, wall_s=i, epoch=i, samples=20 * (i + 1), workers=2,
                        batch=20, micro_batches=2, lr_base=0.1, lr=0.2, multiplier=2.0, loss=loss,
                        stats={} if value is None else {"noise": value},
                    )  # fmt: skip
                    record.write(row)
                    record.write(
                        ValidationRow(
                            step=i + 1, epoch=i + 1.0, samples=20 * (i + 1), time_s=2.0 * i, wall_s=i,
                            metrics={"loss": loss},
                        )
                    )  # fmt: skip
                record.write(End(status=end, steps=4, samples=80, wall_s=4))
    page = write_report(tmp_path, targets=["0.8"])
    wild, sqrt = sorted(page.summary.cells, key=lambda cell: cell.rule != "wild")
    assert wild.diverged == ((0, 1) if diverged else ())
    assert sqrt.mean == pytest.approx(0.735)
    figures = drawings(tmp_path)
    for stem in ("validation-w", "loss-w"):
        (axis,) = figures[stem].figure.axes
        low, high = axis.get_ylim()
        assert axis.get_yscale() == "log" or high - low < 10, "the other rule is no line on the axis"


def test_a_statistic_of_the_steps_gets_its_own_figure(tmp_path: Path, make_record: Callable[..., Path]) -> None:
    path = make_record(tmp_path / "record.jsonl", last=(0.9,), trace="gpu", stats=lambda p: {"noise_scale": 3 + p})
    figure = drawings(path)["stat-noise-scale-digits-mlp"]
    y = np.asarray(figure.figure.axes[0].lines[0].get_ydata())
    assert figure.title == "Noise scale"
    assert y.min() > 3
    assert y.max() <= 12  # after 9 epochs


@pytest.mark.parametrize("last", [(0.9,), (None,), ()])
def test_short_and_empty_records_give_figures_too(
    tmp_path: Path, make_record: Callable[..., Path], last: tuple[float | None, ...]
) -> None:
    for until in (0, 1):
        path = make_record(tmp_path / f"{until}" / "record.jsonl", last=last, until=until, status=None)
        for stem, drawing in drawings(path).items():
            save(drawing.figure, tmp_path, stem)


def test_the_same_figure_gives_the_same_svg(study: Path, tmp_path: Path) -> None:
    texts = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        svg, png = save(drawings(study)["batch-digits-mlp"].figure, tmp_path / name, "batch")
        assert png.stat().st_size > 1000
        texts.append(svg.read_text())
    assert texts[0] == texts[1]
    assert "<dc:date>" not in texts[0]


def test_drawing_leaves_the_settings_of_matplotlib_alone(drawn: dict[str, Drawing]) -> None:
    import matplotlib

    assert drawn
    assert matplotlib.rcParams["svg.hashsalt"] is None


def test_every_rule_of_a_large_study_looks_different() -> None:
    rules = [f"r{i}" for i in range(20)]
    style = RuleStyle(rules)
    assert len({(style.line(r)["color"], str(style.line(r)["linestyle"])) for r in rules}) == 20


def test_an_inlined_figure_has_its_own_ids_and_the_colours_of_the_page(report: ReportPaths) -> None:
    svg = (report.folder / "figures" / "rate-digits-mlp.svg").read_text()
    inlined = inline_svg(svg, stem="rate")
    assert 'id="figure_1"' in svg
    assert 'id="figure_1"' not in inlined
    assert 'id="rate-figure_1"' in inlined
    assert PALETTE[0] in svg
    assert PALETTE[0] not in inlined
    assert "var(--rule-0)" in inlined
    assert "http" not in inlined


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=500), st.integers(4, 60))
def test_an_envelope_keeps_the_ends_and_the_extremes(values: list[float], points: int) -> None:
    x, y = np.arange(len(values), dtype=float), np.array(values)
    short_x, short_y = envelope(x, y, points=points)
    assert short_x.size <= max(points + 2, 4)
    assert (short_y.min(), short_y.max()) == (y.min(), y.max())
    assert (short_x[0], short_x[-1]) == (x[0], x[-1])
    assert np.all(np.diff(short_x) > 0)


@given(st.lists(st.sampled_from([0.0, 64.0, 128.0]), min_size=1, max_size=80))
def test_changes_draw_the_same_steps(values: list[float]) -> None:
    x, y = np.arange(len(values), dtype=float), np.array(values)
    short_x, short_y = changes(x, y)
    again = short_y[np.searchsorted(short_x, x, side="right") - 1]
    assert np.array_equal(again, y)


def test_curves_of_different_length_are_averaged_where_all_have_values() -> None:
    a = np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0])
    b = np.array([1.0, 2.0]), np.array([3.0, np.nan])
    x, mean, low, high = over_seeds([a, b])
    assert x.tolist() == [1.0]
    assert (mean[0], low[0], high[0]) == (2.0, 1.0, 3.0)


def test_epochs_are_ticked_at_whole_numbers(tmp_path: Path, make_record: Callable[..., Path]) -> None:
    drawn = drawings(make_record(tmp_path / "record.jsonl", last=(0.8, 0.9), until=3))
    for kind in ("validation", "loss", "rate"):
        (axis,) = drawn[f"{kind}-digits-mlp"].figure.axes
        ticks = axis.get_xticks()
        assert np.array_equal(ticks, np.round(ticks)), kind


def test_lines_on_each_other_alternate_and_the_legend_names_them(drawn: dict[str, Drawing]) -> None:
    # On static all three rules have the same validations; on gpu they differ.
    figure = drawn["validation-digits-mlp"].figure
    static, gpu = figure.axes
    first, second, third = static.lines[:3]
    dashes = [line._unscaled_dash_pattern for line in (first, second, third)]  # type: ignore[attr-defined]
    assert len({offset for offset, _ in dashes}) == 3
    for _, (on, off) in dashes:
        assert off == 2 * on  # each leaves the place of the two others free
    assert len({line.get_color() for line in (first, second, third)}) == 3
    (legend,) = figure.legends
    assert legend.get_title().get_text() == "On one line: constant = sqrt = linear+warmup(2ep) (static)"
    assert [text.get_text() for text in legend.get_texts()] == ["constant", "sqrt", "linear+warmup(2ep)"]
    rules = [line for line in gpu.lines if line.get_label() in ("constant", "sqrt")]
    assert str(rules[0].get_linestyle()) == "-"


def test_scores_are_drawn_with_their_intervals(drawn: dict[str, Drawing]) -> None:
    _, gpu = drawn["scores-digits-mlp"].figure.axes
    (interval,) = gpu.collections  # constant alone has two runs
    (low, _), (high, _) = interval.get_segments()[0]
    assert (low, high) == (pytest.approx(91 - 12.7062), pytest.approx(91 + 12.7062))
    assert "one run: no interval" in drawn["scores-digits-mlp"].caption
