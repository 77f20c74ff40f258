from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from ebbflow.errors import ConfigError, EbbflowError
from ebbflow.studies.grid import (
    Study,
    check_arms,
    load_study,
    parse_study,
    recipe_names,
    recipe_text,
    study_text,
    with_plugins,
    with_settings,
)
from ebbflow.studies.scaling import scaled, with_stand_in

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
    path.write_text(content, encoding="utf-8-sig")  # as editors on Windows write it
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
        ({"settings": {"rule": "sqrt"}}, "rule is not a setting, it is given by rules"),
        ({"override": [{"trace": "spot", "set": {"seed": 3}}]}, "seed is not a setting, it is given by seeds"),
        ({"settings": {"epoch": 3}}, "unknown setting 'epoch'; did you mean 'epochs'"),
        ({"settings": {"epochs": "3"}}, "epochs is '3'; expected a whole number$"),
        ({"settings": {"step_time": 5}}, 'step_time is 5; expected a text, such as "5s": in quotation marks'),
        ({"settings": {"data": 2024}}, 'data is 2024; expected a text, such as "2024": in quotation marks'),
        (
            {"settings": {"plugins": "mine.py"}},
            r"plugins is 'mine.py'; expected a list of texts, such as .\"mine.py\".",
        ),
        ({"settings": {"epochs": 0}}, "epochs is 0"),
        ({"settings": {"repeat": 1}}, "repeat is 1; expected true or false"),
        ({"settings": {"on_change": "drop"}}, "on_change is 'drop'"),
        ({"settings": 5}, "settings is 5"),
        ({"override": [{"rule": "linear"}]}, "lacks its settings"),
        ({"override": [{"rules": "linear", "set": {}}]}, "unknown key 'rules'"),
        ({"override": 3}, "expected ..override.. tables"),
        ({"override": [{"rule": "liner", "set": {}}]}, "override: no rule of the study is 'liner'"),
        ({"skip": [{"trace": ["static", "spto"]}]}, "skip: no trace of the study is 'spto'; did you mean 'spot'"),
        ({"skip": [{"set": {}}]}, "skip: unknown key 'set'"),
        ({"skip": [{"rule": ["constant", "linear+warmup(1ep)"]}]}, "skip leaves nothing to run"),
        ({"paper": 1}, "expected ..paper.. tables"),
        ({"paper": [{"rule": "constant", "table": 1}]}, "paper: unknown key 'table'"),
        ({"paper": [{"rule": "sqrt", "source": "x", "values": {}}]}, "paper: rule is 'sqrt'"),
        (
            {"paper": [{"rule": "constant", "what": "epochs"}]},
            "study.toml: paper: what is 'epochs'; did you mean 'epochs to",
        ),
        (
            {"paper": [{"rule": "constant", "what": "hours to 1"}]},
            "paper: what is 'hours to 1'; 'hours' to a target is",
        ),
        ({"paper": [{"rule": "constant", "values": {}}]}, "needs source"),
        ({"paper": [{"rule": "constant", "source": "x", "values": {"spto": 1}}]}, "'spto' = 1; .*did you mean 'spot'"),
        (
            {"paper": [{"rule": "constant", "source": "x", "values": {"spot": "1"}}]},
            "'spot' = '1'; expected a finite number$",
        ),
        (
            {"paper": [{"rule": "constant", "source": name, "values": {"spot": 0.9}} for name in ("x", "y")]},
            "'spot': constant has a published value of metric twice",
        ),
        ({"seeds": 100_000_000}, "seeds is 100000000; expected how many .3., up to 10,000"),
        (
            {"paper": [{"rule": "constant", "source": "x", "what": "epochs to 0.9", "values": {"spot": "N/A"}}]},
            "^study.toml: paper: 'spot' = 'N/A'; expected a finite number, or .never. for a target",
        ),
    ],
)
def test_what_is_wrong_in_a_study_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(**changes)


