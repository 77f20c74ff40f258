from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ebbflow.errors import ConfigError, EbbflowError
from ebbflow.studies.study import check_arms, load_study, parse_study, recipe_names

MINIMAL: dict[str, Any] = {
    "workloads": ["digits-mlp"],
    "rules": ["constant", "linear+warmup(1ep)"],
    "traces": {"static": "constant(workers=4)", "spot": "gcp-a100-like(seed=1)"},
    "seeds": 2,
}


def parse(**changes: Any) -> Any:
    return parse_study({**MINIMAL, **changes}, source="study.toml", folder=None)


def test_the_grid_is_the_product_with_seeds_outermost() -> None:
    arms = parse().arms()
    assert len(arms) == 2 * 2 * 2
    assert [arm.config.seed for arm in arms] == [0] * 4 + [1] * 4
    assert (arms[1].config.label, arms[1].config.rule) == ("static", "linear+warmup(1ep)")
    assert len({arm.id for arm in arms}) == 8


def test_arm_names_are_readable_and_different_for_different_settings() -> None:
    first, second = parse().arms()[3], parse(settings={"lr": 0.2}).arms()[3]
    assert first.id.startswith("digits-mlp_spot_linear+warmup-1ep_s0_")
    assert first.id != second.id


def test_an_override_touches_the_runs_that_match() -> None:
    study = parse(settings={"epochs": 3}, override=[{"rule": "constant", "trace": "spot", "set": {"lr": 0.5}}])
    changed = [(arm.config.rule, arm.config.label) for arm in study.arms() if arm.config.lr == 0.5]
    assert changed == [("constant", "spot")] * 2
    assert {arm.config.epochs for arm in study.arms()} == {3}


@pytest.mark.parametrize("suffix", [".toml", ".yaml"])
def test_files_of_both_kinds_with_paths_relative_to_the_file(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "mine.csv").write_text("time_s,accelerators\n0,4\n60,2\n120,2\n")
    content = {
        ".toml": 'workloads = "digits-mlp"\nrules = ["linear"]\n[traces]\nmine = "mine.csv"\n[settings]\nepochs = 2\n',
        ".yaml": "workloads: digits-mlp\nrules: [linear]\ntraces:\n  mine: mine.csv\nsettings:\n  epochs: 2\n",
    }[suffix]
    path = tmp_path / f"study{suffix}"
    path.write_text(content)
    study = load_study(str(path))
    assert study.name == "study"
    assert study.traces == {"mine": str(tmp_path / "mine.csv")}
    check_arms(study.arms())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rule": []}, "unknown key 'rule'; did you mean 'rules'"),
        ({"rules": []}, "rules is .*expected a list"),
        ({"rules": ["linear", "linear"]}, "has an entry twice"),
        ({"workloads": 3}, "workloads is 3"),
        ({"traces": {}}, "traces is"),
        ({"seeds": 0}, "seeds is 0; expected how many"),
        ({"seeds": [1, 1]}, "entry twice"),
        ({"seeds": True}, "seeds is True"),
        ({"settings": {"epoch": 3}}, "unknown setting 'epoch'; did you mean 'epochs'"),
        ({"settings": {"epochs": "3"}}, "epochs is '3'; expected a whole number"),
        ({"settings": {"epochs": 0}}, "epochs is 0"),
        ({"settings": {"repeat": 1}}, "repeat is 1; expected true or false"),
        ({"settings": {"on_change": "drop"}}, "on_change is 'drop'"),
        ({"settings": 5}, "settings is 5"),
        ({"override": [{"rule": "linear"}]}, "lacks its settings"),
        ({"override": [{"rules": "linear", "set": {}}]}, "unknown key 'rules'"),
        ({"override": 3}, "expected ..override.. tables"),
    ],
)
def test_what_is_wrong_in_a_study_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rules": ["liner"]}, "did you mean 'linear'"),
        ({"traces": {"a": "gcp-a10-like"}}, "did you mean 'gcp-a100-like'"),
        ({"workloads": ["digits"]}, "unknown workload 'digits'"),
        ({"settings": {"plugins": ["none.py"]}}, "none.py does not exist"),
    ],
)
def test_names_are_checked_before_anything_is_started(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EbbflowError, match=message):
        check_arms(parse(**changes).arms())


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a study file"):
        load_study("demoo")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_study(str(tmp_path / "none.toml"))
    broken = tmp_path / "broken.toml"
    broken.write_text("rules = }")
    with pytest.raises(ConfigError, match=r"broken\.toml: .*line 1"):
        load_study(str(broken))
    listed = tmp_path / "list.yaml"
    listed.write_text("- a\n- b\n")
    with pytest.raises(ConfigError, match="found list"):
        load_study(str(listed))


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_can_be_run(name: str) -> None:
    check_arms(load_study(name).arms())
