"""The plugin of CONTRIBUTING.md is loaded, and its commands are run, in this process."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

import ebbflow
from ebbflow.cli.main import app
from ebbflow.record import Run, read_record

PAGE = (Path(__file__).resolve().parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget_plugins: None) -> Path:
    """The current folder, with the plugin of the page and a trace in its format."""
    (plugin,) = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "plugin.py").write_text(plugin, encoding="utf-8")
    (trace,) = re.findall(r"^```\n(minute;workers\n.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "fleet.txt").write_text(trace, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_of(folder: Path) -> Run:
    run = read_record(folder / "record.jsonl")
    assert run.status == "finished"
    return run


def test_the_plugin_registers_something_of_every_kind() -> None:
    for name in ebbflow.__all__:
        if name.startswith("register_"):
            assert f"\n@{name}(" in PAGE or f"\n{name}(" in PAGE


def test_every_command_for_the_plugin_works_and_uses_what_it_registers(folder: Path) -> None:
    commands = [shlex.split(line)[1:] for line in PAGE.splitlines() if line.startswith("ebbflow ")]
    assert [command[0] for command in commands] == ["train", "train", "simulate"]
    for command in commands:
        result = CliRunner().invoke(app, command, catch_exceptions=False)
        assert result.exit_code == 0, result.output
    simulated = json.loads(result.stdout)

    # 3 workers in the first minute and 6 in the second, in pairs: 2 workers with 32 samples, then 6 with 96. The rule
    # gives 1 and 3^(1/3), of which the modifier takes half. After the first epoch the rate is half of 0.1.
    run = run_of(folder / "runs" / "plugin")
    assert run.header.config["emulation"] == {"engine": "OnePass"}
    whole = [row for row in run.steps if row.batch == 16 * row.workers]
    multipliers = {row.workers: row.multiplier for row in whole}
    assert multipliers == pytest.approx({2: 0.5, 6: 3 ** (1 / 3) / 2})
    assert {(row.epoch, row.lr_base) for row in run.steps} == {(0, 0.1), (1, 0.05)}
    assert run.header.config["optimizer"] == "plain-sgd(momentum=0.5)"

    # The trace of its own format has 4 or 8 workers, so that a step may have 64 samples. The first step has the
    # reference batch, and each takes one sample more than the one before.
    run = run_of(folder / "runs" / "growing")
    assert [row.batch for row in run.steps[:3]] == [32, 33, 34]
    assert run.header.trace["workers"] == [4, 8]

    # After the first hour, the workers cost 0.9 USD per hour each.
    assert 0 < simulated["cost_usd"] < 0.9 * 8 * (simulated["time_s"] / 3600 - 1)
