"""A plugin whose methods raise or return something else: one line says what, and an exception names its line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cli.answers import Answer

PLUGIN = '''
from __future__ import annotations

import math
import types
from dataclasses import dataclass

import numpy as np
import torch

from ebbflow import (
    Scaling, Trace, register_engine, register_optimizer, register_policy, register_price, register_rule,
    register_schedule, register_trace, register_trace_format, register_workload,
)
from ebbflow.engines.emulated import LoopEngine
from ebbflow.optim.optimizers import OptimizerChoice
from ebbflow.optim.schedules import Schedule
from ebbflow.plan import GrowingPolicy, Policy
from ebbflow.rules import Rule
from ebbflow.workloads import Recipe, Task, TensorSource

ANSWERS = {"none": None, "nan": math.nan, "inf": math.inf, "minus": -1.0, "text": "much", "pair": (1, 2)}


def give(what):
    return ANSWERS[what]  # "error" is none of them


@register_schedule("bad-schedule")
@dataclass(frozen=True)
class BadSchedule(Schedule):
    what: str
    after: int = 0

    def value(self, progress):
        return give(self.what) if progress.samples >= self.after else 1.0


@register_price("bad-price")
@dataclass(frozen=True)
class BadPrice:
    what: str

    def integral(self, times):
        shapes = {
            "nans": times * math.nan, "infinite": times / np.maximum(3600 - times, 0), "minus": -times,
            "rate": np.full(len(times), 0.5), "short": times[1:], "list": times.tolist(), "texts": times.astype(str),
        }
        return shapes[self.what] if self.what in shapes else give(self.what)


@register_trace("bad-trace")
def bad_trace(what: str):
    return give(what)


@register_trace_format("bad-match", matches=lambda file: file.first_line == "match" and give("error"))
def bad_match(file):
    return None


@register_trace_format("bad-reader", matches=lambda file: file.first_line.startswith("read"))
def bad_reader(file):
    what = file.first_line.partition(";")[2]
    return file.number(None, "time", line=1) if what == "number" else give(what)


@register_optimizer("bad-optimizer")
def bad_optimizer(what: str, at: str = "make"):
    if at == "function":
        return give(what)
    if at == "unknown":
        return OptimizerChoice(make=torch.optim.SGD, settings={"momentumm": 0.9})
    return OptimizerChoice(make=lambda groups, lr: Broken(groups, lr) if at == "step" else give(what), settings={})


class Broken(torch.optim.SGD):
    def step(self, closure=None):
        give("error")


@register_rule("bad-rule")
@dataclass(frozen=True)
class BadRule(Rule):
    what: str
    at: str = "lr"

    def suited(self, *, adaptive):
        return give(self.what) if self.at == "suited" else self

    def follows_slopes(self, state):
        return self.at == "slopes" and give(self.what)

    def scale(self, context, state):
        return Scaling(lr=give(self.what) if self.at == "lr" else 1.0), state


@register_policy("bad-sizes")
@dataclass(frozen=True)
class BadSizes(Policy):
    local_batch: int
    workers: int = 1
    samples: int = 1

    def sizes(self, workers):
        return self.workers * workers, self.samples * workers * self.local_batch


@register_policy("bad-growth")
@dataclass(frozen=True)
class BadGrowth(GrowingPolicy):
    what: str = "none"
    at: str = "stats"
    passive = True

    def requested(self, seen, state):
        return 32, state

    def unchanged_steps(self, seen, batch):
        return give(self.what) if self.at == "unchanged" else 1

    def stats(self, state):
        return give(self.what) if self.at == "stats" else {}


RECIPE = Recipe(ref_batch=32, local_batch=16, lr=0.1, optimizer="sgd", schedule="constant", epochs=1, metric="accuracy")


@register_workload("points", recipe=RECIPE)
def points(recipe: Recipe, what: str = "none", at: str = "") -> Task:
    """Whether a number is above a half."""
    x = torch.linspace(0, 1, 96)[:, None]
    source = TensorSource(x, (x[:, 0] > 0.5).long())
    metric = types.SimpleNamespace(update=lambda model, x, y: None, compute=lambda: give(what))
    if at == "computed":
        metric.compute = lambda: {"accuracy": give(what)}
    parts = {
        "loss": {"loss": lambda model, x, y: give(what)},
        "scores": {"scores": lambda model, x, y: give(what)},
        "metric": {"validation": lambda: give(what)},
        "compute": {"validation": lambda: metric},
        "computed": {"validation": lambda: metric},
    }
    return Task(model=torch.nn.Linear(1, 2), train=source, valid=source, recipe=recipe, **parts.get(at, {}))


def broken(method, what):
    def make(parts):
        engine = LoopEngine(
            parts.model, parts.fetch, parts.loss, parts.plan, samples=parts.samples, seed=parts.seed, needs=parts.needs,
            parameters=parts.parameters,
        )
        setattr(engine, method, lambda *given: give(what))
        return engine

    return make


for method in ("participants", "gradients", "commit"):
    register_engine(f"{method}-error")(broken(method, "error"))
for what in ("error", "none"):
    register_engine(f"make-{what}")(lambda parts, what=what: give(what))
'''
RAISED = "raised KeyError: 'error' (PLUGIN:LINE, in give)"
TRAIN = "train points --trace constant(2) --rule sqrt"
SIMULATE = "simulate 0s:2|10s:4|10h --samples 640 --epochs 1 --local-batch 16 --step-time 10s --price 1 --json"
WHATIF = "whatif 0s:2|10s:4|10h --samples 640 --epochs 1 --local-batch 16 --step-time 10s --deadline 5h --json"
CASES: dict[str, str] = {
    f"{TRAIN} --schedule bad-schedule(error)": f"the schedule bad-schedule(error): value() {RAISED}",
    f"{TRAIN} --schedule warmup(1ep)+bad-schedule(error)": f"the schedule bad-schedule(error): value() {RAISED}",
    f"{TRAIN} --schedule bad-schedule(error,after=33)": f"the schedule bad-schedule(error, after=33): value() {RAISED}",
    **{
        f"{TRAIN} --schedule bad-schedule({what},after=33)": f"value() returned {shown} after 64 samples; expected the "
        f"factor of the base rate, a finite number of 0 or more"
        for what, shown in {"none": "None", "nan": "nan", "inf": "inf", "minus": "-1.0", "text": "'much'"}.items()
    },
    **{
        f"{verb} --spot-price bad-price({what})": message
        for verb in (SIMULATE, WHATIF)
        for what, message in {
            "error": f"the price model BadPrice: integral() {RAISED}",
            "none": "integral() returned None for 3 times; expected an array of as many numbers",
            "text": "integral() returned 'much' for 3 times",
            "short": "for 3 times; expected an array of as many numbers",
            "list": "for 3 times; expected an array of as many numbers",
            "texts": "for 3 times; expected an array of as many numbers",
            "nans": "integral() returned nan USD for 0 s; expected",
            "minus": "integral() returned -10 USD for 10 s after -0 USD for 0 s; expected",
            "rate": "integral() returned 0.5 USD for 0 s; expected the USD that one worker costs from 0 s to each time",
        }.items()
    },
    f"compare 0s:2|10h bad-trace(none) {SIMULATE.partition('h ')[2]} --spot-price 1": "returned a NoneType; expected",
    "trace stats bad-trace(error) --json": f"bad-trace(error) {RAISED}",
    "trace stats bad-trace(pair) --json": "the generator bad-trace(pair) returned a tuple; expected a Trace",
    "train points --rule sqrt --trace bad-trace(none)": "the generator bad-trace(none) returned a NoneType; expected",
    "trace stats match.txt": "match.txt: matches() of the trace format bad-match raised KeyError: 'error' (PLUGIN:LINE",
    "trace stats error.txt": f"error.txt: the reader of the trace format bad-reader {RAISED}",
    "trace stats none.txt": "none.txt: the reader of the trace format bad-reader returned a NoneType; expected a Trace",
    "trace stats number.txt": "the reader of the trace format bad-reader raised TypeError: float() argument must be",
    f"{TRAIN} --optimizer bad-optimizer(none,at=function)": "is a NoneType; expected that its function returns an Opt",
    f"{TRAIN} --optimizer bad-optimizer(error)": f"the optimizer bad-optimizer(error): make() {RAISED}",
    f"{TRAIN} --optimizer bad-optimizer(none)": "make() returned a NoneType; expected a torch.optim.Optimizer",
    f"{TRAIN} --optimizer bad-optimizer(none,at=unknown)": "unexpected keyword argument 'momentumm'",
    f"{TRAIN} --rule bad-rule(text)": "the rule bad-rule(text) returned a Scaling with lr='much' and gradient=1.0",
    f"{TRAIN} --rule bad-rule(none)": "the rule bad-rule(none) returned a Scaling with lr=None and gradient=1.0",
    f"{TRAIN} --rule bad-rule(nan)": "the rule bad-rule(nan) returned the multiplier nan; expected a finite number",
    f"{TRAIN} --rule bad-rule(inf)": "the rule bad-rule(inf) returned the multiplier inf; expected a finite number",
    f"{TRAIN} --rule bad-rule(minus)": "the rule bad-rule(minus) returned the multiplier -1; expected 0 or more",
    f"{TRAIN} --rule bad-rule(none,at=suited)": "bad-rule(none, at=suited): suited() returned None; expected a rule",
    **{
        f"{verb} --policy bad-sizes(workers={workers},samples={samples})": f"sizes() returned {2 * workers} workers "
        f"and {32 * samples} samples for 2 available workers; expected at most as many workers"
        for verb in (TRAIN, f"{SIMULATE} --spot-price 1")
        for workers, samples in ((1, -1), (-1, 1), (2, 1), (0, 1), (1, 0))
    },
    f"{TRAIN} --policy bad-growth(none)": "stats() returned None; expected values by name",
    f"{TRAIN} --policy bad-growth(text,at=unchanged)": "that unchanged_steps() returned is 'much'; expected a whole",
    "train points(none,at=scores) --rule sqrt": "the scores of a batch: found None; expected scores by name",
    "train points(none,at=metric) --rule sqrt": "the validation of the task returned None; expected a metric with",
    "train points(text,at=compute) --rule sqrt": "what the validation metric computed: found 'much'; expected scores",
    "train points(text,at=computed) --rule sqrt": "the validation metric computed accuracy='much'; expected a number",
    f"{TRAIN} --engine make-none": "the function of the engine 'make-none' returned None; expected an Engine",
}
"""Commands, in which | stands for a space, and a part of the message."""
FAILURES = [
    f"{TRAIN} --engine participants-error",
    f"{TRAIN} --engine gradients-error",
    f"{TRAIN} --engine commit-error",
    f"{TRAIN} --engine make-error",
    f"{TRAIN} --optimizer bad-optimizer(none,at=step)",
    f"{TRAIN} --rule bad-rule(error,at=slopes)",
    f"{TRAIN} --policy bad-growth(error)",
    f"{TRAIN} --policy bad-growth(error,at=unchanged)",
    "train points(error,at=loss) --rule sqrt",
    "train points(error,at=scores) --rule sqrt",
    "train points(error,at=metric) --rule sqrt",
    "train points(error,at=compute) --rule sqrt",
]
"""Commands that end with an exception of the plugin in a method that is not called in one place."""
STUDY = """
workloads = ["points(error,at=loss)"]
rules = ["sqrt"]
seeds = 1
[traces]
two = "constant(2)"
"""
RUN_ALL = """
import contextlib, io, json, signal, sys, traceback
from ebbflow.cli import common
from ebbflow.cli.main import main

