"""One plugin file registers an extension of every kind, and every verb that can use one is run with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ebbflow as ebbflow_package
from cli.answers import Ebbflow
from cli.conftest import Shell
from ebbflow import EbbflowError, Trace, register_trace_format

PLUGIN = '''
from __future__ import annotations

from dataclasses import dataclass

import torch

from ebbflow import (
    Scaling,
    Trace,
    register_engine,
    register_modifier,
    register_notice,
    register_optimizer,
    register_policy,
    register_price,
    register_rule,
    register_schedule,
    register_trace,
    register_trace_format,
    register_workload,
)
from ebbflow.core.preemption import NoticeSource
from ebbflow.core.spec import param
from ebbflow.engines.emulated import LoopEngine
from ebbflow.optim.optimizers import OptimizerChoice
from ebbflow.optim.schedules import Schedule
from ebbflow.plan import GrowingPolicy, Policy
from ebbflow.rules import Modifier, Rule
from ebbflow.workloads import Recipe, Task, TensorSource


@register_rule("mine", cite="this test")
@dataclass(frozen=True)
class Mine(Rule):
    """m = x B/B0."""

    x: float = param(1.0, doc="a factor")

    def scale(self, context, state):
        return Scaling(lr=self.x * context.ratio), state


@register_modifier("halved", cite="this test")
@dataclass(frozen=True)
class Halved(Modifier):
    """m is halved."""

    def modify(self, context, scaling, state):
        return scaling.map_lr(lambda m: m / 2), state


@register_policy("pairs", cite="this test")
@dataclass(frozen=True)
class Pairs(Policy):
    """Workers take part in pairs."""

    local_batch: int

    def sizes(self, workers):
        used = workers - workers % 2
        return used, used * self.local_batch


@register_policy("plus", cite="this test")
@dataclass(frozen=True)
class Plus(GrowingPolicy):
    """One more sample per step."""

    by: int = param(1, doc="samples")

    passive = True

    def requested(self, seen, state):
        return self.first_batch(seen) + self.by * seen.step, state


@register_schedule("half", cite="this test")
@dataclass(frozen=True)
class Half(Schedule):
    """Half of the base rate after the first epoch."""

    def value(self, progress):
        return 0.5 if progress.samples >= progress.epoch_samples else 1.0


@register_optimizer("plain", cite="this test")
def plain(momentum: float = 0.0) -> OptimizerChoice:
    """SGD under another name."""
    return OptimizerChoice(make=torch.optim.SGD, settings={"momentum": momentum})


@register_trace("stairs", cite="this test")
def stairs(workers: int, steps: int = 2) -> Trace:
    """As many workers more in each minute."""
    return Trace.from_points([(60 * i, workers * (i + 1)) for i in range(steps)], end=60 * steps)


@register_trace_format("minutes", matches=lambda file: file.first_line == "minute;workers", cite="this test")
def minutes(file):
    rows = [line.split(";") for line in file.text.splitlines()[1:]]
    return Trace.from_points([(60 * file.number(a, "minute", line=1), file.count(b, line=1)) for a, b in rows])


@register_price("first-minute-free", cite="this test")
@dataclass(frozen=True)
class FirstMinuteFree:
    """USD per hour of one worker after the first minute."""

    usd: float

    def integral(self, times):
        return self.usd * (times - 60).clip(min=0) / 3600


@register_notice("never", cite="this test")
@dataclass
class Never(NoticeSource):
    """This machine stays."""

    def check(self):
        return None


RECIPE = Recipe(ref_batch=32, local_batch=16, lr=0.1, optimizer="sgd", schedule="constant", epochs=2, metric="accuracy")


@register_workload("halves", recipe=RECIPE, cite="this test")
def halves(recipe: Recipe, samples: int = 640) -> Task:
    """Whether a number is above a half."""
    x = torch.linspace(0, 1, samples)[:, None]
    source = TensorSource(x, (x[:, 0] > 0.5).long())
    return Task(model=torch.nn.Linear(1, 2), train=source, valid=source, recipe=recipe)


class Counted(LoopEngine):
    def describe(self):
        return {"engine": "counted", "samples": self.samples}


@register_engine("counted", cite="this test")
def counted(parts):
    """The loop, under another name."""
    return Counted(
        parts.model, parts.fetch, parts.loss, parts.plan, samples=parts.samples, seed=parts.seed, needs=parts.needs,
        parameters=parts.parameters,
    )
'''

TRACE_FILE = "minute;workers\n0;2\n1;4\n2;4\n"
STUDY = """
workloads = ["halves"]
rules = ["mine", "mine(2)+halved"]
seeds = 1
[traces]
own = "stairs(workers=2)"
[settings]
epochs = 1
optimizer = "plain"
schedule = "half"
policy = "pairs"
engine = "counted"
"""
TRAINING = ("--rule", "mine(2)+halved", "--optimizer", "plain(momentum=0.5)", "--schedule", "half")
WORK = ("--samples", "640", "--epochs", "1", "--step-time", "10s", "--local-batch", "32")
SPOT = ("--spot-price", "first-minute-free(36)", "--policy", "pairs")
MONEY = (*SPOT, "--price", "72")
COMMANDS: dict[str, tuple[str, ...]] = {
    "all at once": (
        "train", "halves", *TRAINING, "--policy", "pairs", "--engine", "counted", "--trace", "stairs(workers=3)",
        "--out", "one", "--json",
    ),
    "growing": (
        "train", "halves(samples=1000)", "--policy", "plus(by=2)", "--trace", "trace.txt", "--epochs", "1",
        "--local-batch", "64", "--checkpoint-every", "0s", "--out", "two",
    ),
    "stats": ("trace", "stats", "trace.txt", "--json"),
    "show": ("trace", "show", "trace.txt"),
    "convert": ("trace", "convert", "trace.txt", "canonical.csv", "--format", "minutes"),
    "make": ("trace", "make", "stairs(workers=2)", "made.csv"),
    "plan": ("plan", "trace.txt", *WORK, "--policy", "pairs", "--json"),
    "simulate": ("simulate", "trace.txt", *WORK, *MONEY, "--json"),
    "compare": ("compare", "trace.txt", "stairs(workers=2)", *WORK, *MONEY, "--json"),
    "whatif": ("whatif", "trace.txt", "--budget", "100", *WORK, *SPOT, "--json"),
    "profile": ("profile", "halves", "--rule", "mine", "--local-batch", "8", "--steps", "2", "--json"),
    "rules": ("rules", "--json"),
    "rule": ("rules", "show", "halved"),
    "cards": ("rules", "cards", "pages"),
    "workloads": ("workloads", "--json"),
    "study": ("study", "study.toml", "--out", "study", "--jobs", "1", "--json"),
}  # fmt: skip
RUN_ALL = """
import contextlib, io, json, sys
from ebbflow.cli.main import main

