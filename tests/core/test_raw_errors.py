"""Wrong arguments in Python: what was found, what was expected and what to do, instead of an error from within."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import ebbflow
from ebbflow import workloads
from ebbflow.core.plugins import load_plugins
from ebbflow.data.permutation import Permutation
from ebbflow.data.sampler import ElasticSampler
from ebbflow.errors import (
    ConfigError,
    DataError,
    EbbflowError,
    PlanError,
    SpecError,
    TraceError,
)
from ebbflow.plan import BatchPlan, fit_step_time, make_policy
from ebbflow.record import read_record
from ebbflow.report.results import load_results
from ebbflow.rules.rule import make_rule
from ebbflow.run.config import RunConfig
from ebbflow.run.training import train
from ebbflow.simulate.prices import read_prices
from ebbflow.simulate.profiles import read_profile
from ebbflow.studies.grid import load_study, recipe_names
from ebbflow.traces import Trace, load, read, write

TRACE = Trace.parse("0s:4 60s:2 120s")
PLAN = BatchPlan.from_trace(TRACE, "follow(4)", "1s")
MANY = 10**20
DATA = TensorDataset(torch.zeros(40, 1), torch.zeros(40, 1))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield torch.zeros(1), torch.zeros(1)


def session(data: Any = DATA, **settings: Any) -> ebbflow.Session:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ebbflow.Session(model, optimizer, data, **{"epochs": 1, "base_batch": 4, "local_batch": 2, **settings})


CASES: dict[str, tuple[Callable[[], Any], type[EbbflowError], str]] = {
    "plan as text": (lambda: ElasticSampler(10, "spot.csv"), ConfigError,
                     r"the plan is 'spot\.csv'; expected a BatchPlan, such as BatchPlan\.from_trace"),
    "trace for a plan": (lambda: ElasticSampler(10, TRACE), ConfigError, r"the plan is Trace\(.*; expected a Batch"),
    "plan of a session": (lambda: session(plan=PLAN), ConfigError, r"plan is BatchPlan\(.*\); expected a text$"),
    "policy as a number": (lambda: BatchPlan.from_trace(TRACE, 32, "1s"), SpecError,
                           r"the policy is 32; expected a text or a policy: 'follow\(32\)' for 32 samples per worker"),
    "no policy": (lambda: make_policy(None), SpecError, "the policy is None; expected a text"),
    "policy of a session": (lambda: session(policy=32), ConfigError, r'expected a text: "fixed\(32\)" for 32 samples'),
    "rule as a number": (lambda: make_rule(5), SpecError, "found 5; expected a text: a name such as 'linear'"),
    "workload as a number": (lambda: workloads.build(5), SpecError, "found 5; expected a text"),
    "trace as a number": (lambda: load(8), TraceError, "the trace is 8; expected a Trace, a file, or a text"),
    "no step time": (lambda: BatchPlan.from_trace(TRACE, "follow(4)", None), PlanError,
                     "the step time is None; expected '0.6s'"),
    "stream for a sampler": (lambda: ElasticSampler(Stream(), PLAN), ConfigError,
                             "the data is Stream; expected a map-style data set, with __len__ and __getitem__"),
    "stream for a session": (lambda: session(Stream()), ConfigError, "Stream is no map-style data set; expected"),
    "samples as text": (lambda: ElasticSampler("abc", PLAN), ConfigError, "the data is str; expected a map-style"),
    "samples as a fraction": (lambda: ElasticSampler(1e3, PLAN), DataError,
                              "the number of samples is 1000.0; expected a whole number from 1 to 1,099,511,627,776"),
    "10^20 samples": (lambda: ElasticSampler(MANY, PLAN), DataError, "number of samples is 1000.*expected a whole"),
    "10^20 in an order": (lambda: Permutation(MANY, 0, 0), DataError, r"expected 1 to 2\^40"),
    "10^20 in a plan": (lambda: BatchPlan.constant(2, 4).for_epochs(MANY, 1), PlanError, "samples is 1000.*expected a"),
    "10^20 to fit": (lambda: fit_step_time(TRACE, "follow(4)", samples=MANY, epochs=1), PlanError, "samples is 1000"),
    "10^20 epochs": (lambda: PLAN.for_epochs(10, MANY), PlanError, "epochs is 1000.*expected a whole number from 1"),
    "10^20 in a step": (lambda: BatchPlan.constant(2, MANY), PlanError, "samples is 1000.*expected a whole number"),
    "10^20 for a worker": (lambda: make_policy(f"follow({MANY})"), PlanError, "follow: local_batch is 1000.*expected"),
    "10^20 to grow to": (lambda: make_policy(f"geo(60ep, max_batch={MANY})"), PlanError, "max_batch is 1000.*expected"),
    "10^20 workers": (lambda: ElasticSampler(10, MANY, local_batch=2), PlanError, "workers is 1000.*expected a whole"),
    "local batch NaN": (lambda: ElasticSampler(10, 2, local_batch=math.nan), ConfigError, "local_batch is nan; expect"),
    "rank as text": (lambda: ElasticSampler(10, PLAN, rank="0"), ConfigError, "rank is '0'; expected a whole number"),
    "rank too large": (lambda: ElasticSampler(10, PLAN, rank=2, world_size=2), ConfigError, "rank is 2; .* from 0 to"),
    "seed as text": (lambda: ElasticSampler(10, PLAN, seed="x"), ConfigError, "seed is 'x'; expected a whole number"),
    "seed of a workload": (lambda: workloads.build("digits-mlp", seed="x"), ConfigError, "seed is 'x'; expected a"),
    "seed of a session": (lambda: session(seed="x"), ConfigError, "seed is 'x'; expected a whole number"),
    "seed 2^70": (lambda: RunConfig(workload="digits-mlp", seed=2**70), ConfigError,
                  "seed is 1180591620717411303424; expected a whole number below 9,223,372,036,854,775,807"),
    "seed 2^70 of a workload": (lambda: workloads.build("digits-mlp", seed=2**70), ConfigError, "seed is 1180.*expect"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_argument_is_named_with_what_was_expected(name: str) -> None:
    call, kind, message = CASES[name]
    with pytest.raises(kind, match=message):
        call()


def test_numbers_of_numpy_are_whole_numbers() -> None:
    sampler = ElasticSampler(np.int64(10), PLAN, local_batch=np.int32(2), seed=np.int64(3))
    assert len(list(sampler)) == 5


RECIPE = 'Recipe(ref_batch=8, local_batch=4, lr=0.1, optimizer="sgd", schedule="constant", epochs=1, metric="loss")'
PLUGIN = f"""
import torch
from torch import nn
import ebbflow
from ebbflow.workloads import Recipe, Task, TensorSource

