"""A tournament of rules: what is written, what bad input gives, and that a kill costs nothing but time."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import ebbflow
from ebbflow import RunConfig, train
from ebbflow.core.choices import read_choice
from ebbflow.errors import ConfigError, InputError
from ebbflow.rules.families import fallback_rule
from ebbflow.studies.choosing import choose, parse_budget
from ebbflow.studies.halving import Candidate
from ebbflow.studies.tournament import ChooseProgress, Chosen, Tournament, _ArmScore

TRACE = "random-levels(minimum=1, maximum=6, every=60s, duration=20min, seed=3)"
RULES = ["sqrt+statewarmup(0.05, by=multiplier)", "linear+warmup(1ep)"]

PLUGIN = '''
import torch
import ebbflow
from ebbflow.workloads import DatasetSource, Recipe, Task, TensorSource

def task(recipe, metric):
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    y = (x.sum(1) > 0).long()
    source = TensorSource(x, y)
    return Task(model=torch.nn.Linear(4, 2), train=source, valid=source, recipe=recipe, scores=metric)

RECIPE = Recipe(ref_batch=8, local_batch=4, lr=0.1, optimizer="adamw", schedule="cosine", epochs=4, metric="score")

@ebbflow.register_workload("constant-score", recipe=RECIPE)
def constant_score(recipe: Recipe) -> Task:
    """A metric that is the same whatever the model does."""
    return task(recipe, lambda model, x, y: {"score": torch.tensor(0.5)})

@ebbflow.register_workload("not-finite", recipe=RECIPE)
def not_finite(recipe: Recipe) -> Task:
    """A loss that is not a number."""
    def loss(model, x, y):
        return model(x).sum() * float("nan")
    found = task(recipe, lambda model, x, y: {"score": torch.tensor(0.5)})
    import dataclasses
    return dataclasses.replace(found, loss=loss)

@ebbflow.register_workload("broken", recipe=RECIPE)
def broken(recipe: Recipe) -> Task:
    """A model that cannot be built."""
    raise ValueError("no such layer")
'''


def tournament(out: Path, workload: Any = "digits-mlp(width=8)", **changes: Any) -> Chosen:
    values = {
        "trace": TRACE,
        "budget": "10min",
        "rules": RULES,
        "rates": [1, 0.25],
        "seeds": 1,
        "epochs": 20,
        "jobs": 2,
    }
    return choose(workload, out=out, **{**values, **changes})


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("plugin") / "plugin.py"
    path.write_text(PLUGIN, encoding="utf-8")
    return [str(path)]


@pytest.mark.process
def test_a_tournament_ends_with_a_ranking_a_page_and_a_choice_and_then_has_nothing_to_do(tmp_path: Path) -> None:
    seen: list[ChooseProgress] = []
    found = tournament(tmp_path / "out", seeds=2, on_progress=seen.append)
    # 20 epochs give rungs of 1, 3 and 9; of four candidates two go on, and the same two again.
    assert [rung["epochs"] for rung in found.answer["rungs"]] == [1, 3, 9]
    assert [rung["candidates"] for rung in found.answer["rungs"]] == [4, 2, 2]
    ranking = found.answer["ranking"]
    assert [row["place"] for row in ranking] == [1, 2, 3, 4]
    assert [row["epochs"] for row in ranking] == [9, 9, 1, 1]
    assert ranking[0]["score"] > ranking[1]["score"] - 1e-12
    # There is time for a second seed of both, whose one degree of freedom is too little for an interval.
    assert all((row["seeds"], row["margin"]) == (2, None) for row in ranking[:2])
    assert found.answer["decided_by"] == "tournament"
    assert (found.choice.rule, found.choice.lr) == (ranking[0]["rule"], ranking[0]["lr"])
    written = read_choice(found.path)
    assert (written.settings, written.source) == (found.choice.settings, found.choice.source)
    assert [row["rule"] for row in written.ranking] == [row["rule"] for row in ranking]
    assert seen[-1].leader.startswith(f"{found.choice.rule}, rate x{found.answer['rate']:g}: accuracy 0.")
    cost = found.answer["cost"]
    assert cost["epochs"] == sum(rung["epochs"] * rung["runs"] for rung in found.answer["rungs"])
    assert cost["share"] == pytest.approx(cost["epochs"] / (4 * 20))
    page = found.page.read_text(encoding="utf-8")
    assert found.choice.rule in page and "of training every candidate" in page
    # Models keep their width, and schedules are complete: the warm-up of one epoch in 20 is one of 0.05 in 1.
    first = json.loads((tmp_path / "out" / "rung-1" / "study.json").read_text(encoding="utf-8"))["config"]
    assert first["workloads"] == ["digits-mlp(width=8)"]
    assert "linear+warmup(0.05ep)" in first["rules"]

    again = tournament(tmp_path / "out", seeds=2)
    assert again.answer["ranking"] == ranking
    with pytest.raises(ConfigError, match="holds another tournament; different: candidates"):
        tournament(tmp_path / "out", rates=[1, 2])


@pytest.mark.process
def test_a_budget_that_is_too_small_for_a_step_trains_nothing_and_gives_the_fallback(tmp_path: Path) -> None:
    found = tournament(tmp_path / "out", budget="1ms", epochs=2)
    assert found.choice.decided_by == "fallback"
    assert found.choice.rule == fallback_rule("sgd")
    assert found.choice.note.startswith("The budget of 1 ms is too small to train a single step: starting takes longer")
    assert "The fallback for this kind of optimizer is adascale" in found.choice.note
    assert not list((tmp_path / "out").glob("rung-1/arms/*"))
    # A larger budget goes on in the same folder.
    assert tournament(tmp_path / "out", epochs=2).choice.decided_by == "tournament"


@pytest.mark.process
def test_the_fallback_on_a_single_worker_is_a_rule_that_can_be_trained_there(tmp_path: Path) -> None:
    """Steps of eight samples in one micro-batch, in which AdaScale sees no noise."""
    settings: dict[str, Any] = {"trace": "constant(workers=1)", "epochs": 2, "rules": (), "rates": (1.0, 0.5)}
    found = tournament(tmp_path / "out", budget="1ms", **settings)
    assert (found.choice.decided_by, found.choice.rule) == ("fallback", "sqrt+statewarmup(0.05, by=multiplier)")
    assert found.choice.note.endswith(
        "The best fixed rule is another, but all steps have one micro-batch, in which no noise is seen "
        "(micro_batch=4 or less makes two)."
    )
    config = RunConfig(workload="digits-mlp(width=8)", trace="constant(workers=1)", epochs=1, **found.choice.settings)
    assert train(config, tmp_path / "run").status == "finished"
    # Two micro-batches can be told apart.
    halved = tournament(tmp_path / "halved", budget="1ms", micro_batch=4, **settings)
    assert halved.choice.rule == fallback_rule("sgd") and halved.choice.note.endswith("at 1 times the base rate.")


@pytest.mark.process
def test_where_all_that_can_be_trained_diverges_the_fallback_can_be_trained_too(
    tmp_path: Path, plugin: list[str]
) -> None:
    found = tournament(
        tmp_path / "out", "not-finite", plugins=tuple(plugin), trace="constant(workers=1)", epochs=2,
        rules=["adascale+statewarmup(0.05)", *RULES], rates=[1], optimizer="sgd",
    )  # fmt: skip
    assert found.choice.note.startswith("All 2 candidates diverged")
    assert found.choice.rule == "sqrt+statewarmup(0.05, by=multiplier)"


def test_the_fallback_is_no_rule_that_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fallback(why: str) -> tuple[str, str]:
        return ("sqrt", why) if why else ("adascale", "")

    assert unfinished(monkeypatch, fallback=fallback)._fallback_rule() == ("adascale", "")
    left_out = {Candidate("adascale", 0.25): "it measures nothing"}
    assert unfinished(monkeypatch, fallback=fallback, left_out=left_out)._fallback_rule() == (
        "sqrt", "it measures nothing",
    )  # fmt: skip


@pytest.mark.process
def test_rules_that_cannot_measure_with_one_micro_batch_are_left_out_with_a_sentence(tmp_path: Path) -> None:
    messages: list[str] = []
    found = tournament(
        tmp_path / "out", trace="constant(workers=1)", rules=["adascale+statewarmup(0.05)", *RULES], rates=[1],
        epochs=2, on_progress=lambda progress: messages.append(progress.message),
    )  # fmt: skip
    assert [one["rule"] for one in found.answer["left_out"]] == ["adascale+statewarmup(0.05)"]
    assert "steps of two micro-batches or more" in found.answer["left_out"][0]["why"]
    assert any(text.startswith("adascale+statewarmup(0.05), rate x1 is left out: ") for text in messages)
    assert {row["rule"] for row in found.answer["ranking"]} == set(RULES)


@pytest.mark.process
def test_a_metric_that_is_constant_decides_nothing(tmp_path: Path, plugin: list[str]) -> None:
    found = tournament(tmp_path / "out", "constant-score", plugins=tuple(plugin), epochs=2)
    assert found.choice.decided_by == "fallback"
    assert "The metric score is 0.5 for all" in found.choice.note
    assert found.choice.rule == fallback_rule("adam") == "sqrt+statewarmup(0.05, by=multiplier)"


@pytest.mark.process
def test_candidates_that_all_diverge_give_the_fallback_at_the_lowest_rate(tmp_path: Path, plugin: list[str]) -> None:
    found = tournament(tmp_path / "out", "not-finite", plugins=tuple(plugin), epochs=2)
    assert found.choice.decided_by == "fallback"
    assert found.choice.note.startswith("All 4 candidates diverged within 1 epoch; use a lower base rate")
    assert found.choice.lr == 0.025
    assert {row["status"] for row in found.answer["ranking"]} == {"diverged"}


@pytest.mark.process
def test_a_model_that_cannot_be_built_is_one_error_with_the_reason(tmp_path: Path, plugin: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"no candidate can be trained: .*no such layer"):
        tournament(tmp_path / "out", "broken", plugins=tuple(plugin), epochs=2)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"trace": "constant(workers=0)"}, "has no workers at any time"),
        ({"rules": RULES[:1], "rates": [1]}, "one candidate only"),
        ({"rates": [0, 1]}, "a rate is 0; expected a factor of the base rate above 0"),
        ({"budget": "soon"}, "the budget is 'soon'; expected a time (30min, 2h, 0.5gpuh) or a share (20%)"),
        ({"budget": "-5%"}, "the budget is -5%; expected a time or a share above 0"),
        ({"budget": "0s"}, "the budget is 0s; expected a time or a share above 0"),
        ({"budget": "1gpuh"}, "the device is cpu; give a time, or device='cuda'"),
        ({"seeds": 0}, "seeds is 0; expected"),
        ({"jobs": 0}, "jobs is 0; expected the number of runs at once, 1 or more"),
        ({"rules": ["lineer"]}, "did you mean 'linear'"),
        ({"plan": "steps.csv"}, "counts steps and cannot be shortened"),
        ({"metrc": "loss"}, "unknown setting 'metrc'; did you mean 'metric'"),
    ],
)  # fmt: skip
def test_wrong_input_is_refused_before_anything_runs(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=re.escape(text)):
        tournament(tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


def test_a_gpu_hour_is_an_hour_of_the_one_gpu() -> None:
    assert parse_budget("2gpuh", device="cuda:1") == (7200, None)


@pytest.mark.process
def test_a_share_of_the_full_cost_is_never_exceeded_and_what_is_missing_is_said(tmp_path: Path) -> None:
    # Four candidates of 20 epochs are 80 epochs. Rungs have 1, 3 and 9: all of them cost 4 + 6 + 18 = 28. 15 % are 12:
    # two rungs, 10 epochs, leave 2 for seeds of the first one.
    found = tournament(tmp_path / "out", budget="15%", seeds=2)
    assert [rung["candidates"] for rung in found.answer["rungs"]] == [4, 2]
    assert found.answer["cost"]["epochs"] <= 12
    assert found.answer["cost"]["share"] <= 0.15
    assert any(text.startswith("The next rung, 2 candidates for 9 epochs, takes about 18 epochs (22%)")
               for text in found.answer["more"])  # fmt: skip
    less = tournament(tmp_path / "less", budget="1%")
    assert less.choice.decided_by == "fallback"
    assert "which takes about 2 epochs (2%): that is the least budget" in less.choice.note


def test_a_budget_that_ends_within_further_seeds_says_that_noise_could_have_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Candidate("sqrt", 1.0), Candidate("linear", 1.0)
    values: dict[str, Any] = dict.fromkeys(field.name for field in fields(Tournament) if field.init)
    values |= {"candidates": [first, second], "epochs": 20, "share": 1.0, "most_seeds": 2, "left_out": {}, "more": []}
    one = Tournament(**values)
    one.ended = [{(first, 0): _ArmScore(0.9, 10, 1.0), (second, 0): _ArmScore(0.89, 10, 1.0)}]
    asked: list[Any] = []
    monkeypatch.setattr(Tournament, "_train", lambda self, number, epochs, more: asked.append(more))  # it did not end
    one._add_seeds(0, 1, (1, 3, 9), after=())
    assert asked == [[(first, 1), (second, 1)]]
    (text,) = one.more
    assert text.startswith("Noise could have decided rung 1; the budget ended while another seed of sqrt, rate x1, lin")


def unfinished(monkeypatch: pytest.MonkeyPatch, **state: Any) -> Tournament:
    """A tournament of two candidates and a minute, of which 40 s are spent."""
    values: dict[str, Any] = dict.fromkeys(field.name for field in fields(Tournament) if field.init)
    values |= {"candidates": [Candidate("sqrt", 1.0), Candidate("linear", 1.0)], "budget_s": 60.0, "jobs": 1}
    values |= {"epochs": 20, "began": 60.0, "_before_s": 0.0, "begun": [[]], "ended": [{}], "left_out": {}, "timed": []}
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    return Tournament(**{**values, "_fractions": {}, **state})


def test_the_least_budget_is_estimated_from_how_far_the_runs_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of a run took 30 s, after 10 s of starting: two runs take 10 + 2 x 120 = 250 s. Nine tenths of a budget
    are planned with, and 4 % are left for the end: 250 / (0.9 x 0.96) = 289 s."""
    one = unfinished(monkeypatch, _first_step_s=10.0, _fractions={"first": 0.25})
    assert one._why_undecided(None, (1, 3, 9)) == (
        "The budget of 60.0 s ended before two candidates had trained for 1 epoch, which takes about 4.8 min: that is "
        "the least budget."
    )
    side_by_side = unfinished(monkeypatch, _first_step_s=10.0, _fractions={"first": 0.25}, jobs=2)
    assert side_by_side._least_s(1) == pytest.approx(130 / (0.9 * 0.96))
    assert unfinished(monkeypatch)._least_s(1) is None  # nothing was seen of a run