answers = {}
for name, arguments in json.loads(sys.argv[1]).items():
    sys.argv = ["ebbflow", *arguments, "--plugin", "plugin.py"]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
    answers[name] = [code, out.getvalue(), err.getvalue()]
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plugin, a trace file in its format and a study."""
    folder = tmp_path_factory.mktemp("extensions")
    (folder / "plugin.py").write_text(PLUGIN)
    (folder / "trace.txt").write_text(TRACE_FILE)
    (folder / "study.toml").write_text(STUDY)
    return folder


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, str]:
    """What all commands print, run one after another in another process, so that this one registers nothing."""
    command = [sys.executable, "-c", RUN_ALL, json.dumps(COMMANDS)]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr
    found: dict[str, tuple[int, str, str]] = json.loads(result.stdout.splitlines()[-1])
    assert {name: err for name, (code, _, err) in found.items() if code != 0} == {}
    return {name: out for name, (_, out, _) in found.items()}


def rows_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return rows_of(folder, "step")


def header_of(folder: Path) -> dict[str, Any]:
    (header,) = rows_of(folder, "header")
    return header


@pytest.mark.process
def test_workload_engine_rule_modifier_policy_optimizer_schedule_and_generator_in_one_run(
    folder: Path, answers: dict[str, str]
) -> None:
    assert json.loads(answers["all at once"])["status"] == "finished"
    rows = steps_of(folder / "one")
    # 3 workers, then 6, in pairs: 2 of them with 32 samples, then 6 with 96; the rule doubles, the modifier halves.
    assert {row["workers"] for row in rows} == {2, 6}
    whole = [row for row in rows if row["batch"] == 16 * row["workers"]]
    assert len(whole) >= len(rows) - 2
    assert all(row["multiplier"] == pytest.approx(row["workers"] / 2) for row in whole)
    assert {(row["epoch"], row["lr_base"]) for row in rows} == {(0, 0.1), (1, 0.05)}
    header = header_of(folder / "one")
    assert header["plan"]["policy"] == "pairs(16)"
    assert header["plan"]["trace"] == "stairs(workers=3)"
    assert header["config"]["emulation"] == {"engine": "counted", "samples": 640}


@pytest.mark.process
def test_a_growing_policy_follows_a_file_of_an_own_format_and_is_checkpointed(
    folder: Path, answers: dict[str, str]
) -> None:
    rows = steps_of(folder / "two")
    assert [row["batch"] for row in rows[:4]] == [32, 34, 36, 38]
    assert header_of(folder / "two")["plan"]["policy"] == "plus(2, local_batch=64)"


@pytest.mark.process
def test_every_command_that_reads_a_trace_knows_the_format(folder: Path, answers: dict[str, str]) -> None:
    stats = json.loads(answers["stats"])
    assert (stats["min"], stats["max"], stats["duration_s"]) == (2, 4, 120.0)
    assert (folder / "canonical.csv").read_text() == "time_s,accelerators\n0,2\n60,4\n120,4\n"
    assert "2 to 4 workers" in answers["show"]
    assert (folder / "made.csv").read_text() == "time_s,accelerators\n0,2\n60,4\n120,4\n"
    summary = json.loads(answers["plan"])
    assert (summary["steps"], summary["batch_max"]) == (8, 128)  # 6 steps of 64 samples, then 2 of 128


@pytest.mark.process
def test_an_own_price_is_paid_in_every_simulation(answers: dict[str, str]) -> None:
    # 80 s, of which the last 20 are paid, with 4 workers at 36 USD per hour.
    simulated = json.loads(answers["simulate"])
    assert (simulated["time_s"], simulated["cost_usd"]) == (80.0, pytest.approx(0.8))
    assert [one["cost_usd"] for one in json.loads(answers["compare"])[:2]] == pytest.approx([0.8, 0.8])
    assert json.loads(answers["whatif"])["cost_usd"] == pytest.approx(0.8)


@pytest.mark.process
def test_own_rules_and_workloads_are_listed_described_and_measured(folder: Path, answers: dict[str, str]) -> None:
    assert {"mine", "halved"} <= {row["name"] for row in json.loads(answers["rules"])}
    assert "m is halved." in answers["rule"]
    assert (folder / "pages" / "mine.md").is_file()
    assert "halves" in {row["name"] for row in json.loads(answers["workloads"])}
    assert [one["samples"] for one in json.loads(answers["profile"])["measured"]] == [8]


@pytest.mark.process
def test_a_study_compares_own_rules_on_an_own_workload(answers: dict[str, str]) -> None:
    cells = json.loads(answers["study"])["cells"]
    assert {(cell["workload"], cell["trace"], cell["rule"]) for cell in cells} == {
        ("halves", "own", "mine"), ("halves", "own", "mine(2)+halved"),
    }  # fmt: skip
    assert all(cell["mean"] is not None for cell in cells)


@pytest.mark.process
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "verb",
    [("launch",), ("replay", "stairs(workers=1, steps=1)", "--finish", "--speed", "30")],
    ids=lambda verb: verb[0],
)
def test_replicas_load_the_plugin(verb: tuple[str, ...], folder: Path) -> None:
    pytest.importorskip("torchft", reason="the live extra is not installed")
    training = ("halves", *TRAINING, "--notice", "never", "--plugin", "plugin.py")
    command = [*verb, "--workload", *training, "--out", verb[0], "--json"]
    result = subprocess.run(
        [sys.executable, "-m", "ebbflow", *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    account = json.loads(result.stdout)
    assert (account["status"], account["epochs"], account["exactly_once"]) == ("finished", 2, True)
    rows = steps_of(folder / verb[0] / "replicas" / "r0")
    assert {(row["epoch"], row["lr_base"]) for row in rows} == {(0, 0.1), (1, 0.05)}
    assert {row["multiplier"] for row in rows} == {0.5}  # 16 of 32 samples, doubled and halved


POINTS = """\
import torch
from torch import nn

