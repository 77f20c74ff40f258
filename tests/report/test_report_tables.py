"""Means, deviations, marks and words: every expected number is derived in a comment."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ebbflow.record import Header
from ebbflow.report.export import (
    caption,
    cell_text,
    csv_text,
    json_text,
    latex,
    losses_text,
    markdown,
    published_text,
    terminal,
)
from ebbflow.report.results import ArmResult, load_results
from ebbflow.report.summary import Summary, outcome, run_value, summarise, takeaways

LINEAR = "linear+warmup(2ep)"


def takeaway(summary: Summary) -> str:
    """All conclusions as one text."""
    return " ".join(takeaways(summary))


def arm(value: float | None, *, rule: str = "linear", trace: str = "gpu", seed: int = 0, **more: object) -> ArmResult:
    """An arm whose last three validations are all `value`; with None its record has a metric that is not a number."""
    values = np.full(3, math.nan if value is None else value)
    fields = {"id": "a", "workload": "w", "status": "finished", "header": Header(), "values": values, **more}
    return ArmResult(rule=rule, trace=trace, seed=seed, **fields)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def summary(study: Path) -> Summary:
    return summarise(load_results(study).arms)


def test_the_value_of_a_run_is_the_mean_of_its_last_three_validations() -> None:
    # (0.2 + 0.4 + 0.9) / 3 = 0.5; the 0.0 before them does not count.
    assert run_value(arm(0.0, values=np.array([0.0, 0.2, 0.4, 0.9]))) == pytest.approx(0.5)


def test_fewer_than_three_validations_are_averaged_and_reported() -> None:
    short = summarise([arm(0.0, values=np.array([0.2, 0.4]))])
    assert short.cells[0].mean == pytest.approx(0.3)
    assert short.short == ("w, gpu, linear, seed 0: 2",)


def test_a_cell_is_mean_and_sample_deviation_over_seeds(summary: Summary) -> None:
    # Seeds 0.90 and 0.92: mean 0.91; deviation sqrt((0.01^2 + 0.01^2) / (2 - 1)) = 0.014142.
    cell = summary.cell("digits-mlp", "gpu", "constant")
    assert cell is not None
    assert cell.mean == pytest.approx(0.91)
    assert cell.std == pytest.approx(0.0141421356)
    assert cell.values == pytest.approx((0.90, 0.92))
    assert cell.seeds == 2


def test_one_seed_has_no_deviation() -> None:
    cell = summarise([arm(0.5)]).cells[0]
    assert cell.std is None
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


def test_a_finished_run_without_a_finite_result_counts_as_diverged_and_without_any_as_failed() -> None:
    assert outcome(arm(None)) == "diverged"
    assert outcome(arm(0.0, values=np.array([0.3, 0.3, math.nan]))) == "diverged"
    assert outcome(arm(0.0, values=np.empty(0))) == "failed"


def test_the_best_of_each_row_is_marked_in_the_direction_of_the_metric(summary: Summary) -> None:
    def best(workload: str, trace: str) -> set[str]:
        return {c.rule for c in summary.cells_of(workload) if c.trace == trace and c.best}

    assert best("digits-mlp", "gpu") == {"sqrt"}  # 0.96 is the highest accuracy
    assert best("tiny-gpt", "gpu") == {"sqrt"}  # 1.55 is the lowest loss
    assert best("digits-mlp", "static") == {"constant", "sqrt", LINEAR}  # all 0.96: equal ones are all best


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


def test_markdown_marks_the_best_and_names_what_is_lost(summary: Summary) -> None:
    assert "| gpu | 91.0 ± 1.4 | **96.0** (1 of 2 failed) | 94.0 (1 of 2 diverged) |" in markdown(summary)


def test_latex_is_escaped_and_set_with_booktabs(summary: Summary) -> None:
    text = latex(summary)
    assert r"gpu & 91.0 $\pm$ 1.4 & \textbf{96.0} (1 of 2 failed) & 94.0 (1 of 2 diverged) \\" in text
    assert text.count(r"\toprule") == 2
    assert r"\_" in latex(summarise([arm(0.5, rule="my_rule")]))


def test_decimals_grow_until_a_deviation_is_visible() -> None:
    # Deviation of 0.9000 and 0.9002: sqrt(2 * 0.0001^2) = 0.000141 = 0.0141 %; two decimals show 0.01.
    near = summarise([arm(0.9000), arm(0.9002, seed=1)])
    assert cell_text(near.cells[0], near.number_format("w")) == "90.01 ± 0.01"


def test_the_terminal_table_fits_80_columns_with_any_number_of_rules() -> None:
    rules = [f"adascale+warmup({i}ep)" for i in range(1, 10)]
    wide = summarise([arm(0.9 + i / 1000, rule=rule, seed=s) for i, rule in enumerate(rules) for s in (0, 1)])
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(terminal(wide, width=80))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    for i in range(1, 10):
        assert any(f"+warmup({i}ep)" in line for line in lines)  # no header is cut or folded
    assert sum("*" in line for line in lines) == 1


def test_names_in_brackets_are_printed_as_they_are() -> None:
    names = ["spot-[july].csv", "[/]"]
    found = summarise([arm(0.9, trace=name, workload="mine[bold]") for name in names])
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(terminal(found, width=80))
    text = console.export_text()
    assert all(name in text for name in (*names, "mine[bold]"))


def test_the_takeaway_names_the_best_rule_and_its_lead_in_deviations() -> None:
    # linear: 0.96, 0.98 -> 0.97 +- 0.0141; sqrt: 0.90, 0.92 -> 0.91; gap 6 points = 0.06 / 0.01414 = 4.2 deviations.
    values = {("linear", 0): 0.96, ("linear", 1): 0.98, ("sqrt", 0): 0.90, ("sqrt", 1): 0.92}
    text = takeaway(summarise([arm(v, rule=rule, seed=seed) for (rule, seed), v in values.items()]))
    assert text == "On w, linear is best on gpu (97.0 %, 6.0 points better than sqrt = 4.2 standard deviations)."


def test_the_takeaway_warns_of_a_rule_that_is_far_behind() -> None:
    # A tenth of 0.97 is 0.097: 0.91 is behind, 0.30 is far behind.
    values = {("linear", 0): 0.30, ("linear", 1): 0.30, ("sqrt", 0): 0.97, ("sqrt", 1): 0.97, ("constant", 0): 0.91}
    text = takeaway(summarise([arm(v, rule=rule, seed=seed) for (rule, seed), v in values.items()]))
    assert text.endswith("Far behind: linear on gpu (30.0 %).")


def test_a_rule_that_cannot_be_told_apart_from_the_best_is_not_far_behind() -> None:
    # linear: 0.40 and 0.80, 0.60 +- 0.283; sqrt: 0.49 and 0.51, 0.50 +- 0.014. The gap of 0.1 is more than a tenth of
    # 0.60 and more than sqrt's own deviation, but less than linear's.
    values = {("linear", 0): 0.40, ("linear", 1): 0.80, ("sqrt", 0): 0.49, ("sqrt", 1): 0.51}
    text = takeaway(summarise([arm(v, rule=rule, seed=seed) for (rule, seed), v in values.items()]))
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


def test_the_caption_does_not_claim_three_validations_of_runs_that_have_fewer() -> None:
    assert "mean of the last 3 validations; best" in caption(summarise([arm(0.9), arm(0.8, rule="sqrt")]), "w")
    short = summarise([arm(0.9), arm(0.0, rule="sqrt", values=np.array([0.2, 0.4]))])
    assert "mean of the last 3 validations, or of all where a run has fewer; best" in caption(short, "w")


def test_a_name_longer_than_its_table_stays_on_one_line() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(terminal(summarise([arm(0.9, workload="cifar10-resnet18(width=8)")]), width=80))
    assert console.export_text().splitlines()[0].strip() == "cifar10-resnet18(width=8)"


def test_the_takeaway_says_when_rules_cannot_be_told_apart() -> None:
    # Means 0.97 and 0.965, both with a deviation of 0.0141: half a point is less than one deviation.
    values = {("linear", 0): 0.96, ("linear", 1): 0.98, ("sqrt", 0): 0.955, ("sqrt", 1): 0.975}
    text = takeaway(summarise([arm(v, rule=rule, seed=seed) for (rule, seed), v in values.items()]))
    assert text == (
        "On w, linear and sqrt cannot be told apart on gpu with these seeds (within one standard deviation)."
    )


def test_the_takeaway_is_careful_with_one_seed() -> None:
    text = takeaway(summarise([arm(0.97), arm(0.91, rule="sqrt")]))
    assert "linear is ahead on gpu (97.0 %, 6.0 points better than sqrt)" in text
    assert "repeat with more" in text


def test_the_takeaway_of_the_study_tells_of_every_loss(summary: Summary) -> None:
    texts = takeaways(summary)
    assert "constant, sqrt and linear+warmup(2ep) give the same result on static" in texts[0]
    # 1.62 - 1.55 = 0.07; linear's 1.60 and 1.64 have a deviation of 0.0283: 2.5 of them.
    assert "sqrt is best on gpu (1.550, 0.070 better than linear+warmup(2ep) = 2.5 standard deviations)" in texts[1]
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
