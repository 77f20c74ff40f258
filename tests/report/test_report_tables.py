"""Means, deviations, marks and words: every expected number is derived in a comment."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ebbflow.record import End, Header, RecordWriter, ValidationRow
from ebbflow.report import report_page
from ebbflow.report.conclusions import takeaways
from ebbflow.report.export import (
    NOTHING,
    caption,
    cell_text,
    csv_text,
    effort_caption,
    effort_table,
    json_text,
    latex,
    losses_text,
    markdown,
    published_text,
    terminal,
)
from ebbflow.report.results import ArmResult, load_results
from ebbflow.report.summary import Summary, decide, outcome, run_value, score_window, summarise

LINEAR = "linear+warmup(2ep)"


def takeaway(summary: Summary) -> str:
    """All conclusions as one text."""
    return " ".join(takeaways(summary))


def arm(value: float | None, *, rule: str = "linear", trace: str = "gpu", seed: int = 0, **more: object) -> ArmResult:
    """An arm whose twelve validations are all `value`; with None its record has a metric that is not a number."""
    values = np.full(12, math.nan if value is None else value)
    fields = {"id": "a", "workload": "w", "status": "finished", "header": Header(), "values": values, **more}
    return ArmResult(rule=rule, trace=trace, seed=seed, **fields)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def summary(study: Path) -> Summary:
    return summarise(load_results(study).arms)


def test_the_score_of_a_run_is_the_mean_of_at_most_its_last_third_and_three_validations() -> None:
    # (0.2 + 0.4 + 0.9) / 3 = 0.5; the zeros before them do not count.
    assert run_value(arm(0.0, values=np.array([0.0] * 9 + [0.2, 0.4, 0.9]))) == pytest.approx(0.5)
    assert run_value(arm(0.0, values=np.array([0.0] * 87 + [0.2, 0.4, 0.9]))) == pytest.approx(0.5)
    # Of three validations the mean would be half of the curve.
    assert run_value(arm(0.0, values=np.array([0.2, 0.4, 0.9]))) == pytest.approx(0.9)
    assert run_value(arm(0.0, values=np.array([0.0] * 4 + [0.4, 0.9]))) == pytest.approx(0.65)


@given(st.integers(1, 10_000))
def test_the_window_of_a_score_is_one_to_three_and_covers_a_third_at_most(validations: int) -> None:
    window = score_window(validations)
    assert 1 <= window <= 3
    assert window == 1 or window <= validations / 3
    assert window <= score_window(validations + 1)


def test_the_window_of_a_score_is_said_in_the_table_and_in_json() -> None:
    short = summarise([arm(0.9, values=np.full(3, 0.9)), arm(0.8, rule="sqrt", values=np.full(12, 0.8))])
    assert [cell["window"] for cell in short.as_json()["cells"]] == [1, 3]
    assert "mean of the last 1 to 3 validations of each run (a third of them, at most three)" in caption(short, "w")
    assert "that of the last validation of each run" in caption(summarise([arm(0.9, values=np.full(3, 0.9))]), "w")


def test_a_cell_is_mean_deviation_and_interval_over_seeds(summary: Summary) -> None:
    # Seeds 0.90 and 0.92: mean 0.91; deviation sqrt((0.01^2 + 0.01^2) / (2 - 1)) = 0.014142.
    cell = summary.cell("digits-mlp", "gpu", "constant")
    assert cell is not None
    assert cell.mean == pytest.approx(0.91)
    assert cell.std == pytest.approx(0.0141421356)
    assert cell.margin == pytest.approx(0.127062)  # 12.7062 x 0.0141421 / sqrt(2)
    assert cell.values == pytest.approx((0.90, 0.92))
    assert cell.seeds == 2


def test_one_seed_has_neither_deviation_nor_interval() -> None:
    cell = summarise([arm(0.5)]).cells[0]
    assert (cell.std, cell.margin) == (None, None)
    assert "one run each: no interval" in caption(summarise([arm(0.5)]), "w")
    assert cell_text(cell, summarise([arm(0.5)]).number_format("w")) == "50.0"


def test_runs_that_did_not_finish_are_named_and_not_averaged(summary: Summary) -> None:
    cells = {(cell.workload, cell.trace, cell.rule): cell for cell in summary.cells}
    diverged, failed = cells["digits-mlp", "gpu", LINEAR], cells["digits-mlp", "gpu", "sqrt"]
    cut, missing = cells["tiny-gpt", "gpu", "sqrt"], cells["tiny-gpt", "gpu", "constant"]
    # Seed 0 alone counts in each.
    assert (diverged.mean, diverged.diverged, diverged.seeds) == (pytest.approx(0.94), (1,), 2)
    assert (failed.mean, failed.failed) == (pytest.approx(0.96), (1,))
    assert (cut.mean, cut.interrupted) == (pytest.approx(1.55), (1,))
    assert (missing.mean, missing.missing, missing.seeds) == (pytest.approx(1.70), (1,), 1)
    assert losses_text(diverged) == "1 of 2 diverged"


def test_a_cell_whose_runs_all_diverged_says_so() -> None:
    all_lost = summarise([arm(None, status="diverged"), arm(0.4, status="diverged", seed=1)])
    assert all_lost.cells[0].mean is None
    assert cell_text(all_lost.cells[0], all_lost.number_format("w")) == "diverged"


def test_a_finished_run_without_a_finite_result_counts_as_diverged_and_without_any_as_not_validated() -> None:
    assert outcome(arm(None)) == "diverged"
    assert outcome(arm(0.0, values=np.array([0.3, 0.3, math.nan]))) == "diverged"
    assert outcome(arm(0.0, values=np.empty(0))) == "not validated"


def test_a_run_that_ended_without_a_validation_is_shown_with_its_time_and_without_a_score() -> None:
    alone = summarise([replace(timed(rule="sqrt"), samples=300)])
    assert cell_text(alone.cells[0], alone.number_format("w")) == "not validated"
    assert effort_table(alone, "w")[1:] == [["gpu", "sqrt", NOTHING, "120.0 min", "6", "300"]]
    said = "On w the run has finished without a validation (a Session takes evaluate=): there is no score."
    assert takeaway(alone) == said
    assert (alone.as_json()["cells"][0]["not_validated"], alone.as_json()["cells"][0]["failed"]) == (1, 0)
    said = "On w, linear reaches an accuracy of 90.0 % on gpu. The table is not complete: 1 not validated."
    assert takeaway(summarise([timed(0.9), timed(rule="sqrt")])) == said
    some = summarise([timed(0.9), replace(timed(seed=1), samples=300)])
    assert losses_text(some.cells[0]) == "1 of 2 not validated"
    assert (some.cells[0].mean, some.cells[0].samples) == (pytest.approx(0.9), 200)
    for found in (alone, some):
        assert all("not validated" in text for text in (_shown(found), markdown(found), latex(found)))
        assert csv_text(found)


def seeds(*values: float, rule: str = "linear", **more: object) -> list[ArmResult]:
    return [arm(value, rule=rule, seed=seed, **more) for seed, value in enumerate(values)]  # type: ignore[arg-type]


def marked(summary: Summary) -> set[str]:
    return {cell.rule for cell in summary.cells if cell.best}


def test_what_is_best_beyond_chance_is_marked_in_the_direction_of_the_metric() -> None:
    # Pooled deviation 0.01 x sqrt(2): +- 4.3027 x 0.01414 = 0.061 around 0.06 includes zero, around 0.07 does not.
    assert marked(summarise([*seeds(0.96, 0.98), *seeds(0.90, 0.92, rule="sqrt")])) == set()
    assert marked(summarise([*seeds(0.97, 0.99), *seeds(0.90, 0.92, rule="sqrt")])) == {"linear"}
    loss = {"metric": "loss", "higher_is_better": False}
    assert marked(summarise([*seeds(0.97, 0.99, **loss), *seeds(0.90, 0.92, rule="sqrt", **loss)])) == {"sqrt"}


def test_all_that_share_the_lead_are_marked_and_what_has_one_run_is_not() -> None:
    arms = [*seeds(0.97, 0.98), *seeds(0.97, 0.99, rule="sqrt"), *seeds(0.5, 0.5, rule="constant")]
    assert marked(summarise([*arms, *seeds(0.3, rule="once")])) == {"linear", "sqrt"}


def test_a_rule_below_one_that_is_behind_does_not_share_the_lead() -> None:
    # Of lena 0.870, linear 0.787 and adascale 0.770, adascale's two runs differ so much that +- 4.3027 x the pooled
    # deviation 0.0276 = 0.119 around the difference of 0.100 includes zero; linear is behind by 0.083 +- 0.074.
    found = summarise(
        [
            *seeds(0.8033, 0.7698),
            *seeds(0.7426, 0.7972, rule="adascale"),
            *seeds(0.8739, 0.8653, rule="lena"),
        ]
    )
    assert marked(found) == set()
    text = takeaways(found)[0]
    assert "lena is ahead on gpu (87.0 %, 8.3 points better than linear, 95 % interval" in text
    assert "but adascale (77.0 %) cannot be told apart from lena with these seeds" in text
    assert "share" not in text
    # Without linear between them, they cannot be told apart, and none is behind.
    assert "lena and adascale cannot be told apart" in takeaways(summarise(
        [*seeds(0.7426, 0.7972, rule="adascale"), *seeds(0.8739, 0.8653, rule="lena")]
    ))[0]  # fmt: skip


def test_the_metric_is_that_of_a_record_that_has_one() -> None:
    failed = arm(0.0, rule="sqrt", status="failed", values=np.empty(0), header=Header(config={}))
    known = Header(config={"metric": "map"})
    found = summarise([failed, arm(0.2, metric="map", header=known), arm(0.0, rule="x", status="missing")])
    assert {cell.metric for cell in found.cells} == {"map"}


def test_equal_results_are_not_marked(summary: Summary) -> None:
    assert not any(cell.best for cell in summary.cells_of("digits-mlp") if cell.trace == "static")


@given(
    st.lists(st.lists(st.sampled_from([0.1, 0.5, 0.50001, 0.9, 0.91]), max_size=4), min_size=1, max_size=5),
    st.booleans(),
)
def test_the_text_and_the_marked_cells_agree(scores: list[list[float]], higher: bool) -> None:
    more = {"metric": "accuracy" if higher else "loss", "higher_is_better": higher}
    arms = [one for i, values in enumerate(scores) for one in seeds(*values, rule=f"rule{i}", **more)]
    if not arms:
        return
    found = summarise(arms)
    text = takeaways(found)[0]
    best = [cell.rule for cell in found.cells if cell.best]
    verdict = decide(found.cells)
    assert verdict is not None
    assert {cell.rule for cell in verdict.winners} == set(best)
    ranked = [cell.rule for cell in (verdict.first, *verdict.tied)]
    names = " and ".join(filter(None, [", ".join(ranked[:-1]), ranked[-1]]))
    assert (f"{names} is best on gpu" in text) == (len(best) == 1)
    assert (f"{names} share the lead on gpu" in text) == (len(best) > 1)
    if not best:
        assert " best " not in text
        assert "share the lead" not in text
    for cell in found.cells:
        if cell.best:
            assert f"**{cell_text(cell, found.number_format('w'))}**" in markdown(found)


def test_the_only_result_of_a_row_is_not_called_best() -> None:
    assert not summarise([arm(0.9), arm(None, rule="sqrt", status="failed")]).cells[0].best


def test_traces_and_rules_keep_the_order_of_the_study_file(summary: Summary) -> None:
    # Folders sort "gpu" before "static" and "linear" before "sqrt"; the study file says otherwise.
    assert summary.traces == ("static", "gpu")
    assert summary.rules == ("constant", "sqrt", LINEAR)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.randoms())
def test_the_order_of_arms_changes_no_number(values: list[float], random: object) -> None:
    arms = [arm(value, seed=seed) for seed, value in enumerate(values)]
    shuffled = list(arms)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = summarise(arms).cells[0], summarise(shuffled).cells[0]
    assert one.mean == pytest.approx(other.mean)
    assert min(values) - 1e-12 <= (one.mean or 0) <= max(values) + 1e-12
    assert (one.std is None) == (len(values) == 1)


def test_json_has_the_fixed_shape(summary: Summary) -> None:
    body = json.loads(json_text(summary))
    assert list(body) == ["cells"]
    assert len(body["cells"]) == 12  # 2 workloads x 2 traces x 3 rules
    assert list(body["cells"][0])[:7] == ["workload", "trace", "rule", "mean", "std", "seeds", "diverged"]
    cell = next(c for c in body["cells"] if (c["workload"], c["trace"], c["rule"]) == ("digits-mlp", "gpu", LINEAR))
    assert (cell["seeds"], cell["diverged"], cell["std"]) == (2, 1, None)


def test_csv_has_one_line_a_cell_with_unrounded_numbers(summary: Summary) -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text(summary))))
    assert len(rows) == 12
    row = next(r for r in rows if (r["workload"], r["trace"], r["rule"]) == ("digits-mlp", "gpu", "constant"))
    assert float(row["std"]) == pytest.approx(math.sqrt(0.0002))


def test_csv_has_no_cell_that_a_spreadsheet_takes_for_a_formula() -> None:
    names = ["=1+1", "+1", "-1", "@SUM(A1)", "linear"]
    rows = list(csv.DictReader(io.StringIO(csv_text(summarise([arm(0.5, rule=name) for name in names])))))
    assert sorted(row["rule"] for row in rows) == sorted(["'=1+1", "'+1", "'-1", "'@SUM(A1)", "linear"])
    assert {row["mean"] for row in rows} == {"0.5"}


def test_tables_have_no_control_characters_that_a_terminal_would_obey() -> None:
    tables = report_page._tables(summarise([arm(0.5, rule="\x1b]0;title\x07\x9b2Jmy rule")]))
    for text in tables.values():
        assert "my rule" in text and not {"\x1b", "\x07", "\x9b"} & {*text}


def test_markdown_marks_the_best_and_names_what_is_lost(summary: Summary) -> None:
    assert "| gpu | 91.0 ± 12.7 | 96.0 (1 of 2 failed) | 94.0 (1 of 2 diverged) |" in markdown(summary)
    found = markdown(summarise([*seeds(0.97, 0.99), *seeds(0.90, 0.92, rule="sqrt")]))
    assert "| gpu | **98.0 ± 12.7** | 91.0 ± 12.7 |" in found


def test_latex_is_escaped_and_set_with_booktabs(summary: Summary) -> None:
    text = latex(summary)
    assert r"gpu & 91.0 $\pm$ 12.7 & 96.0 (1 of 2 failed) & 94.0 (1 of 2 diverged) \\" in text
    assert text.count(r"\toprule") == 2
    assert r"\_" in latex(summarise([arm(0.5, rule="my_rule")]))


def test_decimals_grow_until_an_interval_is_visible() -> None:
    # 0.90000 and 0.90002: 12.7062 x 0.00001414 / sqrt(2) = 0.000127 = 0.0127 %; two decimals show 0.01.
    near = summarise([arm(0.90000), arm(0.90002, seed=1)])
    assert cell_text(near.cells[0], near.number_format("w")) == "90.00 ± 0.01"


def test_the_terminal_table_fits_80_columns_with_any_number_of_rules() -> None:
    rules = [f"adascale+warmup({i}ep)" for i in range(1, 10)]
    wide = summarise([arm(0.9 + i / 1000, rule=rule, seed=s) for i, rule in enumerate(rules) for s in (0, 1)])
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(terminal(wide, width=80))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    for i in range(1, 10):
        assert any(f"+warmup({i}ep)" in line for line in lines)  # no header is cut or folded
    assert sum("*" in line for line in lines) == 1  # each rule has two equal seeds, so the best is certain


def test_names_in_brackets_are_printed_as_they_are() -> None:
    names = ["spot-[july].csv", "[/]"]
    found = summarise([arm(0.9, trace=name, workload="mine[bold]") for name in names])
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(terminal(found, width=80))
    text = console.export_text()
    assert all(name in text for name in (*names, "mine[bold]"))


def test_the_takeaway_names_the_best_rule_and_the_interval_of_its_lead() -> None:
    # 0.98 - 0.91 = 0.07 +- 4.3027 x 0.0141421 = 0.0608.
    text = takeaway(summarise([*seeds(0.97, 0.99), *seeds(0.90, 0.92, rule="sqrt")]))
    assert text == "On w, linear is best on gpu (98.0 %, 7.0 points better than sqrt, 95 % interval 0.9 to 13.1)."


def test_the_takeaway_warns_of_a_rule_that_is_far_behind() -> None:
    # A tenth of 0.97 is 0.097: 0.91 is behind, 0.30 is far behind.
    arms = [*seeds(0.30, 0.30), *seeds(0.97, 0.97, rule="sqrt"), *seeds(0.91, rule="constant")]
    assert takeaway(summarise(arms)).endswith("Far behind: linear on gpu (30.0 %).")
    once = [*seeds(0.97, 0.97, rule="sqrt"), *seeds(0.2, rule="constant")]
    assert takeaway(summarise(once)).endswith("Far behind: constant on gpu (20.0 %, one run).")


def test_a_rule_that_cannot_be_told_apart_from_the_best_is_not_far_behind() -> None:
    text = takeaway(summarise([*seeds(0.40, 0.80), *seeds(0.49, 0.51, rule="sqrt")]))
    assert "linear and sqrt cannot be told apart on gpu" in text
    assert "Far behind" not in text


def test_rules_keep_the_order_of_the_study_also_where_its_first_trace_lacks_one() -> None:
    arms = [arm(0.9, trace="static", rule="linear"), arm(0.9, rule="constant"), arm(0.9, rule="linear")]
    config = {"workloads": ["w"], "traces": {"static": "", "gpu": ""}, "rules": ["constant", "linear", "not run"]}
    found = summarise(arms, config)
    assert (found.rules, found.traces) == (("constant", "linear"), ("static", "gpu"))
    assert summarise(arms).rules == ("linear", "constant")


def test_a_huge_loss_is_written_by_its_power_of_ten() -> None:
    arms = [arm(value, rule=rule, metric="loss", higher_is_better=False)
            for rule, value in (("linear", 11_215_563_776.0), ("sqrt", 0.077))]  # fmt: skip
    found = summarise(arms)
    scale = found.number_format("w")
    assert [cell_text(cell, scale) for cell in found.cells] == ["1.12e+10", "0.077"]


def test_a_name_longer_than_its_table_stays_on_one_line() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(terminal(summarise([arm(0.9, workload="cifar10-resnet18(width=8)")]), width=80))
    assert console.export_text().splitlines()[0].strip() == "cifar10-resnet18(width=8)"


def test_the_takeaway_says_when_rules_cannot_be_told_apart() -> None:
    text = takeaway(summarise([*seeds(0.96, 0.98), *seeds(0.90, 0.92, rule="sqrt")]))
    assert text == "On w, linear and sqrt cannot be told apart on gpu with these seeds (the 95 % intervals include 0)."


def test_the_takeaway_is_careful_with_one_seed() -> None:
    text = takeaway(summarise([arm(0.97), arm(0.91, rule="sqrt")]))
    assert text == (
        "On w, linear is ahead on gpu (97.0 %, 6.0 points better than sqrt), but there is one run: no interval."
    )
    mixed = takeaway(summarise([*seeds(0.96, 0.98), *seeds(0.90, rule="sqrt")]))
    assert "linear is ahead on gpu (97.0 %, 7.0 points better than sqrt), but sqrt has one run: no interval" in mixed


def test_scores_that_print_alike_are_neither_ahead_nor_far_behind() -> None:
    # As in the first epochs of a detector: both are 0.000 in the table.
    arms = [arm(0.0, metric="map"), arm(0.00002, rule="sqrt", metric="map")]
    assert takeaway(summarise(arms)) == "On w, sqrt and linear give the same result on gpu to the digits shown."


def test_the_takeaway_of_the_study_tells_of_every_loss(summary: Summary) -> None:
    texts = takeaways(summary)
    assert "constant, sqrt and linear+warmup(2ep) give the same result on static" in texts[0]
    assert "sqrt is ahead on gpu (1.550, 0.070 better than linear+warmup(2ep)), but there is one run" in texts[1]
    assert texts[2] == (
        "Diverged: linear+warmup(2ep) on gpu (1 of 2 seeds, digits-mlp). "
        "The table is not complete: 1 failed, 1 unfinished and 1 missing."
    )


def test_the_takeaway_of_a_study_without_results_claims_nothing() -> None:
    assert takeaway(summarise([arm(None, status="failed")])).startswith("On w no arm has finished")


def test_a_changed_record_changes_the_table(study: Path, tmp_path: Path) -> None:
    # The report is a function of the records alone: without seed 1, constant on gpu is 0.90 and has no deviation.
    copy = shutil.copytree(study, tmp_path / "copy")
    shutil.rmtree(copy / "arms" / "digits-mlp_gpu_constant_s1")
    cell = summarise(load_results(copy).arms).cell("digits-mlp", "gpu", "constant")
    assert cell is not None
    assert (cell.mean, cell.std, cell.missing) == (pytest.approx(0.90), None, (1,))


# What was published ---------------------------------------------------------------------------------------------------

PAPER = {
    "paper": [
        {
            "workload": "w",
            "trace": "gpu",
            "rule": "linear",
            "value": 0.9494,
            "source": "A 2022, Table 1",
            "what": "metric",
        },
        {
            "workload": "w",
            "trace": "gpu",
            "rule": "linear",
            "value": 29240,
            "source": "A 2022, Table 1",
            "what": "steps",
        },
        {"workload": "other", "trace": "gpu", "rule": "linear", "value": 0.1, "source": "B 2021", "what": "metric"},
    ]
}


def test_published_values_stand_beside_ours_with_their_sources() -> None:
    summary = summarise([arm(0.97, steps=29_240), arm(0.91, rule="sqrt")], PAPER)
    cell = summary.cell("w", "gpu", "linear")
    assert cell is not None
    assert (cell.published, cell.published_steps) == (0.9494, 29240.0)
    assert published_text(cell, summary.number_format("w")) == "paper 94.94; 29,240 steps, paper 29,240"
    assert published_text(summary.cell("w", "gpu", "sqrt"), summary.number_format("w")) == ""
    assert "(paper 94.94; 29,240 steps, paper 29,240)" in markdown(summary)
    assert "Published: A 2022, Table 1; B 2021." in caption(summary, "w")
    assert summary.as_json()["cells"][0]["published"] == 0.9494


def test_a_scaled_study_says_that_published_values_cannot_be_compared() -> None:
    assert "scaled to 0.1 of its epochs: not comparable" in caption(
        summarise([arm(0.97)], {**PAPER, "scale": 0.1}), "w"
    )
    assert "Published" not in caption(summarise([arm(0.97)], {"scale": 0.1}), "w")


def test_a_study_on_other_data_says_that_published_values_cannot_be_compared() -> None:
    text = caption(summarise([arm(0.97)], {**PAPER, "stand_in": "digits"}), "w")
    assert "The data here is digits, which stands in for the paper's: not comparable with it." in text


def scored(value: float, accuracies: list[float], **more: Any) -> ArmResult:
    return arm(value, metric="miou", scores={"pixel_accuracy": np.array(accuracies)}, **more)


def test_another_published_score_stands_beside_ours() -> None:
    cell_of = {"workload": "w", "trace": "gpu", "rule": "linear"}
    paper = [
        {**cell_of, "value": 0.3948, "source": "L 2019, metric", "what": "metric"},
        {**cell_of, "value": 0.7899, "source": "L 2019, pixel_accuracy", "what": "pixel_accuracy"},
    ]
    # Of six validations the last two count: (0.70 + 0.74) / 2 = 0.72 and (0.76 + 0.80) / 2 = 0.78; their mean is 0.75.
    arms = [scored(0.4, [0.1] * 4 + [0.70, 0.74]), scored(0.4, [0.1] * 4 + [0.76, 0.80], seed=1), arm(0.3, rule="sqrt")]
    found = summarise(arms, {"paper": paper})
    cell = found.cell("w", "gpu", "linear")
    assert cell is not None
    assert cell.scores == {"pixel_accuracy": pytest.approx(0.75)}
    text = "paper 0.3948; pixel_accuracy 0.75, paper 0.7899"
    assert published_text(cell, found.number_format("w")) == text
    assert f"({text})" in markdown(found)
    assert r"(paper 0.3948; pixel\_accuracy 0.75, paper 0.7899)" in latex(found)
    assert "Published: L 2019, metric; L 2019, pixel_accuracy." in caption(found, "w")
    body = {cell["rule"]: cell for cell in json.loads(json_text(found))["cells"]}
    assert body["linear"]["scores"] == {"pixel_accuracy": pytest.approx(0.75)}
    assert body["linear"]["published_scores"] == {"pixel_accuracy": 0.7899}
    assert body["sqrt"]["published_scores"] == {}
    lines = {line["rule"]: line for line in csv.DictReader(io.StringIO(csv_text(found)))}
    assert lines["linear"]["published_pixel_accuracy"] == "0.7899"
    assert float(lines["linear"]["score_pixel_accuracy"]) == pytest.approx(0.75)
    assert (lines["sqrt"]["score_pixel_accuracy"], lines["sqrt"]["published_pixel_accuracy"]) == ("", "")
    assert [name for name in lines["linear"] if name in ("values", "targets", "simulated_s", "scores")] == []
    assert "│ pixel_accuracy 0.75 │" in (shown := _shown(found)), shown


def test_a_published_score_that_no_run_has_stands_beside_a_dash() -> None:
    entry = {
        "workload": "w",
        "trace": "gpu",
        "rule": "linear",
        "value": 0.7899,
        "source": "L",
        "what": "pixel_accuracy",
    }
    found = summarise([arm(0.4)], {"paper": [entry]})
    assert published_text(found.cells[0], found.number_format("w")) == f"pixel_accuracy {NOTHING}, paper 0.7899"
    # A run whose score is no number makes no mean of the others.
    found = summarise([scored(0.4, [0.7] * 3), scored(0.4, [0.7, 0.7, math.nan], seed=1)], {"paper": [entry]})
    assert found.cells[0].scores == {"pixel_accuracy": None}
    json_text(found)
    # The metric itself may be called by its name.
    found = summarise([arm(0.4, metric="pixel_accuracy")], {"paper": [entry]})
    assert (found.cells[0].published, found.cells[0].published_scores) == (0.7899, {})


def test_other_scores_are_read_from_the_validations(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    with RecordWriter(path) as record:
        record.write(Header(config={"metric": "miou", "workload": "w"}))
        for epoch, (miou, pixels) in enumerate([(0.1, 0.5), (0.2, None)]):
            metrics = {"miou": miou, "pixel_accuracy": pixels}
            record.write(ValidationRow(step=epoch, epoch=epoch + 1.0, samples=8, time_s=0, wall_s=0, metrics=metrics))
        record.write(End(status="finished", steps=2, samples=16, wall_s=0))
    (found,) = load_results(path).arms
    assert list(found.values) == [0.1, 0.2]
    np.testing.assert_array_equal(found.scores["pixel_accuracy"], [0.5, math.nan])
    assert list(found.scores) == ["pixel_accuracy"]


def _shown(summary: Summary) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(terminal(summary, width=80))
    return console.export_text()


# Time and cost --------------------------------------------------------------------------------------------------------

HOURLY = {"name": "t", "times": [0.0, 3600.0], "workers": [2, 4], "end": 7200.0}


def timed(*values: float, rule: str = "linear", seed: int = 0, end_s: float = 7200.0, **more: object) -> ArmResult:
    """A run of 100 samples per validation on a trace with two workers in its first hour and four in its second."""
    count = len(values)
    return arm(
        0.0, rule=rule, seed=seed, values=np.array(values), end_s=end_s, samples=100 * count,
        times=np.linspace(0, end_s, count + 1)[1:], counts=100.0 * np.arange(1, count + 1),
        epochs=np.arange(1.0, count + 1), updates=10.0 * np.arange(1, count + 1), walls=3.0 * np.arange(1, count + 1),
        **{"header": Header(trace=HOURLY), **more},
    )  # fmt: skip


def test_paid_hours_are_those_of_all_available_workers_also_with_an_offset_and_a_repeated_trace() -> None:
    run = timed(0.5, 0.9)
    assert [run.worker_hours(hours * 3600) for hours in (0.5, 1, 2, 3)] == pytest.approx([1, 2, 6, 8])
    later = timed(0.9, header=Header(trace=HOURLY, plan={"offset_s": 1800.0}))
    assert later.worker_hours(3600.0) == pytest.approx(1 + 2)
    # Without a trace only the workers that took part are known: 3 for an hour, then 5 for half an hour.
    columns = {"time_s": np.array([0.0, 3600.0]), "workers": np.array([3.0, 5.0])}
    live = timed(0.9, header=Header(), columns=columns, end_s=5400.0)
    assert live.worker_hours(5400.0) == pytest.approx(3 + 2.5)
    assert live.worker_hours(3600.0) == pytest.approx(3)
    # A step of three workers for half an hour, of which two wait for the next one, of 20 minutes.
    columns = {
        "time_s": np.array([0.0, 3600.0]), "workers": np.array([3.0, 2.0]), "duration_s": np.array([1800.0, 1200.0])
    }  # fmt: skip
    live = timed(0.9, header=Header(), columns=columns, end_s=4800.0)
    assert live.worker_hours(4800.0) == pytest.approx(1.5 + 1 + 2 / 3)
    assert live.worker_hours(2700.0) == pytest.approx(1.5 + 0.5)


def test_time_and_cost_stand_beside_the_score() -> None:
    arms = [timed(0.5, 0.9), timed(0.5, 0.8, rule="sqrt"), timed(0.7, rule="short", end_s=3600.0)]
    found = summarise(arms, usd_per_hour=0.5)
    assert effort_table(found, "w") == [
        ["trace", "rule", "accuracy (%)", "time", "worker-hours", "USD", "samples"],
        ["gpu", "linear, sqrt", "80.0 to 90.0", "120.0 min", "6", "3.00", "200"],
        ["gpu", "short", "70.0", "60.0 min", "2", "1.00", "100"],
    ]
    cell = found.as_json()["cells"][0]
    assert (cell["time_s"], cell["worker_hours"], cell["cost_usd"]) == (7200.0, pytest.approx(6), pytest.approx(3))
    assert cell["target"] is None
    assert effort_table(summarise(arms), "w")[0] == ["trace", "rule", "accuracy (%)", "time", "worker-hours", "samples"]
    assert summarise(arms).targets_of("w") == []


def test_a_fitted_step_time_is_said_where_times_are_shown() -> None:
    fitted = summarise([timed(0.9, header=Header(trace=HOURLY, config={"step_time": "fit"}))])
    assert "fitted to the trace" in effort_caption(fitted, "w")
    by_epochs = summarise([timed(0.9, header=Header(trace=HOURLY, config={"step_time": "1h/ep"}))])
    assert "fitted to the trace or the epoch" in effort_caption(by_epochs, "w")
    assert "fitted" not in effort_caption(summarise([timed(0.9)]), "w")


def test_a_live_run_has_the_times_that_its_workers_measured() -> None:
    # Nothing planned its steps, though its header has a step time, as every header does.
    columns = {"time_s": np.array([0.0, 3600.0]), "workers": np.array([3.0, 5.0])}
    live = timed(0.9, header=Header(config={"step_time": "fit", "engine": "live"}), columns=columns)
    text = effort_caption(summarise([live]), "w")
    assert text == "Time as the workers measured it, and workers that took part x hours; means over seeds."


def test_a_long_name_of_a_trace_leaves_room_for_the_numbers(tmp_path: Path, make_record: Callable[..., Path]) -> None:
    name = "/data/availability/a-rather-long-folder-name/experiments/2026-11/spot-europe-west4.csv"
    for rule, last in (("constant", 0.9), ("linear+warmup(2ep)", 0.8)):
        path = make_record(tmp_path / "arms" / rule / "record.jsonl", last=[last] * 3, rule=rule)
        path.write_text(path.read_text().replace('"trace":"static"', f'"trace":"{name}"', 1))
    results = load_results(tmp_path)
    console = Console(width=80, file=io.StringIO())
    console.print(terminal(summarise(results.arms, results.config), width=80))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    first = text.partition("└")[0]
    assert "90" in first and "80" in first and "(continued)" not in text
    assert max(map(len, text.splitlines())) <= 80
    shown = "".join(line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│"))
    assert shown == name