from ebbflow import register_workload
from ebbflow.workloads import Recipe, Task, TensorSource

RECIPE = Recipe(ref_batch=4, local_batch=2, lr=0.1, optimizer="sgd", schedule="constant", epochs=1, metric="loss")


@register_workload("line", recipe=RECIPE)
def line(recipe: Recipe, samples: int = 8) -> Task:
    "Points on a line."
    source = points(samples)
    return Task(model=nn.Linear(1, 2), train=source, valid=source, recipe=recipe)


def points(samples):
    return TensorSource(torch.linspace(0, 1 / samples, samples)[:, None], torch.arange(samples) % 2)
"""


BROKEN = """
from dataclasses import dataclass
from ebbflow import register_policy, register_rule
from ebbflow.plan import GrowingPolicy, Policy
from ebbflow.rules import Rule


@register_rule("broken")
@dataclass(frozen=True)
class Broken(Rule):
    def scale(self, context, state):
        return context.nothing, state


@register_policy("shrinking")
@dataclass(frozen=True)
class Shrinking(GrowingPolicy):
    def requested(self, seen, state):
        return 64 // seen.batch, state


@register_policy("uneven")
@dataclass(frozen=True)
class Uneven(Policy):
    local_batch: int

    def sizes(self, workers):
        return workers, workers * self.batch


