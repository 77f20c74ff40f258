"""Epochs, updates and times to a target, speed-ups over the reference batch, and simulated times."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ebbflow.errors import ConfigError
from ebbflow.record import End, Header, LayersRow, RecordWriter, StepRow, ValidationRow
from ebbflow.report.clocks import make_clocks, read_clocks, simulated_seconds
from ebbflow.report.conclusions import takeaways
from ebbflow.report.export import (
    caption,
    csv_text,
    effort_table,
    json_text,
    latex,
    markdown,
    target_caption,
    target_table,
    terminal,
)
from ebbflow.report.figures import all_figures
from ebbflow.report.plotting import Drawing
from ebbflow.report.report_page import render_page
from ebbflow.report.results import ArmResult, Results, load_results
from ebbflow.report.step_figures import ends_by_epoch, warmup_ends
from ebbflow.report.summary import Summary, summarise
from ebbflow.report.targets import at_reference_batch
from ebbflow.simulate.scenario import ScenarioSettings

NOTHING = "–"  # noqa: RUF001


def write_run(
    path: Path,
    values: Sequence[float | None],
    *,
    workers: int = 4,
    rule: str = "linear",
    trace: str = "batch 40",
    seed: int = 0,
    status: str = "finished",
    slower: float = 1.0,
    train: Sequence[float] = (),
) -> Path:
    """Epochs of 120 samples with 10 samples per worker, and a validation after each; the reference batch is 10.

    A step takes 2 s on the clock of the trace and `slower` x 0.5 s of computing, a validation 1 s.
    """
    batch = 10 * workers
    config = {
        "workload": "w", "trace": trace, "rule": rule, "seed": seed, "ref_batch": 10, "metric": "accuracy",
        "step_time": "2s",
    }  # fmt: skip
    with RecordWriter(path) as record:
        record.write(Header(config=config))
        step, wall = 0, 0.0
        for epoch, value in enumerate(values):
            for _ in range(120 // batch):
                wall += slower * 0.5
                row = StepRow(
                    step=step, time_s=2.0 * step, wall_s=wall, epoch=epoch, samples=batch * (step + 1),
                    workers=workers, batch=batch, micro_batches=workers, lr_base=0.1, lr=0.1 * workers,
                    multiplier=workers, loss=1.0,
                )  # fmt: skip
                record.write(row)
                step += 1
            wall += 1.0
            metrics = {"accuracy": value} | ({"train_accuracy": train[epoch]} if train else {})
            record.write(
                ValidationRow(
                    step=step, epoch=epoch + 1.0, samples=batch * step, time_s=row.time_s, wall_s=wall, metrics=metrics
                )
            )
        record.write(End(status=status, steps=step, samples=batch * step, wall_s=wall))  # type: ignore[arg-type]
    return path


def study(folder: Path) -> Results:
    """A baseline at the reference batch, and four times the batch by two rules, two seeds each."""
    arms = folder / "arms"
    single = {"workers": 1, "rule": "constant", "trace": "batch 10"}
    write_run(arms / "a0" / "record.jsonl", [0.5, 0.8, 0.9], seed=0, **single)  # type: ignore[arg-type]
    write_run(arms / "a1" / "record.jsonl", [0.5, 0.7, 0.9], seed=1, **single)  # type: ignore[arg-type]
    write_run(arms / "b0" / "record.jsonl", [0.4, 0.7, 0.8, 0.8], seed=0)
    write_run(arms / "b1" / "record.jsonl", [0.6, 0.8, 0.8, 0.8], seed=1, slower=3)
    write_run(arms / "c0" / "record.jsonl", [0.4, 0.8, 0.8, 0.8], rule="sqrt", seed=0)
    write_run(arms / "c1" / "record.jsonl", [0.4, 0.5, 0.6, 0.6], rule="sqrt", seed=1)
    write_run(arms / "d0" / "record.jsonl", [0.9, None], rule="wild", seed=0, status="diverged")
    return load_results(folder)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return study(tmp_path_factory.mktemp("targets"))


@pytest.fixture(scope="module")
def found(results: Results) -> Summary:
    return summarise(results.arms, targets=["0.8", "0.95"], usd_per_hour=None)


def cells(summary: Summary, rule: str, number: int = 0) -> dict[str, tuple[str, ...]]:
    head, *rows = target_table(summary, "w", number)
    (row,) = [row for row in rows if row[1] == (rule,)]
    return {name[0]: cell for name, cell in zip(head, row, strict=True)}


def test_epochs_updates_and_times_to_a_target_with_their_spread_and_the_speed_up(found: Summary) -> None:
    # Baseline: 12 steps per epoch; seed 0 reaches 0.8 in epoch 2, seed 1 in epoch 3: 24 and 36 updates, mean 30.
    # linear: 3 steps per epoch; seeds reach it in epochs 3 and 2: 9 and 6 updates, mean 7.5 (written 8), deviation
    # sqrt(2 x 1.5^2) = 2.12. 30 / 7.5 = 4. On the clock of the trace 2 s per step: 18 s and 12 s, 60 s / 15 s = 4.
    # Computing: seed 0 9 x 0.5 + 3 = 7.5 s, seed 1 6 x 1.5 + 2 = 11 s: mean 9.25 s, deviation 2.47 s.
    assert cells(found, "constant") == {
        "trace": ("batch 10",), "rule": ("constant",), "reached": ("2 of 2",), "epochs": ("2.5", "± 0.707"),
        "updates": ("30", "± 8", "(1x)"), "time": ("60.0 s", "± 17.0 s", "(1x)"),
        "worker-hours": ("0.0167", "± 0.00471"), "wall-clock": ("17.5 s", "± 4.9 s"),
    }  # fmt: skip
    assert cells(found, "linear") == {
        "trace": ("batch 40",), "rule": ("linear",), "reached": ("2 of 2",), "epochs": ("2.5", "± 0.707"),
        "updates": ("8", "± 2", "(4x)"), "time": ("15.0 s", "± 4.2 s", "(4x)"),
        "worker-hours": ("0.0167", "± 0.00471"), "wall-clock": ("9.2 s", "± 2.5 s"),
    }  # fmt: skip


def test_a_run_that_never_reaches_it_is_counted_and_in_no_mean(found: Summary) -> None:
    sqrt = cells(found, "sqrt")
    # Seed 0 alone: epoch 2, 6 updates. No speed-up, since not every run reaches the target.
    assert (sqrt["reached"], sqrt["epochs"], sqrt["updates"]) == (("1 of 2",), ("2",), ("6",))
    wild = cells(found, "wild")  # it had 0.9 once, and diverged
    assert (wild["reached"], wild["epochs"]) == (("0 of 1",), (NOTHING,))
    assert cells(found, "linear", 1)["reached"] == ("0 of 2",)
    assert "a run that does not reach it is in no mean" in target_caption(found, "w", 0)
    assert "speed-up over constant on batch 10" in target_caption(found, "w", 0)
    assert "speed-up" not in target_caption(found, "w", 1)
    texts = takeaways(found)
    assert (
        "On w, batch 40: linear reaches accuracy 80.0 % first, after 15.0 s; not every run reaches it: sqrt (1 of 2 "
        "runs) and wild (never)."
    ) in texts
    assert "On w, batch 10 and batch 40: no run reaches accuracy 95.0 %." in texts


def test_where_times_were_fitted_the_takeaway_counts_epochs(found: Summary) -> None:
    # linear reaches 0.8 in epochs 3 and 2.
    fitted = replace(found, fitted=frozenset({"w"}))
    assert any(text.startswith("On w, batch 40: linear reaches accuracy 80.0 % first, after 2.5 epochs; not every")
               for text in takeaways(fitted))  # fmt: skip


def test_json_has_every_target_and_none_for_what_was_not_reached(found: Summary) -> None:
    body = json.loads(json.dumps(found.as_json(), allow_nan=False))["cells"]
    linear = next(cell for cell in body if cell["rule"] == "linear")
    assert (linear["target"], linear["target_reached"], linear["target_samples"]) == (0.8, 2, 300)
    assert (linear["target_runs"], linear["target_epochs"], linear["target_updates"]) == (2, 2.5, 7.5)
    assert linear["target_updates_std"] == pytest.approx(math.sqrt(4.5))
    assert linear["target_speed_up_updates"] == 4
    first, second = linear["targets"]
    assert first["updates"]["values"] == [9, 6]
    assert first["wall_s"] == {"mean": 9.25, "std": pytest.approx(3.5 / math.sqrt(2)), "values": [7.5, 11.0],
                               "speed_up": pytest.approx(17.5 / 9.25)}  # fmt: skip
    assert (second["asked"], second["target"], second["reached"], second["seeds"]) == ("0.95", 0.95, 0, [])
    assert second["epochs"] == {"mean": None, "std": None, "values": [], "speed_up": None}


def test_csv_has_a_line_per_cell_and_target(found: Summary) -> None:
    head, *lines = csv_text(found).splitlines()
    assert "targets" not in head.split(",")
    assert len(lines) == 2 * len(found.cells)
    at = head.split(",").index("target")
    assert [line.split(",")[at] for line in lines[:2]] == ["0.8", "0.95"]


def test_markdown_and_latex_have_the_tables_of_the_targets(found: Summary) -> None:
    assert "| batch 40 | linear | 2 of 2 | 2.5 ± 0.707 | 8 ± 2 (4x) | 15.0 s ± 4.2 s (4x) |" in markdown(found)
    assert r"batch 40 & linear & 2 of 2 & 2.5 $\pm$ 0.707 & 8 $\pm$ 2 (4x)" in latex(found)
    assert latex(found).count(r"\begin{table}") == 3
    assert latex(found).count(r"\begin{tabular}{llrrrrrr}") == 2


def test_the_table_of_a_target_fits_eighty_columns(found: Summary) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(terminal(found, width=80))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "updates" in text


def test_in_eighty_columns_each_rule_has_one_line_and_columns_that_do_not_fit_follow_in_further_tables(
    tmp_path: Path,
) -> None:
    long = "linear+warmup(5.5ep, start=0)"
    for seed, values in enumerate(([0.4, 0.8, 0.8], [0.6, 0.7, 0.8])):
        write_run(tmp_path / "arms" / f"a{seed}" / "record.jsonl", values, rule=long, seed=seed)
        write_run(tmp_path / "arms" / f"b{seed}" / "record.jsonl", [0.1, 0.1, 0.1], rule="sqrt", seed=seed)
    summary = summarise(load_results(tmp_path).arms, targets=["0.8"])
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(terminal(summary, width=80))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert max(map(len, lines)) <= 80
    heads = [i for i, line in enumerate(lines) if "reached" in line and "rule" in line]
    assert [lines[i].split()[2:] for i in heads] == [["epochs", "updates", "time"], ["worker-hours", "wall-clock"]]
    # 2 and 3 epochs of 3 steps of 2 s: each rule on a single line below the name of the trace.
    assert [line.split() for line in lines[heads[0] + 1 : heads[0] + 4]] == [
        ["batch", "40"],
        f"{long} 2 of 2 2.5 ± 0.707 8 ± 2 15.0 s ± 4.2 s".split(),
        ["sqrt", "0", "of", "2", NOTHING, NOTHING, NOTHING],
    ]
    # A rule about which a further table would say nothing is in the first one only.
    assert [line for line in lines[heads[1] :] if line.startswith("   sqrt")] == []
    assert [line for line in lines[heads[1] :] if line.startswith(f"   {long}   2 of 2  ")] != []


def test_a_target_may_be_a_multiple_of_the_score_at_the_reference_batch(results: Results) -> None:
    # The score of a run of three validations is its last; both seeds of the baseline end with 0.9.
    relative = summarise(results.arms, targets=["0.8x"])
    assert relative.targets_of("w") == pytest.approx([0.72])
    assert relative.baselines == {"w": ("batch 10", "constant")}
    assert "72.0 % (0.8x the score at the reference batch)" in target_caption(relative, "w", 0)
    without = [arm for arm in results.arms if arm.trace != "batch 10"]
    assert summarise(without, targets=["0.7"]).baselines == {}
    with pytest.raises(ConfigError, match="no finished runs whose every batch is the reference batch"):
        summarise(without, targets=["0.8x"])


@pytest.mark.parametrize(
    ("target", "message"),
    [("95", "95 % accuracy is 0.95"), ("nan", "expected a finite score"), ("0x", "multiple above 0"),
     ("high", "is no score; write 0.95")],
)  # fmt: skip
def test_a_target_that_is_no_score_is_refused(results: Results, target: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        summarise(results.arms, targets=[target])


def test_a_target_of_two_metrics_is_refused(results: Results) -> None:
    one = results.arms[0]
    other = ArmResult(id="", workload="v", trace="t", rule="r", seed=0, status="finished", metric="loss",
                      header=one.header, values=np.array([0.5]))  # fmt: skip
    with pytest.raises(ConfigError, match="accuracy and loss alike"):
        summarise([one, other], targets=[0.5])


@given(
    values=st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=1, max_size=8),
    target=st.floats(0, 1),
    higher=st.booleans(),
)
def test_a_target_reached_at_a_validation_gives_the_numbers_of_that_validation(
    values: list[float | None], target: float, higher: bool
) -> None:
    count = len(values)
    arm = ArmResult(
        id="", workload="w", trace="t", rule="r", seed=0, status="finished", metric="m", higher_is_better=higher,
        values=np.array([math.nan if value is None else value for value in values]), epochs=np.arange(count) + 0.5,
        updates=np.arange(count) * 7.0, times=np.arange(count) * 2.0, walls=np.arange(count) * 3.0,
        counts=np.arange(count) * 11.0, header=Header(),
    )  # fmt: skip
    cell = summarise([arm], targets=[target]).cells[0]
    good = [
        j for j, v in enumerate(values) if v is not None and (v >= target if higher else v <= target)
    ]  # by hand: the first validation that is good enough
    finished = bool(cell.finished)  # not if its last validations have no number
    json_cell = cell.as_json()
    if good and finished:
        j = good[0]
        assert (json_cell["target_epochs"], json_cell["target_updates"]) == (j + 0.5, 7 * j)
        assert (json_cell["target_time_s"], json_cell["target_wall_s"]) == (2 * j, 3 * j)
    else:
        assert json_cell["target_reached"] == 0
        assert json_cell["target_epochs"] is json_cell["target_updates"] is json_cell["target_wall_s"] is None


# ---- what was published ----


def published(
    rule: str, what: str, value: float | str, *, trace: str = "batch 40", workload: str = "w"
) -> dict[str, Any]:
    """An entry of study.json; the source says what it is about."""
    return {
        "workload": workload,
        "trace": trace,
        "rule": rule,
        "value": value,
        "source": f"A 2022, {what}",
        "what": what,
    }


PAPER = {
    "paper": [
        published("linear", "metric", 0.8125),
        published("linear", "epochs to 0.8", 3),
        published("linear", "updates to 0.8", 4580),
        published("linear", "seconds to 0.8", 1737.5),
        published("sqrt", "epochs to 0.8", "never"),
        published("sqrt", "updates to 0.95", 12),
    ]
}


@pytest.fixture(scope="module")
def beside(results: Results) -> Summary:
    return summarise(results.arms, PAPER)


def test_a_report_takes_the_published_targets_and_shows_the_paper_s_values_beside_ours(beside: Summary) -> None:
    assert beside.targets_of("w") == [0.8, 0.95]
    linear, sqrt = cells(beside, "linear"), cells(beside, "sqrt")
    assert linear["epochs"] == ("2.5", "± 0.707", "(paper 3)")
    assert linear["updates"] == ("8", "± 2", "(4x)", "(paper 4,580)")
    assert linear["time"] == ("15.0 s", "± 4.2 s", "(4x)", "(paper 1,737.5 s)")
    assert linear["wall-clock"] == ("9.2 s", "± 2.5 s")
    assert (sqrt["epochs"], sqrt["updates"]) == (("2", "(paper never)"), ("6",))
    assert cells(beside, "constant")["epochs"] == ("2.5", "± 0.707")
    # 0.95, which no run reaches, and about which the paper has one number.
    assert cells(beside, "linear", 1)["epochs"] == (NOTHING,)
    assert cells(beside, "sqrt", 1)["updates"] == (NOTHING, "(paper 12)")
    assert cells(beside, "sqrt", 1)["epochs"] == (NOTHING,)


def test_each_table_names_the_sources_of_its_own_values(beside: Summary) -> None:
    assert target_caption(beside, "w", 0).endswith(
        " Published: A 2022, epochs to 0.8; A 2022, updates to 0.8; A 2022, seconds to 0.8."
    )
    assert target_caption(beside, "w", 1).endswith(" Published: A 2022, updates to 0.95.")
    assert caption(beside, "w").endswith(" Published: A 2022, metric.")


def test_the_targets_that_are_asked_for_replace_the_published_ones(results: Results) -> None:
    other = summarise(results.arms, PAPER, targets=["0.7"])
    assert other.targets_of("w") == [0.7]
    assert cells(other, "linear")["epochs"] == ("2", "± 0")
    assert "Published" not in target_caption(other, "w", 0)
    assert cells(summarise(results.arms, PAPER, targets=["0.80"]), "linear")["epochs"][-1] == "(paper 3)"
    # 0.8 times our baseline is not the paper's 0.8.
    assert "paper" not in str(target_table(summarise(results.arms, PAPER, targets=["0.8x"]), "w", 0))


@pytest.mark.parametrize(
    ("change", "words"),
    [({"scale": 0.1}, "scaled to 0.1 of its epochs: not comparable"),
     ({"stand_in": "digits"}, "The data here is digits, which stands in for the paper's: not comparable")],
)  # fmt: skip
def test_a_study_that_is_not_comparable_has_the_published_targets_only_if_asked(
    results: Results, change: dict[str, Any], words: str
) -> None:
    assert summarise(results.arms, PAPER | change).targets_of("w") == []
    asked = summarise(results.arms, PAPER | change, targets=["0.8"])
    assert cells(asked, "linear")["epochs"][-1] == "(paper 3)"
    assert words in target_caption(asked, "w", 0)


def test_published_targets_are_those_of_their_workload(results: Results) -> None:
    one = results.arms[0]
    one_and_two = np.array([1.0, 2.0])
    other = ArmResult(
        id="", workload="v", trace="t", rule="r", seed=0, status="finished", metric="loss", higher_is_better=False,
        header=one.header, values=np.array([3.0, 2.0]), updates=np.array([5.0, 10.0]), epochs=one_and_two,
        times=one_and_two, walls=one_and_two, counts=one_and_two,
    )  # fmt: skip
    # A target that is asked for cannot be both an accuracy and a loss; published ones need not.
    paper = [*PAPER["paper"], published("r", "updates to 2.5", 7, trace="t", workload="v")]
    found = summarise([*results.arms, other], {"paper": paper})
    assert (found.targets_of("w"), found.targets_of("v")) == ([0.8, 0.95], [2.5])
    head, row = target_table(found, "v", 0)
    assert row[head.index(("updates",))] == ("10", "(paper 7)")
    assert len(csv_text(found).splitlines()) == 1 + 2 * len(found.cells_of("w")) + 1
    assert any("v, t: r reaches loss 2.500" in text for text in takeaways(found))


def test_every_format_has_the_published_values_of_a_target(beside: Summary, results: Results) -> None:
    row = "| 2.5 ± 0.707 (paper 3) | 8 ± 2 (4x) (paper 4,580) | 15.0 s ± 4.2 s (4x) (paper 1,737.5 s) |"
    assert f"| batch 40 | linear | 2 of 2 {row}" in markdown(beside)
    assert r"2.5 $\pm$ 0.707 (paper 3) & 8 $\pm$ 2 (4x) (paper 4,580) &" in latex(beside)
    rows = list(csv.DictReader(io.StringIO(csv_text(beside))))
    names = ("target", "target_published_epochs", "target_published_updates", "target_published_time_s")
    assert [[row[name] for name in names] for row in rows if row["rule"] in ("linear", "sqrt")] == [
        ["0.8", "3", "4580", "1737.5"], ["0.95", "", "", ""], ["0.8", "never", "", ""], ["0.95", "", "12", ""],
    ]  # fmt: skip
    by_rule = {cell["rule"]: cell for cell in json.loads(json_text(beside))["cells"]}
    assert by_rule["linear"]["targets"][0]["published"] == {"epochs": 3, "updates": 4580, "time_s": 1737.5}
    assert by_rule["linear"]["target_published_epochs"] == 3
    assert by_rule["sqrt"]["targets"][0]["published"] == {"epochs": "never"}
    assert by_rule["constant"]["targets"][0]["published"] == {}
    page = render_page(results, beside, [])
    assert "<small>(paper 4,580)</small>" in page and "<small>(paper never)</small>" in page


def test_in_a_terminal_of_eighty_columns_the_paper_is_a_line_below_ours(beside: Summary) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(terminal(beside, width=80))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    found = [line.split() for line in lines if line.split()[:1] == ["paper"]]
    assert found == [["paper", "3", "4,580", "1,737.5", "s"], ["paper", "never"], ["paper", "12"]]
    head = next(line for line in lines if "epochs" in line and "updates" in line)
    paper = next(line for line in lines if "4,580" in line)
    # The numbers are right-aligned below the names of their columns.
    assert paper.index("4,580") + len("4,580") == head.index("updates") + len("updates")


def test_a_published_time_stands_by_itself_where_ours_was_fitted_and_networks_are_simulated(results: Results) -> None:
    clocks = make_clocks(clocks_of(compute_step="100ms"), ["fast=affine(20ms)"])
    found = summarise(read_clocks(results, clocks).arms, PAPER)
    fitted = replace(found, fitted=frozenset({"w"}))
    assert cells(found, "linear")["time"][0] == "15.0 s"
    assert cells(fitted, "linear")["time"] == (NOTHING, "(paper 1,737.5 s)")
    assert "worker-hours" not in cells(fitted, "linear")
    assert "time" not in cells(fitted, "linear", 1)  # nothing was published about this target
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(terminal(fitted, width=80))
    assert "1,737.5 s" in console.export_text()


# ---- simulated time ----


def clocks_of(**settings: object) -> ScenarioSettings:
    return ScenarioSettings(samples=1, epochs=1, **settings)  # type: ignore[arg-type]


def test_the_steps_of_a_record_are_priced_with_a_step_model_and_a_network(results: Results) -> None:
    settings = clocks_of(compute_step="100ms", compute_sample="10ms")
    clocks = make_clocks(settings, ["fast=affine(20ms)", "slow=affine(400ms, more=100ms)"])
    assert [clock.name for clock in clocks] == ["fast", "slow"]
    by_rule = {(arm.rule, arm.seed): arm for arm in read_clocks(results, clocks).arms}
    # 10 samples per worker: 0.1 + 10 x 0.01 = 0.2 s of computing. One worker exchanges nothing. Four: 20 ms, or
    # 400 + 2 x 100 = 600 ms. 12 steps per epoch with one worker, 3 with four.
    np.testing.assert_allclose(by_rule["constant", 0].simulated["slow"], [2.4, 4.8, 7.2])
    np.testing.assert_allclose(by_rule["linear", 0].simulated["fast"], [0.66, 1.32, 1.98, 2.64])
    np.testing.assert_allclose(by_rule["linear", 0].simulated["slow"], [2.4, 4.8, 7.2, 9.6])
    found = summarise(read_clocks(results, clocks).arms, targets=["0.8"])
    # Baseline: (4.8 + 7.2)/2 = 6 s. linear: 9 and 6 steps, mean 7.5 x 0.22 = 1.65 s: 3.64 times as fast; slow 6 s: 1x.
    linear = cells(found, "linear")
    assert (linear["fast"][0], linear["fast"][2]) == ("1.6 s", "(3.64x)")
    assert (linear["slow"][0], linear["slow"][2]) == ("6.0 s", "(1x)")
    (body,) = next(cell for cell in found.as_json()["cells"] if cell["rule"] == "linear")["targets"]
    assert body["simulated"]["fast"]["mean"] == pytest.approx(1.65)
    assert body["simulated"]["fast"]["speed_up"] == pytest.approx(6 / 1.65)
    assert "simulated" in target_caption(found, "w", 0)
    # The whole run: 12 steps of 0.22 s, and of 0.8 s.
    assert next(cell for cell in found.as_json()["cells"] if cell["rule"] == "linear")["simulated_s"] == {
        "fast": pytest.approx(2.64), "slow": pytest.approx(9.6)}  # fmt: skip
    assert effort_table(found, "w")[0] == ["trace", "rule", "accuracy (%)", "time", "worker-hours", "fast", "slow"]
    assert effort_table(found, "w")[1][3:] == ["72.0 s", "0.02", "7.2 s", "7.2 s"]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(terminal(found, width=80))
    assert "updates" in (text := console.export_text()) and max(map(len, text.splitlines())) <= 80


def test_a_whole_step_time_is_a_clock_without_a_network(results: Results) -> None:
    (clock,) = make_clocks(clocks_of(step_time="1:0.5s 4:0.25s"))
    assert clock.name == "1:0.5s 4:0.25s"
    linear = next(arm for arm in results.arms if arm.rule == "linear")
    np.testing.assert_allclose(simulated_seconds(linear, clock.model), 0.25 * np.arange(1, 13))


@pytest.mark.parametrize(
    ("settings", "networks", "message"),
    [
        ({}, ["affine(1s)"], "say how long a step takes"),
        ({"compute_sample": "1ms"}, ["a=affine(1s)", "a=affine(2s)"], "two networks are called 'a'"),
        ({"step_time": "1s"}, ["affine(1s)"], "network= would change nothing"),
    ],
)
def test_clocks_that_make_no_sense_are_refused(settings: dict[str, str], networks: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_clocks(clocks_of(**settings), networks)


def test_runs_that_have_finished_are_a_baseline_before_those_that_have_not(results: Results) -> None:
    """As while the runs of the rule constant are still under way."""
    arms = [
        dataclasses.replace(arm, status="unfinished") if arm.rule == "constant" else dataclasses.replace(arm)
        for arm in results.arms
    ]
    finished = [arm for arm in results.arms if arm.rule == "constant"]
    others = [dataclasses.replace(arm, rule="linear", trace=arm.trace) for arm in finished]
    same = summarise([*(arm for arm in arms if arm.rule == "constant"), *others], results.config, targets=["0.99x"])
    assert same.baselines == {"w": ("batch 10", "linear")}


def test_only_batches_of_the_reference_batch_are_a_baseline(results: Results) -> None:
    assert {arm.trace for arm in results.arms if at_reference_batch(arm)} == {"batch 10"}


# ---- figures ----


def drawings(results: Results, **options: object) -> dict[str, Drawing]:
    summary = summarise(results.arms, **options)  # type: ignore[arg-type]
    return {drawing.stem: drawing for drawing in all_figures(results, summary)}


def lines(drawing: Drawing, panel: int) -> dict[str, tuple[list[float], list[float]]]:
    axis = drawing.figure.axes[panel]
    shown = [
        line for line in axis.lines if str(line.get_gid()).startswith(("rule-", "trace-")) and line.get_marker() != "x"
    ]
    return {str(line.get_label()): tuple(np.asarray(a).tolist() for a in line.get_data()) for line in shown}  # type: ignore[misc]


def test_curves_over_updates_and_times_have_a_panel_per_rule_and_a_line_per_trace(results: Results) -> None:
    clocks = make_clocks(clocks_of(step_time="3s"))
    drawn = drawings(read_clocks(results, clocks), targets=["0.8"])
    over = {kind: drawn[f"validation-{kind}-w"] for kind in ("updates", "wall", "time", "simulated-3s")}
    titles = [axis.get_title("left") for axis in over["updates"].figure.axes]
    linear = titles.index("linear")
    assert sorted(titles) == ["constant", "linear", "sqrt", "wild"]
    x, y = lines(over["updates"], linear)["batch 40"]
    assert (x, y) == ([3, 6, 9, 12], pytest.approx([50, 75, 80, 80]))
    # Seeds: 3 x 0.5 + 1 = 2.5 s and 3 x 1.5 + 1 = 5.5 s per epoch; their mean is 4 s.
    assert lines(over["wall"], linear)["batch 40"][0] == [4, 8, 12, 16]
    assert lines(over["time"], linear)["batch 40"][0] == [6, 12, 18, 24]
    assert lines(over["simulated-3s"], linear)["batch 40"][0] == [9, 18, 27, 36]
    assert any(np.allclose(line.get_ydata(), 80) for line in drawn["validation-w"].figure.axes[0].lines)  # type: ignore[arg-type]


def test_the_schedules_of_all_arms_are_in_one_figure(results: Results) -> None:
    figure = drawings(results)["schedules-w"].figure
    titles = [axis.get_title("left") for axis in figure.axes]
    assert (sorted(titles[:-1]), titles[-1]) == (["constant", "linear", "sqrt", "wild"], "batch")
    assert set(lines(drawings(results)["schedules-w"], titles.index("linear"))["batch 40"][1]) == {0.4}
    batches = lines(drawings(results)["schedules-w"], len(titles) - 1)
    assert {name: set(y) for name, (_, y) in batches.items()} == {"batch 10": {10}, "batch 40": {40}}


def test_training_scores_have_a_figure_with_the_validation_behind_them(tmp_path: Path) -> None:
    write_run(tmp_path / "record.jsonl", [0.5, 0.6], train=[0.55, 0.8])
    drawing = drawings(load_results(tmp_path))["training-w"]
    (axis,) = drawing.figure.axes
    assert [np.asarray(line.get_ydata()).tolist() for line in axis.lines] == [pytest.approx([55, 80]), [50, 60]]
    assert drawing.title == "Training accuracy"


def test_records_without_training_scores_have_no_figure_of_them(results: Results) -> None:
    assert "training-w" not in drawings(results)


# ---- ends of warm-ups ----


def test_layers_that_are_not_known_at_first_end_their_warm_up_once(tmp_path: Path) -> None:
    """Six layers. The first steps have one micro-batch, so that nothing is measured and all layers have one warm-up."""
    config = {"workload": "w", "trace": "t", "rule": "lena", "seed": 0, "ref_batch": 8, "layers": list("abcdef")}
    with RecordWriter(tmp_path / "record.jsonl") as record:
        record.write(Header(config=config))
        for step, warming in enumerate([1, 1, 6, 6, 4, 1, 0, 0]):
            row = StepRow(
                step=step, time_s=0, wall_s=0, epoch=step // 2, samples=16 * (step + 1), workers=2, batch=16,
                micro_batches=2, lr_base=0.1, lr=0.1, multiplier=1.5, loss=1.0, stats={"warming": float(warming)},
            )  # fmt: skip
            record.write(row)
            record.write(LayersRow.of(row, noise=[8.0] * 6, signal=[1.0] * 6, multiplier=[1.0] * 6))
        record.write(ValidationRow(step=8, epoch=4, samples=128, time_s=0, wall_s=0, metrics={"accuracy": 0.5}))
    (arm,) = load_results(tmp_path).arms
    counts, left = ends_by_epoch(arm)
    assert (counts.tolist(), left) == ([0, 0, 5, 1], 0)


def test_the_ends_of_warm_ups_by_epoch_and_by_layer(tmp_path: Path) -> None:
    """Two steps per epoch at twice the reference batch. Layers a, b, c have the gains 2, 1 and 4/3 throughout."""
    parts = [(0.5, 0.3, 0.4), (1.0, 0.6, 0.8), (1.0, 0.8, 1.0), (1.0, 0.9, 1.0)]  # of the gain, in each step
    config = {"workload": "w", "trace": "t", "rule": "lena", "seed": 0, "ref_batch": 8, "layers": ["a", "b", "c"]}
    with RecordWriter(tmp_path / "record.jsonl") as record:
        record.write(Header(config=config))
        for step, part in enumerate(parts):
            row = StepRow(
                step=step, time_s=0, wall_s=0, epoch=step // 2, samples=16 * (step + 1), workers=2, batch=16,
                micro_batches=2, lr_base=0.1, lr=0.1, multiplier=1.5, loss=1.0,
                stats={"warming": float(sum(p < 1 for p in part))},
            )  # fmt: skip
            record.write(row)
            multiplier = [gain * p for gain, p in zip((2, 1, 4 / 3), part, strict=True)]
            record.write(LayersRow.of(row, noise=[8, 0, 8], signal=[0, 1, 1], multiplier=multiplier))
            if step % 2:
                record.write(ValidationRow(step=step + 1, epoch=(step + 1) / 2, samples=16 * (step + 1), time_s=0,
                                           wall_s=0, metrics={"accuracy": 0.5}))  # fmt: skip
    results = load_results(tmp_path)
    (arm,) = results.arms
    assert arm.layers is not None
    # a ends in step 2 (after 1 epoch), c in step 3 (after 1.5), b never.
    np.testing.assert_array_equal(warmup_ends(arm.layers, 8), [1.0, np.nan, 1.5])
    counts, left = ends_by_epoch(arm)
    assert (counts.tolist(), left) == ([1, 1], 1)
    drawn = drawings(results)
    (axis,) = drawn["warmup-ends-w"].figure.axes
    assert axis.get_title("left") == "lena, t (1 left)"
    # A record that says how far each warm-up is, in which the multiplier is no part of the gain that noise and signal
    # show, since the rule has an eps: there the first layer has no signal.
    said = dataclasses.replace(arm.layers, warm_up=np.array(parts), multiplier=arm.layers.multiplier / 3)
    np.testing.assert_array_equal(warmup_ends(said, 8), [1.0, np.nan, 1.5])
    swapped = dataclasses.replace(arm.layers, warm_up=np.array(parts)[:, ::-1])
    np.testing.assert_array_equal(warmup_ends(swapped, 8), [1.5, np.nan, 1.0])
    (axis,) = drawn["layer-warmup-w"].figure.axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["a", "b", "c"]
