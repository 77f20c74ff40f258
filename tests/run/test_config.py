"""What makes two runs the same run: it decides what may be continued, and which runs of a study are there already."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from ebbflow.errors import ConfigError
from ebbflow.run.config import FrontEnd, RunConfig

TRACE = "time_s,accelerators\n0,4\n60,2\n120,2\n"


def same(first: RunConfig, second: RunConfig) -> bool:
    """By both ways of asking, in both directions."""
    answers = {
        first.fingerprint() == second.fingerprint(),
        not first.differences(second.recorded()),
        not second.differences(first.recorded()),
    }
    assert len(answers) == 1, "fingerprint and differences disagree"
    return answers.pop()


@pytest.mark.parametrize(
    "elsewhere",
    [{"data": "other"}, {"device": "cuda"}, {"compile": True}, {"loader_workers": 3}, {"label": "spot"}],
)
def test_where_and_how_a_run_is_computed_makes_no_other_run(elsewhere: dict[str, Any]) -> None:
    run = RunConfig(workload="digits-mlp")
    assert same(run, run.replace(**elsewhere))


@pytest.mark.parametrize(
    "other",
    [
        {"rule": "sqrt"}, {"seed": 1}, {"epochs": 3}, {"measure_every": 1}, {"trace": "constant(workers=4)"},
        {"threads": 2}, {"micro_batch": 8}, {"workload": "digits-cnn"}, {"policy": "fixed(256)"}, {"repeat": True},
    ],
)  # fmt: skip
def test_any_setting_that_is_computed_with_makes_another_run(other: dict[str, Any]) -> None:
    run = RunConfig(workload="digits-mlp")
    assert not same(run, run.replace(**other))


def test_differences_name_the_setting_and_both_values() -> None:
    run = RunConfig(workload="digits-mlp", rule="sqrt")
    assert run.differences(run.replace(rule="linear").recorded()) == ["rule is 'sqrt', was 'linear'"]


def test_an_arm_is_known_as_it_was_when_linear_was_the_default() -> None:
    """Rows of docs/evidence are found by these identities, in which settings at their default do not occur."""
    trace = hashlib.sha256(b"constant(workers=8)").hexdigest()
    known = hashlib.sha256(json.dumps([{"workload": "digits-mlp"}, "trace", trace]).encode()).hexdigest()
    assert RunConfig(workload="digits-mlp", rule="linear").fingerprint() == known
    assert RunConfig(workload="digits-mlp").fingerprint() != known


def test_a_trace_that_was_moved_is_the_same_and_one_that_was_edited_is_not(tmp_path: Path) -> None:
    here, there = tmp_path / "here.csv", tmp_path / "there.csv"
    here.write_text(TRACE)
    there.write_text(TRACE)
    run = RunConfig(workload="digits-mlp", trace=str(here))
    before = run.recorded()
    assert same(run, run.replace(trace=str(there)))
    here.write_text(TRACE.replace("60,2", "60,3"))
    assert run.differences(before) == [f"the trace is not the one it was ({here})"]
    assert not same(run, run.replace(trace=str(there)))


@pytest.mark.parametrize("front_end", ["command", "session"])
def test_a_trace_beside_a_plan_is_refused_since_nothing_would_follow_it(front_end: FrontEnd) -> None:
    others = {"workload": "mine"} if front_end == "session" else {}
    given = {} if front_end == "session" else {"workload": "digits-mlp"}
    with pytest.raises(
        ConfigError, match=r"trace is 'spot\.csv', but the steps are those of the file b\.csv; leave one"
    ):
        RunConfig.for_front_end(front_end, {**given, "plan": "b.csv", "trace": "spot.csv"}, **others)
    default = RunConfig.model_fields["trace"].default
    assert RunConfig.for_front_end(front_end, {**given, "plan": "b.csv", "trace": default}, **others).plan == "b.csv"


def test_a_plan_is_no_trace_of_the_same_content(tmp_path: Path) -> None:
    file = tmp_path / "file.csv"
    file.write_text("step,batchsize\n0,64\n")
    as_plan = RunConfig(workload="digits-mlp", plan=str(file))
    assert as_plan.fingerprint() != RunConfig(workload="digits-mlp", trace=str(file)).fingerprint()
    assert same(as_plan, as_plan.replace(trace="never played"))


def test_a_record_from_before_a_setting_existed_is_of_a_run_at_its_default() -> None:
    before = RunConfig(workload="digits-mlp").recorded()
    del before["measure_every"]
    assert RunConfig(workload="digits-mlp").differences(before) == []
    assert RunConfig(workload="digits-mlp", measure_every=1).differences(before) == ["measure_every is 1, was 4"]


def test_a_trace_may_be_longer_than_a_path_can_be() -> None:
    text = " ".join(f"{second}s:{1 + second % 3}" for second in range(5000)) + " 5000s"
    assert same(RunConfig(workload="digits-mlp", trace=text), RunConfig(workload="digits-mlp", trace=text))


def test_a_path_is_as_good_as_its_text_in_every_setting(tmp_path: Path) -> None:
    trace, plan, plugin = tmp_path / "spot.csv", tmp_path / "plan.csv", tmp_path / "mine.py"
    trace.write_text(TRACE)
    made = RunConfig(workload="mine", trace=trace, data=tmp_path, plugins=[plugin])
    assert made == RunConfig(workload="mine", trace=str(trace), data=str(tmp_path), plugins=(str(plugin),))
    json.dumps(made.as_dict())
    session = RunConfig.for_front_end("session", {"plan": plan}, workload="Net")
    assert session.plan == str(plan)
    with pytest.raises(ConfigError, match=r"^plugins is '.*mine.py'; expected a list of texts"):
        RunConfig(workload="mine", plugins=plugin)
