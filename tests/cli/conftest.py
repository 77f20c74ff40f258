"""The command, run in this process and as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.answers import Answer, Ebbflow
from ebbflow.cli import common
from ebbflow.cli.main import main
from live.fakes import processes_with, until
from report.written_study import study as study


@pytest.fixture
def ebbflow(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ebbflow:
    """Run the command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object, width: int = 10_000) -> Answer:  # with the default a message has one line
        monkeypatch.setattr(sys, "argv", ["ebbflow", *map(str, arguments)])
        for console in (common.out, common.err):
            monkeypatch.setattr(console, "_width", width)
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return run


class Shell:
    """Runs the command as processes, in a folder of its own, with a job in the folder `job`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.job = folder / "job"
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "ebbflow", *map(str, arguments)], cwd=self.folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "COLUMNS": "80"},
        )  # fmt: skip
        self.started.append(process)
        return process

    def run(self, *arguments: object, timeout_s: float = 120) -> Answer:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=timeout_s)
        assert "Traceback" not in err
        return Answer(process.returncode, out, err)

    def status(self, replica: str) -> dict[str, Any]:
        """The status file of a replica of the job."""
        try:
            body = json.loads((self.job / "replicas" / replica / "status.json").read_text())
        except (FileNotFoundError, ValueError):
            return {"step": 0, "state": ""}
        assert isinstance(body, dict)
        return body

    def training(self, *replicas: str) -> bool:
        return all(self.status(r)["state"] == "training" and self.status(r)["step"] > 2 for r in replicas)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """Start the command as a process; nothing of its job is left when the test ends."""
    shell = Shell(tmp_path)
    yield shell
    for process in shell.started:
        process.kill()
        process.communicate()
    until(lambda: not processes_with(f"{tmp_path}/job"))  # lighthouses and replicas alike, which die with the launcher