def over(*_):
    raise TimeoutError("the command does not end")

signal.signal(signal.SIGALRM, over)
answers = []
for number, arguments in enumerate(json.loads(sys.argv[1])):
    sys.argv = ["ebbflow", *arguments, "--plugin", "plugin.py"]
    if arguments[0] == "train":
        sys.argv += ["--out", f"runs/{number}"]
    out, err, code = io.StringIO(), io.StringIO(), 0
    signal.alarm(30)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        except BaseException:
            traceback.print_exc()
            code = -1
    signal.alarm(0)
    answers.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(answers))
"""


def said(text: str, folder: Path) -> str:
    """A message as it is printed, with the file and the line."""
    line = 1 + next(number for number, line in enumerate(PLUGIN.splitlines()) if "ANSWERS[what]" in line)
    return text.replace("PLUGIN", str(folder / "plugin.py")).replace("LINE", str(line))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plugin and files of its formats."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "plugin.py").write_text(PLUGIN)
    (folder / "match.txt").write_text("match\n")
    (folder / "study.toml").write_text(STUDY)
    for what in ("error", "none", "number"):
        (folder / f"{what}.txt").write_text(f"read;{what}\n")
    return folder


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, Answer]:
    """What the commands answer, run one after another in another process, so that this one registers nothing."""
    commands = [*CASES, *FAILURES]
    arguments = [[word.replace("|", " ") for word in command.split()] for command in commands]
    result = subprocess.run(
        [sys.executable, "-c", RUN_ALL, json.dumps(arguments)],
        cwd=folder, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    return {command: Answer(*answer) for command, answer in zip(commands, found, strict=True)}


@pytest.mark.process
@pytest.mark.parametrize("command", CASES)
def test_a_part_of_a_plugin_that_raises_or_returns_something_else_is_named(
    command: str, answers: dict[str, Answer], folder: Path
) -> None:
    answers[command].assert_refused(said(CASES[command], folder))


@pytest.mark.process
@pytest.mark.parametrize("command", FAILURES)
def test_any_other_exception_of_a_plugin_is_one_line_that_names_the_plugin(
    command: str, answers: dict[str, Answer], folder: Path
) -> None:
    answer = answers[command]
    assert answer.code == 1, answer
    assert "Traceback" not in answer.err
    assert said(f"error: a plugin {RAISED}", folder) in answer.err


@pytest.mark.process
def test_an_arm_that_a_plugin_ends_has_the_line_in_its_record(folder: Path) -> None:
    command = [sys.executable, "-m", "ebbflow", "study", "study.toml", "--plugin", "plugin.py", "--out", "study"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    (record,) = folder.glob("study/arms/*/record.jsonl")
    end = json.loads(record.read_text().splitlines()[-1])
    assert (result.returncode, end["status"]) == (1, "failed")
    assert end["text"] == said("KeyError: 'error' (PLUGIN:LINE, in give)", folder)
