"""The atlas of rules: its cells can be run, and its analysis computes what it says."""

from __future__ import annotations

import json
import runpy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ebbflow.record import End, Header, Run, StepRow, ValidationRow
from ebbflow.rules.families import candidate_rules
from ebbflow.run.config import RunConfig
from ebbflow.studies.grid import check_arms

ATLAS = Path(__file__).parents[2] / "docs" / "evidence" / "atlas"


@pytest.fixture
def atlas(forget_plugins: None) -> dict[str, Any]:
    return runpy.run_path(str(ATLAS / "atlas.py"))


@pytest.fixture(scope="module")
def regrets() -> dict[str, Any]:
    return runpy.run_path(str(ATLAS / "regrets.py"))


# Per model, at 3 rates each: 2 static fleets with 7 rules, 3 others with 9, 2 of the long runs with 9; 7 + 9; 9.
@pytest.mark.parametrize(("name", "arms"), [("cpu", 855), ("gpu", 96), ("gpu-long", 48)])
def test_every_arm_of_an_atlas_can_be_run(atlas: dict[str, Any], name: str, arms: int) -> None:
    study = atlas["make_study"](name, images="images", text="text")
    assert len(study.arms()) == len({arm.id for arm in study.arms()}) == arms
    check_arms(study.arms())
    warmed = [arm.config for arm in study.arms() if arm.config.rule == "linear+warmup(0.15ep, start=0)"]
    assert {(config.epochs, config.validate_every, config.data) for config in warmed} <= {(3, 3, "images")}


def test_each_half_of_the_atlas_has_every_model_fleet_rate_and_length(atlas: dict[str, Any]) -> None:
    cpu = atlas["CPU"]
    seen: dict[str, list[tuple[Any, ...]]] = {"development": [], "report": []}
    for model in cpu.models:
        for length, fleets in cpu.fleets.items():
            for fleet in fleets:
                for rate in atlas["RATES"]:
                    seen[atlas["half"](cpu, model.workload, fleet, rate, length)].append(
                        (model.workload, length, fleet, rate)
                    )
    assert sum(map(len, seen.values())) == 105
    assert abs(len(seen["report"]) - len(seen["development"])) <= 2
    for axis in range(4):
        assert {place[axis] for place in seen["report"]} == {place[axis] for place in seen["development"]}


def test_a_record_becomes_a_row(atlas: dict[str, Any]) -> None:
    # The guard gave back 64 samples once; two probes ended, of which one moved the coefficient, and gave back 100 each.
    stats: list[dict[str, float]] = [{}, {"given_back": 64.0}, {}]
    stats += [
        {"given_back": 100.0, "probe": 3.0},
        {"probed": 1.0},
        {"given_back": 100.0, "probe": 3.0},
        {"probed": 2.0},
    ]
    steps = tuple(
        StepRow(step=index, time_s=0.0, wall_s=float(index), epoch=0, samples=64 * (index + 1), workers=8, batch=64,
                micro_batches=2, lr_base=0.1, lr=0.1, multiplier=1.0, loss=1.0, stats=one)
        for index, one in enumerate(stats)
    )  # fmt: skip
    config = {
        "workload": "atlas-mlp",
        "trace": "static 8, x0.25, long",
        "rule": "auto",
        "seed": 1,
        "metric": "accuracy",
    }
    run = Run(
        path=Path("record.jsonl"),
        header=Header(config=config, device="cpu"),
        steps=list(steps),
        validations=[
            ValidationRow(step=4, samples=448, epoch=1, time_s=0.0, wall_s=4.0, metrics={"accuracy": 0.5}),
        ],
        events=[],
        end=End(status="finished", steps=7, samples=448, wall_s=4.0),
    )
    row = asdict(atlas["result_of"](run, "cpu"))
    # Place 2 + 0 + 0 + 1 is odd.
    assert row == {
        "workload": "atlas-mlp", "family": "sgd", "fleet": "static 8", "rate": 0.25, "length": "long", "half": "report",
        "rule": "auto", "seed": 1, "score": 0.5, "higher": True, "steps": 7, "samples": 448, "wall_s": 6.0,
        "restores": 1, "probes": 2, "moves": 1, "given_back": 264,
    }  # fmt: skip


def test_the_long_runs_on_images_are_the_candidates_of_eight_tournaments(atlas: dict[str, Any]) -> None:
    """`choose` compares the fixed rules of the family at three base rates: exactly what the atlas trains to its end."""
    agreement = runpy.run_path(str(ATLAS.parent / "choose" / "agreement.py"))
    cells = agreement["atlas_cells"](Path("images"))
    assert len({cell["name"] for cell in cells}) == len(cells) == 8
    arms = [arm.config for arm in atlas["make_study"]("cpu", images="images", text="text").arms()]
    for cell in cells:
        own = [
            config for config in arms
            if config.workload == cell["workload"] and config.label.startswith(f"{cell['fleet']},")
            and config.label.endswith("long") and not config.rule.startswith("auto")
        ]  # fmt: skip
        base = RunConfig(workload=cell["workload"], trace=cell["trace"], **cell["settings"])
        rows = [
            {"workload": config.workload, "fleet": cell["fleet"], "length": "long", "rule": config.rule, "seed": 0,
             "rate": float(config.label.split(", ")[1][1:]), "score": 0.5, "wall_s": 2.0} for config in own
        ]  # fmt: skip
        scores, seconds = agreement["atlas_scores"](rows, cell)
        family = "adam" if "vit" in cell["workload"] else "sgd"
        rules = candidate_rules(family, epochs=22)
        assert set(scores) == {f"{rule} x{rate}" for rule in rules for rate in ("0.25", "1", "4")}
        assert seconds == 24.0
        (same,) = [config for config in own if config.rule == rules[0] and ", x1," in config.label]
        assert base.replace(rule=rules[0], validate_every=22).fingerprint() == same.fingerprint()


