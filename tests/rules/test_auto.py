"""The rule `auto`: its rate and warm-up by hand, and what its guard takes for damage."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ebbflow import RunConfig, train
from ebbflow.errors import PlanError, SpecError
from ebbflow.moments.estimate import Moments
from ebbflow.report.report_page import write_report
from ebbflow.rules.auto_rule import Auto
from ebbflow.rules.rule import StepContext, make_rule

AUTO = Auto()
# S = 4. With V = 16 and a signal of 1 the noise of a reference batch is 2, so the gain is (2 + 1)/(2/4 + 1) = 2. The
# run has 1000 reference steps, so the warm-up lasts until the steps are worth 50 of them, or for 2,000 samples.
STEP = StepContext(
    step=0, batch=32, ref_batch=8, samples=0, total_samples=8_000, moments=Moments(noise=16.0, signal=1.0)
)  # fmt: skip


def seen(losses: list[float], rule: Any = AUTO) -> tuple[list[str], Any]:
    """The verdicts about the losses of the first steps, and the state after them."""
    state, verdicts = rule.init(), []
    for number, loss in enumerate(losses):
        context = replace(STEP, step=number, samples=32 * number)
        _, state = rule.scale(context, state)
        verdict, state = rule.review(context, loss, json.loads(json.dumps(state)))
        verdicts.append(verdict)
    return verdicts, state


def test_sgd_has_the_gain_and_adam_the_root_warmed_up_by_what_the_steps_are_worth() -> None:
    first, state = AUTO.scale(STEP, AUTO.init())
    assert first.lr == pytest.approx(2 * 2 / 50)
    second, _ = AUTO.scale(replace(STEP, step=1, samples=32), state)
    assert second.lr == pytest.approx(2 * 4 / 50)
    # The root of 4 is 2 as well; with 16 times the batch it is 4 where the gain is 3/(2/16 + 1) = 8/3.
    wide = replace(STEP, batch=128)
    # Its 128 samples are 0.064 of the longest warm-up, more than 8/3/50 = 0.053 by worth, and less than 4/50 = 0.08.
    assert AUTO.scale(wide, AUTO.init())[0].lr == pytest.approx(8 / 3 * 0.064)
    adaptive = replace(wide, adaptive=True)
    assert AUTO.scale(adaptive, AUTO.init())[0].lr == pytest.approx(4 * 0.08)


def test_the_warm_up_ends_after_a_quarter_of_the_run_at_the_latest() -> None:
    slow = replace(STEP, moments=Moments(noise=0.0, signal=1.0))  # a gain of 1: 50 steps of 32 samples
    late = replace(slow, samples=2_000 - 32)
    assert AUTO.scale(late, AUTO.init())[0].lr == pytest.approx(1.0)
    assert AUTO.scale(replace(late, samples=1_000 - 32), AUTO.init())[0].lr == pytest.approx(0.5)
    assert Auto(limit=0).scale(slow, AUTO.init())[0].lr == pytest.approx(1.0)


def test_below_the_reference_batch_sgd_is_linear_and_adam_has_the_root() -> None:
    small = replace(STEP, batch=2, samples=4_000)
    assert AUTO.scale(small, AUTO.init())[0].lr == pytest.approx(0.25)
    assert AUTO.scale(replace(small, adaptive=True), AUTO.init())[0].lr == pytest.approx(0.5)


def test_after_an_increase_the_multiplier_climbs() -> None:
    """k = 2: the ramp takes 16 steps, and its first step has the multiplier of before."""
    before = replace(STEP, batch=8, samples=4_000, adaptive=True)
    _, state = AUTO.scale(before, AUTO.init())
    after, _ = AUTO.scale(replace(before, batch=32, samples=4_008), state)
    assert after.lr == pytest.approx(1.0)


@pytest.mark.parametrize("loss", [2.21, math.inf, math.nan])
def test_a_loss_above_that_of_the_first_step_is_damage(loss: float) -> None:
    verdicts, state = seen([2.0, 2.0, 2.0, 2.0, loss])
    assert verdicts == ["continue"] * 4 + ["restore"]
    assert (state["coefficient"], state["warm_up"], state["guarded"]) == (0.5, 2.0, True)
    restored = AUTO.after_restore(AUTO.init(), state)
    assert (restored["coefficient"], restored["worth"], restored["first_loss"]) == (0.5, 0.0, 2.0)
    # Half the coefficient and half as much of the warm-up: a quarter of what the first step had before.
    assert AUTO.scale(STEP, restored)[0].lr == pytest.approx(2 * 2 / 50 / 4)


def test_a_low_loss_that_scatters_is_no_damage() -> None:
    """The differences 0.06, 0.08, 0.07 say a deviation of 0.05 per loss: 0.2 is within 0.1 + 3 x 0.05, 0.26 is not."""
    quiet = [0.10, 0.16, 0.08, 0.15]
    assert seen([*quiet, 0.2])[0][-1] != "restore"
    assert seen([*quiet, 0.26])[0][-1] == "restore"
    assert seen([0.1, 0.21])[0][-1] == "restore", "twice the first loss is damage at once"


def test_after_two_restores_and_after_the_warm_up_nothing_is_guarded() -> None:
    verdicts, state = seen([2.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0])
    assert verdicts == ["continue"] * 4 + ["restore", "restore", "release"]
    assert (state["coefficient"], state["warm_up"]) == (0.25, 4.0)
    # Worth 2 per step: the warm-up of 50 ends after 25 steps, the guard after 50; 5 % of the samples are 13 steps.
    verdicts, _ = seen([2.0 - 0.01 * i for i in range(51)])
    assert verdicts.index("release") == 49
    assert verdicts.count("snapshot") == 1600 // 80 - 1, "after every hundredth of the run, but not after the last"
    assert not make_rule("auto(restores=0)").guards


def test_bad_arguments_are_named() -> None:
    with pytest.raises(SpecError, match="auto: limit is 2; expected 0"):
        make_rule("auto(limit=2)")
    with pytest.raises(SpecError, match="auto: restores is -1; expected 0 or more"):
        make_rule("auto(restores=-1)")


@pytest.mark.parametrize("step_time", ["fit", "1h/ep"])
def test_a_rate_that_is_far_too_high_is_survived(step_time: str, tmp_path: Path) -> None:
    """Seventeen times the tuned rate: AdaScale with the same warm-up ends at chance, 10 %."""
    trace = "constant(workers=16, duration=20h)"  # exactly as long as the epochs, were it not for going back
    config = RunConfig(workload="digits-mlp", trace=trace, rule="auto", lr=1.0, epochs=20, step_time=step_time)
    run = train(config, tmp_path)
    assert [event.what for event in run.events] == ["went back", "went back"]
    assert run.validations[-1].metrics["accuracy"] > 0.9
    back = [row for row in run.steps if "given_back" in row.stats]
    assert run.end is not None and run.end.samples == 20 * run.header.config["task"]["train_samples"]
    trained = sum(row.batch for row in run.steps) - sum(row.stats["given_back"] for row in back)
    assert trained == run.end.samples, "what was given back was trained on again, and counts once"


def test_a_trace_that_is_too_short_for_going_back_says_what_to_do(tmp_path: Path) -> None:
    config = RunConfig(workload="digits-mlp", trace="0s:16 36s", rule="auto", lr=1.0, epochs=3, step_time="1s")
    with pytest.raises(PlanError, match=r"more steps than its epochs have: repeat the trace \(--repeat\)"):
        train(config, tmp_path / "short")
    assert train(config.replace(repeat=True), tmp_path / "repeated").status == "finished"


def test_the_report_shows_the_coefficient_and_that_the_run_went_back(tmp_path: Path) -> None:
    config = RunConfig(workload="digits-mlp", trace="constant(workers=16)", rule="auto", lr=1.0, epochs=3)
    train(config, tmp_path / "run")
    write_report(tmp_path / "run", out=tmp_path / "report")
    page = (tmp_path / "report" / "index.html").read_text()
    assert "Coefficient" in page and "Given back" not in page
    assert "went back to a snapshot" in page
