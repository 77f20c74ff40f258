"""Figures of whole runs: scores by batch, and simulated time by updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ebbflow.record import Header
from ebbflow.report.figures import all_figures
from ebbflow.report.plotting import Drawing
from ebbflow.report.results import ArmResult, Results
from ebbflow.report.score_figures import usual_batch
from ebbflow.report.summary import summarise


def run(trace: str, batches: list[int], score: float, *, rule: str = "linear", seed: int = 0, **more: Any) -> ArmResult:
    """A run of one epoch with these batches; the reference batch is 10."""
    sizes = np.array(batches, dtype=float)
    count = len(batches)
    columns = {name: np.ones(count) for name in ("lr", "loss", "multiplier", "workers")}
    columns |= {
        "batch": sizes, "position": sizes.cumsum() / sizes.sum(), "epoch": np.zeros(count),
        "time_s": np.arange(count, dtype=float), "samples": sizes.cumsum(),
    }  # fmt: skip
    return ArmResult(
        id=f"{trace} {rule} {seed}", workload="w", trace=trace, rule=rule, seed=seed, status="finished",
        header=Header(config={"workload": "w", "trace": trace, "rule": rule, "seed": seed, "ref_batch": 10}),
        epochs=np.array([1.0]), values=np.array([score]), times=np.array([float(count)]),
        counts=np.array([sizes.sum()]), updates=np.array([float(count)]), walls=np.array([1.0]),
        columns=columns, steps=count, samples=int(sizes.sum()), **more,
    )  # fmt: skip


def drawn(*arms: ArmResult) -> dict[str, Drawing]:
    results = Results(name="study", folder=Path("study"), arms=arms, config={})
    return {drawing.kind: drawing for drawing in all_figures(results, summarise(results.arms))}


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        ([10] * 4, 10),
        ([10] * 4 + [20, 20], 10),  # 40 of 80 samples each: the smaller one
        ([10] * 4 + [20] * 3, 20),  # 60 of 100 samples, though in fewer steps
        ([10, 20, 30, 40, 50], None),  # 50 of 150 at most
    ],
)
def test_the_batch_of_a_run_is_the_one_of_half_of_its_samples(batches: list[int], expected: float | None) -> None:
    assert usual_batch(run("t", batches, 0.5)) == expected


def test_scores_by_batch_have_a_line_for_each_rule_and_the_reference_batch_dotted() -> None:
    figure = drawn(
        run("x1", [10] * 8, 0.9, rule="constant"),
        run("x1", [10] * 8, 0.9),
        run("x2", [20] * 4, 0.8, seed=0),
        run("x2", [20] * 4, 0.6, seed=1),
        run("x4", [40] * 2, 0.5),
        run("x4 later", [10, 10] + [40] * 2, 0.55, rule="dynamic"),
        run("changing", [10, 20, 30, 40, 50], 0.1, rule="dynamic"),
    )["scores-by-batch"]
    (axis,) = figure.figure.axes
    lines = {line.get_label(): line for line in axis.lines}
    assert np.asarray(lines["linear"].get_xydata()).tolist() == [[10, 90], [20, pytest.approx(70)], [40, 50]]
    assert np.asarray(lines["dynamic"].get_xydata()).tolist() == [[40, pytest.approx(55)]]
    dotted = [line for line in axis.lines if list(line.get_ydata()) == [90, 90]]
    assert len(dotted) == 1 and "Dotted: the runs at the reference batch." in figure.caption
    (stroke,) = axis.collections  # two seeds of x2
    assert stroke.get_segments()[0].tolist() == [[20, pytest.approx(60)], [20, pytest.approx(80)]]


def test_a_rule_with_two_runs_at_a_batch_is_drawn_without_a_line() -> None:
    arms = [run(f"x{k}", [10 * k] * 8, 0.9) for k in (1, 2, 4)]
    figure = drawn(*arms, run("x4 later", [10] + [40] * 8, 0.7))["scores-by-batch"]
    (line,) = [line for line in figure.figure.axes[0].lines if line.get_label() == "linear"]
    assert line.get_linestyle() == "None" and len(line.get_xydata()) == 4


def test_two_batches_give_no_figure() -> None:
    assert "scores-by-batch" not in drawn(run("x1", [10] * 8, 0.9), run("x2", [20] * 4, 0.8))


def test_time_by_updates_has_a_point_for_each_cell_and_network_and_what_equal_updates_would_take() -> None:
    arms = [
        run("x1", [10] * 8, 0.9, simulated={"slow": np.array([16.0]), "fast": np.array([16.0])}),
        run("x2", [20] * 4, 0.9, simulated={"slow": np.array([12.0]), "fast": np.array([9.0])}),
        run("x4", [40] * 2, 0.9, simulated={"slow": np.array([8.0]), "fast": np.array([5.0])}),
    ]
    (axis,) = drawn(*arms)["time-by-updates"].figure.axes
    lines = {line.get_label(): np.asarray(line.get_xydata()).tolist() for line in axis.lines}
    assert lines["slow"] == [[2, 8], [4, 12], [8, 16]] and lines["fast"] == [[2, 5], [4, 9], [8, 16]]
    assert [[0, 0], [8, 16]] in lines.values()  # 2 s per update, as at the reference batch
    assert axis.get_ylabel() == "simulated seconds"
    assert "time-by-updates" not in drawn(*(run(f"x{k}", [10 * k] * 8, 0.9) for k in (1, 2, 4)))
