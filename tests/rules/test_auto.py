"""The rule `auto`: its rate and warm-up by hand, and what its guard takes for damage."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from contract.suite import SAMPLES, make_data, make_model
from ebbflow import RunConfig, Session, read_record, train
from ebbflow.core.memory import free_memory
from ebbflow.engines.emulated import LoopEngine
from ebbflow.errors import Diverged, PlanError, SpecError
from ebbflow.moments.estimate import Moments
from ebbflow.record import Run
from ebbflow.report.report_page import write_report
from ebbflow.rules import auto_rule
from ebbflow.rules.auto_rule import Auto
from ebbflow.rules.rule import StepContext, damp, make_rule
from ebbflow.run import kept_states
from ebbflow.run.loop import Callbacks
from ebbflow.workloads import TensorSource, cross_entropy

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


def test_a_batch_that_was_only_requested_begins_no_ramp() -> None:
    rule, samples = make_rule("auto(limit=0)"), 0
    state = rule.init()
    for step in range(4):
        context = replace(STEP, step=step, samples=samples, batch=32, adaptive=True, shortfall=0.25)
        scaling, new = rule.scale(context, state)
        # 32 samples of 128 requested ones, at a reference of 8: the root of 16, times that of 1/4, is the root of 4.
        assert damp(scaling, rule, context, state, exponent=0.5).multiplier == pytest.approx(2.0)
        state, samples = new, samples + 32


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


@pytest.mark.parametrize(
    ("text", "multipliers"),
    # k = 2, from 1 to 2: over 2, 16 or no steps, of which the first one has the multiplier of before.
    [
        ("auto(ramp=1)", [1.0, 1.5, 2.0]),
        ("auto", [1.0, 1.0 + 1 / 16, 1.0 + 2 / 16]),
        ("auto(ramp=0)", [2.0, 2.0, 2.0]),
    ],
)
def test_after_an_increase_the_multiplier_climbs(text: str, multipliers: list[float]) -> None:
    rule = make_rule(text)
    before = replace(STEP, batch=8, samples=4_000, adaptive=True)
    _, state = rule.scale(before, rule.init())
    for number, multiplier in enumerate(multipliers):
        after, state = rule.scale(replace(before, batch=32, samples=4_008 + 32 * number), state)
        assert after.lr == pytest.approx(multiplier)


@pytest.mark.parametrize("loss", [2.41, math.inf, math.nan])
def test_a_loss_above_that_of_the_first_step_is_damage(loss: float) -> None:
    assert seen([2.0, 2.0, 2.0, 2.0, 2.39])[0] == ["continue"] * 5, "1.2 times the first loss is 2.4"
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
    assert not make_rule("auto(guard=false)").guards


def test_a_later_loss_below_the_first_one_confirms_a_snapshot() -> None:
    """A hundredth of the run is 80 samples, so that snapshots are due after steps 2, 4, 7 and 9 of 32 samples.

    Each is taken at a loss that was measured before the update of its step, and the next loss shows that update.
    """
    expected = ["continue", "continue", "snapshot", "confirm", "snapshot", "confirm", "continue", "snapshot", "confirm"]
    assert seen([2.0, 1.9, 1.8, 1.7, 1.6, 1.5, 1.4, 1.3, 1.2])[0] == expected
    verdicts, state = seen([2.0, 1.9, 1.8, 2.1, 2.1])
    assert verdicts[2:] == ["snapshot", "continue", "continue"], "above the first loss, and no damage"
    assert state["unconfirmed"]
    assert seen([2.0, 1.9, 1.8, 2.1, 1.7])[0][-1] == "snapshot", "which confirms the one before"
    _, damaged = seen([2.0, 1.9, 1.8, 4.1])
    assert not AUTO.after_restore({**AUTO.init(), "unconfirmed": True}, damaged)["unconfirmed"]


@pytest.mark.parametrize("lr", [1.0, 3.0])
def test_the_run_goes_back_to_before_the_damage(lr: float, tmp_path: Path) -> None:
    """Every step is more than a hundredth of the run, so that there is a snapshot after the update that did it."""
    config = RunConfig(
        workload="digits-mlp", trace="constant(workers=2)", rule="auto", lr=lr, epochs=20, local_batch=64
    )  # fmt: skip
    run = train(config, tmp_path / "whole")
    back = [row.step for row in run.steps if "given_back" in row.stats]
    assert back
    for step in back:
        before, damaged, again = run.steps[:step], run.steps[step], run.steps[step + 1]
        assert again.loss in [row.loss for row in before], "a state that has been there before"
        assert again.loss < run.steps[0].loss < damaged.loss
    killed_run(config, tmp_path / "killed", at=range(back[0] - 3, back[0] + 2), equals=run)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(SpecError, match="auto: limit is 2; expected 0"):
        make_rule("auto(limit=2)")
    with pytest.raises(SpecError, match="auto: ramp is -1; expected 0"):
        make_rule("auto(ramp=-1)")


@pytest.mark.parametrize("step_time", ["fit", "1h/ep"])
def test_a_rate_that_is_far_too_high_is_survived(step_time: str, tmp_path: Path) -> None:
    """Seventeen times the tuned rate: AdaScale with the same warm-up ends at chance, 10 %."""
    trace = "constant(workers=16, duration=20h)"  # exactly as long as the epochs, were it not for going back
    config = RunConfig(workload="digits-mlp", trace=trace, rule="auto", lr=1.0, epochs=20, step_time=step_time)
    run = train(config, tmp_path)
    assert {event.what for event in run.events} == {"went back"}
    assert run.validations[-1].metrics["accuracy"] > 0.9
    back = [row for row in run.steps if "given_back" in row.stats]
    assert run.end is not None and run.end.samples == 20 * run.header.config["task"]["train_samples"]
    trained = sum(row.batch for row in run.steps) - sum(row.stats["given_back"] for row in back)
    assert trained == run.end.samples, "what was given back was trained on again, and counts once"


@pytest.mark.parametrize("kind", ["trace", "file"])
def test_what_was_given_back_is_trained_beyond_the_end_of_the_plan(kind: str, tmp_path: Path) -> None:
    """1,442 samples are 10 steps of 136 and one of 82, or 11 of 128 and one of 34: 11 + 12 + 12 steps, were it not for
    going back."""
    given: dict[str, Any] = {"trace": "0s:17 11s:16 35s", "step_time": "1s", "local_batch": 8}
    if kind == "file":
        rows = [f"{step},{136 if step < 11 else 128}" for step in range(35)]
        (tmp_path / "plan.csv").write_text("\n".join(["step,batchsize", *rows]))
        given = {"plan": str(tmp_path / "plan.csv"), "local_batch": 8}
    config = RunConfig(workload="digits-mlp", rule="auto", lr=30.0, epochs=3, **given)
    run = train(config, tmp_path / "run")
    assert run.end is not None and (run.status, run.end.samples) == ("finished", 3 * 1442)
    (event,) = [event for event in run.events if event.what == "end of the plan"]
    assert event.step == 35 and event.text.startswith("after 35 steps; what was given back")
    beyond = run.steps[35:]
    assert beyond and {row.workers for row in beyond} == {16}
    assert [row.time_s for row in beyond] == [35.0 + number for number in range(len(beyond))]
    if kind == "file":
        (tmp_path / "plan.csv").write_text("\n".join(["step,batchsize", *rows[:-1]]))
    else:
        config = config.replace(trace="0s:17 11s:16 34s")
    with pytest.raises(PlanError, match=r"its 34 steps \(34\.0 s\) reach 2\.97 of 3 epochs"):
        train(config, tmp_path / "short")


def test_a_probe_that_needs_more_steps_than_the_plan_has_does_not_keep_a_run_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """97 samples are 13 steps, 11 of 8 and two of 7 and 2: a plan of 52 steps is exactly four epochs.

    At the reference batch 2c is above S, so that a probe has two branches, of 4 steps and 2 that score them. Four of
    these twelve steps are kept. It is due after half of the samples, and begins after the first step of the third
    epoch, step 26. The twelve steps are 27 to 38, and step 39 says what came of them.
    """
    for name, value in {"_BRANCH": 4, "_SCORED": 8, "_SCORES": 2, "_COST": 0.8, "_PROBES_AT": (0.5,)}.items():
        monkeypatch.setattr(auto_rule, name, value)
    model = make_model(batch_norm=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Session(
        model, optimizer, TensorSource(*make_data()), rule="auto(guard=false, probe=true)", loss=cross_entropy,
        out=tmp_path, trace="0s:2 52s", step_time="1s", base_batch=8, local_batch=4, epochs=4,
    ) as session:  # fmt: skip
        session.run()
        run = session.record
    assert run.end is not None and (run.status, run.end.steps, run.end.samples) == ("finished", 52 + 8, 4 * SAMPLES)
    assert [(event.what, event.step) for event in run.events] == [("probe", 39), ("end of the plan", 52)]


@pytest.mark.slow
def test_the_report_shows_the_coefficient_and_that_the_run_went_back(tmp_path: Path) -> None:
    config = RunConfig(workload="digits-mlp", trace="constant(workers=16)", rule="auto", lr=1.0, epochs=3)
    train(config, tmp_path / "run")
    write_report(tmp_path / "run", out=tmp_path / "report")
    page = (tmp_path / "report" / "index.html").read_text()
    assert "Coefficient" in page and "Given back" not in page
    assert "went back to a snapshot" in page


# -- the slopes --------------------------------------------------------------------------------------------------------


def risen(left: float, steps: int, state: Any = None, *, adaptive: bool = False) -> list[Any]:
    """The states after steps that leave this part of the slope; in each the level may rise by 0.04, worth 2 of 50."""
    step = replace(STEP, adaptive=adaptive)
    found, state = [], state or AUTO.init()
    for _ in range(steps):
        number = round(state["worth"] / 2)
        slopes = (-1.0, -left) if number else None
        _, state = AUTO.scale(replace(step, step=number, samples=32 * number, slopes=slopes), state)
        state = json.loads(json.dumps(state))
        found.append(state)
    return found


def levels(states: list[Any]) -> list[float]:
    return [state["level"] for state in states]


def test_the_level_goes_on_rising_above_1_while_some_of_the_slope_is_left() -> None:
    """25 steps of 0.04 reach 1, from where each multiplies the level by 1.04, up to 4: 1.04^35 is 3.95."""
    found = levels(risen(0.1, 62))
    assert found[:25] == pytest.approx([0.04 * (number + 1) for number in range(25)])
    assert found[59] == pytest.approx(1.04**35)
    assert found[60:] == pytest.approx([4.0, 4.0])


def test_steps_that_end_near_the_lowest_point_have_the_level_of_the_fixed_rule() -> None:
    assert levels(risen(-0.1, 62))[24:] == pytest.approx([1.0] * 38)
    assert levels(risen(0.0, 40))[-1] == 1.0


def test_steps_that_go_beyond_it_end_the_warm_up_until_some_of_the_slope_is_left() -> None:
    """Five slopes are enough to decide, which the sixth step has, at a level of 0.2; 0.24 is not reached."""
    held = risen(-0.2, 30)
    assert levels(held)[4:] == pytest.approx([0.2] * 26)
    # Less than nothing: it stays. Ten steps of 0.3 after 29 of -0.2 outweigh them, and the level rises by 0.04 again.
    assert levels(risen(-0.1, 20, held[-1]))[-1] == pytest.approx(0.2)
    again = levels(risen(0.3, 20, held[-1]))
    rose = [later - earlier for earlier, later in pairwise(again)]
    assert rose[0] == 0 and rose[-3:] == pytest.approx([0.04] * 3)


def test_with_adam_steps_that_go_beyond_it_halve_the_speed_of_the_warm_up() -> None:
    assert levels(risen(-0.2, 50, adaptive=True))[4:] == pytest.approx([min(1, 0.2 + 0.02 * n) for n in range(46)])
    # It does not fall where it was above 1.
    above = risen(0.1, 40, adaptive=True)
    last = levels(above)[-1]
    assert last > 1.5 and levels(risen(-1.0, 20, above[-1], adaptive=True))[-5:] == pytest.approx([last] * 5)


def test_the_level_is_at_least_an_eighth_and_nothing_changes_after_a_quarter_of_the_run() -> None:
    fine = replace(STEP, total_samples=80_000)  # a step rises by 0.004, and by 0.0016 at the least
    state = AUTO.init()
    for number in range(200):
        slopes = (-1.0, 5.0) if number else None
        _, state = AUTO.scale(replace(fine, step=number, samples=32 * number, slopes=slopes), state)
    assert 0.125 <= state["level"] < 0.13
    assert AUTO.follows_slopes(state)
    _, after = AUTO.scale(replace(fine, samples=20_000 - 32, slopes=(-1.0, -1.0)), state)
    assert not AUTO.follows_slopes(after) and not Auto(slopes=False).follows_slopes(state)
    _, later = AUTO.scale(replace(fine, samples=40_000), after)
    assert later["level"] == after["level"]


def test_with_adam_the_level_rises_twice_as_fast_while_more_than_half_of_the_slope_is_left() -> None:
    """The sixth step is the first one that five slopes speak for."""
    slow, fast = [0.04, 0.08, 0.12, 0.16, 0.2, 0.24, 0.28], [0.04, 0.08, 0.12, 0.16, 0.2, 0.28, 0.36]
    assert levels(risen(0.4, 7, adaptive=True)) == pytest.approx(slow)
    assert levels(risen(0.6, 7, adaptive=True)) == pytest.approx(fast)
    assert levels(risen(0.6, 7)) == pytest.approx(slow)


def test_slopes_that_are_not_finite_or_do_not_go_down_say_nothing() -> None:
    state = AUTO.init()
    for number, slopes in enumerate([None, *[(-1.0, math.nan)] * 10, *[(1.0, 1.0)] * 10]):
        _, state = AUTO.scale(replace(STEP, step=number, samples=32 * number, slopes=slopes), state)
    assert state["level"] == pytest.approx(21 * 0.04)


# -- the probe ---------------------------------------------------------------------------------------------------------

# Steps of 32 samples at S = 4, in a run of 20,000 steps whose epochs have 10,000: nothing is guarded any more. A branch
# has 60 steps, and 64 more of 32 samples score it.
LONG = replace(STEP, samples=160_000, total_samples=640_000, epoch_samples=320_000, workers=4)
PROBING = Auto(guard=False, probe=True)
READY = {**PROBING.init(), "worth": 1e6, "fixed": 2.0, "level": 1.0, "rising": False}


def probed(rule: Auto, losses: dict[int, float], *, workers: dict[int, int] | None = None) -> tuple[list[str], Any]:
    """The verdicts of a probe and the state after it: `losses` by branch while they are scored, else 2."""
    state, verdicts, context = dict(READY), [], LONG
    for number in range(400):
        context = replace(LONG, step=number, workers=(workers or {}).get(number, 4))
        probe = state["probe"]
        scored = probe is not None and probe["steps"] >= 60
        scaling, state = rule.scale(context, state)
        assert (scaling.lr == 0) == scored, "nothing is learned where a branch is scored"
        loss = losses[probe["branch"]] + 0.001 * (number % 3) if scored else 2.0
        verdict, state = rule.review(context, loss, json.loads(json.dumps(state)))
        verdicts.append(verdict)
        if number and state["probe"] is None:
            break
    return verdicts, state


def counted(verdicts: list[str]) -> list[tuple[str, int]]:
    """The verdicts with how often each is repeated."""
    runs: list[tuple[str, int]] = []
    for verdict in verdicts:
        runs = [*runs[:-1], (verdict, runs[-1][1] + 1)] if runs and runs[-1][0] == verdict else [*runs, (verdict, 1)]
    return runs


def test_a_probe_compares_three_coefficients_over_the_same_steps() -> None:
    branch = [("continue", 30), ("average", 29), ("score average", 1), ("continue", 63)]
    verdicts, state = probed(PROBING, {0: 2.0, 1: 1.9, 2: 1.8})
    assert counted(verdicts) == [("branch", 1), *branch, ("lead", 1), *branch, ("lead", 1), *branch, ("adopt last", 1)]
    assert (state["coefficient"], state["probed"], state["probes"]) == (2.0, 2.0, 1)
    # What was computed and not kept: three branches of 124 steps, of which 60 stay.
    scaling, after = AUTO.scale(LONG, state)
    assert (scaling.stats["probed"], after["probed"]) == (2.0, None)
    assert scaling.lr == pytest.approx(4.0), "twice the gain of 2, and at most S = 4"


def test_no_probe_begins_after_the_smaller_last_step_of_an_epoch() -> None:
    """Of 8 samples, 256 steps would have to score a branch; the probe that follows has steps of 32, and 64 of them."""
    last = replace(LONG, samples=640_000 // 2 - 8, batch=8)
    _, state = PROBING.scale(last, dict(READY))
    verdict, state = PROBING.review(last, 2.0, state)
    assert (verdict, state["probe"]) == ("release", None)
    verdict, state = PROBING.review(replace(LONG, samples=320_000), 2.0, state)
    assert (verdict, state["probe"]["scores"]) == ("branch", 64)


@pytest.mark.parametrize(
    ("losses", "coefficient", "verdicts"),
    [
        ({0: 2.0, 1: 1.99, 2: 1.985}, 1.0, ["lead", "next", "adopt"]),  # 0.75 % better at most
        ({0: 2.0, 1: 1.9, 2: 2.5}, 0.5, ["lead", "lead", "adopt"]),
        ({0: 2.0, 1: math.inf, 2: 1.9}, 2.0, ["lead", "next", "adopt last"]),
    ],
)
def test_another_coefficient_must_be_clearly_better(
    losses: dict[int, float], coefficient: float, verdicts: list[str]
) -> None:
    found, state = probed(PROBING, losses)
    assert [one for one in found if one in ("lead", "next", "adopt", "adopt last")] == verdicts
    assert state["coefficient"] == coefficient


def test_a_change_of_the_workers_abandons_a_probe() -> None:
    """In the first branch its steps stay; where it is scored, and later, the run goes on from its end."""
    for number, verdict in {20: "release", 90: "adopt last", 200: "adopt", 300: "adopt"}.items():
        found, state = probed(PROBING, {0: 2.0, 1: 1.0, 2: 1.0}, workers={number: 5})
        assert (len(found), found[-1]) == (number + 1, verdict)
        assert (state["coefficient"], state["probed"]) == (1.0, 0.0)


def test_probes_are_due_only_where_they_fit() -> None:
    def verdict(state: Any = READY, **changes: Any) -> str:
        return PROBING.review(replace(LONG, **changes), 2.0, dict(state))[0]

    assert verdict() == "branch"
    assert verdict(total_samples=0) == "release", "a run without an end has no probes"
    assert verdict(samples=100_000) == "release", "a quarter of the samples are 160,000"
    assert verdict(epoch_samples=3_000) == "release", "a branch takes 124 steps of 32 samples, 3,968"
    assert verdict(samples=320_000 - 3_968) == "release", "it would end in the next epoch"
    # It gives back 2 x 60 + 3 x 64 steps, 9,984 samples, and 5 % of 640,000 are 32,000.
    assert verdict({**READY, "given_back": 22_016}) == "branch"
    assert verdict({**READY, "given_back": 22_017}) == "release"
    assert verdict({**READY, "rising": True}) == "release", "the warm-up"
    assert Auto(guard=False).review(LONG, 2.0, dict(READY))[0] == "release"
    # At the gain of S nothing above it is tried, and without lower ones there is nothing to compare.
    assert Auto(guard=False, probe=True, lower=False).review(LONG, 2.0, {**READY, "fixed": 4.0})[0] == "release"


class Killed(BaseException):
    """A kill -9, as far as the run is concerned."""


def killed_at(step: int) -> Callbacks:
    def on_step(row: Any) -> None:
        if row.step == step:
            raise Killed

    return Callbacks(on_step=on_step)


def killed_run(config: RunConfig, folder: Path, *, at: Sequence[int], equals: Run) -> Run:
    """The run, killed at each of these steps and continued; it has the weights and rows of the uninterrupted one."""
    for step in at:
        with pytest.raises(Killed):
            train(config, folder, callbacks=killed_at(step), checkpoint_every_s=0)
    killed = train(config, folder)
    assert killed.end is not None and equals.end is not None
    assert killed.end.weights_sha256 == equals.end.weights_sha256
    assert [row.stats for row in killed.steps] == [row.stats for row in equals.steps]
    return killed


@pytest.mark.parametrize("optimizer", ["sgd(momentum=0.9)", "adamw"])
def test_a_run_killed_in_its_warm_up_follows_the_same_slopes(optimizer: str, tmp_path: Path) -> None:
    config = RunConfig(
        workload="digits-mlp", trace="constant(workers=8)", rule="auto", epochs=4, lr=0.001, optimizer=optimizer
    )
    whole = train(config, tmp_path / "whole")
    assert sum("slope_left" in row.stats for row in whole.steps) > 10
    assert whole.steps[-1].stats["level"] > 1, "the base rate is too low"
    killed_run(config, tmp_path / "killed", at=(0, 1, 6, 7, 12), equals=whole)


def test_a_run_killed_at_every_step_of_a_probe_equals_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Branches of 4 steps, scored in 2 more: what the account says was given back is what was computed too often."""
    for name, value in {"_BRANCH": 4, "_SCORED": 8, "_SCORES": 2, "_COST": 0.8, "_PROBES_AT": (0.3, 0.6)}.items():
        monkeypatch.setattr(auto_rule, name, value)
    config = RunConfig(
        workload="digits-mlp", trace="constant(workers=16)", rule="auto(limit=0.1, probe=true)", epochs=4, lr=0.01
    )
    whole = train(config, tmp_path / "whole")
    events = [event for event in whole.events if event.what == "probe"]
    assert len(events) == 2
    inside = [row.step for row in whole.steps if "probe" in row.stats]
    assert len(inside) == 2 * 3 * 6

    killed = killed_run(config, tmp_path / "killed", at=inside, equals=whole)
    assert [event for event in killed.events if event.what == "probe"] == events
    computed = sum(row.batch for row in whole.steps)
    assert computed - sum(row.stats.get("given_back", 0) for row in whole.steps) == whole.end.samples
    write_report(tmp_path / "whole", out=tmp_path / "report")
    assert "2 probes, of which" in (tmp_path / "report" / "index.html").read_text()