def test_what_comparing_all_takes_is_more_than_what_was_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of 1, 3 and 9 epochs, at 1 s to start and 2 s an epoch: 2 x (3 + 7 + 19) = 58 s, of which nine tenths
    are planned with, after 10 s of starting, and 4 % are left for the end: (58 / 0.9 + 10) / 0.96 = 77.5 s."""
    one = unfinished(monkeypatch, _first_step_s=10.0, timed=[(1, 2.0, 3.0)])
    assert one._for_all((1, 3, 9)) == "about 77.5 s"
    # At a tenth of that: (5.8 / 0.9 + 10) / 0.96 = 17.1 s would do, but 60 s did not.
    fast = unfinished(monkeypatch, _first_step_s=10.0, timed=[(1, 0.2, 0.3)])
    assert fast._for_all((1, 3, 9)) == "more than 60.0 s"


@pytest.mark.parametrize(
    ("preparing_s", "begun", "late"), [(17.0, [[]], False), (18.0, [[]], True), (18.0, [[1]], False)]
)
def test_no_run_is_begun_if_importing_torch_again_would_take_longer_than_what_is_left(
    preparing_s: float, begun: list[Any], late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 60 s less 4 % for the end, 40 s are spent: 17.6 s are left. A tournament that is continued has runs to end."""
    assert unfinished(monkeypatch, _preparing_s=preparing_s, begun=begun)._too_late_to_begin is late


