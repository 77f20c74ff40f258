"""Figures of what rules record per step and per layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ebbflow.record import Header, LayersRow, RecordWriter, Run, StepRow, read_record
from ebbflow.report.figures import all_figures
from ebbflow.report.plotting import MUTED, Drawing, save
from ebbflow.report.results import LayerCurves, load_results
from ebbflow.report.step_figures import LAYER_FIGURES, STATISTICS, Statistic, gradient_variance
from ebbflow.report.summary import summarise

AGREED = (
    "gain",
    "gain_min",
    "gain_max",
    "noise",
    "signal",
    "noise_scale",
    "ramp",
    "warming",
    "coefficient",
    "level",
    "slope_left",
    "progress",
)
"""The names that rules and the optimizer write."""


def drawings(path: Path) -> dict[str, Drawing]:
    results = load_results(path)
    return {drawing.stem: drawing for drawing in all_figures(results, summarise(results.arms))}


def everything(progress: float) -> dict[str, float]:
    return {
        "gain": 1 + progress, "gain_min": 1.0, "gain_max": 9.0, "noise": 40.0, "signal": 0.1, "noise_scale": 400.0,
        "ramp": min(1.0, progress),
        "warming": float(max(0, 3 - int(progress))), "coefficient": 0.5, "level": 0.8, "slope_left": 0.1,
        "progress": 100 * progress,
    }  # fmt: skip


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory, make_record: Callable[..., Path]) -> dict[str, Drawing]:
    folder = tmp_path_factory.mktemp("stats")
    return drawings(make_record(folder / "record.jsonl", last=(0.9,), trace="gpu", rule="lena", stats=everything))


def ys(drawing: Drawing, line: int = 0) -> np.ndarray:
    return np.asarray(drawing.figure.axes[0].lines[line].get_ydata(), dtype=float)


def test_every_agreed_statistic_has_a_figure_with_words_of_its_own(drawn: dict[str, Drawing]) -> None:
    assert {statistic.column for statistic in STATISTICS} == {*AGREED, "multiplier"}
    for statistic in STATISTICS:
        drawing = drawn[f"stat-{statistic.column.replace('_', '-')}-digits-mlp"]
        assert (drawing.kind, drawing.title) == (statistic.column, statistic.title)
        assert drawing.caption.startswith(statistic.caption)


def test_figures_of_statistics_come_in_the_order_of_their_list(drawn: dict[str, Drawing]) -> None:
    kinds = [drawing.kind for stem, drawing in drawn.items() if stem.startswith("stat-")]
    assert kinds == [statistic.column for statistic in STATISTICS]


def test_a_statistic_called_progress_does_not_become_the_horizontal_axis(drawn: dict[str, Drawing]) -> None:
    x, y = drawn["stat-progress-digits-mlp"].figure.axes[0].lines[0].get_data()
    assert np.max(np.asarray(x)) == pytest.approx(9, abs=0.2)  # epochs
    # At the end of an epoch the value is that of the step before the smaller last one, of 192 of 1,437 samples at most.
    np.testing.assert_allclose(np.asarray(y), 100 * np.asarray(x), atol=100 * 192 / 1437)
    assert np.isclose(np.asarray(y), 100 * np.asarray(x)).mean() > 0.9


def test_the_batch_is_drawn_beside_the_noise_scale(drawn: dict[str, Drawing]) -> None:
    axis = drawn["stat-noise-scale-digits-mlp"].figure.axes[0]
    assert set(ys(drawn["stat-noise-scale-digits-mlp"])) == {400.0}
    (batch,) = [line for line in axis.lines if line.get_color() == MUTED]
    # The trace has 8 to 28 workers of 8 samples in the part that is used.
    assert (np.min(np.asarray(batch.get_ydata())), np.max(np.asarray(batch.get_ydata()))) == (64, 192)
    assert axis.get_yscale() == "log"  # 64 to 400 is more than a factor of 5


def test_layers_that_end_their_warm_up_are_steps_down(drawn: dict[str, Drawing]) -> None:
    y = ys(drawn["stat-warming-digits-mlp"])
    assert (y[0], y[-1]) == (3.0, 0.0)
    assert np.all(np.diff(y) <= 0)


def test_the_multiplier_over_epochs_is_drawn_only_where_it_is_more_than_a_function_of_the_batch(
    tmp_path: Path, make_record: Callable[..., Path]
) -> None:
    plain = drawings(make_record(tmp_path / "plain" / "record.jsonl", last=(0.9,), trace="gpu"))
    assert not any(stem.startswith("stat-") for stem in plain)
    ramped = drawings(make_record(tmp_path / "r" / "record.jsonl", last=(0.9,), stats=lambda p: {"ramp": 1.0}))
    assert {stem for stem in ramped if stem.startswith("stat-")} == {
        "stat-multiplier-digits-mlp",
        "stat-ramp-digits-mlp",
    }


def test_a_statistic_that_is_not_listed_is_drawn_nevertheless(tmp_path: Path, make_record: Callable[..., Path]) -> None:
    drawing = drawings(make_record(tmp_path / "record.jsonl", last=(0.9,), stats=lambda p: {"tide_height": p}))[
        "stat-tide-height-digits-mlp"
    ]
    assert drawing.title == "Tide height"


def test_one_more_statistic_is_one_line() -> None:
    one = Statistic(column="tide", title="Tide", caption="How high the water is.")
    assert one.drawn_for(frozenset({"tide", "gain"}))
    assert not one.drawn_for(frozenset({"gain"}))


# ---- layers ----


def with_layers(path: Path, *, names: list[str] | None, layers: int = 3) -> Run:
    """Four steps of 16 samples at a reference batch of 8, each with its layers."""
    config = {"workload": "quadratic", "trace": "static", "rule": "lena", "seed": 0, "metric": "loss", "ref_batch": 8}
    with RecordWriter(path) as record:
        record.write(Header(config=config | ({} if names is None else {"layers": names})))
        for number in range(4):
            row = StepRow(
                step=number, time_s=0, wall_s=0, epoch=0, samples=16 * (number + 1), workers=2, batch=16,
                micro_batches=2,
                lr_base=0.1, lr=0.1, multiplier=1.5, loss=1.0, stats={"gain": 1.5},
            )  # fmt: skip
            record.write(row)
            noise, signal = [8.0, 0.0, 16.0], [1.0, 2.0, -1.0]
            record.write(
                LayersRow.of(
                    row,
                    noise=(noise * layers)[:layers],
                    signal=(signal * layers)[:layers],
                    multiplier=[1.0 + number] * layers,
                )
            )
    return read_record(path)


def test_the_gradient_variance_of_a_layer_is_its_gain(tmp_path: Path) -> None:
    curves = LayerCurves.from_run(with_layers(tmp_path / "record.jsonl", names=["a", "b", "c"]))
    assert curves is not None
    assert (curves.names, curves.position.tolist()) == (("a", "b", "c"), [0.25, 0.5, 0.75, 1.0])
    # B0 = 8, B = 16. Noise 8, signal 1: (8/8 + 1)/(8/16 + 1) = 4/3. No noise: 1. A signal below zero counts as 0: B/B0.
    np.testing.assert_allclose(gradient_variance(curves, 8), [[4 / 3, 1.0, 2.0]] * 4)


def test_a_panel_a_rule_and_trace_and_a_line_a_layer(tmp_path: Path) -> None:
    with_layers(tmp_path / "record.jsonl", names=["a", "b", "c"])
    drawn = drawings(tmp_path / "record.jsonl")
    for what in LAYER_FIGURES:
        (axis,) = drawn[f"{what.kind}-quadratic"].figure.axes
        assert axis.get_title("left") == "lena, static"
        assert [line.get_label() for line in axis.lines] == ["a", "b", "c"]
        assert len({line.get_color() for line in axis.lines}) == 3
        svg, _ = save(drawn[f"{what.kind}-quadratic"].figure, tmp_path, what.kind)
        assert svg.stat().st_size > 1000
    assert np.asarray(drawn["layer-multiplier-quadratic"].figure.axes[0].lines[0].get_ydata()).tolist() == [1, 2, 3, 4]


def test_of_many_layers_the_legend_names_the_first_and_the_last(tmp_path: Path) -> None:
    with_layers(tmp_path / "record.jsonl", names=[f"layer{i}" for i in range(30)], layers=30)
    (axis,) = drawings(tmp_path / "record.jsonl")["layer-variance-quadratic"].figure.axes
    assert len(axis.lines) == 30
    assert axis.get_legend_handles_labels()[1] == ["layer0", "layer29"]


def test_the_short_last_step_of_an_epoch_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    with_layers(path, names=None)
    lines = path.read_text().splitlines()
    lines[-2:] = [line.replace('"batch":16', '"batch":8') for line in lines[-2:]]
    path.write_text("\n".join(lines) + "\n")
    curves = LayerCurves.from_run(read_record(path))
    assert curves is not None
    assert curves.batch.tolist() == [16, 16, 16]


@pytest.mark.parametrize("names", [None, ["only one"]])
def test_layers_without_names_are_numbered(tmp_path: Path, names: list[str] | None) -> None:
    curves = LayerCurves.from_run(with_layers(tmp_path / "record.jsonl", names=names))
    assert curves is not None
    assert curves.names == ("0", "1", "2")


def test_a_number_that_was_not_finite_leaves_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    with_layers(path, names=None)
    path.write_text(path.read_text().replace('"noise":[8.0,', '"noise":[null,', 1))
    curves = LayerCurves.from_run(read_record(path))
    assert curves is not None
    assert np.isnan(gradient_variance(curves, 8)[0, 0])
    assert "layer-variance-quadratic" in drawings(path)


def test_records_without_layers_have_no_figures_of_them(drawn: dict[str, Drawing]) -> None:
    assert not any(stem.startswith("layer-") for stem in drawn)