def test_what_is_missing_is_said_to_be_missing() -> None:
    for key in ("traces", "rules", "workloads"):
        with pytest.raises(ConfigError, match=f"{key} is missing; expected a"):
            parse_study({name: value for name, value in MINIMAL.items() if name != key}, source="s.toml", folder=None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rules": ["liner"]}, "did you mean 'linear'"),
        ({"traces": {"a": "gcp-a10-like"}}, "did you mean 'gcp-a100-like'"),
        ({"workloads": ["digits"]}, "unknown workload 'digits'"),
        ({"settings": {"plugins": ["none.py"]}}, "none.py does not exist"),
        ({"settings": {"optimizer": "sdg"}}, "unknown optimizer 'sdg'; did you mean 'sgd'"),
        ({"settings": {"optimizer": "sgd(nesterov=true)"}}, "cannot be made: Nesterov momentum requires a momentum"),
        ({"settings": {"engine": "fussed"}}, "engine is 'fussed'; did you mean 'fused'"),
        ({"settings": {"tracker": "tenserboard"}}, "tracker is 'tenserboard'; did you mean 'tensorboard'"),
        ({"settings": {"schedule": "cosin"}}, "unknown schedule 'cosin'; did you mean 'cosine'"),
        ({"settings": {"step_time": "5"}}, "step_time: duration '5' has no unit; write 5s"),
        ({"settings": {"offset": "noon"}}, "offset: duration 'noon' is not a number with a unit"),
        ({"settings": {"offset": "fit"}}, "offset: duration 'fit' is not a number with a unit"),
        ({"override": [{"rule": "constant", "set": {"schedule": "multistep(3)"}}]}, "'3' has no unit; write 3ep"),
        ({"workloads": ["digits-mlp(width=0)"]}, "digits-mlp: width is 0; expected 1 or more"),
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


def test_a_key_that_is_given_twice_is_refused_in_yaml_as_in_toml(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text("workloads: digits-mlp\nrules: [linear]\nrules: [sqrt]\ntraces: {a: constant}\n")
    with pytest.raises(ConfigError, match=r"twice\.yaml: rules is given twice .*line 3"):
        load_study(path)
    path.write_text(
        "workloads: digits-mlp\nrules: [linear]\ntraces: {a: constant(workers=2), a: constant(workers=3)}\n"
    )
    with pytest.raises(ConfigError, match=r"twice\.yaml: a is given twice"):
        load_study(path)


def test_a_rate_with_an_exponent_is_a_number_in_yaml(tmp_path: Path) -> None:
    path = tmp_path / "rate.yaml"
    head = "workloads: digits-mlp\nrules: linear\ntraces: {1e: constant, e3: constant, 1ep: constant}\nsettings: "
    for text, number in (("1e-3", 0.001), ("2.5E-2", 0.025), ("1e0", 1.0), ("1.0e-3", 0.001)):
        path.write_text(head + f"{{lr: {text}}}\n")
        study = load_study(path)
        assert study.settings["lr"] == number
        assert list(study.traces) == ["1e", "e3", "1ep"]


def test_skipped_runs_are_not_in_the_grid_and_lists_select_several() -> None:
    study = parse(
        skip=[{"rule": "constant", "trace": "spot"}, {"seed": [1, 2], "trace": "static"}],
        seeds=3,
        override=[{"seed": [0, 2], "set": {"lr": 0.5}}],
    )
    # 3 seeds x 2 traces x 2 rules, less one rule on spot in each seed, less two static rules in two seeds.
    assert len(study.arms()) == 12 - 3 - 4
    assert {arm.config.seed for arm in study.arms() if arm.config.lr == 0.5} == {0, 2}
    assert study.as_dict()["skip"] == [{"rule": "constant", "trace": "spot"}, {"seed": [1, 2], "trace": "static"}]


def test_published_values_are_cells_of_the_grid() -> None:
    rows = [{"source": "Somebody 2022", "rule": "constant", "values": {"static": 0.9, "spot": 1}}]
    assert parse(paper=rows).as_dict()["paper"] == [
        {"workload": "digits-mlp", "trace": trace, "rule": "constant", "value": value, "source": "Somebody 2022",
         "what": "metric"}
        for trace, value in (("static", 0.9), ("spot", 1.0))
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="paper: workload is None"):
        parse(paper=rows, workloads=["digits-mlp", "digits-cnn"])
    assert "paper" not in parse().as_dict()


def test_published_targets_and_other_scores_are_kept_and_written_again() -> None:
    row = {"source": "Somebody 2022", "rule": "constant"}
    study = parse(
        paper=[
            {**row, "what": "seconds to 0.950", "values": {"static": 579, "spot": "never"}},
            {**row, "what": "pixel_accuracy", "values": {"static": 0.7899}},
        ]
    )
    found = [(value.what, value.trace, value.value) for value in study.paper]
    assert found == [
        ("seconds to 0.95", "static", 579.0),
        ("seconds to 0.95", "spot", "never"),
        ("pixel_accuracy", "static", 0.7899),
    ]
    assert written_again(study).paper == study.paper
    assert json.loads(json.dumps(study.as_dict()))["paper"][1]["value"] == "never"


def test_settings_are_given_as_texts_and_overrides_still_win() -> None:
    study = parse(settings={"epochs": 3}, override=[{"rule": "constant", "set": {"lr": 0.5}}])
    changed = with_settings(study, ["epochs=7", "device = cuda:1", "lr=0.25", "repeat=true", 'step_time="0.6s"'])
    config = changed.arms()[1].config
    assert (config.epochs, config.device, config.lr, config.repeat, config.step_time) == (
        7,
        "cuda:1",
        0.25,
        True,
        "0.6s",
    )
    assert changed.arms()[0].config.lr == 0.5
    for text, message in (("epochs", "has no value"), ("=3", "has no value"), ("epoch=3", "did you mean 'epochs'"),
                          ("epochs=many", "expected a whole number"),
                          ("rule=sqrt", "rule is not a setting, it is given by rules")):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            with_settings(study, [text])


def test_plugins_are_added_to_those_of_the_study_and_leave_its_arms_the_same() -> None:
    study = parse(settings={"plugins": ["theirs.py"]})
    more = with_plugins(study, ["mine.py"])
    assert {arm.config.plugins for arm in more.arms()} == {("theirs.py", "mine.py")}
    assert [arm.id for arm in more.arms()] == [arm.id for arm in study.arms()]


def test_a_recipe_s_file_can_be_begun_from(tmp_path: Path) -> None:
    mine = tmp_path / "demo.toml"
    mine.write_text(recipe_text("demo"))
    assert load_study(str(mine)).as_dict() == load_study("demo").as_dict()
    with pytest.raises(ConfigError, match="'dmo' is not a recipe; did you mean 'demo'"):
        recipe_text("dmo")


def written_again(study: Study) -> Study:
    return parse_study(tomllib.loads(study_text(study)), source="study.toml", folder=None)


@pytest.mark.parametrize("name", recipe_names())
def test_the_text_of_a_study_gives_the_same_runs_and_published_values(name: str) -> None:
    study = load_study(name)
    for one in (study, *(with_stand_in(study, stand_in) for stand_in in study.stand_ins)):
        again = written_again(one)
        assert again.arms() == one.arms()
        assert set(again.paper) == set(one.paper)
    assert written_again(study).stand_ins == study.stand_ins


def test_the_text_of_a_scaled_study_keeps_the_published_targets() -> None:
    small = scaled(load_study("lena-table1"), 0.1)
    again = written_again(small)
    assert again.paper == small.paper
    never = {(value.rule, value.what) for value in again.paper if value.value == "never"}
    # Linear scaling and AdaScale at 16,384 samples: epochs, updates and seconds of each.
    assert len(never) == 6 and ("linear+warmup(0.55ep, start=0)", "epochs to 0.95") in never


@pytest.mark.parametrize("name", recipe_names())
def test_the_text_of_a_smaller_study_or_of_one_on_other_data_says_that_it_is_one(name: str) -> None:
    study = load_study(name)
    for one in (scaled(study, 0.5), *(with_stand_in(study, stand_in) for stand_in in study.stand_ins)):
        again = written_again(one)
        assert (again.scale, again.stand_in) == (one.scale, one.stand_in)
        assert again.as_dict() == one.as_dict()  # what study.json keeps, from which a report says what is comparable
    assert "made_from" not in study_text(study)


@pytest.mark.parametrize(
    ("made_from", "says"),
    [
        ({"scale": 2}, "made_from: scale is 2; expected a fraction of the study, above 0 and at most 1"),
        ({"scale": "half"}, "made_from: scale is 'half'"),
        ({"stand_in": ""}, "made_from: stand_in is ''; expected the name of a stand-in"),
        ({"scal": 0.1}, "made_from: unknown key 'scal'; did you mean 'scale'"),
        ("digits", "made_from is 'digits'; expected a table"),
    ],
)
def test_what_a_study_was_made_from_is_checked(made_from: object, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        parse(made_from=made_from)


def test_the_text_of_a_study_keeps_odd_names_and_values() -> None:
    study = parse(
        name='a "quoted" \\ name\x7f', traces={"64 at first": "constant(workers=4)", "ü.": "constant(workers=2)"},
        seeds=[3, 1], settings={"lr": 1e-5},
        override=[{"trace": ["ü."], "rule": "constant", "set": {"epochs": 3}}], skip=[{"seed": 1, "trace": "ü."}],
    )  # fmt: skip
    again = written_again(study)
    assert (again.arms(), again.name, again.seeds) == (study.arms(), study.name, study.seeds)


def test_a_trace_can_be_written_as_its_changes(tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    changes = " ".join(f"{60 * i}s:{i % 7 + 1}" for i in range(400))  # longer than a file name can be
    path.write_text(f'workloads = "digits-mlp"\nrules = "linear"\n[traces]\nmine = """{changes}\n  24000s"""\n')
    study = load_study(str(path))
    check_arms(study.arms())
    with pytest.raises(EbbflowError, match=r"'60s:two' in trace .* is not time:count"):
        check_arms(parse(traces={"mine": "0s:1 60s:two 90s"}).arms())
