"""Extensions from one plugin file, each used through the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import ebbflow

PLUGIN = '''
from __future__ import annotations

from dataclasses import dataclass

import torch

from ebbflow import (
    Scaling,
    Trace,
    register_modifier,
    register_optimizer,
    register_policy,
    register_rule,
    register_schedule,
    register_trace,
    register_trace_format,
)
from ebbflow.core.spec import param
from ebbflow.optim.optimizers import OptimizerChoice
from ebbflow.optim.schedules import Schedule
from ebbflow.plan import GrowingPolicy, Policy
from ebbflow.rules import Modifier, Rule


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
'''

TRACE_FILE = "minute;workers\n0;2\n1;4\n2;4\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plugin and a trace file in its format."""
    folder = tmp_path_factory.mktemp("extensions")
    (folder / "plugin.py").write_text(PLUGIN)
    (folder / "trace.txt").write_text(TRACE_FILE)
    return folder


def ebbflow_command(folder: Path, *arguments: str) -> str:
    """Standard output of the command, in a process of its own, so that this process registers nothing."""
    command = [sys.executable, "-m", "ebbflow", *arguments, "--plugin", "plugin.py"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def steps_of(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]
    return [row for row in rows if "multiplier" in row]


def header_of(folder: Path) -> dict[str, dict[str, str]]:
    header: dict[str, dict[str, str]] = json.loads((folder / "record.jsonl").read_text().splitlines()[0])
    return header


def test_rule_modifier_fleet_policy_optimizer_schedule_and_generator_in_one_run(folder: Path) -> None:
    ebbflow_command(
        folder, "train", "digits-mlp", "--rule", "mine(2)+halved", "--policy", "pairs", "--optimizer",
        "plain(momentum=0.5)", "--schedule", "half", "--trace", "stairs(workers=3)", "--epochs", "2", "--lr", "0.1",
        "--ref-batch", "32", "--local-batch", "16", "--out", "one",
    )  # fmt: skip
    rows = steps_of(folder / "one")
    # 3 workers, then 6, in pairs: 2 of them with 32 samples, then 6 with 96; the rule doubles, the modifier halves.
    assert {row["workers"] for row in rows} == {2, 6}
    whole = [row for row in rows if row["batch"] == 16 * row["workers"]]
    assert len(whole) >= len(rows) - 2
    assert all(row["multiplier"] == pytest.approx(row["workers"] / 2) for row in whole)
    assert {(row["epoch"], row["lr_base"]) for row in rows} == {(0, 0.1), (1, 0.05)}
    assert header_of(folder / "one")["plan"]["policy"] == "pairs(16)"
    assert header_of(folder / "one")["plan"]["trace"] == "stairs(workers=3)"


def test_a_growing_policy_follows_a_file_of_an_own_format_and_is_checkpointed(folder: Path) -> None:
    ebbflow_command(
        folder, "train", "digits-mlp", "--policy", "plus(by=2)", "--trace", "trace.txt", "--epochs", "1",
        "--ref-batch", "32", "--local-batch", "64", "--checkpoint-every", "0s", "--out", "two",
    )  # fmt: skip
    rows = steps_of(folder / "two")
    assert [row["batch"] for row in rows[:4]] == [32, 34, 36, 38]
    assert header_of(folder / "two")["plan"]["policy"] == "plus(2, local_batch=64)"


def test_every_command_that_reads_a_trace_knows_the_format(folder: Path) -> None:
    stats = json.loads(ebbflow_command(folder, "trace", "stats", "trace.txt", "--json"))
    assert (stats["min"], stats["max"], stats["duration_s"]) == (2, 4, 120.0)
    ebbflow_command(folder, "trace", "convert", "trace.txt", "canonical.csv", "--format", "minutes")
    assert (folder / "canonical.csv").read_text() == "time_s,accelerators\n0,2\n60,4\n120,4\n"
    assert "2 to 4 workers" in ebbflow_command(folder, "trace", "show", "trace.txt")
    ebbflow_command(folder, "trace", "make", "stairs(workers=2)", "made.csv")
    assert (folder / "made.csv").read_text() == "time_s,accelerators\n0,2\n60,4\n120,4\n"
    planned = ["--samples", "640", "--epochs", "1", "--step-time", "10s", "--local-batch", "32", "--json"]
    summary = json.loads(ebbflow_command(folder, "plan", "trace.txt", *planned, "--policy", "pairs"))
    assert (summary["steps"], summary["batch_max"]) == (8, 128)  # 6 steps of 64 samples, then 2 of 128


def test_rules_lists_and_describes_an_own_rule(folder: Path) -> None:
    assert "mine" in {row["name"] for row in json.loads(ebbflow_command(folder, "rules", "--json"))}
    assert "m is halved." in ebbflow_command(folder, "rules", "show", "halved")


def test_every_register_function_is_public() -> None:
    own = ("rule", "modifier", "policy", "schedule", "optimizer", "trace", "trace_format")
    for kind in own:
        assert f"register_{kind}" in ebbflow.__all__
        assert callable(getattr(ebbflow, f"register_{kind}"))


def test_a_trace_format_with_a_known_name_is_refused() -> None:
    with pytest.raises(ebbflow.EbbflowError, match="the trace format 'canonical' is registered already, by ebbflow"):
        ebbflow.register_trace_format("canonical", matches=lambda file: True)(
            lambda file: ebbflow.Trace.parse("0s:1 1s")
        )
