"""A scaled study: the same structure, with fewer epochs and narrower models."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbflow.core.spec import parse_calls
from ebbflow.errors import ConfigError
from ebbflow.run.planning import make_plan
from ebbflow.run.training import resolve
from ebbflow.studies.grid import Study, load_study, parse_study, recipe_names
from ebbflow.studies.scaling import scaled, with_stand_in

VALUES: dict[str, Any] = {
    "name": "mine",
    "workloads": ["digits-mlp", "digits-cnn(width=32)"],
    "rules": ["constant", "linear+warmup(5ep)", "lsw", "sqrt+warmup(100steps, start=0)"],
    "traces": {"static": "constant(workers=4)", "square": "square(low=2, high=6, period=1h, duration=4h)"},
    "seeds": [3, 5],
    "settings": {"epochs": 40, "schedule": "warmup(2ep)+multistep(10ep, 30ep, factor=0.2)", "step_time": "0.5s"},
    "override": [
        {"workload": "digits-cnn(width=32)", "rule": "lsw", "set": {"schedule": "cosine(20ep)", "lr": 0.3}},
        {"rule": ["constant", "linear+warmup(5ep)"], "set": {"step_time": "fit"}},
    ],
    "skip": [{"rule": "lsw", "trace": "square"}],
    "paper": [{"source": "x", "workload": "digits-mlp", "rule": "lsw", "values": {"static": 0.9}}],
}


def study(**changes: Any) -> Study:
    return parse_study({**VALUES, **changes}, source="study.toml", folder=None)


def test_epochs_spans_and_step_times_shrink_and_widths_by_the_root() -> None:
    small = scaled(study(), 0.25)
    assert small.settings["epochs"] == 10
    assert small.settings["schedule"] == "warmup(0.5ep)+multistep(2.5ep, 7.5ep, factor=0.2)"
    assert small.settings["step_time"] == "2s"
    # lsw stands for a warm-up of 5 epochs by default, so its length is written out.
    assert small.rules == ("constant", "linear+warmup(1.25ep)", "lsw(length=1.25ep)", "sqrt+warmup(25steps, start=0)")
    # 64 and 32 times the root of 1/4.
    assert small.workloads == ("digits-mlp(width=32)", "digits-cnn(width=16)")
    assert small.scale == small.as_dict()["scale"] == 0.25


def test_the_structure_stays_and_selectors_follow_the_new_names() -> None:
    whole, small = study(), scaled(study(), 0.25)
    assert small.traces == whole.traces
    assert small.seeds == whole.seeds
    assert len(small.arms()) == len(whole.arms()) == 2 * (2 * 2 * 4 - 2)
    cnn = [arm.config for arm in small.arms() if arm.config.workload == "digits-cnn(width=16)"]
    assert {config.lr for config in cnn if config.rule == "lsw(length=1.25ep)"} == {0.3}
    assert {config.schedule for config in cnn if config.rule == "lsw(length=1.25ep)"} == {"cosine(5ep)"}
    assert {config.step_time for config in cnn if config.rule == "constant"} == {"fit"}
    assert (small.paper[0].workload, small.paper[0].rule) == ("digits-mlp(width=32)", "lsw(length=1.25ep)")
    same = ("local_batch", "ref_batch", "lr", "optimizer", "policy", "seed", "label", "validate_every")
    for before, after in zip(whole.arms(), small.arms(), strict=True):
        for name in same:
            assert getattr(before.config, name) == getattr(after.config, name)


def test_what_the_study_leaves_to_the_workload_shrinks_too() -> None:
    small = scaled(study(workloads=["cifar10-vgg16"], settings={}, override=[], paper=[]), 0.1)
    config = small.arms()[0].config
    assert (config.workload, config.epochs) == ("cifar10-vgg16(width=24)", 9)
    assert config.schedule == "multistep(3ep, 6ep, 8ep, factor=0.1)"


def test_the_whole_study_is_itself_and_an_unscaled_one_does_not_mention_it() -> None:
    assert scaled(study(), 1) == study()
    assert "scale" not in study().as_dict()


def test_scaled_names_are_different_so_that_folders_are() -> None:
    assert scaled(study(), 0.25).name == "mine-x0.25"


def test_epochs_are_rounded_and_the_spans_follow_what_comes_out() -> None:
    small = scaled(study(), 0.01)  # 0.4 epochs of 40: at least one, which is 1/40
    assert small.settings["epochs"] == 1
    assert small.rules[1] == "linear+warmup(0.125ep)"
    assert small.settings["step_time"] == "20s"


def test_runs_of_different_lengths_must_shrink_by_the_same_part() -> None:
    two = study(settings={}, override=[{"workload": "digits-mlp", "set": {"epochs": 40}}])  # the other has its own 10
    assert {arm.config.epochs for arm in scaled(two, 0.1).arms()} == {4, 1}
    with pytest.raises(ConfigError, match=r"runs of 10 and 40 epochs scaled by 0.12 would take 1 and 5 .* such as 0.1"):
        scaled(two, 0.12)


def test_a_scale_at_which_two_widths_become_one_is_refused() -> None:
    # 64 and 32 times the root of 1/50 are 9.1 and 4.5: both are 8, the least width.
    two = study(workloads=["digits-mlp", "digits-mlp(width=32)"], override=[])
    with pytest.raises(ConfigError, match=r"two workloads .* digits-mlp\(width=32\) becomes digits-mlp\(width=8\)"):
        scaled(two, 0.02)
    assert scaled(two, 0.02, same_models=True).workloads == two.workloads


@pytest.mark.parametrize("factor", [0, -1, 1.5, float("nan"), float("inf")])
def test_a_scale_that_is_no_fraction_is_refused(factor: float) -> None:
    with pytest.raises(ConfigError, match="expected a fraction of the study"):
        scaled(study(), factor)


def test_a_plan_of_steps_cannot_be_scaled() -> None:
    planned = study(settings={"epochs": 10, "plan": "steps.csv"})
    with pytest.raises(ConfigError, match=r"plan steps.csv counts steps"):
        scaled(planned, 0.5)


@pytest.mark.parametrize("name", recipe_names())
@settings(max_examples=5)
@given(factor=st.sampled_from([0.02, 0.1, 0.2, 0.5, 0.9, 1.0]))
def test_every_recipe_keeps_its_structure_at_every_scale(name: str, factor: float) -> None:
    whole = load_study(name)
    small = scaled(whole, factor)
    assert len(small.arms()) == len(whole.arms())
    assert [a.config.label for a in small.arms()] == [a.config.label for a in whole.arms()]
    for before, after in zip(whole.arms(), small.arms(), strict=True):
        names = [[call.name for call in parse_calls(arm.config.rule)] for arm in (before, after)]
        assert names[0] == names[1]
        long, short = resolve(before.config), resolve(after.config)
        assert long.epochs is not None and short.epochs is not None
        assert short.epochs == max(1, round(long.epochs * factor))
        assert (short.local_batch, short.ref_batch, short.lr) == (long.local_batch, long.ref_batch, long.lr)


def test_a_scaled_run_sees_the_same_workers_in_the_same_order() -> None:
    whole, small = (s.arms()[2].config for s in (load_study("andre-table1"), scaled(load_study("andre-table1"), 0.1)))
    before, after = (make_plan(resolve(config), 1_281_167)[0] for config in (whole, small))
    assert list(before.workers) == list(after.workers)


def test_a_scaled_rule_has_a_name_that_can_be_read() -> None:
    # 90 epochs at 0.05 are 4.5, rounded to 4: 5 x 4/90 = 0.2222...
    assert scaled(load_study("andre-table1"), 0.05).rules[0] == "linear+warmup(0.222222ep)"


# Stand-ins ------------------------------------------------------------------------------------------------------------

BIG: dict[str, Any] = {
    "name": "big",
    "workloads": ["cifar10-resnet18", "cifar10-vgg16"],
    "rules": ["constant", "linear"],
    "traces": {"static": "constant(workers=8)", "step": "step(2, factor=4)"},
    "settings": {"epochs": 40, "local_batch": 64, "ref_batch": 128, "micro_batch": 16, "lr": 0.4, "repeat": True},
    "override": [
        {"rule": "linear", "set": {"lr": 0.1}},
        {"workload": "cifar10-vgg16", "set": {"policy": "fixed(256)"}},
        {"workload": ["cifar10-resnet18", "cifar10-vgg16"], "trace": "step", "set": {"clip": 1.0}},
    ],
    "skip": [{"workload": "cifar10-vgg16", "trace": "static"}],
    "paper": [
        {"source": "x", "workload": name, "rule": "linear", "values": {"step": 0.9}}
        for name in ("cifar10-resnet18", "cifar10-vgg16")
    ],
    "stand_in": {
        "both": {
            "workloads": {"cifar10-resnet18": "digits-cnn", "cifar10-vgg16": "digits-mlp"},
            "divide": 32,
            "traces": {"step": "step(1, factor=4)"},
            "settings": {"step_time": "2s"},
        },
        "one": {"workloads": {"cifar10-resnet18": "digits-mlp"}, "divide": 16, "lr": 0.1},
        "same": {"divide": 2},
    },
}


def big(**changes: Any) -> Study:
    return parse_study({**BIG, **changes}, source="big.toml", folder=None)


def test_a_stand_in_divides_every_batch_and_all_rates_alike() -> None:
    small = with_stand_in(big(), "both")
    assert small.workloads == ("digits-cnn", "digits-mlp")
    assert (small.name, small.as_dict()["stand_in"]) == ("big-both", "both")
    # 64, 128, 16 over 32 are 2, 4 and 0.5, at least 1; 0.4 / 32 = 0.0125 and, in the override, 0.1 / 32 = 0.003125.
    for arm in small.arms():
        config = arm.config
        assert (config.local_batch, config.ref_batch, config.micro_batch, config.step_time) == (2, 4, 1, "2s")
        assert config.lr == (0.003125 if config.rule == "linear" else 0.0125)
        assert config.policy == ("fixed(8)" if config.workload == "digits-mlp" else "follow")
        assert config.trace == {"static": "constant(workers=8)", "step": "step(1, factor=4)"}[config.label]
        assert config.clip == (1.0 if config.label == "step" else None)
    assert len(small.arms()) == len(big().arms()) == 6
    assert [value.workload for value in small.paper] == ["digits-cnn", "digits-mlp"]


def test_a_stand_in_divides_the_limits_of_policies() -> None:
    override = [{"rule": "linear", "set": {"policy": "geo(60ep, factor=5, initial=256, max_batch=5120)"}}]
    small = with_stand_in(big(override=override, settings={"policy": "capped(max_batch=1000)"}), "both")
    assert {(arm.config.rule, arm.config.policy) for arm in small.arms()} == {
        ("linear", "geo(60ep, factor=5, initial=8, max_batch=160)"),
        ("constant", "capped(max_batch=31)"),
    }


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("fixed(256)", "fixed(8)"),
        ("fixed(total=256)", "fixed(total=8)"),
        ("follow(64)", "follow(2)"),
        ("drop(64, parts=4)", "drop(2, parts=4)"),
        ("capped(64, max_batch=none, max_workers=8)", "capped(2, max_batch=none, max_workers=8)"),
        ("pada(rate=0.5, local_batch=64)", "pada(rate=0.5, local_batch=2)"),
    ],
)
def test_a_stand_in_divides_the_batches_of_policies_named_or_not(policy: str, expected: str) -> None:
    small = with_stand_in(big(override=[], settings={"policy": policy}), "both")
    assert {arm.config.policy for arm in small.arms()} == {expected}


def test_a_stand_in_has_a_rate_of_its_own_and_leaves_out_what_it_does_not_name() -> None:
    small = with_stand_in(big(), "one")
    assert small.workloads == ("digits-mlp",)
    # 0.1 for 0.4: every rate is a quarter, that of the override as well.
    assert {(arm.config.rule, arm.config.lr) for arm in small.arms()} == {("constant", 0.1), ("linear", 0.025)}
    assert len(small.arms()) == 4
    assert [value.workload for value in small.paper] == ["digits-mlp"]
    assert {arm.config.clip for arm in small.arms() if arm.config.label == "step"} == {1.0}
    assert with_stand_in(big(), "same").workloads == big().workloads
    assert scaled(small, 0.5).stand_in == "one"
    assert "stand_in" not in big().as_dict()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"workload": {}}, "unknown key 'workload'; did you mean 'workloads'"),
        ({"workloads": {"cifar10-resnet": "digits-mlp"}}, "'cifar10-resnet' is not in the workloads of the study"),
        ({"traces": {"steps": "constant(1)"}}, "'steps' is not in the traces of the study; did you mean 'step'"),
        ({"divide": 0}, "divide is 0; expected a whole number above 0"),
        ({"lr": "0.1"}, "lr is '0.1'; expected a number above 0"),
        (3, "stand_in.x is 3; expected a table with the keys"),
    ],
)
def test_a_wrong_stand_in_is_refused_when_the_study_is_read(table: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        big(stand_in={"x": table})


def test_a_stand_in_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"big.toml has no stand-in 'tow'; .*both, one, same"):
        with_stand_in(big(), "tow")
    with pytest.raises(ConfigError, match="it has none: give data with --set data=PATH"):
        with_stand_in(study(), "digits")
    twice = {"workloads": dict.fromkeys(BIG["workloads"], "digits-mlp")}
    with pytest.raises(ConfigError, match="two workloads the same name: digits-mlp, digits-mlp"):
        with_stand_in(big(stand_in={"x": twice}), "x")
    with pytest.raises(ConfigError, match="lr is missing from the settings"):
        with_stand_in(big(settings={}, stand_in={"x": {"lr": 0.1}}), "x")


def test_a_time_per_epoch_is_scaled_so_that_the_run_covers_the_same_part_of_its_trace() -> None:
    small = scaled(study(settings={"epochs": 40, "step_time": "1h/ep"}, override=[]), 0.25)
    assert (small.settings["epochs"], small.settings["step_time"]) == (10, "14400s/ep")