# A kill ---------------------------------------------------------------------------------------------------------------

COMMAND = [
    "-m", "ebbflow", "choose", "digits-mlp(width=8)", "--trace", TRACE, "--budget", "10min", "--rule", RULES[0],
    "--rule", RULES[1], "--rates", "1", "--seeds", "1", "--epochs", "20", "--jobs", "2", "--json",
]  # fmt: skip


@pytest.mark.process
@pytest.mark.timeout(240)
def test_after_a_kill_the_same_command_keeps_what_was_done_and_ends(tmp_path: Path) -> None:
    command = [sys.executable, *COMMAND, "--out", str(tmp_path / "out")]
    killed = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    waited = time.monotonic()
    while not (begun := list(tmp_path.glob("out/rung-2/arms/*/record.jsonl"))) and time.monotonic() - waited < 120:
        time.sleep(0.02)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    assert begun
    assert not (tmp_path / "out" / "choice.toml").exists()
    ended = {path: path.stat().st_mtime_ns for path in tmp_path.glob("out/rung-1/arms/*/record.jsonl")}
    spent = json.loads((tmp_path / "out" / "choose.json").read_text(encoding="utf-8"))["spent_s"]
    assert len(ended) == 2
    assert spent > 0

    result = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert [rung["runs"] for rung in answer["rungs"]] == [2, 2, 2]
    assert answer["decided_by"] == "tournament"
    assert answer["cost"]["wall_s"] > spent
    assert ended == {path: path.stat().st_mtime_ns for path in ended}