x = torch.zeros(8, 1)

def task(model=None, loss=None):
    return Task(model=model, train=TensorSource(x, x), valid=TensorSource(x, x), loss=loss)

@ebbflow.register_workload("test-wrong", recipe={RECIPE})
def wrong(kind: str = "") -> Task:
    if kind == "class":
        return task(nn.Linear)
    if kind == "loss":
        return task(nn.Linear(1, 1), loss=0.5)
    return task(nn.Linear("one", 1))
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A plugin whose workload cannot be built; it is forgotten after the test."""
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    monkeypatch.setattr(workloads.WORKLOADS, "_entries", dict(workloads.WORKLOADS._entries))
    before = set(sys.modules)
    load_plugins([str(path)])
    yield path
    for name in {name for name in sys.modules if name.startswith("ebbflow_plugin_")} - before:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("kind", "message", "line"),
    [
        ("", "TypeError: empty", 18),
        ("class", "the model is <class '.*Linear'>; expected an instance of torch.nn.Module", 10),
        ("loss", r"loss, scores or validation is 0\.5; expected a function", 10),
    ],
)
def test_an_error_in_the_builder_of_a_plugin_names_the_users_own_line(
    kind: str, message: str, line: int, plugin: Path, tmp_path: Path
) -> None:
    config = RunConfig(workload=f"test-wrong(kind={kind})" if kind else "test-wrong", plugins=(str(plugin),))
    with pytest.raises(ConfigError, match=rf"'test-wrong' cannot be built: .*{message}.*\({plugin}:{line}, in "):
        train(config, tmp_path / "run")


def test_an_error_in_a_plugin_itself_names_the_users_own_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import math\n\n\ndef lookup():\n    return undefined\n\n\nlookup()\n")
    with pytest.raises(ConfigError, match=rf"NameError: name 'undefined' is not defined \({path}:5, in lookup\)"):
        load_plugins([str(path)])


def test_two_sessions_into_one_folder_are_refused(tmp_path: Path) -> None:
    with session(out=tmp_path / "run"), pytest.raises(ConfigError, match="another run is writing into"):
        session(out=tmp_path / "run").__enter__()


def test_a_trace_is_repeated_without_end_if_asked_for() -> None:
    once = BatchPlan.from_trace(TRACE, "follow(4)", "1s")
    plan = BatchPlan.from_trace(TRACE, "follow(4)", "1s", repeat=True, offset="30s")
    assert once.steps == 120
    assert plan.steps is not None and plan.steps >= 9_999_000
    assert [plan.at(step).workers for step in (0, 29, 30, 89, 90, 149, 150, 120 * 8000)] == [4, 4, 2, 2, 4, 4, 2, 4]
    sampler = ElasticSampler(1000, plan)
    loader = DataLoader(TensorDataset(torch.arange(1000)), batch_sampler=sampler)
    for epoch in range(5):  # a plan of 120 steps has 1440 samples
        sampler.set_epoch(epoch)
        assert sorted(int(i) for (rows,) in loader for i in rows) == list(range(1000))


def test_a_trace_that_changes_all_the_time_is_repeated_within_bounds() -> None:
    busy = Trace.from_points([(i, 1 + i % 2) for i in range(2001)])
    plan = BatchPlan.from_trace(busy, "follow(1)", "1s", repeat=True)
    assert plan.steps is not None and 1_000_000 <= plan.steps < 1_010_000


def test_files_are_read_from_paths_given_as_text(tmp_path: Path) -> None:
    write(TRACE, str(tmp_path / "spot.csv"))
    assert read(str(tmp_path / "spot.csv")) == load(str(tmp_path / "spot.csv")) == TRACE
    (tmp_path / "plan.csv").write_text("step,batchsize\n0,8\n1,8\n")
    assert BatchPlan.read(str(tmp_path / "plan.csv"), 4).steps == 2
    train(RunConfig(workload="digits-mlp(width=4)", epochs=1), str(tmp_path / "run"))
    assert read_record(str(tmp_path / "run" / "record.jsonl")).status == "finished"
    assert load_results(str(tmp_path / "run")).arms[0].status == "finished"
    (tmp_path / "prices.csv").write_text("time_s,usd_per_hour\n0,1\n3600,2\n")
    assert read_prices(str(tmp_path / "prices.csv")).end == 3600
    (tmp_path / "profile.json").write_text(
        '{"per_update_s": 0, "per_step_s": 1, "per_sample_s": 1, "network": null, "piece": null, "serial": false}'
    )
    assert read_profile(str(tmp_path / "profile.json")).per_step == 1
    assert load_study(Path(recipe_names()[0])).arms()
