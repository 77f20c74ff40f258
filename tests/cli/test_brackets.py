"""Names of users are printed as they are: what stands in brackets is no style, and `:smile:` is no emoji."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from cli.answers import Ebbflow
from ebbflow.cli import common
from ebbflow.live.fleet_status import combine, members_table
from ebbflow.live.protocol import ReplicaStatus
from ebbflow.plan.policies import POLICIES
from ebbflow.rules import RULES, rule_entries
from ebbflow.traces import GENERATORS
from ebbflow.workloads import WORKLOADS
from report.written_study import write_record

NAME = r"a [b] \[c] [bold]d :smile:"
"""rich would take `[b]` and `[bold]` for styles, and leave out a backslash in front of a bracket."""
PLACE = Path("runs of [/x]") / NAME
"""As a closing tag without an opening one, `[/x]` would end the command with a MarkupError."""
TRACE = PLACE / f"{NAME}.csv"
STUDY = PLACE / f"{NAME}.toml"
PLUGIN = PLACE / f"{NAME}.py"
NEW = PLACE / "new"
"""A folder that the command makes."""
WORK = ("--samples", 1000, "--epochs", 1, "--local-batch", 10, "--step-time", "1s")
MONEY = ("--spot-price", 1)
POLICY, SHOWN = 'tagged(tag="[/x] [b] :smile:")', "tagged(10, tag=[/x] [b] :smile:)"

PLUGIN_TEXT = r'''
from dataclasses import dataclass

import torch

from ebbflow import Scaling, register_policy, register_rule, register_trace, register_workload
from ebbflow.core.spec import param
from ebbflow.plan import Policy
from ebbflow.rules import Rule
from ebbflow.traces import Trace
from ebbflow.workloads import Recipe, Task, TensorSource


@register_policy("tagged")
@dataclass(frozen=True)
class Tagged(Policy):
    local_batch: int
    tag: str

    def sizes(self, workers):
        return workers, workers * self.local_batch


@register_rule("own", cite="[/x] Author [b] :smile:, a journal")
@dataclass(frozen=True)
class Own(Rule):
    """m = [/x] \\[c] :smile: [b]

    Explained in [/y].
    """

    factor: float = param(1.0, doc="a factor [/z]")

    def scale(self, context, state):
        return Scaling(lr=self.factor), state


@register_trace("two")
def two(tag: str = "[/t]") -> Trace:
    """Two workers [/x] [b]."""
    return Trace.from_points([(0, 2)], end=60)


@register_workload("points", recipe=Recipe(
    ref_batch=32, local_batch=16, lr=0.1, optimizer="sgd", schedule="constant", epochs=1, metric="[/x] [b] :smile:"
))
def points(recipe: Recipe) -> Task:
    """Points [/x] [b]."""
    data = TensorSource(torch.zeros(32, 2), torch.zeros(32, dtype=torch.long))
    return Task(
        model=torch.nn.Linear(2, 2), train=data, valid=data, recipe=recipe,
        scores=lambda model, inputs, targets: {"[/x] [b] :smile:": torch.tensor(1.0)},
    )
'''


@pytest.fixture
def ebbflow(ebbflow: Ebbflow, monkeypatch: pytest.MonkeyPatch) -> Ebbflow:
    """The command, in a folder that has a file of every kind whose name has brackets."""
    rule_entries()  # registers the rules of Ebbflow, which stay
    for registry in (RULES, POLICIES, GENERATORS, WORKLOADS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    PLACE.mkdir(parents=True)
    TRACE.write_text("time_s,accelerators\n0,4\n100,2\n3600,2\n")
    PLUGIN.write_text(PLUGIN_TEXT)
    STUDY.write_text(
        f"name = '{NAME}'\nworkloads = 'digits-mlp'\nrules = 'linear'\n[settings]\nepochs = 1\n"
        f"[traces]\n'{NAME}' = 'constant(workers=4)'\n"
    )
    return ebbflow


def make_job(**members: str) -> Path:
    """The folder of a job without a lighthouse, with replicas that wait for a reason."""
    for member, reason in members.items():
        status = ReplicaStatus(state="finished", time=0.0, step=3, reason=reason)
        path = PLACE / "replicas" / member / "status.json"
        path.parent.mkdir(parents=True)
        path.write_text(status.to_json())
    (PLACE / "fleet.json").write_text(json.dumps({"lighthouse": "127.0.0.1:1"}))
    return PLACE


ANSWERS = {
    "trace show": (("trace", "show", TRACE, "--out", PLACE / "t.svg"), [NAME, f"wrote {PLACE / 't.svg'}"]),
    "trace stats": (("trace", "stats", TRACE), [NAME]),
    "trace convert": (("trace", "convert", TRACE, PLACE / "t.csv"), [f"wrote {PLACE / 't.csv'}: 2 to 4 workers"]),
    "trace make": (("trace", "make", "two", PLACE / "t.csv", "--plugin", PLUGIN), [f"wrote {PLACE / 't.csv'}: 2 to 2"]),
    "simulate": (("simulate", TRACE, *WORK, *MONEY, "--price", 1), [str(TRACE)]),
    "compare": (("compare", TRACE, "0s:2 1h", *WORK, *MONEY), [f"{NAME}.csv"]),
    "whatif": (
        ("whatif", TRACE, *WORK, *MONEY, "--deadline", "1h", "--policy", POLICY, "--plugin", PLUGIN),
        [f"settings: all workers, {SHOWN}\n", f"\nall workers, {SHOWN}"],
    ),
    "plan": (("plan", TRACE, *WORK), [str(TRACE)]),
    "rules": (("rules", "--plugin", PLUGIN), [r"m = [/x] \[c] :smile: [b]", "[/x] Author [b] :smile:"]),
    "rules show": (
        ("rules", "show", "own", "--plugin", PLUGIN, "--out", PLACE / "r.svg"),
        [
            "m = [/x] \\[c] :smile: [b]\n", "Explained in [/y].", "Source:  [/x] Author [b] :smile:, a journal",
            "factor (default 1): a factor [/z]", f"wrote {PLACE / 'r.svg'}",
        ],
    ),
    "rules cards": (("rules", "cards", NEW), [f"pages in {NEW}"]),
    "workloads": (("workloads", "--plugin", PLUGIN), ["Points [/x] [b].", "[/x] [b] :smile:"]),
    "doctor": (("doctor",), ["pip install 'ebbflow[EXTRA]'"]),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "says"), ANSWERS.values(), ids=ANSWERS)
def test_names_in_an_answer_are_printed_in_full(
    ebbflow: Ebbflow, arguments: tuple[object, ...], says: list[str]
) -> None:
    answer = ebbflow(*arguments)
    for text in says:
        assert text in answer.text


def test_the_generators_of_a_plugin_are_listed_with_what_their_text_says(ebbflow: Ebbflow) -> None:
    ebbflow("trace", "stats", "two", "--plugin", PLUGIN)  # registers it, as --list is answered before --plugin is read
    assert "Two workers [/x] [b]." in ebbflow("trace", "make", "--list").text


ERRORS = {
    "a trace": (("trace", "show", PLACE / "no.csv"), str(PLACE / "no.csv")),
    "a trace of train": (("train", "digits-mlp", "--trace", PLACE / "no.csv"), str(PLACE / "no.csv")),
    "a rule": (("train", "digits-mlp", "--trace", "constant(4)", "--rule", "[/x] :smile:"), "[/x] :smile:"),
    "a rule to show": (("rules", "show", "[/x] :smile:"), "unknown rule '[/x] :smile:'"),
    "a study": (("study", PLACE / "no.toml"), f"error: {PLACE / 'no.toml'}: cannot be read"),
    "a report": (("report", PLACE), str(PLACE)),
    "a job": (("status", PLACE), str(PLACE / "fleet.json")),
    "a price": (("simulate", TRACE, *WORK, "--spot-price", "[/x]"), "[/x]"),
    "a plan": (("plan", "--plan", PLACE / "no.txt", *WORK), str(PLACE / "no.txt")),
    "a plugin": (("rules", "--plugin", PLACE / "no.py"), str(PLACE / "no.py")),
    "a recovery": (("compare", TRACE, *WORK, *MONEY, "--recovery", "[/x]"), "[/x]"),
    "a policy": (("whatif", TRACE, *WORK, *MONEY, "--deadline", "1h", "--policy", "[/x]"), "[/x]"),
    "a record": (("profile", "--from", PLACE / "no.jsonl"), str(PLACE / "no.jsonl")),
    "a workload": (("choose", "[/x] :smile:", "--trace", "constant(4)", "--budget", "1min"), "[/x] :smile:"),
    "a script": (("launch", PLACE / "no.py"), str(PLACE / "no.py")),
}


@pytest.mark.parametrize(("arguments", "says"), ERRORS.values(), ids=ERRORS)
def test_names_in_an_error_are_printed_in_full(ebbflow: Ebbflow, arguments: tuple[object, ...], says: str) -> None:
    ebbflow(*arguments).assert_refused("error: ", says)


def test_a_run_prints_its_folder_and_its_metric(ebbflow: Ebbflow) -> None:
    options = ("--plugin", PLUGIN, "--trace", TRACE, "--step-time", "1s", "--out", NEW)
    answer = ebbflow("train", "points", *options)
    for text in (
        "finished after 1 steps", "  [/x] [b] :smile: 1.0000", f"record: {NEW / 'record.jsonl'}\n",
        f"report: ebbflow report '{NEW}'\n",
    ):  # fmt: skip
        assert text in answer.text
    assert f"nothing was trained: {NEW} holds this run" in ebbflow("train", "points", *options).err


def test_the_progress_of_a_run_prints_its_metric(ebbflow: Ebbflow, monkeypatch: pytest.MonkeyPatch) -> None:
    for attribute in ("_force_terminal", "is_interactive"):  # elsewhere the bar is not shown
        monkeypatch.setattr(common.err, attribute, True)
    monkeypatch.setenv("TERM", "xterm")
    options = ("--plugin", PLUGIN, "--trace", TRACE, "--step-time", "1s", "--out", NEW)
    assert "[/x] [b] :smile: 1.0000" in ebbflow("train", "points", *options).err


@pytest.mark.process
def test_a_study_prints_its_name_its_folder_and_its_traces(ebbflow: Ebbflow) -> None:
    answer = ebbflow("study", STUDY, "--jobs", 1)
    assert answer.code == 0, answer.err
    assert f"report: runs/{NAME}/report/index.html\n" in answer.out
    assert NAME in answer.out.partition("report: ")[0], "the trace, in the table"
    again = ebbflow("study", STUDY, "--jobs", 1, "--set", "batch=1", "--out", NEW)
    again.assert_refused(str(STUDY))


def test_a_report_prints_the_names_of_records(ebbflow: Ebbflow) -> None:
    write_record(PLACE / "arms" / "a" / "record.jsonl", last=[0.9], rule="[/r]", workload="[w] [/w]")
    path = write_record(PLACE / "arms" / "b" / "record.jsonl", last=[0.9], rule="[s]", workload="[w] [/w]")
    with path.open("a") as record:
        record.write('{"kind":"step","step":99,"ti')
    answer = ebbflow("report", PLACE, "--target", 0.5)
    for text in ("[w] [/w]", "[/r]", "[s]", f"report: {PLACE / 'report' / 'index.html'}\n"):
        assert text in answer.text
    assert f"warning: {path}" in answer.err


def test_a_status_prints_the_folder_and_what_replicas_say(ebbflow: Ebbflow) -> None:
    answer = ebbflow("status", make_job(**{"r [b] :smile:": "not [/x] [b] :smile:"}))
    assert "\nr [b] :smile:  finished" in answer.text
    assert "\nr [b] :smile:: not [/x] [b] :smile:" in answer.text


def test_a_status_is_literal_on_every_console() -> None:
    status = ReplicaStatus(state="finished", time=0.0, step=3)
    page = io.StringIO()
    Console(file=page, width=100).print(members_table(combine("a:1", None, {"r [b] :smile:": status})))
    assert "r [b] :smile:" in page.getvalue()


def test_a_page_of_a_simulation_says_where_it_was_written(ebbflow: Ebbflow) -> None:
    answer = ebbflow("simulate", TRACE, *WORK, *MONEY, "--price", 1, "--out", NEW)
    assert f"page: {NEW / 'index.html'}\n" in answer.err


def test_a_fitted_step_model_says_where_it_was_written(ebbflow: Ebbflow) -> None:
    record = write_record(PLACE / "record.jsonl", last=[0.9], trace="gpu")
    answer = ebbflow("profile", "--from", record, "--out", PLACE / "p.json")
    assert f"wrote {PLACE / 'p.json'}" in answer.err


CONSOLES: dict[str, Callable[[], Console]] = {"answers": lambda: common.out, "notes": lambda: common.err}


@pytest.mark.parametrize("console", CONSOLES.values(), ids=CONSOLES)
def test_both_consoles_print_text_as_it_is(console: Callable[[], Console], capsys: pytest.CaptureFixture[str]) -> None:
    console().print(NAME, "[/x]", soft_wrap=True)
    captured = capsys.readouterr()
    assert captured.out + captured.err == f"{NAME} [/x]\n"


def test_text_in_a_progress_bar_is_literal() -> None:
    page = io.StringIO()
    console = Console(file=page, width=200)
    with Progress(common.text_column("{task.description}"), console=console) as bar:
        bar.add_task(f"{NAME} [/x]")
    assert f"{NAME} [/x]" in page.getvalue()