# A model of one's own -------------------------------------------------------------------------------------------------

SCRIPT = """
import torch
import ebbflow

X = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


def mine():
    model = torch.nn.Linear(4, 2)

    def evaluate():
        return {"accuracy": float((model(X).argmax(1) == Y).float().mean())}

    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01),
        "data": torch.utils.data.TensorDataset(X, Y),
        "loss": lambda model, x, y: torch.nn.functional.cross_entropy(model(x), y),
        "evaluate": evaluate,
    }


if __name__ == "__main__":
    found = ebbflow.choose(
        mine, trace="constant(workers=4)", budget="5min", rules=["sqrt", "linear+warmup(1ep)"], rates=[1, 4], seeds=1,
        out="out", base_batch=8, local_batch=4, epochs=6, schedule="cosine", jobs=2,
    )
    model = torch.nn.Linear(4, 2)
    optimizer = ebbflow.ElasticOptimizer.from_choice(found.path, torch.optim.AdamW(model.parameters(), lr=0.01))
    print(found.choice.decided_by, found.answer["metric"], len(found.answer["ranking"]))
    print(optimizer.rule, optimizer.base_batch, optimizer.param_groups[0]["lr"] == found.choice.lr)
"""


@pytest.mark.long
@pytest.mark.process
@pytest.mark.timeout(300)
def test_the_model_of_a_plain_script_is_compared_through_a_session(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    assert first == "tournament accuracy 4"
    rule = read_choice(tmp_path / "out" / "choice.toml").rule
    assert second == f"{rule} 8 True"
    assert not list(tmp_path.glob("out/**/weights.pt"))


def nothing() -> dict[str, Any]:
    return {}


def test_a_function_that_cannot_be_used_is_refused_with_what_is_expected() -> None:
    with pytest.raises(ConfigError, match="define the function at the top level of a module"):
        ebbflow.choose(lambda: {}, trace=TRACE, budget="1min")
    with pytest.raises(ConfigError, match="model, optimizer, data, loss, evaluate are missing"):
        ebbflow.choose(nothing, trace=TRACE, budget="1min")


def test_a_run_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="epochs is missing: complete runs are compared, and a run needs an end"):
        ebbflow.choose(made, trace=TRACE, budget="1min", base_batch=8, local_batch=4)


def made() -> dict[str, Any]:
    import torch

    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer, "data": [], "loss": None, "evaluate": None}
