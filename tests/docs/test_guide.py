"""The guide as a new user follows it: files are written and commands are run in the order of the page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """With the `ebbflow` and `python` of this environment first on the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-ec", command], cwd=folder, env={**os.environ, "PATH": path, "COLUMNS": "80"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


def follow(page: Path, folder: Path) -> int:
    commands = 0
    for language, name, body in BLOCK.findall(page.read_text(encoding="utf-8")):
        if name:
            (folder / name).write_text(body, encoding="utf-8")
        elif language == "sh":
            for command in body.strip().splitlines():
                result = run(command, folder)
                assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
                assert "Traceback" not in result.stderr
                commands += 1
    return commands


def test_every_command_of_the_page_on_the_quadratic_model_works(tmp_path: Path) -> None:
    assert follow(ROOT / "docs" / "quadratic.md", tmp_path) >= 2


@pytest.mark.timeout(600)  # two tournaments, on whatever machine this is
def test_every_command_of_the_page_about_choosing_works(tmp_path: Path) -> None:
    assert follow(ROOT / "docs" / "choose.md", tmp_path) >= 4
    assert (tmp_path / "runs" / "choose" / "report" / "index.html").is_file()
    assert (tmp_path / "runs" / "own" / "choice.toml").is_file()


@pytest.mark.timeout(900)  # the demo, a study and a dozen starts of the command, on whatever machine this is
def test_every_command_of_the_guide_works(tmp_path: Path) -> None:
    assert follow(ROOT / "docs" / "guide.md", tmp_path) >= 15
    assert (tmp_path / "runs" / "study" / "report" / "index.html").is_file()
    assert (tmp_path / "mine.svg").is_file()
    assert (tmp_path / "ebbflow-demo" / "report" / "index.html").is_file()