# -- memory ------------------------------------------------------------------------------------------------------------


def test_without_memory_for_a_state_nothing_is_guarded_and_the_record_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers of 64 x 64 + 64 numbers and one of 64 x 10 + 10, of 4 bytes, are 35,880 bytes: a quarter of 143,520.
    With the momentum a state is twice as large when the first snapshot is due."""
    config = RunConfig(
        workload="digits-mlp(width=64)", trace="constant(workers=2)", rule="auto", lr=3.0, epochs=20, local_batch=64
    )
    monkeypatch.setattr(kept_states, "free_memory", lambda: 2 * 143_520)
    assert {event.what for event in train(config, tmp_path / "enough").events} == {"went back"}
    monkeypatch.setattr(kept_states, "free_memory", lambda: 143_520)
    run = train(config, tmp_path / "short")
    (event,) = run.events
    assert event.what == "large snapshots" and event.step > 0, "the first state, without a momentum, was kept"
    assert event.text == (
        "a state of 7.18e-05 GB takes more than a quarter of the free memory of the host; nothing is guarded or probed "
        "from here on"
    )
    assert not any("given_back" in row.stats for row in run.steps)
    monkeypatch.setattr(kept_states, "free_memory", lambda: 143_519)
    assert [event.step for event in train(config, tmp_path / "none").events] == [0]


def test_processes_that_train_together_keep_a_large_state_and_say_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_states, "free_memory", lambda: 1)
    monkeypatch.setattr(LoopEngine, "single_process", property(lambda self: False, lambda self, value: None))
    run = bad_once("auto", tmp_path)
    assert [event.what for event in run.events] == ["large snapshots", "went back"]
    assert run.events[0].text.endswith("it is kept all the same, since all processes must decide alike")


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"proc/meminfo": "MemTotal: 100 kB\nMemAvailable:   50 kB\n"}, 51_200),
        ({"proc/meminfo": "MemAvailable: 50 kB\n", "sys/fs/cgroup/memory.max": "max\n",
          "sys/fs/cgroup/memory.current": "7\n"}, 51_200),
        ({"proc/meminfo": "MemAvailable: 50 kB\n", "sys/fs/cgroup/memory.max": "1000\n",
          "sys/fs/cgroup/memory.current": "400\n"}, 600),
        ({}, None),
    ],
    ids=["a machine", "a container without a limit", "a container", "another system"],
)  # fmt: skip
def test_free_memory_is_that_of_the_machine_within_the_limit_of_the_container(
    files: dict[str, str], free: int | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_memory(tmp_path) == free


# -- gradients that are not finite -------------------------------------------------------------------------------------


def bad_once(rule: str, folder: Path, *, times: int = 1) -> Run:
    """A session whose loss, and so its gradient, is NaN in so many micro-batches from the first of step 1 on."""
    calls = 0

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        found = cross_entropy(model, x, y)
        return found * math.nan if 3 <= calls < 3 + times else found

    model = make_model(batch_norm=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings: dict[str, Any] = {"trace": "constant(workers=2)", "base_batch": 8, "local_batch": 4, "epochs": 20}
    with Session(
        model, optimizer, TensorSource(*make_data()), rule=rule, loss=loss, engine="loop", out=folder, **settings
    ) as session:  # fmt: skip
        session.run()
        return session.record


def test_the_guard_is_asked_before_a_gradient_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    run = bad_once("auto", tmp_path / "guarded")
    assert run.status == "finished" and {event.what for event in run.events} == {"went back"}
    back = {row.step: row.stats["given_back"] for row in run.steps if "given_back" in row.stats}
    assert back[1] == 16, "two steps of 8 samples: the snapshot is before the first"
    assert run.end is not None and run.end.samples == 20 * SAMPLES
    assert sum(row.batch for row in run.steps) - sum(back.values()) == run.end.samples


@pytest.mark.parametrize("rule", ["auto(guard=false)", "auto(guard=false, probe=true)", "adascale"])
def test_a_gradient_that_is_not_finite_ends_a_run_that_is_not_guarded(rule: str, tmp_path: Path) -> None:
    with pytest.raises(Diverged, match="the norm of the gradient is nan at step 1"):
        bad_once(rule, tmp_path)
    assert read_record(tmp_path / "record.jsonl").status == "diverged"


def test_after_two_restores_a_gradient_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(Diverged):
        bad_once("auto", tmp_path, times=1000)
    run = read_record(tmp_path / "record.jsonl")
    assert [event.what for event in run.events] == ["went back", "went back"]
    assert run.status == "diverged"
