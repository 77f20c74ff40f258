"""The command, run in this process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cli.answers import Answer, Ebbflow
from ebbflow.cli import common
from ebbflow.cli.main import main


@pytest.fixture
def ebbflow(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ebbflow:
    """Run the command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["ebbflow", *map(str, arguments)])
        for console in (common.out, common.err):
            monkeypatch.setattr(console, "_width", 10_000)  # one message, one line
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return run
