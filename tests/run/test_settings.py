"""Every front end is generated from the fields of `RunConfig`: nothing is declared twice, nothing ignored."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from ebbflow import Session
from ebbflow.errors import ConfigError
from ebbflow.run.config import ENGINE_KINDS, FRONT_ENDS, RunConfig, fields_of, settings_of


def test_a_session_and_the_estimators_show_the_settings_that_they_take() -> None:
    pytest.importorskip("skorch", reason="the estimators need skorch: pip install 'ebbflow[dask]'")
    from ebbflow.sklearn import EbbflowClassifier

    assert set(settings_of("session")) <= set(inspect.signature(Session).parameters)
    assert set(settings_of("estimator")) <= set(inspect.signature(EbbflowClassifier.__init__).parameters)
    made = EbbflowClassifier(clip=0.5, memory_steps=50, measure_every=2, on_nonfinite="skip", precision="bf16")
    assert made.get_params()["clip"] == 0.5


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_what_a_front_end_does_not_offer_is_refused_with_the_reason(front_end: Any) -> None:
    offered = set(settings_of(front_end).values())
    for name in RunConfig.model_fields.keys() - offered:
        with pytest.raises(ConfigError, match=f"{name} is no setting here: .+; leave it out"):
            RunConfig.for_front_end(front_end, {name: None}, workload="mine")
    renamed = {field: shown for shown, field in settings_of(front_end).items() if shown != field}
    for field, shown in renamed.items():
        with pytest.raises(ConfigError, match=f"{field} is called {shown} here"):
            RunConfig.for_front_end(front_end, {field: 1}, workload="mine")
    with pytest.raises(ConfigError, match="unknown setting 'rul'; did you mean 'rule'"):
        RunConfig.for_front_end(front_end, {"rul": "sqrt"}, workload="mine")


@pytest.mark.parametrize("kind", ENGINE_KINDS)
def test_an_engine_refuses_what_it_cannot_follow_and_accepts_the_defaults(kind: Any) -> None:
    RunConfig(workload="mine").check_engine(kind)
    if kind == "emulated":
        RunConfig(workload="mine", batch_norm="sync", fused_batch=64, trace="spot.csv").check_engine(kind)
        return
    for name, value in {"batch_norm": "sync", "fused_batch": 64, "trace": "spot.csv"}.items():
        with pytest.raises(ConfigError, match=f"{name} is {value!r}, but .+; leave it out"):
            RunConfig(workload="mine", **{name: value}).check_engine(kind)


def test_fields_of_gives_the_declaration_under_the_name_of_the_front_end() -> None:
    declared = dict(fields_of("estimator"))
    assert declared["random_state"] is RunConfig.model_fields["seed"]
    assert "trace" not in declared


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"lr": -1}, "lr is -1; expected a number above 0"),
        ({"lr": float("nan")}, "lr is nan; expected a number above 0"),
        ({"lr": "fast"}, "lr is 'fast'; expected a number"),
        ({"epochs": 1.5}, "epochs is 1.5; expected a whole number"),
        ({"epochs": True}, "epochs is True; expected a whole number"),
        ({"precision": "bf17"}, "precision is 'bf17'; did you mean 'bf16'"),
        ({"threads": 0}, "threads is 0; expected 1 or more"),
        ({"loader_workers": -1}, r"loader_workers is -1; expected 0 \(read in this process\) or more"),
        ({"plugins": "a.py"}, r'plugins is \'a.py\'; expected a list of texts, such as \["a.py"\]'),
        ({"step_time": 3}, 'step_time is 3; expected a text, such as "3s": in quotation marks'),
        ({"ema": 1.5}, "ema is 1.5; expected the fraction kept per reference step"),
        ({"nonsense": 1}, "unknown setting 'nonsense'"),
    ],
)
def test_bad_values_are_named_with_what_was_expected(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig(workload="mine", **bad)
    with pytest.raises(ConfigError, match=f"study.toml: {message}"):
        RunConfig.from_mapping({"workload": "mine", **bad}, where="study.toml")


def test_a_number_stays_as_it_was_written_and_old_names_are_understood() -> None:
    assert RunConfig(workload="mine", lr=1).fingerprint() != RunConfig(workload="mine", lr=1.0).fingerprint()
    old = RunConfig.from_mapping({"workload": "mine", "piece": 8, "chunk": 64}, where="study.toml")
    assert (old.micro_batch, old.fused_batch) == (8, 64)
    assert old == RunConfig(workload="mine", micro_batch=8, fused_batch=64)
    assert old.recorded()["piece"] == 8, "records keep their keys"


def test_plugins_may_be_given_as_a_list() -> None:
    assert RunConfig(workload="digits-mlp", plugins=["a.py", "b.py"]).plugins == ("a.py", "b.py")  # type: ignore[arg-type]