@register_policy("half")
@dataclass(frozen=True)
class Half(Policy):
    def sizes(self, workers):
        return workers, workers * 0.5
"""


@pytest.mark.process
def test_an_error_in_a_rule_or_policy_of_a_plugin_names_the_line_of_the_plugin(shell: Shell) -> None:
    plugin = shell.folder / "broken.py"
    plugin.write_text(BROKEN)
    lines = BROKEN.splitlines()
    options = ("train", "digits-mlp", "--plugin", "broken.py", "--epochs", "1", "--out", "run")
    rule = lines.index("        return context.nothing, state") + 1
    shell.run(*options, "--rule", "broken").assert_refused(
        f"broken: scale() raised AttributeError: 'StepContext' object has no attribute 'nothing' ({plugin}:{rule}, in "
    )
    policy = lines.index("        return 64 // seen.batch, state") + 1
    shell.run(*options, "--rule", "linear", "--policy", "shrinking").assert_refused(
        f"requested() raised ZeroDivisionError: integer division or modulo by zero ({plugin}:{policy}, in requested)"
    )
    uneven = lines.index("        return workers, workers * self.batch") + 1
    planned = ("plan", "0s:3 1h", "--plugin", "broken.py", "--samples", 99, "--epochs", 1, "--step-time", "1s")
    for command in ((*options, "--rule", "linear"), (*planned, "--local-batch", 32)):
        shell.run(*command, "--policy", "uneven").assert_refused(
            f"sizes() raised AttributeError: 'Uneven' object has no attribute 'batch' ({plugin}:{uneven}, in sizes)"
        )
        shell.run(*command, "--policy", "half").assert_refused("half: sizes() returned (array(", "integer arrays")


@pytest.mark.process
def test_an_error_in_a_workload_of_a_plugin_names_the_line_of_the_plugin(shell: Shell) -> None:
    plugin = shell.folder / "my_line.py"
    plugin.write_text(POINTS)
    options = ("--plugin", "my_line.py", "--trace", "constant(workers=2)", "--out", "run")
    line = POINTS.splitlines().index("    return " + POINTS.rpartition("return ")[2].strip()) + 1
    shell.run("train", "line(samples=0)", *options).assert_refused(
        f"the workload 'line' cannot be built: ZeroDivisionError: division by zero ({plugin}:{line}, in points)"
    )
    assert shell.run("train", "line", *options).code == 0
    assert (shell.folder / "run" / "record.jsonl").is_file()


def test_a_script_loads_its_plugins_itself(tmp_path: Path, ebbflow: Ebbflow) -> None:
    pytest.importorskip("torchft", reason="the live extra is not installed")
    Path("mine.py").write_text("")
    answer = ebbflow("launch", "--plugin", "mine.py", "mine.py")
    assert answer.code == 2
    assert "--plugin belongs to --workload; a script imports its plugins itself" in answer.err


def test_a_kind_of_extension_that_can_be_registered_is_in_the_plugin() -> None:
    kinds = [name for name in ebbflow_package.__all__ if name.startswith("register_")]
    assert len(kinds) == 11
    assert all(f"@{kind}(" in PLUGIN for kind in kinds)


def test_a_trace_format_with_a_known_name_is_refused() -> None:
    with pytest.raises(EbbflowError, match="the trace format 'canonical' is registered already, by ebbflow"):
        register_trace_format("canonical", matches=lambda file: True)(lambda file: Trace.parse("0s:1 1s"))
