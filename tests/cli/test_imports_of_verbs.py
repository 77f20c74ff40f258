"""Only what draws imports matplotlib and jinja2, which take long to import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

PROGRAM = """
import sys
from ebbflow.cli.main import main
sys.argv = ["ebbflow", *sys.argv[1:]]
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
print([name for name in ("matplotlib", "jinja2") if name in sys.modules])
"""
TRAIN = ["train", "digits-mlp", "--epochs", "1", "--local-batch", "64", "--out", "run"]
SIMULATE = ["simulate", "constant(4)", "--samples", "100", "--epochs", "1", "--local-batch", "5", "--step-time", "1s",
            "--spot-price", "1", "--price", "2"]  # fmt: skip


def imported(arguments: list[str], folder: Path) -> str:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.splitlines()[-1]


@pytest.mark.parametrize("arguments", [TRAIN, SIMULATE, ["study", "--list"]], ids=lambda arguments: arguments[0])
def test_a_verb_that_draws_nothing_imports_no_drawing_library(arguments: list[str], tmp_path: Path) -> None:
    assert imported(arguments, tmp_path) == "[]"


def test_a_page_needs_both(tmp_path: Path) -> None:
    assert imported([*SIMULATE, "--out", "page"], tmp_path) == "['matplotlib', 'jinja2']"