FIXED = ("adascale+statewarmup(0.05)", "linear+warmup(0.15ep, start=0)")


def rows_of(fleet: str, scores: dict[str, Any], *, half: str = "report", higher: bool = True) -> list[dict[str, Any]]:
    """One run per seed and rule; `auto` went back once where its score is followed by True."""
    found = []
    for rule, given in scores.items():
        for seed, score in enumerate(given if isinstance(given, list) else [given]):
            back = isinstance(score, tuple)
            found.append({
                "workload": "w", "fleet": fleet, "rate": 1.0, "length": "short", "half": half, "rule": rule,
                "seed": seed, "score": score[0] if back else score, "higher": higher, "steps": 10, "samples": 1000,
                "wall_s": 2.0, "restores": int(back), "probes": 0, "moves": 0, "given_back": 40 if back else 0,
            })  # fmt: skip
    return found


def test_regrets_are_counted_from_the_best_fixed_rule(regrets: dict[str, Any]) -> None:
    cells = regrets["make_cells"]([
        *rows_of("a", {FIXED[0]: 0.80, FIXED[1]: 0.70, "auto": 0.79, "auto(guard=false)": 0.79}),
        *rows_of("b", {FIXED[0]: 0.60, FIXED[1]: None, "auto": (0.63,), "auto(guard=false)": 0.50}),
        *rows_of("c", {FIXED[0]: 0.60, "auto": 0.6}),  # no linear: left out
    ])  # fmt: skip
    assert [cell.name[1] for cell in cells] == ["a", "b"]
    summary = {one.rule: one for one in regrets["summarise_regrets"](cells)}
    # auto: 1 point in a, -3 in b. linear: 10 in a; in b it diverged: 50 behind the best of all runs, 63: 60 - 13 = 47.
    assert (summary["auto"].mean, summary["auto"].worst) == pytest.approx((-1.0, 1.0))
    assert summary["linear+warmup"].worst == pytest.approx(47.0)
    assert summary["linear+warmup"].mean == pytest.approx(28.5)
    assert [summary[rule].wins for rule in ("auto", FIXED[0])] == [1, 1]
    # Without the guard b is 10 points behind: bad, and seen. a is good, and the guard did nothing.
    guard = regrets["summarise_guard"](cells)
    assert (guard.runs, guard.alarms, guard.good, guard.false_alarms, guard.bad, guard.seen) == (2, 1, 1, 0, 1, 1)
    (ablation,) = regrets["summarise_ablations"](cells)
    assert (ablation.mean, ablation.least, ablation.most) == pytest.approx((6.5, 0.0, 13.0))
    assert ablation.changed == 1
    assert regrets["overhead"](cells) == pytest.approx((0.02, 0.04))


def test_a_part_is_compared_over_the_seeds_of_the_runs_without_it(regrets: dict[str, Any]) -> None:
    scores = {FIXED[0]: 0.8, FIXED[1]: 0.7, "auto": [0.79, 0.99], "auto(guard=false)": 0.78}
    (ablation,) = regrets["summarise_ablations"](regrets["make_cells"](rows_of("a", scores)))
    assert ablation.mean == pytest.approx(1.0), "of the first seed; the mean of both is 0.89"


def test_a_loss_is_lower_the_better_and_a_nat_counts_25_points(regrets: dict[str, Any]) -> None:
    cells = regrets["make_cells"](rows_of("a", {FIXED[0]: 1.5, FIXED[1]: 1.6, "auto": 1.52}, higher=False))
    (cell,) = cells
    assert cell.regret("auto") == pytest.approx(0.5)
    found = {what: (shown, met) for what, shown, met in regrets["verdicts"](cells)}
    assert found["mean regret at most 0.02 nats"] == ("0.020", True)


def test_the_standard_error_comes_from_the_seeds(regrets: dict[str, Any]) -> None:
    # Variances between two seeds: 2 (80, 82), 2 and 2 points squared; of a mean 1, of a difference of means 2.
    scores = {FIXED[0]: [0.80, 0.82], FIXED[1]: [0.70, 0.72], "auto": [0.76, 0.78]}
    (cell,) = regrets["make_cells"](rows_of("a", scores))
    assert cell.standard_error == pytest.approx(2**0.5)
    # 4 points behind, which is more than two points and two standard errors of 1.41.
    assert {one.rule: one.beyond for one in regrets["summarise_regrets"]([cell])}["auto"] == 1


def test_the_bar_is_void_where_one_rule_is_always_best(regrets: dict[str, Any]) -> None:
    cells = regrets["make_cells"](rows_of("a", {FIXED[0]: 0.8, FIXED[1]: 0.7, "auto": 0.8, "auto(guard=false)": 0.8}))
    unmet = [what for what, _, met in regrets["verdicts"](cells) if not met]
    assert unmet == [
        "worst regret below that of every fixed rule (points)",  # adascale's is zero, too
        "another rule than adascale is best in 30% or more",
    ]
    assert "| bar | found | met |" in regrets["tables"](cells, each=True)


def test_the_tables_of_the_page_are_those_of_the_rows(regrets: dict[str, Any]) -> None:
    rows = json.loads((ATLAS / "arms.json").read_text(encoding="utf-8"))
    printed = set(regrets["tables"](regrets["make_cells"](rows), each=False).splitlines())
    page = [line for line in ATLAS.with_suffix(".md").read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert len(page) > 30
    assert set(page) <= printed
